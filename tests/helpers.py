"""What the tests share: a world to run programs in, ring values with their edges, and one case per protocol.

The protocols are those of `examples/gallery/own.py`, which `check_protocol` is shown as well.

A program is `f(world, *shares) -> Shares or Located at Q, or a tuple of them`. It runs unchanged in a local session, a
dry one, on prepared material, and with one party per thread, since all of it goes through `World`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from own import OWN, Own

import sectorch  # noqa: F401 - all of it, so that every protocol is declared
from sectorch.choreography import PROTOCOLS, Located, Net, Party, Phase
from sectorch.choreography.ledger import Profile
from sectorch.choreography.located import run_in
from sectorch.choreography.program.trace import Program
from sectorch.mpc.leaky import leaky_drelu, leaky_maxpool_privhfl, leaky_relu_privhfl
from sectorch.mpc.star.linear import mask_weight
from sectorch.mpc.star.select import bit_to_ring
from sectorch.mpc.star.shares import Shares, each, reveal, share
from sectorch.ring.bitplanes import from_rows, spread
from sectorch.session import Session
from sectorch.testing import Given
from sectorch.testing.outcomes import distinguishable, not_uniform
from sectorch.testing.protocol_runs import SHARED

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
SHAPES = [(), (0,), (1,), (63,), (64,), (65,), (3, 0, 2), (2, 3), (5, 13), (2, 64), (129,)]
"""Nothing, one element, one word of packed bits, one more and one less, and several dimensions."""

OWN_TESTS = (
    "ckks", "capc", "capride", "garbled", "argmax", "perturbation", "shapley", "hesv", "secsv", "secretsv",
    "run_turn", "run_turn_relay", "run_send", "collect", "return_flags", "secure_sum", "careless_kit", "audit",
    "stumble", "attest",
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
    with run_in(world.net):
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
    return from_rows(spread(packed), shape) != 0


def part(net: Net, words: Shares, i: int, count: int) -> Shares:
    """The words of the i-th of several thresholds."""
    return each(lambda w: w.view(count, -1)[i], words)


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
    """One protocol as a program. `given`: what Q shares with it; `check(in, out)`."""

    name: str
    program: Callable
    check: Callable
    given: Sequence[Given] = (Given(),)
    elementwise: bool = True
    leaks: bool = False
    answering: int = 1
    fss: bool = False

    def inputs(self, n: int, seed: int = 0) -> list[torch.Tensor]:
        """For about n elements."""
        return self.values([g.size(n) for g in self.given], seed)

    def values(self, shapes: Sequence, seed: int = 0) -> list[torch.Tensor]:
        """Of these shapes, one for each input."""
        return [values_of(g, shape, seed + i) for i, (g, shape) in enumerate(zip(self.given, shapes, strict=True))]

    def __repr__(self) -> str:
        return self.name


def values_of(given: Given, shape, seed: int) -> torch.Tensor:
    """Ring values of a range."""
    bits = min(63, max(given.high, -given.low).bit_length())
    return ring_values(shape, bits, seed).clamp(given.low, given.high)


def weight_like(shape, seed: int = 99) -> torch.Tensor:
    return ring_values(shape, 63, seed)


def _all_given(own: Own, shared: Sequence) -> list[tuple[Given, Any]]:
    """What goes into a protocol of the list: what Q shares, and for every other party something of those shapes."""
    found, left = [], iter(shared)
    for i, g in enumerate(own.given):
        if g.party == SHARED:
            found.append((g, next(left)))
        else:
            size = shared[0].shape if own.options.get("elementwise", True) else g.size(0)
            found.append((g, values_of(g, size, 99 + i)))
    return found


def _program(own: Own) -> Callable:
    def program(world: World, *shared: Shares) -> Any:
        given = [
            x if g.party == SHARED else world.own(
                getattr(world.net, g.party), x, g.phase, world.setup if g.phase == Phase.SETUP else None
            )
            for g, x in _all_given(own, shared)
        ]  # fmt: skip
        several = own.options.get("answering", 1) > 1
        results = own.protocol([net for _, net in world.pairs] if several else world.net, *given)
        results = results if isinstance(results, (tuple, list)) else (results,)
        return tuple(_back(world.net, y) for y in results)

    return program


def _back(net: Net, y: Shares | Located) -> Shares | Located:
    """What A or S learned, as shares of which the other's half is zero."""
    if isinstance(y, Shares) or net.Q in y.owners:
        return y
    zeros = lambda party: net.public(party, torch.zeros(y.shape, dtype=torch.int64))
    return Shares(y, zeros(net.S)) if net.A in y.owners else Shares(zeros(net.A), y)


def _check(own: Own) -> Callable:
    def check(inputs, outputs):
        wanted = own.reference(*(x for _, x in _all_given(own, inputs)))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for y, right in zip(outputs, wanted, strict=True):
            assert (y.shape, y.dtype) == (right.shape, torch.int64)
            assert ((y - right).abs() <= own.options.get("error", 0)).all()

    return check


CASES = [
    Case(
        own.name, _program(own), _check(own), [g for g in own.given if g.party == SHARED],
        own.options.get("elementwise", True), False, own.options.get("answering", 1), own.deep or "fss" in own.name,
    )
    for own in OWN if not any(g.party == "Q" for g in own.given)
]  # fmt: skip
"""All that is shared first; the others have tests of their own."""
SMALL = [Given(low=-(1 << 50), high=1 << 50)]
CASES += [
    Case("leaky_drelu", lambda w, x: leaky_drelu(w.net, x), exact(lambda x: x >= 0), SMALL, leaks=True),
    Case("leaky_relu", lambda w, x: leaky_relu_privhfl(w.net, x, 20), check_relu(20), SMALL, leaks=True),
    Case(
        "leaky_maxpool",
        lambda w, x: leaky_maxpool_privhfl(w.net, x, 51),
        exact(lambda x: x.amax(0)),
        [Given(shape=lambda n: (5, max(1, n // 5)), low=-(1 << 50) + 1, high=(1 << 50) - 1)],
        elementwise=False,
        leaks=True,
    ),
]

STAND_FOR_THEIRS = (
    "reveal_to_A", "aggregate", "aggregate_noisy", "linear_tiled", "conv2d", "verified_linear", "multiply_matmul",
    "square", "shuffle", "truncate_20", "truncate_fss", "drelu_thresholds", "is_zero", "relu_20", "ramps_20", "signs",
    "maximum", "max_by_fours", "ramp_of_largest_of_two", "normalise", "trigonometric", "guarded_relu",
    "guarded_joined", "guarded_limit", "verified_relu_20", "argmax_confident_shares", "leaky_relu",
)  # fmt: skip
"""One protocol of each kind. Every run tries each way of running a program on these, and long runs on all the others,
which `test_protocols.py` holds to their results and `check_protocol` to their word."""


def stands(case: Case) -> bool:
    return case.name in STAND_FOR_THEIRS


def findings(first: dict, second: dict) -> list[str]:
    """What two recorded views give away, of runs on two secrets, by the kit's statistics; arrays by message."""
    found = [f"only one secret has {key}" for key in first.keys() ^ second.keys()]
    for key in first.keys() & second.keys():
        found += [f"{key} is not uniform: {text}" for text in map(not_uniform, (first[key], second[key])) if text]
        if text := distinguishable(first[key], second[key]):
            found.append(f"{key} tells the secrets apart: {text}")
    return found


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


def check_refused_number(main: Callable, options: list[str], text: str, capsys: Any) -> None:
    """A command whose parser does not take a number says so in a line that names the option, and ends with 2."""
    with pytest.raises(SystemExit) as stopped:
        main(options)
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and text in " ".join(shown.err.split()) and shown.out == ""
    assert "Traceback" not in shown.err
