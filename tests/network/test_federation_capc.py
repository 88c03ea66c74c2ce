"""CaPC in a federation: who asks, who votes with which budget of its own, and a guardian that draws the noise."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federation_world import World, each
from network_world import until

from sectorch.dp import BudgetExhaustedError, epsilon_of
from sectorch.errors import FederationError, FrameError, NetworkError, SectorchError
from sectorch.federated.run import Run
from sectorch.federated.training import Training
from sectorch.federated.watch import Watch
from sectorch.protocols.capc import CaPC, Panel, Settings, collaboration, plan, questions

ROLES = {"north": "p1", "south": "p2", "west": "p3", "hub": "S"}
QUICK = Settings(
    epsilon=60.0, queries=4, chunk=2, argmax="shares", local=Training("sgd", 1e-1, 32, 2), reliability=0.01,
    budget_epsilon=200.0, budgets="budgets",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("capc"), ROLES)
    yield world
    world.close()


@pytest.fixture(scope="module")
def made():
    parties, test, classes = collaboration("digits", 3, querying=2, pool=6)
    generator = torch.Generator().manual_seed(0)
    for party in parties:
        party.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        for parameter in party.model.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return parties, (test[0][:100], test[1][:100]), classes


class Stopped(Watch):
    """Ends the run of the party that asks after so many of its queries, which are answered."""

    def __init__(self, asker: str = "", queries: int = 0):
        self._asker, self._left = asker, queries

    def finished(self, name, record):
        if self._asker and name.startswith(f"{self._asker}/") and name.endswith("/labels"):
            self._left -= 2
            if self._left <= 0:
                raise FederationError("stopped by the test")


def taking_part(world, made, tmp_path, how: Settings = QUICK, watch: dict[str, Watch] | None = None) -> dict:
    def work(name: str):
        role = ROLES[name]
        known = copy.deepcopy(made[0])
        parties = [p if p.name == role else p.elsewhere() for p in known]
        own = how if how.budgets is None else replace(how, budgets=str(tmp_path / name / "budgets"))
        with world.party(name) as party:
            run = CaPC(parties, made[1], made[2], own, out=tmp_path / name / "run", together=party)
            return run.run((watch or {}).get(name, Watch()))

    found = each(ROLES, work)
    assert until(lambda: len(world.server._broker) == 0, 30)
    return found


def ledger(tmp_path, name: str) -> dict:
    return json.loads((tmp_path / name / "budgets" / f"{ROLES[name]}.json").read_text())


def test_a_stopped_run_goes_on_and_nothing_is_paid_twice(world, made, tmp_path):
    """Each party's ledger lies with it. The first asker is stopped after one of its two questions, and another party
    while it answers: all start again, and the guardian's noise for the question that was lost is that of the first
    time."""
    found = taking_part(world, made, tmp_path, watch={"north": Stopped("p1", 2)})
    assert isinstance(found["north"], FederationError), found
    assert all(isinstance(found[name], NetworkError) for name in ("south", "west", "hub")), found
    [answered] = (tmp_path / "north" / "run" / "p1" / "0").glob("labels-*.pt")
    kept = answered.read_bytes()

    noises, real = [], Panel.ask

    def lost(self, queries, mechanism, least, drawn, opened):
        if drawn is not None:  # at the guardian
            noises.append(drawn[0])
            if len(noises) == 1:
                raise FederationError("lost when the noise was drawn")
        return real(self, queries, mechanism, least, drawn, opened)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Panel, "ask", lost)
        found = taking_part(world, made, tmp_path)
        assert isinstance(found["hub"], FederationError) and isinstance(found["north"], NetworkError), found
        found = taking_part(world, made, tmp_path)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    assert torch.equal(noises[0], noises[1]) and len(noises) == 4
    assert answered.read_bytes() == kept
    assert not list((tmp_path / "hub" / "run").glob("p*/*/noise-*"))

    assert [list(found[name].records) for name in ROLES] == [["p1"], ["p2"], [], []]
    curve = found["north"].records["p1"].mechanism.curve
    for name, count in (("north", 2), ("south", 2), ("west", 4)):
        charged = ledger(tmp_path, name)
        assert [c["queries"] for c in charged["charges"].values()] == [2] * count
        np.testing.assert_allclose(charged["curve"], 2 * count * curve)
    assert not (tmp_path / "hub" / "budgets").exists()
    for name, role in (("north", "p1"), ("south", "p2")):
        record = found[name].records[role]
        assert len(record.labels) == 4 and record.after is not None
        np.testing.assert_allclose(record.budget.curve, 4 * curve)
        assert "Each party ran in a process of its own." in found[name].sentences()
    again = taking_part(world, made, tmp_path)
    assert torch.equal(again["north"].records["p1"].labels, found["north"].records["p1"].labels)
    assert ledger(tmp_path, "west")["charges"].keys() == charged["charges"].keys()


def test_an_organisation_that_affords_no_more_is_named_to_who_asks(world, made, tmp_path):
    """It affords three queries: the first asker gets them and the other none. Each is told in one line who it was."""
    curve = plan(made[0], made[0][0], 10, QUICK).mechanism.curve
    least = epsilon_of(3 * curve, 1e-5)

    def work(name: str):
        limit = least if name == "west" else 200.0
        own = replace(QUICK, budgets=str(tmp_path / name / "budgets"), budget_epsilon=limit)
        parties = [p if p.name == ROLES[name] else p.elsewhere() for p in copy.deepcopy(made[0])]
        with world.party(name) as party:
            return CaPC(parties, made[1], made[2], own, out=tmp_path / name / "run", together=party).run()

    found = each(ROLES, work)
    record = found["north"].records["p1"]
    words = "p3 answers 1 of the next queries of p1: its own budget, over all runs and askers, affords no more"
    assert len(record.labels) == 3 and record.stopped.startswith(words), found
    assert isinstance(found["south"], BudgetExhaustedError) and isinstance(found["west"], BudgetExhaustedError)
    assert str(found["south"]).startswith("p3 answers none of the next queries of p2: its own budget")
    assert "p3.json has spent epsilon" in str(found["west"]) and "leave p3 out" in str(found["west"])
    assert all("\n" not in said for said in (record.stopped, str(found["south"]), str(found["west"])))
    assert found["hub"].records == {}
    np.testing.assert_allclose(ledger(tmp_path, "west")["curve"], 3 * curve)
    assert until(lambda: len(world.server._broker) == 0, 30)
    again = each(ROLES, work)
    assert torch.equal(again["north"].records["p1"].labels, record.labels), "what is stopped stays stopped"
    np.testing.assert_allclose(ledger(tmp_path, "west")["curve"], 3 * curve)


def test_another_number_format_is_refused_before_anything_is_charged(world, made, tmp_path):
    def work(name: str):
        how = replace(QUICK, budgets=str(tmp_path / name), frac_bits=18 if name == "west" else 20)
        with world.party(name) as party:
            return CaPC(copy.deepcopy(made[0]), made[1], made[2], how, together=party).run()

    found = each(("hub", "west"), work)  # the first two to come: who comes later waits for them to come again
    assert all(isinstance(error, SectorchError) for error in found.values()) and len(found) == 2, found
    assert json.loads((tmp_path / "west" / "p3.json").read_text())["charges"] == {}


def top_two(logits, name):
    return F.one_hot(logits.topk(2).indices, 10).sum(1)


def other_vote(logits, name):
    return 2 * F.one_hot(logits.argmax(1), 10)


def test_a_vote_of_ones_own_by_parties_apart(world, made, tmp_path):
    """The labels are those of the simulation: at an epsilon so large that no noise is drawn that changes one."""
    how = replace(QUICK, vote=top_two, ballot_votes=2, budgets=None, budget_epsilon=None, epsilon=1e6, reliability=0.3)
    found = taking_part(world, made, tmp_path, how)
    assert not any(isinstance(result, BaseException) for result in found.values()), found
    plain = CaPC(copy.deepcopy(made[0]), made[1], made[2], replace(how, inference="simulated")).run()
    for name, role in (("north", "p1"), ("south", "p2")):
        record = found[name].records[role]
        assert record.mechanism.moved == 2 and record.mechanism.scale < 0.1
        votes = torch.tensor(plain.records[role].votes)
        assert len(record.labels) == len(votes) == 4
        assert bool((votes.gather(1, record.labels[:, None]) == votes.amax(1, keepdim=True)).all())


def test_another_vote_is_refused_before_anything_is_charged(world, made, tmp_path):
    def work(name: str):
        vote = other_vote if name == "west" else top_two
        how = replace(QUICK, budgets=str(tmp_path / name), vote=vote, ballot_votes=2)
        with world.party(name) as party:
            return CaPC(copy.deepcopy(made[0]), made[1], made[2], how, together=party).run()

    found = each(("hub", "west"), work)
    assert all(isinstance(error, SectorchError) for error in found.values()) and len(found) == 2, found
    assert json.loads((tmp_path / "west" / "p3.json").read_text())["charges"] == {}


def test_what_protects_nothing_is_no_program_of_parties_apart(world, made):
    with world.party("north") as party:
        for how in (
            replace(QUICK, inference="simulated"),
            replace(QUICK, control="longer", budgets=None, budget_epsilon=None),
        ):
            with pytest.raises(FederationError, match="are for a simulation"):
                CaPC(made[0], made[1], made[2], how, together=party)
        one = [replace(p, organisation="o") for p in made[0][1:]]
        with pytest.raises(FederationError, match="give it one party"):
            CaPC([made[0][0], *one], made[1], made[2], QUICK, together=party)


def test_a_question_that_was_answered_is_not_answered_again_in_one_run(made, tmp_path, monkeypatch):
    """Under its mark nobody pays twice: an asker that says an old number again would have other queries for nothing."""
    parties, _, classes = made
    said = [(questions.Question(n, "ab" * 16, 2), 6) for n in (0, 1, 0)]
    monkeypatch.setattr(questions, "following", lambda *_: said.pop(0))
    here = SimpleNamespace(present=lambda name: name != "p1")
    run = Run(members=["p1", "p2", "p3", "S"], parties=here, out=tmp_path)
    asker = [p if p.name != "p1" else p.elsewhere() for p in parties]
    follower = questions.Questions(run, asker, asker[0], None, classes, replace(QUICK, queries=6), {}, "")
    with pytest.raises(FrameError, match="p1 asks question 0 in one run, where 2 is next"):
        list(follower)
