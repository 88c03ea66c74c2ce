"""Runs a row's samples: on plain torch, on secret tensors in several arrangements, and on shapes only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from op_rows.base import Data, OpRow, Sample, tolerance, whole_numbers
from torch.utils import _pytree as pytree

import sectorch
from sectorch.choreography.ledger import Profile
from sectorch.session import Session
from sectorch.tensor import PrivateTensor, Scheme, SecretTensor, SharedTensor, private_tensor
from sectorch.testing.calls import as_tuple, reveal_leaf

Arrange = Callable[["Stage", torch.Tensor], SharedTensor]


@functools.cache
def stage() -> Stage:
    """The one local session of these tests."""
    return Stage(Session())


@functools.cache
def reference_stage() -> Stage:
    """The public function: every operation on the plain backend."""
    return Stage(Session(reference=True))


class Stage:
    """A session and the ways to bring a tensor into it."""

    def __init__(self, session: Session):
        self.session = session

    def share(self, plain: torch.Tensor) -> Any:
        if plain.is_complex():
            return torch.complex(self.share(plain.real.contiguous()), self.share(plain.imag.contiguous()))
        return sectorch.share(plain, session=self.session)

    def private(self, plain: torch.Tensor) -> PrivateTensor:
        return private_tensor(plain, self.session, self.session.answering[0], Scheme(), "the operand")

    def place(self, role: str, plain: torch.Tensor, arrange: Arrange | None = None) -> torch.Tensor:
        if role == "public":
            return plain
        if not self.session.runtime.here:
            plain = torch.empty_like(plain, device="meta")
        if role == "private":
            return self.private(plain)
        return (arrange or Stage.share)(self, plain)


# Arrangements: the same values as shares of other fraction bits, or of other strides.


def scale_0(at: Stage, plain: torch.Tensor) -> SharedTensor:
    """Whole numbers are shared without fraction bits, and may then pass for floats."""
    return at.share(plain.long()).to(plain.dtype) if plain.is_floating_point() else at.share(plain)


def scale_3(at: Stage, plain: torch.Tensor) -> SharedTensor:
    return at.share((plain * 8).long()) * 0.125 if plain.is_floating_point() else at.share(plain)


def scale_26(at: Stage, plain: torch.Tensor) -> SharedTensor:
    return at.share(plain * 64) / 64 if plain.is_floating_point() else at.share(plain)


def scale_40(at: Stage, plain: torch.Tensor) -> SharedTensor:
    return at.share(plain) * torch.ones(()) if plain.is_floating_point() else at.share(plain)


def transposed(at: Stage, plain: torch.Tensor) -> SharedTensor:
    return at.share(plain.transpose(0, -1).contiguous()).transpose(0, -1) if plain.dim() > 1 else at.share(plain)


def strided(at: Stage, plain: torch.Tensor) -> SharedTensor:
    if not plain.dim():
        return at.share(plain)
    return at.share(torch.stack([plain, torch.zeros_like(plain)], -1).flatten(-2))[..., ::2]


def plain_arguments(
    row: OpRow, number: int, sample: Sample, grid: bool = True, double: bool = False, rounded: bool = False
) -> tuple[tuple, dict]:
    """The sample's arguments as plain tensors: in float64 for the reference; what will be shared rounded if asked."""
    count = iter(range(1000))

    def make(leaf: Any) -> Any:
        if isinstance(leaf, Data):
            plain = leaf.make(f"{row.name} {number} {next(count)}", grid)
            leaf = whole_numbers(leaf, plain) if rounded and leaf.role == "shared" else plain
        if double and isinstance(leaf, torch.Tensor) and leaf.is_complex():
            return leaf.to(torch.complex128)
        return leaf.double() if double and isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(make, (sample.args, dict(sample.kwargs)))


def secret_arguments(
    row: OpRow,
    number: int,
    sample: Sample,
    *,
    at: Stage | None = None,
    grid: bool = True,
    arrange: Arrange | None = None,
) -> tuple[tuple, dict]:
    """The sample's arguments, each with the party that its `Data` names."""
    at, count = at or stage(), iter(range(1000))

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, Data):
            return leaf
        plain = leaf.make(f"{row.name} {number} {next(count)}", grid)
        plain = whole_numbers(leaf, plain) if arrange is scale_0 and leaf.role == "shared" else plain
        return at.place(leaf.role, plain, arrange)

    return pytree.tree_map(make, (sample.args, dict(sample.kwargs)))


def reference(
    key: Callable, row: OpRow, number: int, sample: Sample, grid: bool = True, rounded: bool = False
) -> tuple[Any, Any]:
    """torch's result in float64, and the one in float32 that shapes and dtypes are compared with."""
    args, kwargs = plain_arguments(row, number, sample, grid, True, rounded)
    exact = called(key, args, kwargs)
    args, kwargs = plain_arguments(row, number, sample, grid, False, rounded)
    return as_tuple(exact), as_tuple(called(key, args, kwargs))


def called(key: Callable, args: tuple, kwargs: dict) -> Any:
    """The result, or of `x[index] = value`, which has none, what was written into."""
    result = key(*args, **kwargs)
    return args[0] if key is torch.Tensor.__setitem__ else result


def check(
    result: Any,
    expected: tuple[Any, Any],
    row: OpRow,
    ulps: float,
    relative: float,
    what: str,
    plain: list[torch.Tensor] | None = None,
) -> None:
    """Shape, dtype, container and, within ulps + relative |y|, the values y are torch's.

    plain: the values of the result's leaves, where they were revealed before.
    """
    exact, typed = expected
    outputs, spec = pytree.tree_flatten(as_tuple(result))
    wanted, wanted_spec = pytree.tree_flatten(exact)
    assert spec == wanted_spec, f"{what} gave {spec}, torch {wanted_spec}"
    plain = [reveal_leaf(output) for output in outputs] if plain is None else plain
    for output, opened, value, like in zip(outputs, plain, wanted, pytree.tree_leaves(typed), strict=True):
        assert isinstance(output, SecretTensor) != row.plain, f"{what} gave a {type(output).__name__}"
        assert output.shape == like.shape, f"{what} gave shape {output.shape}, torch {like.shape}"
        assert output.dtype == like.dtype, f"{what} gave {output.dtype}, torch {like.dtype}"
        close(opened, value, ulps, what, relative)


def close(output: torch.Tensor, value: torch.Tensor, ulps: float, what: str, relative: float = 0.0) -> None:
    if value.is_complex():
        output, value = (torch.view_as_real(v.resolve_conj()) for v in (output, value))
    assert output.shape == value.shape, f"{what} revealed shape {output.shape}, torch {value.shape}"
    if value.is_floating_point():
        error, bound = (output.double() - value.double()).abs(), tolerance(ulps, relative, value)
        assert bool((error <= bound).all()), (
            f"{what} errs by {float(error.max()) * 2**20:.2f} ulps, allowed {ulps:.2f} + {relative:.2f} |y|:\n"
            f"{output}\ninstead of\n{value}"
        )
    else:
        assert torch.equal(output, value), f"{what} gave\n{output}\ninstead of\n{value}"


def lines(profile: Profile) -> list[tuple]:
    """The ledger without what names a session: calls are numbered as they come."""
    calls: dict[int, int] = {}
    return [
        (calls.setdefault(m.call, len(calls)), m.path, m.label, m.src.name, m.dst.name, m.phase, m.round,
         tuple(m.shape), m.dtype, m.mask, m.shows)
        for m in profile.ledger
    ]  # fmt: skip


@functools.cache
def _signatures() -> dict[Callable, inspect.Signature]:
    overrides = torch.overrides.get_testing_overrides()
    return {key: inspect.signature(like) for key, like in overrides.items()}


def by_name(key: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The same call with every argument named that has a name, or None where torch's documentation gives none."""
    signature = _signatures().get(key)
    if signature is None:
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    kinds = signature.parameters
    if "out" in bound.arguments or any(
        kinds[name].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for name in bound.arguments
    ):
        return None
    named = dict(bound.arguments)
    first = (named.pop("self"),) if "self" in named else ()
    return first, named


def spelled(key: Callable) -> str:
    """How a user writes the function."""
    name = getattr(key, "__name__", str(key))
    if name == "__get__":
        return f"Tensor.{key.__self__.__name__}"
    owner = getattr(key, "__qualname__", "") + str(getattr(key, "__objclass__", ""))
    if "Tensor" in owner:
        return f"Tensor.{name}"
    return f"F.{name}" if (getattr(key, "__module__", "") or "").endswith("nn.functional") else f"torch.{name}"
