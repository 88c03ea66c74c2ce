"""The interface for asyncio: a web service or a notebook asks, and takes part in programs, without blocking its loop.

    async with aio.AsyncConnection("cloud.example:7100", credentials) as connection:
        model = await connection.model("hospital-b")
        logits = await model(images)

    async with aio.AsyncFederation("sum.toml", "north") as federation:
        learned = await federation.run(program, {"H1": vector})

Each call runs in a thread of its own. Cancelling it (`task.cancel()`, `asyncio.timeout`) ends its session: the other
parties end at once with an error, the result is not used, and the awaited call returns when its thread has ended.
Material that was prepared for other calls stays. Calls of one model run one after another, as in threads.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch

from ..config import Scheme
from ..deprecation import renamed_names
from ..errors import AbortedError, ArgumentError, SectorchError
from ..federated.parties import Parties
from ..serving.description import Like
from .federation.party import Federation as _Federation
from .identity.identity import Credentials
from .parties.client import Connection as _Connection
from .parties.client import connect
from .parties.remote_model import RemoteModel

if TYPE_CHECKING:
    from typing_extensions import Self

THREADS = 64
"""Calls that run at the same time; further ones wait."""
__getattr__ = renamed_names(__name__, Connection="AsyncConnection", Model="AsyncModel", Federation="AsyncFederation")

T = TypeVar("T")
C = TypeVar("C", _Connection, _Federation)
GiveUp = Callable[[SectorchError], None]


class _Threads:
    """Runs functions in threads beside the loop."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(THREADS, "sectorch")

    async def __call__(self, work: Callable[[], T], give_up: GiveUp = lambda _: None) -> T:
        """`work()` in a thread. If the awaiting task is cancelled, `give_up` is called and makes `work` end soon."""
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


class _AsyncContext(Generic[C]):
    """Opens something in a thread when `async with` is entered, and closes it at the end."""

    def __init__(self, what: str, open: Callable[[], C]):
        self._what, self._open = what, open
        self._threads, self._opened = _Threads(), None

    async def __aenter__(self) -> Self:
        self._opened = await self._threads(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            await self._threads(self._opened.close)
        self._threads.close()

    def _inner(self) -> C:
        if self._opened is None:
            raise ArgumentError(f"a {self._what} for asyncio is used within `async with`")
        return self._opened


class AsyncConnection(_AsyncContext[_Connection]):
    """A client's connection to the server, for `async with`.

    Args: of `sectorch.network.connect`, which also says what entering it raises.
    """

    def __init__(self, address: str, credentials: Credentials, **options: Any):
        super().__init__("connection", lambda: connect(address, credentials, **options))

    async def models(self) -> list[str]:
        """Names of the models that can be asked."""
        return await self._threads(self._inner().models)

    async def model(
        self, name: str, scheme: Scheme | Literal["lan", "wan"] | None = None, *, version: str | None = None
    ) -> AsyncModel:
        """The model of that name; see `sectorch.network.Connection.model`."""
        connection = self._inner()
        return AsyncModel(await self._threads(lambda: connection.model(name, scheme, version=version)), self._threads)


class AsyncModel:
    """A model at another party: `await model(x)`. Arguments and errors are those of `sectorch.network.RemoteModel`."""

    def __init__(self, remote: RemoteModel, threads: _Threads):
        self.remote, self._threads = remote, threads

    def __repr__(self) -> str:
        return repr(self.remote)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call."""
        inputs = self.remote.check(*args, **kwargs)  # in this thread: nothing is sent for bad inputs
        return await self._threads(lambda: self.remote.ask(inputs), self.remote.give_up)

    async def prepare(self, inputs: Like, count: int = 1) -> None:
        """Prepare calls; see `RemoteModel.prepare`."""
        await self._threads(lambda: self.remote.prepare(inputs, count), self.remote.give_up)

    async def close(self) -> None:
        """End its sessions."""
        await self._threads(self.remote.close)


class AsyncFederation(_AsyncContext[_Federation]):
    """This process as one party of a federation, for `async with`.

    Args: of `sectorch.network.federation.party.Federation`, which also says what entering it raises.
    """

    def __init__(self, path: str | Path, as_: str, folder: str | Path | None = None, **options: Any):
        super().__init__("federation", lambda: _Federation(path, as_, folder, **options))

    async def run(
        self, program: Callable[[Parties], T], inputs: Mapping[str, torch.Tensor] | None = None, *, bound: str = ""
    ) -> T:
        """This party's result of a program, which the other parties run too.

        Args:
            inputs: this party's inputs.
            bound: a word that all parties use, which tells apart programs that run at the same time.
        """
        federation = self._inner()
        parties = federation.for_run(federation.inputs if inputs is None else inputs, bound)
        return await self._threads(lambda: program(parties), parties.give_up)
