"""Broken protocols among parties of roles of their own, each with its source and its repaired twin."""

from __future__ import annotations

from exhibit import Exhibit

from sectorch.choreography import Located, Message, Net, Roles, protocol
from sectorch.testing import Given

THREE = Roles("P0 P1 P2", edges="P0-P1 P1-P2 P0-P2")
SUM = Roles("H1 H2 H3 C", edges="H1-H2 H2-H3 H1-H3 H1-C H2-C H3-C")

_SHARING = [
    Message("x0", "P1", "P0", "x1 and x2"), Message("x0_too", "P1", "P2", "x1 and x2"),
    Message("y1", "P2", "P0", "y0 and y2"), Message("y1_too", "P2", "P1", "y0 and y2"),
]  # fmt: skip


def _product(net: Net, x: Located, y: Located) -> tuple[Located, Located, Located]:
    """Replicated shares of x, of P1, and y, of P2: each party's part of the product (ABY3, 3.2)."""
    P0, P1, P2 = net.P0, net.P1, net.P2
    x1, x2 = net.common(P0, P1, x.shape, "x1"), net.common(P1, P2, x.shape, "x2")
    y2, y0 = net.common(P1, P2, x.shape, "y2"), net.common(P0, P2, x.shape, "y0")
    x0, y1 = x - x1 - x2, y - y0 - y2
    x0_P0, x0_P2 = x0.send(P1, P0, "x0"), x0.send(P1, P2, "x0_too")
    y1_P0, y1_P1 = y1.send(P2, P0, "y1"), y1.send(P2, P1, "y1_too")
    z0 = (x0_P0 * y0 + x0_P0 * y1_P0 + x1 * y0).at("P0")
    z1 = (x1 * y1_P1 + x1 * y2 + x2 * y1_P1).at("P1")
    z2 = (x2 * y2 + x2 * y0 + x0_P2 * y2).at("P2")
    return z0, z1, z2


@protocol(
    "gallery_crypten_518",
    "CrypTen, issue 518: no zero sum is added before the parts are sent",
    [*_SHARING, Message("z1", "P1", "P0", "nothing"), Message("z2", "P2", "P0", "nothing")],
    roles=THREE,
)
def replicated_product(net: Net, x: Located, y: Located) -> Located:
    """x y at P0, for x of P1 and y of P2."""
    z0, z1, z2 = _product(net, x, y)
    return z0 + z1.send(net.P1, net.P0, "z1") + z2.send(net.P2, net.P0, "z2")


@protocol("gallery_masked_product", "ABY3, 3.2",
          [*_SHARING, Message("z1", "P1", "P0", "a zero sum"), Message("z2", "P2", "P0", "a zero sum")],
          roles=THREE)  # fmt: skip
def masked_product(net: Net, x: Located, y: Located) -> Located:
    """The same with a zero sum of the three parties' streams."""
    P0, P1, P2 = net.P0, net.P1, net.P2
    z0, z1, z2 = _product(net, x, y)
    a, b, c = (net.common(p, q, x.shape, "zero") for p, q in ((P0, P1), (P1, P2), (P0, P2)))
    return (z0 + a - c) + (z1 + b - a).send(P1, P0, "z1") + (z2 + c - b).send(P2, P0, "z2")


_MASKED = [Message(f"masked_{h}", h, "C", "streams of the hospitals") for h in ("H1", "H2", "H3")]


@protocol("gallery_latecomer", "an average that is published again as each party comes", _MASKED, roles=SUM)
def latecomer(net: Net, x1: Located, x2: Located, x3: Located) -> Located:
    """The sum at C, of two hospitals and then of the third, whose mask is C's own."""
    H1, H2, H3, C = net.H1, net.H2, net.H3, net.C
    a, m = net.common(H1, H2, x1.shape, "a"), net.common(H3, C, x1.shape, "m")
    first = (x1 + a).send(H1, C, "masked_H1") + (x2 - a).send(H2, C, "masked_H2")
    return first + (x3 + m).send(H3, C, "masked_H3") - m


@protocol("gallery_together", "Bonawitz et al., CCS 2017, 4.0.1", _MASKED, roles=SUM)
def together(net: Net, x1: Located, x2: Located, x3: Located) -> Located:
    """The sum at C under masks of all pairs."""
    H1, H2, H3, C = net.H1, net.H2, net.H3, net.C
    a, b, c = (net.common(p, q, x1.shape, "mask") for p, q in ((H1, H2), (H2, H3), (H1, H3)))
    return (
        (x1 + a - c).send(H1, C, "masked_H1")
        + (x2 + b - a).send(H2, C, "masked_H2")
        + (x3 + c - b).send(H3, C, "masked_H3")
    )


_ANY = dict(low=-(1 << 30), high=1 << 30)
GALLERY = [
    Exhibit("a product without its zero sum", "CrypTen, issue 518", replicated_product, masked_product,
            [Given("P1", **_ANY), Given("P2", **_ANY)], lambda x, y: x * y, ["P0 tells", "z"],
            options={"roles": THREE}),
    Exhibit("an average that shows one party", "published as each comes", latecomer, together,
            [Given(h, **_ANY) for h in ("H1", "H2", "H3")], lambda x, y, z: x + y + z,
            ["C tells", "masked_H1", "masked_H2"], options={"roles": SUM}),
]  # fmt: skip
