"""A protocol as its test sees it: a traced program, played with every value in sight, and draws that can be repeated.

Nothing here is a runtime of parties: all of a program's values are computed in one place, and for each party is noted
what it would know. The draws come from a seed, so that what is found is found again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..choreography import Net, Party, Phase, ProtocolSpec, Roles
from ..choreography.program.nodes import Node, Taken
from ..choreography.program.trace import Program
from ..choreography.roles import STAR, Cast
from ..choreography.steps import Draw, Header, Move, Read
from ..errors import ArgumentError
from ..mpc.star.share import reveal
from ..mpc.star.shares import Shares
from ..session import Session
from .clock import look_at_clock
from .draws import Draws, half_of
from .known import TESTS, Played, is_tests
from .notes import Notes

SHARED = "shared"
"""The party of an input of which A and S have half each."""


@dataclass(frozen=True)
class Given:
    """One input of a protocol.

    Args:
        party: who has it, by role; or `SHARED`: A and S have half of it each.
        shape: of about n elements; or a shape.
        low, high: what it may be, as ring elements. The protocol is held to its word over all of it.
        phase: as of `net.own`: `Phase.SETUP` for what is the same in every call, as weights are.

    Raises:
        ArgumentError: no whole numbers, low above high, or beyond the ring.
    """

    party: str = SHARED
    shape: Callable[[int], tuple[int, ...]] | tuple[int, ...] = lambda n: (n,)
    low: int = -(1 << 62) + 1
    high: int = (1 << 62) - 1
    phase: Phase = Phase.ONLINE

    def __post_init__(self):
        if type(self.low) is not int or type(self.high) is not int:
            raise ArgumentError(
                f"an input is a ring element, a whole number, from low to high, got {self.low!r} to {self.high!r}; "
                f"fractions are sectorch.ring.encode(x, bits)"
            )
        if not -(1 << 63) <= self.low <= self.high < 1 << 63:
            raise ArgumentError(f"an input is a ring element from low to high, got {self.low} to {self.high}")

    def size(self, n: int) -> torch.Size:
        """Its shape for about n elements."""
        return torch.Size(self.shape(n) if callable(self.shape) else self.shape)


class Protocol:
    """A protocol with its inputs, traced for about n elements.

    Args:
        protocol: f(net, *values), whose values are `Shares` where an input is shared and `Located` else. It gives such
            values, or a tuple of them. What is in shares is revealed to Q; a located result is learned by its owners.
        dealer: as of `sectorch.Session`.
        answering: of more than one answering party the protocol is f(nets, *values), with a net for each of them, and
            what is shared is shared by each of them in turn.

    Raises:
        ArgumentError: it has no result, or is not the same in every call.
        SectorchError: what it does is refused by the choreography.
    """

    def __init__(
        self, protocol: Callable, given: Sequence[Given], roles: Roles, n: int, dealer: str = "Q", answering: int = 1
    ):
        if not isinstance(given, (list, tuple)) or not all(isinstance(g, Given) for g in given):
            raise ArgumentError("the inputs of a protocol are a list, [Given()] or [Given('Q', low=0, high=9), ...]")
        self.given, self.n = tuple(given), n
        self._protocol, self._roles, self._dealer, self._answering = protocol, roles, dealer, answering
        shared = [i for i, g in enumerate(given) if g.party == SHARED]
        if shared and roles is not STAR:
            raise ArgumentError(f"input {shared[0]} is shared by A and S, and the roles are {roles}; name its party")
        for g in given:
            if g.party != SHARED and g.party not in roles.names:
                raise ArgumentError(f"an input is of the party {g.party!r}, and the roles are {roles}")
        self.session = Session(answering, roles=roles, dealer=dealer, dry=True)
        self.learners: list[frozenset[str]] = []
        self.program: Program = self.session.trace(self._play)
        self.parties = self.program.parties

    def sized(self, n: int) -> Protocol:
        """The same for about n elements."""
        return Protocol(self._protocol, self.given, self._roles, n, self._dealer, self._answering)

    def _play(self, net: Net) -> Any:
        nets = [net, *(_beside(net, i, A) for i, A in enumerate(self.session.answering[1:], 1))]
        turns = itertools.cycle(nets)
        given = [self._bring(next(turns) if g.party == SHARED else net, i, g) for i, g in enumerate(self.given)]
        results = self._protocol(net if len(nets) == 1 else nets, *given)
        results = results if isinstance(results, (tuple, list)) else (results,)
        if not results or any(y is None for y in results):
            raise ArgumentError(
                "a protocol under test gives what it computes, in shares or located; this gives nothing"
            )
        found, self.learners = [], []
        for y in results:
            located = _open(net, y) if isinstance(y, Shares) else y
            owners = sorted(located.owners, key=lambda party: party.name)
            if isinstance(y, Shares):
                owners = [net.Q]
            self.learners.append(frozenset(party.name for party in owners))
            found.append(net.read(located, owners[0]))
        return found

    def _bring(self, net: Net, i: int, given: Given) -> Any:
        empty = torch.empty(given.size(self.n), dtype=torch.int64, device="meta")
        if given.party == SHARED:
            return Shares(net.own(net.A, empty, given.phase, f"x{i}_A"), net.own(net.S, empty, given.phase, f"x{i}_S"))
        where = net.setup if given.phase == Phase.SETUP else net
        return where.own(getattr(net, given.party), empty, given.phase, f"x{i}")

    def brought(self, inputs: Sequence[torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """What the parties bring, by name: of what is shared, uniform halves."""
        found = {}
        for i, (given, x) in enumerate(zip(self.given, inputs, strict=True)):
            if given.party == SHARED:
                half = draws.words(half_of(i), x.numel()).view(x.shape)
                found |= {f"x{i}_A": x - half, f"x{i}_S": half}
            else:
                found[f"x{i}"] = x
        return found

    def play(self, inputs: Sequence[torch.Tensor], draws: Draws, twice: bool = False) -> Played:
        """Play it once.

        Args:
            twice: whether each step is taken twice, to see that it gives the same.

        Raises:
            ArgumentError: a step that is random without `net.fresh`.
        """
        look_at_clock()
        return play(self.program, self.brought(inputs, draws), draws, self.learners, twice)


def play(
    program: Program,
    brought: Mapping[str, torch.Tensor],
    draws: Draws,
    learners: Sequence[frozenset[str]] = (),
    twice: bool = False,
) -> Played:
    """The same of a program and what parties bring into it by name."""
    notes = Notes(program)
    values: dict[Any, Any] = {}
    for i in program.inputs:
        values[i.slot] = brought[i.name]
        if i.name.endswith(("_A", "_S")):
            notes.brought(i.party.name, i.name[:-2], brought[i.name])
    with torch.inference_mode():
        for at, node in enumerate(program.nodes):
            operands = [values[o.slot] if type(o) is Taken else o for o in node.operands]
            result = _taken(node, operands, draws, at < len(program.setup), twice)
            for slot, value in zip(node.slots, result if node.many else (result,), strict=True):
                values[slot] = value
            notes.take(node, result)
    read = [values[leaf.slot] if type(leaf) is Taken else leaf for leaf in program.leaves]
    notes.played.results = list(zip(learners or [frozenset()] * len(read), read, strict=True))
    return notes.played


def _taken(node: Node, operands: list, draws: Draws, setup: bool, twice: bool) -> Any:
    step = node.step
    if isinstance(step, Draw):
        count = step.size.numel()
        words = draws.of(step.owners, step.name, step.number, setup, -(-count * step.dtype.itemsize // 8))
        return words.view(step.dtype)[:count].view(step.size)
    if isinstance(step, (Move, Read)):
        (value,) = operands
        if isinstance(step, Move) and (value.shape, value.dtype) != (step.header.shape, step.header.dtype):
            raise ArgumentError(
                f"'{step.header.label}' of {step.header.protocol} is sent in another form than was traced"
            )
        return value
    result = step.f(*operands)
    if twice and not step.random and not _alike(result, step.f(*operands)):
        raise ArgumentError(
            f"a step of {step.path or 'the program'} ({getattr(step.f, '__name__', 'a function')}) gives something "
            f"else each time: what a party draws for itself goes through net.fresh"
        )
    return result


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(_alike, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else True


def messages_of(program: Program) -> list[Header]:
    """The messages that are the protocol's own, and not by which the test opens its result."""
    return [header for header in program.messages if not is_tests(header.path)]


def _beside(net: Net, i: int, answering: Party) -> Net:
    """The net of the i-th answering party, in the same program: its steps and draws have numbers of their own."""
    other = Net(net.runtime, net.call, Cast(STAR, {**net.cast.parties, "A": answering}), net._base, net.setup)
    other.tracing, other._steps, other._draws = net.tracing, i << 20, i << 20
    return other


def _open(net: Net, y: Shares) -> Any:
    """y, known to Q; under the test's own name, so that a `reveal` of the protocol under test is told from it."""
    with net.declared(ProtocolSpec(TESTS, __name__, (), "Opens a result.", STAR)):
        return reveal(net, y)
