"""A session: the parties, their pair keys, and the calls that they make together."""

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
from .errors import ArgumentError
from .mpc.plain import Plain
from .mpc.star.backend import Star
from .mpc.star.dealing_proofs import prove_pending
from .mpc.star.key_agreement import Identities, edge_keys, seed
from .transcript import Agreement

# Who is in a session: the parties by their roles, the casts of its calls, who owns inputs and who learns results.


Q, A, S = Party("Q", "Q"), Party("A", "A"), Party("S", "S")
"""The parties of a session with one answering party."""


class Members:
    """The parties of a session.

    Args:
        roles: of protocols of one's own, or `STAR`.
        answering: the answering parties of secure inference. dealer: Q, or a party of its own.
        owners: names of parties that own inputs and learn results, and hold no shares.
        names: of the parties that play roles of one's own, by role.

    Attributes:
        casts: for each answering party, or None in roles of one's own, who plays what in a call.
        playing: the roles of those casts: `STAR`, and one for each owner.

    Raises:
        ArgumentError: two parties of one name.
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

    def named(self, who: Any, answering: Party) -> list[Party]:
        """Owners of an input, or who learns a result: one or several of Q, this A, S and the owners; Q for None.

        Raises ArgumentError for any other."""
        found, of = [], {str(key): p for p in (Q, answering, S) for key in (p, p.role, p.name)} | {"None": Q}
        of |= {owner.name: owner for owner in self.owners}
        for name in who if isinstance(who, (list, tuple)) and who else [who]:
            if not isinstance(name, (str, Party, type(None))) or str(name) not in of:
                known = ", ".join([Q.name, answering.name, *(owner.name for owner in self.owners)])
                raise ArgumentError(f"an owner, or who learns a result, is {known} or S, got {name!r:.40}")
            found.append(of[str(name)])
        return list(dict.fromkeys(found))


def members_of(
    answering: int, dealer: str, owners: Sequence[str], roles: Roles, names: Mapping[str, str] | None, reference: bool
) -> Members:
    """Those whom a `Session` of these arguments has. Raises ArgumentError as it does."""
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
    """The answering parties of a session, as it calls them."""
    return tuple(Party("A" if count == 1 else f"A{i + 1}", "A") for i in range(count))


def with_owners(count: int) -> Roles:
    """The roles of secure inference and so many owners: each has an edge to S and a stream with A, as Q does."""
    if not count:
        return STAR
    names = [f"O{i + 1}" for i in range(count)]
    edges = " ".join(f"{name}-S" for name in names)
    streams = " ".join(f"{name}-A" for name in names)
    return Roles(f"Q A S D {' '.join(names)}", edges=f"Q-S A-S D-S {edges}", streams=f"Q-A D-A {streams}")


_CALL: ContextVar[dict[bytes, Net] | None] = ContextVar("sectorch_call", default=None)


class Session:
    """Parties in their roles with fresh pair keys: Q, S and one or several answering parties, unless others are named.

    All of them live in this process (`run/local.py`): a session is for development and tests, and shows what they would
    learn, compute and send. With `dry=True` nobody is present and everything runs on shapes. With `reference=True`
    tensors are computed with by the functions that the protocols compute: what is shared, computed and revealed are the
    same numbers, bit for bit, at the cost of plain integers (`mpc/plain.py`), and there are no keys.

    Args:
        answering: how many answering parties, each with a model of its own; they are called A, or A1 ... An.
        dealer: who deals correlated randomness: "Q", or "D", a party of its own that sends to S, shares streams with A
            and S, and receives nothing but a proof's coins. It knows all masks, and must not collude with A or S.
        owners: names of further parties that own inputs and learn results, each with an edge to S and a stream with A.
        roles: of protocols of one's own, each played by a party of its name; secure inference needs Q, A and S.
        names: of the parties that play roles of one's own, by role, where they have others.
        runtime: where it runs, instead of this process: a `PartyRuntime` of one of the parties.
        device: where tensors live: "cpu" or a CUDA device.

    Raises:
        ArgumentError: nobody answers, an unknown dealer, a reference of other roles, or a name for no role or for two.
    """

    reference = False
    origins: Origins | None = None
    """Who notes which inputs the values of its calls were computed from."""

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
        """Who is in it."""
        self.members, self.roles, self.answering, self.dealer = who, who.roles, who.answering, who.dealer
        self.owners, self.parties = who.owners, who.parties
        if self.roles is STAR:
            self.Q, self.S = Q, S
        self.agreement, self.audits = Agreement(self), Audits(self)

    def _open(self) -> None:
        """Nothing was asked yet."""
        self._setup = {party: self._net(party, Phase.SETUP) for party in self.members.casts}
        self._settled: WeakKeyDictionary[ProgramTracer, Setup] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Over `_settled`."""

    def _seed(self, known: Callable[[Party, Party], Identities | None] = lambda *_: None) -> None:
        """Make the pair keys.

        Args:
            known: how two clients know each other: Q, the dealer or an owner, and an answering party.
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
        setup = None if base == Phase.SETUP else self._setup[party]
        cast = Cast(self.members.playing, self.members.casts[party])
        net = Net(self.runtime, self._number(party), cast, base, setup)
        net.origins = self.origins
        return net

    def _number(self, party: Party | None) -> int:
        """Of the next call with this answering party; no two calls have the same, since it addresses randomness.

        Each answering party has numbers of its own: apart, it knows of no call with another.
        """
        return next(self._numbers[self._centre(party)])

    def _centre(self, party: Party | None) -> Party | None:
        """The answering party of a call; None where the session has other roles."""
        return self.answering_party(party) if party is not None or self.roles is STAR else None

    def present(self, party: Party) -> bool:
        """Whether this process holds that party's values."""
        return party in self.runtime.here

    @property
    def complete(self) -> bool:
        """Whether all parties are in this process."""
        return self.parties <= self.runtime.here

    @property
    def apart(self) -> bool:
        """Whether some parties are in this process, and some elsewhere."""
        return bool(self.runtime.here) and not self.complete

    def backend(self, net: Net, scheme: Scheme) -> Backend:
        """What computes with this session's tensors in a call, or in its setup."""
        return Plain(net, scheme) if self.reference else Star(net, scheme, self.device)

    def answering_party(self, party: Party | None = None) -> Party:
        """`party`, if it is one of this session's answering parties; the first of them for None.

        Every call, module and tensor of the session asks here. Shares between S and S, or S and Q, would hide nothing.

        Raises:
            ArgumentError: S, Q, another session's party, or no Party at all; nothing was computed or sent.
        """
        return self.members.answering_party(party)

    def named(self, who: Any, answering: Party) -> list[Party]:
        """Owners of an input, or who learns a result: one or several of Q, this A, S and the owners; Q for None.

        Raises ArgumentError for any other."""
        return self.members.named(who, answering)

    def setup(self, party: Party | None = None) -> Net:
        """The net for what is done once a session with this answering party."""
        return self._setup[self._centre(party)]

    def net(self, party: Party | None = None) -> Net:
        """The net of the running call with this party, or a new call of its own."""
        return self._found(party) or self._net(party, Phase.OFFLINE)

    def _found(self, party: Party | None) -> Net | None:
        """The running call with this party."""
        party, found = self._centre(party), (_CALL.get() or {}).get(self.runtime.session)
        return found if found is not None and found.cast.parties.get("A") == party else None

    @contextmanager
    def call(self, party: Party | None = None) -> Iterator[Net]:
        """Everything inside runs as one call."""
        with self._running(self._net(party, Phase.OFFLINE)) as net:
            try:
                yield net
            finally:
                self.runtime.forget(net.call)

    @contextmanager
    def operation(self, party: Party) -> Iterator[Net]:
        """The running call with this party; where none is running, what is inside is a call of its own."""
        found = self._found(party)
        if found is not None:
            with run_in(found):
                yield found
        else:
            with self.call(party) as net:
                yield net

    def on_shapes(self) -> Session:
        """A session of the same parties in which nobody is present."""
        dealer, owners = "Q" if self.dealer == Q else "D", [owner.name for owner in self.owners]
        names = None if self.roles is STAR else {role: p.name for role, p in self.members.casts[None].items()}
        return Session(
            max(1, len(self.answering)), dealer=dealer, owners=owners, roles=self.roles, names=names, dry=True,
            device=self.device,
        )  # fmt: skip

    def trace(self, f: Callable[[Net], Any], party: Party | None = None) -> Program:
        """The program of f among parties as this session's: f(net) is called once, on shapes, and nothing is sent.

        Args:
            f: brings inputs by `net.own(party, shape, name=...)`, returns what was read (`net.read`), or a tree
                of it. What it does with `net.setup` is done once a session.

        Raises:
            MisplacedValueError, UndeclaredMessageError, TopologyError: as when it is run.
            ArgumentError: it is not the same in every call; see `Tracing.program` and `nothing_drawn`.
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
        self, program: Program, inputs: Mapping[str, torch.Tensor], material: Material | None = None, audited: int = 1
    ) -> Any:
        """A program as a call of its own.

        Args:
            inputs: by name, those of the parties that are here.
            material: what `prepare` made for one call; its offline steps were taken then.
            audited: as of `prepare`, where there is no material.

        Returns:
            what the program's function returned, with what is read at parties who are here; shapes elsewhere.

        Raises:
            ArgumentError, DtypeError, ShapeError: an input is missing, is no plain tensor, or of another shape or type
                than in the program, or not what setup or material was made with; a program of other parties.
            MaterialError: the material was used, or is of another session, program or model.
            FalseDealingError: as from `prepare`.
        """
        part = self._part(program, inputs)
        if material is None and audited != 1:
            material = self.prepare(program, inputs, audited)
        if not isinstance(material, Material | None):
            raise ArgumentError(f"material is what `prepare` made, got a {type(material).__name__}")
        setup = self._setup_of(program)
        settled = setup.values(part, self.runtime, inputs)
        if material is not None:
            return part.resume(self.runtime, material, setup.call, settled, inputs)
        number = self.number(program)
        try:
            return part.call(self.runtime, number, settled, inputs)
        finally:
            self.runtime.forget(number)

    def prepare(self, program: Program, inputs: Mapping[str, torch.Tensor], audited: int = 1) -> Material:
        """The offline part of a program, for one later call; of the inputs it takes those that are no queries.

        Args:
            audited: of how many calls that Q promises to deal it is one; see `Scheme.audited`.

        Raises:
            FalseDealingError: at A or S, Q has dealt, or promised, something else than the program says.
            ArgumentError: a program, or a session, whose dealing cannot be audited.
        """
        self._part(program, inputs)
        if audited != 1:
            return self.audits.prepare(program, inputs, audited)
        return self.prepared(program, inputs, self.number(program))

    def prepared(self, program: Program, inputs: Mapping[str, torch.Tensor], number: int) -> Material:
        """The offline part of a program in the call of this number."""
        part, setup = self._part(program, inputs), self._setup_of(program)
        settled = setup.values(part, self.runtime, inputs)
        try:
            values = part.prepare(self.runtime, number, settled, inputs)
        finally:
            self.runtime.forget(number)
        return Material(number, self.runtime.session, program.digest, setup.call, values, part.known(inputs))

    def check(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> None:
        """What whoever is here can check of its own inputs to a program's setup, before anything of it is sent.

        Raises SectorchError at the owner of a weight that does not fit."""
        self._setup_of(program).check(self._part(program, inputs), self.runtime, inputs)

    def number(self, program: Program) -> int:
        """Of the next call of a program."""
        return self._number(_answering(program))

    def settled(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Setup:
        """The setup of a program, with all that the program needs of it taken."""
        self._setup_of(program).values(self._part(program, inputs), self.runtime, inputs)
        return self._setup_of(program)

    def _part(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Projection:
        if not isinstance(program, Program) or not isinstance(inputs, Mapping):
            said = type(program).__name__, type(inputs).__name__
            raise ArgumentError(f"a session runs a Program on inputs by name, got a {said[0]} and a {said[1]}")
        strange = sorted({p.name for p in program.parties} - {p.name for p in self.parties})
        if strange:
            names = ", ".join(sorted(p.name for p in self.parties))
            raise ArgumentError(f"the program is of {', '.join(strange)} too, and this session of {names}")
        with garbage_collection_paused():
            if self.runtime.here and self.device.type == "cpu":
                importlib.import_module("sectorch.ring.jit").warm()  # as its first product does
            return part_of(program, self.runtime.here)

    def _setup_of(self, program: Program) -> Setup:
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
    """Whose a program is; None of one that is played in other roles."""
    return next((party for party in program.parties if party.role == "A"), None)


# The session that is used where none is named.


_default: dict[torch.device, Session] = {}
_DEFAULT = threading.Lock()


def default_session(device: torch.device | str = "cpu") -> Session:
    """The session of this process that `share` and `secure` use when none is named: one a device, made on first use."""
    device = torch.device(device)
    with _DEFAULT:  # tensors of two threads must be of one session to meet
        if device not in _default:
            _default[device] = Session(device=device)
        return _default[device]
