"""Shares of A and S, the local operations on them, and the protocols by which values enter and leave them.

`x + y`, `x ^ y`, `x[i]` and `each(f, x, ...)` let A and S compute on their own halves without a message. That is right
for maps that commute with sharing: additive ones, and for XOR shares linear ones over bits. A public value is added to
A's half only.

`share` (Pi_Share) turns an input of Q into shares; `reveal`, `reveal_to_A` and `reveal_to_S` show a value to one party;
`aggregate` (Pi_Agg) shows Q the sum over several answering parties. `collect` moves shares of A and S to Q and S, and
`return_flags` moves range flags back.

Source: PrivHFL, Figures 2 and 5.
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
from ...errors import ArgumentError, DtypeError, MisplacedValueError


@dataclass(frozen=True, eq=False)
class Shares:
    """A ring tensor (int64, any shape) in two halves, one at the answering party A and one at the server S.

    Two `Shares` are equal only if they are the same object.

    Attributes:
        A, S: the halves, whose sum mod 2^64 (or XOR) is the value.
        Q: the value as Q has it, where it consists of Q's own whole numbers that were shared by Q and only moved since.
            Q can then check whether they may be used as indices. None for every other value.
    """

    A: Located
    S: Located
    Q: Located | None = None
    __array_ufunc__: ClassVar[None] = None  # an array times shares is shares, and no array of them
    made_by: ClassVar[str] = "share(net, x) makes Shares of a value at Q; two halves are Shares(at_A, at_S)"

    def __post_init__(self):
        try:
            half_A, half_S = self.A.at("A"), self.S.at("S")
        except AttributeError:
            kinds = ", ".join(type(half).__name__ for half in (self.A, self.S))
            raise ArgumentError(
                f"Shares are two located values, one at A and one at S, got {kinds}; net.own(party, tensor) brings one "
                f"in, net.common and net.fresh draw one"
            ) from None
        if half_A is not self.A:
            object.__setattr__(self, "A", half_A)
        if half_S is not self.S:
            object.__setattr__(self, "S", half_S)

    @property
    def shape(self) -> torch.Size:
        return self.A.shape

    def __add__(self, other: Any) -> Shares:
        """Add shares half by half, or a public value or one that A holds to A's half. With broadcasting."""
        if isinstance(other, Shares):
            return Shares(self.A + other.A, self.S + other.S)
        half_A = self.A + check_whole_numbers(other)
        return Shares(half_A, self.S if half_A.shape == self.shape else self.S.expand(half_A.shape))

    def __sub__(self, other: Any) -> Shares:
        if isinstance(other, Shares):
            return Shares(self.A - other.A, self.S - other.S)
        half_A = self.A - check_whole_numbers(other)
        return Shares(half_A, self.S if half_A.shape == self.shape else self.S.expand(half_A.shape))

    def __rsub__(self, public: Any) -> Shares:
        return -self + public

    __radd__, __rmul__ = __add__, lambda self, public: self * public

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"shares have no '{name}': each(torch.{name}, x) lets A and S apply what is additive")

    def __neg__(self) -> Shares:
        return Shares(-self.A, -self.S)

    def __mul__(self, public: Any) -> Shares:
        """Multiply by a public whole number or a public tensor of them.

        Raises:
            DtypeError: the factor has fractions.
            ArgumentError: the factor is shared.
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
        """Multiply by 2^bits."""
        return Shares(self.A << bits, self.S << bits)

    def __xor__(self, other: Any) -> Shares:
        """Add XOR shares: half by half, or a public value to A's half."""
        if isinstance(other, Shares):
            return Shares(self.A ^ other.A, self.S ^ other.S)
        return Shares(self.A ^ other, self.S)

    def __invert__(self) -> Shares:
        """Negate XOR-shared bits."""
        return Shares(~self.A, self.S)

    def __getitem__(self, index: Any) -> Shares:
        return Shares(self.A[index], self.S[index])

    def moved(self, f: Callable, *public: Any, **named: Any) -> Any:
        """Apply an additive f to each half; a list of `Shares` where f returns a tuple. Q's own numbers stay known."""
        values = (self.A, self.S) if self.Q is None else (self.A, self.S, self.Q)
        found = [compute(f, value, *public, **named) for value in values]
        return [Shares(*halves) for halves in zip(*found, strict=True)] if type(found[0]) is tuple else Shares(*found)


def check_whole_numbers(public: Any) -> Any:
    """Return a public operand of shares, as a tensor where it is an array. It has to consist of whole numbers.

    Raises:
        DtypeError: its type has fractions.
    """
    dtype = getattr(public, "dtype", None)  # of torch or of numpy
    if isinstance(public, float) or getattr(dtype, "is_floating_point", getattr(dtype, "kind", "") == "f"):
        raise DtypeError(
            f"shares are whole numbers of the ring, and a public operand was "
            f"{dtype or 'a float'}: encode it (sectorch.ring.encode), and after a "
            f"product drop its fraction bits (sectorch.mpc.star.truncate)"
        )
    return torch.as_tensor(public) if isinstance(public, np.ndarray) else public


def each(f: Callable, *values: Any, **public: Any) -> Shares:
    """Let A and S each apply f to their own halves of the shares among `values`. No message.

    Args:
        f: commutes with sharing: additive, or linear over bits for XOR shares.
        values: shares, and values that both parties hold.
        public: further arguments of f.
    """
    first, *others = values
    if isinstance(first, Shares) and first.Q is None and not any(isinstance(x, Shares) for x in others):
        return first.moved(f, *others, **public)
    return Shares(
        compute(f, *(x.A if isinstance(x, Shares) else x for x in values), **public),
        compute(f, *(x.S if isinstance(x, Shares) else x for x in values), **public),
    )


def concatenate(*parts: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """`torch.cat` of its arguments, for `each`."""
    return torch.cat(parts, dim)


# Inputs and outputs


def _of_ring_elements(f: Callable) -> Callable:
    """Decorate `share` so that it refuses fractions, booleans and others' values before anything is drawn."""

    @functools.wraps(f)
    def run(net: Net, x: Located) -> Shares:
        if x.dtype not in PAYLOADS:
            raise DtypeError(
                f"share takes ring elements (int64), got {x.dtype}: sectorch.ring.encode(x, bits) makes them of "
                f"fractions, x.long() of booleans"
            )
        if net.Q not in x.owners:
            raise MisplacedValueError(
                "share takes a value that Q holds, and Q lacks this one; add a value of A's to shares: share(x) + a"
            )
        return f(net, x)

    return run


@protocol("share", "PrivHFL, Figure 2", [Message("x_S", "Q", "S", "x_A of k_QA")])
@_of_ring_elements
def share(net: Net, x: Located) -> Shares:
    """Secret-share an input of Q (Pi_Share): A draws its half from k_QA, and Q sends S the rest.

    Args:
        x: int64 at Q, any shape.

    Returns:
        Shares of x, exactly.

    Rounds 1, bytes 8 per element (Q to S). A receives nothing, S uniform bits.

    Raises:
        DtypeError: x consists of fractions or booleans, which are no ring elements.
        MisplacedValueError: Q does not hold x.
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
    """Show x to Q: S receives A's half under a mask that only Q and A know, and sends Q the masked sum.

    Args:
        x: shares, any shape.

    Returns:
        x, at Q.

    Rounds 2, bytes 16 per element. Q learns x, A receives nothing, S uniform bits.
    """
    return _reveal_sum(net, [(net, x)])


@protocol("reveal_to_A", "docs/training.md", [Message("x_S", "S", "A", "x_A", "the result, which is A's to learn")])
def reveal_to_A(net: Net, x: Shares) -> Located:
    """Show x to A: S sends A its half. Rounds 1, bytes 8 per element. A learns x, Q and S learn nothing."""
    return x.A + x.S.send(net.S, net.A, "x_S")


@protocol("reveal_to_S", "docs/training.md", [Message("x_A", "A", "S", "x_S", "the result, which is S's to learn")])
def reveal_to_S(net: Net, x: Shares) -> Located:
    """Show x to S: A sends S its half. Rounds 1, bytes 8 per element. S learns x, Q and A learn nothing."""
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
    """Show Q the sum of the answering parties' tensors, and nothing else about a single one (Pi_Agg).

    Args:
        net: the net of any of the parties; it carries the sum from S to Q.
        terms: for each answering party its net and its shares, all of one shape.

    Returns:
        The sum mod 2^64, at Q.

    Rounds 2, bytes 8 per element and answering party, and 8 per element for the sum. S receives uniform bits.
    """
    return _reveal_sum(net, terms, "sum")


@protocol(
    "aggregate_noisy",
    "PrivHFL, Figure 5, with noise at S",
    [
        Message("masked_A", "A", "S", "r_j of k_QA", opens="Q"),
        Message("noisy_sum", "S", "Q", "the sum of the r_j", "the sum over the answering parties and S's noise"),
    ],
)
def aggregate_noisy(net: Net, terms: list[tuple[Net, Shares]], noise: Located) -> Located:
    """Show Q the sum of the answering parties' tensors and of noise that S adds.

    Args:
        net, terms: as for `aggregate`.
        noise: int64 at S, of the terms' shape.

    Returns:
        The noisy sum mod 2^64, at Q, who learns neither summand.

    Rounds 2, bytes 8 per element and answering party, and 8 per element for the sum. S knows the noise.
    """
    return _reveal_sum(net, terms, "noisy_sum", noise)


@protocol("collect", "CaPC, step 2", [Message("masked_A", "A", "S", "r of k_QA")])
def collect(net: Net, x: Shares) -> tuple[Located, Located]:
    """Move x from A and S to Q and S, without opening it: Q holds r, and S holds x - r.

    Args:
        x: shares of A and S, any shape.

    Returns:
        (the half at Q, the half at S).

    Rounds 1, bytes 8 per element (A to S). Q draws its half from k_QA and receives nothing; S receives uniform bits.
    """
    r = net.common(net.Q, net.A, x.shape, "r")
    return r.at(net.Q), (x.A - r).send(net.A, net.S, "masked_A").at(net.S) + x.S


@protocol("return_flags", "docs/protocols.md", [Message("masked_flags", "A", "S", "rho of k_QA")])
def return_flags(net: Net, words: Shares) -> tuple[Located, Located]:
    """Move XOR-shared words from the holders A and S of this call to the dealer Q and S.

    Where the querying party holds a tensor (`Members.cast`), an answering party plays Q. Its half and S's are then such
    as a call of its own with S has them.

    Rounds 1, bytes 8 per word. The dealer draws its half; S receives uniform bits.
    """
    rho = net.common(net.Q, net.A, words.shape, "rho")
    return rho.at(net.Q), (words.A ^ rho).send(net.A, net.S, "masked_flags").at(net.S) ^ words.S


def at_server(noise: Noise, shape: torch.Size) -> Callable[[], torch.Tensor]:
    """Return the step in which S draws its noise; a dry run draws none."""
    return with_shapes(lambda: torch.empty(shape, dtype=torch.int64, device="meta"))(lambda: noise(shape))


def _reveal_sum(net: Net, terms: list[tuple[Net, Shares]], label: str = "result", *at_S: Located) -> Located:
    """Open the sum of the terms to Q: each A_j sends S x_A - r_j, S sends Q the sum of all halves, Q adds the r_j."""
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
