"""Runs of a protocol under test: a traced program, computed in one place, with each party's knowledge recorded.

No parties run here. All values of a program are computed in this process, and for each party `KnowledgeLog` records the
values that it would know. The draws come from a seed, so a finding can be reproduced. `Case` and `CheckOptions` say
what is checked.
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


class Draws:
    """The random words of one run, and the halves of shared inputs: from a seed, the same for the same place.

    Args:
        extreme: make half of the words lie near a power of two or its negative.
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
        """The words that a pair draws at a place of its stream."""
        return self.words(_place(pair, name, number, setup), count)


def half_of(i: int) -> tuple:
    """The place of the draw of A's half of an input."""
    return "half", i


def place_of(step: Draw, setup: bool) -> tuple:
    """The place of a step's draw."""
    return _place(step.owners, step.name, step.number, setup)


def _place(pair: frozenset[Party], name: str, number: int, setup: bool) -> tuple:
    return sorted(p.name for p in pair), name, number, setup


class FlippedDraws(Draws):
    """The same draws, with the bits of a mask flipped in each word of one place."""

    def __init__(self, draws: Draws, place: tuple, mask: int):
        self._draws, self._place, self._mask = draws, place, mask

    def words(self, place: Any, count: int) -> torch.Tensor:
        found = self._draws.words(place, count)
        return found ^ self._mask if place == self._place else found


class ManyDraws:
    """The draws of many runs; those of a place are made in one step."""

    def __init__(self, seed: int | tuple, runs: int):
        self._draws, self._runs = Draws(seed), runs
        self._places: dict[Any, torch.Tensor] = {}

    def run(self, i: int) -> Draws:
        """The draws of one run."""
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


# The knowledge of each party in a run.

TESTS = "the test"
"""The first part of the paths of the test's own steps, which open results that are in shares."""


@dataclass(frozen=True)
class KnownValue:
    """A value that a party has, and where it comes from.

    Attributes:
        how: "drawn", "brought" (half an input), "received", "sent", "opened" (computed by several parties from a
            message), "shown" (the sum mod 2 of two values that it and another party sent each other), "joined" (the
            sum mod 2 of two values that it received or drew at one place), or "computed" (from several values).
        shows: the declared purpose of a message, if it shows its receiver something.
    """

    name: str
    how: str
    value: torch.Tensor
    shows: str = ""


@dataclass
class ProtocolRun:
    """One run: each party's knowledge by its name, the messages, and the results with the parties that learn them."""

    known: dict[str, list[KnownValue]] = field(default_factory=dict)
    messages: list[tuple[Header, torch.Tensor]] = field(default_factory=list)
    results: list[tuple[frozenset[str], torch.Tensor]] = field(default_factory=list)


def side_by_side(runs: Sequence[ProtocolRun]) -> ProtocolRun:
    """The knowledge of the parties in several runs, each value with the runs as its last dimension."""
    found = ProtocolRun()
    for party, known in runs[0].known.items():
        columns = zip(*(run.known[party] for run in runs), strict=True)
        found.known[party] = [
            replace(k, value=torch.stack([c.value for c in column], -1))
            for k, column in zip(known, columns, strict=True)
        ]
    return found


def observable_values(run: ProtocolRun) -> dict[str, list[torch.Tensor]]:
    """The values that each party brings, receives, sends and learns."""
    found = {
        name: [k.value for k in known if k.how in ("brought", "received", "sent")] for name, known in run.known.items()
    }
    for owners, y in run.results:
        for owner in owners:
            found[owner].append(y)
    return found


def runs_agree(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    """Whether two runs have the same observable values, bit for bit."""
    return all(
        len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(one.values(), other.values(), strict=True)
    )


def is_tests(path: str) -> bool:
    """Whether a step of this path belongs to the test."""
    return path.split("/")[0] == TESTS


_TYPES = {torch.int64: "int64", torch.int32: "int32", torch.uint8: "bytes"}
LINEAR = (operator.add, operator.sub, operator.xor)
"""Steps whose result tells no more than their operands."""


class KnowledgeLog:
    """Records the knowledge of a program's parties, step by step."""

    def __init__(self, program: Program):
        self.run = ProtocolRun({party.name: [] for party in program.parties})
        self._moved = {slot for node in program.nodes if isinstance(node.step, Move) for slot in node.slots}
        self._shown: dict[tuple, list[torch.Tensor]] = {}
        self._latest: dict[tuple, KnownValue] = {}
        self._has: dict[str, set[Slot]] = {party.name: set() for party in program.parties}
        for i in program.inputs:
            self._has[i.party.name].add(i.slot)

    def note_input(self, party: str, name: str, half: torch.Tensor) -> None:
        """Record a party's half of an input."""
        self._note(party, KnownValue(f"its half of {name}", "brought", half))

    def note_step(self, node: Node, result: Any) -> None:
        """Record a step and its result."""
        step = node.step
        for party in step.owners:
            self._has[party.name].update(node.slots)
        if isinstance(step, Draw):
            for party in step.owners:
                known = KnownValue(f"{_last(step.name)} of {step.name.rsplit('/', 1)[0]}", "drawn", result)
                self._note(party.name, known)
                self._join(party.name, step.path, known)
        elif isinstance(step, Move):
            self._has[step.header.dst.name].update(node.operand_slots)
            self._move(step.header, result)
        elif isinstance(step, Compute) and not is_tests(step.path):
            self._compute(node, step, result)

    def _note(self, party: str, known: KnownValue) -> None:
        self.run.known[party].append(known)

    def _move(self, header: Header, value: torch.Tensor) -> None:
        self.run.messages.append((header, value))
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
        """Record the sum of two values that two parties send each other: usually the halves of one value."""
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
        """Record the sum of two values that a party has at one place: they may be the halves of one value."""
        place = party, path, known.value.shape, known.value.dtype
        if place in self._latest:
            other = self._latest[place]
            self._note(party, KnownValue(f"({other.name} + {known.name})", "joined", other.value ^ known.value))
        self._latest[place] = known

    def _compute(self, node: Node, step: Compute, result: Any) -> None:
        """Record the result of a step that is no linear function of known values.

        A result that several parties compute from a message is open to them. A party that has all operands of another
        party's step can compute its result too.
        """
        if not step.random:
            for has in self._has.values():
                if node.operand_slots and has.issuperset(node.operand_slots):
                    has.update(node.slots)
        of_message = len(step.owners) > 1 and not self._moved.isdisjoint(node.operand_slots)
        if not of_message and (len(node.operand_slots) < 2 or step.f in LINEAR):
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
        party: the role of the party that has it; or `SHARED`, if A and S have half of it each.
        shape: a function from the number of elements to a shape of about that many; or a shape.
        low, high: its range, as ring elements. The protocol is checked over the whole range.
        phase: as for `net.own`: `Phase.SETUP` for an input that is the same in every call, such as weights.

    Raises:
        ArgumentError: `low` or `high` is no whole number, they are in the wrong order, or beyond the ring.
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
        protocol: f(net, *values) with `Shares` for shared inputs and `Located` for the others. It returns such values,
            or a tuple of them. A result in shares is revealed to Q; a located result is learned by its owners.
        dealer: as for `sectorch.Session`.
        answering: the number of answering parties. With several the protocol is f(nets, *values), with a net for each
            of them, and they share the shared inputs in turn.

    Raises:
        ArgumentError: the protocol has no result, or is not the same in every call.
        SectorchError: the choreography refuses one of its steps.
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

    def with_size(self, n: int) -> Protocol:
        """The same protocol for about n elements."""
        return Protocol(self._protocol, self.given, self._roles, n, self._dealer, self._answering)

    def _play(self, net: Net) -> Any:
        nets = [net, *(_net_of(net, i, A) for i, A in enumerate(self.session.answering[1:], 1))]
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
            located = _open_result(net, y) if isinstance(y, Shares) else y
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

    def inputs_by_name(self, inputs: Sequence[torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """The inputs of the parties by name; uniform halves of shared ones."""
        found = {}
        for i, (given, x) in enumerate(zip(self.given, inputs, strict=True)):
            if given.party == SHARED:
                half = draws.words(half_of(i), x.numel()).view(x.shape)
                found |= {f"x{i}_A": x - half, f"x{i}_S": half}
            else:
                found[f"x{i}"] = x
        return found

    def play(self, inputs: Sequence[torch.Tensor], draws: Draws, twice: bool = False) -> ProtocolRun:
        """Compute one run.

        Args:
            twice: compute each step twice, to check that it gives the same.

        Raises:
            ArgumentError: a step that is random without `net.fresh`.
        """
        look_at_clock()
        return play(self.program, self.inputs_by_name(inputs, draws), draws, self.learners, twice)


def play(
    program: Program,
    brought: Mapping[str, torch.Tensor],
    draws: Draws,
    learners: Sequence[frozenset[str]] = (),
    twice: bool = False,
) -> ProtocolRun:
    """Compute one run of a program, with the parties' inputs by name."""
    log = KnowledgeLog(program)
    values: dict[Any, Any] = {}
    for i in program.inputs:
        values[i.slot] = brought[i.name]
        if i.name.endswith(("_A", "_S")):
            log.note_input(i.party.name, i.name[:-2], brought[i.name])
    with torch.inference_mode():
        for at, node in enumerate(program.nodes):
            operands = [values[o.slot] if type(o) is OperandRef else o for o in node.operands]
            result = _take_step(node, operands, draws, at < len(program.setup), twice)
            for slot, value in zip(node.slots, result if node.many else (result,), strict=True):
                values[slot] = value
            log.note_step(node, result)
    read = [values[leaf.slot] if type(leaf) is OperandRef else leaf for leaf in program.leaves]
    log.run.results = list(zip(learners or [frozenset()] * len(read), read, strict=True))
    return log.run


def _take_step(node: Node, operands: list, draws: Draws, setup: bool, twice: bool) -> Any:
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
    if twice and not step.random and not _same_result(result, step.f(*operands)):
        raise ArgumentError(
            f"a step of {step.path or 'the program'} ({getattr(step.f, '__name__', 'a function')}) gives something "
            f"else each time: what a party draws for itself goes through net.fresh"
        )
    return result


def _same_result(x: Any, y: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(_same_result, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else True


def messages_of(program: Program) -> list[Header]:
    """The protocol's own messages, without those that open its result for the test."""
    return [header for header in program.messages if not is_tests(header.path)]


def _net_of(net: Net, i: int, answering: Party) -> Net:
    """The net of the i-th answering party in the same program; its steps and draws have numbers of their own."""
    other = Net(net.runtime, net.call, Cast(STAR, {**net.cast.parties, "A": answering}), net._base, net.setup)
    other.tracing, other._steps, other._draws = net.tracing, i << 20, i << 20
    return other


def _open_result(net: Net, y: Shares) -> Any:
    """Reveal y to Q under the test's own name, which sets it apart from a `reveal` of the protocol under test."""
    with net.declared(ProtocolSpec(TESTS, __name__, (), "Opens a result.", STAR)):
        return reveal(net, y)


# The case to check, and the options of `check_protocol` and `mutate_protocol`.

Reference = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]


class CheckOptions(TypedDict, total=False):
    """The options of `check_protocol` and `mutate_protocol`.

    Attributes:
        roles: the roles of the protocol's parties. Default Q, A and S.
        dealer: as for `sectorch.Session`. Default "Q".
        answering: the number of answering parties. With several the protocol is f(nets, *values), with a net for each,
            and they share the shared inputs in turn. Default 1.
        elementwise: whether each element of a result depends only on the same element of each input and of each draw.
            The elements of one run are then independent experiments. Otherwise each run is one experiment, and small
            shapes find more. Default True.
        error: the largest allowed difference of a result from the reference, in ring elements. Default 0.
        varies: the largest allowed difference of two results for the same inputs. Default 0.
        uniform: whether messages have to be uniform; ciphertexts and statistical masks are not. Default True.
        sorts: labels of draws by which rows are sorted, since their lowest bits rarely change anything. Default none.
        elements: the number of elements in one run, approximately. Default 4096.
        pairs: the largest number of pairs of secrets for which each party's views are compared. Default 7.
        runs: the runs of each secret; fewer take less time. The default gives 16,384 elements of a message, or 512 runs
            where each run is one experiment. With fewer than 73 of these all values count as independent, and values
            that follow from each other may be taken for a leak.
        seed: of inputs and draws; the same seed gives the same findings. Default 0.
        exhaustive: bits of the small domains that are tried in all combinations, if inputs and results have n elements
            each. Draws near powers of two are tried too. Take 0 for less time, or for a protocol that may be wrong
            under rare draws, such as a hash with the key zero. Default 3.
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
    """A protocol with its inputs, its reference, and its `CheckOptions`."""

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
        """Make a case, and check its arguments.

        Raises:
            ArgumentError: no reference, or an unknown option.
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

    def trace(self) -> Protocol:
        """Trace the protocol; errors are those of `Protocol`.

        Raises:
            ArgumentError: the case is elementwise, but elements share a value.
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
    """Give a function with `**options: Unpack[CheckOptions]` a signature that shows each option and its default."""
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
    """Name a value of a few numbers that a step takes beside one of n elements or of their packed bits, if any.

    All elements of such a product depend on the few numbers, so they are no independent experiments. Sums and
    differences do not count.
    """
    sizes = {i.slot: i.shape.numel() for i in program.inputs}
    for node in program.nodes:
        for slot, y in zip(node.slots, node.results, strict=True):
            sizes[slot] = y.numel() if isinstance(y, torch.Tensor) else 0
        step = node.step
        if isinstance(step, Compute) and step.f not in LINEAR and not is_tests(step.path):
            taken = [sizes[slot] for slot in node.operand_slots if sizes[slot]]
            if taken and max(taken) >= n and min(taken) < -(-n // 64):
                return f"a value of {min(taken)} in a step of {step.path or 'the protocol'}"
    return ""
