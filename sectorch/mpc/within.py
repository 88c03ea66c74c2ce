"""Whether a masked value lies within 2^k, as a flag, beside the tree of a sign or a truncation.

Of c = x + r, public to A and S, a threshold t = 2^k changes no plane below k. So the comparisons

    [x - t >= 0] = not ((c - t)_63 xor r_63 xor [(c - t) mod 2^63 < r mod 2^63])

for t = 0, 2^k and -2^k have their low planes in common: only the blocks that reach above plane k are picked and
combined anew, from the codes of r that are there already. The flag waits for nothing and nothing waits for it.
"""

from __future__ import annotations

import functools

import torch

from ..bitplanes import planes, rows
from ..choreography import Located, Net, protocol
from .circuit import Circuit
from .compare import CODES, block_count, deal_codes, forest, leaves, open_planes
from .fss import signs
from .guard import flags_of_bits, kept_rows, raise_flags
from .layers import Layer, and_layers, pick
from .mask import Masked
from .shares import Shares, each, whole


def part_of(codes: torch.Tensor, blocks: int, first: int, last: int) -> torch.Tensor:
    """The codes of the blocks first .. last - 1, of so many: rows [7 (last - first), W]."""
    return codes[: CODES * blocks].unflatten(0, (CODES, -1))[:, first:last].flatten(0, 1)


@functools.cache
def _carried(parts: int, whole: bool, thresholds: int) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """[c < r] for each threshold from the common low planes: rows are u where there is one (`whole`), lt and eq of
    the nodes below, least significant first, and lt and eq of the tops of each threshold."""
    circuit = Circuit(whole + 2 * parts + 2 * thresholds)
    carry, at = 0, 1 if whole else 0
    for part in range(parts):
        lt, eq = at, at + 1
        carry = circuit.land(eq, carry, lt) if whole or part else lt
        at += 2
    tops_at = [at + 2 * i for i in range(thresholds)]
    if not whole and not parts:
        return circuit.layers(tuple(tops_at))
    return circuit.layers(tuple(circuit.land(lt + 1, carry, lt) for lt in tops_at))


def moved_planes(bits: torch.Tensor, low: int, k: int, down: bool) -> torch.Tensor:
    """The bit planes of c - 2^k (down) or c + 2^k from those of c, [64, W]; those below `low` are not filled in."""
    out = torch.empty_like(bits)
    out[low:k] = bits[low:k]
    out[k] = ~bits[k]
    carry = out[k] if down else bits[k]
    for i in range(k + 1, 64):
        torch.bitwise_xor(bits[i], carry, out=out[i])
        carry = carry & (~bits[i] if down else bits[i])
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


def raise_above(net: Net, carry: Shares, parts: Shares, top: Shares, sign: Located, r_high: Shares, shape) -> None:
    """Raise a flag where x >= 2^k.

    Args:
        carry: words [1, W] of u. parts: [2 P, W], lt and eq of nodes that cover the planes between u and the top.
        top: [2, W], lt and eq of the top of x - 2^k, whose plane `high` is `sign`, at A and S.
        r_high: r's plane `high`, [W], XOR-shared.
    """
    layers, _ = _carried(parts.shape[0] // 2, True, 1)
    state = each(net, lambda *v: torch.cat(v), carry, parts, top)
    less = and_layers(net, state, layers)
    shape = torch.Size(shape)
    raise_flags(
        net,
        Shares(
            net.locally(net.A, lambda g, s, r: kept_rows(~(g[0] ^ s[0] ^ r), shape), less.A, sign, r_high.A),
            net.locally(net.S, lambda g, r: kept_rows(g[0] ^ r, shape), less.S, r_high.S),
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

    def state(h, h_top, w, first):
        upper = part_of(w, blocks, low, blocks)
        tops_of = [leaves(h_top[:, i : i + top].contiguous(), upper, (top,), first) for i in (0, top)]
        return (
            torch.cat([leaves(h, part_of(w, blocks, 0, low), (low,), first), *tops_of]) if low else torch.cat(tops_of)
        )

    rows_of = Shares(
        net.locally(A, lambda *v: state(*v, True), below, hot, codes.A),
        net.locally(S, lambda *v: state(*v, False), below, hot, codes.S),
    )
    counts, kept = ((low, top, top), (True,) * 3) if low else ((top, top), (True,) * 2)
    layers, places = forest(counts, kept)
    found = and_layers(net, rows_of, layers)
    ordered = each(net, lambda g: pick(g, places), found)
    carried, _ = _carried(1 if low else 0, u is not None, 2)
    if u is not None:
        ordered = each(net, lambda u, g: torch.cat((u.view(1, -1), g)), u, ordered)
    less = and_layers(net, ordered, carried)
    shape = x.shape
    raise_flags(
        net,
        Shares(
            net.locally(A, lambda g, s: kept_rows(~(g[0] ^ g[1] ^ s[0] ^ s[1]), shape), less.A, signs_of_c),
            net.locally(S, lambda g: kept_rows(g[0] ^ g[1], shape), less.S),
        ),
    )
