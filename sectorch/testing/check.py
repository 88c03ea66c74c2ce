"""`check_op`: an operation held to its reference, and to what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
from .called import Checked
from .calls import Allowed, Call

SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 1, 65))


def check_op(
    func: Callable,
    samples: Iterable[Any] | None = None,
    *,
    error: float | Allowed | None = None,
    reference: Callable | None = None,
    errors: Iterable[Any] = (),
    refusals: bool = False,
    operands: int = 1,
    examples: int = 30,
    seed: int = 0,
    arguments: dict[str, Any] | None = None,
    elements: int = 1 << 16,
) -> float:
    """Hold an operation to its reference and to what it says of itself; returns the largest error found.

    An operation of `register_op` is held to what it states over its whole domain: for each example, of a shape among
    no, one, few and many elements and with elements that are spread over the domain, crowded at its ends and near zero,
    the result of three parties has the shape and type of torch's, is within the stated error of the reference in
    float64, equals `sectorch.reference` bit for bit if it is exact, is the same from prepared material (to a unit in
    the last place, if it is not exact), and takes the stated rounds and bytes.

    Any function that takes secret tensors, the library's own, a registered one or one of yours that is made of
    others, is held to `samples`: values, shapes and types are those of the plain call, all tensors shared and one
    alone; a reference session gives the same bits; every spelling of it is right, and what is in place is written;
    `out=` is refused and nothing is written; what the plain call refuses is refused by a typed error before anything
    is sent; a dry run has the messages of the real one; nothing is revealed inside; large operands give a right
    result or none; and a plain function of yours has the gradient of its reference. What does not hold is shown by a
    call as small as it was found to fail.

    Args:
        func: a function of tensors.
        samples: `Call(x, dim=1)`, tensors, tuples of arguments, or samples of torch's `OpInfo`. Without them a
            registered function gets those of its domain.
        error: how far a result may be off, as a number or a function of the true result; that which was registered
            unless given. The rounding to the result's type comes on top.
        reference: what it computes, on plain tensors; what was registered, or the function itself, unless given.
        errors: calls that must be refused by a `SectorchError`, or pairs of a call and the error.
        refusals: whether a sample may be refused by a typed error.
        operands: how many tensors a registered function takes, all secret and of one shape.
        examples, seed: of the domain's examples.
        arguments: further arguments of a registered function, by name.
        elements: of a sample at most, all its tensors together; each is computed some twenty times.

    Raises:
        ArgumentError: a function that is neither registered nor has samples, or samples and no error; no reference: it
            does not run on plain tensors; a sample of too many elements.
        AssertionError: what does not hold, and for which call.
    """
    stated, given = REGISTERED.get(func), arguments or {}
    name, largest = getattr(func, "__name__", func), 0.0
    if samples is None:
        if stated is None:
            raise ArgumentError(
                f"{name} was not registered with sectorch.register_op; register it with its domain and error, or give "
                f"check_op samples=[Call(x, ...), ...] and error="
            )
        generator = torch.Generator().manual_seed(seed)
        largest = _over_domain(func, stated, generator, operands, examples, given)
        samples = [
            Call(*(_spread(shape, stated.domain, generator) for _ in range(operands)), **given)
            for shape in ((2, 3), ())
        ]
    allowed = stated.error if error is None and stated is not None else error
    if allowed is None:
        raise ArgumentError(
            f"check_op of {name} takes error=, how far a result may be off: a number, or a function of it"
        )
    calls = [Call.of(sample) for sample in samples]
    for call in calls:
        if (count := sum(x.numel() for x in call.tensors)) > elements:
            raise ArgumentError(
                f"a sample of {name} has {count} elements, above elements={elements}: too large for a check that "
                f"computes it some twenty times; give a smaller sample, or more elements="
            )
    true = reference or (None if stated is None else stated.reference)
    domain = (-math.inf, math.inf) if stated is None else stated.domain
    checked = Checked(func, allowed if callable(allowed) else lambda exact: allowed, true, domain, refusals)
    return max([largest, *map(checked.error_of, calls), *[checked.refuses(pair) for pair in errors]])


def _over_domain(
    func: Callable, stated: Registered, generator: torch.Generator, operands: int, examples: int, given: dict[str, Any]
) -> float:
    """A registered function by three parties, its examples spread over its domain."""
    model = _Called(func, given).eval()
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
