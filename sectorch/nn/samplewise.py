"""Whether the rows of a batch meet in a program, so that a batch may be cut into pieces: decided from shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .nodes import arguments, op_name
from .trace import CONSTANT, Trace

_EACH = (
    "relu", "relu6", "leaky_relu", "hardtanh", "abs", "sign", "square", "clamp", "clamp_min", "clamp_max", "neg",
    "dropout", "prelu",
)  # fmt: skip
"""Functions of one element at a time."""
_BATCHED = {
    "conv1d": 3, "conv2d": 4, "max_pool1d": 3, "max_pool2d": 4, "avg_pool1d": 3, "avg_pool2d": 4,
    "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_max_pool2d": 4,
}  # fmt: skip
"""Layers that keep dimension 0 apart where their input has these dimensions."""
_SUMS = ("add", "sub", "mul")
_SHAPES = ("reshape", "flatten")


def is_samplewise(program: Trace, shapes: dict[fx.Node, tuple[int, ...]] | None = None) -> bool:
    """Whether every output row depends on its own input row only.

    True only where it can be seen: from functions that are known to keep rows apart on tensors of these dimensions, and
    from shapes that broadcast no row against another. That a forward does not ask how many rows there are is seen by
    comparing the programs of two batch sizes (`same_program`).

    Args:
        shapes: of the nodes' values, where the program does not know them itself.
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
        elif at(node) and at(node)[0] == rows and _keeps_apart(program, node, at, apart, own):
            apart.add(node)
        else:
            return False
    return False


def _only_values(result: Any) -> bool:
    leaves = result if isinstance(result, (list, tuple)) else [result]
    return bool(leaves) and all(isinstance(leaf, fx.Node) for leaf in leaves)


def _keeps_apart(program: Trace, node: fx.Node, at: Any, apart: set, own: set) -> bool:
    name, x = op_name(node), node.args[0] if node.args else None
    shape = at(node)
    if name in _SUMS:
        return not node.kwargs and all(_broadcasts(o, shape, at, apart) for o in node.args)
    if name == "cat":
        parts: Any = x
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return isinstance(dim, int) and dim % len(shape) > 0 and all(p in apart for p in parts)
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
    return name == "batch_norm" and dims >= 2 and arguments(node).get("training", False) is False


def _broadcasts(operand: Any, shape: tuple[int, ...], at: Any, apart: set) -> bool:
    """Whether an operand adds to each row what is that row's, or the same to all."""
    if not isinstance(operand, fx.Node):
        return isinstance(operand, (int, float))
    mine = at(operand)
    if mine is None:
        return False
    if operand in apart:
        return len(mine) == len(shape)
    return operand.op in ("get_attr", "call_function") and (len(mine) < len(shape) or mine[0] == 1)


def same_program(p: Trace, q: Trace, grown: bool = False) -> bool:
    """Whether two programs are one: the same functions of the same arguments, but for the sizes of their batches.

    Then what is known of one holds of the other: the number of rows enters neither a factor nor a choice.

    Args:
        grown: whether public constants may follow the number of rows (`grows`).
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
            if not _same_value(a.target, b.target, p, q) and not (grown and grows(a, b, p, q) is not None):
                return False
        elif a.op == "call_function":
            sizes = op_name(a) in ("reshape", "expand")
            if a.target != b.target or not _same((a.args, a.kwargs), (b.args, b.kwargs), other, rows, sizes):
                return False
        elif not _same((a.args, a.kwargs), (b.args, b.kwargs), other, rows, False):
            return False
    return True


def _same_value(a: str, b: str, p: Trace, q: Trace) -> bool:
    if not a.startswith(CONSTANT) or not b.startswith(CONSTANT):
        return a == b
    x, y = p.values[a], q.values[b]
    return x.dtype == y.dtype and x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def grows(a: fx.Node, b: fx.Node, p: Trace, q: Trace) -> int | str | None:
    """How a public constant follows the number of rows: the dimension along which it is the same for each, or "count"
    where it holds their numbers; None where it does neither."""
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


def _same(a: Any, b: Any, other: dict, rows: tuple, sizes: bool) -> bool:
    if isinstance(a, fx.Node):
        return isinstance(b, fx.Node) and other.get(a) is b
    if isinstance(a, (tuple, list)):
        return (
            isinstance(b, (tuple, list))
            and len(a) == len(b)
            and all(_same(c, d, other, rows, sizes) for c, d in zip(a, b, strict=True))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(
            _same(a[k], b[k], other, rows, sizes) for k in a
        )  # fmt: skip
    if isinstance(a, slice):
        return isinstance(b, slice) and _same(
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
