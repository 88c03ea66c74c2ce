"""One call of a function on tensors in shares that autograd follows, judged against plain autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import sectorch
from sectorch import DifferentiableTensor, Scheme, Session
from sectorch.errors import RangeExceededError, SectorchError
from sectorch.testing.calls import FOREIGN, INVALID, OUT_OF_RANGE, REFUSED, RIGHT, WRONG, Call, CallOutcome

PLACES = 64
"""How many last places of the largest gradient a result and a gradient may be off beside what perturbation explains."""

SHAKEN = 8
"""What inputs are moved by, in last places: a kink within that distance may go either way."""


@dataclass
class Plain:
    """Results and gradients of a call in float64: of each input, or None where it has none."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


def floats(tree: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(tree) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def on_grid(leaf: Any, bits: int) -> Any:
    """Floats as multiples of the last place, in float64; those that want a gradient go on wanting it."""
    if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
        return leaf
    return ((leaf.detach().double() * 2.0**bits).round() * 2.0**-bits).requires_grad_(leaf.requires_grad)


def wanting(tree: Any) -> Any:
    """Every tensor of floats with a gradient."""
    return pytree.tree_map(lambda v: v.detach().clone().requires_grad_() if floats(v) else v, tree)


def followed(leaf: Any) -> bool:
    """Whether autograd follows it; what it does not follow is public."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def weighted(results: list[torch.Tensor], scale: float = 1.0) -> Any:
    """A sum of results with weights that are the same in every call: multiples of 1/64, times the scale."""
    generator = torch.Generator().manual_seed(7)
    total: Any = 0
    for y in results:
        weights = (torch.rand(y.shape, generator=generator, dtype=torch.float64) * 128 - 64).round() / 64
        total = total + (y * (weights * scale).to(y.dtype)).sum()
    return total


def in_plain(f: Callable, call: Call, scale: float = 1.0) -> Plain | None:
    """None where nothing that comes out has a gradient."""
    given: list[torch.Tensor] = []

    def leaf(v: Any) -> Any:
        if followed(v):
            v = v.detach().clone().requires_grad_()
            given.append(v)
        return v

    torch.manual_seed(3)
    results = [y for y in floats(call.map(leaf).on(f)) if y.requires_grad]
    if not results:
        return None
    found = torch.autograd.grad(weighted(results, scale), given, allow_unused=True)
    return Plain([y.detach() for y in results], list(found))


def largest(tensors: list[torch.Tensor | None]) -> float:
    return max((float(t.abs().max()) for t in tensors if t is not None and t.numel()), default=0.0)


def spread(f: Callable, call: Call, at: Plain, scale: float, last: float, shaken: float) -> list[Any]:
    """How far each gradient moves with inputs that are moved by so many last places."""
    found = [None if g is None else torch.zeros_like(g) for g in at.gradients]
    for seed in range(6 if shaken else 0):
        generator = torch.Generator().manual_seed(seed)

        def moved(v: Any, generator: torch.Generator = generator) -> Any:
            if not followed(v):
                return v
            shift = (torch.rand(v.shape, generator=generator, dtype=v.dtype) * 2 - 1) * shaken * last
            return (v.detach() + shift).requires_grad_()

        try:
            other = in_plain(f, call.map(moved), scale)
        except Exception:  # an input just outside the domain
            continue
        assert other is not None
        for i, (g, h) in enumerate(zip(at.gradients, other.gradients, strict=True)):
            if g is not None and h is not None:
                found[i] = torch.maximum(found[i], (g - h).abs().nan_to_num(torch.inf, torch.inf))
    return found


def revealed(g: Any) -> torch.Tensor | None:
    """A gradient in plain; torch gives plain zeros where nothing depends on an input."""
    return g.reveal() if isinstance(g, DifferentiableTensor) else g


def outcome(
    f: Callable, call: Call, session: Session, scheme: Scheme | None = None, shaken: float = SHAKEN
) -> CallOutcome:
    """How a call and its backward pass went; its tensors that want a gradient are shared, and others are public.

    A gradient is right if it is that of inputs that are a few last places away (Higham's mixed stability), within so
    many places of the largest: a row rounds its operands, which moves its inputs, and its own results. With `shaken`
    of 0 the inputs stand where they are, as kinks and ties have it.
    """
    scheme = scheme or Scheme()
    bits, last = scheme.frac_bits, 2.0**-scheme.frac_bits
    dtypes = [v.dtype for v in floats((call.args, call.kwargs)) if v.requires_grad]
    call = call.map(lambda v: on_grid(v, bits))
    try:
        at = in_plain(f, call)
        if at is None:
            return CallOutcome(INVALID, "no result has a gradient")
        finite = all(t is None or bool(t.isfinite().all()) for t in (*at.gradients, *at.results))
        scale = 1.0
        while finite and largest(at.gradients) * scale > 2:
            scale /= 2
        at = in_plain(f, call, scale)
        assert at is not None
    except Exception as error:
        return CallOutcome(INVALID, f"torch: {type(error).__name__}: {error}")
    secrets: list[DifferentiableTensor] = []

    def leaf(v: Any) -> Any:
        if not followed(v):
            return v.to(torch.float32) if floats(v) else v
        shares = sectorch.share(v.detach().to(dtypes[len(secrets)]), session=session, scheme=scheme)
        secrets.append(DifferentiableTensor(shares, requires_grad=True))
        return secrets[-1]

    try:
        torch.manual_seed(3)
        shared = call.map(leaf)
        results = [y for y in floats(shared.on(f)) if y.requires_grad]
        if len(results) != len(at.results):
            return CallOutcome(WRONG, f"{len(results)} results with a gradient, and not {len(at.results)}")
        weighted(results, scale).backward()
        shown = [y.detach().reveal() for y in results]
        gradients = [revealed(s.grad) for s in secrets]
    except RangeExceededError as error:
        return CallOutcome(OUT_OF_RANGE, str(error))
    except SectorchError as error:
        return CallOutcome(REFUSED, f"{type(error).__name__}: {error}")
    except Exception as error:
        return CallOutcome(FOREIGN, f"{type(error).__name__}: {error}")
    if not finite:
        wrong = [i for i, g in enumerate(at.gradients) if g is not None and not g.isfinite().all()]
        return CallOutcome(WRONG if wrong else RIGHT, f"a number where plain autograd has none: {wrong}")
    worst = 0.0
    for y, z in zip(at.results, shown, strict=True):
        error = (y - z.double()).abs()
        if error.numel() and (worst := max(worst, float((error / y.abs().clamp(min=1)).max()))) > 4 * PLACES * last:
            return CallOutcome(WRONG, f"a result is off by {worst / last:.0f} places", worst)
    worst = 0.0
    size = max(1.0, largest(at.gradients))
    for g, h, more in zip(at.gradients, gradients, spread(f, call, at, scale, last, shaken), strict=True):
        if g is None or h is None:
            other = g if h is None else h
            if other is not None and other.numel() and other.abs().max() > 0:
                return CallOutcome(WRONG, "one of both has no gradient")
            continue
        if g.shape != h.shape:
            return CallOutcome(WRONG, f"gradient of shape {tuple(h.shape)}, and not {tuple(g.shape)}")
        error = ((g - h.double()).abs() - 2 * more).clamp(min=0)
        if error.numel() and (worst := max(worst, float(error.max()))) > PLACES * last * size:
            return CallOutcome(
                WRONG, f"a gradient is off by {worst / last:.0f} places of {largest(at.gradients):.3g}", worst
            )
    return CallOutcome(RIGHT, error=worst)
