"""What the estimators have in common: data in shares of any owner or plain arrays, and coefficients that are secret
until they are revealed."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..deprecation import deprecate
from ..errors import ArgumentError, FixedPointRangeError, RangeExceededError, SectorchError, ShapeError
from ..ring import encode
from ..session import Session
from ..tensor import SharedTensor, share_tensor
from ..tensor.infinity import refuse_infinite
from ..tensor.table import Context
from ..training.tensor import DifferentiableTensor
from .errors import FitError
from .optional import BaseEstimator


class SharedEstimator(BaseEstimator):
    """A scikit-learn estimator of data in shares.

    Fitted on SharedTensors, its attributes are SharedTensors, which nobody knows, and so is what it predicts;
    `revealed` gives an ordinary estimator to whoever is named. Plain arrays are computed with as on shares, by the
    reference of the protocols (`Session(reference=True)`): the same numbers, of what is no secret. What is predicted
    has the same shape and dtype on arrays and on shares.
    """

    _fitted: tuple[str, ...] = ()
    """The attributes that a fit on shares makes secret."""

    def revealed(self, to: Any = None) -> Any:
        """An estimator of the same fit in plain, which Q learns, or the parties named (`SharedTensor.reveal`).

        This estimator stays as it is.

        Raises:
            FitError: there is no fit; nobody learned anything else.
        """
        made = copy.copy(self)
        made._learn(to)
        return made

    def reveal(self, to: Any = None) -> Any:
        """The old form of `revealed`, for this release: changes this estimator, and gives it.

        Raises:
            FitError: as of `revealed`.

        Warns:
            DeprecationWarning: always.
        """
        deprecate("estimator.reveal(), which changes the estimator,", "estimator = estimator.revealed()")
        self._learn(to)
        return self

    def _learn(self, to: Any = None) -> None:
        """Put the revealed fit in the place of the one in shares."""
        try:
            secrets = {name: getattr(self, name, None) for name in self._fitted}
            learned = {name: wide(v).reveal(to).numpy() for name, v in secrets.items() if isinstance(v, SharedTensor)}
        except RangeExceededError:
            raise FitError(self._reason()) from None
        vars(self).update({name: value.astype(np.float64) for name, value in learned.items()})

    def _reason(self) -> str:
        return (
            f"there is no {type(self).__name__} of this data: a value of X is not below the activation limit (4,096 "
            f"with 20 fraction bits); divide all columns by one number that brings them below it"
        )

    def __sklearn_is_fitted__(self) -> bool:
        return all(hasattr(self, name) for name in self._fitted)


def secret(x: Any) -> bool:
    return isinstance(x, (SharedTensor, DifferentiableTensor))


def shared(x: Any) -> SharedTensor:
    """Of what is in shares, the SharedTensor."""
    return x.as_shared() if isinstance(x, DifferentiableTensor) else x


def real(x: SharedTensor) -> SharedTensor:
    """The same for float32, whatever it was shared as."""
    refuse_infinite(x, "an estimator")
    return x.like(x.shares, bound=x.bound, dtype=torch.float32)


def wide(x: SharedTensor) -> SharedTensor:
    """The same for float64, which holds every fixed-point number: the dtype of results on plain arrays."""
    return x.like(x.shares, bound=x.bound, dtype=torch.float64)


def rows_of(x: Any, y: Any = None) -> tuple[SharedTensor, SharedTensor | None]:
    """x [n, d], and y as [n, 1], of shares.

    Raises:
        ArgumentError: one of them is plain: it would be known to all, and has to be shared by its owner.
        ShapeError: other shapes.
    """
    for name, value in (("X", x), ("y", y)):
        if value is not None and not secret(value):
            raise ArgumentError(
                f"{name} is a {type(value).__name__} and the other of X and y is in shares; share it: "
                f"sectorch.share({name}, session=..., owner=...)"
            )
    x = real(shared(x))
    if x.dim() != 2 or not min(x.shape):
        raise ShapeError(f"X in shares is [samples, features], got {tuple(x.shape)}")
    if y is None:
        return x, None
    y = real(shared(y))
    if y.numel() != x.shape[0] or y.dim() > 2 or (y.dim() == 2 and y.shape[1] != 1):
        raise ShapeError(f"y in shares is [samples] or [samples, 1] for X of {x.shape[0]} rows, got {tuple(y.shape)}")
    if x.session is not y.session or x.party != y.party or x.scheme != y.scheme:
        raise ArgumentError("X and y are of two sessions, or of two number formats; share them in one")
    return x, y.reshape(-1, 1)


@contextmanager
def fitting(*given: SharedTensor) -> Iterator[tuple[Context, list[SharedTensor]]]:
    """One call for a whole fit. What is put into the list depends on every check that was made within."""
    first, made = given[0], []
    context = Context(first.session, first.party, first.scheme)
    with first.session.operation(first.party) as net:
        before = len(net.raised)
        yield context, made
        flags = [*dict.fromkeys(flag for x in given for flag in x.flags), *net.raised[before:]]
        joined = (context.backend.joined(flags),) if len(flags) > 1 else tuple(flags)
        for x in made:
            x.flags = joined


def count(what: str, value: Any) -> int:
    """A public whole number.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{what} is a whole number, got {value!r}")
    return int(value)


def beside(x: SharedTensor, value: Any, what: str) -> SharedTensor:
    """What is plain as a value of x's session, which everybody knows. No message.

    Raises:
        FixedPointRangeError: it reaches the activation limit.
    """
    if isinstance(value, SharedTensor):
        return value
    context, plain = Context(x.session, x.party, x.scheme), torch.from_numpy(np.array(value, dtype=np.float64))
    limit = x.scheme.activation_limit
    if not bool((plain.abs() < limit).all()):
        raise FixedPointRangeError(f"{what} has to be below {limit:g} in magnitude; scale it and the data down")
    whole = encode(plain, context.frac_bits)
    with x.session.operation(x.party):
        shares = context.backend.embedded(whole.to(x.session.device))
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    return x.like(shares, context.frac_bits, largest, dtype=torch.float32)


def plain_shared(session: Session, x: np.ndarray, what: str) -> SharedTensor:
    """A plain array in a session of the reference, with its magnitude as its limit."""
    largest = float(np.abs(x).max()) if x.size else 0.0
    limit = 2.0 ** (math.floor(math.log2(largest)) + 1) if largest > 0 else 1.0
    try:
        return share_tensor(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64)), session=session, limit=limit)
    except SectorchError as error:
        raise type(error)(f"{what}: {error}") from None
