"""A session: the parties, their pair keys, and the calls that they make together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .choreography import Net, Party, Phase, Runtime
from .errors import ArgumentError
from .located import running
from .mpc.seed import seed
from .runtime.ledger import Observer, alone
from .runtime.local import DryRuntime, LocalRuntime
from .runtime.material import Material
from .runtime.part import part_of
from .runtime.program import Program, Tracing
from .runtime.reference import ReferenceRuntime
from .runtime.setup import Setup

_CALL: ContextVar[dict[bytes, Net] | None] = ContextVar("sectorch_call", default=None)


Q, A, S = Party("Q", "Q"), Party("A", "A"), Party("S", "S")
"""The parties of a session with one answering party."""


class Session:
    """Q, S and one or several answering parties with fresh pair keys.

    All of them live in this process (see `runtime/local.py`): a session is for development and tests, and shows what
    the parties would learn, compute and send. With `dry=True` nobody is present and everything runs on shapes. With
    `reference=True` there are no parties, and every protocol is the function that it computes: what is shared, computed
    and revealed in it are the same numbers, bit for bit, at the cost of plain integers (`runtime/reference.py`).

    Args:
        answering: how many answering parties, each with a model of its own; they are called A, or A1 ... An.
        runtime: where it runs, instead of this process: a `PartyRuntime` of Q, A or S.
        device: where tensors live: "cpu" or a CUDA device.
    """

    def __init__(
        self,
        answering: int = 1,
        *,
        dry: bool = False,
        reference: bool = False,
        runtime: Runtime | None = None,
        device: torch.device | str = "cpu",
    ):
        if answering < 1:
            raise ArgumentError(f"a session needs at least one answering party, got {answering}")
        self.Q, self.S = Q, S
        names = ["A"] if answering == 1 else [f"A{i + 1}" for i in range(answering)]
        self.answering = tuple(Party(name, "A") for name in names)
        everyone = frozenset((self.Q, self.S, *self.answering))
        self.device = torch.device(device)
        if reference:
            runtime = ReferenceRuntime(everyone - {self.S})
        self.runtime = runtime or (DryRuntime() if dry else LocalRuntime(everyone, self.device))
        self._calls: Iterator[int] = itertools.count()
        self._begin()
        with alone(Observer()) if dry else nullcontext():
            for i, party in enumerate(self.answering):
                seed(self._setup[party], first=i == 0)

    def _begin(self) -> None:
        """Nothing was asked yet."""
        self._setup = {party: self._net(party, Phase.SETUP) for party in self.answering}
        self._settled: WeakKeyDictionary[Tracing, Setup] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Over `_settled`."""

    def __repr__(self) -> str:
        return f"Session({', '.join(p.name for p in (self.Q, *self.answering, self.S))}, {type(self.runtime).__name__})"

    def __reduce__(self):
        raise ArgumentError("a session holds keys and cannot be copied or pickled; open a new one")

    def _net(self, party: Party, base: Phase) -> Net:
        party = self.answering_party(party)
        setup = None if base == Phase.SETUP else self._setup[party]
        return Net(self.runtime, next(self._calls), self.Q, party, self.S, base, setup)

    def present(self, party: Party) -> bool:
        """Whether this process holds that party's values."""
        return party in self.runtime.here

    @property
    def complete(self) -> bool:
        """Whether all parties are in this process, or there are none: in the reference."""
        return self.runtime.ideal or all(self.present(p) for p in (self.Q, self.S, *self.answering))

    def answering_party(self, party: Party | None = None) -> Party:
        """`party`, if it is one of this session's answering parties; the first of them for None.

        Every call, module and tensor of the session asks here. Shares between S and S, or S and Q, would hide nothing.

        Raises:
            ArgumentError: S, Q, another session's party, or no Party at all; nothing was computed or sent.
        """
        if party is None:
            return self.answering[0]
        if not isinstance(party, Party) or party not in self.answering:
            known = isinstance(party, Party)
            raise ArgumentError(
                f"party must be an answering party of the session ({', '.join(p.name for p in self.answering)}), got "
                f"{f'{party.name} of role {party.role}' if known else f'a {type(party).__name__}'}; "
                f"pass party=session.answering[i], or leave it out for the first"
            )
        return party

    def setup(self, party: Party) -> Net:
        """The net for what is done once a session with this answering party."""
        return self._setup[self.answering_party(party)]

    def net(self, party: Party) -> Net:
        """The net of the running call with this party, or a new call of its own."""
        running = (_CALL.get() or {}).get(self.runtime.session)
        if running is not None and party == running.A:
            return running
        return self._net(party, Phase.OFFLINE)

    @contextmanager
    def call(self, party: Party) -> Iterator[Net]:
        """Everything inside runs as one call."""
        with self._running(self._net(party, Phase.OFFLINE)) as net:
            try:
                yield net
            finally:
                self.runtime.forget(net.call)

    @contextmanager
    def operation(self, party: Party) -> Iterator[Net]:
        """The running call with this party; where none is running, what is inside is a call of its own."""
        found = (_CALL.get() or {}).get(self.runtime.session)
        if found is not None and party == found.A:
            with running(found):
                yield found
        else:
            with self.call(party) as net:
                yield net

    def on_shapes(self) -> Session:
        """A session of the same parties in which nobody is present."""
        return Session(len(self.answering), dry=True, device=self.device)

    def trace(self, f: Callable[[Net], Any], party: Party | None = None) -> Program:
        """The program of f among parties as this session's: f(net) is called once, on shapes, and nothing is sent.

        Args:
            f: brings inputs by `net.own(party, shape, name=...)`, returns what was read (`net.read`), or a tree
                of it. What it does with `net.setup` is done once a session.

        Raises:
            MisplacedValueError, UndeclaredMessageError, TopologyError: as when it is run.
            ArgumentError: it is not the same in every call; see `Tracing.program`.
        """
        party = self.answering_party(party)
        with alone(Observer()):
            shapes = self.on_shapes()
            setup = shapes.setup(party).tracing = Tracing(shapes.setup(party).call)
            with shapes.call(party) as net:
                net.tracing = Tracing(net.call, setup)
                return net.tracing.program(f(net))

    def run(self, program: Program, inputs: Mapping[str, torch.Tensor], material: Material | None = None) -> Any:
        """A program as a call of its own.

        Args:
            inputs: by name, those of the parties that are here.
            material: what `prepare` made for one call; its offline steps were taken then.

        Returns:
            what the program's function returned, with what is read at parties who are here; shapes elsewhere.

        Raises:
            ArgumentError, ShapeError: an input is missing, or of another shape or type than in the program.
            MaterialError: the material was used, or is of another session, program or model.
        """
        part = part_of(program, self.runtime.here)
        setup = self._setup_of(program)
        settled = setup.values(part, self.runtime, inputs)
        if material is not None:
            return part.resume(self.runtime, material, setup.call, settled, inputs)
        number = next(self._calls)
        try:
            return part.call(self.runtime, number, settled, inputs)
        finally:
            self.runtime.forget(number)

    def prepare(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Material:
        """The offline part of a program, for one later call; of the inputs it takes those that are no queries."""
        part = part_of(program, self.runtime.here)
        setup = self._setup_of(program)
        settled = setup.values(part, self.runtime, inputs)
        number = next(self._calls)
        try:
            values = part.prepare(self.runtime, number, settled, inputs)
        finally:
            self.runtime.forget(number)
        return Material(number, self.runtime.session, program.digest, setup.call, values)

    def check(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> None:
        """What whoever is here can check of its own inputs to a program's setup, before anything of it is sent.

        Raises:
            SectorchError: at the owner: a weight does not fit.
        """
        self._setup_of(program).check(part_of(program, self.runtime.here), self.runtime, inputs)

    def _setup_of(self, program: Program) -> Setup:
        with self._lock:
            if program.before not in self._settled:
                self._settled[program.before] = self._new_setup()
            return self._settled[program.before]

    def _new_setup(self) -> Setup:
        return Setup(next(self._calls))

    @contextmanager
    def _running(self, net: Net) -> Iterator[Net]:
        token = _CALL.set({**(_CALL.get() or {}), self.runtime.session: net})
        try:
            with running(net):
                yield net
        finally:
            _CALL.reset(token)


_default: dict[torch.device, Session] = {}
_DEFAULT = threading.Lock()


def default_session(device: torch.device | str = "cpu") -> Session:
    """The session of this process that `share` and `secure` use when none is named: one a device, made on first use."""
    device = torch.device(device)
    with _DEFAULT:  # tensors of two threads must be of one session to meet
        if device not in _default:
            _default[device] = Session(device=device)
        return _default[device]
