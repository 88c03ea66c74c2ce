"""Decoys: calls on made-up inputs, of which A computes every message of S again. Its own file: covert security of S.

The protocol is `mpc/star/statement.py`. In a session whose scheme is `accountable`, each call draws from keys of its
own. S signs digests of what it has received and sent in the call. Q then tells A whether its input was made up. Of such
a decoy Q names the key of its streams with S, and the seed of the input. A runs the part of Q and S again, on the
messages that it has sent S itself, and compares the digests of S's messages (`DecoyCheck`).

A mismatch is `ServerEvidence`: S's signature, the keys of S's streams in that call, and all messages that S has
received, as the signature covers them. Whoever has the program runs S's part on them and compares. It holds nothing of
a real call, and no key of Q's streams with A: without these, masked weights and masked values are uniform.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.constant_time import bytes_eq

from .choreography import Party, Phase
from .choreography.ledger import Observer, sole_observer
from .choreography.net import Compute, Draw, Move
from .choreography.program.projection import Material, Setup, part_of
from .choreography.program.trace import Program, Slot
from .choreography.run.call_replay import EDGES, PHASES, CallDigests, CallReplay, message_digest
from .choreography.run.dealer_replay import DIGEST_BYTES, check_recomputable
from .choreography.streams import SECRET_BYTES, KeyStream, PairKey, PairKeys, derive, random_secret
from .errors import ArgumentError, DecoyError, FalseServerError, SectorchError
from .mpc.star.statement import DIGESTS, Statement, attest

FROM_S = tuple(edge for edge in EDGES if edge[0] == "S")

# Which calls are decoys: a coin of Q's before each call.


class Decoys:
    """Q's choice which of its calls are decoys: each is one with the same probability, whatever came before.

    Decoys come before the question for whose sake they are asked, as many as the coin says. So at each call S has seen
    the same whether it is a decoy or not, and its probability is the rate.

    Args:
        rate: the probability, at least 0 and below 1: with 0.1, one call of ten is a decoy.

    Raises:
        ArgumentError: it is none.
    """

    def __init__(self, rate: float = 0.0):
        if type(rate) not in (int, float) or not 0 <= rate < 1:  # nan is in no range
            raise ArgumentError(f"decoys is the probability that a call is a decoy, 0 <= decoys < 1, got {rate!r}")
        self._rate = float(rate)

    def __repr__(self) -> str:
        return "Decoys(...)"

    def flip(self) -> bool:
        """Whether the next call is a decoy."""
        return int.from_bytes(random_secret()[:7], "big") < self._rate * 2.0**56

    def check(self, accountable: bool) -> None:
        """Raise ArgumentError where nobody could check a decoy."""
        if self._rate and not accountable:
            raise ArgumentError("decoys are checked where S signs what it sends: add Scheme(accountable=True)")


_DECOY: ContextVar[bool] = ContextVar("sectorch_decoy", default=False)


@contextmanager
def decoy_call(decoy: bool = True) -> Iterator[None]:
    """Calls of secure modules in the block run on inputs that Q makes up, whatever they are called with."""
    token = _DECOY.set(decoy)
    try:
        yield
    finally:
        _DECOY.reset(token)


def made_up_inputs(seed: bytes, program: Program, party: Party) -> dict[str, torch.Tensor]:
    """The inputs of a decoy: fractions uniform in [-1, 1), truth values, and zeros for whole numbers (which may be
    indices)."""
    return {i.name: _made_up(seed, i.name, i.shape, i.dtype) for i in program.inputs if i.party == party}


def _made_up(seed: bytes, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        parts = [_made_up(seed, f"{name}/{part}", shape, torch.float64) for part in ("real", "imaginary")]
        return torch.complex(*parts).to(dtype)
    words = torch.empty(shape.numel(), dtype=torch.int64, device="cpu")
    if len(words):
        KeyStream(seed, b"", f"decoy/{name}").fill(words.numpy().data.cast("B"))
    if dtype == torch.bool:
        return torch.bitwise_and(words, 1).bool().view(shape)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return ((words >> 11).double() * 2.0**-52).to(dtype).view(shape)


# The part of each party.


def _named(role: str, secret: bytes) -> bytes:
    """A digest that identifies the key of a call's streams."""
    return hashlib.sha256(role.encode() + secret).digest()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _pair(p: Party, q: Party) -> frozenset[Party]:
    return frozenset((p, q))


class Statements:
    """What S has signed of the calls of a `Session`, and what A has found.

    Attributes:
        key: at S, its identity key; in one process a fresh one.
        signed: a hash of the statements since `take_signed`, by which receipts of all parties name them.
        trust: at Q and A, is called with S's public key, and raises if it is not S's.
        check: at A, runs a `DecoyCheck`, or has it run later.
        asked: how many decoys Q has asked, at Q and A. checked: how many of these A has checked.
        found: at A, what it has found of S, with the evidence.
    """

    def __init__(self, session: Any):
        self._session: Any = weakref.proxy(session)  # no cycle: the session holds its statements
        self.key: Ed25519PrivateKey | None = None
        self.trust: Callable[[bytes], None] = lambda public: None
        self.check: Callable[[DecoyCheck], None] = DecoyCheck.note
        self.asked = self.checked = 0
        self.found: FalseServerError | DecoyError | None = None
        self.signed = b""
        self.lock = threading.Lock()
        self._public = b""
        self._messages: weakref.WeakKeyDictionary[Setup, dict[Slot, tuple[bytes, torch.Tensor | None]]] = (
            weakref.WeakKeyDictionary()
        )
        self.stated_setups: weakref.WeakKeyDictionary[Setup, dict[str, bytes]] = weakref.WeakKeyDictionary()
        """At Q, the digest of the masked model that S has stated for each program: one in all calls of a session."""
        self._fit: weakref.WeakSet[Program] = weakref.WeakSet()
        self.replays: weakref.WeakKeyDictionary[Program, Setup] = weakref.WeakKeyDictionary()
        """At A, the setup of Q and S for the program that was checked last."""

    def __repr__(self) -> str:
        return "Statements(...)"

    def prepare(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Material:
        """Take the offline steps of a call that S will sign for."""
        session = self._session
        setup = self._begin(program, inputs)
        call = session.number(program)
        session.runtime.keys.separate(call)
        with _Call(session, program, call, setup).digests() as digests:
            material = session.prepared(program, inputs, call)
        material.digests = b"".join(digests.digest(edge, Phase.OFFLINE) for edge in EDGES)
        return material

    def run(self, program: Program, inputs: Mapping[str, torch.Tensor], material: Material | None) -> Any:
        """Run a program as a call that S signs for. In `decoy_call` its input is made up, and A checks S.

        Raises:
            ArgumentError: S's messages in this program or session cannot be computed again.
            FalseServerError: S has stated something else than it sent, or A has found it out. There is no result.
        """
        session, decoy, seed = self._session, _DECOY.get(), random_secret()
        if session.present(session.Q):
            made_up = made_up_inputs(seed, program, session.Q)  # in each call: S could measure how long it takes
            inputs = {**inputs, **{k: x.to(session.device) for k, x in made_up.items()}} if decoy else inputs
        setup = self._begin(program, inputs)
        call = session.number(program) if material is None else material.call
        here = _Call(session, program, call, setup, b"" if material is None else material.digests)
        session.runtime.keys.separate(call)
        try:
            with here.digests() as digests:
                found = session.take_call(program, inputs, call, material)
        finally:
            session.runtime.forget(call)
        with session.call(here.A) as net:
            attest(
                net, lambda: here.state(digests), lambda message: here.note(message, digests, decoy, seed),
                lambda message, note: here.look(message, note, digests), here.accept,
            )  # fmt: skip
        if self.found is not None:
            raise self.found
        return found

    def _begin(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> Setup:
        """Check that S's messages can be computed again, and take the setup, whose messages are noted."""
        session = self._session
        if program not in self._fit:
            self._check_program(program)
            self._fit.add(program)
        setup = session.setup_of(program)
        if setup.call is None:
            raise ArgumentError("S signs what it sends in a session that begins now: ask without prepared calls")
        if session.present(session.S) or session.present(session.answering[0]):
            key = setup_key(session, setup)
            noted = self._messages.setdefault(setup, {})
            kept = session.present(session.answering[0])

            def note(slot: Slot, header: Any, value: torch.Tensor) -> None:
                noted[slot] = message_digest(key, header, value), value if kept else None

            setup.note = note
        return session.run_setup(program, inputs)

    def _check_program(self, program: Program) -> None:
        session = self._session
        if session.dealer != session.Q or len(session.answering) != 1 or session.owners:
            raise ArgumentError("S signs what it computes for one answering party, where Q deals")
        check_recomputable(program, session.Q)
        S = session.S
        for node in (*program.setup, *program.call):
            step = node.step
            if isinstance(step, Compute) and step.random and S in step.owners:
                raise ArgumentError(f"S draws randomness of its own in '{step.path}', which nobody can compute again")
        drawn = [node.step.name for node in program.setup if isinstance(node.step, Draw) and S in node.step.owners]
        brought = [i.name for i in program.inputs if i.party == S]
        if drawn or brought:
            raise ArgumentError(f"S brings '{(drawn + brought)[0]}', which others do not have for one call alone")

    def messages_of(self, program: Program, setup: Setup) -> list[tuple[bytes, torch.Tensor | None]]:
        """Digest and, at A, content of each message to S in the setup of a program."""
        found = self._messages[setup]
        return [found[slot] for slot, _ in setup_messages(program)]

    def take_signed(self) -> dict[str, str]:
        """The hash of the statements since the last call of this, and S's key, in hexadecimal digits."""
        found, self.signed = self.signed, b""
        return {"statement": found.hex(), "server": self._public.hex()} if found else {}

    def add_signed(self, statement: Statement) -> None:
        """Add a statement, which this party has made or found right, to `signed`."""
        one = hashlib.sha256(statement.to_message()).digest()
        self._public, self.signed = statement.public, hashlib.sha256(self.signed + one).digest()

    def check_key(self, public: bytes) -> None:
        """Raise unless this is S's key, and the one of the session's other statements."""
        if self._public not in (b"", public):
            raise FalseServerError("S has signed with another key than before in this session")
        if not self._public:
            self.trust(public)
        self._public = public


def record_bytes(program: Program, setup: Setup) -> tuple[int, int]:
    """Bytes that A keeps to check decoys of a program: until a call is checked, and for the session.

    An estimate: the messages that it has sent S, and what it takes to run the part of Q and S again.
    """
    part = part_of(program, frozenset(party for party in program.parties if party.role in "QS"))
    sent = sum(h.shape.numel() * h.dtype.itemsize for h in _messages_to_S(program) if h.src.role == "A")
    masked = sum(h.shape.numel() * h.dtype.itemsize for _, h in setup_messages(program) if h.src.role == "A")
    return sent + part.memory["call"], masked + setup.for_replay().missing_bytes(part)


def setup_messages(program: Program) -> list[tuple[Slot, Any]]:
    """Slot and header of each message to S in a program's setup."""
    moves = [(node.slots[0], node.step) for node in program.setup if isinstance(node.step, Move)]
    return [(slot, step.header) for slot, step in moves if step.header.dst.role == "S"]


def setup_key(session: Any, setup: Setup) -> bytes:
    """The key of the digests of the setup's messages."""
    with_A = session.runtime.keys.of(_pair(session.S, session.answering[0]))
    return derive(with_A.of_call(setup.call), b"", "statement", SECRET_BYTES)


def digest_keys(secrets_of: Mapping[str, bytes]) -> dict[str, bytes]:
    """The keys of a call's digests, by the role of S's peer, from those of the call's streams."""
    return {role: derive(secret, b"", "statement", SECRET_BYTES) for role, secret in secrets_of.items()}


class _Call:
    """The computations of this process's parties for one call."""

    def __init__(self, session: Any, program: Program, call: int, setup: Setup, offline: bytes = b""):
        self._session, self._statements, self._program, self._call = session, session.statements, program, call
        self._setup, self._offline = setup, offline
        self.Q, self.A, self.S = session.Q, session.answering[0], session.S
        keys, S = session.runtime.keys, session.present(self.S)
        self._streams: dict[str, bytes] = {}
        for role, party in (("Q", self.Q), ("A", self.A)):
            if S or session.present(party):
                self._streams[role] = keys.of(_pair(party, self.S)).of_call(call)
        ends = session.present(self.Q) or session.present(self.A)
        self._between = keys.of(_pair(self.Q, self.A)).of_call(call) if ends else b""

    def digests(self) -> CallDigests:
        """The digests of the call's messages, which this process's parties send or receive."""
        copied = [("A", "S")] if self._session.present(self.A) else []
        return CallDigests(self._session.runtime.session, self._call, digest_keys(self._streams), copied)

    def _digest(self, digests: CallDigests, edge: tuple[str, str], phase: Phase) -> bytes:
        if phase == Phase.OFFLINE and self._offline:
            at = EDGES.index(edge) * DIGEST_BYTES
            return self._offline[at : at + DIGEST_BYTES]
        return digests.digest(edge, phase)

    def state(self, digests: CallDigests) -> torch.Tensor:
        """At S: its signed statement."""
        statements = self._statements
        key = statements.key = statements.key or Ed25519PrivateKey.generate()
        statement = Statement(
            self._session.runtime.session, self._program.digest, self._call, _named("Q", self._streams["Q"]),
            _named("A", self._streams["A"]), self._setup_digest(),
            {name: self._digest(digests, name[:2], name[2]) for name in DIGESTS}, key.public_key().public_bytes_raw(),
        )  # fmt: skip
        statement = replace(statement, signature=key.sign(statement.signed_bytes()))
        statements.add_signed(statement)
        return _tensor(statement.to_message())

    def _setup_digest(self) -> bytes:
        messages = self._statements.messages_of(self._program, self._setup)
        return hashlib.sha256(b"".join(digest for digest, _ in messages)).digest()

    def _read(self, message: torch.Tensor, digests: CallDigests, role: str) -> Statement:
        """S's statement, after it was compared with what the party of this role has sent and received."""
        session = self._session.runtime.session
        statement = Statement.from_message(session, self._program.digest, self._call, bytes(message.tolist()))
        statement.check()
        self._statements.check_key(statement.public)
        same = statement.with_Q if role == "Q" else statement.with_A
        right = bytes_eq(same, _named(role, self._streams[role]))
        for edge in EDGES:
            for phase in PHASES if role in edge else ():
                right &= bytes_eq(statement.digests[(*edge, phase)], self._digest(digests, edge, phase))
        before = self._statements.stated_setups.setdefault(self._setup, {})
        own = self._setup_digest() if role == "A" else before.setdefault(self._program.digest, statement.setup)
        right &= bytes_eq(statement.setup, own)
        if not right:
            raise FalseServerError(
                f"S states other messages of call {self._call} than this party has sent and received"
            )
        self._statements.add_signed(statement)
        return statement

    def note(self, message: torch.Tensor, digests: CallDigests, decoy: bool, seed: bytes) -> torch.Tensor:
        """At Q: check S's statement; the sealed note to A, of one length whether the call was a decoy or not."""
        self._read(message, digests, "Q")
        shown = self._streams["Q"] + seed if decoy else bytes(2 * SECRET_BYTES)
        if decoy and not self._session.present(self.A):
            self._statements.asked += 1
        return self._seal("note", bytes([decoy]) + shown + hashlib.sha256(bytes(message.tolist())).digest())

    def look(self, message: torch.Tensor, note: torch.Tensor, digests: CallDigests) -> torch.Tensor:
        """At A: check S's statement and Q's note, and check a decoy; the sealed report to Q."""
        statement, statements = self._read(message, digests, "A"), self._statements
        content = self._open("note", note)
        decoy, with_Q, seed = (
            content[0],
            content[1 : 1 + SECRET_BYTES],
            content[1 + SECRET_BYTES : 1 + 2 * SECRET_BYTES],
        )
        if not bytes_eq(content[1 + 2 * SECRET_BYTES :], hashlib.sha256(bytes(message.tolist())).digest()):
            raise FalseServerError(f"S states one thing of call {self._call} to Q, and another to A")
        if decoy:
            statements.asked += 1
            setup = [content for _, content in statements.messages_of(self._program, self._setup)]
            between = self._session.runtime.keys.of(_pair(self.Q, self.A)).replica()
            check = DecoyCheck(
                self._program, self._setup, statement, with_Q, self._streams["A"],
                setup_key(self._session, self._setup), seed, [x for x in setup if x is not None],
                digests.copies["A", "S"], statements, between, self._session.device,
            )  # fmt: skip
            statements.check(check)
        with statements.lock:
            found, counts = statements.found is not None, (statements.asked, statements.checked)
        return self._seal("report", bytes([found]) + b"".join(count.to_bytes(8, "big") for count in counts))

    def accept(self, report: torch.Tensor) -> torch.Tensor:
        """At Q: check A's report, without which the result is not used."""
        content, statements = self._open("report", report), self._statements
        asked, checked = (int.from_bytes(content[at : at + 8], "big") for at in (1, 9))
        if content[0]:
            raise statements.found or FalseServerError(
                "A has found that S computed something else than the program: no result since the last decoy counts"
            )
        if not checked <= asked == statements.asked:
            raise DecoyError(f"A has been told of {asked} decoys, and {statements.asked} were asked")
        statements.checked = checked
        return torch.zeros(1, dtype=torch.uint8)

    def _seal(self, name: str, content: bytes) -> torch.Tensor:
        # A key of one use: each call has a number of its own.
        return _tensor(AESGCM(derive(self._between, b"", name, 32)).encrypt(bytes(12), content, None))

    def _open(self, name: str, sealed: torch.Tensor) -> bytes:
        try:
            return AESGCM(derive(self._between, b"", name, 32)).decrypt(bytes(12), bytes(sealed.tolist()), None)
        except InvalidTag:
            raise FalseServerError(f"S has changed a {name} of call {self._call} between Q and A") from None


# A's check of a decoy, and what it shows to others.


@dataclass(eq=False)
class DecoyCheck:
    """A's check of one decoy; its repr shows no content.

    Attributes:
        setup: A's setup of the program.
        with_Q, with_A: the keys of S's streams in this call, the first as Q names it.
        setup_key: of the digests of the setup's messages. seed: of the made-up input, as Q names it.
        received, sent: what A has sent S in the setup, and in the call.
        between: the streams of Q and A.
    """

    program: Program
    setup: Setup
    statement: Statement
    with_Q: bytes = field(repr=False)
    with_A: bytes = field(repr=False)
    setup_key: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    received: list[torch.Tensor] = field(repr=False)
    sent: list[torch.Tensor] = field(repr=False)
    statements: Statements = field(repr=False)
    between: PairKey = field(repr=False)
    device: torch.device

    @property
    def bytes(self) -> int:
        """The memory that it takes until it has run, as it was reserved for the call (`record_bytes`)."""
        return record_bytes(self.program, self.setup)[0]

    def note(self) -> None:
        """Run the check, and note what it finds in the session's `Statements`."""
        found: FalseServerError | DecoyError | None = None
        try:
            self.run()
        except (FalseServerError, DecoyError) as error:
            found = error
        except SectorchError as error:
            found = DecoyError(f"the decoy of call {self.statement.call} cannot be computed again: {error}")
        with self.statements.lock:
            self.statements.checked += found is None
            self.statements.found = self.statements.found or found

    def run(self) -> None:
        """Compute all messages of S in this call again.

        Raises:
            FalseServerError: S has sent others, with `ServerEvidence`.
            DecoyError: what Q names is not of this call, or not what it has sent S. S is not accused.
        """
        statement, program = self.statement, self.program
        if not bytes_eq(_named("Q", self.with_Q), statement.with_Q):
            raise DecoyError(f"the key that Q names of call {statement.call} is not that of its streams with S")
        Q, A, S = (next(party for party in program.parties if party.role == role) for role in "QAS")
        keys = PairKeys(statement.session)
        keys.install(_pair(Q, A), self.between)
        keys.lend(_pair(Q, A), statement.call, self.between.of_call(statement.call))
        keys.lend(_pair(Q, S), statement.call, self.with_Q)
        keys.lend(_pair(S, A), statement.call, self.with_A)
        replay = CallReplay(frozenset((Q, S)), statement.session, keys, self.received, self.sent, self.device)
        part, setups = part_of(program, frozenset((Q, S))), self.statements.replays
        setup = setups.get(program)
        if setup is None:
            setups.clear()
            setup = setups[program] = self.setup.for_replay()
        settled = setup.values(part, replay, {})
        by = digest_keys({"Q": self.with_Q, "A": self.with_A})
        replay.observer = digests = CallDigests(statement.session, statement.call, by, [("Q", "S")])
        with sole_observer(Observer()):
            made_up = made_up_inputs(self.seed, program, Q)
            part.call(replay, statement.call, settled, {k: x.to(self.device) for k, x in made_up.items()})
        names = [("Q", "S", phase) for phase in PHASES]
        if any(not bytes_eq(digests.digest(name[:2], name[2]), statement.digests[name]) for name in names):
            raise DecoyError(
                f"in call {statement.call} Q has sent S something else than its streams and the made-up input give"
            )
        if not _same(digests, statement):
            evidence = ServerEvidence(
                statement, self.with_Q, self.with_A, self.setup_key, self.received, digests.copies["Q", "S"], self.sent
            )
            evidence.check(program)
            text = f"S has sent other messages in call {statement.call} than the program gives, as it has signed"
            raise FalseServerError(text, evidence)


def _same(digests: CallDigests, statement: Statement) -> bool:
    """Whether S has sent what was computed again."""
    return all(
        bytes_eq(digests.digest(edge, phase), statement.digests[(*edge, phase)]) for edge in FROM_S for phase in PHASES
    )


@dataclass(frozen=True, eq=False)
class ServerEvidence:
    """That S has signed for other messages than its program, keys and received messages give.

    Nobody can make it against an S that follows the program: it signs what it receives and sends, and what it sends is
    a function of what it receives and of the keys that the signature names.

    Attributes:
        statement: with S's signature.
        with_Q, with_A: the keys of S's streams in the call.
        setup_key: of the digests of the setup's messages.
        setup, from_Q, from_A: the messages that S has received, in the program's order.
    """

    statement: Statement
    with_Q: bytes = field(repr=False)
    with_A: bytes = field(repr=False)
    setup_key: bytes = field(repr=False)
    setup: list[torch.Tensor] = field(repr=False)
    from_Q: list[torch.Tensor] = field(repr=False)
    from_A: list[torch.Tensor] = field(repr=False)

    def check(self, program: Program) -> None:
        """Run S's part of the program on what S has received, and compare.

        Raises:
            DecoyError: this is no evidence against S: the signature, the program, a key or a message is another than
                the one that S has signed for, or S has sent what the program gives.
        """
        statement, call = self.statement, self.statement.call
        try:
            statement.check()
        except FalseServerError as error:
            raise DecoyError(f"no evidence: {error}") from None
        if program.digest != statement.program:
            raise DecoyError("no evidence: S has signed for another program than this one")
        if (_named("Q", self.with_Q), _named("A", self.with_A)) != (statement.with_Q, statement.with_A):
            raise DecoyError("no evidence: S has signed for other streams than these")
        S = next(party for party in program.parties if party.role == "S")
        headers = [header for _, header in setup_messages(program)]
        incoming = _messages_to_S(program)
        by_sender = {"Q": self.from_Q, "A": self.from_A}
        pairs = [(headers, self.setup)]
        pairs += [([h for h in incoming if h.src.role == role], values) for role, values in by_sender.items()]
        for wanted, values in pairs:
            if [(h.shape, h.dtype) for h in wanted] != [(x.shape, x.dtype) for x in values]:
                raise DecoyError("no evidence: its messages are not those of the program")
        setup = [message_digest(self.setup_key, h, x) for h, x in zip(headers, self.setup, strict=True)]
        if hashlib.sha256(b"".join(setup)).digest() != statement.setup:
            raise DecoyError("no evidence: S has signed for another setup than this one")
        keys = PairKeys(statement.session)
        for role, secret in (("Q", self.with_Q), ("A", self.with_A)):
            peer = next(party for party in program.parties if party.role == role)
            keys.lend(_pair(peer, S), call, secret)
        senders = {role: iter(values) for role, values in by_sender.items()}
        received = [next(senders[header.src.role]) for header in incoming]
        replay = CallReplay(frozenset((S,)), statement.session, keys, self.setup, received)
        part = part_of(program, frozenset((S,)))
        by = digest_keys({"Q": self.with_Q, "A": self.with_A})
        replay.observer = digests = CallDigests(statement.session, call, by)
        with sole_observer(Observer()):
            part.call(replay, call, Setup(0).values(part, replay, {}), {})
        for name in DIGESTS:
            if name[0] != "S" and digests.digest(name[:2], name[2]) != statement.digests[name]:
                raise DecoyError(f"no evidence: S has signed for other messages from {name[0]} than these")
        if _same(digests, statement):
            raise DecoyError("no evidence: S has sent what the program gives")


def _messages_to_S(program: Program) -> list[Any]:
    """The headers of the messages to S in a call, in the program's order."""
    moves = [node.step for node in program.call if isinstance(node.step, Move)]
    return [step.header for step in moves if step.header.dst.role == "S"]
