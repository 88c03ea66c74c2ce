"""Each party in a thread of its own, with its own keys and no other values: protocol code never asks who is here."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy
import pytest
import torch
from cases import some
from distributed_parties import Pipe, in_threads
from helpers import CASES, World, play, ring_values, run_with_profile, stands, traced, world_of
from torch import nn

import sectorch
from sectorch import errors
from sectorch.choreography import Located, Net, Party, Phase, leaf
from sectorch.choreography.ledger import Observer, Profile
from sectorch.choreography.located import compute
from sectorch.choreography.net import Move
from sectorch.choreography.program.projection import Material, Setup, part_of
from sectorch.choreography.program.trace import Closures
from sectorch.choreography.roles import STAR, Cast
from sectorch.choreography.run.party import PartyRuntime
from sectorch.errors import ArgumentError, DtypeError, MaterialError, SessionMismatchError, ShapeError
from sectorch.mpc.star.key_agreement import seed
from sectorch.mpc.star.linear import linear, mask_weight
from sectorch.mpc.star.shares import reveal, share
from sectorch.nn import graph_cache
from sectorch.ring.products import Conv2d
from sectorch.session import Session
from sectorch.tensor import SecretTensor


def star(Q: Party, A: Party, S: Party) -> Cast:
    return Cast(STAR, {"Q": Q, "A": A, "S": S, "D": Q})


class Noting(PartyRuntime):
    """A party's runtime that notes the messages it hears of."""

    def __init__(self, me: Party, ends: dict):
        super().__init__(me, bytes(16), {peer: Pipe(end) for peer, end in ends.items()})
        self.seen: list = []

    def transfer(self, line, value):
        self.seen.append(line)
        assert value.is_meta == (self.me != line.src), "nobody has the values of others"
        return super().transfer(line, value)


def project(case, inputs, taken=None):
    """Run a case with one party per thread: what each of them read, their runtimes, and Q. Edges are empty at the end.

    `taken(runtime)` is called instead in the thread of each party, which holds its keys then, and gives what it read.
    """
    names = ["A"] if case.answering == 1 else [f"A{i}" for i in range(case.answering)]
    clients, server = [Party("Q", "Q"), *(Party(name, "A") for name in names)], Party("S", "S")
    runtimes = {}

    def live(party: Party, ends: dict):
        runtime = runtimes[party] = Noting(party, ends)
        pairs = []
        for i, answering in enumerate(clients[1:]):
            cast = star(clients[0], answering, server)
            setup = Net(runtime, i, cast, Phase.SETUP)
            seed(setup, first=i == 0)
            pairs.append((setup, Net(runtime, case.answering + i, cast, Phase.OFFLINE, setup)))
        return play(World(pairs), case.program, inputs, case.answering) if taken is None else taken(runtime)

    found = in_threads([(client, server) for client in clients], live)
    for result in found.values():
        if isinstance(result, BaseException):
            raise result
    return {party: found[party.name] for party in runtimes}, runtimes, clients[0]


IN_WHOLE = [case for case in CASES if case.answering > 1 or case.name in ("linear_mul", "relu_20", "guarded_relu")]
"""Of one answering party each is taken apart by `check_protocol` too, and by programs below."""


def assert_projections_give(case, inputs) -> dict[Party, list]:
    """The result at Q and its shape elsewhere; what all have noted is the same, and each has the keys of its own."""
    read, runtimes, Q = project(case, inputs)
    case.check(inputs, read[Q])
    for party, outputs in read.items():
        assert all(o.is_meta for o in outputs) == (party != Q), "the others learn its shape"
    ledgers = [runtime.seen for runtime in runtimes.values()]
    assert all(ledger == ledgers[0] for ledger in ledgers), "all parties know of the same messages"
    for party, runtime in runtimes.items():
        assert set(runtime.keys._keys) == {pair for r in runtimes.values() for pair in r.keys._keys if party in pair}
    if case.answering == 1:
        outputs, profile = run_with_profile(Session(), case, inputs)
        case.check(inputs, outputs)
        seeds = len(ledgers[0]) - len(profile.ledger)
        assert about(ledgers[0][seeds:]) == about(profile.ledger)
    return read


@pytest.mark.parametrize("case", IN_WHOLE, ids=str)
def test_projections_together_give_the_result_at_Q(case):
    assert_projections_give(case, case.inputs(70))


def about(lines) -> list[tuple]:
    return [(m.path, m.label, m.src, m.dst, m.phase, m.round, m.shape, m.dtype) for m in lines]


def by_edge(lines: list[tuple]) -> dict[tuple, list[tuple]]:
    """The messages of each edge, one way, in their order: a party waits for a message no sooner than it needs it."""
    edges: dict[tuple, list[tuple]] = {}
    for line in lines:
        edges.setdefault(line[2:4], []).append(line)
    return edges


def test_a_party_sends_before_it_waits_for_what_the_sending_does_not_need():
    """Two that open a value to each other send at the same time; the order on each edge is the program's."""
    case = next(case for case in CASES if str(case) == "relu")
    program, _ = traced(Session(), case.program, case.inputs(70))
    early = 0
    for party in program.parties:
        steps = [line.step for line in part_of(program, frozenset((party,))).online]
        own = [h for h in about(step.header for step in steps if isinstance(step, Move)) if party in h[2:4]]
        wanted = [h for h in about(m for m in program.messages if m.phase == Phase.ONLINE) if party in h[2:4]]
        assert by_edge(own) == by_edge(wanted)
        early += own != wanted
    assert early, "somebody sends before it would have to"


@pytest.mark.parametrize("case", some((case for case in CASES if case.answering == 1), stands), ids=str)
def test_each_party_takes_its_part_of_a_program(case):
    """With its own inputs and keys, twice whole and ahead of the query: the declared messages, the right result."""
    inputs = case.inputs(70)
    program, brought = traced(Session(), case.program, inputs)

    def taken(runtime):
        part, setup, seeds = part_of(program, runtime.here), Setup(7), len(runtime.seen)
        assert_holds_no_secret(part)
        mine = {i.name: brought[i.name] for i in program.inputs if i.party == runtime.me}
        settled = setup.values(part, runtime, mine)
        before = about(m for m in program.messages if m.phase == Phase.SETUP)
        assert about(runtime.seen[seeds:]) == before
        whole = [part.call(runtime, call, settled, mine) for call in (100, 102)]
        settled = setup.values(part, runtime, mine)
        ahead = {i.name: brought[i.name] for i in program.inputs if i.party == runtime.me and i.phase < Phase.ONLINE}
        material = Material(101, runtime.session, program.digest, 7, part.prepare(runtime, 101, settled, ahead))
        assert {m.phase for m in runtime.seen if m.call == 101} <= {Phase.OFFLINE}
        online = part.resume(runtime, material, 7, settled, mine)
        wanted = about(m for m in program.messages if m.phase != Phase.SETUP)
        for call in (100, 102):
            assert by_edge(about(m for m in runtime.seen if m.call == call)) == by_edge(wanted)
        prepared = about(m for m in runtime.seen if m.call == 101)
        assert sorted(map(str, prepared)) == sorted(map(str, wanted))
        assert {m.call for m in runtime.seen[seeds + len(before) :]} <= {100, 101, 102}, "nothing is set up again"
        assert material.bytes == 0
        with pytest.raises(MaterialError, match="used already"):
            part.resume(runtime, material, 7, settled, mine)
        return [*whole, online]

    read, _, Q = project(case, inputs, taken)
    for party, runs in read.items():
        for outputs in runs:
            assert all(o.is_meta for o in outputs) == (party != Q)
    for outputs in read[Q]:
        case.check(inputs, outputs)


@pytest.mark.parametrize("case", some((case for case in CASES if case.answering == 1), stands), ids=str)
def test_verb_by_verb_and_traced_are_the_same_program(case):
    """The messages of a run from above and of the program are the same; traced twice, it is equal."""
    inputs = case.inputs(70)
    program, _ = traced(Session(), case.program, inputs)
    again, _ = traced(Session(), case.program, inputs)
    assert program == again and program.digest == again.digest
    _, profile = run_with_profile(Session(), case, inputs)
    sent = [m for m in profile.ledger if m.path != "seed"]
    assert sorted(map(str, about(sent))) == sorted(map(str, about(program.messages)))


def test_threads_run_programs_and_verbs_side_by_side():
    """As in a service: what a thread or a session keeps of one program's shapes is used in others."""
    session, weight = Session(), ring_values((5, 3, 3, 3), 63, 1)
    product = Conv2d((1, 1), (1, 1))
    party, wanted = session.answering[0], lambda x: torch.conv2d(x, weight, padding=1)
    program = lambda w, x: linear(w.net, w.setup, product, x, w.weight(weight))

    def from_above(x):
        with session.call(party) as net:
            (out,) = play(world_of(session, net), program, [x])
        assert torch.equal(out, wanted(x))

    shapes = [(2, 3, 8, 8), (64, 3, 4, 4), (1, 3, 16, 16), (80, 3, 32, 32)]
    programs = [traced(session, program, [ring_values(shape)]) for shape in shapes]

    def serve(first: int) -> None:
        for i, shape in enumerate((*shapes[first:], *shapes[:first])):
            x, (found, brought) = ring_values(shape, 63, i), programs[(first + i) % len(shapes)]
            inputs = brought | {"x0": x}
            (out,) = session.run(found, inputs)
            assert torch.equal(out, wanted(x))
            (out,) = session.run(found, inputs, session.prepare(found, inputs))
            assert torch.equal(out, wanted(x))
            from_above(x[:, :, 1:, 1:])

    for first in range(len(shapes)):
        with ThreadPoolExecutor(1) as fresh:  # a thread of its own, whose scratch has still to be made
            fresh.submit(serve, first).result()


def assert_holds_no_secret(part) -> None:
    """No function of a step keeps a value of the call that it was traced in."""

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

    for line in part._all:
        walk(getattr(line.step, "f", None))
    assert repr(part).startswith("Projection(")


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


def test_what_is_not_the_same_in_every_call_is_no_program():
    """A value of another call, one taken past a function's arguments, a loop's variable, two inputs of a name."""
    session = Session()
    with session.call(session.answering[0]) as net:
        other = -net.own(net.Q, torch.ones(2))
    with pytest.raises(SessionMismatchError):
        session.trace(lambda net: net.read(net.own(net.Q, torch.ones(2)) + other, net.Q))

    first = []

    def of_another_call(net):
        first.append(net.own(net.Q, torch.ones(2)))
        with Net(net.runtime, 99, net.cast, Phase.OFFLINE).within(net):
            x = -net.own(net.Q, torch.ones(2))
            x = x + first[0]
        return net.read(x, net.Q)

    def past_its_arguments(net):
        own = net.own(net.Q, torch.ones(2))
        return net.read(compute(lambda v: v + v.new_zeros(own.shape), own), net.Q)

    def a_loop(net):
        x = net.own(net.Q, torch.ones(2))
        for k in range(3):
            x = compute(lambda v: v + k, x)
        return net.read(x, net.Q)

    def two_of_a_name(net):
        return net.read(net.own(net.Q, torch.ones(2)) + net.own(net.Q, torch.ones(2)), net.Q)

    for f in (of_another_call, past_its_arguments, a_loop, two_of_a_name):
        with pytest.raises(ArgumentError):
            session.trace(f)


def test_inputs_of_a_program_are_checked():
    session = Session()
    program = session.trace(lambda net: net.read(-net.own(net.Q, torch.ones(2)), net.Q))
    assert torch.equal(session.run(program, {"x": torch.tensor([1.0, 2.0])}), torch.tensor([-1.0, -2.0]))
    for inputs in ({}, {"y": torch.ones(2)}):
        with pytest.raises(ArgumentError, match="takes 'x' of Q"):
            session.run(program, inputs)
    for x in (torch.ones(3), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match="'x' is"):
            session.run(program, {"x": x})
    for x in (
        None,
        [1.0, 2.0],
        3.0,
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
        sectorch.share(torch.ones(2)),
    ):
        with pytest.raises(DtypeError, match="a plain tensor for 'x'"):
            session.run(program, {"x": x})
    for wrong in ((program, None), (None, {}), (program, {"x": torch.ones(2)}, 3)):
        with pytest.raises(ArgumentError):
            session.run(*wrong)
    other = Session(2)
    for_two = other.trace(lambda net: net.read(net.own(net.A, torch.ones(2)), net.A), other.answering[1])
    with pytest.raises(ArgumentError, match="the program is of A2 too"):
        session.run(for_two, {"x": torch.ones(2)})


def masked_product(net):
    """x w for a weight that is masked once a session."""
    w = mask_weight(net.setup, net.setup.own(net.A, torch.ones(2, dtype=torch.int64), Phase.SETUP, "w"))
    x = share(net, net.own(net.Q, torch.ones(2, dtype=torch.int64)))
    return net.read(reveal(net, linear(net, net.setup, lambda a, b, _: a * b, x, w)), net.Q)


def test_what_a_setup_or_material_was_made_with_stays():
    """Another weight would meet the masked form of the first one: a wrong result, and one that tells of the weights."""
    session, x = Session(), torch.tensor([3, 4])
    program, first, second = session.trace(masked_product), torch.tensor([5, 6]), torch.tensor([7, 8])
    assert torch.equal(session.run(program, {"x": x, "w": first}), x * first)
    assert torch.equal(session.run(program, {"x": x, "w": first.clone()}), x * first)
    with pytest.raises(ArgumentError, match="the setup was made with another 'w'"):
        session.run(program, {"x": x, "w": second})
    interrupted = Session()

    class Stops(Observer):
        def message(self, line, value):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Stops():
        interrupted.run(program, {"x": x, "w": first})
    with pytest.raises(ArgumentError, match="the setup was made with another 'w'"):
        interrupted.run(program, {"x": x, "w": second})
    assert torch.equal(interrupted.run(program, {"x": x, "w": first}), x * first)
    in_the_call = session.trace(
        lambda net: net.read(
            reveal(net, share(net, net.own(net.Q, x)) + net.own(net.A, x, Phase.SETUP, "w") * 2), net.Q
        )
    )
    material = session.prepare(in_the_call, {"w": first})
    with pytest.raises(ArgumentError, match="the material was prepared with another 'w'"):
        session.run(in_the_call, {"x": x, "w": second}, material)
    assert torch.equal(session.run(in_the_call, {"x": x, "w": first}, material), x + 2 * first)
    assert torch.equal(session.run(in_the_call, {"x": x, "w": second}), x + 2 * second)


@leaf(shapes=lambda v: v)
def doubled(v):
    return 2 * v


def test_results_are_told_apart_and_have_been_read():
    session, x = Session(), torch.ones(2)

    def two(net):
        v = net.own(net.Q, x) + 0
        return {"once": net.read(v, net.Q), "twice": net.read(doubled(v), net.Q), "public": 3}

    found = session.run(session.trace(two), {"x": x})
    assert found["once"].tolist() == [1, 1] and found["twice"].tolist() == [2, 2] and found["public"] == 3
    for f in (
        lambda net: net.read(net.own(net.Q, x), net.Q) * 2,
        lambda net: net.own(net.Q, x),
        lambda net: net.setup.read(net.setup.own(net.A, x, Phase.SETUP), net.A),
    ):
        with pytest.raises(ArgumentError, match="a result is neither"):
            session.trace(f)
    with pytest.raises(ArgumentError, match="'x' is brought into the setup"):
        session.trace(lambda net: net.read(-net.setup.own(net.Q, x), net.Q))
    assert len({session.trace(lambda net, y=y: y).digest for y in (None, (), {}, 3, "3")}) == 5


@pytest.mark.parametrize(
    "drawn",
    [
        lambda: torch.randint(9, (2,)),
        lambda: int(numpy.random.randint(9)),
        lambda: int(numpy.random.normal() * 9),
        lambda: random.randrange(9),
    ],
    ids=["torch", "numpy", "numpy's kept number", "python"],
)
def test_a_mask_that_is_a_constant_is_refused(drawn):
    session, x = Session(), torch.tensor([1, 2])
    numpy.random.seed(0), numpy.random.normal()  # two are made at a time, and the second kept

    def masked(mask):
        return session.trace(lambda net: net.read(net.own(net.Q, x) + mask(net), net.Q))

    with pytest.raises(ArgumentError, match=r"drew random .* net\.common"):
        masked(lambda net: drawn())
    torch.rand(1), numpy.random.rand(), random.random()  # before and after a trace anything may be drawn
    masked(lambda net: net.common(net.Q, net.A, (2,), "mask"))
    masked(lambda net: torch.randint(9, (2,), generator=torch.Generator()))  # one's own, for public test data


def test_a_check_of_the_setup_is_a_part_of_the_program():
    session = Session()

    def checked(net):
        w = net.setup.own(net.A, torch.ones(2), Phase.SETUP, "w")
        net.setup.check(net.A, refuse_large, w)
        return net.read(-net.own(net.Q, torch.ones(2)), net.Q)

    program, x = session.trace(checked), torch.ones(2)
    with pytest.raises(ArgumentError, match="too large"):
        session.run(program, {"x": x, "w": torch.full((2,), 9.0)})
    assert torch.equal(session.run(program, {"x": x, "w": x}), -x)


@leaf(shapes=lambda v: v)
def refuse_large(v):
    if float(v.max()) > 2:
        raise ArgumentError("too large")
    return v


def test_public_operands_are_those_of_the_trace():
    session, public = Session(), torch.tensor([1.0, 2.0])
    program = session.trace(lambda net: net.read(net.own(net.Q, torch.ones(2)) * public, net.Q))
    public.zero_()
    assert session.run(program, {"x": torch.ones(2)}).tolist() == [1, 2]


class Copying(nn.Module):
    """A weight that is copied and changed in place in each call, and one that is derived."""

    def __init__(self):
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 2)

    def forward(self, x):
        w = self.w.clone()
        w *= 2
        w += self.layer.weight.sum(0)
        return self.layer(x @ w + self.layer.bias.sum())


def test_shapes_that_come_again_and_again_take_no_more_memory(monkeypatch: pytest.MonkeyPatch):
    """More shapes than are kept are traced anew, and what they need of the setup is what there was."""
    kept = 4
    monkeypatch.setattr(graph_cache, "KEPT_SHAPES", kept)
    model, session = Copying().eval(), Session()
    secured, ideal, sizes = sectorch.secure(model, session=session), sectorch.reference(model), []
    for _ in range(3):
        for rows in range(1, kept + 3):
            x = torch.randn(rows, 6)
            assert torch.equal(secured(x), ideal(x))
        (setup,) = session._settled.values()
        sizes.append((len(setup._values), len(secured.graphs.setup._nodes), len(secured.graphs.setup._inputs)))
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_public_result_is_a_copy():
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("order", torch.tensor([2, 1, 0]))

        def forward(self, x):
            return x[:, self.order], self.order

    secured, x = sectorch.secure(Indexed().eval(), session=Session()), torch.tensor([[1.0, 2.0, 3.0]])
    for _ in range(2):
        y, order = secured(x)
        assert y.tolist() == [[3, 2, 1]]
        order.zero_()


def test_a_weight_that_does_not_fit_is_refused_before_anything_is_sent_and_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).eval()
    with torch.no_grad():
        model[2].bias[0] = 5000.0
    secured = sectorch.secure(model, sectorch.Scheme(limit_bits=12), session=Session())
    for _ in range(2):
        with Profile() as profile, pytest.raises(errors.FixedPointRangeError, match=r"layer '2' \(Linear\).*'2.bias'"):
            secured(torch.ones(1, 3))
        assert not profile.ledger
