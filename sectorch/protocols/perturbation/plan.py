"""How a module is perturbed: the scale of each weight's rows and columns, found by walking its graph.

Source: III-A (Eqs. 6 to 8 for linear layers, Eqs. 13 to 16 for convolutions), widened from chains and concatenations to
any graph of positively homogeneous layers, with biases, residual additions and normalisation.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ...nn.symbolic_trace import layer_location, symbolic_trace
from .errors import NotPerturbableError

# In-place operations of a traced graph made out of place, so that every node has one value for good.


_FLAG_POSITION = {F.relu: 1, F.leaky_relu: 2, **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), 3)}
_FUNCTIONS = {operator.iadd: operator.add, operator.imul: operator.mul, torch.relu_: torch.relu}
_METHODS = {"relu_": "relu", "add_": "add"}
_VIEWS = {torch.flatten, torch.reshape, *(f for f in _FLAG_POSITION if "dropout" in f.__name__)}
_VIEW_METHODS = {"view", "reshape", "flatten", "contiguous"}


def functional(graph: fx.GraphModule) -> None:
    """Rewrite `graph`, a copy that nobody else holds: what reads a tensor after it was changed in place reads the new
    value by name.

    Raises:
        NotPerturbableError: a view is changed in place while the tensor behind it is still needed.
    """
    nodes = list(graph.graph.nodes)
    for place, node in enumerate(nodes):
        if not _make_plain(graph, node):
            continue
        later = set(nodes[place + 1 :])
        changed = node.args[0]
        changed.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)
        while _is_view(graph, changed):
            changed = changed.args[0]
            if later.intersection(changed.users):
                raise NotPerturbableError(
                    f"{layer_location(node, graph)} cannot be perturbed: it changes a view in place while the tensor "
                    f"behind it is still needed; use inplace=False"
                )
    graph.recompile()


def _make_plain(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` acted in place; it does not any more."""
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        if not getattr(module, "inplace", False):
            return False
        vars(module)["inplace"] = False
        return True
    if node.op == "call_method" and str(node.target) in _METHODS:
        node.target = _METHODS[str(node.target)]
        return True
    if node.op != "call_function":
        return False
    if node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]
        return True
    position = _FLAG_POSITION.get(node.target, len(node.args))
    flag = node.kwargs.get("inplace", node.args[position] if len(node.args) > position else False)
    if flag:
        node.args = node.args[:position]
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    return bool(flag)


def _is_view(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        kinds = (nn.Flatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        return isinstance(graph.get_submodule(str(node.target)), kinds)
    return node.target in (_VIEW_METHODS if node.op == "call_method" else _VIEWS)


# Which channels of which tensors carry the same secret scale: a union-find over single channels.
#
# A tensor of the perturbed network equals the true one times a positive number per channel (Lemmas 1 and 2). Each
# channel of each layer starts with a scale of its own. An addition makes the scales of its two sides one, channel by
# channel; a concatenation only joins the lists. One scale, `ONE`, is not drawn but is 1: that of the input and of
# whatever has to be seen at its true size.


ONE = 0


class Channels:
    """A growing set of channels, some of which are known to have the same scale."""

    def __init__(self) -> None:
        self._parent = [ONE]

    def fresh(self, count: int) -> np.ndarray:
        """`count` new channels with scales of their own, int64 [count]."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, channel: int) -> int:
        parent = self._parent
        while parent[channel] != channel:
            parent[channel] = parent[parent[channel]]
            channel = parent[channel]
        return channel

    def unify(self, left: np.ndarray, right: np.ndarray) -> None:
        """Give left[c] and right[c] one scale, for each c. `ONE` stays the root of what it meets."""
        for a, b in zip(left, right, strict=True):
            low, high = sorted((self.root(int(a)), self.root(int(b))))
            self._parent[high] = low

    def roots(self, channels: np.ndarray) -> np.ndarray:
        """The representative of each channel, int64 of the same shape."""
        return np.array([self.root(int(channel)) for channel in channels], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._parent)


@dataclass(frozen=True)
class Located:
    """What is known of one tensor of the graph: its channels, along dimension 1.

    Attributes:
        channels: int64 [C]; None where C is not known yet and every scale is 1 (the input).
        flattened: the tensor was flattened from [N, C, ...] to [N, C * positions]; each channel's scale repeats over an
            unknown number of positions, which the next linear layer's width tells.
        spatial: whether positions follow the channel dimension ([N, C, ...]); None where that is not known.
    """

    channels: np.ndarray | None
    flattened: bool = False
    spatial: bool | None = None


# What a walk over a module's graph knows so far, and the few moves that the rules make on it.


class Walk:
    """One pass over the graph in its own order.

    Attributes:
        known: what is known of the tensor of each node; None for what is no tensor.
        scaled: parameter -> (channels of its rows, channels of its columns), None for scale 1.
        batch_norms: name of a batch norm with running statistics -> whether it uses the batch's own.
        norm_inputs: name of a batch norm that uses its running statistics -> channels that enter it.
    """

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self.channels = Channels()
        self.known: dict[fx.Node, Located | None] = {}
        self.scaled: dict[str, tuple[np.ndarray | None, np.ndarray | None]] = {}
        self.batch_norms: dict[str, bool] = {}
        self.norm_inputs: dict[str, np.ndarray] = {}

    def module(self, node: fx.Node) -> nn.Module:
        """The layer that a node calls."""
        return self.graph.get_submodule(str(node.target))

    def refuse(self, node: fx.Node, reason: str) -> NotPerturbableError:
        """The error that says which layer, on which line of the model, and why."""
        return NotPerturbableError(f"{layer_location(node, self.graph)} cannot be perturbed: {reason}")

    def pin(self, channels: np.ndarray) -> None:
        """Make these scales 1."""
        self.channels.unify(channels, np.full(len(channels), ONE))

    def same(self, node: fx.Node, a: Located, b: Located) -> None:
        """Make the scales of two tensors one, channel by channel."""
        if a.channels is not None and b.channels is not None:
            if len(a.channels) != len(b.channels):
                raise self.refuse(node, f"it joins {len(a.channels)} with {len(b.channels)} channels")
            self.channels.unify(a.channels, b.channels)
        elif (known := a.channels if a.channels is not None else b.channels) is not None:
            self.pin(known)

    def columns(self, node: fx.Node, source: Located, width: int) -> np.ndarray:
        """The channels of `width` inputs of a linear layer, or `width` channels of a convolution."""
        channels = source.channels
        if channels is None:
            return np.full(width, ONE)
        if source.flattened:
            if width % len(channels):
                raise self.refuse(node, f"its {width} inputs are no multiple of the {len(channels)} channels flattened")
            return np.repeat(channels, width // len(channels))
        if len(channels) != width:
            raise self.refuse(node, f"it takes {width} channels and is given {len(channels)}")
        return channels


# What each layer does to the scale of its channels: one row a kind of layer, and a reason for each that is refused.


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOMOGENEOUS = (
    nn.ReLU, nn.LeakyReLU, nn.RReLU, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
)  # fmt: skip
_POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad2d, nn.ReplicationPad2d),
)
_REASONS = {
    **dict.fromkeys((nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Mish),
                    "f(r x) is not r f(x) for positive r, so the scale would not come out again; use ReLU, LeakyReLU "
                    "or PReLU"),
    **dict.fromkeys((nn.ReLU6, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softmax, nn.LogSoftmax),
                    "it bends at a fixed size or mixes channels, so f(r x) is not r f(x); use ReLU"),
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm),
                    "its statistics mix channels of different scales; use BatchNorm, whose statistics are by channel"),
    _ConvTransposeNd: "transposed convolutions are not written yet; use upsampling and a convolution",
    nn.MultiheadAttention: "softmax and products of two noised tensors lose the scale",
    nn.Embedding: "an index has no scale",
}  # fmt: skip

_KEEPING = {
    *(F.relu, torch.relu, torch.relu_, F.leaky_relu, F.dropout, torch.dropout),
    *(F.dropout1d, F.dropout2d, F.dropout3d, operator.neg, torch.neg),
}
_POOLING = {
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.max_pool2d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, torch.adaptive_avg_pool1d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
}
_ADDING = {operator.add, operator.iadd, operator.sub, torch.add, torch.sub}
_SCALING = {operator.mul, operator.truediv, torch.mul, torch.div}
_KEEPING_METHODS = {"relu", "relu_", "contiguous", "clone", "neg"}
_SHAPE_METHODS = {"size", "dim"}
_JOINING = {torch.cat, torch.concat, torch.concatenate}


def module_rule(walk: Walk, node: fx.Node, module: nn.Module, source: Located) -> Located:
    """The scale that leaves a layer, and its parameters' R noted in `walk`.

    Raises:
        NotPerturbableError: names the layer and says why no scale can pass it.
    """
    if type(module) is nn.Linear or (isinstance(module, _ConvNd) and type(module) in _CONVS):
        return _affine(walk, node, module, source)
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return _normalise(walk, node, module, source)
    if type(module) is nn.PReLU:
        walk.scaled[f"{node.target}.weight"] = (None, None)
        return source
    if type(module) in _HOMOGENEOUS:
        return source
    if type(module) in _POOLS:
        return _spatial(walk, node, source)
    if type(module) is nn.Flatten:
        return _flatten(walk, node, source, (module.start_dim, module.end_dim))
    for kind, reason in _REASONS.items():
        if isinstance(module, kind):
            raise walk.refuse(node, reason)
    raise walk.refuse(node, f"it is not known that {type(module).__name__} carries a positive scale through unchanged")


def _affine(walk: Walk, node: fx.Node, module: nn.Linear | _ConvNd, source: Located) -> Located:
    """Eqs. 7 and 14: R = scale of the output channel over scale of the input channel; the bias takes the former."""
    if isinstance(module, nn.Linear):
        if source.spatial:
            raise walk.refuse(
                node, "a linear layer acts on the last dimension, but the channels are dimension 1; flatten"
            )
        groups, wide, high = 1, module.in_features, module.out_features
    else:
        if source.flattened or source.spatial is False:
            raise walk.refuse(node, "a convolution takes [N, channels, positions], but this was flattened before")
        if module.padding_mode not in ("zeros", "reflect", "replicate", "circular"):
            raise walk.refuse(node, f"padding mode {module.padding_mode} is not known")
        groups, wide, high = module.groups, module.in_channels, module.out_channels
    out = walk.channels.fresh(high)
    columns = walk.columns(node, source, wide)
    per_group = columns.reshape(groups, -1)
    by_row = per_group if groups == 1 else np.repeat(per_group, len(out) // groups, axis=0)
    walk.scaled[f"{node.target}.weight"] = (out, by_row)
    if module.bias is not None:
        walk.scaled[f"{node.target}.bias"] = (out, None)
    return Located(out, spatial=not isinstance(module, nn.Linear))


def _normalise(walk: Walk, node: fx.Node, module: _BatchNorm | _InstanceNorm, source: Located) -> Located:
    """Normalisation by channel. With the batch's own statistics the result does not depend on the input's scale, but
    for eps, which does not scale: (r x - r mu) / sqrt(r^2 var + eps). The input's scale is therefore made 1. With
    running statistics the layer is affine and the scale passes: mean' = r mean, var' + eps = r^2 (var + eps).
    """
    if source.flattened:
        raise walk.refuse(node, "it comes after a flatten and would mix positions with channels; put it before")
    columns = walk.columns(node, source, module.num_features)
    own_statistics = module.training or module.running_mean is None or isinstance(module, _InstanceNorm)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise walk.refuse(node, "InstanceNorm with running statistics is not supported; track_running_stats=False")
    if own_statistics:
        walk.pin(columns)
    else:
        walk.norm_inputs[str(node.target)] = columns
    if isinstance(module, _BatchNorm) and module.running_mean is not None:
        walk.batch_norms[str(node.target)] = own_statistics
    if not module.affine:
        walk.pin(columns)
        return Located(columns, spatial=source.spatial)
    out = walk.channels.fresh(module.num_features)
    walk.scaled[f"{node.target}.weight"] = (out, None)
    walk.scaled[f"{node.target}.bias"] = (out, None)
    return Located(out, spatial=source.spatial)


def _spatial(walk: Walk, node: fx.Node, source: Located) -> Located:
    if source.flattened or source.spatial is False:
        raise walk.refuse(node, "it pools over channels of different scales; pool before the tensor is flattened")
    return source


def _flatten(walk: Walk, node: fx.Node, source: Located, dims: tuple[Any, Any]) -> Located:
    if dims != (1, -1):
        raise walk.refuse(node, f"it flattens dimensions {dims[0]} to {dims[1]}; only 1 to -1 keeps channels together")
    if source.spatial is False:
        return source
    return Located(source.channels, flattened=True, spatial=False)


def function_rule(walk: Walk, node: fx.Node) -> Located | None:
    """The scale that leaves a function or a method; None for what is no tensor (sizes).

    Raises:
        NotPerturbableError: names the function and says why no scale can pass it.
    """
    inputs = [walk.known[n] for n in node.all_input_nodes]
    tensors = [known for known in inputs if known is not None]
    method = node.target if node.op == "call_method" else None
    if not tensors or method in _SHAPE_METHODS or node.target is getattr:
        return None
    source = tensors[0]
    if node.target in _KEEPING or method in _KEEPING_METHODS:
        return source
    if node.target in _POOLING:
        return _spatial(walk, node, source)
    if node.target in _ADDING or method in ("add", "add_", "sub"):
        return _add(walk, node, tensors)
    if (node.target in _SCALING or method in ("mul", "div")) and len(tensors) == 1:
        return _by_number(walk, node, source)
    if node.target in _JOINING:
        return _join(walk, node)
    if node.target is torch.flatten or method == "flatten":
        start = _argument(node, 1, "start_dim", 0)
        return _flatten(walk, node, source, (start, _argument(node, 2, "end_dim", -1)))
    if method in ("view", "reshape") or node.target is torch.reshape:
        shape = node.args[1:] if len(node.args) != 2 or isinstance(node.args[1], int) else _listed(node.args[1])
        if len(shape) == 2 and shape[1] == -1:
            return _flatten(walk, node, source, (1, -1))
        raise walk.refuse(node, f"only a view to [N, -1] keeps channels together, got {tuple(shape)}")
    if node.target is torch.mean or method == "mean":
        dims = _argument(node, 1, "dim", None)
        dims = (dims,) if isinstance(dims, int) else dims
        if dims and tuple(dims) in ((2,), (-1,), (2, 3), (-2, -1), (-1, -2), (2, 3, 4)) and source.spatial is not False:
            keep = bool(_argument(node, 2, "keepdim", False))
            return Located(source.channels, source.flattened, spatial=keep)
        raise walk.refuse(node, f"a mean over dimensions {dims} mixes channels of different scales")
    name = getattr(node.target, "__name__", str(node.target))
    if len(tensors) > 1:
        raise walk.refuse(node, f"{name} of two noised tensors: their scales do not come out as one per channel")
    raise walk.refuse(node, f"it is not known that {name} carries a positive scale through (f(r x) = r f(x))")


def _listed(value: Any) -> tuple:
    """An argument that stands for several."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _add(walk: Walk, node: fx.Node, tensors: list[Located]) -> Located:
    """Both branches of an addition have to carry the same scale, so their channels are made one."""
    if len(tensors) != 2:
        if len(node.all_input_nodes) == 1 and len(node.args) == 2 and node.args[0] is node.args[1]:
            return tensors[0]
        raise walk.refuse(node, "a constant is added, which does not take the scale; use a layer's bias")
    a, b = tensors
    if a.flattened != b.flattened:
        raise walk.refuse(node, "it adds a flattened tensor to one that was not")
    walk.same(node, a, b)
    return a if a.channels is not None else b


def _by_number(walk: Walk, node: fx.Node, source: Located) -> Located:
    left, right = node.args[:2]
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        raise walk.refuse(node, "a product of two noised tensors: their scales do not come out as one per channel")
    if not isinstance(right, (int, float)):
        raise walk.refuse(node, "only a product with, or a division by, a plain number after the tensor is known")
    return source


def _join(walk: Walk, node: fx.Node) -> Located:
    """Eq. 14's r^(l,in): the scales of what is concatenated, one after the other."""
    known = [walk.known.get(part) for part in _listed(node.args[0])]
    parts = [part for part in known if part is not None]
    dim = _argument(node, 1, "dim", 0)
    flat = all(part is not None and part.spatial is False for part in known)
    if dim != 1 and not (dim == -1 and flat):
        raise walk.refuse(node, f"it concatenates along dimension {dim}; only the channels, dimension 1, are known")
    channels = [part.channels for part in parts if part.channels is not None]
    if len(channels) < len(known):
        raise walk.refuse(node, "how many channels the input has is not known; use Scheme(..., channels=...)")
    if any(part.flattened for part in parts):
        raise walk.refuse(node, "it concatenates flattened maps of unknown size; pool them to one position first")
    return Located(np.concatenate(channels), spatial=parts[0].spatial)


@dataclass(frozen=True)
class Scaled:
    """R of one parameter or buffer: entry [k, c, ...] is scale[rows[k]] / scale[columns[k, c]].

    Attributes:
        rows: representatives of the output channels, int64 [out], or None for scale 1.
        columns: representatives of the input channels, int64 [out, in / groups] or [1, in]; None for scale 1.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None = None

    def scale_(self, values: torch.Tensor, scales: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
        """Multiply by R in place; scales and their inverses are of the dtype of `values`, indexed by channel."""
        if self.rows is not None:
            values *= scales[self.rows].view(-1, *(1,) * (values.dim() - 1))
        if self.columns is not None:
            values *= inverses[self.columns].view(*self.columns.shape, *(1,) * (values.dim() - 2))
        return values


@dataclass
class Plan:
    """Everything about a model that does not depend on its weights.

    Attributes:
        body: the graph up to the features that enter the last linear layer.
        head: name of that layer; its rows have scale 1 and take the additive noise instead.
        outputs: n_L, the width of the head.
        features: n_{L-1}.
        parameters: the scaling of each trainable or frozen parameter.
        batch_norms: name -> whether it uses the batch's statistics (train) or its running ones (eval).
        norm_inputs: name -> representatives of the channels that enter a batch norm in eval mode.
        scale_count: how many channel numbers there are; `roots` are those that are drawn.
        roots: int64 [S], the distinct representatives other than ONE.
    """

    body: fx.GraphModule
    head: str
    outputs: int
    features: int
    head_bias: bool
    parameters: dict[str, Scaled] = field(default_factory=dict)
    batch_norms: dict[str, bool] = field(default_factory=dict)
    norm_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    scale_count: int = 1
    roots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


def make_plan(model: nn.Module, channels: int | None = None) -> Plan:
    """Walk the graph of `model` (a copy of it; the model itself is left alone).

    Args:
        channels: width of the input's dimension 1, for a model whose first layer does not tell it.

    Raises:
        NotPerturbableError: names the layer that cannot carry a scale, and says why.
    """
    if not isinstance(model, nn.Module):
        raise NotPerturbableError(f"a Scheme takes a torch.nn.Module, got {type(model).__name__}")
    model = copy.deepcopy(model)
    graph = symbolic_trace(model)
    if graph is None:
        raise NotPerturbableError(
            f"the forward of {type(model).__name__} has control flow that torch.fx cannot see through, so the scale of "
            f"its layers is not known; write it without branches on tensor values"
        )
    functional(graph)
    shared = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    if len(shared) != len(list(model.named_parameters())):
        raise NotPerturbableError("two layers of the model share one parameter; give each its own")
    return _Planner(graph, model, channels).plan()


class _Planner(Walk):
    """The walk itself: every node by its rule, then the result with one number for each distinct scale."""

    def __init__(self, graph: fx.GraphModule, model: nn.Module, width: int | None):
        super().__init__(graph)
        self.model, self.width = model, width
        self.called: dict[str, tuple[Located, Located]] = {}

    def plan(self) -> Plan:
        nodes = list(self.graph.graph.nodes)
        head = self._head(nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise NotPerturbableError(f"the model takes {len(inputs)} inputs; one tensor [N, ...] was expected")
        for node in nodes:
            if node.op == "placeholder":
                self.known[node] = self._input(node)
            elif node.op == "get_attr":
                raise self.refuse(node, "it uses a parameter outside a layer; use an nn module for it")
            elif node is head:
                self._enter_head(node)
            elif node.op == "call_module":
                self.known[node] = self._call_module(node)
            elif node.op != "output":
                self.known[node] = function_rule(self, node)
        missing = [name for name, _ in self.model.named_parameters() if name not in self.scaled]
        if missing:
            raise NotPerturbableError(f"parameters that no layer of the graph uses: {', '.join(missing)}; remove them")
        return self._finish(head)

    def _head(self, nodes: list[fx.Node]) -> fx.Node:
        node = nodes[-1].args[0]
        while isinstance(node, fx.Node) and node.op == "call_module":
            module = self.module(node)
            if type(module) is nn.Linear:
                users = [n for n in nodes if n.op == "call_module" and n.target == node.target]
                if len(users) > 1 or len(node.users) > 1:
                    raise self.refuse(node, "the last linear layer is used in more than one place")
                return node
            if type(module) is not nn.Identity:
                break
            node = node.args[0]
        name = layer_location(node, self.graph) if isinstance(node, fx.Node) else f"a {type(node).__name__}"
        raise NotPerturbableError(
            f"the model ends in {name}; it has to end in an nn.Linear, which takes the additive noise (Eq. 8). Leave "
            f"softmax to the loss"
        )

    def _input(self, node: fx.Node) -> Located:
        """The input has scale 1; its width is that of the first layer that takes it, where there is one."""
        if self.width is not None:
            return Located(np.full(self.width, ONE))
        for user in node.users:
            if user.op == "call_module":
                module = self.module(user)
                width = next(
                    (w for a in ("in_features", "in_channels", "num_features") if (w := getattr(module, a, None))), None
                )
                if isinstance(width, int):
                    return Located(np.full(width, ONE), spatial=False if hasattr(module, "in_features") else None)
        return Located(None)

    def _call_module(self, node: fx.Node) -> Located | None:
        source = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            raise self.refuse(node, "its input is not a tensor that the walk has seen")
        name = str(node.target)
        out = module_rule(self, node, self.module(node), source)
        before = self.called.get(name)
        if before is not None:  # A layer that is used twice has one weight, so one scale on either side.
            self.same(node, before[0], source)
            self.same(node, before[1], out)
        self.called[name] = (source, out)
        return out

    def _enter_head(self, node: fx.Node) -> None:
        module, entering = self._linear(node), node.args[0]
        source = self.known.get(entering) if isinstance(entering, fx.Node) else None
        if source is None or source.spatial:
            raise self.refuse(node, "the last linear layer takes [N, features]; flatten or pool before it")
        self.scaled[f"{node.target}.weight"] = (None, self.columns(node, source, module.in_features)[None])
        if module.bias is not None:
            self.scaled[f"{node.target}.bias"] = (None, None)

    def _linear(self, head: fx.Node) -> nn.Linear:
        module = self.module(head)
        if not isinstance(module, nn.Linear):
            raise self.refuse(head, "the model has to end in an nn.Linear")
        return module

    def _roots(self, channels: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.channels.roots(channels.ravel()).reshape(channels.shape))

    def _finish(self, head: fx.Node) -> Plan:
        module = self._linear(head)
        final = lambda channels: None if channels is None else self._roots(channels)
        scaled = {name: Scaled(final(rows), final(columns)) for name, (rows, columns) in self.scaled.items()}
        norm_inputs = {name: self._roots(channels) for name, channels in self.norm_inputs.items()}
        roots = [s for scale in scaled.values() for s in (scale.rows, scale.columns) if s is not None]
        flat = [torch.zeros(0, dtype=torch.int64), *map(torch.ravel, roots), *norm_inputs.values()]
        distinct = torch.unique(torch.cat(flat))
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.graph_copy(self.graph.graph, copies)
        graph.output(copies[head.all_input_nodes[0]])
        body = fx.GraphModule(self.graph, graph)
        body.graph.eliminate_dead_code()
        return Plan(
            body=fx.GraphModule(body, body.graph),  # once more: the head's weights are not carried along
            head=str(head.target),
            outputs=module.out_features,
            features=module.in_features,
            head_bias=module.bias is not None,
            parameters={name: scaled[name] for name, _ in self.model.named_parameters()},
            batch_norms=self.batch_norms,
            norm_inputs=norm_inputs,
            scale_count=len(self.channels),
            roots=distinct[distinct != ONE],
        )
