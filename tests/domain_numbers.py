"""What the tests of whole domains share: numbers that are multiples of the last place, and comparison with torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import sectorch

BITS = 20
LAST = 2.0**-BITS
LIMIT = 2.0**16


def grid(values: torch.Tensor, frac_bits: int = BITS) -> torch.Tensor:
    return (values.double() * 2.0**frac_bits).round() / 2.0**frac_bits


def shared(x: torch.Tensor, frac_bits: int = BITS) -> torch.Tensor:
    """Shares with the largest limit of activations that functions take: 2^(56 - 2f)."""
    return sectorch.share(x, scheme=sectorch.Scheme(frac_bits, limit_bits=56 - 2 * frac_bits))


numbers = st.integers(1, 36).flatmap(lambda bits: st.integers(-(2**bits) + 1, 2**bits - 1)).map(lambda k: k * LAST)


def close(
    function: Callable, x: torch.Tensor, relative: float = 1e-5, ulps: float = 8, wanted: torch.Tensor | None = None
) -> None:
    """`wanted`: the exact result, where torch's own overflows on the way to it."""
    y = function(x) if wanted is None else wanted
    got = function(shared(x)).reveal()
    bound = ulps * LAST + relative * y.abs()
    excess = ((got - y).abs() - bound).flatten()
    worst = int(excess.argmax())
    assert excess[worst] <= 0, f"{got.flatten()[worst]}, not {y.flatten()[worst]}"


def layer_norm(eps: float) -> Callable:
    return lambda x: F.layer_norm(x, x.shape[-1:], eps=eps)
