"""Products with an owner's own matrix of bins, for histograms and splits of trees that are trained on shares.

The matrix is W [rows, features x (bins - 1)], with W[i, (f, b)] = 1 where the bin of row i in feature f is at most b.
The sums x^T W of shared x are histograms, summed up to each bin; the products W t^T with shared t say which rows go to
the left.

Where A or S owns the bins, it multiplies by bin numbers: some additions for each row and feature, and no products. The
other holder is sent the matrix under a mask once, and the rest is Pi_Matmul, with either holder in the place of A.

Source: PrivHFL, Figure 3, for the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...choreography import Located, Message, Net, Party, leaf, protocol
from ...choreography.located import compute
from .dealing_proofs import refuse_unproved
from .masking import DeferredShares, PendingCorrection
from .shares import Shares


@leaf(shapes=lambda codes, bins: codes.new_empty((codes.shape[0], codes.shape[1] * (bins - 1)), dtype=torch.int64))
def indicators(codes: torch.Tensor, bins: int) -> torch.Tensor:
    """The matrix of bin numbers [rows, features]: 1 where a number is at most 0, 1, .. bins - 2."""
    limits = torch.arange(bins - 1, dtype=torch.uint8, device=codes.device)
    return (codes.unsqueeze(-1) <= limits).flatten(1).to(torch.int64)


@dataclass(frozen=True)
class BinSums:
    """x^T W for x [rows, count] -> [count, columns]. W is bin numbers (uint8) or ring elements, under a mask or not."""

    bins: int

    def __call__(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if x.is_meta or matrix.is_meta or x.device.type != "cpu":
            return _product(x.T, matrix, self.bins)
        from ...ring import binloops  # numba takes half a second to load

        return binloops.sums(x, matrix, self.bins)


@dataclass(frozen=True)
class BinChoices:
    """W t^T for t [count, columns] -> [rows, count]."""

    bins: int

    def __call__(self, table: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if table.is_meta or matrix.is_meta or table.device.type != "cpu":
            return _product(table, matrix, self.bins, True).T
        from ...ring import binloops

        return binloops.choices(table, matrix, self.bins)


def _product(x: torch.Tensor, matrix: torch.Tensor, bins: int, transposed: bool = False) -> torch.Tensor:
    """x W or x W^T by torch's products, on shapes and on other devices: the reference of the compiled loops."""
    from ...ring import products

    words = indicators(matrix, bins) if matrix.dtype == torch.uint8 else matrix
    words = words.T if transposed else words
    if x.is_meta or words.is_meta:
        return torch.empty(x.shape[0], words.shape[1], dtype=torch.int64, device="meta")
    return products.matmul(x.contiguous(), words.contiguous())


@dataclass(frozen=True, eq=False)
class BinMatrix:
    """The bins of one of the two holders, masked once.

    Attributes:
        owner: A or S. codes: its bin numbers, there. a: the mask, at D (and the owner). masked: W + a, at the other
            holder.
    """

    owner: Party
    codes: Located
    a: Located
    masked: Located


@protocol(
    "mask_bins",
    "PrivHFL, Figure 3",
    [Message("masked_at_S", "A", "S", "a of k_DA"), Message("masked_at_A", "S", "A", "a of k_DS")],
)
def mask_bins(net: Net, owner: Party, codes: Located, bins: int) -> BinMatrix:
    """Mask the bins of A or S: the owner sends the other holder W + a, for a mask a that it draws with D.

    Args:
        owner: A or S.
        codes: bin numbers at the owner, uint8 [rows, features].
        bins: public.

    Rounds 1, bytes 8 (bins - 1) for each bin number, once for all products. The other holder receives uniform bits.

    Raises:
        UnsupportedOpError: dealing has to be proved.
    """
    refuse_unproved(net)
    other, label = (net.S, "masked_at_S") if owner == net.A else (net.A, "masked_at_A")
    matrix = indicators(codes, bins)
    a = net.common(net.D, owner, matrix.shape, "a")
    return BinMatrix(owner, codes, a, (matrix + a).send(owner, other, label))


@protocol(
    "multiply_bins",
    "PrivHFL, Figure 3",
    [Message("m_at_A", "S", "A", "b of k_DS"), Message("m_at_S", "A", "S", "b of k_DA")],
)
def multiply_bins(net: Net, product: Callable, x: Shares, matrix: BinMatrix) -> Shares:
    """Compute product(x, W) for the bins of A or S (Pi_Matmul), exactly mod 2^64.

    Args:
        product: `BinSums` or `BinChoices`.

    The other holder sends m = x' - b for its half x'. The owner's half of the result is product(x'' + m, W) for its own
    half x'', the other's is product(b, W + a), and D has the correction product(b, a).

    Rounds 1; online 8 bytes for each element of x; 8 for each element of the result ahead, where a half of it is read.
    The owner receives x' - b, uniform to it; the others nothing.
    """
    owner = matrix.owner
    other, label = (net.S, "m_at_A") if owner == net.A else (net.A, "m_at_S")
    own, rest = (x.A, x.S) if owner == net.A else (x.S, x.A)
    b = net.common(net.D, other, x.shape, "b")
    m = (rest - b).send(other, owner, label)
    c = compute(product, b, matrix.a.at(net.D))
    half, far = compute(product, own + m, matrix.codes), compute(product, b, matrix.masked.at(other))
    halves = (half, far) if owner == net.A else (far, half)
    return DeferredShares(*halves, PendingCorrection(net, c))
