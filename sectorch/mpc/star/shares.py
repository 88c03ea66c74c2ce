"""Additive or XOR shares of A and S, and what can be done on them without a message.

`x + y`, `x ^ y`, `x[i]` and `each(f, x, ...)` let A and S compute on their halves: local maps, which commute with
sharing if they are additive. A public value is added to A's half only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from ...choreography import Located
from ...choreography.located import compute
from ...errors import ArgumentError, DtypeError


@dataclass(frozen=True, eq=False)
class Shares:
    """One ring tensor (int64, any shape), half at the answering party, half at the server. Equal to itself only.

    Attributes:
        Q: where these are Q's own whole numbers, shared by Q and only moved since, the numbers as Q has them: Q can
            then be asked whether they may be looked up. None of everything else.
    """

    A: Located
    S: Located
    Q: Located | None = None
    __array_ufunc__: ClassVar[None] = None  # an array times shares is shares, and no array of them
    made_by: ClassVar[str] = "share(net, x) makes Shares of a value at Q; two halves are Shares(at_A, at_S)"

    def __post_init__(self):
        try:
            mine, theirs = self.A.at("A"), self.S.at("S")
        except AttributeError:
            kinds = ", ".join(type(half).__name__ for half in (self.A, self.S))
            raise ArgumentError(
                f"Shares are two located values, one at A and one at S, got {kinds}; net.own(party, tensor) brings one "
                f"in, net.common and net.fresh draw one"
            ) from None
        if mine is not self.A:
            object.__setattr__(self, "A", mine)
        if theirs is not self.S:
            object.__setattr__(self, "S", theirs)

    @property
    def shape(self) -> torch.Size:
        return self.A.shape

    def __add__(self, other: Any) -> Shares:
        """With shares half by half; a public value, or one that A holds, at A. With broadcasting."""
        if isinstance(other, Shares):
            return Shares(self.A + other.A, self.S + other.S)
        mine = self.A + whole(other)
        return Shares(mine, self.S if mine.shape == self.shape else self.S.expand(mine.shape))

    def __sub__(self, other: Any) -> Shares:
        if isinstance(other, Shares):
            return Shares(self.A - other.A, self.S - other.S)
        mine = self.A - whole(other)
        return Shares(mine, self.S if mine.shape == self.shape else self.S.expand(mine.shape))

    def __rsub__(self, public: Any) -> Shares:
        return -self + public

    __radd__, __rmul__ = __add__, lambda self, public: self * public

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"shares have no '{name}': each(torch.{name}, x) lets A and S apply what is additive")

    def __neg__(self) -> Shares:
        return Shares(-self.A, -self.S)

    def __mul__(self, public: Any) -> Shares:
        """By a public whole number or tensor of them.

        Raises:
            DtypeError: one with fractions. ArgumentError: shares.
        """
        if isinstance(public, Shares):
            raise ArgumentError("two shared values are multiplied by messages: sectorch.mpc.star.multiply")
        public = whole(public)
        return Shares(self.A * public, self.S * public)

    def _divided(self, _: Any) -> NoReturn:
        raise ArgumentError(
            "shares are not divided half by half: truncate(net, x, bits) divides by 2^bits, and by another public "
            "number is times its inverse, encoded, and then truncated"
        )

    __truediv__ = __floordiv__ = __mod__ = _divided

    def __lshift__(self, bits: int) -> Shares:
        """2^bits times the value."""
        return Shares(self.A << bits, self.S << bits)

    def __xor__(self, other: Any) -> Shares:
        """As `+`, for XOR shares."""
        if isinstance(other, Shares):
            return Shares(self.A ^ other.A, self.S ^ other.S)
        return Shares(self.A ^ other, self.S)

    def __invert__(self) -> Shares:
        """not x, for XOR shares."""
        return Shares(~self.A, self.S)

    def __getitem__(self, index: Any) -> Shares:
        return Shares(self.A[index], self.S[index])

    def moved(self, f: Callable, *public: Any, **named: Any) -> Any:
        """f, which is additive, of each half; a list where it gives several."""
        held = (self.A, self.S) if self.Q is None else (self.A, self.S, self.Q)
        found = [compute(f, part, *public, **named) for part in held]
        return [Shares(*parts) for parts in zip(*found, strict=True)] if type(found[0]) is tuple else Shares(*found)


def whole(public: Any) -> Any:
    """A public operand of shares, which are whole numbers modulo 2^64; raises DtypeError for one with fractions."""
    dtype = getattr(public, "dtype", None)  # of torch or of numpy
    if isinstance(public, float) or getattr(dtype, "is_floating_point", getattr(dtype, "kind", "") == "f"):
        raise DtypeError(
            f"shares are whole numbers of the ring, and a public operand was "
            f"{dtype or 'a float'}: encode it (sectorch.ring.encode), and after a "
            f"product drop its fraction bits (sectorch.mpc.star.truncate)"
        )
    return torch.as_tensor(public) if isinstance(public, np.ndarray) else public


def each(f: Callable, *values: Any, **public: Any) -> Shares:
    """A and S each apply f to their halves of the shares among `values`, and to what both hold."""
    first, *others = values
    if isinstance(first, Shares) and first.Q is None and not any(isinstance(x, Shares) for x in others):
        return first.moved(f, *others, **public)
    return Shares(
        compute(f, *(x.A if isinstance(x, Shares) else x for x in values), **public),
        compute(f, *(x.S if isinstance(x, Shares) else x for x in values), **public),
    )
