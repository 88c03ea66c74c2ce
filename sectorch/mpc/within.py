"""Whether a masked value lies within 2^k, as a flag, beside the tree of a sign or a truncation.

Of c = x + r, public to A and S, a threshold t = 2^k changes no plane below k. So the comparisons

    [x - t >= 0] = not ((c - t)_63 xor r_63 xor [(c - t) mod 2^63 < r mod 2^63])

for t = 0, 2^k and -2^k have their low planes in common: only the blocks that reach above plane k are picked and
combined anew, from the codes of r that are there already. The flag waits for nothing and nothing waits for it.
"""

from __future__ import annotations

import torch

from ..bitplanes import planes, rows
from ..choreography import Located, Net, protocol
from .compare import CODES, block_count, deal_codes, forest, leaves, open_planes
from .fss import signs
from .guard import flags_of_bits, kept_rows, raise_flags
from .layers import and_layers
from .mask import Masked
from .shares import Shares, whole


def part_of(codes: torch.Tensor, blocks: int, first: int, last: int) -> torch.Tensor:
    """The codes of the blocks first .. last - 1, of so many: rows [7 (last - first), W]."""
    return codes[: CODES * blocks].unflatten(0, (CODES, -1))[:, first:last].flatten(0, 1)


def moved_planes(bits: torch.Tensor, low: int, k: int, down: bool) -> torch.Tensor:
    """The bit planes of c - 2^k (down) or c + 2^k from those of c, [64, W]; those below `low` are not filled in."""
    out = torch.empty_like(bits)
    if out.is_meta:
        return out
    out[low:k] = bits[low:k]
    carry = bits[k:].bitwise_not() if down else bits[k:].clone()  # row i: into plane k + i + 1
    for i in range(1, len(carry)):
        torch.bitwise_and(carry[i], carry[i - 1], out=carry[i])
    torch.bitwise_not(bits[k], out=out[k])
    torch.bitwise_xor(bits[k + 1 :], carry[:-1], out=out[k + 1 :])
    return out


def blocks_above(net: Net, bits: Located, k: int, high: int = 63, both: bool = True) -> tuple[Located, Located]:
    """h_j of the blocks above plane k of c - 2^k, and its plane `high`; with `both` those of c + 2^k after them.

    Args:
        bits: c's bit planes [64, W].

    Returns:
        [8, T blocks, W] and [T, W], for one or two thresholds T.
    """
    low = high - 3 * block_count(k, high)

    def public(bits):
        found = [
            open_planes(moved_planes(bits, max(0, low), k, down), [(low, high)], (high,))
            for down in (True, False)[: 1 + both]
        ]
        return torch.cat([hot for hot, _ in found], 1), torch.cat([top for _, top in found])

    return net.locally((net.A, net.S), public, bits)


def raise_above(
    net: Net, state: Shares, places: tuple[int, int, int], sign: Located, codes: Shares, r_high: int, shape: torch.Size
) -> None:
    """Raise a flag where x >= 2^k: where not lt xor eq u xor sign xor r's plane of the sign.

    Args:
        state: rows of words [W] or more. places: those of u, and of lt and eq of the planes above u's in x - 2^k.
        sign: public, the plane of c - 2^k. codes: with r's plane in row `r_high`.
    """

    def flag(g, w, sign=None):
        u, less, equal = (g[i, : w.shape[1]] for i in places)
        out = less ^ w[r_high] if sign is None else ~(less ^ w[r_high] ^ sign[0])
        return torch.stack((kept_rows(equal, shape), u, kept_rows(out, shape)))

    raise_flags(
        net,
        Shares(
            net.locally(net.A, flag, state.A, codes.A, sign),
            net.locally(net.S, flag, state.S, codes.S),
        ),
    )


def _outside(net: Net, x: Masked, c: Located, k: int, shift: int = 0, u: Shares | None = None, fss: bool = False):
    """The ideal functionality of `raise_outside`."""
    raise_flags(net, whole(net, lambda v: ((v < -(1 << k)) | (v >= 1 << k)).to(torch.int64), c))


@protocol("raise_outside", "docs/protocols.md", ideal=_outside)
def raise_outside(
    net: Net, x: Masked, c: Located, k: int, shift: int = 0, u: Shares | None = None, fss: bool = False
) -> None:
    """Raise a flag where not -2^k <= x < 2^k.

    Args:
        x: a masked opening, whose r counts. c: x + r, or with a public number added to it.
        u: words [W] of [c mod 2^shift < r mod 2^shift], where they are there already; planes below `shift` are then
            not compared again. fss: by a key of its own.

    With B = ceil((63 - shift) / 3) blocks, T of which reach above plane k, some 9 B + 4 T bits per element are dealt.
    """
    A, S, limit = net.A, net.S, 1 << k
    if fss:
        bits = signs(net, Masked(c, x.r, x.r_A, x.r_S), (limit, -limit))
        outside = Shares(
            net.locally(A, lambda v: v[0] - v[1] + 1, bits.A), net.locally(S, lambda v: v[0] - v[1], bits.S)
        )
        raise_flags(net, flags_of_bits(net, outside))
        return
    span = (shift, 63)
    blocks, top = block_count(*span), block_count(k, 63)
    low = blocks - top
    codes, _ = deal_codes(net, x, [span])
    bits = net.locally((A, S), lambda c: planes(rows(c)), c)
    hot, signs_of_c = blocks_above(net, bits, k)
    below = net.locally((A, S), lambda b: open_planes(b, [span])[0][:, :low], bits)

    counts = (low, top, top) if low else (top, top)

    def state(h, h_top, w, first):
        out = h_top.new_empty(2 * sum(counts), h_top.shape[2])
        if low:
            leaves(h, part_of(w, blocks, 0, low), (low,), first, out=out[: 2 * low])
        upper = part_of(w, blocks, low, blocks)
        for half, place in zip(h_top.split(top, 1), out[2 * low :].split(2 * top), strict=True):
            leaves(half, upper, (top,), first, out=place)
        return out

    rows_of = Shares(
        net.locally(A, lambda *v: state(*v, True), below, hot, codes.A),
        net.locally(S, lambda *v: state(*v, False), below, hot, codes.S),
    )
    kept = u is not None
    layers, places = forest(counts, (kept,) * len(counts), (0, low) if low else None)
    found = and_layers(net, rows_of, layers)
    places = places[-4:] if kept else places[-2:]
    shape = x.shape

    def flag(g, signs=None, u=None):
        less, equal = (places[::2], places[1::2]) if kept else (places, ())
        out = g[less[0]] ^ g[less[1]]
        out = kept_rows(out if signs is None else ~(out ^ signs[0] ^ signs[1]), shape)
        return torch.stack((kept_rows(g[equal[0]] ^ g[equal[1]], shape), u, out)) if kept else out

    raise_flags(
        net,
        Shares(
            net.locally(A, flag, found.A, signs_of_c, *((u.A,) if kept else ())),
            net.locally(S, flag, found.S, None, *((u.S,) if kept else ())),
        ),
    )
