"""Additive or XOR shares of A and S, and what can be done on them without a message.

`x + y`, `x ^ y`, `x[i]` and `each(f, x, ...)` let A and S compute on their halves: local maps, which commute with
sharing if they are additive. A public value is added to A's half only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from ...backend import Noise
from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.declaration import PAYLOADS
from ...choreography.located import compute, with_shapes
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
        mine = self.A + check_whole_numbers(other)
        return Shares(mine, self.S if mine.shape == self.shape else self.S.expand(mine.shape))

    def __sub__(self, other: Any) -> Shares:
        if isinstance(other, Shares):
            return Shares(self.A - other.A, self.S - other.S)
        mine = self.A - check_whole_numbers(other)
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
        public = check_whole_numbers(public)
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


def check_whole_numbers(public: Any) -> Any:
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


# Pi_Share (PrivHFL, Figure 2): Q's input becomes shares of A and S; and the way back, to Q alone.


def _of_ring_elements(f: Callable) -> Callable:
    """Refuse fractions and booleans, before anything is drawn."""

    @functools.wraps(f)
    def run(net: Net, x: Located) -> Shares:
        if x.dtype not in PAYLOADS:
            raise DtypeError(
                f"share takes ring elements (int64), got {x.dtype}: sectorch.ring.encode(x, bits) makes them of "
                f"fractions, x.long() of booleans"
            )
        return f(net, x)

    return run


@protocol("share", "PrivHFL, Figure 2", [Message("x_S", "Q", "S", "x_A of k_QA")])
@_of_ring_elements
def share(net: Net, x: Located) -> Shares:
    """Q secret-shares x: A draws its half from k_QA, S is sent the rest.

    Args:
        x: int64 at Q, any shape.

    Rounds 1, bytes 8 per element (Q to S). A learns nothing, S receives uniform bits.

    Raises:
        DtypeError: of fractions or booleans, which are no ring elements.
    """
    Q, A, S = net.Q, net.A, net.S
    x_A = net.common(Q, A, x.shape, "x_A")
    return Shares(x_A, (x - x_A).send(Q, S, "x_S"))


@protocol(
    "reveal",
    "PrivHFL, Figure 5, n = 1",
    [
        Message("masked_A", "A", "S", "r of k_QA", opens="Q"),
        Message("result", "S", "Q", "r of k_QA", "the result, which is Q's to learn"),
    ],
)
def reveal(net: Net, x: Shares) -> Located:
    """x becomes known to Q and to nobody else.

    Rounds 2, bytes 16 per element. S receives A's half under a mask that only Q and A know.
    """
    return _revealed(net, [(net, x)])


@protocol("reveal_to_A", "docs/training.md", [Message("x_S", "S", "A", "x_A", "the result, which is A's to learn")])
def reveal_to_A(net: Net, x: Shares) -> Located:
    """x becomes known to A and to nobody else. Rounds 1, bytes 8 per element."""
    return x.A + x.S.send(net.S, net.A, "x_S")


@protocol("reveal_to_S", "docs/training.md", [Message("x_A", "A", "S", "x_S", "the result, which is S's to learn")])
def reveal_to_S(net: Net, x: Shares) -> Located:
    """x becomes known to S and to nobody else. Rounds 1, bytes 8 per element."""
    return x.S + x.A.send(net.A, net.S, "x_A")


@protocol(
    "aggregate",
    "PrivHFL, Figure 5",
    [
        Message("masked_A", "A", "S", "r_j of k_QA", opens="Q"),
        Message("sum", "S", "Q", "the sum of the r_j", "the sum over the answering parties, which is Q's to learn"),
    ],
)
def aggregate(net: Net, terms: list[tuple[Net, Shares]]) -> Located:
    """Pi_Agg: Q learns the sum of the answering parties' tensors and nothing about a single one.

    Args:
        net: the net of any of the parties; it carries the sum from S to Q.
        terms: for each answering party its net and its shares, all of one shape.

    Rounds 2, bytes 8 per element and answering party, and 8 per element for the sum.
    """
    return _revealed(net, terms, "sum")


@protocol(
    "aggregate_noisy",
    "PrivHFL, Figure 5, with noise at S",
    [
        Message("masked_A", "A", "S", "r_j of k_QA", opens="Q"),
        Message("noisy_sum", "S", "Q", "the sum of the r_j", "the sum over the answering parties and S's noise"),
    ],
)
def aggregate_noisy(net: Net, terms: list[tuple[Net, Shares]], noise: Located) -> Located:
    """Pi_Agg, but S adds noise of its own to the sum before it goes to Q, who learns their sum and neither of the two.

    Args:
        net, terms: as of `aggregate`.
        noise: int64 at S, of the terms' shape.

    Rounds 2, bytes 8 per element and answering party, and 8 per element for the sum. S knows the noise.
    """
    return _revealed(net, terms, "noisy_sum", noise)


def at_server(noise: Noise, shape: torch.Size) -> Callable[[], torch.Tensor]:
    """What S computes to draw its noise; a dry run draws none."""
    return with_shapes(lambda: torch.empty(shape, dtype=torch.int64, device="meta"))(lambda: noise(shape))


def _revealed(net: Net, terms: list[tuple[Net, Shares]], label: str = "result", *at_S: Located) -> Located:
    """A_j to S: x_A - r_j; S to Q: the sum of both halves, and of what S adds; Q adds the r_j."""
    Q, S = net.Q, net.S
    masks, halves = [], list(at_S)
    for net_j, x in terms:
        with net_j.within(net):
            r = net_j.common(Q, net_j.A, x.shape, "r")
            halves += [(x.A - r).send(net_j.A, S, "masked_A"), x.S]
        masks.append(r)
    return _sum(_sum(*halves).send(S, Q, label), *masks)


@leaf
def _sum(*values: torch.Tensor) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
