"""Cells: the content of tensors that are trained on, what may be used of it again, and the flags that it depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import ArgumentError, UnsupportedOpError
from ..tensor import SharedTensor
from ..tensor.table import Context


class Recorder(Protocol):
    """What a cell needs of the step that it is recorded in (`recording.py`)."""

    @property
    def context(self) -> Context: ...

    def flush(self) -> None: ...


class Pool:
    """The flags of a computation, which nothing that it gives is revealed without: of one graph, and of what it reads.

    Each tensor would otherwise hand on the flags of all steps before it. What an operation in place wrote, and what was
    shared, has a pool that is settled: who reads it takes its flags, and what becomes of those results is no matter
    of it. So a loss that leaves the range leaves the model as it was.
    """

    def __init__(self, flags: Any = (), settled: bool = False):
        self._flags: dict[Any, None] = dict.fromkeys(flags)
        self._into: Pool | None = None
        self.settled = settled

    def root(self) -> Pool:
        return self if self._into is None else self._into.root()

    @property
    def flags(self) -> tuple:
        return tuple(self.root()._flags)

    def add(self, flags: Any) -> None:
        self.root()._flags.update(dict.fromkeys(flags))

    def joined(self, context: Context, most: int = 1) -> tuple:
        """The flags, as one where they are more than so many. In a call."""
        pool = self.root()
        if len(pool._flags) > most:
            pool._flags = {context.backend.joined(tuple(pool._flags)): None}
        return tuple(pool._flags)

    @staticmethod
    def of(pools: list[Pool]) -> Pool:
        """The pool of what is computed from tensors of these: one of graphs, which from then on are one."""
        roots = list(dict.fromkeys(pool.root() for pool in pools))
        graphs = [pool for pool in roots if not pool.settled]
        made = graphs[0] if graphs else Pool()
        for pool in roots:
            if pool is not made:
                made.add(pool._flags)
            if not pool.settled and pool is not made:
                pool._into, pool._flags = made, {}
        return made


MANY = 64
"""Flags that a pool holds before they are joined."""


class Cell:
    """The content of a tensor and of all that share its memory, which an operation in place changes for all of them.

    Attributes:
        gradient: whether a backward pass made it.
        kept: what rows have worked out of the content and may use again.
        pool: the flags that nothing made of it is revealed without.
        base: of a view, the cell that it is a view of, and that one's version then.
        place: in a step that is recorded, where, and its number there.
        lazy: how the content is computed when it is looked at; None of what is there.
        pending: of what such a step will have computed, its shape; None once the content is there.
    """

    def __init__(
        self, content: SharedTensor | None, gradient: bool = False, base: Cell | None = None, pool: Pool | None = None,
        pending: torch.Tensor | None = None,
    ):  # fmt: skip
        self._content, self.gradient, self.version, self.pending = content, gradient, 0, pending
        self.place: tuple[Recorder, int] | None = None
        flags = () if content is None else content.flags
        self.pool = pool or (Pool(flags, settled=True) if base is None else base.pool)
        self.kept: dict[str, Any] = {}
        self.base = None if base is None else (base, base.version)
        self.lazy: Lazy | None = None

    @property
    def content(self) -> SharedTensor:
        """What is recorded is computed before it is looked at.

        Raises UnsupportedOpError where memory that this one is a view of has changed since.
        """
        if self.base is not None and self.base[0].version != self.base[1]:
            raise UnsupportedOpError(
                "a view of a shared tensor was used after the tensor was changed in place; take the view again"
            )
        if self.pending is not None and self.place is not None:
            self.place[0].flush()
        if self.lazy is not None:
            context, lazy, self.lazy = self.lazy.context, self.lazy, None
            with context.session.operation(context.party) as net:
                before = len(net.raised)
                made = lazy.content()
                self._content = made.like(made.shares, bound=made.bound, dtype=lazy.meta.dtype)
                self.pool.add(tuple(net.raised[before:]))
        if self._content is None or self.pending is not None:
            raise ArgumentError("the step that this tensor was to come from failed, and gave nothing")
        return self._content

    @property
    def shape(self) -> torch.Tensor:
        """A tensor without content of its shape and dtype."""
        if self.pending is not None:
            return self.pending
        if self.lazy is not None:
            return self.lazy.meta
        with torch._C.DisableTorchFunctionSubclass():
            x = self.content
            return torch.empty(x.shape, dtype=x.dtype, device="meta")

    @property
    def context(self) -> Context:
        """Where it is computed with."""
        if self.pending is not None and self.place is not None:
            return self.place[0].context
        if self.lazy is not None:
            return self.lazy.context
        x = self.content
        return Context(x.session, x.party, x.scheme)

    def write(self, content: SharedTensor, pool: Pool) -> None:
        """Change it in place, to what depends on these flags."""
        if self.base is not None:
            raise UnsupportedOpError("a view of a shared tensor cannot be changed in place; write it out of place")
        self.settle(content, pool)
        self.version += 1

    def settle(self, content: SharedTensor, pool: Pool) -> None:
        """It has this content, which depends on these flags."""
        self._content, self.pending, self.kept, self.lazy = content, None, {}, None
        self.pool = Pool(pool.flags, settled=True)


class Made:
    """A row's result with what the backward pass may use again."""

    def __init__(self, content: SharedTensor, **kept: Any):
        self.content, self.kept = content, kept


@dataclass
class Lazy:
    """A row's result that is computed when it is looked at: a product may use what it is made of in its place.

    Attributes:
        content: computes it.
        kept: as of `Made`.
        meta: of its shape and dtype.
    """

    context: Context
    content: Callable[[], SharedTensor]
    kept: dict[str, Any]
    meta: torch.Tensor
