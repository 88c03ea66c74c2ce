"""The reveals of a program: those that a party agrees to, and the check of each as it leaves.

A reveal is a message by which a party learns a value (`Header.learner`): its content is not uniform, it is a share on
its way to the learner, or code outside this package sends it. A party sends only reveals that it has agreed to: those
that the dry run found, and others within the bounds that the party's own file sets.
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
from ...tables.release import ReleaseGovernor, govern, is_confirmed, policy_of_message
from ..names import readable

_BOUND = re.compile(r"(?:([A-Za-z0-9_]{1,100}):)?([A-Za-z0-9][A-Za-z0-9_.-]{0,63})=([0-9]{1,15})")
LONG = 2000
"""Characters of a reveal's text."""
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
        inputs: the inputs from which the value was computed, as pairs of a party and a name; empty if not recorded.
        same: whether the value is one of the inputs itself.
        before: digest of all computations of the session until then (`transcript.Agreement`).
        place: digest of the steps that computed the value (`choreography.net.Origins`).
        policy: digest of the policy of the release (`sectorch.release`) that it is a part of; empty for other reveals.
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
    policy: str = ""

    @classmethod
    def of(
        cls, line: Header, label: str, cast: Mapping[Party, str], origins: Origins | None, session: Session | None,
        governor: ReleaseGovernor | None = None,
    ) -> Reveal:  # fmt: skip
        """The reveal of a message's value."""
        learner = line.dst if line.learner is None else line.learner
        inputs, same, place = (origins and origins.current) or (frozenset(), False, b"")
        named = {party.name: name for party, name in cast.items()}
        shows = line.shows or f"hidden by {line.mask or 'nothing'}"
        before = "" if session is None else _computed(session)
        way = line.path, line.label, line.src, line.dst, learner
        policy = "" if session is None else policy_of_message(session, way, torch.Size(line.shape).numel(), governor)
        return cls(
            label, line.path, line.label, cast[line.src], cast[line.dst], cast[learner], tuple(line.shape),
            str(line.dtype).removeprefix("torch."), shows, line.from_package,
            tuple(sorted((named.get(party, party), name) for party, name in inputs)), same, before,
            place.hex(), policy,
        )  # fmt: skip

    @property
    def protocol(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def of_what(self) -> str:
        """The inputs that the value is, or was computed from, in words."""
        inputs = ", ".join(f"{name!r:.60} of {party}" for party, name in self.inputs)
        if not inputs:
            return "a computed value"
        return f"the input {inputs}" if self.same else f"a value computed from {inputs}"

    @property
    def text(self) -> str:
        """The reveal in words; words of the program are in quotes."""
        place = f"{self.label!r:.60} of {self.protocol!r:.60}, session {self.session!r:.60}"
        size = f"{list(self.shape)} {self.dtype} ({place})"
        if not self.from_package:
            return readable(f"{self.dst} is sent {size} by code of the program, which says: {self.shows!r:.200}", LONG)
        under = f", under the policy {self.policy[:16]}" if self.policy else ""
        if self.dst != self.to:
            return readable(f"{self.to} is to learn {size}, of which this is {self.src}'s half{under}", LONG)
        return readable(f"{self.to} learns {size}: {self.of_what}; {self.shows}{under}", LONG)


def reveal_texts(reveals: Iterable[Reveal]) -> list[str]:
    """Texts of reveals in their order, each with its count. A share on its way to the learner is part of its reveal."""
    return word_counts(Counter(r.text for r in reveals if not r.from_package or r.dst == r.to))


def word_counts(counted: Mapping[str, int]) -> list[str]:
    """Texts with their counts."""
    return [text if count == 1 else f"{text}, {count} times" for text, count in counted.items()]


@dataclass(frozen=True)
class Bound:
    """The largest number of elements that a party may learn in one run, by one protocol or by all others."""

    protocol: str
    to: str
    elements: int

    def __str__(self) -> str:
        return f"{f'{self.protocol}:' if self.protocol else ''}{self.to}={self.elements}"


def bounds_of(texts: Collection[str], name_of: Callable[[str], str]) -> tuple[Bound, ...]:
    """Bounds that are written as PARTY=ELEMENTS or PROTOCOL:PARTY=ELEMENTS.

    Args:
        name_of: gives the name of the party that has a name, or plays a role.

    Raises:
        ArgumentError: a text has another form, or a bound is given twice.
    """
    found: dict[tuple[str, str], Bound] = {}
    for text in texts:
        parts = _BOUND.fullmatch(text) if isinstance(text, str) else None
        if parts is None:
            raise ArgumentError(
                f"a bound of reveals is PARTY=ELEMENTS or PROTOCOL:PARTY=ELEMENTS, such as reveal:alpha=1; got "
                f"{ascii(text)[:80]}"
            )
        bound = Bound(parts[1] or "", name_of(parts[2]), int(parts[3]))
        if (bound.protocol, bound.to) in found:
            raise ArgumentError(f"reveals to {bound.to} by {bound.protocol or 'any protocol'} have two bounds")
        found[bound.protocol, bound.to] = bound
    return tuple(found.values())


RESULTS = ("reveal", "reveal_to_A", "reveal_to_S", "aggregate", "aggregate_noisy")
"""Protocols that open a result. A party with [governed] sends their messages in a release under its policy alone."""


def uncovered_reveals(reveals: Iterable[Reveal], policy: str, bounds: Iterable[Bound]) -> list[Reveal]:
    """The reveals that are in no release under this policy, nor within bounds that name their protocol."""
    left = {(b.protocol, b.to): b.elements for b in bounds if b.protocol and b.protocol not in RESULTS}
    found = []
    for reveal in reveals:
        key = reveal.protocol, reveal.to
        if reveal.policy == policy:
            continue
        if not reveal.from_package or left.get(key, -1) < reveal.elements:
            found.append(reveal)
        else:
            left[key] -= reveal.elements
    return found


class Ledger:
    """The reveals that one run of a party may send, and those that it has sent.

    Args:
        me: the party's name.
        agreed: the reveals that the dry run found; None allows and records all.
        bounds: for other reveals.
        sessions: those that the dry run opened (`session_key`).
        receipt: called before a reveal leaves, with its text, its learner and the count that the receipt covers.
        governor: what the party's own file says of releases; with it, a reveal outside of a release under its policy is
            sent only within a bound that names its protocol.
        digests: those that the dry run compared. messages: those that it sent (`message_key`). Both are None if the
            dry run did not reach the program's end.
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
        governor: ReleaseGovernor | None = None,
    ):
        self._governor = governor
        self._ungoverned = {(b.protocol, b.to): b.elements for b in bounds if b.protocol and b.protocol not in RESULTS}
        self._me, self._receipt = me, receipt
        self._left = None if agreed is None else Counter(r for r in agreed if r.src == me)
        self._bounds, self._sessions = {(b.protocol, b.to): b.elements for b in bounds}, frozenset(sessions)
        self._digests = None if digests is None or agreed is None else frozenset((*digests, bytes(32).hex()))
        self._messages = None if messages is None or agreed is None else frozenset(messages)
        self._over = ""
        self._lock = threading.Lock()
        self.ends: Callable[[RefusedError], None] = lambda _: None
        """Called with a refusal to end the run at all parties, also where the program catches the error."""
        self.sent: Counter[str] = Counter()
        """Texts of the reveals that were sent, and their counts."""

    def check_session(self, label: str, agreed: str, cast: Mapping[Party, str]) -> None:
        """Raises RefusedError for a session that the dry run did not open; its label would tell others something."""
        if self._left is not None and self._over:
            raise self._refusal(self._over)
        # A session that depends on an input, or its label, would tell the others something by itself.
        if self._left is not None and session_key(label, agreed, cast) not in self._sessions:
            raise self._refusal(f"the session '{label}', which its dry run did not open")

    def end(self) -> None:
        """Refuse all further reveals and sessions, since a session of the run has failed."""
        with self._lock:
            self._over = self._over or "something after a session that has failed"

    def watch(self, runtime: PartyRuntime, label: str, cast: Mapping[Party, str], session: Session | None) -> None:
        """Check every message that this party sends by a runtime from now on."""
        origins = None if session is None else origins_of(session)
        if session is not None and self._governor is not None:
            govern(session, self._governor)

        def guard(line: Sent, value: torch.Tensor) -> None:
            if self._messages is not None and message_key(line, label, cast) not in self._messages:
                what = f"{line.label!r:.60} {list(line.shape)} of {line.protocol!r:.60}, session {label!r:.60}"
                raise self._refusal(readable(f"the message {what}, which its dry run did not send", LONG))
            # A message that shows nothing is held to the dry run above; what follows is for reveals.
            if line.learner is None:
                return
            compared = session if compares(line) else None
            if compared is not None and self._governor is not None and not is_confirmed(compared, self._governor):
                raise self._refusal("a reveal that is in no release under this party's policy: it is not confirmed")
            if compared is None or not self._compared(bytes(value.tolist()), compared):
                self._take(Reveal.of(line, label, cast, origins, session, self._governor))

        runtime.watch(guard)

    def _compared(self, digest: bytes, session: Session) -> bool:
        """Whether a digest may be sent to be compared: the dry run sent it, or it is of this session's computations."""
        agreement = session.agreement
        if self._digests is not None:
            return digest.hex() in self._digests
        return agreement.comparing and digest in {bytes(32), *agreement._digests.values()}

    def _take(self, reveal: Reveal) -> None:
        """Count a reveal, and write its receipt. Raises RefusedError: it was not agreed to."""
        with self._lock:
            if self._left is not None and self._over:
                raise self._refusal(self._over)
            if self._governor is not None and reveal.policy != self._governor.policy.digest:
                outside = reveal.protocol, reveal.to
                if not reveal.from_package or self._ungoverned.get(outside, -1) < reveal.elements:
                    raise self._refusal(f"{reveal.text}, which is in no release under this party's policy")
                self._ungoverned[outside] -= reveal.elements
            if self._left is not None and not self._left[reveal]:
                key = next((k for k in ((reveal.protocol, reveal.to), ("", reveal.to)) if k in self._bounds), None)
                if key is None or self._bounds[key] < reveal.elements:
                    raise self._refusal(reveal.text)
                self._bounds[key] -= reveal.elements
            elif self._left is not None:
                self._left[reveal] -= 1
            text = reveal.text
            if (count := self.sent[text]) & (count - 1) == 0:  # 0, 1, 2, 4, ...: one line covers as many more
                self._receipt(text, reveal.to, max(1, 2 * count))
            self.sent[text] += 1

    def _refusal(self, what: str) -> RefusedError:
        """The error of a refusal, which ends the run. Its public text has nothing that could depend on a secret."""
        self._over = what
        error = RefusedError(
            f"'{self._me}' has not agreed to this, and nothing of it was sent: {what}. If it is right, accept the "
            f"program again (`sectorch federation accept`), with --reveals where its dry run cannot find it"
        )
        vars(error)["told"] = f"'{self._me}' has not agreed to a reveal or a session of this program; see its own log"
        self.ends(error)
        return error

    @property
    def text(self) -> str:
        """All reveals that were sent, in words."""
        return "; ".join(word_counts(self.sent)) or "nothing"


def origins_of(session: Session) -> Origins:
    """Have a session record from which inputs its values are computed."""
    weak = weakref.ref(session)
    session.origins = Origins(lambda: b"" if (found := weak()) is None else _computed(found).encode())
    for net in session._setup.values():
        net.origins = session.origins
    return session.origins


def _computed(session: Session) -> str:
    """The digests of all computations of a session until now, one for each of its answering parties."""
    digests = session.agreement._digests
    return " ".join(f"{party.name} {digest.hex()}" for party, digest in sorted(digests.items(), key=str))


def session_key(label: str, agreed: str, cast: Mapping[Party, str]) -> str:
    """The name of a session, which is the same at all parties."""
    return json.dumps([label, agreed, sorted((p.role, p.name, name) for p, name in cast.items())])


def message_key(line: Header, label: str, cast: Mapping[Party, str]) -> str:
    """The facts of a message that others see besides its content."""
    facts = label, line.path, line.label, cast[line.src], cast[line.dst], list(line.shape), str(line.dtype)
    return json.dumps(facts)


def compares(line: Header) -> bool:
    """Whether a message is of the kind that `Agreement.compare` sends: a digest of public values."""
    return line.path == "agree" and line.shape == DIGEST and line.from_package
