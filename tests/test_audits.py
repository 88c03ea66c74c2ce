"""Audited dealing: the same bits, a Q that deals falsely is caught as often as is stated, and nothing else is computed.

What Q can falsify is what it sends: its messages to S ahead of the query, and what it promises of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from cases import long
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

import sectorch
from sectorch import audits
from sectorch.audits import _Here
from sectorch.choreography import Phase
from sectorch.choreography.ledger import Cost, Transcript
from sectorch.choreography.net import Move
from sectorch.choreography.program.projection import DealerSplit
from sectorch.choreography.run.local import LocalRuntime
from sectorch.choreography.run.replay import DealerReplay
from sectorch.choreography.streams import PairKey
from sectorch.config import MOST_AUDITED, Scheme
from sectorch.errors import ArgumentError, FalseDealingError, MaterialError, SectorchError, StreamReuseError
from sectorch.mpc.star.audit import Promise
from sectorch.session import Session


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        return nn.functional.gelu(self.attention(x, x, x, need_weights=False)[0])


torch.manual_seed(0)
ZOO = {
    "convolution": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)),
        torch.randn(2, 1, 6, 6),
    ),
    "attention": (Attended(), torch.randn(1, 3, 6)),
    "signs": (nn.Sequential(nn.Linear(3, 4), nn.Hardtanh(), nn.Linear(4, 2), nn.Softmax(-1)), torch.randn(2, 3)),
}
for model, _ in ZOO.values():
    model.eval()

TINY = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), torch.randn(1, 2)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [*((name, Scheme(audited=2)) for name in ZOO), ("convolution", Scheme(audited=3, network="wan"))],
)
def test_an_audited_call_gives_the_bits_of_the_reference(name, scheme):
    model, x = ZOO[name]
    secure = sectorch.secure(model, scheme, session=Session())
    plain = sectorch.reference(model, dataclasses.replace(scheme, audited=1))(x)
    assert torch.equal(secure(x), plain)
    secure.preprocess(len(x))
    assert torch.equal(secure(x), plain) and torch.equal(secure(x[:1]), plain[:1])


@pytest.mark.parametrize("name", ["convolution", "signs"])
def test_q_that_keeps_nothing_deals_the_same(name, monkeypatch):
    """As where a call is larger than what Q keeps of one: it deals the call that is used a second time."""
    model, x = ZOO[name]
    begun, finished = [], []
    begin, finish = DealerSplit.begin, DealerSplit.finish
    monkeypatch.setattr(DealerSplit, "begin", lambda *a: begun.append(a[2]) or begin(*a))
    monkeypatch.setattr(DealerSplit, "finish", lambda *a: finished.append(a[2]) or finish(*a))
    for most, times in ((audits.KEPT_BYTES, 1), (0, 0)):
        monkeypatch.setattr(audits, "KEPT_BYTES", most)
        begun.clear(), finished.clear()
        secure = sectorch.secure(model, Scheme(audited=3), session=Session())
        assert torch.equal(secure(x), sectorch.reference(model)(x))
        assert len(begun) == 3 + 2, "Q promises three, and A looks at two"
        assert len(finished) == times


def test_what_is_kept_of_an_audited_call_is_no_more_than_of_another():
    model, x = ZOO["convolution"]
    session, secure = begun(model, x, Scheme(audited=2))
    program, inputs = (
        secure.choreography(x),
        secure._program_inputs(secure._check_inputs(sectorch.nn.inputs.Inputs.of(x))),
    )
    assert session.prepare(program, inputs, 2).bytes <= session.prepare(program, inputs).bytes


@pytest.mark.parametrize("count", [2, 5])
def test_what_an_audit_costs_in_bytes(count):
    model, x = ZOO["convolution"]
    costs = []
    for scheme in (Scheme(), Scheme(audited=count)):
        secure = sectorch.secure(model, scheme, session=Session())
        secure(x)
        with Cost() as cost:
            secure(x)
        costs.append((cost.online_bytes, cost.offline_bytes))
    (online, offline), (online_audited, offline_audited) = costs
    assert online_audited == online
    # Promised to S and on to A: 64 bytes a call and a signature; shown: 32 a call; looked: a byte; chosen: a word.
    assert offline_audited - offline == 2 * (64 * count + 64) + 32 * count + 1 + 8


# A Q that cheats.


@contextmanager
def cheating(change: Callable[[int, torch.Tensor], torch.Tensor], promising: set[int], dealing: set[int] | None = None):
    """Q falsifies its messages of some calls: those of `promising` where it promises, of `dealing` where it deals.

    Args:
        change: of the message's number in its call, and its content; a copy.
    """
    dealing = promising if dealing is None else dealing
    at: dict[tuple[bool, int], int] = {}

    def falsified(line, value, promise: bool):
        calls = promising if promise else dealing
        if line.src.role != "Q" or line.phase != Phase.OFFLINE or line.path == "audit" or line.call not in calls:
            return value
        number = at.setdefault((promise, line.call), 0)
        at[promise, line.call] += 1
        return change(number, value.clone())

    dealt, promised = LocalRuntime.transfer, [False]

    def promise(self):
        promised[0] = True
        try:
            return own(self)
        finally:
            promised[0] = False

    own, rehearsed = _Here.promise, DealerReplay.transfer
    patch = pytest.MonkeyPatch()
    patch.setattr(_Here, "promise", promise)
    patch.setattr(
        DealerReplay, "transfer",
        lambda self, line, value: rehearsed(self, line, falsified(line, value, True) if promised[0] else value),
    )  # fmt: skip
    patch.setattr(LocalRuntime, "transfer", lambda self, line, value: dealt(self, line, falsified(line, value, False)))
    try:
        yield
    finally:
        patch.undo()


def flipped(bit: int, where: int, message: int) -> Callable[[int, torch.Tensor], torch.Tensor]:
    def change(number, value):
        if number == message:
            flat = value.view(-1).view(torch.uint8)
            flat[where % len(flat)] ^= 1 << bit
        return value

    return change


def every(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda number, value: change(value)


def messages_of(model: nn.Module, x: torch.Tensor, scheme: Scheme) -> list[tuple[str, int]]:
    """What Q deals in a call: labels and bytes."""
    program = sectorch.secure(model, scheme, session=Session()).choreography(x)
    return [
        (f"{m.protocol}/{m.label}", m.bytes) for m in program.messages if m.src.role == "Q" and m.phase == Phase.OFFLINE
    ]


def begun(model: nn.Module, x: torch.Tensor, scheme: Scheme) -> tuple[Session, nn.Module]:
    """A session, and a secure module of it that was called: its setup has its number."""
    session = Session()
    secure = sectorch.secure(model, scheme, session=session)
    secure(x)
    return session, secure


def next_calls(session: Session, count: int) -> range:
    """The numbers of the calls of the next audit."""
    first = session._number(None) + 1
    return range(first, first + count)


@pytest.mark.parametrize("network", ["lan", *long("wan")])
def test_each_message_that_is_dealt_otherwise_than_promised_is_noticed(network):
    """One bit of any message, at its beginning, in the middle and at its end: S has the digest."""
    scheme = Scheme(audited=2, network=network)
    model, x = ZOO["convolution"]
    dealt = messages_of(model, x, Scheme(network=network))
    assert {"lan": {"deal/v_S", "deal_bits/v_S"}, "wan": {"deal_key/seeds"}}[network] <= {name for name, _ in dealt}
    session, secure = begun(model, x, scheme)
    kinds = {name: number for number, (name, size) in enumerate(dealt) if size}
    for number in kinds.values():
        for bit, where in ((0, 0), (7, dealt[number][1] // 2), (6, dealt[number][1] - 1)):
            calls = set(next_calls(session, 2))
            with cheating(flipped(bit, where, number), set(), calls), pytest.raises(FalseDealingError, match="dealt"):
                secure(x)
    assert torch.equal(secure(x), sectorch.reference(model, Scheme(network=network))(x)), "an honest Q goes on"


def test_a_q_that_has_kept_something_else_than_it_promised_is_noticed(monkeypatch):
    """One bit of any message, changed after the promise in what is sent without being worked out again."""
    model, x = ZOO["convolution"]
    (_, secure), finish, changed = begun(model, x, Scheme(audited=2)), DealerSplit.finish, []

    def other(self, runtime, call, settled, inputs, kept):
        moves = [line for line in self._rest if isinstance(line.step, Move) and line.step.header.src.role == "Q"]
        sent = [line.sources[0] for line in moves if line.sources[0] in kept and line.step.header.bytes]
        assert len(sent) == len([line for line in moves if line.step.header.bytes]), "all of it was kept"
        if len(changed) < len(sent):
            slot = sent[len(changed)]
            changed.append(slot)
            kept[slot] = flipped(len(changed) % 8, -1, 0)(0, kept[slot].clone())
        else:
            monkeypatch.setattr(DealerSplit, "finish", finish)
        return finish(self, runtime, call, settled, inputs, kept)

    monkeypatch.setattr(DealerSplit, "finish", other)
    while DealerSplit.finish is not finish:
        before = len(changed)
        try:
            y = secure(x)
            assert len(changed) == before, "something else was dealt, and used"
        except FalseDealingError as error:
            assert "has dealt something else" in str(error) and error.evidence is None
    assert len(changed) > 10 and torch.equal(y, sectorch.reference(model)(x)), "an honest Q goes on"


DESIGNED = {
    "a low bit": every(lambda v: v ^ 1),
    "2^63, which a product with an even number hides": every(lambda v: v ^ torch.iinfo(v.dtype).min),
    "one number": every(lambda v: torch.full_like(v, 77)),
    "zeros": every(torch.zeros_like),
    "complements": every(torch.bitwise_not),
    "rows in another order": every(lambda v: v.flip(0) if v.dim() and len(v) > 1 else v + 1),
    "one element": flipped(0, 0, 3),
    "the last element": flipped(3, -1, 0),
    "the first message": lambda number, v: v + 1 if number == 0 else v,
    "scaled": every(lambda v: v * 3 + 1),
}  # fmt: skip


@pytest.mark.parametrize("how", DESIGNED)
def test_a_false_promise_is_found_unless_its_call_is_the_one_that_is_used(how):
    """Q promises the false dealing of one call, and deals so: caught if and only if another call is used."""
    model, x = TINY
    session, secure = begun(model, x, Scheme(audited=3))
    found = 0
    for _ in range(6):
        calls = next_calls(session, 3)
        with cheating(DESIGNED[how], {calls[1]}), Transcript() as seen:
            try:
                secure(x)
                caught = None
            except FalseDealingError as error:
                caught = error
        (chosen,) = [int(value) for line, value in seen.lines if (line.path, line.label) == ("audit", "chosen")] or [-1]
        used = {line.call for line, _ in seen.lines if line.path != "audit" and line.phase != Phase.SETUP}
        if caught is None:
            assert chosen == 1 and used == {calls[1]}
        else:
            found += 1
            assert caught.evidence.call == calls[1] and not used, "nothing was dealt, sent or revealed"
            caught.evidence.promise.check(caught.evidence.public)
            assert str(calls[1]) in str(caught) and "Evidence(" in repr(caught.evidence)
            assert caught.evidence.with_A.hex() not in repr(caught.evidence)
    assert found


@pytest.mark.parametrize("name", [lambda a, s: a, lambda a, s: s, lambda a, s: s + a, lambda a, s: b""])
def test_a_promise_that_names_other_streams_is_found(name, monkeypatch):
    """Its digests are right: but of which streams they are, nobody who is shown the evidence later could say."""
    model, x = TINY
    _, secure = begun(model, x, Scheme(audited=2))
    promise, named = _Here.promise, audits._named

    def another(here: _Here) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(audits, "_named", lambda a, s: hashlib.sha256(name(a, s)).digest())
            return promise(here)

    monkeypatch.setattr(_Here, "promise", another)
    with pytest.raises(FalseDealingError, match="another dealing") as caught:
        secure(x)
    found = caught.value.evidence
    at = found.promise.calls.index(found.call)
    assert found.found == found.promise.digests[at]
    assert named(found.with_A, found.with_S) == hashlib.sha256(found.with_A + found.with_S).digest()
    monkeypatch.undo()
    assert torch.equal(secure(x), sectorch.reference(model)(x))


def trials(count: int, of: int) -> int:
    """How often a Q that promises one false dealing is caught."""
    model, x = TINY
    (session, secure), caught = begun(model, x, Scheme(audited=of)), 0
    for number in range(count):
        calls = next_calls(session, of)
        with cheating(every(lambda v: v ^ 1), {calls[number % of]}):
            try:
                secure(x)
            except FalseDealingError:
                caught += 1
    return caught


def unlikely(caught: int, count: int, p: float) -> float:
    """The probability of a count as far from its mean, or farther, on its side: an exact binomial tail, twice."""
    tail = range(caught, count + 1) if caught >= count * p else range(caught + 1)
    return 2 * sum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in tail)


@pytest.mark.parametrize("of", [2, 4])
def test_cheating_is_caught_as_often_as_is_stated(of):
    caught = trials(60, of)
    assert unlikely(caught, 60, 1 - 1 / of) > 1e-6


@pytest.mark.sectorch_long
@pytest.mark.parametrize("of", [2, 4, 10])
def test_cheating_is_caught_as_often_as_is_stated_in_a_thousand_trials(of):
    caught = trials(1000, of)
    print(f"one of {of} used: caught {caught} of 1000, stated {1 - 1 / of:.3f}")
    assert unlikely(caught, 1000, 1 - 1 / of) > 1e-6


@pytest.mark.sectorch_long
def test_a_thousand_falsifications_at_random_are_all_noticed():
    """A random bit of a random message of both calls, promised and dealt alike: one of the two is looked at."""
    model, x = ZOO["convolution"]
    dealt = [(number, size) for number, (_, size) in enumerate(messages_of(model, x, Scheme())) if size]
    session, secure = begun(model, x, Scheme(audited=2))
    pick = torch.Generator().manual_seed(0)
    draw = lambda n: int(torch.randint(n, (1,), generator=pick))
    for _ in range(1000):
        number, size = dealt[draw(len(dealt))]
        with cheating(flipped(draw(8), draw(size), number), set(next_calls(session, 2))):
            with pytest.raises(FalseDealingError):
                secure(x)


def test_nobody_but_a_and_s_can_know_which_call_is_used():
    """The number comes of k_SA, and Q is told after it has promised."""
    model, x = TINY
    secure = sectorch.secure(model, Scheme(audited=4), session=Session())
    with Transcript() as seen:
        for _ in range(24):
            secure(x)
    labels = [line.label for line, _ in seen.lines if line.path == "audit"]
    assert labels == 24 * ["promised", "shown", "promised_on", "looked", "chosen"], "Q is told when A has looked"
    chosen = [int(value) for line, value in seen.lines if line.label == "chosen"]
    assert set(chosen) == {0, 1, 2, 3}


def test_the_streams_of_the_call_that_is_used_are_shown_to_nobody():
    model, x = TINY
    session, secure = begun(model, x, Scheme(audited=3))
    key = session.runtime.keys.of(frozenset((session.Q, session.S)))
    for _ in range(5):
        calls = next_calls(session, 3)
        with Transcript() as seen:
            secure(x)
        by = {line.label: value for line, value in seen.lines if line.path == "audit"}
        (used,) = {line.call for line, _ in seen.lines if line.path != "audit" and line.phase != Phase.SETUP}
        assert used == calls[int(by["chosen"])]
        for place, call in enumerate(calls):
            shown = bytes(by["shown"][32 * place : 32 * place + 32].tolist())
            assert shown == (bytes(32) if call == used else key.of_call(call))
        (dst,) = {line.dst.role for line, _ in seen.lines if line.label == "shown"}
        assert dst == "A"


def test_a_call_of_its_own_key_draws_what_no_other_does():
    """With keys of its own, a call's streams say nothing of others: HKDF of the pair's secret, by the call's number."""
    session = Session()
    pair = frozenset((session.Q, session.S))
    keys = session.runtime.keys
    secrets = {keys.of(pair).of_call(call) for call in range(20)}
    assert len(secrets) == 20
    keys.separate(7)
    assert not torch.equal(keys.words(pair, "r", 7, 0, 4), keys.of(pair).replica().words("r", 7, 0, 4))


def test_draws_of_a_call_of_its_own_key_are_places_of_one_stream():
    """Labels share a key, so no two draws may have one number, whatever their labels; they come in any order."""
    key = PairKey(bytes(32), bytes(16), one_call=True)
    drawn = [tuple(key.words(label, 7, draw, 4).tolist()) for label, draw in (("r", 5), ("s", 2), ("r", 0), ("s", 9))]
    assert len(set(drawn)) == 4
    for label, draw in (("s", 5), ("r", 2), ("r", 5), ("new", 0)):
        with pytest.raises(StreamReuseError, match="was made already"):
            key.words(label, 7, draw, 4)
    assert tuple(PairKey(bytes(32), bytes(16), one_call=True).words("r", 7, 2, 4).tolist()) == drawn[1]
    assert not torch.equal(PairKey(bytes(32), bytes(16)).words("r", 7, 2, 4), torch.tensor(drawn[1]))


def test_what_is_signed_is_one_promise():
    key = Ed25519PrivateKey.generate()
    promise = Promise(bytes(16), "program", (3, 4), (bytes(32), bytes([1]) * 32), (bytes([2]) * 32, bytes([3]) * 32))
    signed = dataclasses.replace(promise, signature=key.sign(promise.statement()))
    public = key.public_key().public_bytes_raw()
    signed.check(public)
    assert Promise.from_message(bytes(16), "program", (3, 4), signed.to_message()) == signed
    others = {
        "session": bytes([1]) * 16, "program": "another", "calls": (4, 3), "digests": promise.digests[::-1],
        "streams": promise.streams[::-1],
    }  # fmt: skip
    for name, value in others.items():
        with pytest.raises(FalseDealingError):
            dataclasses.replace(signed, **{name: value}).check(public)
    with pytest.raises(FalseDealingError):
        signed.check(Ed25519PrivateKey.generate().public_key().public_bytes_raw())


# What is not audited is refused.


def test_what_nobody_would_look_at_is_refused():
    model, x = TINY
    audited = Scheme(audited=2)
    with pytest.raises(ArgumentError, match="Q is trusted: audited=1"):
        sectorch.share(x, scheme=audited)
    with pytest.raises(ArgumentError, match="Q is trusted: audited=1"):
        sectorch.secure(model, audited, session=Session()).in_shares(x)
    with pytest.raises(ArgumentError, match="where Q deals"):
        sectorch.secure(model, audited, session=Session(dealer="D"))(x)
    with pytest.warns(sectorch.errors.LeakyProtocolWarning):
        leaky = sectorch.secure(model, Scheme(relu="privhfl", audited=2), session=Session())
    with pytest.raises(ArgumentError, match=r"recompute|after the query"):
        leaky(x)
    for wrong in (0, -1, MOST_AUDITED + 1, 2.0, True, "2", None):
        with pytest.raises(ArgumentError, match="audited is a whole number"):
            Scheme(audited=wrong)


def test_a_module_that_runs_operation_by_operation_is_not_audited():
    class Changing(nn.Module):
        calls = 0

        def forward(self, x):
            Changing.calls += 1
            return x * float(Changing.calls)

    secure = sectorch.secure(Changing().eval(), Scheme(audited=2), session=Session())
    with pytest.raises(SectorchError):
        secure(torch.ones(2))


def test_material_of_an_audited_call_is_used_once():
    model, x = TINY
    session = Session()
    secure = sectorch.secure(model, Scheme(audited=2), session=session)
    program, inputs = (
        secure.choreography(x),
        secure._program_inputs(secure._check_inputs(sectorch.nn.inputs.Inputs.of(x))),
    )
    material = session.prepare(program, inputs, 2)
    session.run(program, inputs, material, 2)
    with pytest.raises(MaterialError):
        session.run(program, inputs, material, 2)


def test_threads_audit_side_by_side():
    model, x = ZOO["convolution"]
    secure = sectorch.secure(model, Scheme(audited=2), session=Session())
    plain = secure(x)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(y, plain) for y in pool.map(lambda _: secure(x), range(6)))


def test_programs_of_one_model_are_audited_in_any_order():
    """What they have in common is drawn once, with the numbers that it has where it was first needed."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    shapes = [torch.randn(rows, 3) for rows in (1, 2, 5)]
    for audited in ([2, 2, 2], [1, 2, 1], [2, 1, 2]):  # as a program of one's own may be run either way
        secure = sectorch.secure(model, Scheme(audited=2), session=Session())
        for x, count in zip(shapes, audited, strict=True):
            secure.full_scheme = Scheme(audited=count)
            assert torch.equal(secure(x), sectorch.reference(model)(x))


def test_threads_audit_programs_of_their_own():
    """Each has another shape, and all begin at once: an honest Q is found fault with in none."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    secure = sectorch.secure(model, Scheme(audited=2), session=Session())
    shapes = [torch.randn(rows, 3) for rows in range(1, 7)]
    with ThreadPoolExecutor(6) as pool:
        for x, y in zip(shapes, pool.map(secure, shapes), strict=True):
            assert torch.equal(y, sectorch.reference(model)(x))
