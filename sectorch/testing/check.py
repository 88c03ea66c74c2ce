"""Tests that anybody can point at operations of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..choreography import Phase
from ..choreography.ledger import Profile
from ..errors import ArgumentError
from ..nn.reference import reference as reference_of
from ..nn.secure import secure
from ..ops.registry import REGISTERED, Registered
from ..ring.scheme import Scheme
from ..session import Session
from ..tensor.table import SHARES

SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 1, 65))


def check_op(
    func: Callable, *, operands: int = 1, examples: int = 30, seed: int = 0, arguments: dict[str, Any] | None = None
) -> float:
    """Hold a registered operation to what it says of itself, over its whole domain; returns the largest error found.

    For each example, of a shape among no, one, few and many elements and with elements that are spread over the domain,
    crowded at its ends and near zero: the result of three parties has the shape and type of torch's, is within the
    stated error of the reference in float64, equals `sectorch.reference` bit for bit if it is exact, is the same from
    prepared material (to a unit in the last place, if it is not exact), and takes the stated rounds and bytes.

    Args:
        func: the function that was given to `register_op`.
        operands: how many tensors it takes, all secret and of one shape.
        seed: of the examples.
        arguments: further arguments, by name.

    Raises:
        ArgumentError: it is not registered.
        AssertionError: what does not hold, and for which operands.
    """
    if func not in REGISTERED:
        raise ArgumentError(f"{getattr(func, '__name__', func)} was not registered with sectorch.register_op")
    stated, generator = REGISTERED[func], torch.Generator().manual_seed(seed)
    model = _Called(func, arguments or {}).eval()
    secured, largest = secure(model, session=Session()), 0.0
    for example in range(examples):
        shape = SHAPES[example % len(SHAPES)]
        x = torch.stack([_spread(shape, stated.domain, generator) for _ in range(operands)])
        with Profile() as profile:
            found = secured(x)
        largest = max(largest, _check_result(model, stated, x, found))
        _check_cost(stated, profile, found)
        secured.preprocess(operands, shape)
        again = secured(x)
        unit = 0.0 if SHARES.row_of[func].exact else 2.0 ** -Scheme().frac_bits
        near = bool(((again.double() - found.double()).abs() <= unit).all())
        _hold(near, f"prepared and unprepared results differ for operands {x.tolist()}")
    return largest


class _Called(nn.Module):
    """The operation as a model: its operands are the rows of its input."""

    def __init__(self, func: Callable, arguments: dict[str, Any]):
        super().__init__()
        self._func, self._arguments = func, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._func(*x.unbind(), **self._arguments)


def _check_result(model: _Called, stated: Registered, x: torch.Tensor, found: torch.Tensor) -> float:
    like, exact = model(x), stated.reference(*x.double().unbind(), **model._arguments)
    _hold(
        (found.shape, found.dtype) == (like.shape, like.dtype),
        f"the result is {tuple(found.shape)} of {found.dtype}, torch's {tuple(like.shape)} of {like.dtype}",
    )
    error = (found.double() - exact).abs()
    allowed = torch.as_tensor(stated.error(exact) if callable(stated.error) else stated.error).expand(error.shape)
    size = like.double().abs().nan_to_num(0, 0, 0)
    places = size * torch.finfo(like.dtype).eps if like.is_floating_point() else 0.0
    wrong = ~(error <= allowed + places)  # the result is rounded to torch's type; NaN is wrong
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
        raise AssertionError(
            f"for operands {x[(slice(None), *at)].tolist()} the result is {float(found[at])}, the reference "
            f"{float(exact[at])}: an error of {float(error[at]):.3g}, and {float(allowed[at]):.3g} is stated"
        )
    ideal = reference_of(model)(x).double()
    if SHARES.row_of[model._func].exact:
        _hold(
            torch.equal(ideal, found.double()),
            f"it is said to be exact, and differs from the reference for {x.tolist()}",
        )
    inside = bool(((ideal - exact).abs() <= allowed + places).all())
    _hold(inside, "sectorch.reference is not within the stated error")
    return float(error.max()) if error.numel() else 0.0


def _hold(right: bool, said: str) -> None:
    if not right:
        raise AssertionError(said)


def _check_cost(stated: Registered, profile: Profile, found: torch.Tensor) -> None:
    """Beside the sharing of the operands, the revealing of the result and the check of the range."""
    around = {"share", "reveal", "guard"}
    own = [m for m in profile.ledger if m.phase == Phase.ONLINE and m.protocol not in around]
    if stated.rounds is not None and own:
        waited = 1 + max(m.round for m in own) - min(m.round for m in own)
        _hold(waited <= stated.rounds, f"{waited} rounds online, and {stated.rounds} are stated")
    if stated.bytes is not None and found.numel() >= 64:
        sent = sum(m.bytes for m in own) / found.numel()
        _hold(sent <= stated.bytes, f"{sent:.2f} bytes online per element, and {stated.bytes} are stated")


def _spread(shape: tuple[int, ...], domain: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    """Multiples of a unit in the last place: anywhere in the domain, at its ends, near zero on a scale of powers."""
    scheme = Scheme()
    unit, limit = 2.0**-scheme.frac_bits, scheme.activation_limit - 1
    low, high = max(domain[0], -limit), min(domain[1], limit)
    count = torch.Size(shape).numel()
    anywhere = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    powers = 2.0 ** (-20 + 32 * torch.rand(count, generator=generator, dtype=torch.float64))
    signs = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0).double()
    ends = torch.where(torch.rand(count, generator=generator) < 0.5, low, high)
    kinds = torch.randint(4, (count,), generator=generator)
    x = torch.stack((anywhere, powers * signs, ends, low + powers), 1)[torch.arange(count), kinds]
    x = (x.clamp(low, high) / unit).round() * unit
    return x.clamp(_up(low, unit), -_up(-high, unit)).view(shape)


def _up(value: float, unit: float) -> float:
    """The next multiple of a unit."""
    return float(-(-value // unit) * unit)
