"""Draws that repeat, for tests alone: what a party draws from the operating system comes from a stream of its own.

A draw belongs to whoever takes a step of a choreography that draws (`Net.fresh`), in the session of that label, and to
named parts of the papers that draw outside of one. The n-th draw of a party in a session is then the same in a process
that plays all parties and in one that plays this party, and so is every share, mask and result. SEAL's own keys do not
come from there: each party's are made once, and used again. What else is drawn (certificates, TLS) stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from sectorch import ckks
from sectorch.choreography import streams
from sectorch.choreography.net import Compute
from sectorch.choreography.run.local import LocalRuntime
from sectorch.choreography.run.party import PartyRuntime
from sectorch.dp.noise import Noise
from sectorch.federated.command import Place
from sectorch.federated.parties import Simulation
from sectorch.network.federation.party import Federation
from sectorch.protocols.capc import algorithm
from sectorch.protocols.capride.exchange import Owner

WHO: ContextVar[tuple | None] = ContextVar("drawn_who", default=None)
LABEL: ContextVar[str] = ContextVar("drawn_label", default="")


@contextlib.contextmanager
def by(*who: object) -> Iterator[None]:
    """What is drawn inside comes from the stream of this name."""
    token = WHO.set(tuple(map(str, who)))
    try:
        yield
    finally:
        WHO.reset(token)


class Draws:
    """The streams of one run, by who draws."""

    urandom = staticmethod(os.urandom)

    def __init__(self):
        self._streams: dict[tuple, random.Random] = {}
        self._lock = threading.Lock()
        self.count = 0

    def anew(self, *whose: str) -> None:
        """What these names begin with begins again in this process, after a trial of it, say."""
        with self._lock:
            self._streams = {who: s for who, s in self._streams.items() if who[: len(whose)] != whose}

    def bytes(self, count: int) -> bytes:
        who = WHO.get()
        if who is None:
            return self.urandom(count)
        with self._lock:
            self.count += 1
            return self._streams.setdefault(who, random.Random("/".join(who))).randbytes(count)


class Known:
    """In the place of X25519's private keys: those that are generated come from a stream."""

    def __init__(self, draws: Draws):
        self._draws = draws

    def generate(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._draws.bytes(32))


def session_of(label: str) -> bytes:
    return hashlib.sha256(label.encode()).digest()[:16]


KEYS: dict[str, ckks.Keys] = {}
"""SEAL's, by who made them and for what: for all runs of a test."""
FOLDER = "DRAWN_KEYS"
"""The environment's name of a folder for them, where the runs are processes apart."""


@contextlib.contextmanager
def repeating() -> Iterator[Draws]:
    """Inside, all parties of this process draw from streams that begin anew."""
    draws = Draws()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", draws.bytes)
        # What is compiled on first use is kept under a name of its own, which is no draw of a party.
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=draws.urandom(16), version=4))
        patch.setattr(streams, "X25519PrivateKey", Known(draws))
        _sessions(patch, draws)
        _steps(patch)
        _papers(patch, draws)
        yield draws


def _steps(patch: pytest.MonkeyPatch) -> None:
    run = Compute.run

    def drawing(self, runtime, call, values):
        if not self.random:
            return run(self, runtime, call, values)
        with by(runtime.session.hex(), *sorted(party.name for party in self.owners)):
            return run(self, runtime, call, values)

    patch.setattr(Compute, "run", drawing)


def _sessions(patch: pytest.MonkeyPatch, draws: Draws) -> None:
    """A session's name comes from its label, in a simulation and in a federation alike."""
    for kind in (Simulation, Federation):
        for name in ("session", "runtime"):
            patch.setattr(kind, name, _labelled(getattr(kind, name)))
    local, apart = LocalRuntime.__init__, PartyRuntime.__init__

    def of_all(self, *args, **kwargs):
        local(self, *args, **kwargs)
        self.session = session_of(LABEL.get())
        draws.anew(self.session.hex())

    def of_one(self, me, session, channels, alive=None, wire=None):
        apart(self, me, session_of(LABEL.get()), channels, alive, wire or session)

    patch.setattr(LocalRuntime, "__init__", of_all)
    patch.setattr(PartyRuntime, "__init__", of_one)


def _labelled(opens):
    @functools.wraps(opens)
    @contextlib.contextmanager
    def opened(self, *args, label: str = "session", **kwargs):
        token = LABEL.set(label)
        try:
            entered = opens(self, *args, label=label, **kwargs)
            value = entered.__enter__()
        finally:
            LABEL.reset(token)
        with contextlib.ExitStack() as stack:
            stack.push(entered)
            yield value

    return opened


DRAW_NOISE = algorithm.draw_noise


def guarded_noise(mechanism, count, classes, mark, asker, number):
    with by("guardian", asker, number):
        return DRAW_NOISE(mechanism, count, classes, mark, asker, number)


def _papers(patch: pytest.MonkeyPatch, draws: Draws) -> None:
    def sample(self, *shape):
        bits = int.from_bytes(draws.bytes(7), "big")
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
        return (drawn * self.scale).round().long()

    patch.setattr(Noise, "sample", sample)
    patch.setattr(algorithm, "draw_noise", guarded_noise)

    keygen = ckks.keygen

    def kept(*args, **kwargs):
        name = hashlib.sha256(repr((WHO.get(), args, sorted(kwargs.items()))).encode()).hexdigest()[:16]
        if name not in KEYS:
            KEYS[name] = _on_disk(name, lambda: keygen(*args, **kwargs))
        return KEYS[name]

    patch.setattr(ckks, "keygen", kept)
    patch.setattr(Place, "own", lambda self, seed: seed)
    for name in ("__init__", "publish_inputs", "publish"):
        patch.setattr(Owner, name, _as_owner(getattr(Owner, name), draws))


def _on_disk(name: str, make: Callable[[], ckks.Keys]) -> ckks.Keys:
    folder = os.environ.get(FOLDER)
    if folder is None:
        return make()
    public, secret = (Path(folder) / f"{name}.{half}" for half in ("public", "secret"))
    if not secret.exists():
        keys = make()
        keys.public.save(public)
        keys.secret.save(secret)
    return ckks.Keys(ckks.PublicKeys.load(public), ckks.SecretKey.load(secret))


def _as_owner(method, draws: Draws):
    @functools.wraps(method)
    def called(self, *args):
        begins = method.__name__ == "__init__"
        party = args[0] if begins else self.party
        if begins:
            draws.anew("owner", party.name)
        with by("owner", party.name, method.__name__):
            return method(self, *args)

    return called
