"""Limits on model descriptions, which another party may have written to do harm.

`scalar`, `size` and `shape` check the numbers of a description. An `OperationBudget` watches the program's dry run on
shapes: it sees every operation of torch, and refuses one that would exceed the limits before it runs. A dry run
computes public values with their content, so their sizes are determined on shapes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..choreography import Phase
from ..choreography.ledger import Profile
from ..choreography.located import spare
from ..errors import ProgramError, SectorchError
from ..tensor.table import row_of

MAX_INTEGER = 1 << 31
_NO_END = (1 << 63) - 1, -(1 << 63)
"""The ends by which torch.export describes a slice without an end."""
MAX_SIZE = 1 << 40
MAX_ITEMS, MAX_DEPTH, MAX_TEXT, MAX_DIMS = 4096, 8, 256, 12
MAX_ELEMENTS = 1 << 28
"""Most elements of one value of a call."""
MAX_COUNTED = 1 << 20
"""Most rows of a call whose program holds their number."""
SAMPLE_ROWS = 64
"""A dry run may use so many rows although a call runs fewer at a time; the limits of a value are larger by as much."""
MAX_TOTAL = 1 << 42
"""Most elements of all values of a call together."""
MAX_PUBLIC_BYTES = 256 << 20
"""Most bytes of the public values of a call."""
MAX_PIECES = 1 << 14
"""Most results of one operation."""
MAX_CELLS = 1 << 16
"""Most cells of an adaptive pooling, and most time steps of a recurrent layer."""
MAX_SENT = 1 << 30
"""Most bytes of one masked weight."""
OPERATIONS, OPERATIONS_EACH, OPERATIONS_SORT, OPERATIONS_MOST = 25_000, 2_000, 1_500, 800_000
"""Operations of torch that a dry run may take: a number to begin with, more for each node and each stage of a sorting
network, and the most in all."""
FEW_ROUNDS = 128
"""The factor by which the protocols of few rounds may exceed the limits of operations and elements."""

_CELLS = ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d")
_CUTS = ("tensor_split", "chunk")
_SORTS = ("sort", "argsort", "msort", "topk")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def scalar(value: Any) -> Any:
    """Return the value if it is None, a bool, a finite float, an integer of at most 2^31 or a short string.

    Raises:
        ProgramError: a larger integer, a string of more than 256 characters, or a value of another type.
    """
    if value is None or type(value) is bool or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is int and (-MAX_INTEGER <= value <= MAX_INTEGER or value in _NO_END):
        return value
    if type(value) is str and len(value) <= MAX_TEXT:
        return value
    raise ProgramError(f"a model description holds an argument that is too large or of no kind: {str(value)[:40]!r}")


def size(value: Any) -> int:
    """Return the value if it is the length of a dimension.

    Raises:
        ProgramError: not a whole number from 0 to 2^40.
    """
    if type(value) is not int or not 0 <= value < MAX_SIZE:
        raise ProgramError(f"expected a size, got {str(value)[:40]!r}")
    return value


def shape(value: Any, most: int) -> list[int]:
    """Return the value if it is a shape of at most 12 dimensions and `most` elements.

    Raises:
        ProgramError: the value is no list, or a larger shape.
    """
    if type(value) is not list or len(value) > MAX_DIMS:
        raise ProgramError(f"a shape has at most {MAX_DIMS} sizes, got {str(value)[:40]!r}")
    sizes = [size(n) for n in value]
    if math.prod(max(1, n) for n in sizes) > most:
        raise ProgramError(f"a tensor of shape {sizes} is too large: a model has tensors of at most {most} elements")
    return sizes


def item(values: Any, at: int) -> Any:
    """Return one of the results of an operation that has several."""
    if not isinstance(values, (tuple, list)) or type(at) is not int or not -len(values) <= at < len(values):
        raise ProgramError("a model description takes an item of a value that has no such item")
    return values[at]


class OperationBudget(TorchDispatchMode):
    """Counts the operations and elements of a dry run, and refuses those beyond the limits.

    Args:
        nodes: the number of nodes of the program.
        few_rounds: whether it runs the protocols of few rounds, which take many more operations.

    Raises, from any operation inside:
        ProgramError: the operation exceeds a limit; it was not run.
    """

    def __init__(self, nodes: int, few_rounds: bool = False):
        super().__init__()
        most = min(OPERATIONS + OPERATIONS_EACH * nodes, OPERATIONS_MOST)
        self._more = FEW_ROUNDS if few_rounds else 1
        self._operations = most * self._more
        self.operations = self.largest = self.total = self.public_bytes = 0

    def step(self, node: fx.Node, compute: Callable, args: tuple, kwargs: dict) -> Any:
        """Run one node of the program; every exception becomes a `ProgramError` or is a `SectorchError` already."""
        try:
            self._look_at(node, args, kwargs)
            result = compute(*args, **kwargs)
        except SectorchError:
            raise
        except Exception as error:
            said = str(error).splitlines()[0][:160] if str(error) else ""
            raise ProgramError(f"this operation cannot run ({type(error).__name__}: {said})") from None
        return result

    def check_call(self) -> None:
        """Raise ProgramError if a call of these shapes exceeds the limits of a call."""
        if self.largest > MAX_ELEMENTS or self.total > MAX_TOTAL * self._more:
            raise ProgramError(
                f"a call of this shape has values of up to {self.largest} elements, {self.total} together; at most "
                f"{MAX_ELEMENTS} and {MAX_TOTAL * self._more} are taken on: ask with fewer rows"
            )

    def check_weights(self, profile: Profile) -> None:
        """Raise ProgramError if a masked weight is larger than a party stores."""
        sent = max((line.bytes for line in profile.ledger if line.phase == Phase.SETUP), default=0)
        if sent > MAX_SENT:
            raise ProgramError(f"the model has a weight that is sent in {sent} bytes; at most {MAX_SENT} are taken on")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        if self.operations > self._operations:
            raise ProgramError(
                f"the model takes more than {self._operations} steps; ask with fewer rows, or serve less"
            )
        if _cuts(func):
            self._count_results(func, args, kwargs)
        device = kwargs.get("device")
        if torch.device(device).type != "meta" if device is not None else not _absent(args, kwargs):
            self._make_public(func, args, kwargs)
        result = func(*args, **kwargs)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor):
                self._make(made.numel())
        return result

    def _make(self, elements: int) -> None:
        self.largest, self.total = max(self.largest, elements), self.total + elements
        if elements > MAX_ELEMENTS * SAMPLE_ROWS or self.total > MAX_TOTAL * self._more * SAMPLE_ROWS:
            raise ProgramError(
                f"the model makes a value of {elements} elements, {self.total} in all; at most {MAX_ELEMENTS} a row "
                f"are taken on"
            )

    def _count_results(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Refuse to split a tensor into more than `MAX_PIECES`."""
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        sizes, dim = args[0].shape, given.get("dim", 0)
        if not sizes or type(dim) is not int or not -len(sizes) <= dim < len(sizes):
            return  # torch says what is wrong
        length, each = sizes[dim], given.get("split_size", 1)
        if isinstance(each, (list, tuple)) or "split_sizes" in given:
            return  # a list has a bound of its own
        if type(each) is int and length // max(1, each) > MAX_PIECES:
            raise ProgramError(f"the model cuts a tensor into {length // max(1, each)} parts; at most {MAX_PIECES}")

    def _make_public(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Determine the size of a public value on shapes, before it is computed."""
        packet = func._schema.name.partition("::")[2]
        if packet in ("_local_scalar_dense", "item", "equal", "is_nonzero"):
            return
        # Their sizes depend on contents, so they do not run on shapes: a bound that follows from the operands.
        if packet == "nonzero":
            return self._take(args[0].numel() * max(1, args[0].dim()) * 8)
        if packet == "masked_select":
            numel = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
            return self._take(numel * args[0].element_size())
        if packet == "repeat_interleave" and func._overloadname == "Tensor":
            return self._take(8 * int(args[0].to(torch.float64).clamp(min=0).sum()))
        if packet in ("index", "index_put", "index_put_"):
            args = _indexed(*args)
        to_meta = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x
        shapes, named = pytree.tree_map(to_meta, (args, kwargs))
        if any(a.name == "device" for a in func._schema.arguments):
            named = {**named, "device": torch.device("meta")}
        result = func(*shapes, **named)
        views = [r.alias_info is not None for r in func._schema.returns]
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor):
                self._take(0 if any(views) else made.numel() * made.element_size())
        return None

    def _take(self, count: int) -> None:
        self.public_bytes += count
        if self.public_bytes > MAX_PUBLIC_BYTES:
            raise ProgramError(f"the model's public values take more than {MAX_PUBLIC_BYTES} bytes")

    def _look_at(self, node: fx.Node, args: tuple, kwargs: dict) -> None:
        """Check what an operation allocates in Python, before torch sees it: lists of results, cells or steps."""
        row = row_of(getattr(node.target, "func", node.target))  # of an operation in place, what it writes
        name = "" if row is None else row.name
        if name not in (*_CELLS, *_CUTS, *_RECURRENT, *_SORTS):
            return
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        sizes = [x.shape for x in leaves if isinstance(x, torch.Tensor)]
        if name in _SORTS:
            bits = max((max(s, default=1) for s in sizes), default=1).bit_length()
            # A bitonic network on 2^b values has b (b + 1) / 2 stages.
            more = OPERATIONS_SORT * bits * (bits + 1) // 2
            self._operations = min(self._operations + more * self._more, OPERATIONS_MOST * self._more)
            return
        numbers = [x for x in leaves if type(x) is int]
        if name in _CUTS:  # torch makes room for so many results before it makes the first
            if len(sizes) > 1 or max(map(abs, numbers), default=0) > MAX_PIECES:
                raise ProgramError(f"the model asks '{name}' for more than {MAX_PIECES} parts, or for no fixed number")
            return
        if name in _CELLS:
            sides = [*(abs(n) for n in numbers), *(max(sizes[0][-2:], default=1) for x in leaves if x is None)]
            asked = max(sides, default=1) ** 2 if len(sides) == 1 else math.prod(max(1, n) for n in sides)
        else:
            asked = max((*(n for s in sizes[:1] for n in s[:2]), *numbers), default=1)
        if asked > MAX_CELLS:
            raise ProgramError(f"the model asks '{name}' for {asked} cells or steps; at most {MAX_CELLS}")


spare(OperationBudget.__torch_dispatch__)


@functools.cache
def _cuts(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return any(word in name for word in ("split", "unbind", "chunk"))


def _absent(args: tuple, kwargs: dict) -> bool:
    """Whether a tensor among the arguments has no content."""
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in args):
        return True
    return any(isinstance(x, torch.Tensor) and x.is_meta for x in pytree.arg_tree_leaves(*args, **kwargs))


def _indexed(values: Any, indices: list, *rest: Any) -> tuple:
    """Replace masks among the indices by the positions that they select, whose number is known."""
    places: list[Any] = []
    for index in indices:
        masked = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        places += index.nonzero().unbind(1) if masked else [index]
    return (values, places, *rest)
