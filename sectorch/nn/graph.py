"""A module's graph: functions on values, the layer and line that each comes from, and the loop that runs them.

`nn/capture.py` records a graph by running the module, `serving/description.py` reads one from a description,
`nn/passes.py` changes the work in one, and `nn/graph_cache.py` keeps them by the shape of the inputs.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..errors import (
    FixedPointRangeError,
    KeyAgreementError,
    MaterialError,
    NetworkError,
    RangeExceededError,
    SectorchError,
    ShapeError,
)
from ..ops.indexing import leaf_of_tree
from ..ops.pooling import relu_of_max_pool2d, waits_for_relu
from ..tensor.shared import BY_SIZE, BY_ZERO, LEFT_RANGE
from ..tensor.table import HANDLER, row_of

# What a node computes: the operation's name in the dispatch table, and its arguments by name.


_ATEN_NORM = ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps")
ARGUMENTS = {
    "linear": ("input", "weight", "bias"),
    "conv1d": ("input", "weight", "bias"),
    "conv2d": ("input", "weight", "bias"),
    "batch_norm": ("input", "mean", "var", "weight", "bias", "training", "momentum", "eps"),
    "avg_pool2d": (
        "input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override",
    ),
    "dropout": ("input", "p", "training"),
}  # fmt: skip
_RENAMED = {"running_mean": "mean", "running_var": "var", "train": "training"}


def op_name(node: fx.Node) -> str | None:
    """The table's name for what a node computes, or None."""
    if node.op != "call_function":
        return None
    row = row_of(function_of(node.target))
    return row.name if row else None


def function_of(target: Any) -> Any:
    """The torch function of an exported graph's operation; anything else as it is."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    base = target._schema.name.rpartition("::")[2]
    found = (getattr(place, base, None) for place in (torch, F, torch.Tensor))
    return next((f for f in found if f is not None and row_of(f) is not None), target)


def arguments(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name, for the operations of `ARGUMENTS`."""
    name = op_name(node)
    names = ARGUMENTS[name or ""]
    if name == "batch_norm" and node.target is not F.batch_norm:
        names = _ATEN_NORM
    given = dict(zip(names, node.args, strict=False))
    return given | {_RENAMED.get(k, k): v for k, v in node.kwargs.items()}


def name_of(func: Callable) -> str:
    """A torch function's name for a node."""
    name = getattr(func, "__name__", "call")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "property")
    return name.strip("_") or "call"


# Where a node comes from: the layer and the line of the model, for errors and tables.


_TORCH = Path(torch.__file__).parent
_LAYERS = f"{_TORCH / 'nn' / 'modules'}{os.sep}"
_CALL = str(_TORCH / "nn" / "modules" / "module.py")
_HERE = Path(__file__).parent
_SKIPPED = (
    f"{_TORCH}{os.sep}", __file__, str(_HERE / "capture.py"), f"{_HERE.with_name('tensor')}{os.sep}",
    f"{_HERE.with_name('ops')}{os.sep}", "<",
)  # fmt: skip
"""How the file names begin of frames that are no lines of the model: torch's, those of the dispatch, of operations and
of the recorder, and generated code."""


@dataclass(frozen=True)
class SourceLocation:
    """The layer and the line of the model that were running when a node was recorded.

    Attributes:
        layer, kind: path and type of the layer of torch's own that called the function; empty in a model's own code.
        module: path of the innermost module, of whatever kind.
        source: file and line of the model.
    """

    layer: str = ""
    kind: str = ""
    module: str = ""
    source: str = ""

    @staticmethod
    def now(layers: dict[int, str], innermost: FrameType | None = None) -> SourceLocation:
        """The location of the frames that are running now, out to the call of the whole module.

        Args:
            layers: path by id of each module.
            innermost: the frame that raised, for an error that has left its frames.
        """
        frame, source, owner, layer = innermost or sys._getframe(1), "", None, False
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _CALL and code.co_name == "_call_impl":
                module = frame.f_locals.get("self")
                if id(module) in layers:
                    if owner is None:  # no code of the model's own on the way: a layer of torch's
                        owner, layer = module, not source
                    if not layers[id(module)]:
                        break
            elif not source and not code.co_filename.startswith(_SKIPPED):
                source = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        path = "" if owner is None else layers[id(owner)]
        if not layer:
            return SourceLocation(module=path, source=source)
        return SourceLocation(path, type(owner).__name__, path, source)

    def text(self, name: str = "") -> str:
        """The name and type of the layer, or the name of the operation, and the line, for people."""
        if self.kind:
            name = f"'{self.layer}' ({self.kind})" if self.layer else self.kind
        return " ".join(["layer", *([name] if name else []), *([f"at {self.source}"] if self.source else [])])


def place_of(node: fx.Node) -> str:
    """The layer's name and type and the line of the model, for people."""
    where = node.meta.get("where")
    return SourceLocation().text(node.name) if where is None else where.text(node.name)


def raise_located(error: SectorchError, place: str) -> NoReturn:
    """Raise the error with the place before its text, or as it is if it has a place or comes from no layer.

    The error is never its own cause: it would keep itself alive, and with it the frames that hold shares.
    """
    if not place or error.layer or isinstance(error, (NetworkError, KeyAgreementError, MaterialError)):
        raise error
    named = type(error)(f"{place}: {error}")
    named.layer = place
    if isinstance(error, FixedPointRangeError) and isinstance(named, FixedPointRangeError):
        named.needs = error.needs
    raise named from error


_ABOVE_ZERO = (
    "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "pow", "xlogy", "logit", "atanh", "acosh"
)  # fmt: skip
"""Functions whose argument, or a part of it, has to be positive, or not near zero."""


@contextmanager
def range_advice(program: Any) -> Iterator[None]:
    """Name in the text of a range error the lines of the program where a guard may help.

    Args:
        program: the `Trace` that was run; None where the module runs operation by operation.
    """
    try:
        yield
    except RangeExceededError:
        if program is None:
            raise
        places = [
            f"{op_name(node)} in {place_of(node)}"
            for node in program.graph.nodes
            if op_name(node) in _ABOVE_ZERO and any(isinstance(a, fx.Node) for a in node.args[-1:])
        ]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        named = f"; {BY_ZERO} (here: {', '.join(places[:3])}{more})" if places else ""
        raise RangeExceededError(LEFT_RANGE + BY_SIZE + named) from None


@contextmanager
def layers_refusals(layers: dict[int, str]) -> Iterator[None]:
    """Turn the errors of torch's own layers into errors that name the layer.

    BatchNorm checks the number of dimensions before it calls a function, and a recurrent layer the size of a state.
    Errors of the model's own code stay as they are.

    Args:
        layers: path by id of each module.

    Raises:
        ShapeError: in torch's words.
    """
    try:
        yield
    except (ValueError, RuntimeError, AssertionError) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or isinstance(error, SectorchError):
            raise
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LAYERS) or file == _CALL:
            raise
        raise ShapeError(f"{SourceLocation.now(layers, trace.tb_frame).text()}: {error}") from None


@contextmanager
def located_errors() -> Iterator[None]:
    """Put the place in the model before the text of errors of a program's steps."""
    try:
        yield
    except SectorchError as error:
        if not error.place:
            raise
        raise_located(error, error.place)


# The graph and the loop that runs it.


CONSTANT, FOLDED = "constant ", "folded "
"""Prefixes of the names of public constants, and of weights that a pass made."""


@dataclass
class Trace:
    """A graph of torch functions on values, and the tensors that its `get_attr` nodes name.

    Attributes:
        graph: a placeholder for each secret input; call_function nodes; the output is the list of the result's leaves.
        values: plain weights in float64 (or without content where their owner is absent), and public constants.
        spec: how the result's leaves make the result; None where the output is the result itself.
        rows: the first dimension of the inputs; None where they share none, or where the program holds for any.
        dtypes: by name, the dtype that a weight has for the model.
        writes_inputs: whether the forward writes into memory of its inputs.

    A node's meta["value"] names the node of the recording whose value it computes, or is None after a pass that
    changes it; meta["where"] is its `SourceLocation`.
    """

    graph: fx.Graph
    values: dict[str, torch.Tensor]
    spec: pytree.TreeSpec | None = None
    rows: int | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    writes_inputs: bool = False

    def copy(self) -> Trace:
        """A copy, which a pass may change."""
        graph, copies = fx.Graph(), {}
        out = graph.graph_copy(self.graph, copies)
        graph.output(out)
        for old, new in copies.items():
            new.name, new.meta = old.name, dict(old.meta)
        return Trace(graph, dict(self.values), self.spec, self.rows, dict(self.dtypes), self.writes_inputs)

    @property
    def secrets(self) -> list[str]:
        """Names of the weights that the graph reads."""
        names = dict.fromkeys(n.target for n in self.graph.nodes if n.op == "get_attr")
        return [name for name in names if not name.startswith(CONSTANT) and self.values[name].is_floating_point()]


def run(program: Trace, values: Mapping[str, Any], inputs: Sequence[Any], step: Callable | None = None) -> Any:
    """Run a program; a value is dropped after its last use, and an error names the layer and the model's line.

    Args:
        values: the tensors that the program names.
        inputs: the secret inputs, in the order of the placeholders.
        step: called as step(node, compute, args, kwargs) in place of compute(*args, **kwargs), to observe a run.
    """
    made: dict[fx.Node, Any] = {}
    nodes, pooled = list(program.graph.nodes), _pools_before_relu(program)
    uses = {node: len(node.users) for node in nodes}
    given = iter(inputs)
    for node in nodes:
        args = map_arg(node.args, made.__getitem__)
        kwargs = map_arg(node.kwargs, made.__getitem__)
        try:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "get_attr":
                made[node] = values[node.target]
            elif node.op == "output":
                return args[0] if program.spec is None else pytree.tree_unflatten(list(args[0]), program.spec)
            # A max-pooling that only a ReLU reads waits for it: both come from one opening.
            elif node in pooled and waits_for_relu(*args):
                made[node] = _DeferredPool(args, kwargs)
            else:
                compute = node.target
                if args and type(args[0]) is _DeferredPool:
                    compute, args, kwargs = relu_of_max_pool2d, args[0].args, args[0].kwargs
                made[node] = compute(*args, **kwargs) if step is None else step(node, compute, args, kwargs)
        except SectorchError as error:
            raise_located(error, place_of(node))
        for used in node.all_input_nodes:
            uses[used] -= 1
            if not uses[used]:
                del made[used]
    return None


@dataclass(frozen=True)
class _DeferredPool:
    """The arguments of a max-pooling that is computed together with its ReLU."""

    args: tuple
    kwargs: dict


def _pools_before_relu(program: Trace) -> set[fx.Node]:
    """The max-poolings whose only reader is a ReLU."""
    found = set()
    for node in program.graph.nodes:
        pool = node.args[0] if op_name(node) == "relu" and node.args else None
        if isinstance(pool, fx.Node) and op_name(pool) == "max_pool2d" and len(pool.users) == 1:
            found.add(pool)
    return found


class OutOfPlace:
    """A torch function that writes into its first argument, as a function that returns the result instead."""

    def __init__(self, func: Callable):
        self.func = func
        self.__name__ = getattr(func, "__name__", "in_place")

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = x.clone()
        self.func(x, *args, **kwargs)
        return x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutOfPlace) and other.func == self.func

    def __hash__(self) -> int:
        return hash(("out of place", self.func))


@functools.cache
def functional_form(func: Callable) -> Callable | None:
    """The function of the same row and the same arguments that gives a new tensor, or None."""
    row, name = row_of(func), getattr(func, "__name__", "")
    plain = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    keys = [k for k in (row.keys if row else ()) if HANDLER[k] is HANDLER[func] and getattr(k, "__name__", "") == plain]
    return keys[0] if keys else None


# Whether each row of a program's result depends on its own row of the inputs only, so that a batch may be split. This
# is decided from shapes.


_EACH = (
    "relu", "relu6", "leaky_relu", "hardtanh", "abs", "sign", "square", "clamp", "clamp_min", "clamp_max", "neg",
    "dropout", "prelu", "to",
)  # fmt: skip
"""Functions of one element at a time."""
_BATCHED = {
    "conv1d": 3, "conv2d": 4, "max_pool1d": 3, "max_pool2d": 4, "avg_pool1d": 3, "avg_pool2d": 4,
    "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_max_pool2d": 4,
}  # fmt: skip
"""Layers that treat dimension 0 as a batch where their input has this number of dimensions."""
_SUMS = ("add", "sub", "mul", "ge", "gt", "le", "lt")
_SHAPES = ("reshape", "flatten")


def is_samplewise(program: Trace, shapes: dict[fx.Node, tuple[int, ...]] | None = None) -> bool:
    """Whether every output row depends on its own input row only.

    It is True only if all functions are known to compute row by row on tensors of these dimensions, and no shape
    broadcasts one row against another. Whether the forward uses the number of rows is a question for `same_program`,
    which compares the programs of two batch sizes.

    Args:
        shapes: the shapes of the nodes' values, where the program does not have them itself.
    """
    known = dict(shapes or {})
    known.update((n, tuple(program.values[n.target].shape)) for n in program.graph.nodes if n.op == "get_attr")

    def at(node: fx.Node) -> Any:
        return known.get(node, node.meta.get("shape"))

    rows: int | None = None
    apart: set[fx.Node] = set()  # rows depend on their own input row
    own: set[fx.Node] = set()  # depends on no input
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if not at(node) or rows not in (None, at(node)[0]):
                return False
            rows = at(node)[0]
            apart.add(node)
        elif node.op == "get_attr":
            own.add(node)
        elif node.op == "output":
            return rows is not None and all(n in apart for n in node.all_input_nodes) and _only_values(node.args[0])
        elif all(n in own for n in node.all_input_nodes):
            own.add(node)
        elif at(node) and at(node)[0] == rows and _keeps_rows_apart(node, at, apart, own):
            apart.add(node)
        else:
            return False
    return False


def _only_values(result: Any) -> bool:
    leaves = result if isinstance(result, (list, tuple)) else [result]
    return bool(leaves) and all(isinstance(leaf, fx.Node) for leaf in leaves)


def _keeps_rows_apart(node: fx.Node, at: Any, apart: set, own: set) -> bool:
    name, x = op_name(node), node.args[0] if node.args else None
    shape = at(node)
    if name in _SUMS:
        return not node.kwargs and all(_broadcasts(o, shape, at, apart) for o in node.args)
    if name == "cat":
        parts: Any = x
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return isinstance(dim, int) and dim % len(shape) > 0 and all(p in apart for p in parts)
    if name == "einsum" and len(node.args) == 3:
        first, second, result = re.split(r",|->", str(x)) if re.fullmatch(r"[a-z]+,[a-z]+->[a-z]+", str(x)) else "..."
        mine = node.args[1] in apart and node.args[2] in own
        return mine and first[0] == result[0] and first[0] not in first[1:] + second
    if x not in apart:
        return False
    dims, others = len(at(x)), [n for n in node.all_input_nodes if n is not x]
    if name in _SHAPES:  # row-major: equal first dimensions, so a row stays a row
        return at(x)[0] == shape[0] and all(n not in apart for n in others)
    if any(n not in own for n in others):
        return False
    if name in _EACH:
        return at(x) == shape
    if name in _BATCHED:
        return dims == _BATCHED[name]
    if name == "linear":
        return dims >= 2
    if name == "one_hot":  # of a tree's decisions, whose leaves have no dimension of the rows
        return node.target is leaf_of_tree and len(at(node.args[1])) <= dims
    if name == "pad":
        widths = _second(node, "pad")
        return isinstance(widths, (list, tuple)) and len(widths) <= 2 * (dims - 1)
    if name in ("index_select", "sum", "squeeze", "unsqueeze", "argmax"):
        return _other_dimension(_second(node, "dim"), dims + (name == "unsqueeze"))
    if name == "div":
        return isinstance(node.args[1], (int, float)) and not node.kwargs
    return name == "batch_norm" and dims >= 2 and arguments(node).get("training", False) is False


def _second(node: fx.Node, name: str) -> Any:
    """A function's second argument, which may be given by name."""
    return node.args[1] if len(node.args) > 1 else node.kwargs.get(name)


def _other_dimension(dim: Any, dims: int) -> bool:
    """Whether a function's dimensions are named and none is that of the rows."""
    named = dim if isinstance(dim, (tuple, list)) else (dim,)
    return bool(named) and all(isinstance(d, int) and d % dims > 0 for d in named)


def _broadcasts(operand: Any, shape: tuple[int, ...], at: Any, apart: set) -> bool:
    """Whether an operand gives each row its own value, or the same value to all rows."""
    if not isinstance(operand, fx.Node):
        return isinstance(operand, (int, float))
    mine = at(operand)
    if mine is None:
        return False
    if operand in apart:
        return len(mine) == len(shape)
    return operand.op in ("get_attr", "call_function") and (len(mine) < len(shape) or mine[0] == 1)


def same_program(p: Trace, q: Trace, grown: bool = False) -> bool:
    """Whether two programs have the same functions and arguments, apart from the sizes of their batches.

    What is known of one then holds for the other: the number of rows enters neither a factor nor a choice.

    Args:
        grown: whether public constants may follow the number of rows (`row_growth`).
    """
    nodes, others = list(p.graph.nodes), list(q.graph.nodes)
    if len(nodes) != len(others) or p.spec != q.spec:
        return False
    other = dict(zip(nodes, others, strict=True))
    rows = (p.rows, q.rows)
    for a, b in other.items():
        if a.op != b.op or len(a.users) != len(b.users):
            return False
        if a.op == "get_attr":
            if not _same_value(a.target, b.target, p, q) and not (grown and row_growth(a, b, p, q) is not None):
                return False
        elif a.op == "call_function":
            sizes = op_name(a) in ("reshape", "expand")
            if a.target != b.target or not _same_argument((a.args, a.kwargs), (b.args, b.kwargs), other, rows, sizes):
                return False
        elif not _same_argument((a.args, a.kwargs), (b.args, b.kwargs), other, rows, False):
            return False
    return True


def _same_value(a: str, b: str, p: Trace, q: Trace) -> bool:
    if not a.startswith(CONSTANT) or not b.startswith(CONSTANT):
        return a == b
    x, y = p.values[a], q.values[b]
    return x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def row_growth(a: fx.Node, b: fx.Node, p: Trace, q: Trace) -> int | str | None:
    """How a public constant follows the number of rows.

    Returns:
        the dimension along which it repeats one value for each row; "count" if it holds the numbers of the rows; None
        if it does neither.
    """
    one, other = str(a.target), str(b.target)
    if not one.startswith(CONSTANT) or not other.startswith(CONSTANT):
        return None
    x, y = p.values[one], q.values[other]
    if x.dim() != y.dim() or x.dtype != y.dtype:
        return None
    differ = [d for d in range(x.dim()) if x.shape[d] != y.shape[d]]
    if len(differ) != 1 or (x.shape[differ[0]], y.shape[differ[0]]) != (p.rows, q.rows):
        return None
    one = x.narrow(differ[0], 0, 1)
    if torch.equal(x, one.expand_as(x)) and torch.equal(y, one.expand_as(y)):
        return differ[0]
    counted = all(v.numel() == len(v) and torch.equal(v.flatten(), torch.arange(len(v))) for v in (x, y))
    return "count" if counted and x.dtype == torch.int64 else None


def _same_argument(a: Any, b: Any, other: dict, rows: tuple, sizes: bool) -> bool:
    if isinstance(a, fx.Node):
        return isinstance(b, fx.Node) and other.get(a) is b
    if isinstance(a, (tuple, list)):
        return (
            isinstance(b, (tuple, list))
            and len(a) == len(b)
            and all(_same_argument(c, d, other, rows, sizes) for c, d in zip(a, b, strict=True))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(
            _same_argument(a[k], b[k], other, rows, sizes) for k in a
        )  # fmt: skip
    if isinstance(a, slice):
        return isinstance(b, slice) and _same_argument(
            (a.start, a.stop, a.step), (b.start, b.stop, b.step), other, rows, sizes
        )  # fmt: skip
    if type(a) is not type(b):
        return False
    if type(a) is int and sizes and None not in rows and rows[0] and a % rows[0] == 0 and a * rows[1] == b * rows[0]:
        return True  # as many times the number of rows in both
    try:
        return a is b or bool(a == b) or (a != a and b != b)
    except Exception:
        return False
