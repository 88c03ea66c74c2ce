"""Audited dealing, a mode of preparation in its own file: one of several promised calls is used, the others checked.

The protocol is `mpc/star/audit.py`. This module has what each party computes in it: Q works out and promises what it
will deal, S shows its streams of the other calls, A recomputes those, and S compares what it is dealt with the promise.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from cryptography.hazmat.primitives.constant_time import bytes_eq

from .choreography import Party
from .choreography.program.projection import DealerSplit, Material, Setup, split_of
from .choreography.program.trace import Program, Slot
from .choreography.run.replay import DealerReplay, DealtDigest, check_recomputable
from .choreography.streams import SECRET_BYTES, PairKeys, derive
from .errors import ArgumentError, FalseDealingError
from .mpc.star.audit import Evidence, Promise, audit
from .mpc.star.key_agreement import Identities

KEPT_BYTES = 1 << 27
"""Q keeps the results of each call of an audit up to this many bytes; beyond, it computes the used call again."""


class Audits:
    """The audits of a `Session`.

    Attributes:
        identities: the proved identities of Q and each answering party.
        setups: Q's values of the setups, at the party that recomputes Q's dealing.
    """

    def __init__(self, session: Any):
        self._session: Any = weakref.proxy(session)  # no cycle: the session holds its audits
        self.identities: dict[Party, Identities] = {}
        self.setups: weakref.WeakKeyDictionary[Any, Setup] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Audits(...)"

    def prepare(self, program: Program, inputs: Mapping[str, torch.Tensor], count: int) -> Material:
        """Take the offline steps of one of `count` calls that Q promises to deal. The others are checked.

        Raises:
            ArgumentError: Q's dealing cannot be recomputed in this program, another party deals, or the session was
                resumed.
            FalseDealingError: at A or S, Q has promised or dealt something else than the program says.
        """
        session = self._session
        party = next((party for party in program.parties if party in self.identities), None)
        if party is None or session.dealer != session.Q:
            raise ArgumentError("dealing is audited where Q deals in secure inference, in a session that begins now")
        check_recomputable(program, session.Q)
        with self._lock:  # threads take turns, since all parties number their calls in one order
            return self._prepared(program, inputs, count, party)

    def _prepared(self, program: Program, inputs: Mapping[str, torch.Tensor], count: int, party: Party) -> Material:
        session = self._session
        setup = session.run_setup(program, inputs)
        calls = tuple(session.number(program) for _ in range(count))
        here = _Here(session, program, party, calls, inputs, setup)
        with session.call(party) as net:
            chosen, promised = audit(net, count, here.promise, here.show, here.look)
        call = calls[chosen]
        session.runtime.keys.separate(call)
        with DealtDigest(session.Q, here.digest_key(call)) if session.present(session.S) else nullcontext() as dealt:
            material = here.prepared(call)
        if dealt is not None and not bytes_eq(dealt.digest(), here.read(promised).digests[chosen]):
            raise FalseDealingError(f"Q has dealt something else in call {call} than it promised")
        return material


class _Here:
    """The computations of this process's parties in one audit."""

    def __init__(
        self, session: Any, program: Program, party: Party, calls: tuple[int, ...],
        inputs: Mapping[str, torch.Tensor], setup: Setup,
    ):  # fmt: skip
        self._session, self._program, self._calls, self._inputs = session, program, calls, inputs
        self._identities, self._keys, self._setup = session.audits.identities[party], session.runtime.keys, setup
        self._with_A, self._with_S = frozenset((session.Q, party)), frozenset((session.Q, session.S))
        self._begun: dict[int, dict[Slot, Any]] = {}
        """At Q, the kept results of each call, until it learns which call is used."""

    def promise(self) -> torch.Tensor:
        """At Q: the digests of its calls, signed."""
        keys = [(self._keys.of(self._with_A).of_call(c), self._keys.of(self._with_S).of_call(c)) for c in self._calls]
        rehearsal, (split, settled), digests = self._rehearsal(), self._taken(), []
        for call, both in zip(self._calls, keys, strict=True):
            digest, begun = self._dealt(rehearsal, split, settled, call, *both)
            digests.append(digest)
            if split.keeps:
                self._begun[call] = begun
        streams = tuple(_named(*both) for both in keys)
        promise = Promise(self._session.runtime.session, self._program.digest, self._calls, tuple(digests), streams)
        signature = self._identities.key.sign(promise.statement())
        return _tensor(replace(promise, signature=signature).to_message())

    def show(self, chosen: torch.Tensor) -> torch.Tensor:
        """At S: its streams with Q of the calls that are not used."""
        key, nothing = self._keys.of(self._with_S), bytes(SECRET_BYTES)
        return _tensor(b"".join(nothing if i == int(chosen) else key.of_call(c) for i, c in enumerate(self._calls)))

    def look(self, chosen: torch.Tensor, promised: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        """At A: check Q's promise of each call that is not used against Q's streams.

        Raises:
            FalseDealingError: the promise differs, or is not signed.
        """
        promise, public = self.read(promised), self._identities.public
        promise.check(public)
        rehearsal = self._rehearsal()
        split, settled = self._alone(rehearsal)
        for i, call in enumerate(self._calls):
            if i == int(chosen):
                continue
            with_A = self._keys.of(self._with_A).of_call(call)
            with_S = bytes(shown[i * SECRET_BYTES : (i + 1) * SECRET_BYTES].tolist())
            found, _ = self._dealt(rehearsal, split, settled, call, with_A, with_S)
            if (found, _named(with_A, with_S)) != (promise.digests[i], promise.streams[i]):
                text = f"Q promised another dealing of call {call} than its streams give"
                raise FalseDealingError(text, Evidence(promise, public, call, found, with_A, with_S))
        return torch.zeros(1, dtype=torch.uint8)

    def digest_key(self, call: int) -> bytes:
        """At S: the key of a call's digest."""
        return _digest_key(self._keys.of(self._with_S).of_call(call))

    def read(self, promised: torch.Tensor) -> Promise:
        """Parse Q's promise."""
        session = self._session.runtime.session
        return Promise.from_message(session, self._program.digest, self._calls, bytes(promised.tolist()))

    def prepared(self, call: int) -> Material:
        """Take the offline steps of the call that is used; Q goes on from the results that it has kept."""
        begun = self._begun.pop(call, None)
        self._begun.clear()
        session, program, inputs = self._session, self._program, self._inputs
        if begun is None:
            return session.prepared(program, inputs, call)
        split, settled = self._taken()
        try:
            values = split.finish(session.runtime, call, settled, inputs, begun)
        finally:
            session.runtime.forget(call)
        known = split.part.offline_inputs(inputs)
        return Material(call, session.runtime.session, program.digest, self._setup.call, values, known)

    def _dealt(
        self,
        rehearsal: DealerReplay,
        split: DealerSplit,
        settled: Mapping[Slot, Any],
        call: int,
        with_A: bytes,
        with_S: bytes,
    ) -> tuple[bytes, dict[Slot, Any]]:
        """The digest of what Q deals in a call from these streams, and the results to keep."""
        rehearsal.keys.lend(self._with_A, call, with_A)
        rehearsal.keys.lend(self._with_S, call, with_S)
        try:
            return rehearsal.replay(split, call, settled, _digest_key(with_S))
        finally:
            rehearsal.forget(call)

    def _rehearsal(self) -> DealerReplay:
        """A runtime that replays Q's steps and sends nothing; it draws Q's setup from the streams of Q and A."""
        session = self._session
        keys = PairKeys(session.runtime.session)
        keys.install(self._with_A, self._keys.of(self._with_A).replica())
        return DealerReplay(session.Q, session.runtime.session, keys, session.device)

    def _taken(self) -> tuple[DealerSplit, Mapping[Slot, Any]]:
        """At Q: the halves of its projection, and the values of the setup."""
        runtime = self._session.runtime
        split = split_of(self._program, runtime, self._session.Q, KEPT_BYTES)
        return split, self._setup.values(split.part, runtime, self._inputs)

    def _alone(self, rehearsal: DealerReplay) -> tuple[DealerSplit, Mapping[Slot, Any]]:
        """At A: the halves of Q's projection, and Q's values of the setup."""
        setup = self._session.audits.setups.setdefault(self._program.before, self._setup.for_replay())
        split = split_of(self._program, rehearsal, self._session.Q, KEPT_BYTES)
        return split, setup.values(split.part, rehearsal, {})


def _digest_key(with_S: bytes) -> bytes:
    return derive(with_S, b"", "promised dealing", SECRET_BYTES)


def _named(with_A: bytes, with_S: bytes) -> bytes:
    """A digest that identifies the keys, and shows nothing of them to a party that lacks one."""
    return hashlib.sha256(with_A + with_S).digest()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
