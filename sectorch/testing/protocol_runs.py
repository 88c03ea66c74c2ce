"""A protocol as its test sees it: a traced program, played with every value in sight, and draws that can be repeated.

Nothing here is a runtime of parties: all of a program's values are computed in one place, and for each party is noted
what it would know. The draws come from a seed, so that what is found is found again.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar, get_type_hints

import numpy as np
import torch

from ..choreography import Net, Party, Phase, ProtocolSpec, Roles
from ..choreography.net import Compute, Draw, Header, Move, Read
from ..choreography.program.trace import Node, OperandRef, Program, Slot
from ..choreography.roles import STAR, Cast
from ..errors import ArgumentError
from ..mpc.star.shares import Shares, reveal
from ..session import Session
from .clock import look_at_clock

# Draws that can be repeated: what is found in a run is found again.


class Draws:
    """What pairs draw in one run, and the halves of inputs: uniform words from a seed, the same for the same place.

    Args:
        extreme: whether half of them are near a power of two or its negative.
    """

    def __init__(self, seed: int | tuple, extreme: bool = False):
        self._seed, self._extreme = repr(seed), extreme

    def words(self, place: Any, count: int) -> torch.Tensor:
        """int64 [count]."""
        digest = hashlib.sha256(f"{self._seed} {place}".encode()).digest()
        generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "big")))
        found = np.frombuffer(bytearray(generator.bytes(8 * count)), np.int64)
        if self._extreme:
            power = np.left_shift(1, generator.integers(0, 64, count)) - generator.integers(0, 2, count)
            some = generator.integers(0, 4, count)
            found = np.where(some < 2, found, np.where(some == 2, power, -power))
        return torch.from_numpy(found)

    def of(self, pair: frozenset[Party], name: str, number: int, setup: bool, count: int) -> torch.Tensor:
        """What a pair draws at a place of its stream."""
        return self.words(_place(pair, name, number, setup), count)


def half_of(i: int) -> tuple:
    """Where A's half of an input is drawn."""
    return "half", i


def place_of(step: Draw, setup: bool) -> tuple:
    """Where a step draws."""
    return _place(step.owners, step.name, step.number, setup)


def _place(pair: frozenset[Party], name: str, number: int, setup: bool) -> tuple:
    return sorted(p.name for p in pair), name, number, setup


class FlippedDraws(Draws):
    """The same draws, but that of one place has bits flipped: of each word those of one mask."""

    def __init__(self, draws: Draws, place: tuple, mask: int):
        self._draws, self._place, self._mask = draws, place, mask

    def words(self, place: Any, count: int) -> torch.Tensor:
        found = self._draws.words(place, count)
        return found ^ self._mask if place == self._place else found


class ManyDraws:
    """The draws of so many runs: those of a place are made at once."""

    def __init__(self, seed: int | tuple, runs: int):
        self._draws, self._runs = Draws(seed), runs
        self._places: dict[Any, torch.Tensor] = {}

    def run(self, i: int) -> Draws:
        """Those of one run."""
        return _OneOf(self, i)

    def words(self, place: Any, count: int, i: int) -> torch.Tensor:
        """int64 [count], of run i."""
        if place not in self._places:
            self._places[place] = self._draws.words(place, self._runs * count).view(self._runs, count)
        return self._places[place][i]


class _OneOf(Draws):
    def __init__(self, many: ManyDraws, i: int):
        self._many, self._i = many, i

    def words(self, place: Any, count: int) -> torch.Tensor:
        return self._many.words(place, count, self._i)

    def of(self, pair: frozenset[Party], name: str, number: int, setup: bool, count: int) -> torch.Tensor:
        return self.words((pair, name, number, setup), count)


# What each party knows in a run of a protocol under test, and how it came by it.


TESTS = "the test"
"""The first part of the paths of what the test does itself: it opens results that are in shares."""


@dataclass(frozen=True)
class KnownValue:
    """A value that a party has, and how it came by it.

    Attributes:
        how: "drawn", "brought" (half an input), "received", "sent", "opened" (computed by several of a message),
            "shown" (two that it and another sent each other, added mod 2), "joined" (two that it was sent or drew at
            one place, added mod 2), or "computed", of several values.
        shows: what of the protocol's purpose a message is declared to show.
    """

    name: str
    how: str
    value: torch.Tensor
    shows: str = ""


@dataclass
class ProtocolRun:
    """One run: what each party knows, by name, the messages, and the results with those who learn them."""

    known: dict[str, list[KnownValue]] = field(default_factory=dict)
    messages: list[tuple[Header, torch.Tensor]] = field(default_factory=list)
    results: list[tuple[frozenset[str], torch.Tensor]] = field(default_factory=list)


def side_by_side(runs: Sequence[ProtocolRun]) -> ProtocolRun:
    """What parties know in all of these runs, each value with the runs as its last dimension."""
    found = ProtocolRun()
    for party, known in runs[0].known.items():
        columns = zip(*(run.known[party] for run in runs), strict=True)
        found.known[party] = [
            replace(k, value=torch.stack([c.value for c in column], -1))
            for k, column in zip(known, columns, strict=True)
        ]
    return found


def seen(run: ProtocolRun) -> dict[str, list[torch.Tensor]]:
    """What each party brings, is sent, sends and learns."""
    found = {
        name: [k.value for k in known if k.how in ("brought", "received", "sent")] for name, known in run.known.items()
    }
    for owners, y in run.results:
        for owner in owners:
            found[owner].append(y)
    return found


def runs_agree(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    """Whether it is the same, bit for bit."""
    return all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(one.values(), other.values(), strict=True)
    )


def is_tests(path: str) -> bool:
    """Whether a step of this path is the test's own."""
    return path.split("/")[0] == TESTS


# What is noted for the parties of a protocol under test, step by step.


_TYPES = {torch.int64: "int64", torch.int32: "int32", torch.uint8: "bytes"}
LINEAR = (operator.add, operator.sub, operator.xor)
"""Steps whose result says no more than their operands."""


class KnowledgeLog:
    """What the parties of a program know, as its steps are taken."""

    def __init__(self, program: Program):
        self.played = ProtocolRun({party.name: [] for party in program.parties})
        self._moved = {slot for node in program.nodes if isinstance(node.step, Move) for slot in node.slots}
        self._shown: dict[tuple, list[torch.Tensor]] = {}
        self._latest: dict[tuple, KnownValue] = {}
        self._has: dict[str, set[Slot]] = {party.name: set() for party in program.parties}
        for i in program.inputs:
            self._has[i.party.name].add(i.slot)

    def brought(self, party: str, name: str, half: torch.Tensor) -> None:
        """A party has a half of an input."""
        self._note(party, KnownValue(f"its half of {name}", "brought", half))

    def take(self, node: Node, result: Any) -> None:
        """A step was taken, with this result."""
        step = node.step
        for party in step.owners:
            self._has[party.name].update(node.slots)
        if isinstance(step, Draw):
            for party in step.owners:
                known = KnownValue(f"{_last(step.name)} of {step.name.rsplit('/', 1)[0]}", "drawn", result)
                self._note(party.name, known)
                self._join(party.name, step.path, known)
        elif isinstance(step, Move):
            self._has[step.header.dst.name].update(node.taken)
            self._move(step.header, result)
        elif isinstance(step, Compute) and not is_tests(step.path):
            self._compute(node, step, result)

    def _note(self, party: str, known: KnownValue) -> None:
        self.played.known[party].append(known)

    def _move(self, header: Header, value: torch.Tensor) -> None:
        self.played.messages.append((header, value))
        name = f"{header.label} of {header.protocol}{'' if value.dtype == torch.int64 else f' ({_TYPES[value.dtype]})'}"
        own = is_tests(header.path)
        shows = "a result" if own and header.label == "result" else header.shows
        received = KnownValue(f"{name}, from {header.src.name}", "received", value, shows)
        self._note(header.dst.name, received)
        self._note(header.src.name, KnownValue(f"{name}, to {header.dst.name}", "sent", value, shows))
        if not own:
            self._show(header, value)
            self._join(header.dst.name, header.path, received)

    def _show(self, header: Header, value: torch.Tensor) -> None:
        """What two send each other at one place is, as a rule, one value in two halves."""
        key = header.path, value.shape, value.dtype
        others = self._shown.get((*key, header.dst, header.src))
        if not others:
            self._shown.setdefault((*key, header.src, header.dst), []).append(value)
            return
        name = f"what {header.src.name} and {header.dst.name} show in {_last(header.path)}"
        both = others.pop(0) ^ value
        for party in (header.src, header.dst):
            self._note(party.name, KnownValue(name, "shown", both))

    def _join(self, party: str, path: str, known: KnownValue) -> None:
        """What a party has at one place may be the halves of one value."""
        place = party, path, known.value.shape, known.value.dtype
        if place in self._latest:
            other = self._latest[place]
            self._note(party, KnownValue(f"({other.name} + {known.name})", "joined", other.value ^ known.value))
        self._latest[place] = known

    def _compute(self, node: Node, step: Compute, result: Any) -> None:
        """What parties make of several values is often no linear function of these. What several parties make of a
        message is open to them. Who has what another's step takes may take it too."""
        if not step.random:
            for has in self._has.values():
                if node.taken and has.issuperset(node.taken):
                    has.update(node.slots)
        of_message = len(step.owners) > 1 and not self._moved.isdisjoint(node.taken)
        if not of_message and (len(node.taken) < 2 or step.f in LINEAR):
            return
        name = f"what {_last(step.path) or 'the program'} {'opens' if of_message else 'makes'}"
        able = [party for party, has in self._has.items() if has.issuperset(node.slots)]
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
                for party in able:
                    own = of_message and party in {p.name for p in step.owners}
                    self._note(party, KnownValue(name, "opened" if own else "computed", value))


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]


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

    def play(self, inputs: Sequence[torch.Tensor], draws: Draws, twice: bool = False) -> ProtocolRun:
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
) -> ProtocolRun:
    """The same of a program and what parties bring into it by name."""
    notes = KnowledgeLog(program)
    values: dict[Any, Any] = {}
    for i in program.inputs:
        values[i.slot] = brought[i.name]
        if i.name.endswith(("_A", "_S")):
            notes.brought(i.party.name, i.name[:-2], brought[i.name])
    with torch.inference_mode():
        for at, node in enumerate(program.nodes):
            operands = [values[o.slot] if type(o) is OperandRef else o for o in node.operands]
            result = _taken(node, operands, draws, at < len(program.setup), twice)
            for slot, value in zip(node.slots, result if node.many else (result,), strict=True):
                values[slot] = value
            notes.take(node, result)
    read = [values[leaf.slot] if type(leaf) is OperandRef else leaf for leaf in program.leaves]
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


# What is checked, and against what: the one list of what `check_protocol` and `mutate_protocol` may be told.


Reference = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]


class CheckOptions(TypedDict, total=False):
    """How a protocol is checked, and how its faults are looked for.

    Attributes:
        roles: of the protocol's parties; Q, A and S by default.
        dealer: as of `sectorch.Session`; "Q".
        answering: how many parties answer; 1. Of more the protocol is f(nets, *values), with a net for each, and the
            inputs that are shared are shared by each of them in turn.
        elementwise: whether each element of a result depends on the same element of each input, and of each draw,
            alone; then the elements of one run are as many experiments. Otherwise each run is one: small shapes find
            more. True.
        error: how far a result may be from the reference, in ring elements; 0.
        varies: how far two results for the same inputs may be apart; 0.
        uniform: whether messages have to be uniform; ciphertexts and statistical masks are not. True.
        sorts: labels of draws that rows are sorted by: their lowest bits hardly ever change anything. None.
        elements: about so many in one run; 4096.
        pairs: of secrets that each party is compared for, at most; 7.
        runs: of each secret, for less time; as many as give 16,384 elements of a message, or 512 where each run is one
            experiment.
        seed: of inputs and draws; the same seed finds the same. 0.
        exhaustive: bits of the small domains that are tried in all combinations, where inputs and results have n
            elements each; and draws near powers of two are tried too. 0 for less time, or for a protocol that may be
            wrong under draws that hardly ever come, as a hash is under a key that is zero. 3.
    """

    roles: Roles
    dealer: str
    answering: int
    elementwise: bool
    error: int
    varies: int
    uniform: bool
    sorts: Collection[str]
    elements: int
    pairs: int
    runs: int | None
    seed: int
    exhaustive: int


@dataclass(frozen=True)
class Case:
    """A protocol with its inputs, what it has to compute, and the `Options` that hold for it."""

    protocol: Callable
    given: Sequence[Given]
    reference: Reference
    roles: Roles = STAR
    dealer: str = "Q"
    answering: int = 1
    elementwise: bool = True
    error: int = 0
    varies: int = 0
    uniform: bool = True
    sorts: Collection[str] = ()
    elements: int = 4096
    pairs: int = 7
    runs: int | None = None
    seed: int = 0
    exhaustive: int = 3

    @classmethod
    def of(
        cls, protocol: Callable, given: Sequence[Given], reference: Reference, options: CheckOptions
    ) -> Case:  # fmt: skip
        """The case.

        Raises:
            ArgumentError: no reference; an option that there is not.
        """
        if not callable(reference):
            raise ArgumentError("a check needs a reference: what the protocol computes, as a function of plain tensors")
        strange = sorted(set(options) - set(CheckOptions.__annotations__))
        if strange:
            raise ArgumentError(
                f"there is no option '{strange[0]}'; there are {', '.join(CheckOptions.__annotations__)}"
            )
        if not isinstance(count := options.get("elements", 1), int) or count < 1:
            raise ArgumentError(f"elements is how many there are in one run, a whole number from 1 on; got {count!r}")
        try:
            if isinstance(given, Sequence):  # which `Protocol` asks for
                inspect.signature(reference).bind(*given)
        except TypeError as error:
            raise ArgumentError(
                f"the reference is called with the protocol's inputs as plain tensors, {len(given)} of them: {error}"
            ) from None
        except ValueError:  # of a builtin
            pass
        return cls(protocol, given, reference, **options)

    def traced(self) -> Protocol:
        """The protocol, traced; errors as of `Protocol`.

        Raises:
            ArgumentError: its elements are said to be experiments of their own, and share a value.
        """
        found = Protocol(self.protocol, self.given, self.roles, self.elements, self.dealer, self.answering)
        if self.elementwise and (said := shared_by_elements(found.program, found.n)):
            raise ArgumentError(
                f"all elements share {said}, so they are no experiments of their own: pass elementwise=False, and "
                f"small shapes"
            )
        return found


F = TypeVar("F", bound=Callable)


def with_options(f: F) -> F:
    """Give a function that takes `**options: Unpack[Options]` a signature with each of them and its default."""
    signature, defaults = inspect.signature(f), {field.name: field.default for field in fields(Case)}
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kinds = get_type_hints(CheckOptions)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in kinds.items()
    ]
    f.__signature__ = signature.replace(parameters=[*own, *named])  # pyright: ignore[reportFunctionMemberAccess]
    return f


def shared_by_elements(program: Program, n: int) -> str:
    """A value of a few numbers that a step takes beside one of n elements, or of their packed bits; of a sum or a
    difference it tells nothing of its own. Such a product is even in all elements where the few numbers are."""
    sizes = {i.slot: i.shape.numel() for i in program.inputs}
    for node in program.nodes:
        for slot, y in zip(node.slots, node.results, strict=True):
            sizes[slot] = y.numel() if isinstance(y, torch.Tensor) else 0
        step = node.step
        if isinstance(step, Compute) and step.f not in LINEAR and not is_tests(step.path):
            taken = [sizes[slot] for slot in node.taken if sizes[slot]]
            if taken and max(taken) >= n and min(taken) < -(-n // 64):
                return f"a value of {min(taken)} in a step of {step.path or 'the protocol'}"
    return ""
