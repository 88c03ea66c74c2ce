"""The organisations' own budgets: over runs and askers, through kills anywhere, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import long

from sectorch import files
from sectorch.dp import BudgetExhaustedError, BudgetFile, BudgetFileError, BudgetInUseError, epsilon_of
from sectorch.federated import FederationError, Training, Watch, Workers
from sectorch.protocols.capc import CaPC, Settings, SimulatedPanel, collaboration, experiment

QUICK = Settings(
    inference="simulated",
    local=Training("adam", 1e-2, 32, 2),
    queries=8,
    chunk=4,
    epsilon=40.0,
    budgets="budgets",
    budget_epsilon=90.0,
)


def small(parties: int = 5, querying: int = 1, **options):
    return collaboration("digits", parties, querying=querying, pool=12, **options)


def told(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


class Heard(Watch):
    def __init__(self):
        self.said = []

    def warn(self, text):
        self.said.append(text)


def test_two_runs_and_two_askers_add_up_order_by_order(tmp_path: Path):
    """Of two askers each also answers the other; a second run, another seed, goes on where the first one ended."""
    budgets, total = tmp_path / "budgets", {}
    how = replace(QUICK, budgets=str(budgets), budget_epsilon=200.0)
    for seed in (0, 1):
        heard = Heard()
        result = CaPC(*small(querying=2), replace(how, seed=seed)).run(heard)
        for asker, record in result.records.items():
            for owner in ("p1", "p2", "p3", "p4", "p5"):
                if owner != asker:
                    total[owner] = total.get(owner, 0) + record.budget.curve
        assert any("started a new budget for p1, p2, p3, p4, p5" in text for text in heard.said) is (seed == 0)
    found = told(budgets)
    assert set(found) == set(total)
    for owner, curve in total.items():
        np.testing.assert_allclose(found[owner]["curve"], curve)
        assert found[owner]["spent"] == pytest.approx(epsilon_of(curve, 1e-5))
        assert result.lasting[owner].spent == found[owner]["spent"]
        assert sum(c["queries"] for c in found[owner]["charges"].values()) == (32 if owner > "p2" else 16)
    text = " ".join(result.sentences())
    assert "The 5 answering organisations have budgets of their own, over all runs and askers" in text
    assert "each starts a new budget" not in text
    assert result.as_dict()["organisations_spent"]["p3"]["limit"] == 200


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", [3, *long(1)])
def test_killed_before_and_after_any_write(tmp_path: Path, monkeypatch, step: int):
    """A sweep over files that a run puts in place, in long runs over all. Going on, every organisation has been charged
    once for each query, though it was asked again: with the noise of the first time, so that the answer is that of the
    first time. What was on disk is answered as before."""
    made, drawn, asks = small(3), [], SimulatedPanel.ask
    how = replace(QUICK, queries=4, chunk=2, reliability=0.01)

    def heard(self, queries, *rest):
        answer = asks(self, queries, *rest)
        drawn.append((queries, answer.labels))
        return answer

    monkeypatch.setattr(SimulatedPanel, "ask", heard)
    move, trial, repeated, seen = files.move, 0, 0, set()
    while True:
        place = tmp_path / str(trial)
        place.mkdir()
        monkeypatch.chdir(place)
        drawn.clear()
        count: list[str] = []

        def killed(partial, path, count=count, last=trial // 2, after=trial % 2):
            count.append(path.name)
            if len(count) > last and not after:
                raise Killed
            move(partial, path)
            if len(count) > last:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(files, "move", killed)
            try:
                CaPC(*made, how, out="run", local=tmp_path / "local").run()
                break
            except Killed:
                seen.add(count[-1])
        before = {int(p.parent.name): torch.load(p, weights_only=True)[0] for p in place.glob("run/p1/*/labels-*.pt")
                  if p.with_suffix(".json").is_file()}  # fmt: skip
        result = CaPC(*made, how, out="run", local=tmp_path / "local").run()
        record = result.records["p1"]
        for k, labels in before.items():
            first = 2 * k
            assert torch.equal(record.labels[first : first + 2], labels)
        asked = {}
        for queries, labels in drawn:
            assert torch.equal(asked.setdefault(queries.numpy().tobytes(), labels), labels)
        assert len(asked) == 2 and not list(place.glob("run/p1/*/noise-*")), (
            "noise of what is answered is nobody's to keep"
        )
        repeated += len(drawn) - len(asked)
        for content in told(place / "budgets").values():
            np.testing.assert_allclose(content["curve"], 4 * record.mechanism.curve)
            assert [charge["queries"] for charge in content["charges"].values()] == [2, 2]
        trial += step
        shutil.rmtree(place)
    assert {"p2.json", "p3.json", "p1-1.json", "run.json"} <= seen and repeated >= 4 / step
    assert {"labels", "noise"} <= {name.split("-")[0] for name in seen}


def test_spent_is_refused_before_any_training(tmp_path: Path):
    made, how = small(), replace(QUICK, budgets=str(tmp_path / "b"), budget_epsilon=41.0)
    CaPC(*made, how).run()
    kept = told(tmp_path / "b")
    local = tmp_path / "local"
    with pytest.raises(BudgetExhaustedError, match=r"p2\.json has spent epsilon [\d.]+ of 41 .* leave p2 out") as e:
        CaPC(*made, replace(how, scale=0.9), local=local).run()
    assert "\n" not in str(e.value) and told(tmp_path / "b") == kept
    assert not list(local.rglob("p2.pt")), "nothing was trained"


def test_what_an_organisation_has_left_is_asked_and_the_run_says_why_it_stopped(tmp_path: Path):
    made, how = small(), replace(QUICK, budgets=str(tmp_path / "b"), budget_epsilon=30.0)
    result = CaPC(*made, how, out=tmp_path / "run").run()
    record = result.records["p1"]
    assert 0 < len(record.asked) < 8 and "over all runs and askers" in record.stopped
    assert all(c["spent"] <= 30 for c in told(tmp_path / "b").values())
    # With room again, a run that had ended so is not asked further.
    for owner in ("p2", "p3", "p4", "p5"):
        with BudgetFile(tmp_path / "b" / f"{owner}.json") as file:
            file.credit(record.mechanism.curve)
    again = CaPC(*made, how, out=tmp_path / "run").run().records["p1"]
    assert again.labels.tolist() == record.labels.tolist() and again.stopped == record.stopped


def test_refused_before_anything_is_charged(tmp_path: Path):
    """In use, damaged, missing, of another limit; and nothing of what the others hold is changed."""
    made, folder = small(), tmp_path / "b"
    how = replace(QUICK, budgets=str(folder))
    with pytest.raises(BudgetFileError, match=r"there is no budget .*p2\.json"):
        CaPC(*made, replace(how, budget_epsilon=None)).run()
    CaPC(*made, how).run()
    kept = told(folder)
    with BudgetFile(folder / "p4.json"), pytest.raises(BudgetInUseError, match=r"p4\.json is in use by another run"):
        CaPC(*made, how).run()
    with pytest.raises(BudgetFileError, match="allows epsilon 90 at delta 1e-05, not 90 at 1e-06"):
        CaPC(*made, replace(how, delta=1e-6)).run()
    assert told(folder) == kept
    whole = (folder / "p5.json").read_bytes()
    (folder / "p5.json").write_bytes(whole[:-40])
    with pytest.raises(BudgetFileError, match=r"p5\.json cannot be read"):
        CaPC(*made, how).run()
    (folder / "p5.json").unlink()
    with pytest.raises(BudgetFileError, match=r"there is no budget .*p5\.json; put it back"):
        CaPC(*made, replace(how, budget_epsilon=None)).run()
    (folder / "p5.json").write_bytes(whole)
    assert told(folder) == kept


def test_a_run_at_another_delta_is_charged_at_the_organisations_own(tmp_path: Path):
    made, how = small(), replace(QUICK, budgets=str(tmp_path / "b"))
    CaPC(*made, how).run()
    other = CaPC(*made, replace(how, budget_epsilon=None, delta=1e-7)).run()
    curve = np.asarray(told(tmp_path / "b")["p3"]["curve"])
    assert other.lasting["p3"].delta == 1e-5 and other.lasting["p3"].spent == epsilon_of(curve, 1e-5)
    assert other.records["p1"].budget.delta == 1e-7


def test_an_older_copy_is_noticed_when_a_run_goes_on(tmp_path: Path):
    made, how = small(), replace(QUICK, budgets=str(tmp_path / "b"))
    CaPC(*made, replace(how, seed=1)).run()
    older = (tmp_path / "b" / "p3.json").read_bytes()
    CaPC(*made, how, out=tmp_path / "run").run()
    (tmp_path / "b" / "p3.json").write_bytes(older)
    with pytest.raises(BudgetFileError, match=r"p3\.json lacks a charge of this run"):
        CaPC(*made, how, out=tmp_path / "run").run()


def test_virtual_parties_share_their_organisations_budget(tmp_path: Path):
    made = small(9, models_each=3)
    result = CaPC(*made, replace(QUICK, budgets=str(tmp_path), epsilon=200.0, budget_epsilon=200.0)).run()
    curve = result.records["p1"].budget.curve
    assert set(told(tmp_path)) == {"o2", "o3"} and result.records["p1"].mechanism.moved == 3
    assert all((np.asarray(c["curve"]) == curve).all() for c in told(tmp_path).values())


def test_what_was_not_answered_is_given_back_to_the_organisations(tmp_path: Path):
    """The budget is wide, so the noise of a check is small (0.15): the two queries on which not all four agree are
    refused whatever the operating system draws."""
    how = replace(QUICK, threshold=4, budgets=str(tmp_path), epsilon=2000.0, budget_epsilon=3000.0)
    record = CaPC(*small(), how).run().records["p1"]
    assert 0 < record.answered < 8
    for content in told(tmp_path).values():
        np.testing.assert_allclose(content["curve"], record.budget.curve)


def test_a_control_charges_nobody_and_workers_leave_the_asking_to_one_process(tmp_path: Path):
    made, how = small(querying=2), replace(QUICK, budgets=str(tmp_path / "b"))
    CaPC(*made, replace(how, control="own-labels")).run()
    assert not (tmp_path / "b").exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = CaPC(*made, how, out=tmp_path / "run", workers=Workers(2)).run()
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_allclose(told(tmp_path / "b")["p1"]["curve"], result.records["p2"].budget.curve)


def test_settings_and_command(tmp_path: Path, capsys):
    with pytest.raises(FederationError, match="name the folder they lie in, budgets"):
        Settings(budget_epsilon=3.0)
    made = small()
    with pytest.raises(FederationError, match=r"organisation '\.\./b' has a budget file"):
        CaPC([*made[0][:4], replace(made[0][4], organisation="../b")], *made[1:], replace(QUICK, budgets="x"))
    options = ["--parties", "12", "--querying", "1", "--pool", "10", "--epsilon", "20", "--inference", "simulated"]
    options += ["--local-epochs", "2", "--no-plots", "--budgets", str(tmp_path / "b")]
    assert experiment.COMMAND.main([*options, "--out", str(tmp_path / "1")]) == 1
    assert "there is no budget" in " ".join(capsys.readouterr().err.split())
    options += ["--budget-epsilon", "30"]
    assert experiment.COMMAND.main([*options, "--seed", "0", "1", "--out", str(tmp_path / "2")]) == 0
    assert all(20 < content["spent"] <= 30 for content in told(tmp_path / "b").values())
    assert len(told(tmp_path / "b")) == 11
    capsys.readouterr()
    assert experiment.COMMAND.main([*options, "--scale", "0.9", "--out", str(tmp_path / "3")]) == 1
    err = capsys.readouterr().err
    assert "over all runs and askers" in " ".join(err.split()) and "Traceback" not in err
