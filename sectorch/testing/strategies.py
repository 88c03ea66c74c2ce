"""hypothesis strategies for what sectorch takes: tensors, calls, number formats, models, programs, sessions.

    from hypothesis import given
    from sectorch.testing import strategies as sts

    @given(sts.tensors(domain=(-4, 4)))
    def test_mine(x): ...

What they give depends on hypothesis's draws alone, so that a failure shrinks and is found again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from ..session import Session
from ..tensor import Scheme
from .calls import Call
from .optional import strategies as st
from .programs import Program as Program
from .programs import programs as programs
from .random_modules import random_module

LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "flipped")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def shapes(dims: tuple[int, int] = (0, 4), sides: tuple[int, int] = (0, 4)) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with so many dimensions, each of so many entries; with sides from 0 on, empty ones too."""
    return st.lists(st.integers(*sides), min_size=dims[0], max_size=dims[1]).map(tuple)


@st.composite
def broadcastable(draw: Any, count: int = 2, dims: tuple[int, int] = (0, 3), side: int = 3) -> tuple[tuple, ...]:
    """So many shapes that broadcast together: dimensions of one, and leading ones left out."""
    whole = draw(st.lists(st.integers(1, side), min_size=dims[0], max_size=dims[1]))
    found = []
    for _ in range(count):
        kept = draw(st.integers(0, len(whole)))
        ones = [draw(st.booleans()) for _ in range(kept)]
        found.append(tuple(1 if one else n for one, n in zip(ones, whole[len(whole) - kept :], strict=True)))
    return tuple(found)


@st.composite
def tensors(
    draw: Any,
    shape: Any = None,
    *,
    dtype: Any = torch.float32,
    domain: tuple[float, float] | None = None,
    scheme: Scheme | None = None,
    layouts: Sequence[str] = LAYOUTS,
    special: Sequence[float] = (),
) -> torch.Tensor:
    """Tensors that can be shared, of which a fixed-point number holds every entry exactly, as far as the dtype does.

    Entries are spread over the whole domain, crowded at its ends and near zero on a scale of powers, and may be special
    values. Floating-point entries are multiples of the format's last place.

    Args:
        shape: a shape, or a strategy of shapes; up to 4 dimensions of up to 4 entries unless named.
        dtype: a dtype, or a sequence of them to choose from.
        domain: from where to where; what the scheme takes as an input unless named.
        scheme: the number format, `Scheme()` unless named.
        layouts: of `LAYOUTS`: how entries lie in memory; the same values whatever it is.
        special: values that an entry may have beside, in the domain or not (`float("nan")` to see what refuses it).

    Raises:
        ArgumentError: an empty domain, an unknown layout.
    """
    scheme = scheme or Scheme()
    unit, limit = 2.0**-scheme.frac_bits, scheme.activation_limit
    low, high = domain or (-limit + unit, limit - unit)
    if not low <= high:
        raise ArgumentError(f"a domain goes from a number to a larger one, got {domain}")
    if unknown := set(layouts) - set(LAYOUTS):
        raise ArgumentError(f"layouts are {', '.join(LAYOUTS)}, got {', '.join(sorted(unknown))}")
    of = draw(st.sampled_from(dtype)) if isinstance(dtype, (list, tuple)) else dtype
    size = draw(shape if isinstance(shape, st.SearchStrategy) else shapes() if shape is None else st.just(tuple(shape)))
    layout = draw(st.sampled_from(list(layouts)))
    if layout == "expanded" and size:  # one row, seen as many
        size, rows = (1, *size[1:]), size[0]
    else:
        rows = None
    if of == torch.bool:
        entries: st.SearchStrategy[Any] = st.booleans()
    elif of.is_floating_point:
        entries = _multiples(low, high, unit)
        entries = st.one_of(entries, st.sampled_from(list(special))) if special else entries
    else:
        info = torch.iinfo(of)
        entries = st.integers(max(math.ceil(low), info.min), min(math.floor(high), info.max))
    count = math.prod(size)
    x = torch.tensor(draw(st.lists(entries, min_size=count, max_size=count)), dtype=of).reshape(size)
    return _laid(x if rows is None else x.expand(rows, *size[1:]), layout)


def _multiples(low: float, high: float, unit: float) -> st.SearchStrategy[float]:
    """Multiples of a unit: anywhere, at the ends, and near zero on a scale of powers of two."""
    first, last = math.ceil(low / unit), math.floor(high / unit)
    near = (
        st.integers(0, 40).flatmap(lambda k: st.sampled_from([1 << k, -(1 << k)])).filter(lambda n: first <= n <= last)
    )
    ends = [n for n in (first, last, 0, first + 1, last - 1) if first <= n <= last]
    return st.one_of(st.integers(first, last), st.sampled_from(ends), near).map(lambda n: n * unit)


def _laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same entries, lying in memory as named, where the shape has a way to."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and x.dim():
        return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2]
    if layout == "flipped" and x.dim():
        return x.flip(0).contiguous().flip(0)
    return x


@st.composite
def calls(draw: Any, count: int = 2, **how: Any) -> Call:
    """Calls with so many tensors that broadcast together; the arguments of `tensors` go along."""
    return Call(*(draw(tensors(shape, **how)) for shape in draw(broadcastable(count))))


@st.composite
def schemes(draw: Any, frac_bits: tuple[int, int] = (1, 26), relu: Sequence[str] = ("exact",)) -> Scheme:
    """Number formats: fraction bits, the limit of activations that leaves room for products, network, range check."""
    bits = draw(st.integers(*frac_bits))
    limit = draw(st.one_of(st.none(), st.integers(1, max(1, 61 - 2 * bits))))
    network = draw(st.sampled_from(["lan", "wan"]))
    return Scheme(
        bits, relu=draw(st.sampled_from(list(relu))), network=network, range_check=draw(st.booleans()), limit_bits=limit
    )


def modules() -> st.SearchStrategy[tuple[nn.Module, torch.Tensor]]:
    """Small modules as people write them, each with an input: layers, hooks, tied weights, code in place, branches on
    shapes. They are in evaluation mode and small enough to be run by three parties in milliseconds."""
    return st.integers(0, 2**32 - 1).map(random_module)


@st.composite
def sessions(draw: Any, answering: tuple[int, int] = (1, 3), reference: bool = True) -> Session:
    """Sessions in this process: with so many answering parties, with a dealer of its own or none, or the reference."""
    if reference and draw(st.booleans()):
        return Session(reference=True)
    return Session(answering=draw(st.integers(*answering)), dealer=draw(st.sampled_from(["Q", "D"])))
