"""How values are represented, which protocols compute on them, and what range they keep to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .errors import ArgumentError, FixedPointRangeError
from .ring import FRAC_BITS

RELU_MODES = ("exact", "privhfl")
NETWORKS = ("lan", "wan")


@dataclass(frozen=True)
class Scheme:
    """How values are represented and which protocols compute on them; travels with every tensor."""

    frac_bits: int = FRAC_BITS
    relu: str = "exact"
    network: str = "lan"
    """What the parties' network is like: "lan" sends the fewest bytes, "wan" waits for the fewest rounds."""
    range_check: bool = True
    """Whether a value that leaves its range is noticed, and Q gets `RangeExceededError` in place of a result."""
    limit_bits: int | None = None
    """Activations stay below 2^limit_bits in magnitude; None for a share of the range that leaves room for weights.
    Without range checks a limit that is named is taken for granted: comparisons look at no plane above it."""

    def __post_init__(self):
        if not 1 <= self.frac_bits <= 26:
            raise ArgumentError(
                f"frac_bits must be between 1 and 26 (products need twice as many), got {self.frac_bits}"
            )
        if self.relu not in RELU_MODES:
            raise ArgumentError(f"relu must be one of {', '.join(RELU_MODES)}, got {self.relu!r}")
        if self.network not in NETWORKS:
            raise ArgumentError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")
        if self.limit_bits is not None and not 1 <= self.limit_bits <= 61 - 2 * self.frac_bits:
            raise ArgumentError(
                f"activations below 2^{self.limit_bits} leave no room for weights beside 2 x {self.frac_bits} fraction "
                f"bits: limit_bits is between 1 and {61 - 2 * self.frac_bits}"
            )

    @property
    def activation_bits(self) -> int:
        """`limit_bits`, or four of seven of the bits that products leave to whole numbers: 12 with 20 fraction bits.

        Functions and norms are right for arguments below 2^(56 - 2f); no more than that, where nothing is named.
        """
        bits = min((61 - 2 * self.frac_bits) * 4 // 7, 56 - 2 * self.frac_bits)
        return bits if self.limit_bits is None else self.limit_bits

    @property
    def activation_limit(self) -> float:
        """What every activation is below in magnitude; beyond it there is an error, and no result."""
        return 2.0**self.activation_bits

    @property
    def gain(self) -> float:
        """What the weights of one output may sum to in magnitude: then no sum of products leaves the ring."""
        return 2.0 ** (61 - 2 * self.frac_bits - self.activation_bits) * 63 / 64

    @property
    def fss(self) -> bool:
        """Whether comparisons are made by function secret sharing: no round, and some twenty times the dealt bytes."""
        return self.network == "wan"


def limit_bits_of(limit: float) -> int:
    """The bits of an activation limit.

    Raises:
        ArgumentError: no power of two from 2 on.
    """
    if not isinstance(limit, (int, float)) or limit < 2 or math.frexp(limit)[0] != 0.5:
        raise ArgumentError(f"activation_limit is a power of two from 2 on, got {limit!r}")
    return math.frexp(limit)[1] - 1


def check_limit(x: torch.Tensor, scheme: Scheme) -> None:
    """Raise `FixedPointRangeError` unless an input is below the activation limit; whole numbers may be anything."""
    if scheme.range_check and x.is_floating_point() and x.numel() and not x.is_meta:
        largest = float(x.abs().max())
        if largest >= scheme.activation_limit:
            raise FixedPointRangeError(
                f"the input reaches magnitude {largest:.6g}, and activations are below {scheme.activation_limit:g} "
                f"with {scheme.frac_bits} fraction bits; scale it down, use fewer of them, or name activation_limit"
            )
