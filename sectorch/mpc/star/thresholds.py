"""Comparisons with public thresholds: ring shares of 0 and 1 (`at_least`), and flags of values that leave a range.

Range flags (`raise_outside`, `raise_above`) are computed beside the tree of a sign or of a truncation. With c = x + r,
public to A and S, subtracting t = 2^k from c changes no plane below k. So the comparisons

    [x - t >= 0] = not ((c - t)_63 xor r_63 xor [(c - t) mod 2^63 < r mod 2^63])

for t = 0, 2^k and -2^k have their low planes in common: only the blocks that reach above plane k are compared again,
with the codes of r that have been dealt already. No result depends on a flag before the reveal (`guard.py`).
"""

from __future__ import annotations

import torch

from ...choreography import Located, Net, leaf, protocol
from ...ring.bitplanes import fast
from .and_layers import and_layers
from .compare import BLOCK, block_count, deal_codes, drelu, forest, pick_blocks
from .fss import signs
from .guard import clear_padding, flags_of_bits, raise_flags
from .masking import Masked, planes_of
from .select import bit_to_ring
from .shares import Shares


def moved_planes(bits: torch.Tensor, low: int, k: int, down: bool) -> torch.Tensor:
    """The bit planes of c - 2^k (down) or c + 2^k from those of c, [64, W]; the planes below `low` are zero."""
    out = torch.empty_like(bits)
    out[:low].zero_()
    out[low:k] = bits[low:k]
    # A subtraction borrows through zeros, an addition carries through ones. Row i becomes the AND of all rows up to i.
    carry = bits[k:].bitwise_not() if down else bits[k:].clone()  # row i: the carry into plane k + i + 1
    for i in range(1, len(carry)):
        torch.bitwise_and(carry[i], carry[i - 1], out=carry[i])
    torch.bitwise_not(bits[k], out=out[k])
    torch.bitwise_xor(bits[k + 1 :], carry[:-1], out=out[k + 1 :])
    return out


@leaf(shapes=lambda bits, *_, **__: torch.empty_like(bits))
def planes_above(bits: torch.Tensor, k: int, high: int = 63, down: bool = True) -> torch.Tensor:
    """`moved_planes` for the blocks that reach above plane k, and the planes above them: [64, W]."""
    low = max(0, high - BLOCK * block_count(k, high))
    if not (loops := fast(bits)):
        return moved_planes(bits, low, k, down)
    out = torch.empty_like(bits)
    out[:low] = 0  # unused, but a result may not contain what this memory held before
    loops.run_on_words(bits.shape[1], loops.planes_moved_by, loops.array(bits), low, k, -int(down), out.numpy())
    return out


def raise_above(
    net: Net, state: Shares, places: tuple[int, ...], sign: Located, codes: Shares, r_high: int, shape: torch.Size
) -> None:
    """Raise a flag where x >= 2^k: the complement of lt xor eq u xor sign xor r's plane of the sign. No message.

    Args:
        state: rows of words [W] or more.
        places: the rows of u, and of lt and eq of the planes above u's in x - 2^k.
        sign: public, the sign plane of c - 2^k.
        codes: contains r's sign plane in row `r_high`.
    """
    flag_A = _flag_above(state.A, codes.A, places, r_high, shape, sign)
    raise_flags(net, Shares(flag_A, _flag_above(state.S, codes.S, places, r_high, shape)))


@leaf
def _flag_above(state, codes, places: tuple[int, ...], r_high: int, shape: torch.Size, sign=None) -> torch.Tensor:
    """One party's half of e, u and l of the flag e u xor l; the party that is given `sign` adds the public terms."""
    u, less, equal = (state[i, : codes.shape[1]] for i in places)
    out = less ^ codes[r_high] if sign is None else ~(less ^ codes[r_high] ^ sign)
    return torch.stack((clear_padding(equal, shape), u, clear_padding(out, shape)))


@protocol("raise_outside", "docs/protocols.md")
def raise_outside(
    net: Net, x: Masked, k: int, shift: int = 0, half: int = 0, u: Shares | None = None, bits: Located | None = None,
    fss: bool = False, everywhere: bool = False,
) -> None:  # fmt: skip
    """Raise a flag where -2^k <= x + half < 2^k does not hold.

    Args:
        half: public; c has it added below.
        u: words [W] of [c mod 2^shift < r mod 2^shift], if they are known; planes below `shift` are not compared again.
        bits: c's planes, if they are known.
        fss: compare by a function key of its own.
        everywhere: also for x within 2^k of the ring's ends, for one more dealt bit; not together with u or fss. Both
            differences wrap around there, so that their signs differ as they do inside the range. Sums of values in
            range do not reach the ring's ends, but an input that a party shares may.

    With B = ceil((63 - shift) / 3) blocks, T of which reach above plane k, some 10 B + 6 T bits per element are dealt.
    No result waits for the flag, so its tree has one level more than the fewest and narrow nodes. Nobody learns
    anything.
    """
    if fss:
        found = signs(net, Masked(x.c + half if half else x.c, x.r, x.r_A, x.r_S), (1 << k, -1 << k))
        raise_flags(net, flags_of_bits(net, found[0] - found[1] + 1))
        return
    span = (shift, 63)
    blocks, top = block_count(*span), block_count(k, 63)
    # The low blocks are compared once, for c itself: they stand below the top blocks of both differences.
    low = blocks - top
    codes = deal_codes(net, x, [span], (63,) if everywhere else ())
    bits = planes_of(x.c, (-half,)) if bits is None else bits
    less, more = planes_above(bits, k), planes_above(bits, k, down=False)

    counts = (low, top, top) if low else (top, top)
    with_eq = (u is not None, u is not None)
    layers, places = forest(counts, (None, *with_eq) if low else with_eq, (0, low) if low else None, spare=1)
    state = Shares(
        _leaves_around(bits, less, more, codes.A, span, top, True),
        _leaves_around(bits, less, more, codes.S, span, top, False),
    )
    found = and_layers(net, state, layers)
    if everywhere:
        at_A = _flags_of_both(found.A, codes.A, places, x.shape, (less[63], more[63]))
        raise_flags(net, Shares(at_A, _flags_of_both(found.S, codes.S, places, x.shape)))
        return
    u_A, u_S = (None, None) if u is None else (u.A, u.S)
    flag_A = _flag_outside(found.A, places, x.shape, u_A, (less[63], more[63]))
    raise_flags(net, Shares(flag_A, _flag_outside(found.S, places, x.shape, u_S)))


@leaf(shapes=lambda bits, _0, _1, _2, span, top, _3: bits.new_empty(2 * (block_count(*span) + top), bits.shape[1]))
def _leaves_around(bits, less, more, codes, span: tuple[int, int], top: int, first: bool) -> torch.Tensor:
    """One party's half of lt and eq of the lower blocks of c, then of the `top` blocks of c - 2^k and of c + 2^k."""
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
    """One party's half of the flag, or with u the rows e, u and l of it; the party that is given `signs` adds them."""
    # [x >= 2^k] xor [x >= -2^k] is 1 inside the range. r's sign is in both comparisons, and cancels.
    less = places if u is None else places[::2]
    out = state[less[0]] ^ state[less[1]]
    out = clear_padding(out if signs is None else ~(out ^ signs[0] ^ signs[1]), shape)
    return out if u is None else torch.stack((clear_padding(state[places[1]] ^ state[places[3]], shape), u, out))


@leaf
def _flags_of_both(state, codes, places: tuple[int, ...], shape: torch.Size, signs=None) -> torch.Tensor:
    """One party's half of [x - 2^k >= 0] and of [x + 2^k < 0]; r's sign is the last row of codes."""
    less, more = (state[i, : codes.shape[1]] ^ codes[-1] for i in places)
    if signs is not None:
        less, more = ~(less ^ signs[0]), more ^ signs[1]
    return torch.cat((clear_padding(less, shape), clear_padding(more, shape)))


@protocol("at_least", "docs/protocols.md")
def at_least(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), fss: bool = False, high: int = 63) -> Shares:
    """Compute [x - t >= 0] for each public threshold t, as shares of 0 and 1: [T, *shape]. Exact.

    Args:
        fss: compare by function keys (`fss.py`) and not by trees (`compare.py`).
        high: x - t is known to lie in [-2^high, 2^high); 63 assumes nothing.

    Rounds ceil(log4(ceil(high / 3))) (tree) + 1 (bit). With `fss` none, for some twenty times the dealt bytes. Nobody
    learns anything.
    """
    if fss:
        return signs(net, x, thresholds, high)
    return bit_to_ring(net, drelu(net, x, high, thresholds), x.shape, len(thresholds))
