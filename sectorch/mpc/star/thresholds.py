"""Whether a masked value lies within 2^k, as a flag, beside the tree of a sign or a truncation.

Of c = x + r, public to A and S, a threshold t = 2^k changes no plane below k. So the comparisons

    [x - t >= 0] = not ((c - t)_63 xor r_63 xor [(c - t) mod 2^63 < r mod 2^63])

for t = 0, 2^k and -2^k have their low planes in common: only the blocks that reach above plane k are picked and
combined anew, from the codes of r that are there already. The flag waits for nothing and nothing waits for it.
"""

from __future__ import annotations

import torch

from ...choreography import Located, Net, leaf, protocol
from ...ring.bitplanes import fast
from .and_layers import and_layers
from .compare import BLOCK, block_count, deal_codes, drelu, forest, pick_blocks
from .fss import signs
from .guard import flags_of_bits, kept_rows, raise_flags
from .masking import Masked, planes_of
from .select import bit_to_ring
from .shares import Shares


def moved_planes(bits: torch.Tensor, low: int, k: int, down: bool) -> torch.Tensor:
    """The bit planes of c - 2^k (down) or c + 2^k from those of c, [64, W]; those below `low` are zero."""
    out = torch.empty_like(bits)
    out[:low].zero_()
    out[low:k] = bits[low:k]
    carry = bits[k:].bitwise_not() if down else bits[k:].clone()  # row i: into plane k + i + 1
    for i in range(1, len(carry)):
        torch.bitwise_and(carry[i], carry[i - 1], out=carry[i])
    torch.bitwise_not(bits[k], out=out[k])
    torch.bitwise_xor(bits[k + 1 :], carry[:-1], out=out[k + 1 :])
    return out


@leaf(shapes=lambda bits, *_, **__: torch.empty_like(bits))
def planes_above(bits: torch.Tensor, k: int, high: int = 63, down: bool = True) -> torch.Tensor:
    """The planes of c - 2^k (down) or c + 2^k, of the blocks above plane k and above them, from c's, [64, W]."""
    low = max(0, high - BLOCK * block_count(k, high))
    if not (loops := fast(bits)):
        return moved_planes(bits, low, k, down)
    out = torch.empty_like(bits)
    out[:low] = 0  # nothing looks at them, and what stood in this memory before is not a part of a result
    loops.run_on_words(bits.shape[1], loops.planes_moved_by, loops.array(bits), low, k, -int(down), out.numpy())
    return out


def raise_above(
    net: Net, state: Shares, places: tuple[int, ...], sign: Located, codes: Shares, r_high: int, shape: torch.Size
) -> None:
    """Raise a flag where x >= 2^k: where not lt xor eq u xor sign xor r's plane of the sign.

    Args:
        state: rows of words [W] or more. places: those of u, and of lt and eq of the planes above u's in x - 2^k.
        sign: public, the plane of c - 2^k. codes: with r's plane in row `r_high`.
    """

    raise_flags(
        net,
        Shares(
            _flag_above(state.A, codes.A, places, r_high, shape, sign),
            _flag_above(state.S, codes.S, places, r_high, shape),
        ),
    )


@leaf
def _flag_above(state, codes, places: tuple[int, ...], r_high: int, shape: torch.Size, sign=None) -> torch.Tensor:
    """One party's half of e, u and l; the party with `sign` adds what is public."""
    u, less, equal = (state[i, : codes.shape[1]] for i in places)
    out = less ^ codes[r_high] if sign is None else ~(less ^ codes[r_high] ^ sign)
    return torch.stack((kept_rows(equal, shape), u, kept_rows(out, shape)))


@protocol("raise_outside", "docs/protocols.md")
def raise_outside(
    net: Net, x: Masked, k: int, shift: int = 0, half: int = 0, u: Shares | None = None, bits: Located | None = None,
    fss: bool = False, everywhere: bool = False,
) -> None:  # fmt: skip
    """Raise a flag where not -2^k <= x + half < 2^k.

    Args:
        half: public.
        u: words [W] of [c mod 2^shift < r mod 2^shift], where they are there already; planes below `shift` are then
            not compared again. bits: c's planes, where they are. c has the half added.
        fss: by a key of its own.
        everywhere: also where x is within 2^k of the ring's ends, for one bit more that is dealt, and without u and
            fss. Both differences wrap there, so that their signs differ as they do inside. No sum of values in range
            comes so far, but whoever shares an x may share one.

    With B = ceil((63 - shift) / 3) blocks, T of which reach above plane k, some 10 B + 6 T bits per element are dealt.
    No result waits for it, so its tree has a level more than it takes and is as narrow as that allows.
    """
    if fss:
        found = signs(net, Masked(x.c + half if half else x.c, x.r, x.r_A, x.r_S), (1 << k, -1 << k))
        raise_flags(net, flags_of_bits(net, found[0] - found[1] + 1))
        return
    span = (shift, 63)
    blocks, top = block_count(*span), block_count(k, 63)
    low = blocks - top
    codes = deal_codes(net, x, [span], (63,) if everywhere else ())
    bits = planes_of(x.c, (-half,)) if bits is None else bits
    less, more = planes_above(bits, k), planes_above(bits, k, down=False)

    counts = (low, top, top) if low else (top, top)
    kept = (u is not None, u is not None)
    layers, places = forest(counts, (None, *kept) if low else kept, (0, low) if low else None, spare=1)
    state = Shares(
        _leaves_around(bits, less, more, codes.A, span, top, True),
        _leaves_around(bits, less, more, codes.S, span, top, False),
    )
    found = and_layers(net, state, layers)
    if everywhere:
        at_A = _flags_of_both(found.A, codes.A, places, x.shape, (less[63], more[63]))
        raise_flags(net, Shares(at_A, _flags_of_both(found.S, codes.S, places, x.shape)))
        return
    raise_flags(
        net,
        Shares(
            _flag_outside(found.A, places, x.shape, None if u is None else u.A, (less[63], more[63])),
            _flag_outside(found.S, places, x.shape, None if u is None else u.S),
        ),
    )


@leaf(shapes=lambda bits, _0, _1, _2, span, top, _3: bits.new_empty(2 * (block_count(*span) + top), bits.shape[1]))
def _leaves_around(bits, less, more, codes, span: tuple[int, int], top: int, first: bool) -> torch.Tensor:
    """One party's half of lt and eq: of the blocks below the `top` ones, then of these in c - 2^k and in c + 2^k."""
    total = block_count(*span)
    low, border = total - top, span[1] - BLOCK * top
    out = bits.new_empty(2 * (total + top), bits.shape[1])
    if low:
        pick_blocks(bits, codes, total, 0, (border - BLOCK * low, border), first, out[: 2 * low])
    for moved, place in zip((less, more), out[2 * low :].split(2 * top), strict=True):
        pick_blocks(moved, codes, total, low, (border, span[1]), first, place)
    return out


@leaf
def _flag_outside(state, places: tuple[int, ...], shape: torch.Size, u=None, signs=None) -> torch.Tensor:
    """One party's half of the flag, as rows of e, u and l where there is u; the party with `signs` adds them."""
    less = places if u is None else places[::2]
    out = state[less[0]] ^ state[less[1]]
    out = kept_rows(out if signs is None else ~(out ^ signs[0] ^ signs[1]), shape)
    return out if u is None else torch.stack((kept_rows(state[places[1]] ^ state[places[3]], shape), u, out))


@leaf
def _flags_of_both(state, codes, places: tuple[int, ...], shape: torch.Size, signs=None) -> torch.Tensor:
    """One party's half of [x - 2^k >= 0] and of [x + 2^k < 0], r's sign in the last row of codes."""
    less, more = (state[i, : codes.shape[1]] ^ codes[-1] for i in places)
    if signs is not None:
        less, more = ~(less ^ signs[0]), more ^ signs[1]
    return torch.cat((kept_rows(less, shape), kept_rows(more, shape)))


# Comparisons with public thresholds as ring shares of 0 and 1: by the tree of `compare`, or by keys in no round.


@protocol("at_least", "docs/protocols.md")
def at_least(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), fss: bool = False, high: int = 63) -> Shares:
    """[x - t >= 0] for each public threshold t, as shares of 0 and 1: [T, *shape]. Exact.

    Args:
        high: x - t is known to lie in [-2^high, 2^high); 63 assumes nothing.

    Rounds: ceil(log4(ceil(high / 3))) (tree) + 1 (bit), or none with `fss`, where the dealt bytes are some twenty times
    as many.
    """
    if fss:
        return signs(net, x, thresholds, high)
    return bit_to_ring(net, drelu(net, x, high, thresholds), x.shape, len(thresholds))
