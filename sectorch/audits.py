"""Audited dealing in a session: of several calls that Q promises one is prepared, and the others are looked at.

The protocol is `mpc/star/audit.py`. Here is what each party does in it: Q works out what it will deal, S shows its
streams, A recomputes, and S holds what it is dealt to what was promised.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .choreography import Party
from .choreography.program.material import Material
from .choreography.program.part import part_of
from .choreography.program.setup import Setup
from .choreography.program.trace import Program
from .choreography.run.rehearsal import DIGEST_BYTES, Dealt, Rehearsal, check_rehearsed
from .choreography.streams import SECRET_BYTES, PairKeys
from .errors import ArgumentError, FalseDealingError
from .mpc.star.audit import Evidence, Promise, audit
from .mpc.star.seed import Identities

if TYPE_CHECKING:
    from .session import Session


class Audits:
    """The audits of one session with one answering party.

    Args:
        party: that one. identities: Q's and its own, as they have proved them.
    """

    def __init__(self, session: Session, party: Party, identities: Identities):
        self._session: Session = weakref.proxy(session)  # which has this one
        self._A, self._Q, self._S = party, session.Q, session.S
        self._identities = identities
        self._setups: weakref.WeakKeyDictionary[Any, Setup] = weakref.WeakKeyDictionary()

    def prepare(self, program: Program, inputs: Mapping[str, torch.Tensor], count: int) -> Material:
        """The offline part of one of `count` calls that Q promises to deal, as `Session.prepare`; the others are looked at.

        Raises:
            ArgumentError: a program of which nobody can recompute what Q deals.
            FalseDealingError: at A or S, Q has promised, or dealt, something else than the program says.
        """
        session = self._session
        check_rehearsed(program, self._Q)
        calls = tuple(session._number(self._A) for _ in range(count))
        here = _Here(self, program, calls, session._setup_of(program).call)
        with session.call(self._A) as net:
            chosen, promised = audit(net, count, here.promise, here.show, here.look)
        call = calls[chosen]
        session.runtime.keys.separate(call)
        with Dealt(self._Q) if session.present(self._S) else nullcontext() as dealt:
            material = session.prepared(program, inputs, call)
        if dealt is not None and dealt.digest() != _digest(promised, chosen):
            raise FalseDealingError(f"{self._Q.name} has dealt something else in call {call} than it promised")
        return material


class _Here:
    """What whoever is in this process does in one audit."""

    def __init__(self, audits: Audits, program: Program, calls: tuple[int, ...], setup: int | None):
        if setup is None:
            raise ArgumentError("a session that was taken up again deals nothing, and there is nothing to audit")
        self._audits, self._program, self._calls, self._setup = audits, program, calls, setup
        self._session = audits._session
        self._keys = self._session.runtime.keys
        self._with_A = frozenset((audits._Q, audits._A))
        self._with_S = frozenset((audits._Q, audits._S))

    def promise(self) -> torch.Tensor:
        """At Q: the digests of its calls, and a signature."""
        rehearsal, settled = self._rehearsal()
        found = []
        for call in self._calls:
            for pair in (self._with_A, self._with_S):
                rehearsal.keys.lend(pair, call, self._keys.of(pair).of_call(call))
            found.append(rehearsal.dealt(self._program, call, settled))
            rehearsal.forget(call)
        promise = self._promise(tuple(found))
        return _tensor(b"".join(found) + self._audits._identities.key.sign(promise.statement()))

    def show(self, chosen: torch.Tensor) -> torch.Tensor:
        """At S: its streams with Q of the calls that are not used."""
        key, nothing = self._keys.of(self._with_S), bytes(SECRET_BYTES)
        return _tensor(b"".join(nothing if i == int(chosen) else key.of_call(c) for i, c in enumerate(self._calls)))

    def look(self, chosen: torch.Tensor, promised: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        """At A: whether Q has promised, for each of the calls that are not used, what its streams give.

        Raises:
            FalseDealingError: it has not, or has not signed.
        """
        digests = tuple(_digest(promised, i) for i in range(len(self._calls)))
        promise = self._promise(digests, bytes(promised[len(digests) * DIGEST_BYTES :].tolist()))
        public = self._audits._identities.public
        promise.check(public)
        rehearsal, settled = self._rehearsal()
        for i, call in enumerate(self._calls):
            if i == int(chosen):
                continue
            with_A = self._keys.of(self._with_A).of_call(call)
            with_S = bytes(shown[i * SECRET_BYTES : (i + 1) * SECRET_BYTES].tolist())
            rehearsal.keys.lend(self._with_A, call, with_A)
            rehearsal.keys.lend(self._with_S, call, with_S)
            found = rehearsal.dealt(self._program, call, settled)
            rehearsal.forget(call)
            if found != digests[i]:
                said = f"{self._audits._Q.name} promised another dealing of call {call} than its streams give"
                raise FalseDealingError(said, Evidence(promise, public, call, found, with_A, with_S))
        return torch.empty(0, dtype=torch.uint8)

    def _promise(self, digests: tuple[bytes, ...], signature: bytes = b"") -> Promise:
        return Promise(self._session.runtime.session, self._program.digest, self._calls, digests, signature)

    def _rehearsal(self) -> tuple[Rehearsal, Mapping[Any, Any]]:
        """A dealer that sends nothing, and its values of the setup: it draws them from the streams of Q and A."""
        session, dealer = self._session, self._audits._Q
        keys = PairKeys(session.runtime.session)
        keys.install(self._with_A, self._keys.of(self._with_A).again())
        rehearsal = Rehearsal(dealer, session.runtime.session, keys, session.device)
        setups, before = self._audits._setups, self._program.before
        if before not in setups:
            setups[before] = Setup(self._setup)
        return rehearsal, setups[before].values(part_of(self._program, rehearsal.here), rehearsal, {})


def _digest(promised: torch.Tensor, number: int) -> bytes:
    return bytes(promised[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES].tolist())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
