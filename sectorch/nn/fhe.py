"""From an ordinary network to one that homomorphic encryption can evaluate: polynomials in place of ReLU and maxima."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from ..ckks import CKKSTensor, polynomial
from ..errors import ArgumentError
from ..tensor.table import row_of
from .symbolic_trace import Tracer, symbolic_trace

GELU = (0.0711, 0.5, 0.2576, 0.0, -0.0128)
"""CaPriDe, section 4.2: 0.0711 + 0.5 x + 0.2576 x^2 - 0.0128 x^4, close to GELU for |x| below about 3."""


class Polynomial(nn.Module):
    """sum_k coefficients[k] x^k, on plain and on encrypted tensors. Any shape in, the same shape out.

    Encrypted: ceil(log2) of the degree levels (`sectorch.ckks.polynomial`); the GELU above takes two.

    Args:
        stands_for: what it was made in place of, and how near it is, for people.
    """

    def __init__(self, coefficients: Iterable[float], stands_for: str = ""):
        super().__init__()
        self.coefficients = tuple(float(c) for c in coefficients)
        self.stands_for = stands_for

    def extra_repr(self) -> str:
        return f"{self.coefficients}{self.stands_for and f', {self.stands_for}'}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, CKKSTensor):
            return polynomial(x, list(self.coefficients))
        result = torch.full_like(x, self.coefficients[-1])
        for c in reversed(self.coefficients[:-1]):
            result = result * x + c
        return result


ACTIVATIONS = {"gelu": GELU, "square": (0.0, 0.0, 1.0)}
_RELUS = (nn.ReLU, nn.ReLU6, nn.GELU)
_FITTED = (
    nn.CELU, nn.ELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish,
    nn.PReLU, nn.RReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink,
    nn.Threshold,
)  # fmt: skip
_FITTED_ROWS = (
    "celu", "elu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish", "selu",
    "sigmoid", "silu", "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold",
)  # fmt: skip
_NO_POLYNOMIAL = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.MultiheadAttention)
DEGREE, DOMAIN = 4, 3.0
"""Of the polynomials that are fitted: two levels, and where the paper's is close to GELU."""


def fit_polynomial(function: Callable[[torch.Tensor], torch.Tensor], name: str) -> Polynomial:
    """The polynomial of degree 4 that is nearest to a function of one number on [-3, 3].

    It interpolates by least squares in 256 Chebyshev nodes, which comes near the smallest largest error (L. N.
    Trefethen, Approximation Theory and Approximation Practice, chapter 16). An odd function gets an odd polynomial.
    Largest errors there: tanh 0.14, sigmoid 0.011, SiLU 0.015, softplus 0.003, ELU 0.06, hardtanh 0.28, LeakyReLU 0.19.
    """
    nodes = torch.cos(math.pi * (torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    powers = nodes[:, None] ** torch.arange(DEGREE + 1)
    chebyshev = torch.stack([torch.cos(k * torch.arccos(nodes)) for k in range(DEGREE + 1)], 1)
    grid = torch.linspace(-DOMAIN, DOMAIN, 1001, dtype=torch.float64)
    with torch.no_grad():
        # The nodes' sums are orthogonal; the same polynomial in powers of x.
        near = chebyshev @ (chebyshev.T @ function(nodes * DOMAIN) / (chebyshev**2).sum(0))
        found = torch.linalg.lstsq(powers, near).solution / DOMAIN ** torch.arange(DEGREE + 1)
        found = torch.where(found.abs() < 1e-9, 0.0, found).tolist()
        while len(found) > 2 and found[-1] == 0:
            found.pop()
        made = Polynomial(found)
        error = float((made(grid) - function(grid.clone())).abs().max())
    made.stands_for = f"{name} on [-{DOMAIN:g}, {DOMAIN:g}] within {error:.2g}"
    return made


class _Leaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Polynomial) or super().is_leaf_module(m, module_qualified_name)


def fhe_friendly(model: nn.Module, activation: str = "gelu") -> nn.Module:
    """A copy of a network made of operations that CKKS has; the model itself is not changed.

    ReLU, ReLU6 and GELU become the polynomial of `activation`. Every other activation becomes the polynomial of degree
    4 or less that is nearest to it on [-3, 3] (`fitted`, two levels; the copy's repr says how near), a PReLU at its
    weights' mean. Max-pooling becomes average pooling of the same windows, BatchNorm is folded into the layer before
    it (in evaluation mode, where fx can trace the network), dropout is dropped with it. Outside of [-3, 3] a polynomial
    soon leaves the function. The copy's predictions differ from the model's: fine-tune it (`fine_tune`) before use.

    Args:
        activation: "gelu" (CaPriDe's polynomial, two levels) or "square" (one level).

    Raises:
        ArgumentError: another activation; a softmax, a gated unit or attention, for which no polynomial stands.
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    coefficients = ACTIVATIONS[activation]
    friendly = copy.deepcopy(model)
    for path, layer in friendly.named_modules():
        if isinstance(layer, _NO_POLYNOMIAL):
            raise _refused(f"layer '{path}' ({type(layer).__name__})" if path else f"a {type(layer).__name__}")
    if isinstance(friendly, (*_RELUS, *_FITTED, nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveMaxPool2d)):
        return _replacement(friendly, coefficients)
    for module in list(friendly.modules()):
        for name, child in list(module.named_children()):
            new = _replacement(child, coefficients)
            if new is not child:
                setattr(module, name, new)
    graph = symbolic_trace(friendly, _Leaves)
    if graph is None:
        return friendly
    _functional(graph, coefficients)
    if not any(m.training for m in model.modules()):
        with torch.no_grad():
            _fold_batchnorm(graph)
    graph.graph.lint()
    graph.recompile()
    graph.delete_all_unused_submodules()
    return graph.train(model.training)


def fold_batchnorms(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, each BatchNorm folded into the layer before it: it takes no level of its own then.

    A copy as the model is where fx cannot see through the forward.
    """
    copied = copy.deepcopy(model).eval()
    graph = symbolic_trace(copied, _Leaves)
    if graph is None:
        return copied
    with torch.no_grad():
        _fold_batchnorm(graph)
    graph.recompile()
    graph.delete_all_unused_submodules()
    return graph


def _fold_batchnorm(graph: fx.GraphModule) -> None:
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
        place = str(before.target)
        layer = graph.get_submodule(place)
        fuse = fusers.get(type(layer))
        if fuse is None or users[place] > 1:
            continue
        if isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm2d):
            continue
        _set(graph, place, fuse(layer, norm))
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)


def _set(graph: fx.GraphModule, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(graph.get_submodule(parent) if parent else graph, name, module)


def _refused(what: str) -> ArgumentError:
    return ArgumentError(
        f"{what} has no polynomial: take it out of the model, and let who decrypts the result apply it; "
        f"secure(model) without backend='ckks' computes it"
    )


def _replacement(module: nn.Module, coefficients: tuple[float, ...]) -> nn.Module:
    if isinstance(module, _RELUS):
        return Polynomial(coefficients)
    if isinstance(module, nn.PReLU):
        slope = float(module.weight.detach().mean())
        return fit_polynomial(lambda x: torch.nn.functional.leaky_relu(x, slope), "PReLU")
    if isinstance(module, _FITTED):
        return fit_polynomial(copy.deepcopy(module).eval(), type(module).__name__)
    if isinstance(module, nn.MaxPool2d):
        return nn.AvgPool2d(
            module.kernel_size, module.stride, module.padding, module.ceil_mode, count_include_pad=False
        )
    if isinstance(module, nn.MaxPool1d):
        return nn.AvgPool1d(
            module.kernel_size, module.stride, module.padding, module.ceil_mode, count_include_pad=False
        )
    if isinstance(module, nn.AdaptiveMaxPool2d):
        return nn.AdaptiveAvgPool2d(module.output_size)
    return module


def _functional(graph: fx.GraphModule, coefficients: tuple[float, ...]) -> None:
    """F.relu, torch.relu, x.relu() and F.max_pool2d in a forward."""
    for node in list(graph.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        row = row_of(node.target if node.op == "call_function" else getattr(torch.Tensor, node.target, None))
        name = row.name if row else None
        if name in ("softmax", "log_softmax", "softmin", "glu", "scaled_dot_product_attention"):
            raise _refused(f"'{name}' in the forward")
        if name in ("relu", "relu6", "gelu", *_FITTED_ROWS):
            target = f"polynomial_{node.name}"
            made = Polynomial(coefficients) if name not in _FITTED_ROWS else fit_polynomial(_function_of(node), name)
            graph.add_submodule(target, made)
            with graph.graph.inserting_after(node):
                new = graph.graph.call_module(target, (node.args[0] if node.args else node.kwargs["input"],))
        elif name == "max_pool2d":
            settings = dict(zip(("input", "kernel_size", "stride", "padding"), node.args, strict=False)) | dict(
                node.kwargs
            )
            kept = {k: v for k, v in settings.items() if k in ("kernel_size", "stride", "padding") and v is not None}
            with graph.graph.inserting_after(node):
                new = graph.graph.call_function(nn.functional.avg_pool2d, (settings["input"],), kept)
        else:
            continue
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)


def _function_of(node: fx.Node) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a node of a function or method makes of its input, with its other arguments."""
    called: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
    named = {key: value for key, value in node.kwargs.items() if key != "input"}
    return lambda x: called(x.clone(), *node.args[1:], **named)


def fine_tune(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    *,
    epochs: int = 5,
    rate: float = 1e-3,
    batch: int = 64,
) -> nn.Module:
    """Train a few epochs with Adam, clipped gradients and cross entropy, in place; gives the model in evaluation mode.

    Polynomials explode where inputs grow: the clipping, and a penalty-free small rate, keep activations in their range.
    """
    if len(images) != len(labels) or not len(images):
        raise ArgumentError(f"fine_tune needs as many labels as images, got {len(labels)} and {len(images)}")
    optimiser = torch.optim.Adam(model.parameters(), rate)
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(labels)).split(batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
    return model.eval()
