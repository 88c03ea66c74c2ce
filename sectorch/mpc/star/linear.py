"""Pi_Matmul (PrivHFL, Figure 3) for any bilinear map: matmul, convolution, element-wise product, einsum.

The weight is A's. It is masked once a session; after that a product costs one message from S to A online and one from
the dealer to S ahead (in the figure Q deals). The figure prints S's half as (w + a)b . [c]_1; the sign that makes the
sum right is (w + a)b - [c]_1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...choreography import Located, Message, Net, protocol
from ...choreography.located import compute, running
from ...ring.products import Tiled
from .halves import Halves
from .owed import Debt, Owed
from .shares import Shares
from .streamed import Streamed
from .sums import Sums, check_linear


class Weight:
    """A's secret operand: omega at A, the mask a at D and A, and omega + a at S. Made once a session."""

    def __init__(self, omega: Located, a: Located, masked: Located):
        self.omega = omega
        self.a = a
        self.masked = masked
        self._made: dict[tuple[str, str], tuple[Located, Located, Located]] = {}
        self.sums: dict[int, Sums] = {}
        """Of its channels, for who looks at what is dealt; by groups of channels."""

    @property
    def shape(self) -> torch.Size:
        return self.masked.shape

    def viewed(self, setup: Net, view: Callable) -> Weight:
        """A view (a transpose, a slice) of the three."""
        with running(setup):
            return Weight(*(compute(view, w) for w in (self.omega, self.a, self.masked)))

    def products(self, setup: Net, product: Callable, shape: torch.Size) -> tuple[Callable, Callable, Callable]:
        """product(x, omega), product(b, a) and product(b, omega + a), of x and b of this shape."""
        made: tuple = (None, None, None)
        if isinstance(product, Tiled) and (form := product.prepared(shape, self.shape)):
            product, made = form, self.made(setup, form)
            if (alone := form.by_form(self.shape)) is not None:
                omega, a, masked = made
                return (
                    lambda x: compute(alone, x, omega),
                    lambda b: compute(alone, b, a),
                    lambda b: compute(alone, b, masked),
                )
        omega, a, masked = zip((self.omega, self.a, self.masked), made, strict=True)
        return (
            lambda x: compute(product, x, *omega),
            lambda b: compute(product, b, *a),
            lambda b: compute(product, b, *masked),
        )

    def made(self, setup: Net, product: Tiled) -> tuple[Located, Located, Located]:
        """The three tensors in the form that `product` takes, made on first use and kept."""
        kind = type(product).__name__, product.form
        if kind not in self._made:
            with setup.lock, running(setup):
                if kind not in self._made:  # another thread may have made them meanwhile
                    held = self.omega.at("A"), self.a.at(setup.D), self.masked.at("S")
                    omega, a, masked = (compute(product.prepare, w) for w in held)
                    self._made[kind] = omega, a, masked
        return self._made[kind]


@protocol("mask_weight", "PrivHFL, Figure 3", [Message("omega_masked", "A", "S", "a of k_DA")])
def mask_weight(setup: Net, omega: Located) -> Weight:
    """A's weight becomes usable in products: S is sent omega + a.

    Args:
        setup: the net for what is done once a session.
        omega: int64 at A, any shape.

    Once a session: rounds 1, bytes 8 per weight (A to S). S receives uniform bits.
    """
    a = setup.common(setup.D, setup.A, omega.shape, "a")
    return Weight(omega, a, (omega + a).send(setup.A, setup.S, "omega_masked"))


@protocol(
    "linear",
    "PrivHFL, Figure 3",
    [Message("m", "S", "A", "b of k_DS")],
)
def linear(net: Net, setup: Net, product: Callable, x: Shares, weight: Weight | Streamed) -> Shares:
    """y = product(x, omega) for a map that is linear in both arguments, mod 2^64.

    Args:
        product: exact integer kernel `f(x, w, made)`; `made` is the weight as its `prepare` made it where its
            `prepared` asks for that (see `sectorch.ring.products`), and None else.
        x: shares, any shape that the product takes.
        weight: A's masked weight.

    Online: rounds 1, bytes 8 per element of x (S to A). S's half of y does not depend on the query. D owes a*b, and
    deals it (ahead, 8 bytes per element of y) unless y is opened under a mask; see `owed.py`. A receives x_S - b:
    uniform to it.
    """
    D, A, S = net.D, net.A, net.S
    by_omega, by_a, by_masked = weight.products(setup, product, x.shape)
    b = net.common(S, D, x.shape, "b")
    c = by_a(b)
    dealt = deal_product(net, setup, product, b, weight, c) if net.verified else None
    m = (x.S - b).send(S, A, "m")
    halves = by_omega(x.A + m), by_masked(b)
    return Owed(*halves, Debt(net, c)) if dealt is None else Shares(*halves) - dealt


@protocol("deal_product", "PrivHFL, Figure 3; docs/verified.md", [Message("c_S", "D", "S", "c_A of k_DA")])
def deal_product(net: Net, setup: Net, product: Callable, b: Located, weight: Weight | Streamed, c: Located) -> Shares:
    """c = a*b in shares of A and S, dealt by a D that proves it.

    Args:
        product, weight: as of `linear`. b: at S and D. c: at D.

    Ahead of the query; 8 bytes per element of c from D to S, and those of `check_linear`. S receives c - c_A: uniform
    to it.
    """
    c_A = net.common(net.D, net.A, c.shape, "c_A")
    dealt = Halves(c_A, (c - c_A).send(net.D, net.S, "c_S"))
    check_linear(net, setup, product, b, weight, dealt)
    return dealt.shares
