"""After running: where a secure module diverges from the plain one, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..ring.scheme import scheme_fields, scheme_of
from ..shown import Shown
from ..tensor import Scheme, SharedTensor
from .check import original, plain
from .dry import shared_inputs
from .eager import watched
from .inputs import Inputs
from .module import SecureModule
from .secure import secure
from .trace import run
from .where import place_of


@dataclass
class Divergence:
    """One layer of `diff`: the plain values' range, and the largest error of the secure ones."""

    name: str
    shape: tuple
    low: float
    high: float
    error: float
    beyond: bool


@dataclass
class Difference(Shown):
    """What `diff` found; `first` is the first layer beyond the tolerance, or None."""

    layers: list[Divergence]
    tolerance: float

    @property
    def first(self) -> Divergence | None:
        return next((layer for layer in self.layers if layer.beyond), None)

    def __str__(self) -> str:
        return self.table(120)

    def shown(self) -> Iterator[RenderableType]:
        """A row for each layer, and which is the first that diverges."""
        table = Table(title=f"secure against plain, tolerance {self.tolerance:g} of the largest value of a layer")
        for column in ("layer", "shape", "smallest", "largest", "error"):
            table.add_column(column, justify="left" if column == "layer" else "right")
        for layer in self.layers:
            style = "red" if layer is self.first else None
            numbers = (f"{layer.low:.4g}", f"{layer.high:.4g}", f"{layer.error:.2e}")
            table.add_row(Text(layer.name), str(layer.shape), *numbers, style=style)
        yield table
        first = self.first
        yield Text("no layer diverges" if first is None else f"the first layer that diverges: {first.name}")


@scheme_fields
def diff(
    model: nn.Module,
    x: torch.Tensor | Inputs,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    tolerance: float = 1e-3,
) -> Difference:
    """Run plain and secure side by side and compare every layer: for development, since every value is revealed.

    The plain values are the module's own, in float64: of each function that its forward calls, and the result of the
    module itself. Of a module that runs operation by operation the layers are its submodules.

    Args:
        scheme: that of `secure`, for a plain module.
        tolerance: of the largest magnitude of the layer's plain output.
    """
    secured = model if isinstance(model, SecureModule) else secure(model, scheme_of("diff", scheme))
    inputs = secured.inputs_of(x)
    secured.choose_format(inputs)
    given = inputs.wide()
    program = secured.program(inputs)
    layers: list[Divergence] = []
    with secured.session.call(secured.party):
        shared = shared_inputs(inputs, secured.session, secured.scheme, secured.party)
        module, weights = secured.bind(secured.session, secured.party)
        if program is None:
            y, expected = _submodules(secured.plain, module, given, shared, layers, tolerance)
        else:
            own = values(secured, inputs, given)

            def compare(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
                y = compute(*args, **kwargs)
                plain = own.get(node.meta.get("value", ""))
                _compare(place_of(node).removeprefix("layer "), y, plain, layers, tolerance)
                return y

            y, expected = (
                run(program, weights.of(program), shared.tensors, step=compare),
                original(secured.plain, given),
            )
        for a, b in zip(pytree.tree_leaves(y), pytree.tree_leaves(expected), strict=True):
            _compare("(the result)", a, b, layers, tolerance)
    return Difference(layers, tolerance)


def values(secured: SecureModule, inputs: Inputs, given: Inputs) -> dict[str, torch.Tensor]:
    """The value of each function that the module's forward calls, in float64, by the name of its node."""
    own: dict[str, torch.Tensor] = {}

    def remember(node: fx.Node, compute: Any, args: tuple, kwargs: dict) -> Any:
        own[node.name] = y = compute(*args, **kwargs)
        return y

    recorded = secured.recorded(inputs)
    if recorded is not None:
        plain(recorded, given, step=remember)
    return own


def _submodules(
    module: nn.Module, bound: nn.Module, given: Inputs, shared: Inputs, layers: list, tolerance: float
) -> tuple[Any, Any]:
    """Run a module and its bound form with a hook on each of their submodules; gives both results."""
    module = copy.deepcopy(module)
    own: list[Any] = []
    names = {id(layer): (name, type(layer).__name__) for name, layer in bound.named_modules()}
    for name, layer in module.named_modules():
        if name:
            layer.register_forward_hook(lambda m, i, y: own.append(y))
    expected = original(module, given)
    values = iter(own)

    def compare(layer: nn.Module, _: Any, y: Any) -> None:
        name, kind = names[id(layer)]
        _compare(f"'{name}' ({kind})", y, next(values, None), layers, tolerance)

    for name, layer in bound.named_modules():
        if name:
            layer.register_forward_hook(compare)
    return watched(bound, shared), expected


def _compare(name: str, y: Any, expected: Any, layers: list[Divergence], tolerance: float) -> None:
    """Add a row for a secret value and its plain one."""
    if not isinstance(y, SharedTensor) or not isinstance(expected, torch.Tensor) or not expected.numel():
        return
    expected = expected.to(torch.float64)
    if tuple(y.size()) != tuple(expected.shape):
        layers.append(Divergence(name, tuple(y.size()), math.nan, math.nan, math.inf, True))
        return
    worst, largest = float((y.reveal().to(torch.float64) - expected).abs().max()), float(expected.abs().max())
    beyond = not worst <= tolerance * max(largest, 1e-12)
    low, high = float(expected.min()), float(expected.max())
    layers.append(Divergence(name, tuple(expected.shape), low, high, worst, beyond))
