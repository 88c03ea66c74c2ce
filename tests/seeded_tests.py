"""What a test draws is the same in every run: from streams of the test's name that begin anew.

The verdict of a test that compares frequencies, or plants a fault by chance, would otherwise hang on what the operating
system draws. So a change is judged by what it changes, as with hypothesis; long runs (`-m sectorch_long`) draw anew. A
fixture that several tests share has a stream of its own name. What is drawn elsewhere stays fresh: by processes that a
test starts, by OpenDP, SEAL and TLS; and parties in threads of one process draw in any order.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import settings

from sectorch.choreography import streams

fresh = os.urandom


class Stream:
    """AES-CTR under a key made of a name, in the place of `os.urandom`."""

    def __init__(self, name: str):
        self._key = hashlib.sha256(name.encode()).digest()
        self._stream = Cipher(algorithms.AES(self._key), modes.CTR(bytes(16))).encryptor()
        self._lock = threading.Lock()

    def __call__(self, count: int) -> bytes:
        with self._lock:
            return self._stream.update(bytes(count))

    def begin(self) -> None:
        """From now on secrets are drawn from this stream; torch, numpy and Python begin with its seed."""
        os.urandom = self
        seed = int.from_bytes(self._key[:4], "big")
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)


class Keys:
    """In the place of X25519's private keys, which draw by themselves."""

    @staticmethod
    def generate() -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(os.urandom(32))


streams.X25519PrivateKey = Keys


def stop() -> None:
    """The operating system draws again: after a test, and in a process that a test forks, which has a copy of the
    stream and would draw what its parent draws."""
    os.urandom = fresh


os.register_at_fork(after_in_child=stop)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not settings.default.derandomize:
        return (yield)
    Stream(item.nodeid).begin()
    try:
        return (yield)
    finally:
        stop()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.urandom
    if fixturedef.scope == "function" or not isinstance(before, Stream):
        return (yield)
    Stream(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param_index', 0)}").begin()
    try:
        return (yield)
    finally:
        before.begin()
