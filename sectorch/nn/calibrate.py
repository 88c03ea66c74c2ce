"""Pick the number representation from the values that a model really sees."""

from __future__ import annotations

import copy
import math

import torch
from torch import fx, nn

from ..errors import ArgumentError, FixedPointRangeError
from ..ring import HEADROOM_BITS
from ..tensor import Scheme
from .passes import optimise
from .trace import run, trace, where

MARGIN_BITS = 3
"""Values may exceed those of the calibration batch by this factor, as a power of two."""

SMALLEST = 10
"""Fewer fraction bits than this are not worth computing with."""


def calibrate(
    model: nn.Module, batch: torch.Tensor, relu: str = "exact", frac_bits: int = 20, network: str = "lan"
) -> Scheme:
    """The scheme with the most fraction bits, up to `frac_bits`, that holds all values of a plain run with a margin.

    Every activation is then taken to lie below the largest one seen times 2^`MARGIN_BITS`, and comparisons look at no
    plane above. An input that exceeds this gives a wrong result: calibrate on data like that of the queries.

    Raises:
        FixedPointRangeError: naming the layer whose values cannot fit.
        ArgumentError: fx could not trace the module.
    """
    plain = copy.deepcopy(model).double().requires_grad_(False)
    graph = trace(plain)
    if graph is None:
        raise ArgumentError("calibration needs the layers of a traced module; fx could not trace this one")
    graph = optimise(graph)
    largest, at = ranges(graph, batch)
    value_bits = max(1, math.ceil(math.log2(max(largest, 2.0**-20)))) + MARGIN_BITS
    hidden = any(_hides_values(graph.get_submodule(n.target)) for n in graph.graph.nodes if n.op == "call_module")
    # A layer's sum has 2 f fraction bits, six more where averages add them, and one for a difference of two values.
    fitting = (HEADROOM_BITS - 1 - value_bits - 6) // 2
    if fitting < SMALLEST:
        raise FixedPointRangeError(
            f"{at} reaches magnitude {largest:.4g}, which leaves {fitting} fraction bits; normalise the model there"
        )
    return Scheme(min(frac_bits, fitting), relu, None if hidden else value_bits, network)


def _hides_values(module: nn.Module) -> bool:
    """Whether a layer is one step of the graph with activations inside: nobody saw them, so nothing is assumed."""
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or any(True for _ in module.children())


def ranges(graph: fx.GraphModule, batch: torch.Tensor) -> tuple[float, str]:
    """The largest magnitude of any value of a plain run, and where it stands."""
    largest, at = float(batch.abs().max()), "the input"

    def watch(node, compute, args, kwargs):
        nonlocal largest, at
        y = compute(*args, **kwargs)
        if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
            seen = float(y.abs().max())
            if not math.isfinite(seen):
                raise FixedPointRangeError(f"{where(node, graph)} gives a value that is not finite on the batch")
            if seen > largest:
                largest, at = seen, where(node, graph)
        return y

    with torch.no_grad():
        run(graph, batch.to(torch.float64), step=watch)
    return largest, at
