"""Choreographies: a protocol is written once, from above, as in the papers' three-column figures.

A `Located` value is present at its owners and absent elsewhere. A protocol computes with it as with a tensor
(`located.py`), and may do three things more:

- `value.send(src, dst, label)`: a value moves along an edge of the roles (`roles.py`); afterwards both ends hold it,
- `net.common(p, q, shape, label)`: two parties draw the same randomness from the stream of their pair key,
- `net.fresh(party, f, *values)`: one party draws randomness of its own.

The same code runs with all parties present, with one, or with none (a dry run on shapes): where no owner of a result is
present, f runs on meta tensors, so that shapes are known to everybody. Protocol code never asks who is present.

Data dependence is tracked on every value. What depends on neither model nor query belongs to `Phase.OFFLINE`, what
depends on the model alone and is done once a session to `Phase.SETUP`, what depends on the query to `Phase.ONLINE`; the
number of dependent messages before a party has a value is its round there.

Source of the idea: choreographic programming (HasChor, MultiChor).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from ..errors import DtypeError, MisplacedValueError, UndeclaredMessageError
from .accepted import check_content, check_located, plain
from .declaration import PAYLOADS, Message, ProtocolSpec, in_package
from .located import _RUNNING, Located, dependence, running
from .origins import Origins
from .parties import Party, Phase
from .roles import Cast, Roles
from .shapes import shape_of
from .steps import Compute, Draw, Move, Read, Runtime, Step, header_of


class Tracing(Protocol):
    """Writes down the steps of a program as they are taken on shapes; see `program/trace.py`."""

    def brought(self, value: Located, name: str) -> None: ...

    def rely(self, checked: Located) -> None: ...

    def step(self, number: int, step: Step, values: tuple, result: Any) -> None: ...


class Entered:
    """A protocol that a net is in, from the beginning of a `with` block to its end, and the names that lead there."""

    __slots__ = ("_net", "_token", "ours", "path", "spec")

    def __init__(self, net: Net, spec: ProtocolSpec, ours: bool):
        self._net, self.spec, self.ours = net, spec, ours

    def __enter__(self) -> Entered:
        net, spec = self._net, self.spec
        if spec.roles is not net.cast.roles:
            net.cast.check_plays(spec.roles.names, spec.name)
        self.path = f"{net._path()}/{spec.name}" if net._stack else spec.name
        self.ours &= net._stack[-1].ours if net._stack else True
        net._stack.append(self)
        self._token = _RUNNING.set(net)
        return self

    def __exit__(self, *_) -> None:
        _RUNNING.reset(self._token)
        self._net._stack.pop()


class Net:
    """One call of a choreography. `net.Q` is the party that plays the role Q, and so for all roles.

    Args:
        runtime: where it runs.
        call: the number of this call in its session; addresses its randomness, and is used once.
        cast: who plays which role.
        base: the phase of values that depend on nothing.
        setup: the net of what is done once a session; itself unless given.
    """

    def __init__(self, runtime: Runtime, call: int, cast: Cast, base: Phase, setup: Net | None = None):
        self.runtime = runtime
        self.call = call
        self.cast = cast
        self.setup = setup or self
        self._base = base
        self._draws = self._steps = 0
        self.ahead = 0  # bytes that were sent ahead of the query
        self.lock = threading.RLock()
        """Held over each protocol and step: the net of the setup is used by all threads of a session."""
        self._stack: list[Entered] = []
        self.tracing: Tracing | None = None
        """Who writes down the steps, where nobody is present."""
        self.verified = False
        """Whether the dealer proves what it sends before it is used; see `mpc/star/prove.py`."""
        self.opened: WeakKeyDictionary = WeakKeyDictionary()
        """What this call has opened under a mask, by the shares that were opened: mask once, use often."""
        self.claims: Any = None
        """What was dealt and is not proved yet; see `mpc/star/claims.py`."""
        self.round_bytes: int | None = None
        """What a round is worth in this call, where its scheme says so; see `mpc/star/trees.py`."""
        self.spent = 0
        """Bytes that this call is dealt in addition, for fewer rounds; see `mpc/star/largest.py`."""
        self.origins: Origins | None = None
        """Who notes which inputs a value was computed from."""
        self.raised: list[Any] = []
        """Flags that protocols of this call raised, as XOR-shared words; see `mpc/star/guard.py`."""

    def __repr__(self) -> str:
        return f"Net(call {self.call}, {self.cast})"

    def __getattr__(self, role: str) -> Party:
        party = None if role.startswith("_") else self.cast.parties.get(role)
        if party is None:
            raise AttributeError(f"a net has no '{role}', and the roles are {self.cast.roles}")
        return party

    def declared(self, spec: ProtocolSpec) -> Entered:
        """What is inside is a protocol, and sends what it declares.

        Raises:
            MisplacedValueError: one of its roles is not played here.
        """
        return Entered(self, spec, in_package(sys._getframe(1).f_code))

    def compute(self, f: Callable, values: tuple) -> Any:
        """f(*values) at whoever holds all of them; see `located.compute`."""
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

        Raises MisplacedValueError, at every party, if it lacks one of the values."""
        return self._alone(party, f, values, random=True)

    def _alone(self, party: Party, f: Callable, values: tuple, random: bool) -> Any:
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
        """A public value, as the party has it: a step of the program, which says what it is."""
        with self.lock:
            return self._step(Compute(_itself, frozenset((party,)), self._base, self._path(), pure=True), (value,), {})

    def check(self, party: Party, f: Callable, *values: Any) -> Any:
        """`party` looks at values that it holds, and f raises where they may not be used; otherwise as `fresh`."""
        return self._alone(party, f, values, random=False)

    def rely(self, checked: Located) -> None:
        """The call is only good where this check, which was made once a session, was passed."""
        if self.tracing is not None:
            self.tracing.rely(checked)

    def send(self, value: Located, src: Party, dst: Party, label: str) -> Located:
        """Send a value that `src` holds to `dst`; both hold the result, `dst` a round later than `src`.

        A `dst` that goes on with what it had before, and not with the result, waits for nothing.

        Raises:
            TopologyError: the two have no edge.
            DtypeError: a message is of int64, int32 (ring elements, words of packed bits) or uint8 (bytes).
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
            ours, opens = self._stack[-1].ours, declared.opens
            if declared.outermost and len(self._stack) > 1 and ours:
                opens = ""
            learner = self.cast.parties[opens] if opens else dst if declared.shows or not ours else None
            if value.dtype not in PAYLOADS:
                raise DtypeError(
                    f"'{label}' carries ring elements and words (int64, int32) or bytes (uint8), not {value.dtype}; "
                    f"fractions are encoded where they are brought in (sectorch.ring.encode)"
                )
            if phase == Phase.OFFLINE:
                self.ahead += value.shape.numel() * value.dtype.itemsize
            arrived, kind = rounds.get(src, 0) + 1, (value.shape, value.dtype)
            header = header_of(
                self._path(), label, src, dst, phase, arrived, *kind, declared.mask, declared.shows, learner, ours
            )
            return self._step(Move(header, value.owners), (value,), {**rounds, dst: arrived})

    def common(self, p: Party, q: Party, shape: torch.Size | tuple, label: str, dtype=torch.int64) -> Located:
        """Uniform int64 (or int32) values that p and q draw from their pair stream; nobody else can.

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
        """Inside, parties of this call play these roles: a protocol of two among many is written once.

        Raises:
            TopologyError: roles with an edge or a stream that those who play them have not.
            ArgumentError: a role that nobody plays.
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
        """Run as a part of the protocol that `other` is in: for protocols over several answering parties."""
        stack, self._stack = self._stack, other._stack
        try:
            with running(self):
                yield
        finally:
            self._stack = stack

    def install(self, p: Party, q: Party, secret: Located) -> None:
        """Make `secret` (32 bytes, held by p or q or both) the pair key of p and q where its holders are present.

        Raises:
            KeyAgreementError: the other end, present here too, installed another secret.
        """
        if secret.owners & self.runtime.here:
            self.runtime.install(frozenset((p, q)), secret._value)

    def own(self, party: Party, value: Any, phase: Phase = Phase.ONLINE, name: str = "x") -> Located:
        """A value that `party` brings into the protocol: a query (online) or a weight (setup), by name.

        Raises:
            ArgumentError: no tensor, or a value that parties hold already. Of a party that is elsewhere None will do.
        """
        self.cast.check_party(party)
        check_content(value, party in self.runtime.here)
        value = plain(value) if isinstance(value, torch.Tensor) else value
        brought = Located(value, frozenset((party,)), phase, {}, self.runtime.session)
        if self.tracing is not None:
            self.tracing.brought(brought, name)
        if self.origins is not None:
            self.origins.brought(brought, party, name, self.call)
        return brought

    def read(self, value: Located, party: Party) -> Any:
        """Hand a result to the caller of the protocol on `party`'s side: the only way out of a choreography.

        Where `party` is not present (a dry run, another party's process) the result has a shape and no content.

        Raises:
            MisplacedValueError: `party` does not hold the value.
            ArgumentError: a plain tensor, Shares, or None, which no party holds.
        """
        self.cast.check_party(party)
        check_located(value, "net.read")
        phase, rounds = self._dependence((value,))
        if party not in value.owners:
            raise MisplacedValueError(f"{party} cannot read a value held by {sorted(p.name for p in value.owners)}")
        return self._step(Read(frozenset((party,)), phase), (value,), rounds)._value

    def agreed(self, value: Located, parties: Iterable[Party]) -> Any:
        """The content of a value that all these parties hold, and that the program itself may go by: what comes next.

        They have to be all parties of the program: another could not follow. Where none of them is present (a dry run)
        the result has a shape and no content.

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
        number, self._steps = self._steps, self._steps + 1
        runtime, call, owners, sends = self.runtime, self.call, step.owners, type(step) is Move
        contents = [v._value if type(v) is Located else v for v in values]
        held = not (step.holders if sends else owners).isdisjoint(runtime.here)
        if not held:
            contents = [shape_of(content) for content in contents]
        if self.origins is not None:
            self.origins.taking(values, call, number)
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
            self.origins.taken(step, made if isinstance(made, tuple) else (made,))
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
