"""Graph passes: each reduces the work and keeps the values.

- `fold_batchnorm`: a BatchNorm after a convolution or linear layer becomes part of it (A's own arithmetic).
- `pool_before_relu`: max-pool and ReLU commute; pooling first leaves a fraction of the activations to the ReLU, which
  then truncates them for free.
- `fold_scales`: a number that multiplies, and the odd divisor of an average pool, move into the weights of a layer
  before or after; what is left is a power of two, which costs little. No weight becomes smaller by it: the last place
  of the weights stays, and the result's error with it.
- `drop_identities`: dropout in evaluation mode, Identity.

A pass works on a program of functions on values (`nn/graph.py`), so it sees who reads a tensor and who reads a weight.
A folded weight is a new one, named by what it was made of: another reader keeps the old one, and the same folding for
another shape of input has the same name, so that it is masked and sent once. Where a node's shape is not known, passes
that need it leave it alone. The passes are checked on numbers before the program is used (`nn/graph_cache.py`).

One opening for several uses is no pass: `mpc/star/masking.py` opens the same shares once in a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from .graph import ARGUMENTS, CONSTANT, FOLDED, Trace, arguments, function_of, op_name

_MAX_POOLS = ("max_pool1d", "max_pool2d", "adaptive_max_pool2d")
_LINEAR = {"linear": None, "conv1d": 3, "conv2d": 4}
"""Layers whose weights can take a factor, and the number of dimensions of their batches."""


def optimise(program: Trace) -> Trace:
    """A copy of a program with all passes applied, in order."""
    return [program, *optimize_passes(program)][-1]


def optimize_passes(program: Trace) -> Iterator[Trace]:
    """The program after each of the passes in turn."""
    for name in PASSES:
        program = program.copy()
        with torch.no_grad():
            globals()[name](program)
        program.graph.lint()
        used = {n.target for n in program.graph.nodes if n.op == "get_attr"}
        program.values = {k: v for k, v in program.values.items() if k in used}
        yield program


PASSES = ("drop_identities", "fold_batchnorm", "fold_scales", "pool_before_relu")


def drop_identities(program: Trace) -> None:
    """Remove nodes that pass their input through."""
    for node in list(program.graph.nodes):
        name = op_name(node)
        if name != "dropout":
            continue
        given = arguments(node)
        if given.get("training", True) is False and not given.get("inplace") and _is_value(given.get("input")):
            _replace(program, node, given["input"])


def _is_value(x: Any) -> bool:
    """Whether a node is a value that is computed, and no weight or constant."""
    return isinstance(x, fx.Node) and x.op in ("placeholder", "call_function")


def _replace(program: Trace, node: fx.Node, by: fx.Node) -> None:
    """Replace a node by another one in all its readers."""
    node.replace_all_uses_with(by)
    program.graph.erase_node(node)
    _tidy(program.graph)


def _tidy(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _weight(program: Trace, x: Any) -> str | None:
    """The name of a weight that a node gives as it is, or None."""
    if not isinstance(x, fx.Node) or x.op != "get_attr":
        return None
    name = str(x.target)
    return None if name.startswith(CONSTANT) or not program.values[name].is_floating_point() else name


class _Layer:
    """A convolution or linear layer that reads a weight, and perhaps a bias, as they are."""

    def __init__(self, program: Trace, node: fx.Node):
        self.program, self.node, given = program, node, arguments(node)
        weight = _weight(program, given.get("weight"))
        self.source, self.weight = given.get("input"), weight or ""
        bias = given.get("bias")
        self.bias = _weight(program, bias)
        self.has_plain_weights = (
            weight is not None and (bias is None or self.bias is not None) and _is_value(self.source)
        )

    def set_weights(self, made_of: str, change: Callable) -> None:
        """Give the layer the weights `change(weight, bias)`, which `made_of` names; other readers keep the old ones."""
        program, node = self.program, self.node
        values = program.values
        before = values[self.weight], None if self.bias is None else values[self.bias]
        weight, bias = change(*before)
        named = arguments(node)
        made = {"weight": (self.weight, weight), "bias": (self.bias or f"no bias of {self.weight}", bias)}
        for which, (old, value) in made.items():
            if value is None or any(value is b for b in before):
                continue
            name = f"{FOLDED}{old.removeprefix(FOLDED)} {made_of}"
            values[name] = value
            program.dtypes[name] = program.dtypes.get(old if old in values else self.weight, torch.float32)
            with program.graph.inserting_before(node):
                named[which] = program.graph.create_node("get_attr", name, (), {})
        rest = node.args[3:]
        node.args = (self.source, named["weight"], named.get("bias"), *rest)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("input", "weight", "bias")}
        _tidy(program.graph)


def _layer(program: Trace, node: Any) -> _Layer | None:
    """The layer that a node is, where its weights can take a factor and its input is a whole batch."""
    if not isinstance(node, fx.Node) or op_name(node) not in _LINEAR:
        return None
    layer = _Layer(program, node)
    return layer if layer.has_plain_weights else None


def _dims(node: fx.Node) -> int | None:
    shape = node.meta.get("shape")
    return None if shape is None else len(shape)


def fold_batchnorm(program: Trace) -> None:
    """Fold an evaluation-mode BatchNorm into the convolution or linear layer that feeds it alone.

    BatchNorm's features are dimension 1, and so must the layer's be: those of a linear layer are the last.
    """
    for node in list(program.graph.nodes):
        if op_name(node) != "batch_norm":
            continue
        given = arguments(node)
        before: Any = given.get("input")
        layer = _layer(program, before)
        if layer is None or len(before.users) > 1 or given.get("training", False) is not False:
            continue
        dims = _LINEAR[op_name(before) or ""] or 2
        if _dims(before) != dims:
            continue
        named = [given.get(k) for k in ("mean", "var", "weight", "bias")]
        names = [_weight(program, n) for n in named]
        if names[0] is None or names[1] is None:
            continue
        if any(n is not None and name is None for n, name in zip(named, names, strict=True)):
            continue
        eps = float(given.get("eps", 1e-5))
        mean, var, weight, bias = (None if name is None else program.values[name] for name in names)
        layer.set_weights(f"with {names} {eps!r}", lambda w, b: _normalised(w, b, mean, var, weight, bias, eps))
        before.meta["value"] = node.meta.get("value")
        _replace(program, node, before)


def _normalised(w, b, mean, var, weight, bias, eps):
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    b = (0 if b is None else b) - mean
    return w * scale.reshape(-1, *[1] * (w.dim() - 1)), b * scale + (0 if bias is None else bias)


def pool_before_relu(program: Trace) -> None:
    """relu -> max_pool becomes max_pool -> relu where nothing else reads the ReLU."""
    for relu in list(program.graph.nodes):
        if op_name(relu) != "relu" or len(relu.users) != 1:
            continue
        pool = next(iter(relu.users))
        if op_name(pool) not in _MAX_POOLS or pool.args[:1] != (relu,) or _gives_indices(pool):
            continue
        source = relu.args[0] if relu.args else relu.kwargs["input"]
        if not _is_value(source):
            continue
        pool.replace_input_with(relu, source)
        pool.replace_all_uses_with(relu, delete_user_cb=lambda user, relu=relu: user is not relu)
        relu.replace_input_with(source, pool)
        pool.append(relu)
        relu.meta["value"], pool.meta["value"] = pool.meta.get("value"), None
        relu.meta["shape"] = pool.meta.get("shape")
        if relu.meta["shape"] is None:
            del relu.meta["shape"]


def _gives_indices(pool: fx.Node) -> bool:
    name = getattr(pool.target, "__name__", str(pool.target))
    return "indices" in name or bool(pool.kwargs.get("return_indices", False)) or len(pool.args) > 6


_PASSES_SCALE = ("relu", *_MAX_POOLS, "reshape", "flatten", "avg_pool2d", "adaptive_avg_pool2d", "avg_pool1d",
                 "adaptive_avg_pool1d", "neg")  # fmt: skip


def fold_scales(program: Trace) -> None:
    """Move public factors into weights that nothing else reads, where A's own arithmetic takes them."""
    for node in list(program.graph.nodes):
        found = _factor(node)
        if found is not None:
            source, factor = found
            before = _scalable(program, source) if len(source.users) == 1 else None
            path, after = ([], None) if before is not None else _layer_after(program, node, factor > 0)
            layer = before or after
            if layer is None:
                continue
            # A bias before the factor is multiplied by it, one after it is not.
            both = before is not None
            part, power = _split(factor, 0 if both else MOST_POWER)
            layer.set_weights(
                f"times {part!r}", lambda w, b, f=part, both=both: (w * f, b * f if both and b is not None else b)
            )
            for passed in path:
                passed.meta["value"] = None
            if power:
                (source if both else node).meta["value"] = None
                number = 2.0 ** (power if _name(node) in _MULTIPLIES else -power)
                node.args = tuple(x if isinstance(x, fx.Node) else number for x in _operands(node))
                continue
            if both:
                source.meta["value"] = node.meta.get("value")
            _replace(program, node, source)
        elif op_name(node) == "avg_pool2d":
            _even_divisor(program, node)


MOST_POWER = 4


def _split(factor: float, most: int) -> tuple[float, int]:
    """The part of a public factor that weights take, of magnitude 1 at least, and the power of two that is left.

    Weights are rounded to a last place u, so an output errs by u/2 times the sum of its inputs' magnitudes. Weights
    times a factor f keep this error as it is, where f times the product would scale it: a small f costs as many digits
    as it takes away. A factor from 1 on costs none, and takes from the range of the weights instead, which is why a
    large one is split, too. Only the factor decides, which is public.

    Args:
        most: up to which power of two a factor above 1 is not split.
    """
    mantissa, exponent = math.frexp(factor)
    power = 0 if 1 <= exponent <= most else exponent - 1
    return math.ldexp(mantissa, exponent - power), power


def _name(node: fx.Node) -> str:
    return getattr(function_of(node.target), "__name__", "")


def _even_divisor(program: Trace, pool: fx.Node) -> None:
    """An average pool of a power of two as the divisor, and the rest in the weights of the layer after it."""
    given = arguments(pool)
    kernel = given.get("kernel_size")
    kernel = (kernel,) if isinstance(kernel, int) else kernel
    if not isinstance(kernel, (tuple, list)) or not all(isinstance(k, int) for k in kernel):
        return
    kernel = tuple(kernel) * 2 if len(kernel) == 1 else tuple(kernel)
    count = math.prod(kernel)
    plain = (
        given.get("divisor_override") is None and not given.get("ceil_mode") and given.get("count_include_pad", True)
    )
    if not plain or not count & (count - 1):
        return
    path, after = _layer_after(program, pool, True)
    if after is None:
        return
    # The next power above: sums divided by it are below the means, so they stay in range without a further check.
    even = 1 << count.bit_length()
    after.set_weights(f"times {even}/{count}", lambda w, b: (w * (even / count), b))
    defaults = (None, None, None, 0, False, True)
    names = ARGUMENTS["avg_pool2d"]
    pool.args = (*(given.get(k, d) for k, d in zip(names, defaults, strict=False)), even)
    pool.kwargs = {}
    for passed in (pool, *path):
        passed.meta["value"] = None


_MULTIPLIES = ("mul", "__mul__", "__rmul__", "multiply")
_DIVIDES = ("div", "divide", "truediv", "__truediv__", "true_divide")


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, typed as Any: torch's stubs have a union of all that may stand there."""
    return node.args


def _factor(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The value that a node multiplies by a public number, and the number; powers of two cost nothing anyway."""
    if node.op != "call_function" or len(node.args) != 2 or node.kwargs:
        return None
    name, (x, number) = _name(node), _operands(node)
    if name in _MULTIPLIES and isinstance(x, (int, float)):
        x, number = number, x
    elif name not in (*_MULTIPLIES, *_DIVIDES):
        return None
    if not _is_value(x) or type(number) not in (int, float) or number == 0 or not math.isfinite(number):
        return None
    dtype = x.meta.get("dtype")
    if dtype != node.meta.get("dtype") or (dtype is not None and not dtype.is_floating_point):
        return None  # a whole number times a fraction is another kind of tensor
    factor = float(number) if name in _MULTIPLIES else 1.0 / number
    return None if abs(math.frexp(factor)[0]) == 0.5 else (x, factor)


def _scalable(program: Trace, node: fx.Node) -> _Layer | None:
    """The layer that a node is, where its weights are its own: a second form of a shared one would be sent as well."""
    layer = _layer(program, node)
    if layer is None:
        return None
    readers = {
        user
        for n in program.graph.nodes
        if n.op == "get_attr" and n.target in (layer.weight, layer.bias)
        for user in n.users
    }
    return layer if readers == {node} else None


def _layer_after(program: Trace, node: fx.Node, positive: bool) -> tuple[list[fx.Node], _Layer | None]:
    """The layer that alone reads `node`, through steps with which a (positive) factor commutes; and these steps."""
    path: list[fx.Node] = []
    while len(node.users) == 1:
        before, node = node, next(iter(node.users))
        layer = _scalable(program, node)
        if layer is not None:
            return (path, layer) if layer.source is before and before not in node.all_input_nodes[1:] else ([], None)
        name = op_name(node)
        if name not in _PASSES_SCALE or (not positive and name in ("relu", *_MAX_POOLS)):
            return [], None
        if len(node.all_input_nodes) != 1 or node.args[:1] != (before,) or _gives_indices(node):
            return [], None
        path.append(node)
    return [], None
