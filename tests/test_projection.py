"""Each party in a thread of its own, with its own keys and no other values: protocol code never asks who is here."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import CASES, World, located, play, ring_values, run_with_profile, world_of

from sectorch.choreography import Located, Net, Party, Phase
from sectorch.errors import MaterialError
from sectorch.located import compute
from sectorch.mpc.linear import linear
from sectorch.mpc.seed import seed
from sectorch.products import Conv2d
from sectorch.randomness import PairKey
from sectorch.runtime.closures import Closures
from sectorch.runtime.material import Tape
from sectorch.runtime.projection import Recording
from sectorch.session import Session
from sectorch.tensor import SecretTensor


class Quiet(Exception):
    """Another party has failed; this one stops waiting for it."""


class OneParty:
    """The runtime of one party: it holds keys of its own, queues along its channels, and nobody else's values."""

    ideal = False

    def __init__(self, party: Party, session: bytes, queues: dict):
        self.party, self.session, self.queues = party, session, queues
        self.here = frozenset((party,))
        self.keys: dict[frozenset[Party], PairKey] = {}
        self.seen: list = []

    def draw(self, pair, label, call, draw, count):
        assert self.party in pair
        return self.keys[pair].words(label, call, draw, count)

    def install(self, pair, secret):
        assert self.party in pair
        key = PairKey(bytes(secret.tolist()), self.session)
        assert self.keys.setdefault(pair, key).same_secret(key)

    def transfer(self, line, value):
        self.seen.append(line)
        tag = (line.call, line.path, line.label, line.shape, line.dtype)
        if self.party == line.src:
            assert not value.is_meta
            assert (value.shape, value.dtype) == (line.shape, line.dtype)
            self.queues[line.src, line.dst].put((tag, value.clone()))
        elif self.party == line.dst:
            assert value.is_meta
            # The limit only keeps a broken protocol from hanging; parties that fail say so through the queue.
            expected, value = self.queues[line.src, line.dst].get(timeout=600)
            if expected is Quiet:
                raise Quiet
            assert expected == tag
        else:
            assert value.is_meta
        return value

    def computed(self, path, owners, phase, seconds):
        assert self.party in owners


class Kept(Recording):
    """Also keeps what was brought."""

    def __init__(self, runtime, call):
        super().__init__(runtime, call)
        self.call, self.given = call, []

    def brought(self, value, name):
        super().brought(value, name)
        if value.phase == Phase.ONLINE:
            self.given.append(value._value)


def project(case, inputs, recorded=None):
    """Run a case with one party per thread; what each of them read, saw of the ledger, and left in the queues.

    `recorded(runtime, recording, outputs)` goes on in the thread of each party, and gives what it read.
    """
    clients = [Party("Q", "Q"), *(Party(f"A{i}", "A") for i in range(case.answering))]
    server = Party("S", "S")
    queues = {edge: queue.Queue() for c in clients for edge in ((c, server), (server, c))}
    read, runtimes, failures = {}, {}, []

    def live(party: Party):
        torch.set_num_threads(1)
        runtime = runtimes[party] = OneParty(party, b"a session in tests", queues)
        pairs = []
        for i, answering in enumerate(clients[1:]):
            nets = [
                Net(runtime, call, clients[0], answering, server, base)
                for call, base in ((i, Phase.SETUP), (case.answering + i, Phase.OFFLINE))
            ]
            seed(nets[0], first=i == 0)
            pairs.append(tuple(nets))
        if recorded is None:
            read[party] = play(World(pairs), case.program, inputs, case.answering)
        else:
            net = pairs[0][1]
            net.recording = Kept(runtime, net.call)
            read[party] = recorded(runtime, net.recording, play(World(pairs), case.program, inputs))

    def guarded(party: Party):
        try:
            live(party)
        except BaseException as error:
            if not isinstance(error, Quiet):
                failures.append(error)
            for (src, _), edge in queues.items():
                if src == party:
                    edge.put((Quiet, None))

    threads = [threading.Thread(target=guarded, args=(party,)) for party in (*clients, server)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return read, runtimes, queues, clients[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_projections_together_give_the_result_at_Q(case):
    inputs = case.inputs(70)
    read, runtimes, queues, Q = project(case, inputs)
    case.check(inputs, read[Q])
    for party, outputs in read.items():
        assert all(o.is_meta for o in outputs) == (party != Q), "the others learn its shape"
    assert all(q.empty() for q in queues.values())
    ledgers = [runtime.seen for runtime in runtimes.values()]
    assert all(ledger == ledgers[0] for ledger in ledgers), "all parties know of the same messages"
    for party, runtime in runtimes.items():
        assert set(runtime.keys) == {pair for r in runtimes.values() for pair in r.keys if party in pair}
    if case.answering == 1:
        _, profile = run_with_profile(Session(), case, inputs)
        seeds = len(ledgers[0]) - len(profile.ledger)
        assert [(m.path, m.label, m.phase, m.round, m.shape) for m in ledgers[0][seeds:]] == [
            (m.path, m.label, m.phase, m.round, m.shape) for m in profile.ledger
        ]


@pytest.mark.parametrize("case", [case for case in CASES if case.answering == 1], ids=str)
def test_a_recorded_program_is_taken_again_by_each_party(case):
    """In a call of its own, and once ahead of its input: the same messages, and a right result at Q."""

    def again(runtime, recording, first):
        seen = len(runtime.seen)
        projection = recording.finish(first)
        assert_holds_no_secret(projection)
        whole = projection.call(runtime, 100, *recording.given)
        tape = Tape(101, runtime.session)
        projection.prepare(runtime, tape)
        ahead = len(runtime.seen)
        online = projection.replay(runtime, tape, *recording.given)
        assert {m.phase for m in runtime.seen[ahead:]} <= {Phase.ONLINE}
        about = lambda lines: [(m.path, m.label, m.phase, m.round, m.shape) for m in lines if m.phase != Phase.SETUP]
        wanted = about([m for m in runtime.seen[:seen] if m.call == recording.call])
        assert about([m for m in runtime.seen if m.call == 100]) == wanted
        assert sorted(map(str, about([m for m in runtime.seen if m.call == 101]))) == sorted(map(str, wanted))
        assert {m.call for m in runtime.seen[seen:]} <= {100, 101}, "nothing is set up again"
        assert tape.bytes == 0
        with pytest.raises(MaterialError, match="used already"):
            projection.replay(runtime, tape, *recording.given)
        return [first, whole, online]

    inputs = case.inputs(70)
    read, _, queues, Q = project(case, inputs, again)
    for party, runs in read.items():
        for outputs in runs:
            assert all(o.is_meta for o in outputs) == (party != Q)
    for outputs in read[Q]:
        case.check(inputs, outputs)
    assert all(q.empty() for q in queues.values())


@pytest.mark.parametrize("case", [case for case in CASES if case.answering == 1], ids=str)
def test_a_tape_made_one_way_is_used_the_other_way(case):
    """From above and recorded are the same program."""
    session, inputs, kept = Session(), case.inputs(70), {}
    party = session.answering[0]
    with session.call(party) as net:
        net.recording = Kept(session.runtime, net.call)
        projection = net.recording.finish(play(world_of(session, net, kept), case.program, inputs))
        given = net.recording.given
    with session.prepare(party) as tape:
        located(world_of(session, session.net(party), kept), case.program, [x.to("meta") for x in inputs])
    case.check(inputs, projection.replay(session.runtime, tape, *given))
    with session.replay(party, session.prepare_again(projection)) as net:
        case.check(inputs, play(world_of(session, net, kept), case.program, inputs))


def test_threads_that_begin_with_a_recorded_program_go_on_with_other_shapes():
    """As in a service: what a thread, a session or a tape keeps of a recorded call is used in one from above."""
    session, kept, weight = Session(), {}, ring_values((5, 3, 3, 3), 63, 1)
    product = Conv2d((1, 1), (1, 1))
    party, wanted = session.answering[0], lambda x: torch.conv2d(x, weight, padding=1)
    program = lambda w, x: linear(w.net, w.setup, product, x, w.weight(weight))

    def from_above(x, tape=None):
        with session.call(party) if tape is None else session.replay(party, tape) as net:
            net.recording = Kept(session.runtime, net.call)
            outputs = play(world_of(session, net, kept), program, [x])
            assert torch.equal(outputs[0], wanted(x))
            return net.recording.finish(outputs)

    shapes = [(2, 3, 8, 8), (64, 3, 4, 4), (1, 3, 16, 16), (80, 3, 32, 32)]
    projections = [from_above(ring_values(shape)) for shape in shapes]

    def serve(first: int) -> None:
        for i, shape in enumerate((*shapes[first:], *shapes[:first])):
            x = ring_values(shape, 63, i)
            (out,) = session.again(projections[(first + i) % len(shapes)], x)
            assert torch.equal(out, wanted(x))
            from_above(x, session.prepare_again(projections[(first + i) % len(shapes)]))
            from_above(x[:, :, 1:, 1:])

    for first in range(len(shapes)):
        with ThreadPoolExecutor(1) as fresh:  # a thread of its own, whose scratch has still to be made
            fresh.submit(serve, first).result()


def assert_holds_no_secret(projection) -> None:
    """No recorded function keeps a value of the call that it was recorded in."""

    def walk(value, depth=0):
        assert not isinstance(value, (Located, SecretTensor)), value
        if depth < 6:
            for inner in getattr(value, "__closure__", None) or ():
                walk(inner.cell_contents, depth + 1)
            for inner in (
                [*getattr(value, "args", ()), getattr(value, "func", None)] if isinstance(value, partial) else ()
            ):
                walk(inner, depth + 1)
            for inner in value if isinstance(value, (list, tuple)) else ():
                walk(inner, depth + 1)
            for field in getattr(value, "__dataclass_fields__", ()):
                walk(getattr(value, field), depth + 1)

    for one, _ in projection._all:
        walk(getattr(one.step, "f", None))
    assert repr(projection).startswith("Projection(")


def test_a_function_whose_variables_change_is_noticed():
    closures = Closures()
    for i in range(3):
        inner = lambda: i
        closures.note(partial(lambda a, inner=inner: (a, inner()), 7))
    assert not closures.changed, "a default is the function's own"
    for i in range(3):
        closures.note(partial(lambda a: (a, i, inner()), 7))
    assert closures.changed and not closures.located

    def forever(n):
        return n if n == 0 else forever(n - 1)

    closures = Closures()
    closures.note(forever)
    assert not closures.changed
    closures.note(later := lambda: unset)
    assert not closures.changed
    unset = 1
    assert closures.changed and later() == 1


def test_what_cannot_be_repeated_is_not_recorded():
    """A value of another call is not the same next time, nor is one that a function takes past its arguments."""
    session = Session()
    A = session.answering[0]
    with session.call(A) as net:
        other = -net.own(net.Q, torch.ones(2))
    with session.call(A) as net:
        net.recording = Recording(session.runtime, net.call)
        x = net.own(net.Q, torch.ones(2)) + other
        assert net.recording.finish([net.read(x, net.Q)]) is None
    with session.call(A) as net:
        net.recording = Recording(session.runtime, net.call)
        own = net.own(net.Q, torch.ones(2))
        x = compute(lambda v: v + torch.zeros(own.shape), own)
        assert net.recording.finish([net.read(x, net.Q)]) is None
    with session.call(A) as net:
        net.recording = Recording(session.runtime, net.call)
        x = net.own(net.Q, torch.ones(2))
        for k in range(3):
            x = compute(lambda v: v + k, x)
        assert net.recording.finish([net.read(x, net.Q)]) is None
