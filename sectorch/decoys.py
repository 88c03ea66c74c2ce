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
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.constant_time import bytes_eq
from torch.utils import _pytree as pytree

from .choreography import Party, Phase
from .choreography.ledger import Observer, sole_observer
from .choreography.net import Compute, Draw, Move
from .choreography.program.projection import Material, Setup, part_of
from .choreography.program.trace import Program, Slot
from .choreography.run.replay import (
    DIGEST_BYTES,
    EDGES,
    PHASES,
    CallDigests,
    CallReplay,
    check_recomputable,
    message_digest,
)
from .choreography.streams import SECRET_BYTES, DisclosedKey, KeyStream, PairKeys, derive, random_secret
from .errors import ArgumentError, DecoyError, FalseServerError, OtherAnswerError, SectorchError
from .mpc.star.statement import DIGESTS, Statement, attest

FROM_S = tuple(edge for edge in EDGES if edge[0] == "S")

# Which calls are decoys: a coin of Q's before each call.


def flip(rate: float) -> bool:
    """A coin of this rate."""
    return int.from_bytes(random_secret()[:7], "big") < rate * 2.0**56


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
        return flip(self._rate)

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


# Whether A answers with one model: what is asked again, and what Q knows the answer of.


REPEATED = 16
"""Decoys of a program that may be asked again."""
PROGRAMS = 32
"""Programs of which decoys are remembered."""
NEAR = 2.0**-10
"""How far results may be apart where smooth functions let the drawn masks decide the last bit of some values."""


def is_exact(program: Program) -> bool:
    """Whether its results depend on the operands alone, bit for bit. Series alone are rounded after a mask."""
    return not any("trigonometric" in getattr(node.step, "path", "").split("/") for node in program.call)


class Repeats:
    """Decoys that Q asks again, at random: the same model gives the same answer, also in another session.

    Half of the decoys repeat an earlier one of their program. A cannot tell before it has answered, as it sees uniform
    shares. Results are compared bit for bit, or within `NEAR` where the program has smooth functions. A result whose
    values left their range is compared in that alone.
    """

    def __init__(self) -> None:
        self._asked: dict[str, dict[bytes, list[tuple[torch.Tensor, bool]]]] = {}
        self._lock = threading.Lock()
        self.compared = 0
        """How many repeated decoys had the answer of the first time."""

    def __repr__(self) -> str:
        return "Repeats(...)"

    def seed(self, program: Program) -> bytes:
        """The seed of the next decoy's input: a fresh one, or an earlier one."""
        fresh = random_secret()
        with self._lock:
            before = list(self._asked.get(program.digest, ()))
        if not before or not flip(0.5):
            return fresh
        return before[int.from_bytes(random_secret()[:7], "big") % len(before)]

    def check(self, program: Program, seed: bytes, found: Any) -> None:
        """Compare a decoy's result with that of the first time, and remember it if this is the first.

        Raises:
            OtherAnswerError: it is another one.
        """
        results = _results(found)
        with self._lock:
            of_program = self._asked.pop(program.digest, {})
            self._asked[program.digest] = of_program  # the latest
            while len(self._asked) > PROGRAMS:
                self._asked.pop(next(iter(self._asked)))
            first = of_program.setdefault(seed, results)
            while len(of_program) > REPEATED:
                of_program.pop(next(iter(of_program)))
            if first is results:
                return
        if not _same_results(first, results, is_exact(program)):
            raise OtherAnswerError(
                "one question was asked twice and answered with other bits: A has not computed with one model, or S "
                "wrongly"
            )
        self.compared += 1


def _results(found: Any) -> list[tuple[torch.Tensor, bool]]:
    """The tensors of a call's result, each with whether all values that it depends on are in their range."""
    leaves = []
    for y in pytree.tree_leaves(found, is_leaf=lambda y: hasattr(y, "plain")):
        right = getattr(y, "right", None)  # of an opening; see `tensor/shared.py`
        value = getattr(y, "plain", y)
        if isinstance(value, torch.Tensor):
            leaves.append((value.detach().clone(), right is None or bool(right)))
    return leaves


def _same_results(
    first: Sequence[tuple[torch.Tensor, bool]], second: Sequence[tuple[torch.Tensor, bool]], exact: bool
) -> bool:
    if len(first) != len(second):
        return False
    for (a, in_range), (b, also) in zip(first, second, strict=True):
        if in_range != also or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        if in_range and not torch.equal(a, b):
            if exact:
                return False
            if (a.is_floating_point() or a.is_complex()) and float((a - b).abs().max()) > NEAR:
                return False
    return True


class KnownAnswers:
    """Rows whose answers Q knows, asked among its own questions as calls that nobody can tell from these.

    With `answers`, each row's answer has to be this one: such answers were asked before, of this version of the model.
    With `labels`, the largest output has to be the label for a fraction `accuracy` of the rows, as the model was
    promised to do. An answer of the first kind is an experiment with accuracy 1.

    Args:
        x: of one tensor, [rows, ...], as the model takes it.
        answers: [rows, ...], the model's results. labels: int64 [rows].
        accuracy: of the model that is promised, with labels.
        rate: the probability that a call is on known rows, at least 0 and below 1.
        alarm: an upper bound of the probability that a model with that accuracy is ever refused.
        near: how far an answer may be from the known one; 0 for models without smooth functions.

    Raises:
        ArgumentError: these are no rows with answers or labels, or a number is out of its range.
    """

    def __init__(
        self, x: torch.Tensor, answers: torch.Tensor | None = None, *, labels: torch.Tensor | None = None,
        accuracy: float = 1.0, rate: float = 0.05, alarm: float = 1e-6, near: float = 0.0,
    ):  # fmt: skip
        known = labels if answers is None else answers
        tensors = isinstance(x, torch.Tensor) and isinstance(known, torch.Tensor)
        if known is None or not tensors or (answers is not None and labels is not None) or not x.dim() or not len(x):
            raise ArgumentError("known answers are rows x with answers or labels, one of the two, as tensors")
        if not known.dim() or len(known) != len(x) or (labels is not None and labels.shape != (len(x),)):
            raise ArgumentError(f"{len(x)} rows have as many answers, got {list(known.shape)}")
        numbers = {"accuracy": accuracy, "rate": rate, "alarm": alarm, "near": near}
        fits = all(type(n) in (int, float) for n in numbers.values())
        if not fits or not (0 < accuracy <= 1 and 0 <= rate < 1 and 0 < alarm < 1 and 0 <= near < math.inf):
            raise ArgumentError(f"0 < accuracy <= 1, 0 <= rate < 1, 0 < alarm < 1 and 0 <= near, got {numbers}")
        if answers is not None and accuracy != 1:
            raise ArgumentError("answers are equal or not: an accuracy is of labels")
        self.x, self._known, self._labelled = x, known, labels is not None
        self._accuracy, self._rate, self._alarm, self._near = float(accuracy), float(rate), float(alarm), float(near)
        self._pending: torch.Tensor | None = None
        self.rows = self.right = 0
        """How many known rows were asked, and how many of them had the known answer."""

    def __repr__(self) -> str:
        return f"KnownAnswers({len(self.x)} rows)"

    def flip(self) -> bool:
        """Whether the next call is on known rows."""
        return flip(self._rate) or self._pending is not None

    def choose(self, rows: int) -> torch.Tensor:
        """The numbers of the rows of the next such call; those of the last one, if that failed.

        Otherwise S could let calls fail, and falsify those alone that come again.
        """
        if self._pending is None or len(self._pending) != rows:
            drawn = [int.from_bytes(random_secret()[:7], "big") % len(self.x) for _ in range(rows)]
            self._pending = torch.tensor(drawn, device="cpu")
        return self._pending

    def check(self, rows: torch.Tensor, found: torch.Tensor | None) -> None:
        """Compare what was answered for these rows; None where a value left its range.

        Raises:
            OtherAnswerError: with the promised accuracy so many other answers come with a probability below `alarm`.
        """
        known, self._pending = self._known[rows], None
        if found is None or (found.shape != known.shape and not self._labelled):
            same = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        elif self._labelled:
            same = found.reshape(len(rows), -1).argmax(1) == known
        else:
            same = (found == known) if not self._near else (found - known).abs() <= self._near
            same = same.reshape(len(rows), -1).all(1)
        self.rows, self.right = self.rows + len(rows), self.right + int(same.sum())
        if self.right < least_right(self.rows, self._accuracy, self._alarm):
            raise OtherAnswerError(
                f"of {self.rows} rows with known answers {self.rows - self.right} were answered otherwise: A has not "
                f"computed with the model that is known, or S wrongly"
            )


def least_right(k: int, accuracy: float, alarm: float = 1e-6) -> int:
    """The least number of right answers of k that is not refused.

    A model of that accuracy has fewer with a probability of at most alarm / (k (k + 1)), so that it is refused after
    any number of questions with a probability of at most `alarm` in all. The binomial distribution is summed exactly.
    """
    if accuracy == 1:
        return k
    bound, below, c = alarm / (k * (k + 1)), 0.0, 0
    while c < k and (below := below + _binomial(k, c, accuracy)) <= bound:
        c += 1
    return c


def notice_probability(k: int, swapped: float, accuracy: float = 1.0, alarm: float = 1e-6) -> float:
    """The probability that another model is refused after k known rows, on which it has no right answer on a fraction.

    With accuracy 1 it is 1 - (1 - swapped)^k.

    Args:
        swapped: the fraction of rows on which the other model's answers are wrong, whatever the right one's are.
    """
    least = least_right(k, accuracy, alarm)
    return sum(_binomial(k, c, accuracy * (1 - swapped)) for c in range(least))


def _binomial(k: int, c: int, p: float) -> float:
    """The probability of c of k."""
    if p in (0.0, 1.0):
        return float(c == k * p)
    log = math.lgamma(k + 1) - math.lgamma(c + 1) - math.lgamma(k - c + 1)
    return math.exp(log + c * math.log(p) + (k - c) * math.log1p(-p))


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
        repeats: at Q, the decoys that may be asked again.
        check: at A, runs a `DecoyCheck`, or has it run later.
        asked: how many decoys Q has asked, at Q and A. checked: how many of these A has checked.
        found: at A, what it has found of S, with the evidence.
    """

    def __init__(self, session: Any):
        self._session: Any = weakref.proxy(session)  # no cycle: the session holds its statements
        self.key: Ed25519PrivateKey | None = None
        self.trust: Callable[[bytes], None] = lambda public: None
        self.check: Callable[[DecoyCheck], None] = DecoyCheck.note
        self.repeats = Repeats()
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
            OtherAnswerError: at Q, a decoy that it has asked before was answered otherwise.
        """
        session, decoy, seed = self._session, _DECOY.get(), self.repeats.seed(program)
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
        if decoy and session.present(session.Q):
            self.repeats.check(program, seed, found)
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


_RIGHT, _FALSE, _UNFIT = range(3)
"""What A reports of the decoys that it has checked: S was right; S has sent something else; one cannot be checked."""


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
            raise FalseServerError(f"S states one thing of call {self._call} to Q, and another to A, or Q says so")
        if decoy:
            statements.asked += 1
            setup = [content for _, content in statements.messages_of(self._program, self._setup)]
            pair = _pair(self.Q, self.A)
            labels = {n.step.name for n in self._program.setup if isinstance(n.step, Draw) and n.step.owners == pair}
            between = self._session.runtime.keys.of(pair).disclose(self._call, labels)
            check = DecoyCheck(
                self._program, self._setup, statement, with_Q, self._streams["A"],
                setup_key(self._session, self._setup), seed, [x for x in setup if x is not None],
                digests.copies["A", "S"], statements, between, self._session.device,
            )  # fmt: skip
            statements.check(check)
        with statements.lock:
            found, counts = statements.found, (statements.asked, statements.checked)
        said = _RIGHT if found is None else _FALSE if isinstance(found, FalseServerError) else _UNFIT
        return self._seal("report", bytes([said]) + b"".join(count.to_bytes(8, "big") for count in counts))

    def accept(self, report: torch.Tensor) -> torch.Tensor:
        """At Q: check A's report, without which the result is not used."""
        content, statements = self._open("report", report), self._statements
        asked, checked = (int.from_bytes(content[at : at + 8], "big") for at in (1, 9))
        if content[0] == _UNFIT:
            raise DecoyError("A cannot check a decoy: its keys or its input, as Q names them, do not fit the call")
        if content[0] != _RIGHT:
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
            raise FalseServerError(
                f"S has changed a {name} of call {self._call} between Q and A, or it was not sealed for this call"
            ) from None


# A's check of a decoy, and what it shows to others.


@dataclass(eq=False)
class DecoyCheck:
    """A's check of one decoy; its repr shows no content.

    Attributes:
        setup: A's setup of the program.
        with_Q, with_A: the keys of S's streams in this call, the first as Q names it.
        setup_key: of the digests of the setup's messages. seed: of the made-up input, as Q names it.
        received, sent: what A has sent S in the setup, and in the call.
        between: the streams of Q and A in this call and in the setup, and no others.
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
    between: DisclosedKey = field(repr=False)
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
        Q, _, S = self._parties
        keys = self._keys()
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

    def check_model(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compute all messages of A in this call and in the setup again, from these weights, as an auditor does.

        The auditor has compared the weights with the version in the receipts. What it is shown of the streams of Q and
        A draws the masks of this call and of the weights, and of no other call.

        Args:
            weights: A's inputs of the program, by name.

        Raises:
            OtherAnswerError: A has sent S other messages, as S has signed.
            FalseServerError, DecoyError: as from `run`, which comes first.
        """
        self.run()
        statement, program = self.statement, self.program
        everybody = frozenset(self._parties)
        replay = CallReplay(everybody, statement.session, self._keys(), (), (), self.device)
        setup, noted = self.setup.for_replay(), dict[Slot, bytes]()
        setup.note = lambda slot, header, value: noted.update({slot: message_digest(self.setup_key, header, value)})
        part = part_of(program, everybody)
        by = digest_keys({"Q": self.with_Q, "A": self.with_A})
        replay.observer = digests = CallDigests(statement.session, statement.call, by)
        with sole_observer(Observer()):
            settled = setup.values(part, replay, weights)
            made_up = made_up_inputs(self.seed, program, self._parties[0])
            part.call(
                replay, statement.call, settled, {**weights, **{k: x.to(self.device) for k, x in made_up.items()}}
            )
        masked = hashlib.sha256(b"".join(noted[slot] for slot, _ in setup_messages(program))).digest()
        same = bytes_eq(masked, statement.setup) and all(
            bytes_eq(digests.digest(("A", "S"), phase), statement.digests["A", "S", phase]) for phase in PHASES
        )
        if not same:
            raise OtherAnswerError(
                f"in call {statement.call} A has sent S other messages than these weights give, as S has signed"
            )

    @property
    def _parties(self) -> tuple[Party, Party, Party]:
        Q, A, S = (next(party for party in self.program.parties if party.role == role) for role in "QAS")
        return Q, A, S

    def _keys(self) -> PairKeys:
        """The keys of the call's streams, of which each can be drawn from once."""
        (Q, A, S), call = self._parties, self.statement.call
        keys = PairKeys(self.statement.session)
        keys.install(_pair(Q, A), self.between.replica())
        keys.lend(_pair(Q, A), call, self.between.of_call(call))
        keys.lend(_pair(Q, S), call, self.with_Q)
        keys.lend(_pair(S, A), call, self.with_A)
        return keys


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
