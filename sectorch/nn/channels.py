"""Which channels of a network share a scale: `channels(model)`, found by walking the graph of the network.

A network of positively homogeneous layers, f(r x) = r f(x) for r > 0, computes the same when each channel of each layer
is multiplied by a positive number and the next layer's columns are divided by it. Two channels that are added need one
number; a concatenation joins the lists. This is the symmetry that rescales a ReLU network's weights: weight
normalisation, equalisation before quantisation, and the noise of perturbed models
(`sectorch/protocols/perturbation/`) are uses of it.

Source: Feng et al., "A Practical Privacy-preserving Method in Federated Deep Learning", III-A (Eqs. 6 to 8 for linear
layers, Eqs. 13 to 16 for convolutions), widened from chains and concatenations to any graph of such layers, with
biases, residual additions and normalisation.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from ..errors import ArgumentError, ChannelScaleError
from .symbolic_trace import layer_location, symbolic_trace

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
        ChannelScaleError: a view is changed in place while the tensor behind it is still needed.
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
                raise ChannelScaleError(
                    f"{layer_location(node, graph)} cannot be scaled: it changes a view in place while the tensor "
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


# A union-find over single channels. Each channel of each layer starts with a scale of its own. One scale, `ONE`, is 1:
# that of the input, of the output, and of whatever has to be seen at its true size.


ONE = 0


class ChannelSets:
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

    def roots(self, channels: np.ndarray) -> torch.Tensor:
        """The representative of each channel, int64 of the same shape."""
        found = [self.root(int(channel)) for channel in channels.ravel()]
        return torch.tensor(found, dtype=torch.int64).view(channels.shape)

    def __len__(self) -> int:
        return len(self._parent)


@dataclass(frozen=True)
class TensorChannels:
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


class Walk:
    """One pass over a module's graph in its own order, and the few moves that the rules make on it.

    Attributes:
        known: what is known of the tensor of each node; None for what is no tensor.
        scaled: parameter -> (channels of its rows, channels of its columns), None for scale 1.
        batch_norms: name of a batch norm with running statistics -> whether it uses the batch's own.
        norm_inputs: name of a batch norm that uses its running statistics -> channels that enter it, and its eps.
        called: name of a layer with parameters -> what entered it, and what left it.
    """

    def __init__(self, graph: fx.GraphModule, width: int | None):
        self.graph, self.width = graph, width
        self.channels = ChannelSets()
        self.known: dict[fx.Node, TensorChannels | None] = {}
        self.scaled: dict[str, tuple[np.ndarray | None, np.ndarray | None]] = {}
        self.batch_norms: dict[str, bool] = {}
        self.norm_inputs: dict[str, tuple[np.ndarray, float]] = {}
        self.called: dict[str, tuple[TensorChannels, TensorChannels]] = {}

    def run(self) -> None:
        """Every node by its rule. The output has scale 1."""
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.known[node] = self._input(node)
            elif node.op == "get_attr":
                raise self.refuse(node, "it uses a parameter outside a layer; use an nn module for it")
            elif node.op == "call_module":
                self.known[node] = self._call_module(node)
            elif node.op != "output":
                self.known[node] = function_rule(self, node)
            else:
                for found in map(self.known.get, node.all_input_nodes):
                    if found is not None and found.channels is not None:
                        self.pin(found.channels)

    def _input(self, node: fx.Node) -> TensorChannels:
        """The input has scale 1; its width is that of the first layer that takes it, where there is one."""
        if self.width is not None:
            return TensorChannels(np.full(self.width, ONE))
        for user in node.users:
            if user.op == "call_module":
                module = self.module(user)
                width = next(
                    (w for a in ("in_features", "in_channels", "num_features") if (w := getattr(module, a, None))), None
                )
                if isinstance(width, int):
                    return TensorChannels(
                        np.full(width, ONE), spatial=False if hasattr(module, "in_features") else None
                    )
        return TensorChannels(None)

    def _call_module(self, node: fx.Node) -> TensorChannels:
        source = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            raise self.refuse(node, "its input is not a tensor that the walk has seen")
        module = self.module(node)
        out = module_rule(self, node, module, source)
        if next(module.parameters(), None) is not None:
            before = self.called.setdefault(str(node.target), (source, out))
            self.same(node, before[0], source)  # One weight, so one scale on either side.
            self.same(node, before[1], out)
        return out

    def module(self, node: fx.Node) -> nn.Module:
        """The layer that a node calls."""
        return self.graph.get_submodule(str(node.target))

    def refuse(self, node: fx.Node, reason: str) -> ChannelScaleError:
        """The error that says which layer, on which line of the model, and why."""
        return ChannelScaleError(f"{layer_location(node, self.graph)} cannot be scaled: {reason}")

    def pin(self, channels: np.ndarray) -> None:
        """Make these scales 1."""
        self.channels.unify(channels, np.full(len(channels), ONE))

    def same(self, node: fx.Node, a: TensorChannels, b: TensorChannels) -> None:
        """Make the scales of two tensors one, channel by channel."""
        if a.channels is not None and b.channels is not None:
            if len(a.channels) != len(b.channels):
                raise self.refuse(node, f"it joins {len(a.channels)} with {len(b.channels)} channels")
            self.channels.unify(a.channels, b.channels)
        elif (known := a.channels if a.channels is not None else b.channels) is not None:
            self.pin(known)

    def columns(self, node: fx.Node, source: TensorChannels, width: int) -> np.ndarray:
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
                    "it bends at a fixed size or mixes channels, so f(r x) is not r f(x); use ReLU, and leave a "
                    "softmax at the end to the loss"),
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm),
                    "its statistics mix channels of different scales; use BatchNorm, whose statistics are by channel"),
    _ConvTransposeNd: "transposed convolutions are not written yet; use upsampling and a convolution",
    nn.MultiheadAttention: "softmax and products of two scaled tensors lose the scale",
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


def module_rule(walk: Walk, node: fx.Node, module: nn.Module, source: TensorChannels) -> TensorChannels:
    """The scale that leaves a layer, and its parameters' R noted in `walk`.

    Raises:
        ChannelScaleError: names the layer and says why no scale can pass it.
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


def _affine(walk: Walk, node: fx.Node, module: nn.Linear | _ConvNd, source: TensorChannels) -> TensorChannels:
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
    return TensorChannels(out, spatial=not isinstance(module, nn.Linear))


def _normalise(walk: Walk, node: fx.Node, module: _BatchNorm | _InstanceNorm, source: TensorChannels) -> TensorChannels:
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
        walk.norm_inputs[str(node.target)] = columns, module.eps
    if isinstance(module, _BatchNorm) and module.running_mean is not None:
        walk.batch_norms[str(node.target)] = own_statistics
    if not module.affine:
        walk.pin(columns)
        return TensorChannels(columns, spatial=source.spatial)
    out = walk.channels.fresh(module.num_features)
    walk.scaled[f"{node.target}.weight"] = (out, None)
    walk.scaled[f"{node.target}.bias"] = (out, None)
    return TensorChannels(out, spatial=source.spatial)


def _spatial(walk: Walk, node: fx.Node, source: TensorChannels) -> TensorChannels:
    if source.flattened or source.spatial is False:
        raise walk.refuse(node, "it pools over channels of different scales; pool before the tensor is flattened")
    return source


def _flatten(walk: Walk, node: fx.Node, source: TensorChannels, dims: tuple[Any, Any]) -> TensorChannels:
    if dims != (1, -1):
        raise walk.refuse(node, f"it flattens dimensions {dims[0]} to {dims[1]}; only 1 to -1 keeps channels together")
    if source.spatial is False:
        return source
    return TensorChannels(source.channels, flattened=True, spatial=False)


def function_rule(walk: Walk, node: fx.Node) -> TensorChannels | None:
    """The scale that leaves a function or a method; None for what is no tensor (sizes).

    Raises:
        ChannelScaleError: names the function and says why no scale can pass it.
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
            return TensorChannels(source.channels, source.flattened, spatial=keep)
        raise walk.refuse(node, f"a mean over dimensions {dims} mixes channels of different scales")
    name = getattr(node.target, "__name__", str(node.target))
    if len(tensors) > 1:
        raise walk.refuse(node, f"{name} of two scaled tensors: their scales do not come out as one per channel")
    raise walk.refuse(node, f"it is not known that {name} carries a positive scale through (f(r x) = r f(x))")


def _listed(value: Any) -> tuple:
    """An argument that stands for several."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _add(walk: Walk, node: fx.Node, tensors: list[TensorChannels]) -> TensorChannels:
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


def _by_number(walk: Walk, node: fx.Node, source: TensorChannels) -> TensorChannels:
    left, right = node.args[:2]
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        raise walk.refuse(node, "a product of two scaled tensors: their scales do not come out as one per channel")
    if not isinstance(right, (int, float)):
        raise walk.refuse(node, "only a product with, or a division by, a plain number after the tensor is known")
    return source


def _join(walk: Walk, node: fx.Node) -> TensorChannels:
    """Eq. 14's r^(l,in): the scales of what is concatenated, one after the other."""
    known = [walk.known.get(part) for part in _listed(node.args[0])]
    parts = [part for part in known if part is not None]
    dim = _argument(node, 1, "dim", 0)
    flat = all(part is not None and part.spatial is False for part in known)
    if dim != 1 and not (dim == -1 and flat):
        raise walk.refuse(node, f"it concatenates along dimension {dim}; only the channels, dimension 1, are known")
    channels = [part.channels for part in parts if part.channels is not None]
    if len(channels) < len(known):
        raise walk.refuse(node, "how many channels the input has is not known; name it with width=")
    if any(part.flattened for part in parts):
        raise walk.refuse(node, "it concatenates flattened maps of unknown size; pool them to one position first")
    return TensorChannels(np.concatenate(channels), spatial=parts[0].spatial)


@dataclass(frozen=True)
class ChannelScale:
    """The ratio R of one parameter: entry [k, c, ...] is scale[rows[k]] / scale[columns[k, c]] (Eqs. 7 and 14).

    Attributes:
        rows: representatives of the output channels, int64 [out]; None for scale 1.
        columns: representatives of the input channels, int64 [out or 1, in / groups]; None for scale 1.
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


@dataclass(frozen=True)
class Channels:
    """Which channels of a network share a scale; see `channels`.

    Attributes:
        graph: the network as torch.fx has it, without operations in place.
        parameters: the ratio of each parameter, in the model's order.
        batch_norms: name of a batch norm with running statistics -> whether it uses its batch's own (in training).
        norm_inputs: name of a batch norm that uses its running statistics -> the representatives of the channels that
            enter it, and its eps.
        count: how many numbers of channels there are.
        roots: int64 [S], the numbers of those whose scales are free; every other representative is 0, of scale 1.
    """

    graph: fx.GraphModule
    parameters: Mapping[str, ChannelScale]
    batch_norms: Mapping[str, bool]
    norm_inputs: Mapping[str, tuple[torch.Tensor, float]]
    count: int
    roots: torch.Tensor

    def scale(self, state: Mapping[str, torch.Tensor], scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """A state of the same network with its channels scaled: of the same function, but for rounding.

        Args:
            state: parameters and buffers by name, of one floating-point dtype.
            scales: positive numbers [count], of which those at `roots` count, with 1 at 0.

        Returns:
            R o W of every parameter, and the running statistics of the norms that use them. Scales that are powers of
            two change no digit of any value of the network (short of overflow).

        Raises:
            ArgumentError: not as many scales, one that is not positive and finite, or another than 1 at 0.
        """
        if scales.shape != (self.count,) or not bool((scales > 0).all() & scales.isfinite().all() & (scales[0] == 1)):
            raise ArgumentError(
                f"scales are {self.count} positive numbers, with 1 at 0; got {list(scales.shape)}, of which "
                f"{int((~(scales > 0)).sum())} are not positive"
            )
        near = scales.to(next(t for t in state.values() if t.is_floating_point()))
        inverses = 1 / near
        out = {n: ratio.scale_(state[n].detach().clone(), near, inverses) for n, ratio in self.parameters.items()}
        for name, (entering, eps) in self.norm_inputs.items():
            mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
            r = near[entering]
            out[f"{name}.running_mean"] = r * mean
            out[f"{name}.running_var"] = r.square() * (variance + eps) - eps
            out[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"].clone()
        return out


def channels(model: nn.Module, width: int | None = None) -> Channels:
    """Which channels of a network share a scale.

        found = sectorch.nn.channels(model)
        scales = torch.ones(found.count)
        scales[found.roots] = torch.exp(torch.randn(len(found.roots)))
        model.load_state_dict(model.state_dict() | found.scale(model.state_dict(), scales))  # the same function

    Tensors are [N, C, ...], with linear layers on [N, C]. The network is linear layers, convolutions (grouped too),
    ReLU, LeakyReLU, PReLU, dropout, pooling, flatten, additions, concatenations of channels, and normalisation by
    channel, in any graph. Its input and its output have scale 1, and so has what enters a norm that uses its batch's
    own statistics: these divide a scale out again, except for eps. The model is left alone.

    Args:
        model: whether a batch norm is in training decides what it does.
        width: of the inputs' dimension 1, for a model whose first layer does not tell it.

    Raises:
        ChannelScaleError: names the layer that cannot carry a scale, and says why.
    """
    if not isinstance(model, nn.Module):
        raise ChannelScaleError(f"channels() takes a torch.nn.Module, got {type(model).__name__}")
    model = copy.deepcopy(model)
    graph = symbolic_trace(model)
    if graph is None:
        raise ChannelScaleError(
            f"the forward of {type(model).__name__} has control flow that torch.fx cannot see through, so the scale of "
            f"its layers is not known; write it without branches on tensor values"
        )
    functional(graph)
    names = [name for name, _ in model.named_parameters()]
    if len(list(model.named_parameters(remove_duplicate=False))) != len(names):
        raise ChannelScaleError("two layers of the model share one parameter; give each its own")
    walk = Walk(graph, width)
    walk.run()
    if missing := [name for name in names if name not in walk.scaled]:
        raise ChannelScaleError(f"parameters that no layer of the graph uses: {', '.join(missing)}; remove them")
    roots = lambda found: None if found is None or not (r := walk.channels.roots(found)).any() else r
    parameters = {name: ChannelScale(*map(roots, walk.scaled[name])) for name in names}
    norm_inputs = {name: (walk.channels.roots(found), eps) for name, (found, eps) in walk.norm_inputs.items()}
    used = [s.ravel() for scale in parameters.values() for s in (scale.rows, scale.columns) if s is not None]
    used += [entering for entering, _ in norm_inputs.values()]
    distinct = torch.unique(torch.cat([torch.zeros(0, dtype=torch.int64), *used]))
    free = distinct[distinct != ONE]
    return Channels(graph, parameters, walk.batch_norms, norm_inputs, len(walk.channels), free)
