"""Choreographies: a protocol is written once for all parties, as in the papers' three-column figures.

A protocol is a Python function of a `Net`, which is one call of a session, and of `Located` values, which their owners
hold and others do not. It computes with located values as with tensors (`located.py`), and has three more verbs:

- `value.send(src, dst, label)` sends a value over an edge of the roles (`roles.py`); then both ends hold it.
- `net.common(p, q, shape, label)` draws the same random words at two parties, from the stream of their pair key.
- `net.fresh(party, f, *values)` lets one party compute with randomness of its own.

`net.own` brings a party's input in, and `net.read` hands a result out.

How a step runs: each verb makes one step (`Compute`, `Draw`, `Move` or `Read`) and passes it to `Net._step`, which
takes it at once. Where an owner of the result is present, the step runs on contents; elsewhere it runs on meta tensors,
so that every party knows all shapes. The same code therefore runs with all parties in one process (`run/local.py`),
with one (`run/party.py`), or with none: a dry run on shapes, whose steps a tracer records as a program
(`program/trace.py`). A program is then run without the choreography (`program/projection.py`). Protocol code never
asks who is present.

Each value records its phase and its round. `Phase.OFFLINE` is what depends on neither model nor query, `Phase.SETUP`
what depends on the model alone and is done once a session, and `Phase.ONLINE` what depends on the query. The round of a
value at a party is the number of dependent messages that the party waits for before it has the value.

Source: choreographic programming (HasChor, MultiChor).
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from ..errors import DtypeError, MisplacedValueError, UndeclaredMessageError
from .declaration import PAYLOADS, Message, ProtocolSpec, check_content, check_located, in_package, plain
from .located import _RUNNING, FORMS, Located, dependence, fresh_shape, run_in, run_on_shapes, shape_of
from .roles import Cast, Party, Phase, Roles
from .streams import PairKeys

T = TypeVar("T")

# Origins: which inputs a value was computed from. They are noted where steps are taken one by one.

_MOVES = frozenset((
    "cat", "chunk", "clone", "concat", "contiguous", "diagonal", "expand", "expand_as", "flatten", "flip", "gather",
    "getitem", "hstack", "index_select", "masked_select", "movedim", "moveaxis", "narrow", "permute", "ravel", "repeat",
    "reshape", "roll", "select", "split", "squeeze", "stack", "swapaxes", "t", "take", "transpose", "unbind",
    "unflatten", "unsqueeze", "view", "vstack", "encoded_input",
    "itself", "encode", "decode", "add", "sub", "radd", "neg",
))  # fmt: skip
"""Steps after which a value is still the input: in other places, in another form, or beside a mask."""


class Origins:
    """Records for each value which inputs it was computed from.

    The origin of a value is a triple (inputs, same, place). `inputs` are pairs of a party's name and an input's name.
    `same` says whether the value is an input itself, at most moved, encoded or masked. `place` is a digest of the steps
    that the value comes from, by their numbers and not by their content; it tells values of the same inputs apart.

    Args:
        computed: gives a digest of all that was computed before, which is the same at all parties.

    Attributes:
        current: the origin of the operands of the running step.
    """

    def __init__(self, computed: Callable[[], bytes] = bytes):
        self.current: tuple[frozenset[tuple[str, str]], bool, bytes] | None = None
        self._computed = computed

    def note_input(self, value: Any, party: Party, name: str, call: int = 0) -> None:
        """Record the origin of an input."""
        value._origin = frozenset({(party.name, name)}), True, self._place(f"{call} {party.name} {name}")

    def note_operands(self, values: Iterable[Any], call: int = 0, number: int = 0) -> None:
        """Record the origin of a step's operands, before the step is taken. `number` is the step's in its call."""
        known = [origin for value in values if (origin := getattr(value, "_origin", None)) is not None]
        inputs = frozenset[tuple[str, str]]().union(*(inputs for inputs, *_ in known))
        place = self._place(f"{call} {number}", *(place for *_, place in known))
        self.current = inputs, all(same for inputs, same, _ in known if inputs), place

    def note_results(self, step: Any, results: Iterable[Any]) -> None:
        """Record the origin of the results of the step whose operands were noted last."""
        if self.current is not None:
            inputs, same, place = self.current
            f = getattr(step, "f", None)
            f = f.func if isinstance(f, functools.partial) else f
            moved = f is None or getattr(f, "__name__", type(f).__name__).strip("_") in _MOVES
            for i, result in enumerate(results):
                result._origin = inputs, same and moved, self._place(str(i), place) if i else place
        self.current = None

    def _place(self, text: str, *places: bytes) -> bytes:
        return hashlib.sha256(b"".join((self._computed(), *places, text.encode()))).digest()


# Steps. A step holds nothing of the call that it was made in, so that a traced program can take it in other calls.


@dataclass(frozen=True)
class Header:
    """The public facts of a message, which are the same in every call of a program."""

    path: str
    label: str
    src: Party
    dst: Party
    phase: Phase
    round: int
    shape: torch.Size
    dtype: torch.dtype
    mask: str
    shows: str
    learner: Party | None
    """The party that learns a value by this message, or None. It is the receiver of a message that `shows` something or
    that code outside this package sends, and the party that removes the mask of a share."""
    from_package: bool
    """Whether this package declares the protocol and has called it. Otherwise `mask` and `shows` are only claims of
    the calling code."""

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def protocol(self) -> str:
        return self.path.rsplit("/", 1)[-1]


header_of = functools.lru_cache(1 << 12)(Header)
"""A header of these twelve fields, cached, since calls send the same messages."""


@dataclass(frozen=True)
class Sent(Header):
    """One line of the ledger: a message of one call."""

    call: int
    session: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, header: Header, call: int, session: bytes) -> Sent:
        """The message of this header in a call."""
        sent = object.__new__(cls)  # faster than __init__ of a frozen class, which sets each attribute by a call
        sent.__dict__.update(header.__dict__, call=call, session=session)
        return sent


class Runtime(Protocol):
    """The place where a choreography runs: all parties, one of them, or none (`run/`).

    Attributes:
        session: the name of the session.
        here: the parties whose values this process holds.
        keys: the pair keys of these parties.
        graphs: the CUDA graphs of programs (`run/cuda_graphs.py`), or None.
    """

    session: bytes
    here: frozenset[Party]
    keys: PairKeys

    @property
    def graphs(self) -> Any: ...
    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor: ...
    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor: ...
    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None: ...
    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None: ...
    def forget(self, call: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Compute:
    """Each of `owners` computes f.

    Attributes:
        pure: the step may be left out where nobody needs its result.
        random: f draws randomness of the owner's, and gives another result each time. A check is neither.
    """

    f: Callable
    owners: frozenset[Party]
    phase: Phase
    path: str
    pure: bool = False
    random: bool = False

    @property
    def holders(self) -> frozenset[Party]:
        return self.owners

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> Any:
        start = time.perf_counter()
        result = self.f(*values)
        runtime.computed(self.path, self.owners, self.phase, time.perf_counter() - start)
        return result

    def shape(self, values: Sequence[Any]) -> Any:
        return run_on_shapes(getattr(self.f, "shapes", self.f), values)


@dataclass(frozen=True, slots=True)
class Draw:
    """Two parties draw the same words from their pair stream."""

    owners: frozenset[Party]
    phase: Phase
    path: str
    name: str
    number: int
    size: torch.Size
    dtype: torch.dtype

    @property
    def holders(self) -> frozenset[Party]:
        return self.owners

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> torch.Tensor:
        start = time.perf_counter()
        drawn = runtime.draw(self.owners, self.name, call, self.number, self.words)
        runtime.computed(self.path, self.owners, self.phase, time.perf_counter() - start)
        return self.of(drawn)

    @property
    def words(self) -> int:
        """The number of 64-bit words that are drawn."""
        return -(-self.size.numel() * self.dtype.itemsize // 8)

    def of(self, drawn: torch.Tensor) -> torch.Tensor:
        """The words as a value of this step's shape and type.

        A view costs as much as a short draw, so there are as few as possible; `view(*size)` takes half the time of
        `view(size)`.
        """
        if self.dtype != drawn.dtype:
            drawn = drawn.view(self.dtype)[: self.size.numel()]
        if len(self.size) == 1:
            return drawn
        return drawn.view(*self.size) if self.size else drawn.view(self.size)

    def shape(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Move:
    """A value goes over an edge."""

    header: Header
    holders: frozenset[Party]

    @property
    def phase(self) -> Phase:
        return self.header.phase

    @property
    def owners(self) -> frozenset[Party]:
        return self.holders | {self.header.dst}

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> torch.Tensor:
        (value,) = values
        there = value if self.header.src in runtime.here else shape_of(value)
        moved = runtime.transfer(Sent.of(self.header, call, runtime.session), there)
        return moved if self.holders.isdisjoint(runtime.here) else value

    def shape(self, values: Sequence[Any]) -> torch.Tensor:
        return values[0]


@dataclass(frozen=True, slots=True)
class Read:
    """The owners' result leaves the choreography."""

    owners: frozenset[Party]
    phase: Phase

    @property
    def holders(self) -> frozenset[Party]:
        return self.owners

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> Any:
        return values[0]

    def shape(self, values: Sequence[Any]) -> Any:
        """A new meta tensor, so that the tracer can tell results apart by identity."""
        (value,) = values
        return fresh_shape(value) if isinstance(value, torch.Tensor) and type(value) not in FORMS else value


Step: TypeAlias = Compute | Draw | Move | Read
"""One step of a choreography.

`owners` hold its result, and `holders` its operands. `run` takes the step where an owner is present, and for messages
everywhere; its operands are contents where a holder is present, and shapes elsewhere. `shape` computes the shape of the
result from the shapes of the operands.
"""


class ProtocolScope:
    """A `with` block in which a net runs a protocol. `path` joins the names of the protocols around it."""

    __slots__ = ("_net", "_token", "from_package", "path", "spec")

    def __init__(self, net: Net, spec: ProtocolSpec, from_package: bool):
        self._net, self.spec, self.from_package = net, spec, from_package

    def __enter__(self) -> ProtocolScope:
        net, spec = self._net, self.spec
        if spec.roles is not net.cast.roles:
            net.cast.check_plays(spec.roles.names, spec.name)
        self.path = f"{net._path()}/{spec.name}" if net._stack else spec.name
        self.from_package &= net._stack[-1].from_package if net._stack else True
        net._stack.append(self)
        self._token = _RUNNING.set(net)
        return self

    def __exit__(self, *_) -> None:
        _RUNNING.reset(self._token)
        self._net._stack.pop()


class Net:
    """One call of a choreography. `net.Q` is the party that plays the role Q, and likewise for all roles.

    Args:
        runtime: where it runs.
        call: the number of this call in its session. It addresses the call's randomness, and is used once.
        cast: the party of each role.
        base: the phase of values that depend on nothing.
        setup: the net of the steps that are done once a session; itself unless given.
    """

    def __init__(self, runtime: Runtime, call: int, cast: Cast, base: Phase, setup: Net | None = None):
        self.runtime = runtime
        self.call = call
        self.cast = cast
        self.setup = setup or self
        self._base = base
        self._draws = self._steps = 0
        self.offline_bytes = 0
        """The bytes of the messages of the offline phase."""
        self.lock = threading.RLock()
        """Held over each protocol and step: the net of the setup is used by all threads of a session."""
        self._stack: list[ProtocolScope] = []
        self.tracing: Any = None
        """The `ProgramTracer` (`program/trace.py`) that records the steps of a dry run, or None."""
        self.origins: Origins | None = None
        """Records which inputs each value was computed from, or None."""
        self._states: dict[type, Any] = {}

    def __repr__(self) -> str:
        return f"Net(call {self.call}, {self.cast})"

    def __getattr__(self, role: str) -> Party:
        party = None if role.startswith("_") else self.cast.parties.get(role)
        if party is None:
            raise AttributeError(f"a net has no '{role}', and the roles are {self.cast.roles}")
        return party

    def state(self, kind: type[T]) -> T:
        """The object of this class, made when first read: the state that a set of protocols keeps of this call."""
        found = self._states.get(kind)
        return self._states.setdefault(kind, kind()) if found is None else found

    def declared(self, spec: ProtocolSpec) -> ProtocolScope:
        """A scope in which this protocol runs, and may send the messages that it declares.

        Raises:
            MisplacedValueError: nobody plays one of its roles in this call.
        """
        return ProtocolScope(self, spec, in_package(sys._getframe(1).f_code))

    def compute(self, f: Callable, values: tuple) -> Any:
        """f(*values) at the parties that hold all of them; see `located.compute`."""
        owners = None
        for value in values:
            if type(value) is Located and value.owners is not owners:
                owners = value.owners if owners is None else owners & value.owners
        if not owners:
            held = (value for value in values if type(value) is Located)
            said = "; ".join(f"{tuple(value.shape)} at {_names(value.owners)}" for value in held)
            raise MisplacedValueError(
                f"nobody holds all that {_name(f)} takes: {said or 'nothing located'}; send it there"
            )
        phase, rounds = dependence(values, self._base, self.runtime.session)
        with self.lock:
            return self._step(Compute(f, owners, phase, self._path(), True), values, rounds)

    def fresh(self, party: Party, f: Callable, *values: Any) -> Any:
        """`party` alone computes f(*values) with randomness of its own: a key pair, a ciphertext's noise.

        Raises:
            MisplacedValueError: the party lacks one of the values; raised at every party.
        """
        return self._compute_at(party, f, values, random=True)

    def _compute_at(self, party: Party, f: Callable, values: tuple, random: bool) -> Any:
        f = getattr(f, "kernel", f)
        phase, rounds = self._dependence(values)
        for value in values:
            if type(value) is Located and party not in value.owners:
                raise MisplacedValueError(
                    f"{party} cannot compute {_name(f)}: a value of shape {tuple(value.shape)} is at "
                    f"{_names(value.owners)} only; send it there first, or let {_names(value.owners)} compute"
                )
        with self.lock:
            return self._step(Compute(f, frozenset((party,)), phase, self._path(), random=random), values, rounds)

    def public(self, party: Party, value: torch.Tensor) -> Located:
        """A public value, held by `party`. The program contains it as a constant."""
        with self.lock:
            return self._step(Compute(_itself, frozenset((party,)), self._base, self._path(), pure=True), (value,), {})

    def check(self, party: Party, f: Callable, *values: Any) -> Any:
        """`party` checks values that it holds: f raises where they may not be used. Otherwise as `fresh`."""
        return self._compute_at(party, f, values, random=False)

    def rely(self, checked: Located) -> None:
        """Make this call depend on a check that the setup makes once a session."""
        if self.tracing is not None:
            self.tracing.rely(checked)

    def send(self, value: Located, src: Party, dst: Party, label: str) -> Located:
        """Send a value that `src` holds to `dst`; both hold the result, `dst` a round later than `src`.

        Only what uses the result waits for the message.

        Raises:
            TopologyError: the two have no edge.
            DtypeError: the value is not int64, int32 (ring elements, words of packed bits) or uint8 (bytes).
            MisplacedValueError: `src` does not hold the value.
            UndeclaredMessageError: the running protocol does not declare `label` from src to dst.
        """
        with self.lock:
            self.cast.check_edge(src, dst)
            check_located(value, "net.send")
            if src not in value.owners:
                raise MisplacedValueError(f"{src} cannot send '{label}': it does not hold the value")
            phase, rounds = self._dependence((value,))
            declared = self._declared(label, src, dst)
            from_package, opens = self._stack[-1].from_package, declared.opens
            if declared.outermost and len(self._stack) > 1 and from_package:
                opens = ""
            learner = self.cast.parties[opens] if opens else dst if declared.shows or not from_package else None
            if value.dtype not in PAYLOADS:
                raise DtypeError(
                    f"'{label}' carries ring elements and words (int64, int32) or bytes (uint8), not {value.dtype}; "
                    f"fractions are encoded where they are brought in (sectorch.ring.encode)"
                )
            if phase == Phase.OFFLINE:
                self.offline_bytes += value.shape.numel() * value.dtype.itemsize
            arrived, kind = rounds.get(src, 0) + 1, (value.shape, value.dtype)
            header = header_of(
                self._path(),
                label,
                src,
                dst,
                phase,
                arrived,
                *kind,
                declared.mask,
                declared.shows,
                learner,
                from_package,
            )
            return self._step(Move(header, value.owners), (value,), {**rounds, dst: arrived})

    def common(self, p: Party, q: Party, shape: torch.Size | tuple, label: str, dtype=torch.int64) -> Located:
        """Uniform int64 (or int32) values that p and q draw from their pair stream. No other party knows them.

        Raises:
            TopologyError: the two share no stream.
        """
        with self.lock:
            self.cast.check_stream(p, q)
            shape = torch.Size(shape)
            owners = frozenset((p, q))
            draw, self._draws = self._draws, self._draws + 1
            name = f"{self._stack[-1].spec.name if self._stack else 'program'}/{label}"
            return self._step(Draw(owners, self._base, self._path(), name, draw, shape, dtype), (), {})

    @contextmanager
    def playing(self, roles: Roles, **parties: Party) -> Iterator[None]:
        """Inside, parties of this call play these roles, so that a protocol of two parties is written once.

        Raises:
            TopologyError: the roles have an edge or a stream that their parties do not have.
            ArgumentError: nobody plays one of the roles.
        """
        cast = _cast(roles, tuple(parties.items()))
        for pair in map(tuple, roles.edges):
            self.cast.check_edge(parties[pair[0]], parties[pair[1]])
        for pair in map(tuple, roles.streams):
            self.cast.check_stream(parties[pair[0]], parties[pair[1]])
        with self.lock:
            own, self.cast = self.cast, cast
            try:
                yield
            finally:
                self.cast = own

    @contextmanager
    def within(self, other: Net) -> Iterator[None]:
        """Run inside the protocol that `other` runs, for protocols over several answering parties."""
        stack, self._stack = self._stack, other._stack
        try:
            with run_in(self):
                yield
        finally:
            self._stack = stack

    def install(self, p: Party, q: Party, secret: Located) -> None:
        """Make `secret` (32 bytes, held by p or q or both) the pair key of p and q where its holders are present.

        Raises:
            KeyAgreementError: the other end is present here too, and installed another secret.
        """
        if secret.owners & self.runtime.here:
            self.runtime.install(frozenset((p, q)), secret._value)

    def own(self, party: Party, value: Any, phase: Phase = Phase.ONLINE, name: str = "x") -> Located:
        """An input of `party`, by name. For a party elsewhere None is enough.

        Raises:
            ArgumentError: the value is no tensor, or one that parties hold already.
        """
        self.cast.check_party(party)
        check_content(value, party in self.runtime.here)
        value = plain(value) if isinstance(value, torch.Tensor) and type(value) not in FORMS else value
        brought = Located(value, frozenset((party,)), phase, {}, self.runtime.session)
        if self.tracing is not None:
            self.tracing.add_input(brought, name)
        if self.origins is not None:
            self.origins.note_input(brought, party, name, self.call)
        return brought

    def read(self, value: Located, party: Party) -> Any:
        """Return a value to the caller on `party`'s side: the only way out of a choreography.

        Where `party` is not present (a dry run, another party's process) the result has a shape and no content.

        Raises:
            MisplacedValueError: `party` does not hold the value.
            ArgumentError: the value is not located: no party holds it.
        """
        self.cast.check_party(party)
        check_located(value, "net.read")
        phase, rounds = self._dependence((value,))
        if party not in value.owners:
            raise MisplacedValueError(f"{party} cannot read a value held by {sorted(p.name for p in value.owners)}")
        return self._step(Read(frozenset((party,)), phase), (value,), rounds)._value

    def agreed(self, value: Located, parties: Iterable[Party]) -> Any:
        """The content of a value that all these parties hold, for control flow of the program.

        They must be all parties of the program, since another could not follow. Where none of them is present (a dry
        run) the result has a shape and no content.

        Raises:
            MisplacedValueError: one of them does not hold the value.
        """
        parties = frozenset(parties)
        check_located(value, "net.agreed")
        if not parties <= value.owners:
            raise MisplacedValueError(f"{_names(parties - value.owners)} cannot follow: the value was not sent there")
        phase, rounds = self._dependence((value,))
        return self._step(Read(parties, phase), (value,), rounds)._value

    def _dependence(self, values: Iterable[Any]) -> tuple[Phase, Mapping[Party, int]]:
        return dependence(values, self._base, self.runtime.session)

    def declares(self, label: str) -> bool:
        """Whether the running protocol declares a message of this label."""
        return bool(self._stack) and any(message.label == label for message in self._stack[-1].spec.messages)

    def _declared(self, label: str, src: Party, dst: Party) -> Message:
        if not self._stack:
            raise UndeclaredMessageError(f"'{label}' was sent outside a protocol; decorate the function with @protocol")
        spec = self._stack[-1].spec
        message = spec.message(label)
        if (self.cast.parties[message.src], self.cast.parties[message.dst]) != (src, dst):
            raise UndeclaredMessageError(
                f"protocol '{spec.name}' declares '{label}' from {message.src} to {message.dst}, "
                f"not from {src} to {dst}"
            )
        return message

    def _path(self) -> str:
        return self._stack[-1].path if self._stack else ""

    def _step(self, step: Step, values: tuple, rounds: Mapping[Party, int]) -> Any:
        """Take a step: on contents where they are held, on shapes elsewhere; note its origins and record it."""
        number, self._steps = self._steps, self._steps + 1
        runtime, call, owners, sends = self.runtime, self.call, step.owners, type(step) is Move
        contents = [v._value if type(v) is Located else v for v in values]
        held = not (step.holders if sends else owners).isdisjoint(runtime.here)
        if not held:
            contents = [shape_of(content) for content in contents]
        if self.origins is not None:
            self.origins.note_operands(values, call, number)
        taken = held or sends  # observers hear of messages between others as well
        result = step.run(runtime, call, contents) if taken else step.shape(contents)
        if self.tracing is not None:
            self.tracing.step(number, step, values, result)
        phase, session = step.phase, runtime.session
        if isinstance(result, tuple):
            made = tuple(Located(r, owners, phase, rounds, session, (call, number, i)) for i, r in enumerate(result))
        else:
            made = Located(result, owners, phase, rounds, session, (call, number, 0))
        if self.origins is not None:
            self.origins.note_results(step, made if isinstance(made, tuple) else (made,))
        return made


@functools.lru_cache(256)
def _cast(roles: Roles, parties: tuple[tuple[str, Party], ...]) -> Cast:
    return Cast(roles, dict(parties))


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _names(parties: Iterable[Party]) -> str:
    return ", ".join(sorted(p.name for p in parties))


def _name(f: Callable) -> str:
    return getattr(f, "__name__", type(f).__name__)
