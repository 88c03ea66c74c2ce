"""Pi_Matmul's weight where it is too large to be kept in several forms: A encodes it, and D draws its mask, every time.

A kept weight (`linear.Weight`) is held as ring elements at A, as a mask at A and D and as their sum at S, and each of
the three in tiles besides: 48 bytes an element where all parties run in one process. Here only the sum is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...choreography import Located, Message, Net, protocol
from ...choreography.located import compute, leaf, running
from ...choreography.streams import key_stream
from .sums import Sums


class Streamed:
    """A weight of a model too large to be kept in several forms: 8 bytes an element at S, and nothing at A and D.

    A encodes its numbers, and D draws the mask from its key, for every product anew.

    Args:
        numbers: what `encoded` makes ring elements of, at A.
        key: two words, at D and A, of which a is the AES-CTR stream.
        views: what was done to all three, one after the other.
    """

    def __init__(
        self, numbers: Located, encoded: Callable, key: Located, masked: Located, views: tuple[Callable, ...] = ()
    ):
        self._numbers, self._encoded, self._key = numbers, encoded, key
        self.masked = masked
        self._views = views
        self.sums: dict[int, Sums] = {}

    @property
    def shape(self) -> torch.Size:
        return self.masked.shape

    @property
    def a(self) -> Located:
        """The mask, at D and A, made in the running program."""
        return compute(self._mask, self._key)

    @property
    def _mask(self) -> Callable:
        return Made(Stretched(self._numbers.shape), self._views)

    def viewed(self, setup: Net, view: Callable) -> Streamed:
        """As of `Weight`."""
        with running(setup):
            masked = compute(view, self.masked)
        return Streamed(self._numbers, self._encoded, self._key, masked, (*self._views, view))

    def products(self, setup: Net, product: Callable, _shape: torch.Size) -> tuple[Callable, Callable, Callable]:
        """As of `Weight`."""
        encoded, stretched = By(product, Made(self._encoded, self._views)), By(product, self._mask)
        return (
            lambda x: compute(encoded, x, self._numbers),
            lambda b: compute(stretched, b, self._key.at(setup.D)),
            lambda b: compute(product, b, self.masked, None),
        )


@dataclass(frozen=True)
class Stretched:
    """A key's stream as a tensor of this shape."""

    shape: torch.Size

    def __call__(self, key: torch.Tensor) -> torch.Tensor:
        return key_stream(key, self.shape.numel()).view(self.shape)


@dataclass(frozen=True)
class Made:
    """What `make` makes of a tensor, and views of it."""

    make: Callable
    views: tuple[Callable, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = self.make(x)
        for view in self.views:
            made = view(made)
        return made


@dataclass(frozen=True)
class By:
    """A product with what `make` makes of the second operand."""

    product: Callable
    make: Callable

    def __call__(self, x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.make(of), None)


@protocol("mask_streamed", "PrivHFL, Figure 3", [Message("omega_masked", "A", "S", "key of k_DA")])
def mask_streamed(setup: Net, numbers: Located, encoded: Callable) -> Streamed:
    """`mask_weight` for a weight that A and D do not keep: the mask is the stream of a key that they draw.

    Args:
        numbers: at A, any shape.
        encoded: pure; ring elements of that shape.

    Once a session: rounds 1, bytes 8 per weight (A to S). S receives uniform bits.
    """
    key = setup.common(setup.D, setup.A, (2,), "key")
    masked = compute(_masked, numbers, encoded, key).send(setup.A, setup.S, "omega_masked")
    return Streamed(numbers, encoded, key, masked)


@leaf
def _masked(numbers: torch.Tensor, encoded: Callable, key: torch.Tensor) -> torch.Tensor:
    return encoded(numbers) + Stretched(numbers.shape)(key)
