"""What the tests share: a world to run programs in, ring values with their edges, and one case per protocol.

A program is `f(world, *shares) -> Shares or Located at Q, or a tuple of them`. It runs unchanged in a local session, a
dry one, on prepared material, and with one party per thread, since all of it goes through `World`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import sectorch  # noqa: F401 - all of it, so that every protocol is declared
from sectorch.backend import SERIES_BITS
from sectorch.choreography import PROTOCOLS, Located, Net, Party, Phase
from sectorch.choreography.ledger import Profile
from sectorch.choreography.located import running
from sectorch.choreography.program.trace import Program
from sectorch.mpc.leaky import leaky_drelu, leaky_relu_privhfl
from sectorch.mpc.smooth.normalise import normalise
from sectorch.mpc.smooth.trigonometric import draw_error, trigonometric
from sectorch.mpc.star.compare import drelu, is_zero
from sectorch.mpc.star.guard import guard, joined, unpadded
from sectorch.mpc.star.linear import linear, mask_weight
from sectorch.mpc.star.mask import open_masked
from sectorch.mpc.star.multiply import multiply, square
from sectorch.mpc.star.pool import max_tree
from sectorch.mpc.star.relu import maximum, ramps, relu
from sectorch.mpc.star.select import bit_to_ring, select
from sectorch.mpc.star.share import aggregate, aggregate_noisy, reveal, reveal_to_A, reveal_to_S, share
from sectorch.mpc.star.shares import Shares, each
from sectorch.mpc.star.shuffle import shuffle
from sectorch.mpc.star.sign import at_least
from sectorch.mpc.star.truncate import truncate
from sectorch.ops.series import SIGMOID
from sectorch.ring.bitplanes import spread, unrows
from sectorch.ring.products import Conv2d, Linear, matmul
from sectorch.session import Session

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
SHAPES = [(), (0,), (1,), (63,), (64,), (65,), (3, 0, 2), (2, 3), (5, 13), (2, 64), (129,)]
"""Nothing, one element, one word of packed bits, one more and one less, and several dimensions."""

OWN_TESTS = (
    "ckks", "capc", "capride", "garbled", "argmax", "perturbation", "shapley", "hesv", "secsv", "secretsv",
    "privhfl_turn", "privhfl_told",
)  # fmt: skip
SHIPPED = {name: spec for name, spec in PROTOCOLS.items() if not any(part in name for part in OWN_TESTS)}
"""The protocols of the package itself, before a test or an example in the documentation adds one."""


@functools.cache
def session(answering: int = 1) -> Session:
    """One session for all tests that need no session of their own."""
    return Session(answering)


def ring_values(shape, bits: int = 63, seed: int = 0) -> torch.Tensor:
    """Signed values below 2^bits in magnitude (for 63: all of the ring), log-uniform, a third of them edges."""
    generator = torch.Generator().manual_seed(seed)
    shape = torch.Size(shape)
    values = torch.randint(LOWEST, HIGHEST, shape, generator=generator)
    values = values >> torch.randint(63 - bits, 64, shape, generator=generator)
    top = HIGHEST if bits == 63 else (1 << bits) - 1
    lowest = LOWEST if bits == 63 else -top
    near = [v for e in (20, 61) for d in (-1, 0, 1) for v in ((1 << e) + d, -(1 << e) + d)]
    edges = torch.tensor([0, 0, 1, -1, top, lowest, *(v for v in near if lowest <= v <= top)])
    chosen = edges[torch.randint(0, len(edges), shape, generator=generator)]
    return torch.where(torch.rand(shape, generator=generator) < 1 / 3, chosen, values.clamp(min=lowest))


class World:
    """The nets of one call: one pair (setup, call) for each answering party. Weights are kept in `kept` by name.

    What parties bring is in `brought`, by name.
    """

    def __init__(self, pairs: list[tuple[Net, Net]], kept: dict | None = None):
        self.pairs = pairs
        self.setup, self.net = pairs[0]
        self.kept = {} if kept is None else kept
        self.brought: dict[str, torch.Tensor] = {}

    def place(self, party: Party, value: torch.Tensor) -> torch.Tensor:
        """The value where its owner is present, its shape elsewhere."""
        return value if party in self.net.runtime.here else torch.empty_like(value, device="meta")

    def own(self, party: Party, value: torch.Tensor, phase: Phase = Phase.ONLINE, net: Net | None = None) -> Located:
        name = f"x{len(self.brought)}"
        self.brought[name] = value
        return (net or self.net).own(party, self.place(party, value), phase, name)

    def query(self, x: torch.Tensor, answering: int = 0) -> Shares:
        net = self.pairs[answering][1]
        return share(net, self.own(net.Q, x, net=net))

    def halves(self, x: torch.Tensor) -> Shares:
        """Shares that both depend on the query and came without a message: for counting what follows."""
        net, mask = self.net, ring_values(x.shape, seed=17)
        return Shares(self.own(net.A, x - mask), self.own(net.S, mask))

    def weight(self, value: torch.Tensor):
        if "weight" not in self.kept:
            at_A = self.own(self.net.A, value, Phase.SETUP, self.setup)
            self.kept["weight"] = mask_weight(self.setup, at_A)
        return self.kept["weight"]

    def bits(self, words: Shares, shape: torch.Size) -> Shares:
        return bit_to_ring(self.net, words, shape)


def located(world: World, program: Callable, inputs, answering: int = 1) -> list[Located]:
    """Share the inputs (with one party, or each with its own), run the program, reveal its results to Q."""
    shares = [world.query(x, i if answering > 1 else 0) for i, x in enumerate(inputs)]
    with running(world.net):
        results = program(world, *shares)
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [reveal(world.net, r) if isinstance(r, Shares) else r for r in results]


def play(world: World, program: Callable, inputs, answering: int = 1) -> list[torch.Tensor]:
    """`located`, and what Q then reads."""
    return [world.net.read(r, world.net.Q) for r in located(world, program, inputs, answering)]


def world_of(session: Session, net: Net, kept: dict | None = None) -> World:
    """The world of a running call; further answering parties get calls of their own."""
    others = [(session.setup(p), session.net(p)) for p in session.answering if p != net.A]
    return World([(session.setup(net.A), net), *others], kept)


def traced(session: Session, program: Callable, inputs) -> tuple[Program, dict[str, torch.Tensor]]:
    """A program that Q's inputs go through, and what the parties bring into it."""
    brought: dict[str, torch.Tensor] = {}

    def on_shapes(net: Net):
        world = World([(net.setup, net)])
        outputs = play(world, program, inputs)
        brought.update(world.brought)
        return outputs

    return session.trace(on_shapes), brought


def run(program: Callable, *inputs: torch.Tensor, session: Session | None = None):
    """Run a program once in a local session: int64 inputs of Q, the int64 result (or results) that Q reads."""
    session = session or globals()["session"]()
    answering = len(session.answering)
    with session.call(session.answering[0]) as net:
        results = play(world_of(session, net), program, inputs, answering)
    return results[0] if len(results) == 1 else results


def open_bits(net: Net, words: Shares, shape: torch.Size) -> torch.Tensor:
    """XOR-shared bits as booleans, put together by the test: what no party of the protocol can do."""
    packed = net.read(words.A, net.A) ^ net.read(words.S, net.S)
    return unrows(spread(packed), shape) != 0


# What results have to be.


def exact(reference: Callable) -> Callable:
    def check(inputs, outputs):
        expected = reference(*inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for output, wanted in zip(outputs, expected, strict=True):
            assert output.dtype == torch.int64
            assert output.shape == wanted.shape
            assert torch.equal(output, wanted.to(torch.int64))

    return check


def rounded(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x / 2^shift rounded half up, by Python's own integers: an independent way to it."""
    return torch.tensor([(v + (1 << shift) // 2) >> shift for v in x.flatten().tolist()], dtype=torch.int64).view(
        x.shape
    )


def check_relu(shift: int) -> Callable:
    """max(x, 0) / 2^shift, rounded half up, for each of the inputs."""

    def check(inputs, outputs):
        for x, output in zip(inputs, outputs, strict=True):
            assert torch.equal(output, rounded(x, shift).clamp(min=0))

    return check


@dataclass(frozen=True)
class Case:
    """One protocol as a program. `shapes(n)`: its inputs for about n elements; |inputs| < 2^bits; `check(in, out)`."""

    name: str
    program: Callable
    check: Callable
    bits: int = 62
    shapes: Callable = lambda n: [(n,)]
    elementwise: bool = True
    leaks: bool = False
    answering: int = 1

    def inputs(self, n: int, seed: int = 0) -> list[torch.Tensor]:
        return [ring_values(shape, self.bits, seed + i) for i, shape in enumerate(self.shapes(n))]

    def __repr__(self) -> str:
        return self.name


def weight_like(shape, seed: int = 99) -> torch.Tensor:
    return ring_values(shape, 63, seed)


def _linear(product: Callable, weight: Callable) -> Callable:
    def program(world: World, x: Shares) -> Shares:
        return linear(world.net, world.setup, product, x, world.weight(weight_like(weight(x.shape))))

    return program


def _masked(protocol: Callable) -> Callable:
    """A protocol on a masked opening that gives packed bits, as one on shares that gives ring bits."""

    def program(world: World, x: Shares) -> Shares:
        return world.bits(protocol(world.net, open_masked(world.net, x)), x.shape)

    return program


THRESHOLDS = (0, 1, -1, 1 << 40, -(1 << 61))


def _thresholds(world: World, x: Shares):
    bits = drelu(world.net, open_masked(world.net, x), thresholds=THRESHOLDS)
    return tuple(world.bits(part(world.net, bits, i, len(THRESHOLDS)), x.shape) for i in range(len(THRESHOLDS)))


def _signs(world: World, x: Shares):
    bits = at_least(world.net, open_masked(world.net, x), THRESHOLDS, fss=True)
    return tuple(bits[i] for i in range(len(THRESHOLDS)))


def part(net: Net, words: Shares, i: int, count: int) -> Shares:
    """The words of the i-th of several thresholds."""
    return each(lambda w: w.view(count, -1)[i], words)


def _select(world: World, x: Shares) -> Shares:
    masked = open_masked(world.net, x)
    return select(world.net, drelu(world.net, masked), masked)


def _aggregate(world: World, *shares: Shares) -> Located:
    return aggregate(world.net, [(net, x) for (_, net), x in zip(world.pairs, shares, strict=True)])


def _aggregate_noisy(world: World, *shares: Shares) -> Located:
    noise = world.net.fresh(world.net.S, lambda: torch.full(shares[0].shape, int(NOISE)))
    return aggregate_noisy(world.net, [(net, x) for (_, net), x in zip(world.pairs, shares, strict=True)], noise)


NOISE = torch.tensor([-3])
"""What S adds where noise is to be known."""

LIMIT_BITS = 30
"""What the guarded programs' results must be below in magnitude, by bits."""


def _guarded(protocol: Callable) -> Callable:
    """A protocol with a limit, revealed under guard: the result, or zeros, and whether there is one."""

    def program(world: World, x: Shares):
        net = world.net
        y, shape = protocol(net, x), x.shape
        padded, key = guard(net, y, tuple(net.raised))
        found = unpadded(reveal(net, padded), shape, key)
        return found[0], found[1].to(torch.int64)

    return program


def _joined(world: World, x: Shares):
    """As `_guarded`, of a truncation, with the flags as one word: two sets of them, one after the other."""
    net = world.net
    y = truncate(net, x, 20, limit_bits=LIMIT_BITS)
    flag = joined(net, (joined(net, tuple(net.raised)), *net.raised))
    padded, key = guard(net, y, (flag,))
    found = unpadded(reveal(net, padded), x.shape, key)
    return found[0], found[1].to(torch.int64)


def _back_from(role: str) -> Callable:
    """What A or S learned, as shares of which the other's half is zero."""

    def program(world: World, x: Shares) -> Shares:
        net = world.net
        zeros = lambda party: net.public(party, torch.zeros(x.shape, dtype=torch.int64))
        if role == "A":
            return Shares(reveal_to_A(net, x), zeros(net.S))
        return Shares(zeros(net.A), reveal_to_S(net, x))

    return program


def _check_guarded(result: Callable) -> Callable:
    def check(inputs, outputs):
        (x,), (y, right) = inputs, outputs
        wanted = result(x)
        inside = bool(((wanted >= -(1 << LIMIT_BITS)) & (wanted < 1 << LIMIT_BITS)).all())
        assert right.tolist() == [inside]
        assert torch.equal(y, wanted if inside else torch.zeros_like(wanted))

    return check


LOW, HIGH = 3, 9


def _normalise(world: World, x: Shares):
    normal = normalise(world.net, x, LOW, HIGH)
    return normal.mantissa, each(torch.sum, normal.bits[1:-1], 0) + (LOW + 1)


def _check_normal(inputs, outputs):
    (x,), (mantissa, exponent) = inputs, outputs
    length = sum((x >= 1 << k).long() for k in range(62))  # the bit length of a positive x
    inside = (x >= 1 << LOW) & (x < 1 << HIGH)
    assert torch.equal(exponent, length.clamp(LOW + 1, HIGH))
    assert torch.equal(mantissa[inside], (x << (HIGH - length))[inside])
    assert (mantissa[x < 1 << LOW] == 1 << (HIGH - 1)).all()
    assert (((1 << HIGH) - mantissa[x >= 1 << HIGH]) <= 1).all(), "one, to a unit in the last place"


def _check_sigmoid(inputs, outputs):
    x, y = inputs[0].double() * 2.0**-20, outputs[0].double() * 2.0**-SERIES_BITS
    # The bound of the docstring; the last digit of a double near one.
    assert y.shape == x.shape
    assert ((y - torch.sigmoid(x)).abs() <= SIGMOID.error + draw_error(SIGMOID) / 2 + 2.0**-52).all()


def two(n):
    return [(n,), (n,)]


def _three_ways(x, w, tiles=None):
    return x * w


def _finer(world: World, x: Shares) -> Shares:
    """The same value with 20 fraction bits more: too many for an opening of 32 bits."""
    return x << 20


CONV = Conv2d((2, 1), (1, 0), (1, 2))
WIDE = Conv2d((1, 1), (1, 1))
CASES = [
    Case("reveal", lambda w, x: x, exact(lambda x: x), 63),
    Case("linear_mul", _linear(_three_ways, lambda s: s), exact(lambda x: x * weight_like(x.shape)), 63),
    Case(
        "linear_matmul", _linear(lambda x, w, t: matmul(x, w), lambda s: (s[1], 5)),
        exact(lambda x: x @ weight_like((x.shape[1], 5))), 63, lambda n: [(-(-n // 8), 8)], False,
    ),
    Case(
        "linear_tiled", _linear(Linear(), lambda s: (130, s[1])),
        exact(lambda x: x @ weight_like((130, x.shape[1])).T), 63, lambda n: [(4, -(-n // 4))], False,
    ),
    Case(
        "conv2d", _linear(CONV, lambda s: (4, 3, 3, 2)),
        exact(lambda x: torch.conv2d(x, weight_like((4, 3, 3, 2)), None, (2, 1), (1, 0), (1, 2))), 63,
        lambda n: [(-(-n // 192), 3, 8, 8)], False,
    ),
    Case(
        "conv2d_tiled", _linear(WIDE, lambda s: (128, s[1], 3, 3)),
        exact(lambda x: torch.conv2d(x, weight_like((128, x.shape[1], 3, 3)), padding=1)), 63,
        lambda n: [(1, -(-n // 64), 8, 8)], False,
    ),
    Case("multiply", lambda w, x, y: multiply(w.net, torch.mul, x, y), exact(torch.mul), 63, two),
    Case(
        "multiply_matmul", lambda w, x, y: multiply(w.net, matmul, x, y), exact(torch.matmul), 63,
        lambda n: [(-(-n // 8), 8), (8, 3)], False,
    ),
    Case("square", lambda w, x: square(w.net, x), exact(torch.square), 63),
    Case("truncate_20", lambda w, x: truncate(w.net, x, 20), exact(lambda x: rounded(x, 20))),
    Case("truncate_1", lambda w, x: truncate(w.net, x, 1), exact(lambda x: rounded(x, 1))),
    Case("truncate_fss", lambda w, x: truncate(w.net, x, 20, fss=True), exact(lambda x: rounded(x, 20))),
    Case("drelu", _masked(drelu), exact(lambda x: x >= 0), 63),
    Case("drelu_high", _masked(functools.partial(drelu, high=40)), exact(lambda x: x >= 0), 40),
    Case("drelu_thresholds", _thresholds, exact(lambda x: tuple(x >= t for t in THRESHOLDS))),
    Case("is_zero", _masked(is_zero), exact(lambda x: x == 0), 63),
    Case("select", _select, exact(lambda x: x.clamp(min=0)), 63),
    Case("relu", lambda w, x: relu(w.net, x), check_relu(0), 63),
    Case("relu_20", lambda w, x: relu(w.net, x, 20), check_relu(20)),
    Case(
        "ramps", lambda w, x: tuple(ramps(w.net, x, (0, 1 << 30, -5))),
        exact(lambda x: tuple((x - t).clamp(min=0) for t in (0, 1 << 30, -5))),
    ),
    Case(
        "ramps_20", lambda w, x: tuple(ramps(w.net, x, (0, 1 << 30, -5), 20)),
        exact(lambda x: tuple((rounded(x, 20) - t).clamp(min=0) for t in (0, 1 << 30, -5))),
    ),
    Case("relu_high", lambda w, x: relu(w.net, x, 20, 41), check_relu(20), 40),
    Case("relu_fss", lambda w, x: relu(w.net, x, fss=True), check_relu(0), 63),
    Case("relu_fss_20", lambda w, x: relu(w.net, x, 20, fss=True), check_relu(20)),
    Case("gate_high", lambda w, x: relu(w.net, x, 28, 41, fss=True), check_relu(28), 40),
    Case(
        "ramps_fss", lambda w, x: tuple(ramps(w.net, x, (0, 1 << 30, -5), fss=True)),
        exact(lambda x: tuple((x - t).clamp(min=0) for t in (0, 1 << 30, -5))),
    ),
    Case(
        "ramps_fss_20", lambda w, x: tuple(ramps(w.net, x, (0, 1 << 30, -5), 20, fss=True)),
        exact(lambda x: tuple((rounded(x, 20) - t).clamp(min=0) for t in (0, 1 << 30, -5))),
    ),
    Case(
        "signs", _signs, exact(lambda x: tuple(x >= t for t in THRESHOLDS)),
    ),
    Case("maximum", lambda w, x, y: maximum(w.net, x, y), exact(torch.maximum), 62, two),
    Case("maximum_fss", lambda w, x, y: maximum(w.net, x, y, fss=True), exact(torch.maximum), 62, two),
    Case("max_tree", lambda w, x: max_tree(w.net, x), exact(lambda x: x.amax(0)), 62, lambda n: [(5, n)]),
    Case("normalise", _normalise, _check_normal),
    Case("trigonometric", lambda w, x: trigonometric(w.net, x, 20, SIGMOID), _check_sigmoid, 23),
    Case("trigonometric_wide", lambda w, x: trigonometric(w.net, _finer(w, x), 40, SIGMOID), _check_sigmoid, 23),
    Case("leaky_drelu", lambda w, x: leaky_drelu(w.net, x), exact(lambda x: x >= 0), 50, leaks=True),
    Case(
        "leaky_relu", lambda w, x: leaky_relu_privhfl(w.net, x, 20), check_relu(20),
        50, leaks=True,
    ),
    Case(
        "guarded_truncate", _guarded(lambda net, x: truncate(net, x, 20, limit_bits=LIMIT_BITS)),
        _check_guarded(lambda x: rounded(x, 20)), 62, elementwise=False,
    ),
    Case(
        "guarded_truncate_fss", _guarded(lambda net, x: truncate(net, x, 20, True, LIMIT_BITS)),
        _check_guarded(lambda x: rounded(x, 20)), 62, elementwise=False,
    ),
    Case(
        "guarded_relu", _guarded(lambda net, x: relu(net, x, 20, limit_bits=LIMIT_BITS)),
        _check_guarded(lambda x: rounded(x, 20).clamp(min=0)), 62, elementwise=False,
    ),
    Case(
        "guarded_relu_fss", _guarded(lambda net, x: relu(net, x, 20, fss=True, limit_bits=LIMIT_BITS)),
        _check_guarded(lambda x: rounded(x, 20).clamp(min=0)), 62, elementwise=False,
    ),
    Case(
        "guarded_relu_0", _guarded(lambda net, x: relu(net, x, limit_bits=LIMIT_BITS)),
        _check_guarded(lambda x: x.clamp(min=0)), 62, elementwise=False,
    ),
    Case(
        "guarded_inside", _guarded(lambda net, x: relu(net, x, 20, limit_bits=LIMIT_BITS)),
        _check_guarded(lambda x: rounded(x, 20).clamp(min=0)), 49, elementwise=False,
    ),
    Case(
        "guarded_ramps", _guarded(lambda net, x: ramps(net, x, (0, 7), 20, limit_bits=LIMIT_BITS)[0]),
        _check_guarded(lambda x: rounded(x, 20).clamp(min=0)), 61, elementwise=False,
    ),
    Case("joined", _joined, _check_guarded(lambda x: rounded(x, 20)), 62, elementwise=False),
    Case(
        "shuffle", lambda w, x: each(functools.partial(torch.sum, dim=0), shuffle(w.net, x)),
        exact(lambda x: x.sum(0)), 63, lambda n: [(-(-n // 2), 2)], False,
    ),
    Case("reveal_to_A", _back_from("A"), exact(lambda x: x), 63, elementwise=False),
    Case("reveal_to_S", _back_from("S"), exact(lambda x: x), 63, elementwise=False),
    Case("aggregate", _aggregate, exact(lambda *x: sum(x)), 63, lambda n: [(n,)] * 3, True, False, 3),
    Case(
        "aggregate_noisy", _aggregate_noisy, exact(lambda *x: sum(x) + NOISE), 63, lambda n: [(n,)] * 3, True, False, 3
    ),
]  # fmt: skip
SOUND = [case for case in CASES if not case.leaks]


def case_session(case: Case) -> Session:
    return session(case.answering)


def lines_of(profile: Profile) -> list[tuple]:
    """The ledger without call numbers, which two runs do not share."""
    return [
        (m.path, m.label, m.src, m.dst, m.phase, m.round, m.shape, m.dtype, m.mask, m.shows) for m in profile.ledger
    ]


def run_with_profile(session: Session, case: Case, inputs) -> tuple[list[torch.Tensor], Profile]:
    """What Q reads, and the ledger of the call."""
    with Profile() as profile, session.call(session.answering[0]) as net:
        outputs = play(world_of(session, net), case.program, inputs, case.answering)
    return outputs, profile
