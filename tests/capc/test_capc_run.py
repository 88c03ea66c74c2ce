"""The whole collaboration: budgets, checks before training, resumption, learning, files."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import long
from example_counts import fewer
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import nn

from sectorch.data import DataError, Dataset
from sectorch.data.datasets import Split
from sectorch.dp import Budget, ConfidentGNMax, GNMax, PrivacyError, epsilon_for, epsilon_of
from sectorch.errors import SecretAccessError
from sectorch.federated import ArchitectureError, CheckpointError, FederationError, Training, Watch, Workers
from sectorch.protocols.capc import (
    PRESETS,
    CaPC,
    Collaboration,
    Party,
    Settings,
    SimulatedPanel,
    TooFewVotersError,
    collaboration,
    experiment,
    plan,
)
from sectorch.protocols.capc.plan import best, moved_by, right, validated

QUICK = Settings(inference="simulated", local=Training("adam", 1e-2, 32, 3), queries=10, chunk=4)


def small(parties: int = 12, **options):
    return collaboration("digits", parties, **{"querying": 2, "pool": 12, **options})


def run(made, settings=QUICK, **options):
    return CaPC(*made, settings, **options).run()


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_budget_is_kept_and_reported(noise):
    result = run(small(), replace(QUICK, noise=noise, epsilon=20.0))
    assert list(result.records) == ["p1", "p2"]
    for record in result.records.values():
        assert len(record.asked) == len(record.labels) == len(set(record.asked.tolist())) == 10
        spent = epsilon_for(record.mechanism, 10, 1e-5)
        assert record.budget.spent == record.spent[-1] == pytest.approx(spent) and spent <= 20
        assert record.spent == sorted(record.spent)
        assert record.oracle is not None and (record.oracle <= record.budget.curve * (1 + 1e-12)).all()
    # 11 voters answer for each of two: those that answer both are known twice as well.
    assert result.epsilon_of_all == epsilon_of(sum(r.budget.curve for r in result.records.values()), 1e-5)
    assert result.epsilon_of_all > max(r.budget.spent for r in result.records.values())


@dataclass(frozen=True)
class NeverZero(GNMax):
    """A mechanism of a reader's own: no query is answered with class 0."""

    def noisy(self, votes, noise):
        return votes + noise - 1000 * (torch.arange(10) == 0).long()


def test_a_mechanism_of_ones_own_takes_the_place_of_gnmax(tmp_path):
    made, labels = small(5, pool=12), {}
    for inference in ("simulated", "mpc"):
        how = replace(QUICK, noise=NeverZero(0.2), epsilon=2000.0, inference=inference, argmax="shares")
        result = run(made, how, out=tmp_path / inference)
        labels[inference] = torch.cat([record.labels for record in result.records.values()])
        assert all(isinstance(record.mechanism, NeverZero) for record in result.records.values())
    plain = run(made, replace(QUICK, epsilon=2000.0, noise=GNMax(0.2)))
    assert int(labels["simulated"].min()) > 0 == int(torch.cat([r.labels for r in plain.records.values()]).min())
    assert torch.equal(labels["simulated"], labels["mpc"])
    with pytest.raises(PrivacyError, match="NeverZero is for 1 votes that an organisation moves, and here it moves 3"):
        run(small(9, models_each=3), how)
    with pytest.raises(FederationError, match="a mechanism has its own noise"):
        replace(how, scale=2.0)


def top_two(logits, name):
    return F.one_hot(logits.topk(2).indices, 10).sum(1)


def test_a_vote_of_ones_own_takes_the_place_of_the_argmax(tmp_path):
    """In a simulation and on shares; its noise is for two votes, and a run is known by its vote."""
    made = small(5, pool=6)
    how = replace(QUICK, queries=4, vote=top_two, ballot_votes=2, epsilon=2000.0, argmax="shares")
    labels = {}
    for inference in ("simulated", "mpc"):
        result = run(made, replace(how, inference=inference), out=tmp_path / inference)
        labels[inference] = torch.cat([record.labels for record in result.records.values()])
        assert all(record.mechanism.moved == 2 for record in result.records.values())
        assert "ballot was that of top_two: at most 2 votes in all" in " ".join(result.sentences())
        assert result.as_dict()["querying"][0]["forecast"]["right"] is None
    assert torch.equal(labels["simulated"], labels["mpc"])
    edited: dict = {"F": F}  # of the same name in the same module, and of other code
    exec("def top_two(logits, name):\n    return F.one_hot(logits.topk(1).indices, 10).sum(1)", edited)
    edited["top_two"].__module__ = top_two.__module__
    for other in (lambda logits, name: top_two(logits, name), edited["top_two"]):
        with pytest.raises(CheckpointError, match=r"holds another run, which differs in vote\.digest"):
            run(made, replace(how, inference="mpc", vote=other), out=tmp_path / "mpc")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(vote=top_two), FederationError, "a ballot of p2 gives 2 votes in all, .* name ballot_votes=2"),
        (dict(vote=top_two, ballot_votes=2, noise=GNMax(2.0)), PrivacyError, "for 1 votes .* here it moves 2"),
        (dict(vote=lambda x, name: -top_two(x, name)), FederationError, "p2 has -1 votes for a class"),
        (dict(vote=lambda x, name: (x > 40).long()), FederationError, "a ballot of p2 gives 10 votes in all"),
        (dict(vote=lambda x, name: (x < -2000).long()), FederationError, "a ballot of p2 gives 10 votes in all"),
        (dict(vote=lambda x, name: torch.tensor(x.tolist()).long()), SecretAccessError, "take the content out"),
        (dict(vote="plurality"), FederationError, "there is no vote 'plurality'"),
        (dict(vote=top_two, planned=True), FederationError, "leave scale, threshold and vote out"),
        (dict(vote=top_two, ballot_votes=2, threshold=5), TooFewVotersError, "4 answering parties have no 5 votes"),
    ],
)
def test_a_vote_is_refused_before_any_training(change, error, text, tmp_path):
    with pytest.raises(error, match=text):
        how = replace(QUICK, inference="mpc", epsilon=500.0, **change)
        CaPC(*small(5, pool=6), replace(how, queries=4), out=tmp_path)
    assert not list(tmp_path.rglob("*.pt"))


def test_querying_stops_before_the_budget_is_overrun():
    """A scale for which the budget ends after some queries."""
    result = run(small(), replace(QUICK, scale=2.0, epsilon=8.0))
    for record in result.records.values():
        assert 0 < len(record.asked) < 10
        assert record.budget.spent <= 8 < epsilon_for(record.mechanism, len(record.asked) + 1, 1e-5)


def test_learning_curves_are_those_of_the_secure_run():
    """With the same noise, secure and simulated runs give the same labels, and so the same models."""
    made = small(5, pool=6)
    settings = replace(QUICK, queries=6, epsilon=60.0, argmax="shares")
    drawn = {}

    def labels(inference):
        torch.manual_seed(0)
        patch = pytest.MonkeyPatch()
        from sectorch.dp.noise import DiscreteGaussian

        noise = iter(torch.Generator().manual_seed(7) for _ in range(99))
        patch.setattr(
            DiscreteGaussian,
            "sample",
            lambda self, *shape: (torch.randn(shape, generator=next(noise)) * self.scale).round().long(),
        )
        try:
            result = run(made, replace(settings, inference=inference))
        finally:
            patch.undo()
        drawn[inference] = result
        return [record.labels.tolist() for record in result.records.values()]

    assert labels("simulated") == labels("mpc")
    one, other = (list(drawn[name].records.values()) for name in ("simulated", "mpc"))
    assert [r.after for r in one] == [r.after for r in other]
    assert drawn["mpc"].received and not drawn["simulated"].received


@pytest.mark.parametrize("argmax", ["shares", *long("yao")])
def test_labels_that_stay_in_shares_train_the_model_that_they_train_in_the_clear(argmax, tmp_path):
    """Without noise that changes a label. Two steps of a rate of 0.1: see `tests/federated/test_shared_training.py`."""
    parties, test, classes = small(3, querying=1, pool=6)
    parties = [replace(party, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10))) for party in parties]
    how = Settings(
        epsilon=1e6, queries=4, chunk=3, argmax=argmax, reliability=0.01, labels="shares",
        local=Training("sgd", 0.1, 512, 2),
    )  # fmt: skip
    made = parties, (test[0][:100], test[1][:100]), classes
    unseen, plain = run(made, how, out=tmp_path), run(made, replace(how, inference="simulated", labels="open"))
    [one], [other] = unseen.records.values(), plain.records.values()
    for key, value in one.model.state_dict().items():
        assert float((value - other.model.state_dict()[key]).abs().max()) < 2.0**-14
    np.testing.assert_allclose(one.budget.curve, other.budget.curve)
    assert one.labels.tolist() == [experiment.UNSEEN] * 4 and one.answered == 4 and one.right is None
    assert one.counts(classes) == [None] * classes and len(one.spent) == 4 and unseen.rows() and unseen.tables()
    halves = [torch.load(path, weights_only=True)[0] for path in sorted(tmp_path.glob("p1/?/labels-*.pt"))]
    codes = torch.cat([half["p1"] + half["S"] for half in halves])
    assert torch.equal(codes, F.one_hot(other.labels, classes))
    assert all(float((half["S"].abs() > 2**40).double().mean()) > 0.9 for half in halves)
    shown = {(r["role"], r["protocol"]) for r in unseen.received if r["shows"] and r["protocol"] != "seed"}
    assert {pair for pair in shown if "garbled" not in pair[1]} == {("Q", "reveal"), ("Q", "guard")}
    assert "learned its retrained model" in " ".join(unseen.sentences())


def test_scikit_learn_parties():
    made = small(6)
    parties = [replace(party, model=LogisticRegression(max_iter=300)) for party in made[0]]
    settings = replace(QUICK, inference="open", argmax="shares", epsilon=60.0)
    result = CaPC(parties, *made[1:], settings).run()
    assert all(record.after.accuracy > 0.5 for record in result.records.values())
    with pytest.raises(FederationError, match="p1's LogisticRegression cannot be evaluated on secrets"):
        CaPC(parties, *made[1:], replace(settings, inference="mpc"))


@pytest.mark.sectorch_long
def test_it_learns():
    """Fifty parties and 60 queries at epsilon 10: the gain of the paper, on a small scale."""
    made = collaboration("digits", 50, querying=2, pool=70)
    result = run(made, Settings(inference="simulated", queries=60, epsilon=10.0))
    assert result.mean("gain") > 0.01 and result.mean("right") > 0.7


def test_resumes_and_never_forgets_a_charge(tmp_path):
    made = small()

    class Stop(Watch):
        def finished(self, name, record):
            if name == "p1/1/labels":
                raise KeyboardInterrupt

    first = CaPC(*made, replace(QUICK, epsilon=30.0), out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.run(Stop())
    assert [json.loads((tmp_path / "questions" / f"p1-{k}.json").read_text())["queries"] for k in (0, 1)] == [4, 4]
    [labels] = torch.load(next(tmp_path.glob("p1/0/labels-*.pt")), weights_only=True)
    again = CaPC(*made, replace(QUICK, epsilon=30.0), out=tmp_path).run()
    record = again.records["p1"]
    assert record.labels[:4].tolist() == labels.tolist() and len(record.labels) == 10
    assert record.budget.spent == pytest.approx(epsilon_for(record.mechanism, 10, 1e-5))
    third = CaPC(*made, replace(QUICK, epsilon=30.0), out=tmp_path).run()
    assert third.records["p1"].labels.tolist() == record.labels.tolist()
    assert third.records["p1"].budget.spent == record.budget.spent
    assert third.records["p1"].spent == record.spent and record.spent[0] == pytest.approx(
        epsilon_for(record.mechanism, 1, 1e-5)
    )
    with pytest.raises(CheckpointError, match="holds another run"):
        CaPC(*made, replace(QUICK, epsilon=31.0), out=tmp_path)


def test_a_question_without_an_answer_is_paid_once(tmp_path, monkeypatch):
    """The process dies after the charge and before the answer: going on, the same question is asked again, for no more
    and with the noise that was drawn for it."""
    made, settings, seen = small(), replace(QUICK, epsilon=20.0), []

    def dies(self, queries, mechanism, least, drawn, opened):
        seen.append(drawn)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedPanel, "ask", dies)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                CaPC(*made, settings, out=tmp_path).run()
    assert torch.equal(seen[0][0], seen[1][0])
    record = CaPC(*made, settings, out=tmp_path).run().records["p1"]
    assert len(record.asked) == 10 and not record.stopped
    assert record.budget.spent == pytest.approx(epsilon_for(record.mechanism, 10, 1e-5))
    assert record.spent[-1] == pytest.approx(record.budget.spent)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_virtual_parties_move_all_their_votes(organisations, models_each, colluding):
    parties = [
        Party(f"p{o}-{m}", nn.Identity(), torch.zeros(1, 1), torch.zeros(1), organisation=f"o{o}")
        for o in range(organisations + 1)
        for m in range(models_each)
    ]
    assert moved_by(parties, parties[0], colluding) == models_each * min(colluding, organisations)


def test_virtual_parties_need_more_noise():
    one, three = (small(30, models_each=n) for n in (1, 3))
    plans = [plan(made[0], made[0][0], 10, replace(QUICK, epsilon=40.0)) for made in (one, three)]
    assert len(plans[0].voters) == 29 and len(plans[1].voters) == 27 and "p2" not in plans[1].voters
    assert plans[1].mechanism.moved == 3
    assert plans[1].mechanism.scale == pytest.approx(3 * plans[0].mechanism.scale, rel=1e-3)
    colluding = plan(one[0], one[0][0], 10, replace(QUICK, epsilon=40.0, colluding=3))
    assert colluding.mechanism.scale == plans[1].mechanism.scale


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(epsilon=0.0), "epsilon must be above 0"),
        (dict(epsilon=float("inf")), "epsilon must be above 0 and below inf"),
        (dict(delta=0.0), "delta must be above 0 and below 1"),
        (dict(delta=1.0), "delta must be above 0 and below 1"),
        (dict(scale=-1.0), "scale must be above 0"),
        (dict(colluding=0), "colluding must be at least 1"),
        (dict(check_scale=2.0), "a run without a threshold does not make"),
        (dict(threshold=5, noise="laplace"), "under gaussian noise"),
        (dict(planned=True, scale=2.0), "leave scale, threshold and vote out"),
        (dict(noise="cauchy"), "there is no noise 'cauchy'"),
        (dict(inference="tee"), "there is no inference 'tee'"),
        (dict(argmax="no"), "there is no argmax 'no'"),
        (dict(selection="best"), "there is no selection 'best'"),
        (dict(chunk=0), "chunk must be at least 1"),
        (dict(reliability=1.0), "reliability must be above 0 and below 1"),
    ],
)
def test_settings_out_of_range(change, text):
    with pytest.raises((FederationError, PrivacyError), match=text):
        replace(QUICK, **change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inference": "simulated"}, "where nobody sees queries or votes"),
        ({"inference": "open"}, "where nobody sees queries or votes"),
        ({"control": "longer"}, "where nobody sees queries or votes"),
        ({"threshold": 3}, "which queries a threshold answers"),
        ({"noise": ConfidentGNMax(3, 2.0, 1.0)}, "which queries a threshold answers"),
    ],
)
def test_labels_stay_in_shares_only_where_that_hides_them(change, text):
    with pytest.raises(FederationError, match=text):
        Settings(**{"labels": "shares", **change})


def test_too_few_parties_says_what_they_could_serve():
    with pytest.raises(
        TooFewVotersError, match=r"4 answering parties are too few .* it from epsilon (\d+\.\d\d) on"
    ) as e:
        run(small(5), replace(QUICK, epsilon=1.0))
    reach = float(str(e.value).split("from epsilon ")[1].split(" ")[0])
    made = small(5)
    plan(made[0], made[0][0], 10, replace(QUICK, epsilon=reach + 0.02))
    with pytest.raises(TooFewVotersError, match="has 1 answering parties, and a query needs 2"):
        run(small(2, querying=1), replace(QUICK, epsilon=500.0))
    with pytest.raises(PrivacyError, match="spends more than epsilon 1 on the first query"):
        run(small(), replace(QUICK, epsilon=1.0, scale=0.5))


def test_a_model_with_other_classes():
    made = small()
    made[0][3].model = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    with pytest.raises(FederationError, match=r"p4's model gives \(2, 7\) for two images, but logits \(2, 10\)"):
        run(made)
    made[0][3].model = nn.Linear(5, 10)
    with pytest.raises(ArchitectureError, match="p4's model does not take images"):
        run(made)
    made[0][3].model = "model"
    with pytest.raises(FederationError, match="p4's model is neither an nn"):
        run(made)


def test_bad_data():
    made = small()
    for party, text in (
        (replace(made[0][1], name="p1"), "different names"),
        (replace(made[0][1], images=torch.full_like(made[0][1].images, torch.nan)), "p2: images hold NaN"),
        (replace(made[0][1], labels=made[0][1].labels + 5), "p2: labels go from"),
        (replace(made[0][1], labels=made[0][1].labels[:-1]), "p2: labels must be int64"),
    ):
        with pytest.raises(FederationError, match=text):
            CaPC([made[0][0], party, *made[0][2:]], *made[1:], QUICK)
    with pytest.raises(FederationError, match="no party has a pool"):
        CaPC([replace(party, pool=None) for party in made[0]], *made[1:], QUICK)
    with pytest.raises(FederationError, match="2 pools of 300 need more than the 450 images"):
        small(pool=300)
    with pytest.raises(FederationError, match="no architecture 'alexnet'"):
        small(architectures=["alexnet"])
    with pytest.raises(DataError, match="no data set 'mars'"):
        collaboration("mars")


def test_a_choice_of_all_is_refused():
    """An experiment on how queries are chosen, in which all of them are, compares nothing."""
    with pytest.raises(
        FederationError, match="p1 asks about all 12 images of its pool, so that 'margin' chooses nothing"
    ):
        CaPC(*small(), replace(QUICK, selection="margin", queries=12, epsilon=20.0))
    CaPC(*small(), replace(QUICK, selection="margin", queries=6, epsilon=20.0))


def test_what_was_asked_is_counted_by_its_true_class():
    result = run(small(), replace(QUICK, selection="entropy", queries=6, epsilon=20.0))
    for record in result.records.values():
        told = record.as_dict(10, result.forecasts[record.name])["true_classes_asked"]
        assert sum(told) == 6 and told == record.truth[record.asked].bincount(minlength=10).tolist()


def test_files(tmp_path):
    result = run(small(), replace(QUICK, epsilon=20.0))
    paths = result.write(tmp_path)
    found = json.loads(paths[0].read_text())
    assert [q["name"] for q in found["querying"]] == ["p1", "p2"]
    assert found["querying"][0]["epsilon"]["data_dependent_not_private"] <= found["querying"][0]["epsilon"]["spent"]
    parties = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert len(parties) == 2 * 12
    queries = list(csv.DictReader(paths[2].read_text().splitlines()))
    assert len(queries) == 20 and float(queries[9]["epsilon_spent"]) == result.records["p1"].spent[-1]
    text = " ".join(result.sentences())
    assert "NOT private itself" in text and "pool their labels" in text and "nothing was protected" in text


def test_weak_classes_and_pools_are_disjoint():
    even, skewed = small(20), small(20, skewed=True)
    count = lambda parties: torch.cat([p.labels for p in parties]).bincount(minlength=10)
    assert (count(skewed[0][:2])[[1, 2]] <= 0.4 * count(even[0][:2])[[1, 2]]).all()
    for a, b in zip(even[0][2:], skewed[0][2:], strict=True):
        assert torch.equal(a.images, b.images), "who answers knows the weak classes"
    pools = [party.pool.flatten(1) for party in even[0][:2]]
    everything = torch.cat([*pools, even[1][0].flatten(1)])
    assert len(everything) == 450


@pytest.mark.parametrize(
    ("name", "size", "left"), [("mnist", 10_000, 1000), ("fashion-mnist", 10_000, 1000), ("cifar10", 10_000, 1000),
                               ("svhn", 26_032, 16_033), ("svhn-extra", 26_032, 16_033)],
)  # fmt: skip
def test_presets_leave_the_papers_test_sets(name, size, left):
    """CaPC, 4.2 and F.1: 1,000 and 16,032 images to evaluate on (the authors' last pool of SVHN has one more)."""
    shape = (1, 28, 28) if "mnist" in name else (3, 32, 32)
    blank = lambda n: Split(torch.zeros(1, *shape, dtype=torch.uint8).expand(n, *shape), torch.arange(n) % 10)
    parties, test, _ = collaboration(Dataset(name, blank(60), blank(size), 10), 6)
    assert PRESETS[name].parties == (50 if name == "cifar10" else 250) and len(test[0]) == left
    assert PRESETS[name].delta == (1e-6 if "svhn" in name else 1e-5)
    assert parties[0].architecture == {"m": "lenet", "f": "lenet", "c": "vgg5", "s": "vgg7"}[name[0]]


@pytest.mark.parametrize(("name", "sigma", "asked"), [("cifar10", 7, 264), ("svhn", 40, 141), ("mnist", 40, 231),
                                                      ("fashion-mnist", 40, 568), ("digits", None, 75)])  # fmt: skip
def test_a_data_set_runs_with_its_defaults(name, sigma, asked):
    """As many queries as the paper's sigma allows within its epsilon, and enough parties for them: not refused."""
    preset = PRESETS[name]
    blank = torch.zeros(preset.pool, 1, 1, 1)
    parties = [Party(f"p{i}", nn.Identity(), blank[:1], blank[:1, 0, 0, 0], pool=blank) for i in range(preset.parties)]
    planned = plan(parties, parties[0], 10, experiment._base(Collaboration(data=name)))
    assert planned.queries == asked
    assert sigma is None or 0.99 * sigma < planned.mechanism.scale <= sigma


def test_the_papers_epsilons_are_what_their_noise_costs():
    """By an own accounting: the Renyi curve of 550 Gaussian answers on a fine grid of orders, converted as in Canonne,
    Kamath and Steinke, and the exact delta of the composed Gaussian (Balle and Wang) as a lower bound."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    orders, found = np.geomspace(1.001, 1e4, 200_001), []
    for sigma, delta in ((40, 1e-6), (7, 1e-5), (40, 1e-5), (40, 1e-5)):
        bounds = 550 * orders / sigma**2 + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        m = np.sqrt(2 * 550) / sigma
        exact = lambda e, m=m, delta=delta: norm.cdf(m / 2 - e / m) - np.exp(e) * norm.cdf(-m / 2 - e / m) - delta
        assert 0.9 * bounds.min() < brentq(exact, 0, 100) < bounds.min()
        assert epsilon_for(GNMax(sigma), 550, delta) == pytest.approx(bounds.min(), rel=1e-3)
        found.append(bounds.min())
    page = " ".join((Path(__file__).parents[2] / "docs" / "capc.md").read_text().split())
    assert "at the paper's sigma: {:.2f}, {:.1f}, {:.2f} and {:.2f}.".format(*found) in page


def test_budget_arithmetic_of_the_report():
    budget = Budget(3.0, 1e-5)
    assert budget.spent == 0 and budget.remaining == 3


def test_right_at_is_what_the_noise_leaves():
    record = run(small(), replace(QUICK, epsilon=20.0)).records["p1"]
    votes, truth = torch.tensor(record.votes), record.truth[record.asked]
    assert record.right_at(0.05) == pytest.approx(float((votes.argmax(1) == truth).double().mean()), abs=1e-6)
    assert record.right_at(1000.0) == pytest.approx(0.1, abs=0.01)  # ten classes and nothing but noise
    record.votes.clear()
    assert record.right_at(1.0) is None


def test_the_planner_takes_as_many_as_bring_the_most():
    """Few voters: fewer queries than the pool. Many: all of it. Nothing to gain: as few as can be, and a warning."""
    how = Settings(inference="simulated", planned=True)
    few, many = (best(75, voters, 10, 1, how, own) for voters, own in ((19, 0.85), (99, 0.64)))
    assert 15 <= few <= 40 and many == 75
    assert best(75, 19, 10, 1, replace(how, voter_accuracy=0.3), 0.9) == 1
    assert {best(75, 19, 10, 1, replace(how, correlation=c), 0.85) for c in (0.1, 0.25, 0.4, 0.6)} == {27, 32}
    assert best(75, 19, 10, 1, replace(how, epsilon=20.0), 0.85) > few
    result = run(small(20, pool=75), replace(QUICK, planned=True, queries=None, epsilon=10.0))
    for name, record in result.records.items():
        assert len(record.asked) < 75 and record.budget.spent <= 10
        own = validated(next(p for p in result.parties if p.name == name), result.settings.local, 0)
        assert result.forecasts[name].own == own


@fewer(2)
@given(st.integers(2, 25), st.floats(0.1, 0.9), st.floats(0.05, 0.6), st.sampled_from([0.3, 3.0]))
def test_a_forecast_is_a_probability_that_rises_with_the_accuracy(voters, accuracy, correlation, scale):
    found = [right(GNMax(scale), voters, 10, a, correlation) for a in (accuracy, accuracy + 0.05)]
    # Numbers of votes that are rarer than one in ten thousand are left out.
    assert 0 <= found[0] <= found[1] + 1e-3 <= 1.001
    assert right(GNMax(3000.0), voters, 10, accuracy, correlation) == pytest.approx(0.1, abs=0.01)


def test_a_vote_that_is_worse_than_ones_own_model_is_warned_of():
    said = []

    class Heard(Watch):
        def warn(self, text):
            said.append(text)

    made = small(12, pool=12)
    result = CaPC(*made, replace(QUICK, epsilon=9.0, voter_accuracy=0.4)).run(Heard())
    assert len(said) == 2 and all("is expected to be right in" in text for text in said)
    assert set(said) <= set(result.sentences())
    assert not CaPC(*made, replace(QUICK, epsilon=60.0, voter_accuracy=0.99)).run().forecasts["p1"].worse


@pytest.mark.parametrize("control", ["longer", "own-labels", "true-labels", "no-noise"])
def test_controls_ask_nobody_and_spend_nothing(control):
    made = small()
    result = run(made, replace(QUICK, control=control, epsilon=20.0, inference="mpc"))
    for party, record in zip(made[0], result.records.values(), strict=False):
        assert (
            record.budget.spent == 0 and not record.received and len(record.asked) == (0 if control == "longer" else 10)
        )
        if control == "true-labels":
            assert record.right == 1 and torch.equal(record.labels, party.truth[record.asked])
        if control == "own-labels":
            asked = party.questions[record.asked]
            own = run(made, replace(QUICK, control="longer", epsilon=20.0))
            assert record.before == own.records[record.name].before and len(asked) == 10
    assert "a control" in " ".join(result.sentences())
    with pytest.raises(FederationError, match="p1's pool has no true labels"):
        CaPC([replace(p, truth=None) for p in made[0]], *made[1:], replace(QUICK, control="true-labels"))


@pytest.mark.parametrize("inference", ["simulated", "open"])
def test_confident_charges_the_check_always_and_the_answer_when_it_is_given(inference, tmp_path):
    made, how = small(), replace(QUICK, epsilon=20.0, threshold=9, inference=inference, argmax="shares")
    result = run(made, how, out=tmp_path)
    for record in result.records.values():
        mechanism = record.mechanism
        assert isinstance(mechanism, ConfidentGNMax) and len(record.asked) == 10
        answers = int((record.labels >= 0).sum())
        curve = 10 * mechanism.check_curve + answers * mechanism.answer.curve
        np.testing.assert_allclose(record.budget.curve, curve)
        assert record.spent[-1] == pytest.approx(epsilon_of(curve, 1e-5)) and record.budget.spent <= 20
        assert epsilon_for(mechanism, 10, 1e-5) == pytest.approx(20, abs=0.1), "all answered, it fits the budget"
    again = run(made, how, out=tmp_path)
    for name, record in again.records.items():
        assert torch.equal(record.labels, result.records[name].labels)
        assert record.budget.spent == result.records[name].budget.spent
    with pytest.raises(TooFewVotersError, match="11 answering parties have no 12 votes"):
        run(made, replace(how, threshold=12))


def test_workers_give_what_one_process_gives(tmp_path):
    made, torch_threads = small(5, pool=6), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        how = replace(QUICK, control="no-noise", epsilon=20.0, queries=4)
        one = run(made, how)
        two = run(made, how, out=tmp_path, workers=Workers(2))
    finally:
        torch.set_num_threads(torch_threads)
    assert [r.after for r in one.records.values()] == [r.after for r in two.records.values()]


def test_an_estimate_counts_what_is_left(tmp_path):
    made, how = small(5, pool=6), replace(QUICK, queries=6, epsilon=60.0, argmax="shares", inference="mpc")
    run_ = CaPC(*made, how, out=tmp_path)
    before = run_.estimate()
    result = run_.run()
    sent = sum(row["bytes"] for row in result.received)
    assert 0.5 * sent < before.bytes < 2 * sent
    left = CaPC(*made, how, out=tmp_path).estimate()
    assert left.bytes == 0 and left.seconds == 0
