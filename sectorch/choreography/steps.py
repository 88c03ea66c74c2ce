"""What happens in a choreography, step by step.

`Net` makes a step of each of its verbs and takes it once. A step holds nothing of the call that it was made in, so that
a traced program can take it in other calls (`choreography/program/part.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from .parties import Party, Phase
from .shapes import fresh_shape, on_shapes, shape_of
from .streams import PairKeys


@dataclass(frozen=True)
class Header:
    """What a program knows of one of its messages, the same in every call."""

    path: str
    label: str
    src: Party
    dst: Party
    phase: Phase
    round: int
    shape: torch.Size
    dtype: torch.dtype
    mask: str
    shows: str
    learner: Party | None
    """Who learns a value by it, if anybody does: whoever receives what `shows`, or what other code than this package's
    has sent, and whoever takes a half's mask off."""
    ours: bool
    """Whether this package declares it and has called it: else what is said of its mask is a claim of the caller's."""

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def protocol(self) -> str:
        return self.path.rsplit("/", 1)[-1]


header_of = functools.lru_cache(1 << 12)(Header)
"""A header of these fields, of which there are twelve: calls send the same again."""


@dataclass(frozen=True)
class Sent(Header):
    """One ledger line: a message as it went over an edge."""

    call: int
    session: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, header: Header, call: int, session: bytes) -> Sent:
        """A message of a program in a call."""
        sent = object.__new__(cls)  # a frozen class sets twelve attributes one by one, and calls have many messages
        sent.__dict__.update(header.__dict__, call=call, session=session)
        return sent


class Recorder(Protocol):
    """Takes the steps of a program in less time than one by one; see `run/graphs.py`."""

    def take(
        self, part: Any, lines: list[Any], runtime: Runtime, call: int, settled: Mapping, brought: Mapping
    ) -> dict: ...


class Runtime(Protocol):
    """What a choreography needs of the place where it runs; see `run/`."""

    session: bytes
    here: frozenset[Party]
    keys: PairKeys

    @property
    def graphs(self) -> Recorder | None: ...
    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor: ...
    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor: ...
    def install(self, pair: frozenset[Party], secret: torch.Tensor) -> None: ...
    def computed(self, path: str, owners: frozenset[Party], phase: Phase, seconds: float) -> None: ...
    def forget(self, call: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Compute:
    """`owners` compute f, each on its own.

    `pure`: nothing is lost where nobody needs the result. `random`: with randomness of its own, so that it gives
    something else another time. A check is neither.
    """

    f: Callable
    owners: frozenset[Party]
    phase: Phase
    path: str
    pure: bool = False
    random: bool = False

    @property
    def holders(self) -> frozenset[Party]:
        return self.owners

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> Any:
        start = time.perf_counter()
        result = self.f(*values)
        runtime.computed(self.path, self.owners, self.phase, time.perf_counter() - start)
        return result

    def shape(self, values: Sequence[Any]) -> Any:
        return on_shapes(getattr(self.f, "shapes", self.f), values)


@dataclass(frozen=True, slots=True)
class Draw:
    """Two parties draw the same words from their pair stream."""

    owners: frozenset[Party]
    phase: Phase
    path: str
    name: str
    number: int
    size: torch.Size
    dtype: torch.dtype

    @property
    def holders(self) -> frozenset[Party]:
        return self.owners

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> torch.Tensor:
        start = time.perf_counter()
        drawn = runtime.draw(self.owners, self.name, call, self.number, self.words)
        runtime.computed(self.path, self.owners, self.phase, time.perf_counter() - start)
        return self.of(drawn)

    @property
    def words(self) -> int:
        """How many are drawn."""
        return -(-self.size.numel() * self.dtype.itemsize // 8)

    def of(self, drawn: torch.Tensor) -> torch.Tensor:
        """The value that these words are. A view costs as much as a short draw: there are no more than it takes, and
        torch takes numbers in half the time that it takes a size."""
        if self.dtype != drawn.dtype:
            drawn = drawn.view(self.dtype)[: self.size.numel()]
        if len(self.size) == 1:
            return drawn
        return drawn.view(*self.size) if self.size else drawn.view(self.size)

    def shape(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.empty(self.size, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Move:
    """A value that its holders have goes over an edge."""

    header: Header
    holders: frozenset[Party]

    @property
    def phase(self) -> Phase:
        return self.header.phase

    @property
    def owners(self) -> frozenset[Party]:
        return self.holders | {self.header.dst}

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> torch.Tensor:
        (value,) = values
        there = value if self.header.src in runtime.here else shape_of(value)
        moved = runtime.transfer(Sent.of(self.header, call, runtime.session), there)
        return moved if self.holders.isdisjoint(runtime.here) else value

    def shape(self, values: Sequence[Any]) -> torch.Tensor:
        return values[0]


@dataclass(frozen=True, slots=True)
class Read:
    """A party's result leaves the choreography."""

    owners: frozenset[Party]
    phase: Phase

    @property
    def holders(self) -> frozenset[Party]:
        return self.owners

    def run(self, runtime: Runtime, call: int, values: Sequence[Any]) -> Any:
        return values[0]

    def shape(self, values: Sequence[Any]) -> Any:
        """A shape of its own, by which the result is known again."""
        return fresh_shape(values[0]) if isinstance(values[0], torch.Tensor) else values[0]


Step: TypeAlias = Compute | Draw | Move | Read
"""One step.

`owners` hold its result, and `holders` the values that it is taken on. `run` is for where an owner is present, and for
messages everywhere; it takes contents where a holder is present and shapes elsewhere. `shape` takes shapes and gives
the result's.
"""
