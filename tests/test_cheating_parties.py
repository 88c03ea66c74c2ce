"""What one party alone can change and learn: views under falsified messages, and tampering in trainings."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import some
from distributed_parties import Pipe, in_threads, runtime_of
from server_cheats import run
from torch import nn

import sectorch
from sectorch import Session
from sectorch.choreography.net import Sent
from sectorch.choreography.run.party import PartyRuntime
from sectorch.config import Scheme
from sectorch.errors import DisagreementError, RangeExceededError
from sectorch.session import A, Q, S
from sectorch.testing.outcomes import distinguishable

torch.manual_seed(0)
ROWS = 8
SMALL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
OTHER = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
with torch.no_grad():
    for p in OTHER.parameters():
        p.mul_(-3)
ZEROS, LARGE = torch.zeros(ROWS, 3), torch.full((ROWS, 3), 1.75)


def everywhere(seed: int) -> Any:
    """A party that falsifies: random words, bits and messages as wholes, at a rate of a third."""
    drawn = random.Random(seed)

    def falsify(number: int, line: Sent, value: torch.Tensor) -> torch.Tensor:
        kind = drawn.randrange(6)
        if kind > 1 or not value.numel():
            return value
        changed = value.clone().reshape(-1)
        if kind:
            noise = torch.randint(-(1 << 31), 1 << 31, changed.shape, generator=torch.Generator().manual_seed(number))
            changed += noise.to(changed.dtype)
        else:
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8 * changed.element_size() - 1)
        return changed.view(value.shape)

    return falsify


def view(cheater: Any, model: nn.Module, x: torch.Tensor, seed: int, network: str, calls: int = 40) -> dict:
    """What a cheater receives, by the place of the message in its call."""
    seen: list = []
    scheme = Scheme(accountable=cheater == S, network=network)
    found = run(model, [(x, False)] * calls, everywhere(seed), scheme, goes_on=True, cheater=cheater, seen=seen)
    assert not [value for value in found.values() if isinstance(value, BaseException)], found
    by_place: dict[tuple, list] = {}
    places: dict[int, int] = {}
    for call, line, value in seen:
        places[call] = places.get(call, -1) + 1
        by_place.setdefault((places[call], line.path, line.label), []).append(value.reshape(-1).numpy())
    return {key: np.stack(values) for key, values in by_place.items() if key[1] != "attest" or "note" in key[2]}


def apart(first: dict, second: dict) -> list[str]:
    found = [f"only one secret has {key}" for key in first.keys() ^ second.keys()]
    for key in first.keys() & second.keys():
        a, b = (np.ascontiguousarray(one[key].reshape(-1)) for one in (first, second))
        if text := distinguishable(a, b):
            found.append(f"{key}: {text}")
    return found


VIEWS = [(S, SMALL, LARGE, "lan"), (A, SMALL, LARGE, "lan"), (S, OTHER, ZEROS, "lan")]
VIEWS += [(cheater, model, x, "wan") for cheater, model, x, _ in VIEWS]


@pytest.mark.parametrize("number", some(range(len(VIEWS)), [0, 1]))
def test_a_party_that_falsifies_sees_nothing_of_inputs_or_weights(number):
    """Under the same falsified messages its view of another input, or at S of another model, is the same."""
    cheater, model, x, network = VIEWS[number]
    assert not apart(view(cheater, SMALL, ZEROS, 1, network), view(cheater, model, x, 1, network))


@pytest.mark.sectorch_long
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize(("cheater", "model", "x", "network"), VIEWS[:3])
def test_so_it_is_for_other_falsified_messages_of_many_calls(cheater, model, x, network, seed):
    assert not apart(view(cheater, SMALL, ZEROS, seed, network, 150), view(cheater, model, x, seed, network, 150))


def test_the_views_of_a_mask_that_is_used_twice_are_told_apart(monkeypatch):
    """The control: a view that has something of the input is found."""
    own = PartyRuntime.transfer

    def transfer(self, line, value):
        bare = self.me == Q == line.src and line.label == "x_S"
        return own(self, line, torch.full_like(value, int(value.numel())) if bare else value)

    honest = view(S, SMALL, ZEROS, 1, "lan", 30)
    monkeypatch.setattr(PartyRuntime, "transfer", transfer)
    assert any("x_S" in text for text in apart(honest, view(S, SMALL, ZEROS, 1, "lan", 30)))


# Trainings: parties compare what is public in the program, and no message.


def train(session: Session, own: bool, data: bool, rate: float = 0.25, steps: int = 2) -> dict[str, torch.Tensor]:
    """A model of A's, trained with Q's rows, whose weights S learns in the end."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(4)
    rows, labels = torch.rand(2, 6, 3, generator=generator), torch.randint(0, 2, (2, 6), generator=generator)
    for p in () if own else net.parameters():
        nn.init.constant_(p, 1.0)
    net = sectorch.shared(net, owner="A", session=session)
    optimiser = torch.optim.SGD(net.parameters(), rate)
    for i in range(steps):
        given = sectorch.share(rows[i] if data else None, session=session, owner="Q", shape=(6, 3))
        with sectorch.step(session):
            optimiser.zero_grad()
            F.cross_entropy(net(given), labels[i]).backward()
            optimiser.step()
    return {name: p.reveal(to="S") for name, p in net.named_parameters()}


def training(runtimes: dict | None = None, rates: dict | None = None) -> dict[str, Any]:
    """What each party has of a training, of which some have other runtimes or learning rates."""

    def party(me: Any, ends: dict) -> Any:
        session = Session(runtime=(runtimes or {}).get(me, runtime_of)(me, ends))
        if isinstance(session.runtime, Liar):
            session.agreement.compare = lambda by: compare_and_lie(session, by)
        return train(session, me == A, me == Q, (rates or {}).get(me.name, 0.25))

    return in_threads([(Q, S), (A, S)], party)


class Liar(PartyRuntime):
    """S's runtime: it answers each digest with the same digest."""

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if line.path == "agree" and line.src == S:
            value = self.digests[line.dst.name]
        moved = super().transfer(line, value)
        if line.path == "agree" and line.dst == S:
            self.digests[line.src.name] = moved.clone()
        return moved

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.digests: dict[str, torch.Tensor] = {}


def liar(me: Any, ends: dict) -> PartyRuntime:
    return Liar(me, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})


def compare_and_lie(session: Session, party: Any) -> None:
    """S takes part in the comparison, and finds nothing wrong with what came."""
    from sectorch import transcript

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transcript, "_same", lambda other, own, came: own)
        transcript.Agreement.compare(session.agreement, party)


def is_right(found: dict[str, Any]) -> bool:
    reference = train(Session(reference=True), True, True)
    return all(torch.equal(value, reference[name]) for name, value in found["S"].items())


def errors_of(found: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in found.items() if isinstance(value, BaseException)}


def test_a_training_without_a_cheater_is_right():
    assert is_right(training())


class Tampering(PartyRuntime):
    """A party that adds to its share of a value: to one word of what it sends, and of what it opens itself."""

    unit, seed = 1 << 30, 0
    _at: int | None = None

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        opening = line.path == "truncate/open_masked" and self.me in (line.src, line.dst) and line.shape.numel()
        if self.me != Q and opening and (self._at is None or line.src != self._first):
            before, self._first = self._at, line.src
            self._at = random.Random(self.seed).randrange(line.shape.numel()) if before is None else before
            return self._changed(super().transfer(line, self._changed(value, line.src)), line.dst)
        if self.me == Q == line.src and line.label == "x_S":
            value = self._changed(value, Q)
        return super().transfer(line, value)

    def _changed(self, value: torch.Tensor, by: Any) -> torch.Tensor:
        if self.me != by:
            return value
        value = value.clone(memory_format=torch.contiguous_format)
        value.view(-1)[(self._at or 0) % value.numel()] += self.unit
        return value


@pytest.mark.parametrize("cheater", [S, A, Q])
@pytest.mark.parametrize("seed", some(range(1, 6), [1]))
def test_a_small_change_of_one_share_in_a_training_is_noticed_by_nobody(cheater, seed):
    """Digests are of public numbers and shapes, and of no message."""

    def runtime(me: Any, ends: dict) -> PartyRuntime:
        made = Tampering(me, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})
        made.seed, made.unit = seed, 1 << 12 if me == Q else 1 << 30
        return made

    found = training({cheater: runtime})
    assert not errors_of(found) and not is_right(found)


def test_a_large_change_in_a_training_leaves_the_range_and_nothing_is_revealed():
    def runtime(me: Any, ends: dict) -> PartyRuntime:
        made = Tampering(me, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})
        made.unit = 1 << 58
        return made

    assert errors_of(training({A: runtime}))["Q"] is RangeExceededError


@pytest.mark.parametrize("other", ["Q", "A", "S"])
def test_another_learning_rate_is_noticed_before_anything_of_the_step_is_sent(other):
    found = training(rates={other: 0.5})
    assert DisagreementError in errors_of(found).values() and len(errors_of(found)) == 3


def test_an_s_that_repeats_to_each_party_its_own_digest_hides_that_the_others_differ():
    """The lie is consistent: Q and A compare with S, and not with each other."""
    honest, lied = training(rates={"Q": 0.5}), training({S: liar}, {"Q": 0.5})
    assert DisagreementError in errors_of(honest).values()
    assert DisagreementError not in errors_of(lied).values()
