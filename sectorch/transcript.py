"""What parties that are apart compute with public numbers, as a digest that each keeps, and that they compare.

Every party of a session takes the same steps. A learning rate, a row's number, a seed of dropout's masks that differs
at one of them would give a result that is none. So each notes every operation, the shapes and the public numbers, in
a running digest, and before anything is revealed all digests are compared.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .choreography import Net, Party
from .errors import DisagreementError
from .mpc.star.broadcast import broadcast, choose_and_broadcast, compare_public_values


class ComparedSession(Protocol):
    """What it needs of a session (`session.Session`)."""

    @property
    def apart(self) -> bool: ...

    def operation(self, party: Party) -> AbstractContextManager[Net]: ...


class Agreement:
    """The digests of a session, for each of its answering parties: a call with another one is no matter of theirs.

    Where all parties are in this process, or none, there is nothing to compare.
    """

    def __init__(self, session: ComparedSession):
        # The session has this object, and lets go of its secrets at its end.
        self._session: ComparedSession = weakref.proxy(session)
        self._digests: dict[Party, bytes] = {}
        self.comparing = False
        """Whether what is sent is compared, and ends the session where it differs."""

    def __repr__(self) -> str:
        return "Agreement(...)"

    def note(self, party: Party, *said: Any) -> None:
        """What is computed next: names, numbers, public tensors; of secret tensors the shape counts."""
        if self._session.apart:
            found = hashlib.sha256(self._digests.get(party, b""))
            for part in public_bytes(said):
                found.update(len(part).to_bytes(8, "big") + part)
            self._digests[party] = found.digest()

    def compare(self, party: Party) -> None:
        """Find out whether all have computed the same until now; no party goes on before all have said so.

        Rounds 2, bytes 64 for each party but S, where the parties are apart.

        Raises:
            DisagreementError: at whoever finds it; the session ends at all.
        """
        if self._session.apart:
            own = torch.frombuffer(bytearray(self._digests.get(party, bytes(32))), dtype=torch.uint8)
            with self._session.operation(party) as net:
                self.comparing = True
                try:
                    compare_public_values(net, own, _same)
                finally:
                    self.comparing = False

    def told(self, party: Party, name: str, by: Party, value: torch.Tensor) -> torch.Tensor:
        """What `by` has, as all learn it from now on; of a shape and type that all know. See `told.told`."""
        with self._session.operation(party) as net:
            return broadcast(net, name, by, value)

    def settled(self, party: Party, name: str, own: torch.Tensor, choose: Callable[..., torch.Tensor]) -> torch.Tensor:
        """choose(what each party has, ...), as all learn it from now on. See `told.settled`."""
        with self._session.operation(party) as net:
            return choose_and_broadcast(net, name, own, choose)


def _same(other: str, own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
    if not torch.equal(own, came):
        raise DisagreementError(
            f"'{other}' has computed with another public number, shape or setting than this party (a learning rate, a "
            f"batch's rows, a seed): nothing was revealed; run the same program with the same settings at all parties"
        )
    return own


def public_bytes(value: Any) -> Iterator[bytes | memoryview]:
    """Public values as bytes, the same in every process; of secret tensors, and those without content, the shape."""
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
