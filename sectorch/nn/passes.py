"""Graph passes: each changes the work and not the values.

- `fold_batchnorm`: a BatchNorm after a convolution or linear layer becomes part of it (A's own arithmetic).
- `pool_before_relu`: max-pool and ReLU commute; pooling first leaves a fraction of the activations to the ReLU, which
  then truncates them for free.
- `fold_scales`: a number that multiplies, and the odd divisor of an average pool, move into the weights of a layer
  before or after; what is left is a power of two, which costs nothing.
- `drop_identities`: dropout in evaluation mode, Identity.

One opening for several uses is no pass: `mpc/mask.py` opens the same shares once in a call.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ..table import row_of

_MODULE_OPS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.AdaptiveMaxPool2d: "adaptive_max_pool2d",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout",
    nn.Dropout2d: "dropout",
    nn.Dropout3d: "dropout",
    nn.AlphaDropout: "dropout",
    nn.Identity: "identity",
    nn.AvgPool1d: "avg_pool1d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.Flatten: "flatten",
}


def op_name(node: fx.Node, graph: fx.GraphModule) -> str | None:
    """The table's name for what a node computes, or None."""
    if node.op == "call_module":
        return _MODULE_OPS.get(type(graph.get_submodule(node.target)))
    if node.op == "call_function":
        row = row_of(node.target)
    elif node.op == "call_method":
        row = row_of(getattr(torch.Tensor, node.target, None))
    else:
        row = None
    return row.name if row else None


def optimise(graph: fx.GraphModule, precision: torch.dtype = torch.float64) -> fx.GraphModule:
    """All passes, in order, on the given graph.

    Args:
        precision: what folded weights are rounded to, the model's own dtype: so that a model file, which holds weights
            of that dtype, computes the same numbers as the model.
    """
    drop_identities(graph)
    fold_batchnorm(graph)
    fold_scales(graph)
    pool_before_relu(graph)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
    for tensor in (*graph.parameters(), *graph.buffers()):
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.data = tensor.data.to(precision).to(tensor.dtype)
    return graph


def drop_identities(graph: fx.GraphModule) -> None:
    """Remove nodes that pass their input through."""
    for node in list(graph.graph.nodes):
        if op_name(node, graph) in ("identity", "dropout") and node.op == "call_module":
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def fold_batchnorm(graph: fx.GraphModule) -> None:
    """Fold an evaluation-mode BatchNorm into the convolution or linear layer that feeds it alone."""
    fusers = {nn.Conv1d: fuse_conv_bn_eval, nn.Conv2d: fuse_conv_bn_eval, nn.Linear: fuse_linear_bn_eval}
    users: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            users[node.target] = users.get(node.target, 0) + 1
    for node in list(graph.graph.nodes):
        if node.op != "call_module":
            continue
        norm = graph.get_submodule(node.target)
        if not isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)) or not norm.track_running_stats:
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        layer = graph.get_submodule(before.target)
        fuse = fusers.get(type(layer))
        if fuse is None or users[before.target] > 1:
            continue
        if isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm2d):
            continue
        _set(graph, before.target, fuse(layer, norm))
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)


def _set(graph: fx.GraphModule, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(graph.get_submodule(parent) if parent else graph, name, module)


def pool_before_relu(graph: fx.GraphModule) -> None:
    """relu -> max_pool becomes max_pool -> relu where nothing else reads the ReLU."""
    pools = ("max_pool1d", "max_pool2d", "adaptive_max_pool2d")
    for relu in list(graph.graph.nodes):
        if op_name(relu, graph) != "relu" or len(relu.users) != 1:
            continue
        pool = next(iter(relu.users))
        if op_name(pool, graph) not in pools or pool.args[:1] != (relu,) or _wants_indices(pool, graph):
            continue
        source = relu.args[0] if relu.args else relu.kwargs["input"]
        pool.replace_input_with(relu, source)
        pool.replace_all_uses_with(relu, delete_user_cb=lambda user, relu=relu: user is not relu)
        relu.replace_input_with(source, pool)
        pool.append(relu)


def _wants_indices(pool: fx.Node, graph: fx.GraphModule) -> bool:
    if pool.op == "call_module":
        return bool(getattr(graph.get_submodule(pool.target), "return_indices", False))
    return bool(pool.kwargs.get("return_indices", False))


_PASSES_SCALE = ("relu", "max_pool1d", "max_pool2d", "adaptive_max_pool2d", "reshape", "flatten", "avg_pool2d",
                 "adaptive_avg_pool2d", "avg_pool1d", "adaptive_avg_pool1d", "dropout", "identity", "neg")  # fmt: skip
_FOLDABLE = (nn.Linear, nn.Conv1d, nn.Conv2d)


def fold_scales(graph: fx.GraphModule) -> None:
    """Move public factors into weights, where A's own arithmetic takes them."""
    users: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            users[node.target] = users.get(node.target, 0) + 1

    def layer_of(node: fx.Node) -> nn.Module | None:
        if node.op != "call_module" or users[node.target] > 1:
            return None
        module = graph.get_submodule(node.target)
        return module if type(module) in _FOLDABLE else None

    for node in list(graph.graph.nodes):
        factor = _factor(node)
        if factor is not None:
            source = node.args[0]
            before = layer_of(source) if len(source.users) == 1 else None
            after = None if before is not None else _layer_after(node, factor > 0, graph, layer_of)
            if before is not None:
                before.weight.mul_(factor)
                if before.bias is not None:
                    before.bias.mul_(factor)
            elif after is not None:
                after.weight.mul_(factor)
            else:
                continue
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
        elif node.op == "call_module" and type(pool := graph.get_submodule(node.target)) is nn.AvgPool2d:
            kernel = (pool.kernel_size,) * 2 if isinstance(pool.kernel_size, int) else pool.kernel_size
            count = kernel[0] * kernel[1]
            plain = pool.divisor_override is None and not pool.ceil_mode and pool.count_include_pad
            after = _layer_after(node, True, graph, layer_of) if plain and users[node.target] == 1 else None
            if after is not None and count & (count - 1):
                even = 1 << count.bit_length()
                after.weight.mul_(even / count)
                pool.divisor_override = even


def _factor(node: fx.Node) -> float | None:
    """The public number by which a node multiplies its first argument, or None. Powers of two cost nothing anyway."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or name not in ("mul", "div", "truediv") or len(node.args) != 2:
        return None
    x, number = node.args
    if name == "mul" and isinstance(x, (int, float)):
        x, number = number, x
        node.args = (x, number)
    if not isinstance(x, fx.Node) or not isinstance(number, (int, float)) or number == 0 or node.kwargs:
        return None
    factor = float(number) if name == "mul" else 1.0 / number
    return None if abs(math.frexp(factor)[0]) == 0.5 else factor


def _layer_after(node: fx.Node, positive: bool, graph: fx.GraphModule, layer_of) -> nn.Module | None:
    """The linear layer that alone reads `node`, through steps with which a (positive) factor commutes."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        layer = layer_of(node)
        if layer is not None:
            return layer
        name = op_name(node, graph)
        if name not in _PASSES_SCALE or (not positive and "max" in name) or (not positive and name == "relu"):
            return None
        if len(node.all_input_nodes) != 1:
            return None
    return None


_SAMPLEWISE_MODULES = (
    nn.Conv1d, nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh,
    nn.PReLU, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity, nn.ZeroPad2d, nn.PixelShuffle,
)  # fmt: skip
_SAMPLEWISE_OPS = (
    "conv2d", "conv1d", "linear", "batch_norm",
    "relu", "relu6", "leaky_relu", "hardtanh", "abs", "sign", "square", "clamp", "max_pool1d", "max_pool2d",
    "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "dropout", "neg",
)  # fmt: skip


def is_samplewise(graph: fx.GraphModule) -> bool:
    """Whether every output row depends on its own input row only, so that a batch may be cut into pieces.

    True only where it can be seen: sums and products of activations with one another or with numbers, layers and
    functions that are known to keep rows apart, `flatten` from dimension 1 and `cat` along another dimension.
    """
    inputs = 0
    for node in graph.graph.nodes:
        name = op_name(node, graph)
        if node.op == "placeholder":
            inputs += 1
        elif node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                return False
        elif node.op == "call_module":
            module = graph.get_submodule(node.target)
            if type(module) is nn.Flatten and module.start_dim == 1:
                continue
            if not isinstance(module, _SAMPLEWISE_MODULES):
                return False
        elif name in ("add", "sub", "mul") or node.target in (operator.add, operator.sub, operator.mul):
            if any(a.op == "get_attr" for a in node.all_input_nodes):
                return False
        elif name == "flatten":
            start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
            if start != 1:
                return False
        elif name == "cat":
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
            if not isinstance(dim, int) or dim < 1:
                return False
        elif node.op == "get_attr":
            continue
        elif name not in _SAMPLEWISE_OPS or any(a.op == "get_attr" for a in node.args[:1] if isinstance(a, fx.Node)):
            return False
    return inputs == 1
