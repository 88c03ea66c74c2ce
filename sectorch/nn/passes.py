"""Graph passes: each changes the work and not the values.

- `fold_batchnorm`: a BatchNorm after a convolution or linear layer becomes part of it (A's own arithmetic).
- `pool_before_relu`: max-pool and ReLU commute; pooling first leaves a fraction of the activations to the ReLU, which
  then truncates them for free.
- `drop_identities`: dropout in evaluation mode, Identity.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ..dispatch import row_of

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


def optimise(graph: fx.GraphModule) -> fx.GraphModule:
    """All passes, in order, on the given graph."""
    drop_identities(graph)
    fold_batchnorm(graph)
    pool_before_relu(graph)
    graph.graph.lint()
    graph.delete_all_unused_submodules()
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


_SAMPLEWISE_MODULES = (
    nn.Conv1d, nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardtanh,
    nn.PReLU, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity, nn.ZeroPad2d, nn.PixelShuffle,
)  # fmt: skip
_SAMPLEWISE_OPS = (
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
        elif name not in _SAMPLEWISE_OPS:
            return False
    return inputs == 1
