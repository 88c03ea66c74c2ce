"""The transcript of a session: public values that distributed parties hash and compare. Its own file: see `in_package`.

Every party of a session takes the same steps. A learning rate, a row's number or a seed of dropout's masks that differs
at one of them would give a wrong result. So each party hashes every operation, the shapes and the public numbers into a
running digest, and all digests are compared before a reveal.

The protocols that compare them must be called by the package's own code. Code of `session.py` does not count as that,
since it calls what a user's program passes in (`choreography/declaration.py`).
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .choreography import Party
from .choreography.declaration import in_package
from .errors import ArgumentError, DisagreementError
from .mpc.star.broadcast import broadcast, choose_and_broadcast, compare_public_values


class Agreement:
    """The running digests of a session, one for each answering party, which takes part in its own calls only.

    Where all parties are in this process, or none, there is nothing to compare.
    """

    def __init__(self, session: Any):
        self._session: Any = weakref.proxy(session)  # no cycle: the session's secrets go with its last reference
        self._digests: dict[Party, bytes] = {}
        self.comparing = False
        """Whether the messages that are sent now are digests to compare; the session ends where they differ."""

    def __repr__(self) -> str:
        return "Agreement(...)"

    def note(self, party: Party, *facts: Any) -> None:
        """Add an operation to the digest: names, numbers and public tensors; of secret tensors the shape."""
        if self._session.is_distributed:
            found = hashlib.sha256(self._digests.get(party, b""))
            for part in public_bytes(facts):
                found.update(len(part).to_bytes(8, "big") + part)
            self._digests[party] = found.digest()

    def compare(self, party: Party) -> None:
        """Compare the digests of all parties. No party goes on before all have confirmed.

        2 rounds and 64 bytes for each party but S, where the parties are distributed.

        Raises:
            DisagreementError: a digest differs; raised at the party that finds it, and the session ends at every party.
        """
        if self._session.is_distributed:
            own = torch.frombuffer(bytearray(self._digests.get(party, bytes(32))), dtype=torch.uint8)
            with self._session.operation(party) as net:
                self.comparing = True
                try:
                    compare_public_values(net, own, _same)
                finally:
                    self.comparing = False

    def broadcast(self, party: Party, name: str, by: Party, value: torch.Tensor) -> torch.Tensor:
        """The value of `by`, which all parties learn; its shape and type are known to all."""
        _check_caller(sys._getframe(1))
        with self._session.operation(party) as net:
            return broadcast(net, name, by, value)

    def choose_and_broadcast(
        self, party: Party, name: str, own: torch.Tensor, choose: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """choose(the values of all parties), which all parties learn."""
        _check_caller(sys._getframe(1))
        with self._session.operation(party) as net:
            return choose_and_broadcast(net, name, own, choose)


def _check_caller(frame: Any) -> None:
    """A program's values do not leave as public ones of the package's; `sectorch.announced` has a program's."""
    if not in_package(frame.f_code):
        raise ArgumentError("only sectorch's own code broadcasts by a session; sectorch.announced announces a shape")


def _same(other: str, own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    if not torch.equal(own, came):
        raise DisagreementError(
            f"'{other}' has computed with another public number, shape or setting than this party (a learning rate, a "
            f"batch's rows, a seed): nothing was revealed; run the same program with the same settings at all parties"
        )
    return own


def public_bytes(value: Any) -> Iterator[bytes | memoryview]:
    """Public values as bytes, the same in every process. Of secret tensors and meta tensors the shape counts."""
    # Kinds are marked and containers closed, so that values of another kind or nesting give other bytes.
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta
            yield f"{'plain' if plain else 'secret'} {tuple(value.shape)} {value.dtype}".encode()
            if plain:
                yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield f"{key!r}:".encode()
            yield from public_bytes(entry)
        yield b"}"
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from public_bytes(entry)
        yield b")"
    elif isinstance(value, slice):
        yield from public_bytes((value.start, value.stop, value.step))
    elif isinstance(value, bytes):
        yield value
    elif value is None or isinstance(value, (bool, int, float, complex, str, *_NAMED)):
        yield f"{type(value).__name__} {value}".encode()
    elif callable(value) and (name := getattr(value, "__qualname__", None)) and not inspect.isclass(value):
        yield f"{getattr(value, '__module__', '')}.{name}".encode()
    else:
        yield type(value).__qualname__.encode()


_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(Ellipsis))
