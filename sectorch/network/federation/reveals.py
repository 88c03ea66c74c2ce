"""What a program reveals: what a party agrees to, what is checked as a half leaves, and what its receipts say of it.

A reveal is a message by which somebody learns a value (`Header.learner`): what it shows is no uniform bits, or it is a
half on its way to the learner, or other code than this package's has sent it. A party's run sends none that its party
did not agree to: those that the rehearsal has found, or such as are within bounds that the party has written down.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from ...choreography import Party
from ...choreography.net import Header, Origins, Sent
from ...choreography.run.party import PartyRuntime
from ...errors import ArgumentError, RefusedError
from ...session import Session
from ..names import readable

_BOUND = re.compile(r"(?:([A-Za-z0-9_]{1,100}):)?([A-Za-z0-9][A-Za-z0-9_.-]{0,63})=([0-9]{1,15})")
LONG = 2000
"""Characters of a reveal in words."""
DIGEST = torch.Size((32,))
"""Shape of the digests that parties compare (`transcript.Agreement`)."""


@dataclass(frozen=True)
class Reveal:
    """A message by which a party learns a value. Parties have their names in the federation file.

    Args:
        session: the label of its session.
        path, label: of the message: its protocols and its name.
        src, dst: sender and receiver.
        to: the party that learns the value.
        shows: what is learned, in words of the code that sends it.
        from_package: whether that code is this package's.
        inputs: from which the value was computed, as pairs of a party and a name; empty where they were not recorded.
        same: whether the value is one of the inputs itself.
        before: digest of all that was computed with tensors in the session before (`transcript.Agreement`).
        place: digest of the steps from which the value comes (`choreography.net.Origins`).
    """

    session: str
    path: str
    label: str
    src: str
    dst: str
    to: str
    shape: tuple[int, ...]
    dtype: str
    shows: str
    from_package: bool
    inputs: tuple[tuple[str, str], ...] = ()
    same: bool = False
    before: str = ""
    place: str = ""

    @classmethod
    def of(
        cls, line: Header, label: str, cast: Mapping[Party, str], origins: Origins | None, session: Session | None
    ) -> Reveal:
        """The reveal that a message is."""
        learner = line.dst if line.learner is None else line.learner
        inputs, same, place = (origins and origins.current) or (frozenset(), False, b"")
        named = {party.name: name for party, name in cast.items()}
        shows = line.shows or f"hidden by {line.mask or 'nothing'}"
        before = "" if session is None else _computed(session)
        return cls(
            label, line.path, line.label, cast[line.src], cast[line.dst], cast[learner], tuple(line.shape),
            str(line.dtype).removeprefix("torch."), shows, line.from_package,
            tuple(sorted((named.get(party, party), name) for party, name in inputs)), same, before,
            place.hex(),
        )  # fmt: skip

    @property
    def protocol(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def of_what(self) -> str:
        """Whose input the value is, or was computed from."""
        said = ", ".join(f"{name!r:.60} of {party}" for party, name in self.inputs)
        if not said:
            return "a computed value"
        return f"the input {said}" if self.same else f"a value computed from {said}"

    @property
    def text(self) -> str:
        """In words; those of the program stand in quotes."""
        place = f"{self.label!r:.60} of {self.protocol!r:.60}, session {self.session!r:.60}"
        size = f"{list(self.shape)} {self.dtype} ({place})"
        if not self.from_package:
            return readable(f"{self.dst} is sent {size} by code of the program, which says: {self.shows!r:.200}", LONG)
        if self.dst != self.to:
            return readable(f"{self.to} is to learn {size}, of which this is {self.src}'s half", LONG)
        return readable(f"{self.to} learns {size}: {self.of_what}; {self.shows}", LONG)


def reveal_texts(reveals: Iterable[Reveal]) -> list[str]:
    """In words, in their order, each with how often; halves on their way to a learner are a part of its reveal."""
    return word_counts(Counter(r.text for r in reveals if not r.from_package or r.dst == r.to))


def word_counts(counted: Mapping[str, int]) -> list[str]:
    """Words with how often."""
    return [text if count == 1 else f"{text}, {count} times" for text, count in counted.items()]


@dataclass(frozen=True)
class Bound:
    """How much a party may learn in one run: so many elements at most, by one protocol or by all others."""

    protocol: str
    to: str
    elements: int

    def __str__(self) -> str:
        return f"{f'{self.protocol}:' if self.protocol else ''}{self.to}={self.elements}"


def bounds_of(said: Collection[str], named: Callable[[str], str]) -> tuple[Bound, ...]:
    """Bounds as they are written: PARTY=ELEMENTS, or PROTOCOL:PARTY=ELEMENTS.

    Args:
        named: the name in the federation of a party or role.

    Raises:
        ArgumentError: one that is none, or twice.
    """
    found: dict[tuple[str, str], Bound] = {}
    for text in said:
        parts = _BOUND.fullmatch(text) if isinstance(text, str) else None
        if parts is None:
            raise ArgumentError(
                f"a bound of reveals is PARTY=ELEMENTS or PROTOCOL:PARTY=ELEMENTS, such as reveal:alpha=1; got "
                f"{ascii(text)[:80]}"
            )
        bound = Bound(parts[1] or "", named(parts[2]), int(parts[3]))
        if (bound.protocol, bound.to) in found:
            raise ArgumentError(f"reveals to {bound.to} by {bound.protocol or 'any protocol'} have two bounds")
        found[bound.protocol, bound.to] = bound
    return tuple(found.values())


class Ledger:
    """What one run of a party may send of reveals, and what it has sent.

    Args:
        me: the party's name. agreed: every reveal that the rehearsal has found; None: any, which is only noted.
        bounds: of what is not among them. sessions: that the rehearsal has found, as `session_key` writes them.
        receipt: called before a reveal leaves, with its text and how often it has left at most from now on.
        digests: of what was computed, that the rehearsal has compared. messages: of any kind that it has sent
            (`message_key`). Both None where it did not come to the end.
    """

    def __init__(
        self,
        me: str,
        agreed: Iterable[Reveal] | None,
        bounds: Iterable[Bound] = (),
        sessions: Collection[str] = (),
        receipt: Callable[[str, str, int], None] = lambda *_: None,
        digests: Collection[str] | None = None,
        messages: Collection[str] | None = None,
    ):
        self._me, self._receipt = me, receipt
        self._left = None if agreed is None else Counter(r for r in agreed if r.src == me)
        self._bounds, self._sessions = {(b.protocol, b.to): b.elements for b in bounds}, frozenset(sessions)
        self._digests = None if digests is None or agreed is None else frozenset((*digests, bytes(32).hex()))
        self._messages = None if messages is None or agreed is None else frozenset(messages)
        self._over = ""
        self._lock = threading.Lock()
        self.ends: Callable[[RefusedError], None] = lambda _: None
        """Ends the run at all parties: called with a refusal, so that a program that goes on after it goes nowhere."""
        self.sent: Counter[str] = Counter()
        """In words, with how often."""

    def check_session(self, label: str, agreed: str, cast: Mapping[Party, str]) -> None:
        """Raises RefusedError: the rehearsal has met in no such session: its label would tell others something."""
        if self._left is not None and self._over:
            raise self._refusal(self._over)
        if self._left is not None and session_key(label, agreed, cast) not in self._sessions:
            raise self._refusal(f"the session '{label}', which its rehearsal did not open")

    def end(self) -> None:
        """A session of the run has failed: the run sends nothing more of what it could reveal, and opens no other."""
        with self._lock:
            self._over = self._over or "something after a session that has failed"

    def watch(self, runtime: PartyRuntime, label: str, cast: Mapping[Party, str], session: Session | None) -> None:
        """From now on this party's half of nothing leaves by this runtime that was not agreed to."""
        origins = None if session is None else origins_of(session)

        def guard(line: Sent, value: torch.Tensor) -> None:
            if self._messages is not None and message_key(line, label, cast) not in self._messages:
                what = f"{line.label!r:.60} {list(line.shape)} of {line.protocol!r:.60}, session {label!r:.60}"
                raise self._refusal(readable(f"the message {what}, which its rehearsal did not send", LONG))
            if line.learner is None:
                return
            if not (compares(line) and session is not None and self._compared(bytes(value.tolist()), session)):
                self._take(Reveal.of(line, label, cast, origins, session))

        runtime.guard = guard

    def _compared(self, digest: bytes, session: Session) -> bool:
        """Whether others may have it: it was in the rehearsal, or is one of a comparison that ends the run at all
        where they have another."""
        agreement = session.agreement
        if self._digests is not None:
            return digest.hex() in self._digests
        return agreement.comparing and digest in {bytes(32), *agreement._digests.values()}

    def _take(self, reveal: Reveal) -> None:
        with self._lock:
            if self._left is not None and self._over:
                raise self._refusal(self._over)
            if self._left is not None and not self._left[reveal]:
                key = next((k for k in ((reveal.protocol, reveal.to), ("", reveal.to)) if k in self._bounds), None)
                if key is None or self._bounds[key] < reveal.elements:
                    raise self._refusal(reveal.text)
                self._bounds[key] -= reveal.elements
            elif self._left is not None:
                self._left[reveal] -= 1
            text = reveal.text
            if (count := self.sent[text]) & (count - 1) == 0:  # at 0, 1, 2, 4, ...: a line for a loop's next as many
                self._receipt(text, reveal.to, max(1, 2 * count))
            self.sent[text] += 1

    def _refusal(self, what: str) -> RefusedError:
        """Also of all that would follow. The others hear nothing that a program may have chosen by a secret."""
        self._over = what
        error = RefusedError(
            f"'{self._me}' has not agreed to this, and nothing of it was sent: {what}. If it is right, accept the "
            f"program again (`sectorch federation accept`), with --reveals where its rehearsal cannot find it"
        )
        vars(error)["told"] = f"'{self._me}' has not agreed to a reveal or a session of this program; see its own log"
        self.ends(error)
        return error

    @property
    def text(self) -> str:
        """What was sent, in words."""
        return "; ".join(word_counts(self.sent)) or "nothing"


def origins_of(session: Session) -> Origins:
    """From now on the session notes whose inputs its values were computed from."""
    weak = weakref.ref(session)
    session.origins = Origins(lambda: b"" if (found := weak()) is None else _computed(found).encode())
    for net in session._setup.values():
        net.origins = session.origins
    return session.origins


def _computed(session: Session) -> str:
    """All that was computed in a session until now, as a digest for each of its answering parties."""
    digests = session.agreement._digests
    return " ".join(f"{party.name} {digest.hex()}" for party, digest in sorted(digests.items(), key=str))


def session_key(label: str, agreed: str, cast: Mapping[Party, str]) -> str:
    """A session, as all parties name it."""
    return json.dumps([label, agreed, sorted((p.role, p.name, name) for p, name in cast.items())])


def message_key(line: Header, label: str, cast: Mapping[Party, str]) -> str:
    """What others see of a message but its content."""
    said = label, line.path, line.label, cast[line.src], cast[line.dst], list(line.shape), str(line.dtype)
    return json.dumps(said)


def compares(line: Header) -> bool:
    """Whether a message is of the kind that `Agreement.compare` sends: a digest of public values."""
    return line.path == "agree" and line.shape == DIGEST and line.from_package
