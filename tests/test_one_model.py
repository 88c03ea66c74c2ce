"""Whether A answers with one model: decoys that are asked again, known answers, and an auditor who has the weights."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from server_cheats import ACCOUNTABLE, run
from torch import nn

import sectorch
from sectorch import decoys
from sectorch.choreography.streams import PairKey
from sectorch.config import Scheme
from sectorch.decoys import (
    DecoyCheck,
    KnownAnswers,
    Repeats,
    decoy_call,
    is_exact,
    least_right,
    notice_probability,
)
from sectorch.errors import ArgumentError, OtherAnswerError
from sectorch.session import Session

torch.manual_seed(0)
SMALL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
SMOOTH = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2), nn.Softmax(-1)).eval()
X = torch.randn(2, 3)


def secured(model=SMALL, scheme=ACCOUNTABLE):
    return sectorch.secure(model, scheme, session=Session())


def other(model=SMALL, seed: int = 1) -> nn.Module:
    """A model of the same architecture whose last bias differs a little."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[2].bias[0] += 2.0**-5 * seed
    return changed


# Decoys that are asked again.


@pytest.mark.parametrize("network", ["lan", "wan"])
@pytest.mark.parametrize("model", [SMALL, SMOOTH])
def test_one_model_gives_one_answer_in_all_sessions(model, network):
    repeats = Repeats()
    for _ in range(2):
        secure = secured(model, Scheme(accountable=True, network=network))
        secure.session.statements.repeats = repeats
        with decoy_call():
            for _ in range(12):
                secure(X)
    assert repeats.compared > 4, "half of 24 decoys, in expectation 11"
    assert is_exact(secure.choreography(X)) == (model is SMALL)


@pytest.mark.parametrize("model", [SMALL, SMOOTH])
@pytest.mark.parametrize("seed", range(1, 6))
def test_another_model_in_a_later_session_is_noticed(model, seed):
    repeats, seen = Repeats(), 0
    for answering in (model, other(model, seed)):
        secure = secured(answering)
        secure.session.statements.repeats = repeats
        with decoy_call():
            for _ in range(20):
                try:
                    secure(X)
                except OtherAnswerError:
                    seen += 1
        assert seen == 0 or answering is not model
    # Of 20 decoys each repeats one of the first session with a probability of 1/4 at least: none does in 0.3 %.
    assert seen >= 1


def test_a_decoy_is_repeated_half_of_the_time_and_as_one_of_the_last():
    program, repeats = secured().choreography(X), Repeats()
    first = repeats.seed(program)
    repeats.check(program, first, X)
    assert abs(sum(repeats.seed(program) == first for _ in range(2000)) / 2000 - 0.5) < 0.06
    for number in range(40):
        repeats.check(program, bytes([number]) * 32, X)
    (asked,) = repeats._asked.values()
    assert len(asked) == decoys.REPEATED and first not in asked
    with pytest.raises(OtherAnswerError, match="answered with other bits"):
        repeats.check(program, bytes([39]) * 32, X + 2**-20)
    assert "39" not in repr(repeats) and "seed" not in repr(repeats)


@pytest.mark.parametrize(
    ("exact", "first", "second", "same"),
    [
        (True, (1.0, True), (1.0, True), True),
        (True, (1.0, True), (1.0 + 2**-20, True), False),
        (False, (1.0, True), (1.0 + 2**-20, True), True),
        (False, (1.0, True), (1.0 + 2**-9, True), False),
        (True, (1.0, False), (7.0, False), True),  # no results: only that they are none is compared
        (True, (1.0, True), (1.0, False), False),
        (False, (1.0, True), (1, True), False),
    ],
)
def test_what_counts_as_one_answer(exact, first, second, same):
    of = lambda given: [(torch.tensor([given[0]]), given[1])]
    assert decoys._same_results(of(first), of(second), exact) == same
    assert not decoys._same_results(of(first), [], exact)


def test_values_beyond_their_range_are_no_other_answer():
    """Which wrong values they are depends on masks."""
    wide = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        wide[0].weight.mul_(200)
        wide[2].weight.mul_(200)
    secure = secured(wide)
    with decoy_call():
        refused = 0
        for _ in range(12):
            try:
                secure(X)
            except sectorch.errors.RangeExceededError:
                refused += 1
    assert refused and secure.session.statements.repeats.compared


# Known answers.


def test_known_answers_notice_a_swapped_model_with_the_stated_probability():
    """A model that answers a fraction of rows otherwise, five seeds, against 1 - (1 - p)^k."""
    for seed in range(5):
        drawn, p, k, noticed, runs = random.Random(seed), 0.05, 20, 0, 400
        x = torch.arange(200).float()[:, None]
        right = x * 2
        swapped = torch.tensor([drawn.random() < p for _ in range(200)])
        share = float(swapped.float().mean())
        for _ in range(runs):
            known = KnownAnswers(x, right)
            try:
                for _ in range(k):
                    rows = known.choose(1)
                    known.check(rows, right[rows] + swapped[rows][:, None])
            except OtherAnswerError:
                noticed += 1
        expected = notice_probability(k, share)
        assert math.isclose(expected, 1 - (1 - share) ** k, rel_tol=1e-9)
        assert abs(noticed / runs - expected) < 4.5 * math.sqrt(expected * (1 - expected) / runs) + 1e-3, seed


def test_labelled_rows_refuse_a_worse_model_and_never_the_promised_one():
    drawn = random.Random(0)
    x, labels = torch.arange(1000).float()[:, None], torch.arange(1000) % 3
    logits = nn.functional.one_hot(labels, 3).float()

    def ask(accuracy: float, most: int) -> int:
        """After how many rows the model is refused; 0 if it is not."""
        known = KnownAnswers(x, labels=labels, accuracy=0.9)
        for k in range(1, most + 1):
            rows = known.choose(1)
            right = drawn.random() < accuracy
            try:
                known.check(rows, logits[rows] if right else logits[rows].roll(1, -1))
            except OtherAnswerError:
                return k
        return 0

    assert not any(ask(0.9, 150) for _ in range(40))
    power = notice_probability(150, 0.4, accuracy=0.9)
    assert power > 0.999 and all(ask(0.9 * 0.6, 150) for _ in range(20))
    assert notice_probability(150, 0.0, accuracy=0.9) < 1e-6


@pytest.mark.parametrize("k", [1, 2, 7, 50, 400])
@pytest.mark.parametrize("accuracy", [0.3, 0.9, 0.99, 1.0])
def test_bounds_are_those_of_the_binomial_distribution(k, accuracy):
    from scipy.stats import binom

    least = least_right(k, accuracy, 1e-4)
    bound = 1e-4 / (k * (k + 1))
    assert binom.cdf(least - 1, k, accuracy) <= bound * (1 + 1e-6)
    assert least == k or binom.cdf(least, k, accuracy) > bound * (1 - 1e-6)
    for swapped in (0.0, 0.1, 1.0):
        power = notice_probability(k, swapped, accuracy, 1e-4)
        assert power == pytest.approx(binom.cdf(least - 1, k, accuracy * (1 - swapped)), abs=1e-9)


def test_rows_of_a_call_that_failed_are_asked_again():
    known = KnownAnswers(torch.randn(50, 3), torch.randn(50, 2), rate=0.0)
    assert not known.flip()
    rows = known.choose(3)
    assert known.flip() and torch.equal(known.choose(3), rows)
    known.check(rows, known._known[rows])
    assert not known.flip() and (known.rows, known.right) == (3, 3)
    with pytest.raises(OtherAnswerError, match="of 6 rows with known answers 3"):
        known.check(known.choose(3), None)  # a value left its range, which it does not for known rows
    assert repr(known) == "KnownAnswers(50 rows)"


@pytest.mark.parametrize(
    "given",
    [
        {"x": X}, {"x": X, "answers": X, "labels": torch.zeros(2)}, {"x": X, "answers": X[:1]}, {"x": 3, "answers": X},
        {"x": X, "labels": X}, {"x": X, "answers": X, "accuracy": 0.9}, {"x": X, "answers": X, "rate": 1.0},
        {"x": X, "labels": torch.zeros(2), "accuracy": 0}, {"x": X, "labels": torch.zeros(2), "accuracy": math.nan},
        {"x": X, "answers": X, "rate": "0.1"}, {"x": X[:0], "answers": X[:0]}, {"x": X, "answers": X, "near": -1},
    ],
)  # fmt: skip
def test_known_answers_that_are_none(given):
    with pytest.raises(ArgumentError, match=r"known answers|rows|accuracy"):
        KnownAnswers(**given)


# An auditor who has the weights.


def checks_of(model, calls: int = 2, change=lambda secure: None) -> tuple[list[DecoyCheck], object]:
    """A's records of decoys, and the secure model."""
    own, found = DecoyCheck.note, []
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(DecoyCheck, "note", lambda self: found.append(self) or own(self))
        secure = secured(model)
        with decoy_call():
            for _ in range(calls):
                secure(X)
                change(secure)
    return found, secure


def weights_of(secure) -> dict[str, torch.Tensor]:
    inputs = secure.inputs_of(X)
    return {name: value for name, value in secure._program_inputs(inputs).items() if name not in inputs.names}


@pytest.mark.parametrize("model", [SMALL, SMOOTH])
def test_an_auditor_finds_the_weights_that_were_masked(model):
    found, secure = checks_of(model)
    for check in found:
        check.check_model(weights_of(secure))
        check.check_model(weights_of(secure))  # as often as one likes
        with pytest.raises(OtherAnswerError, match="other messages than these weights give"):
            check.check_model(weights_of(secured(other(model))))


def test_an_auditor_finds_an_a_that_masks_one_model_and_computes_with_another(monkeypatch):
    """The masked weights are of the committed model; A adds to what it sends in a call."""
    from sectorch.choreography.run.party import PartyRuntime
    from sectorch.session import A

    own, note, found = PartyRuntime.transfer, DecoyCheck.note, []
    monkeypatch.setattr(DecoyCheck, "note", lambda self: found.append(self) or note(self))

    def transfer(self, line, value):
        false = self.me == A == line.src and line.phase.name != "SETUP" and line.label == "masked_A"
        if false and line.path == "reveal":
            value[-1] += 1 << 20  # one more in one result
        return own(self, line, value)

    run(SMALL, [(X, True)])
    (honest,) = found
    honest.check_model(weights_of(secured()))
    found.clear()
    monkeypatch.setattr(PartyRuntime, "transfer", transfer)
    assert run(SMALL, [(X, True)])["A"][1].statements.found is None
    (check,) = found
    check.run()  # S is not accused
    with pytest.raises(OtherAnswerError, match="other messages than these weights give"):
        check.check_model(weights_of(secured()))


@pytest.mark.parametrize("network", ["lan", "wan"])
def test_what_an_auditor_is_shown_draws_no_other_call(network, monkeypatch):
    """Streams of labels are those of the setup alone: each call has a secret of its own, prepared or not."""
    drawn, own = set(), PairKey._fill

    def fill(self, label, call, *more):
        drawn.add(("call" if self._one_call else "labels", call))
        return own(self, label, call, *more)

    monkeypatch.setattr(PairKey, "_fill", fill)
    secure = secured(SMOOTH, Scheme(accountable=True, network=network))
    secure(X)
    secure.preprocess(X)
    secure(X)
    with decoy_call():
        secure(X)
    setup = secure.session.setup_of(secure.choreography(X)).call
    of_labels = {call for kind, call in drawn if kind == "labels"}
    assert of_labels == {setup} and len({call for kind, call in drawn if kind == "call"} - {setup}) == 3


@pytest.mark.sectorch_long
def test_repeats_accuse_nobody_in_many_decoys():
    for model in (SMALL, SMOOTH):
        secure = secured(model)
        with decoy_call():
            for _ in range(1500):
                secure(X)
        assert secure.session.statements.repeats.compared > 600
