"""The same for asyncio: a web service or a notebook asks, and takes part in programs, without blocking its loop.

    async with aio.AsyncConnection("cloud.example:7100", credentials) as connection:
        model = await connection.model("hospital-b")
        logits = await model(images)

    async with aio.AsyncFederation("sum.toml", "north") as federation:
        learned = await federation.run(program, {"H1": vector})

Each call runs in a thread of its own. To cancel one (`task.cancel()`, `asyncio.timeout`) ends its session: the others
hear of it at once and end with an error, nothing of the call's result is used, and what is awaited returns when the
thread has let go. What was prepared for other calls stays. Several calls of one model take turns, as in threads.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from ..config import Scheme
from ..deprecation import renamed_names
from ..errors import AbortedError, ArgumentError, SectorchError
from ..federated.parties import Parties
from ..serving.calls import Like
from .federation.party import Federation as _Federation
from .identity.identity import Credentials
from .parties.client import Connection as _Connection
from .parties.client import connect
from .parties.remote_model import RemoteModel

THREADS = 64
"""Calls at once; further ones wait."""
__getattr__ = renamed_names(__name__, Connection="AsyncConnection", Model="AsyncModel", Federation="AsyncFederation")

T = TypeVar("T")
GiveUp = Callable[[SectorchError], None]


class _Beside:
    """Threads beside the loop."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(THREADS, "sectorch")

    async def __call__(self, work: Callable[[], T], give_up: GiveUp = lambda _: None) -> T:
        """`work()` in a thread; `give_up` is called where what awaits it is cancelled, and has `work` end soon."""
        context = contextvars.copy_context()
        done = asyncio.get_running_loop().run_in_executor(self._pool, context.run, work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            give_up(AbortedError("stopped by its user"))
            with suppress(Exception):
                await done
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class AsyncConnection:
    """A client's connection to the server, for `async with`.

    Args: of `sectorch.network.connect`, which also says what entering it raises.
    """

    def __init__(self, address: str, credentials: Credentials, **options: Any):
        self._connect = lambda: connect(address, credentials, **options)
        self._beside, self._there = _Beside(), None

    async def __aenter__(self) -> AsyncConnection:
        self._there = await self._beside(self._connect)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._there is not None:
            await self._beside(self._there.close)
        self._beside.close()

    def _known(self) -> _Connection:
        if self._there is None:
            raise ArgumentError("a connection for asyncio is used within `async with`")
        return self._there

    async def models(self) -> list[str]:
        """Names of the models that can be asked."""
        return await self._beside(self._known().models)

    async def model(
        self, name: str, scheme: Scheme | Literal["lan", "wan"] | None = None, *, version: str | None = None
    ) -> AsyncModel:
        """The model of that name; see `sectorch.network.Connection.model`."""
        there = self._known()
        return AsyncModel(await self._beside(lambda: there.model(name, scheme, version=version)), self._beside)


class AsyncModel:
    """A model at another party: `await model(x)`. What it takes and raises is as of `sectorch.network.RemoteModel`."""

    def __init__(self, remote: RemoteModel, beside: _Beside):
        self.remote, self._beside = remote, beside

    def __repr__(self) -> str:
        return repr(self.remote)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call."""
        inputs = self.remote.check(*args, **kwargs)  # in this thread: nothing is sent for bad inputs
        return await self._beside(lambda: self.remote.ask(inputs), self.remote.give_up)

    async def prepare(self, inputs: Like, count: int = 1) -> None:
        """Do ahead what does not depend on the input; see `RemoteModel.prepare`."""
        await self._beside(lambda: self.remote.prepare(inputs, count), self.remote.give_up)

    async def close(self) -> None:
        """End its sessions."""
        await self._beside(self.remote.close)


class AsyncFederation:
    """This process as one party of a federation, for `async with`.

    Args: of `sectorch.network.federation.party.Federation`, which also says what entering it raises.
    """

    def __init__(self, path: str | Path, as_: str, folder: str | Path | None = None, **options: Any):
        self._join = lambda: _Federation(path, as_, folder, **options)
        self._beside, self._there = _Beside(), None

    async def __aenter__(self) -> AsyncFederation:
        self._there = await self._beside(self._join)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._there is not None:
            await self._beside(self._there.close)
        self._beside.close()

    async def run(
        self, program: Callable[[Parties], T], inputs: Mapping[str, torch.Tensor] | None = None, *, bound: str = ""
    ) -> T:
        """What a program gives at this party; the others run it too.

        Args:
            inputs: that this party brings in. bound: a word that all have agreed on, which keeps apart what runs at the
                same time under the same labels.
        """
        if self._there is None:
            raise ArgumentError("a federation for asyncio is used within `async with`")
        parties = self._there.for_run(self._there.inputs if inputs is None else inputs, bound)
        return await self._beside(lambda: program(parties), parties.give_up)
