"""A session: the parties, their pair keys, and the calls that they make together.

How a call runs:

- With tensors, operation by operation: `Session.operation` opens a call, and the `Backend` of `Session.backend` runs
  protocols in its `Net` (`choreography/net.py`), which sends their messages through the session's runtime.
- As a program, which is faster: `Session.trace` records a function once, on shapes (`choreography/program/trace.py`),
  and `Session.run` takes its steps in a new call (`choreography/program/projection.py`). A secure module
  (`nn/module.py`) does the same with the program of its model.

`Session.prepare` takes the offline steps ahead of the query. `Members` are the parties, and `Agreement`
(`transcript.py`) is the transcript of public values that distributed parties compare.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .audits import Audits
from .backend import Backend
from .choreography import Net, Party, Phase, Runtime
from .choreography.ledger import Observer, sole_observer
from .choreography.located import run_in
from .choreography.net import Origins
from .choreography.program.projection import Material, Projection, Setup, part_of
from .choreography.program.rng_guard import check_no_random_draws
from .choreography.program.trace import Program, ProgramTracer, garbage_collection_paused
from .choreography.roles import STAR, Cast, Roles
from .choreography.run.local import DryRuntime, LocalRuntime, device_named
from .config import Scheme
from .decoys import Statements
from .deprecation import renamed_attribute
from .errors import ArgumentError
from .mpc.plain import Plain
from .mpc.star.backend import Star
from .mpc.star.dealing_proofs import prove_pending
from .mpc.star.key_agreement import Identities, edge_keys, seed
from .transcript import Agreement

# The members of a session: its parties by their roles, the casts of its calls, and owners of inputs.


Q, A, S = Party("Q", "Q"), Party("A", "A"), Party("S", "S")
"""The parties of a session with one answering party."""


class Members:
    """The parties of a session.

    Args:
        roles: `STAR`, or the roles of a user's protocols.
        answering: the answering parties of secure inference.
        dealer: Q, or a party of its own.
        owners: names of parties that own inputs and learn results, and hold no shares.
        names: of the parties that play a user's roles, by role.

    Attributes:
        casts: the party of each role in a call, for each answering party; for None in a user's roles.
        playing: the roles of those casts: `STAR` with a role for each owner, or the user's.

    Raises:
        ArgumentError: two parties have one name.
    """

    def __init__(
        self,
        roles: Roles,
        answering: Sequence[Party] = (A,),
        dealer: Party = Q,
        owners: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
    ):
        self.roles, self.dealer = roles, dealer
        self.answering: tuple[Party, ...] = tuple(answering) if roles is STAR else ()
        self.owners = tuple(Party(name, "O") for name in owners)
        taken = [*(p.name for p in (*self.answering, *self.owners, Q, S)), "D"]
        if not all(isinstance(name, str) and name for name in owners) or len(set(taken)) < len(taken):
            raise ArgumentError(f"owners are names, each another and none of Q, A, S and D; got {list(owners)}")
        self.playing = with_owners(len(self.owners)) if roles is STAR else roles
        also = {f"O{i + 1}": owner for i, owner in enumerate(self.owners)}
        if roles is STAR:
            self.casts: dict[Party | None, dict[str, Party]] = {
                party: {"Q": Q, "A": party, "S": S, "D": dealer, **also} for party in self.answering
            }
        else:
            self.casts = {None: {role: Party(name, role) for role, name in (names or {}).items()}}
        self.parties = frozenset(party for cast in self.casts.values() for party in cast.values())

    def cast(self, holder: Party | None) -> Cast:
        """The party of each role in a call on tensors of `holder` and S.

        Q holds a tensor in the place of an answering party, and then the first answering party deals in Q's place.
        """
        if holder == Q and self.roles is STAR:
            dealer = self.answering[0]
            return Cast(STAR, {"Q": dealer, "A": Q, "S": S, "D": dealer})
        return Cast(self.playing, self.casts[holder])

    def answering_party(self, party: Party | None = None) -> Party:
        """`party`, if it is one of the answering parties; the first of them for None. Raises ArgumentError."""
        if not self.answering:
            raise ArgumentError(f"secure inference needs the roles {STAR}; this session has {self.roles}")
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

    def parties_named(self, who: Any, answering: Party) -> list[Party]:
        """The parties that `who` names: one or several of Q, this answering party, S and the owners; Q for None.

        Raises:
            ArgumentError: it names another party.
        """
        found, of = [], {str(key): p for p in (Q, answering, S) for key in (p, p.role, p.name)} | {"None": Q}
        of |= {owner.name: owner for owner in self.owners}
        for name in who if isinstance(who, (list, tuple)) and who else [who]:
            if not isinstance(name, (str, Party, type(None))) or str(name) not in of:
                known = ", ".join(dict.fromkeys([Q.name, answering.name, *(owner.name for owner in self.owners)]))
                raise ArgumentError(f"an owner, or who learns a result, is {known} or S, got {name!r:.40}")
            found.append(of[str(name)])
        return list(dict.fromkeys(found))


def members_of(
    answering: int, dealer: str, owners: Sequence[str], roles: Roles, names: Mapping[str, str] | None, reference: bool
) -> Members:
    """The members of a `Session` with these arguments. Raises ArgumentError as it does."""
    if answering < 1:
        raise ArgumentError(f"a session needs at least one answering party, got {answering}")
    if dealer not in ("Q", "D"):
        raise ArgumentError(
            f"the dealer is Q, or D, a party of its own, got {dealer!r}; A and S must not know the masks"
        )
    if roles is not STAR and (answering > 1 or dealer != "Q" or reference or owners):
        raise ArgumentError(
            f"answering, dealer, owners and reference are for secure inference, and the roles are {roles}"
        )
    called = {name: name for name in roles.names} | dict(names or {})
    different = set(called) == set(roles.names) and len(set(called.values())) == len(called)
    if names and (roles is STAR or not different):
        raise ArgumentError(f"names are of different parties in roles of one's own, got {names} for {roles}")
    return Members(roles, answering_parties(answering), Q if dealer == "Q" else Party("D", "D"), owners, called)


def answering_parties(count: int) -> tuple[Party, ...]:
    """The answering parties of a session: A, or A1 to An."""
    return tuple(Party("A" if count == 1 else f"A{i + 1}", "A") for i in range(count))


def with_owners(count: int) -> Roles:
    """The roles of secure inference with `count` owners: each has an edge to S and a stream with A, as Q does."""
    if not count:
        return STAR
    names = [f"O{i + 1}" for i in range(count)]
    edges = " ".join(f"{name}-S" for name in names)
    streams = " ".join(f"{name}-A" for name in names)
    return Roles(f"Q A S D {' '.join(names)}", edges=f"Q-S A-S D-S {edges}", streams=f"Q-A D-A {streams}")


# The session.


_CALL: ContextVar[dict[bytes, Net] | None] = ContextVar("sectorch_call", default=None)
_HELD_BY_Q = 1 << 31
"""The first number of the calls on tensors that Q and S hold; answering parties' calls are counted from 0."""


class Session:
    """Parties in their roles with fresh pair keys: Q, S and one or several answering parties, unless roles are given.

    All parties live in this process (`run/local.py`): a session is for development and tests, and shows what they would
    learn, compute and send. With `dry=True` no party is present and everything runs on shapes. With `reference=True`
    tensors are computed by the functions that the protocols compute (`mpc/plain.py`): the results are the same, bit for
    bit, at the cost of plain integers, and there are no keys.

    Args:
        answering: the number of answering parties, each with a model of its own; they are called A, or A1 ... An.
        dealer: the party that deals correlated randomness: "Q", or "D", a party of its own that sends to S, shares
            streams with A and S, and receives nothing but a proof's coins. It knows all masks, and must not collude
            with A or S.
        owners: names of further parties that own inputs and learn results, each with an edge to S and a stream with A.
        roles: of a user's protocols, each played by a party of its name; secure inference needs Q, A and S.
        names: of the parties that play a user's roles, by role, where they have other names.
        dry: no party is present.
        reference: compute on plain integers.
        runtime: where it runs, instead of this process: a `PartyRuntime` of one of the parties.
        device: where tensors live: "cpu" or a CUDA device.

    Raises:
        ArgumentError: there is no answering party, an unknown dealer, a reference of other roles, or a name for no role
            or for two.
    """

    reference = False
    origins: Origins | None = None
    """Records which inputs the values of its calls were computed from, or None."""

    def __init__(
        self,
        answering: int = 1,
        *,
        dealer: str = "Q",
        owners: Sequence[str] = (),
        roles: Roles = STAR,
        names: Mapping[str, str] | None = None,
        dry: bool = False,
        reference: bool = False,
        runtime: Runtime | None = None,
        device: torch.device | str = "cpu",
    ):
        self._begin(members_of(answering, dealer, owners, roles, names, reference))
        self.device = device_named(device)
        self.reference = reference
        self.runtime = runtime or (DryRuntime() if dry else LocalRuntime(self.parties, self.device))
        casts = self.members.casts
        self._numbers: dict[Party | None, Iterator[int]] = {
            party: itertools.count(i, len(casts)) for i, party in enumerate(casts)
        }
        self._open()
        if not reference:
            with sole_observer(Observer()) if dry else nullcontext():
                self._seed()

    def _begin(self, who: Members) -> None:
        """Set the parties."""
        self.members, self.roles, self.answering, self.dealer = who, who.roles, who.answering, who.dealer
        self.owners, self.parties = who.owners, who.parties
        if self.roles is STAR:
            self.Q, self.S = Q, S
        self.agreement, self.audits, self.statements = Agreement(self), Audits(self), Statements(self)

    def _open(self) -> None:
        """Set the state of a session without calls."""
        self._setup = {party: self._net(party, Phase.SETUP) for party in self.members.casts}
        self._settled: WeakKeyDictionary[ProgramTracer, Setup] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Guards `_setup` and `_settled`."""

    def _seed(self, known: Callable[[Party, Party], Identities | None] = lambda *_: None) -> None:
        """Make the pair keys.

        Args:
            known: the identities by which two parties know each other: Q, the dealer or an owner, and an answering
                party.
        """
        if self.roles is not STAR:
            edge_keys(self._setup[None])
        more = [*([self.dealer] if self.dealer != Q else []), *self.owners]
        for i, party in enumerate(self.answering):
            self.audits.identities[party] = known(Q, party) or Identities()
            seed(self._setup[party], first=i == 0, identities=self.audits.identities[party])
            for client in more:
                cast = Cast(STAR, {"Q": client, "A": party, "S": S, "D": self.dealer})
                net = Net(self.runtime, self._number(party), cast, Phase.SETUP)
                seed(net, first=i == 0, known=True, identities=known(client, party))

    def __repr__(self) -> str:
        names = dict.fromkeys(party.name for cast in self.members.casts.values() for party in cast.values())
        return f"Session({', '.join(names)}, {type(self.runtime).__name__})"

    def __reduce__(self):
        raise ArgumentError("a session holds keys and cannot be copied or pickled; open a new one")

    def _net(self, party: Party | None, base: Phase) -> Net:
        party = self._centre(party)
        setup = None if base == Phase.SETUP else self.setup(party)
        net = Net(self.runtime, self._number(party), self.members.cast(party), base, setup)
        net.origins = self.origins
        return net

    def _number(self, party: Party | None) -> int:
        """The number of the next call with this answering party. It addresses randomness, so no two calls share it.

        Each answering party has numbers of its own: a distributed one does not know of calls with others.
        """
        return next(self._numbers.setdefault(self._centre(party), itertools.count(_HELD_BY_Q)))

    def _centre(self, party: Party | None) -> Party | None:
        """The party that holds a call's tensors with S; None where the session has a user's roles."""
        return self.holders(party)[0] if party is not None or self.roles is STAR else None

    def present(self, party: Party) -> bool:
        """Whether this process holds that party's values."""
        return party in self.runtime.here

    @property
    def complete(self) -> bool:
        """Whether all parties are in this process."""
        return self.parties <= self.runtime.here

    @property
    def is_distributed(self) -> bool:
        """Whether some parties are in this process, and some elsewhere."""
        return bool(self.runtime.here) and not self.complete

    def backend(self, net: Net, scheme: Scheme) -> Backend:
        """The arithmetic of this session's tensors in a call, or in its setup."""
        return Plain(net, scheme) if self.reference else Star(net, scheme, self.device)

    def answering_party(self, party: Party | None = None) -> Party:
        """`party`, if it is one of this session's answering parties; the first of them for None.

        Every call, module and tensor of the session checks its party here, since shares between S and S, or between S
        and Q, would hide nothing.

        Raises:
            ArgumentError: `party` is S, Q, another session's party, or no Party; nothing was computed or sent.
        """
        return self.members.answering_party(party)

    def holders(self, party: Party | None = None) -> tuple[Party, Party]:
        """The two parties that hold the halves of a tensor: an answering party or Q, and S.

        Tensors come to Q and S by `sectorch.collect` and `sectorch.draw`. Calls on them have the roles of
        `Members.cast`: no two of Q, S and the first answering party may collude.

        Args:
            party: the first of them; the session's first answering party unless given.

        Raises:
            ArgumentError: as from `answering_party`.
        """
        return (Q if party is Q and self.roles is STAR else self.answering_party(party)), S

    def parties_named(self, who: Any, answering: Party) -> list[Party]:
        """The parties that `who` names: one or several of Q, this answering party, S and the owners; Q for None.

        Raises:
            ArgumentError: it names another party.
        """
        return self.members.parties_named(who, answering)

    named = renamed_attribute("named", "parties_named")
    apart = renamed_attribute("apart", "is_distributed")
    settled = renamed_attribute("settled", "run_setup")

    def setup(self, party: Party | None = None) -> Net:
        """The net of the steps that are taken once a session with this answering party."""
        party = self._centre(party)
        with self._lock:
            if party not in self._setup:
                self._setup[party] = self._net(party, Phase.SETUP)
            return self._setup[party]

    def net(self, party: Party | None = None) -> Net:
        """The net of the running call with this party, or of a new call."""
        return self._found(party) or self._net(party, Phase.OFFLINE)

    def _found(self, party: Party | None) -> Net | None:
        """The running call with this party."""
        party, found = self._centre(party), (_CALL.get() or {}).get(self.runtime.session)
        return found if found is not None and found.cast.parties.get("A") == party else None

    @contextmanager
    def call(self, party: Party | None = None) -> Iterator[Net]:
        """Run the `with` block as one call."""
        with self._running(self._net(party, Phase.OFFLINE)) as net:
            try:
                yield net
            finally:
                self.runtime.forget(net.call)

    @contextmanager
    def operation(self, party: Party) -> Iterator[Net]:
        """Run the `with` block in the running call with this party, or as a new call."""
        found = self._found(party)
        if found is not None:
            with run_in(found):
                yield found
        else:
            with self.call(party) as net:
                yield net

    def on_shapes(self) -> Session:
        """A session of the same parties in which no party is present."""
        dealer, owners = "Q" if self.dealer == Q else "D", [owner.name for owner in self.owners]
        names = None if self.roles is STAR else {role: p.name for role, p in self.members.casts[None].items()}
        return Session(
            max(1, len(self.answering)), dealer=dealer, owners=owners, roles=self.roles, names=names, dry=True,
            device=self.device,
        )  # fmt: skip

    def trace(self, f: Callable[[Net], Any], party: Party | None = None) -> Program:
        """The program of f for parties such as this session's. f(net) is called once, on shapes; nothing is sent.

        Args:
            f: takes inputs by `net.own(party, shape, name=...)` and returns a tree of values that were read
                (`net.read`). Its steps in `net.setup` are taken once a session.

        Raises:
            MisplacedValueError, UndeclaredMessageError, TopologyError: as in a run.
            ArgumentError: f is not the same in every call; see `ProgramTracer.program` and `check_no_random_draws`.
        """
        party = self._centre(party)
        with sole_observer(Observer()):
            shapes = self.on_shapes()
            setup = shapes.setup(party).tracing = ProgramTracer(shapes.setup(party).call, alone=True)
            with shapes.call(party) as net, check_no_random_draws():
                net.tracing = ProgramTracer(net.call, setup)
                found = f(net)
            return net.tracing.program(found)

    def run(
        self, program: Program, inputs: Mapping[str, torch.Tensor], material: Material | None = None, audited: int = 1,
        accountable: bool = False,
    ) -> Any:  # fmt: skip
        """Run a program as a new call.

        Args:
            inputs: by name, those of the parties that are in this process.
            material: the result of `prepare` for one call, whose offline steps were taken then.
            audited: as in `prepare`, where there is no material.
            accountable: whether S signs what it receives and sends in this call; see `Scheme.accountable`.

        Returns:
            The results of the program's function: contents where a party of this process reads them, and shapes
            elsewhere.

        Raises:
            ArgumentError, DtypeError, ShapeError: an input is missing, is no plain tensor, is of another shape or type
                than in the program, or differs from what the setup or the material was made with; or the program has
                other parties.
            MaterialError: the material was used, or is of another session, program or model.
            FalseDealingError: as from `prepare`.
            FalseServerError: S has stated something else than it sent, or A has found that it computed something else.
        """
        self._part(program, inputs)
        if material is None and audited != 1:
            material = self.prepare(program, inputs, audited)
        if not isinstance(material, Material | None):
            raise ArgumentError(f"material is what `prepare` made, got a {type(material).__name__}")
        if accountable:
            return self.statements.run(program, inputs, material)
        if material is not None:
            return self.take_call(program, inputs, material.call, material)
        self.run_setup(program, inputs)
        number = self.number(program)
        try:
            return self.take_call(program, inputs, number)
        finally:
            self.runtime.forget(number)

    def take_call(
        self, program: Program, inputs: Mapping[str, torch.Tensor], number: int, material: Material | None = None
    ) -> Any:
        """Take the steps of a program in the call of this number."""
        part, setup = self._part(program, inputs), self.setup_of(program)
        settled = setup.values(part, self.runtime, inputs)
        if material is not None:
            return part.resume(self.runtime, material, setup.call, settled, inputs)
        return part.call(self.runtime, number, settled, inputs)

    def prepare(
        self, program: Program, inputs: Mapping[str, torch.Tensor], audited: int = 1, accountable: bool = False
    ) -> Material:
        """Take the offline steps of a program, for one later call.

        Args:
            inputs: by name. Only those are used that are not queries.
            audited: the number of calls that Q promises to deal, of which one is used; see `Scheme.audited`.
            accountable: as in `run`.

        Raises:
            FalseDealingError: at A or S, Q has dealt or promised something else than the program says.
            ArgumentError: the dealing of this program or session cannot be audited.
        """
        self._part(program, inputs)
        if audited != 1:
            return self.audits.prepare(program, inputs, audited)
        if accountable:
            return self.statements.prepare(program, inputs)
        return self.prepared(program, inputs, self.number(program))

    def prepared(self, program: Program, inputs: Mapping[str, torch.Tensor], number: int) -> Material:
        """Take the offline steps of a program in the call of this number."""
        part, setup = self._part(program, inputs), self.setup_of(program)
        settled = setup.values(part, self.runtime, inputs)
        try:
            values = part.prepare(self.runtime, number, settled, inputs)
        finally:
            self.runtime.forget(number)
        return Material(number, self.runtime.session, program.digest, setup.call, values, part.offline_inputs(inputs))

    def check(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> None:
        """Check the inputs of this process to a program's setup, before anything of it is sent.

        Raises:
            SectorchError: a weight does not fit; raised at its owner.
        """
        self.setup_of(program).check(self._part(program, inputs), self.runtime, inputs)

    def repeat_check(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> None:
        """The steps of `check` once more, of which nothing is kept: what they note is what is wanted."""
        Setup(0).repeat_check(self._part(program, inputs), self.runtime, inputs)

    def number(self, program: Program) -> int:
        """The number of the next call of a program."""
        return self._number(_answering(program))

    def run_setup(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Setup:
        """The setup of a program, after all steps are taken that the program needs."""
        self.setup_of(program).values(self._part(program, inputs), self.runtime, inputs)
        return self.setup_of(program)

    def _part(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Projection:
        if not isinstance(program, Program) or not isinstance(inputs, Mapping):
            kinds = type(program).__name__, type(inputs).__name__
            raise ArgumentError(f"a session runs a Program on inputs by name, got a {kinds[0]} and a {kinds[1]}")
        strange = sorted({p.name for p in program.parties} - {p.name for p in self.parties})
        if strange:
            names = ", ".join(sorted(p.name for p in self.parties))
            raise ArgumentError(f"the program is of {', '.join(strange)} too, and this session of {names}")
        with garbage_collection_paused():
            if self.runtime.here and self.device.type == "cpu":
                importlib.import_module("sectorch.ring.jit").warm()  # its first product would
            return part_of(program, self.runtime.here)

    def setup_of(self, program: Program) -> Setup:
        """The setup of a program, whose steps may not be taken yet."""
        with self._lock:
            if program.before not in self._settled:
                self._settled[program.before] = self._new_setup(_answering(program))
            return self._settled[program.before]

    def _new_setup(self, party: Party | None) -> Setup:
        return Setup(self._number(party))

    @contextmanager
    def _running(self, net: Net) -> Iterator[Net]:
        token = _CALL.set({**(_CALL.get() or {}), self.runtime.session: net})
        try:
            with run_in(net):
                yield net
                prove_pending(net)
        finally:
            _CALL.reset(token)


def _answering(program: Program) -> Party | None:
    """The answering party of a program; None for a user's roles."""
    return next((party for party in program.parties if party.role == "A"), None)


# The default session.


_default: dict[torch.device, Session] = {}
_default_lock = threading.Lock()


def default_session(device: torch.device | str = "cpu") -> Session:
    """The session that `share` and `secure` use where none is given: one for each device, made on first use."""
    device = torch.device(device)
    with _default_lock:  # tensors of two threads must be of one session to meet
        if device not in _default:
            _default[device] = Session(device=device)
        return _default[device]
