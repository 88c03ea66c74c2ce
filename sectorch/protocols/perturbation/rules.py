"""What each layer does to the scale of its channels: one row a kind of layer, and a reason for each that is refused."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from .scales import Located
from .walk import Walk

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
