"""Pi_Matmul (PrivHFL, Figure 3) for any bilinear map: matmul, convolution, element-wise product, einsum.

The weight is A's. It is masked once a session; after that a product costs one message from S to A online and one from Q
to S ahead. The figure prints S's half as (w + a)b . [c]_1; the sign that makes the sum right is (w + a)b - [c]_1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..choreography import Located, Message, Net, protocol
from .shares import Shares, whole


class Weight:
    """A's secret operand: omega at A, the mask a at Q and A, and omega + a at S. Made once a session."""

    def __init__(self, omega: Located, a: Located, masked: Located):
        self.omega = omega
        self.a = a
        self.masked = masked
        self._tiles: dict[str, tuple[Located, Located, Located]] = {}

    @property
    def shape(self) -> torch.Size:
        return self.omega.shape

    def tiles(self, setup: Net, product: Callable) -> tuple[Located, Located, Located]:
        """The three tensors in the form that `product` prepares ahead, made on first use and kept."""
        kind = type(product).__name__
        if kind not in self._tiles:
            holders = ((setup.A, self.omega), (setup.Q, self.a), (setup.S, self.masked))
            with setup.lock:
                if kind not in self._tiles:  # another thread may have made them meanwhile
                    self._tiles[kind] = tuple(setup.locally(party, product.prepare, w) for party, w in holders)
        return self._tiles[kind]


def _bare_weight(setup: Net, omega: Located) -> Weight:
    """In the reference: a weight under no mask."""
    return Weight(omega, setup.given(omega, setup.Q, setup.A), setup.given(omega, setup.S, setup.A))


@protocol("mask_weight", "PrivHFL, Figure 3", [Message("omega_masked", "A", "S", "a of k_QA")], ideal=_bare_weight)
def mask_weight(setup: Net, omega: Located) -> Weight:
    """A's weight becomes usable in products: S is sent omega + a.

    Args:
        setup: the net for what is done once a session.
        omega: int64 at A, any shape.

    Once a session: rounds 1, bytes 8 per weight (A to S). S receives uniform bits.
    """
    a = setup.common(setup.Q, setup.A, omega.shape, "a")
    masked = setup.locally(setup.A, torch.add, omega, a)
    return Weight(omega, a, setup.send(masked, setup.A, setup.S, "omega_masked"))


def _product(net: Net, setup: Net, product: Callable, x: Shares, weight: Weight) -> Shares:
    """The ideal functionality of `linear`."""
    if hasattr(product, "tiled") and product.tiled(x.shape, weight.shape):
        return whole(net, product, x.A, weight.omega, weight.tiles(setup, product)[0])
    return whole(net, lambda v, w: product(v, w, None), x.A, weight.omega)


@protocol(
    "linear",
    "PrivHFL, Figure 3",
    [Message("c_S", "Q", "S", "c_A of k_QA"), Message("m", "S", "A", "b of k_SQ")],
    ideal=_product,
)
def linear(net: Net, setup: Net, product: Callable, x: Shares, weight: Weight) -> Shares:
    """y = product(x, omega) for a map that is linear in both arguments, mod 2^64.

    Args:
        product: exact integer kernel `f(x, w, tiles)`; `tiles` is the weight as its `prepare` made it where its `tiled`
            asks for that (see `sectorch.products`), and None else.
        x: shares, any shape that the product takes.
        weight: A's masked weight.

    Online: rounds 1, bytes 8 per element of x (S to A). Ahead: 8 per element of y (Q to S). S's half of y does not
    depend on the query. A receives x_S - b and S receives a*b - c_A: uniform to them.
    """
    Q, A, S = net.Q, net.A, net.S
    if hasattr(product, "tiled") and product.tiled(x.shape, weight.shape):
        tiles = weight.tiles(setup, product)
    else:
        tiles = (None, None, None)

    b = net.common(S, Q, x.shape, "b")
    c = net.locally(Q, product, b, weight.a, tiles[1])
    c_A = net.common(Q, A, c.shape, "c_A")
    c_S = net.send(net.locally(Q, torch.sub, c, c_A), Q, S, "c_S")

    m = net.send(net.locally(S, torch.sub, x.S, b), S, A, "m")
    y_A = net.locally(
        A, lambda x_A, m, w, t, c_A: product(x_A + m, w, t).sub_(c_A), x.A, m, weight.omega, tiles[0], c_A
    )
    y_S = net.locally(S, lambda b, w, t, c_S: product(b, w, t).sub_(c_S), b, weight.masked, tiles[2], c_S)
    return Shares(y_A, y_S)
