"""Tensors that stay in shares between the calls of a module: as results of one program, and as inputs of another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..backend import Value
from ..choreography import Party
from ..errors import FixedPointRangeError, ProgramError
from ..ops.common import settled
from ..ring import HEADROOM_BITS
from ..session import Session
from ..tensor import Scheme, SharedTensor
from ..tensor.infinity import Infinite, exactly
from ..tensor.table import Context


@dataclass(frozen=True)
class Held:
    """What everybody knows of a tensor in shares, beside its shape and dtype.

    Attributes:
        scale_bits, bound, whole_bits: as of `SharedTensor`.
        infinite: what may stand for infinity, at whatever positions.
    """

    scale_bits: int
    bound: float | None
    whole_bits: int
    infinite: Infinite | None = None

    @classmethod
    def of(cls, x: SharedTensor) -> Held:
        infinite = x.infinite
        if infinite is not None:
            if infinite.unchecked:
                raise FixedPointRangeError(
                    "a tensor that holds infinities, and numbers added to them, goes from one program to another; take "
                    "torch.nan_to_num of it first, or fill with a number in the range"
                )
            infinite = replace(infinite, at=None, certain=False)
        return cls(x.scale_bits, x.bound, x.whole_bits, infinite)

    @property
    def said(self) -> tuple[int, float | None, int]:
        """As a description has it.

        Raises:
            ProgramError: it may hold what stands for infinity, of which no description says anything.
        """
        if self.infinite is not None:
            raise ProgramError("a tensor that may hold infinities does not stay between calls of a served model")
        return self.scale_bits, self.bound, self.whole_bits

    @classmethod
    def read(cls, said: Any) -> Held:
        """What a description says.

        Raises:
            ProgramError: it is none.
        """
        if said is None or not isinstance(said, list) or [*map(type, said)][::2] != [int, int] or len(said) != 3:
            raise ProgramError("a model description does not say what is known of a tensor in shares")
        scale_bits, bound, whole_bits = said
        fits = bound is None or (type(bound) in (int, float) and 0 <= bound < 2.0**HEADROOM_BITS)
        if not (fits and 0 <= scale_bits <= HEADROOM_BITS and abs(whole_bits) <= 2 * HEADROOM_BITS):
            raise ProgramError("a model description holds a tensor in shares that is not in the ring")
        return cls(scale_bits, bound, whole_bits)

    def tensor(self, shares: Value, session: Session, party: Party, scheme: Scheme, dtype: torch.dtype) -> SharedTensor:
        """The tensor of these shares."""
        made = SharedTensor(shares, self.scale_bits, session, party, scheme, dtype, self.bound)
        made.whole_bits, made.infinite = self.whole_bits, self.infinite
        return made

    def again(self, name: str, x: torch.Tensor, session: Session, party: Party, scheme: Scheme) -> SharedTensor:
        """In a call on shapes: a tensor of an earlier call, of which each party brings what it holds."""
        half = torch.empty(x.shape, dtype=torch.int64, device="meta")
        shares = session.backend(session.net(party), scheme).again(name, (half, half))
        return self.tensor(shares, session, party, scheme, x.dtype)


class Kept(NamedTuple):
    """A tensor of a program's results that nobody learns: what each party holds of it, and what all know."""

    halves: tuple[torch.Tensor, ...]
    held: Held
    dtype: torch.dtype


class Staying(NamedTuple):
    """A program's results in shares, and the flags on which all of them depend, joined as far as they can be; the
    results that Q learns as `Opening`s, which then hold all flags."""

    results: Any
    flags: list[tuple[torch.Tensor, ...]]


def staying(outputs: Any, learned: int = 0) -> Staying:
    """In a call: its results as what the parties keep. No message, but for what rounds and checks a result.

    A tensor of many fraction bits is rounded as a factor of a product is, and held to the activation limit: what takes
    it next need not.

    Args:
        learned: so many of the results, the first ones, Q learns, and with them whether all of the call was in range.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    ready = [_ready(y) if isinstance(y, SharedTensor) and at >= learned else y for at, y in enumerate(leaves)]
    leaves = opened(ready, learned)
    raised = dict.fromkeys(flag for y in leaves if isinstance(y, SharedTensor) for flag in y.flags)
    kept, flags = [_kept(y) if isinstance(y, SharedTensor) else y for y in leaves], []
    for dims in sorted({len(flag.shape) for flag in raised}):
        backend = next(y.backend for y in leaves if isinstance(y, SharedTensor))
        alike = [flag for flag in raised if len(flag.shape) == dims]
        flags.append(backend.kept(backend.each(_joined, *alike)))
    return Staying(pytree.tree_unflatten(kept, spec), flags)


def opened(results: list[Any], learned: int) -> list[Any]:
    """The first results revealed to Q, not yet looked at, with the flags of all; the others then depend on none, but
    where Q's word that it has looked, and goes on, is not enough."""
    if not learned:
        return results
    flags = tuple(dict.fromkeys(flag for y in results if isinstance(y, SharedTensor) for flag in y.flags))
    results = [
        _flagged(y, flags if at < learned or y.scheme.verified else ()) if isinstance(y, SharedTensor) else y
        for at, y in enumerate(results)
    ]
    return [y.open() if isinstance(y, SharedTensor) and at < learned else y for at, y in enumerate(results)]


def shown(outputs: Any, learned: int) -> Any:
    """A tree of results, of which Q learns the first ones, as `opened`."""
    leaves, spec = pytree.tree_flatten(outputs)
    return pytree.tree_unflatten(opened(leaves, learned), spec)


def _flagged(y: SharedTensor, flags: tuple[Value, ...]) -> SharedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        made = y.like(y.shares, bound=y.bound, dtype=y.dtype)
    made.whole_bits, made.infinite, made.flags = y.whole_bits, y.infinite, flags
    return made


def _joined(*flags: torch.Tensor) -> torch.Tensor:
    return torch.cat(flags, -1)


def _ready(y: SharedTensor) -> SharedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        dtype = y.dtype
    y = exactly(y)
    raised = len(y.session.net(y.party).raised)
    most = None if y.infinite is None else 2 * y.infinite.size
    made = settled(Context(y.session, y.party, y.scheme), y, most=most)
    if made is y:
        return y
    made = made.like(made.shares, bound=made.bound, dtype=dtype)
    made.infinite = y.infinite
    made.flags = (*y.flags, *y.session.net(y.party).raised[raised:])
    return made


def _kept(y: SharedTensor) -> Kept:
    with torch._C.DisableTorchFunctionSubclass():
        return Kept(y.backend.kept(y.shares), Held.of(y), y.dtype)


def as_shared(staying: Staying, given: list[SharedTensor], session: Session, party: Party, scheme: Scheme) -> Any:
    """The results of a run as SharedTensors, which depend on what the program checked and on what its inputs do.

    Args:
        given: those of the inputs that were shared before.
    """
    backend = session.backend(session.setup(party), scheme)
    flags = [backend.again("flags", halves) for halves in staying.flags]
    flags += dict.fromkeys(flag for x in given for flag in x.flags)

    def shared(y: Any) -> Any:
        if not isinstance(y, Kept):
            return y
        made = y.held.tensor(backend.again("result", y.halves), session, party, scheme, y.dtype)
        made.flags = tuple(flags)
        return made

    return pytree.tree_map(shared, staying.results, is_leaf=lambda y: isinstance(y, Kept))
