"""Compiled loops on bits and shares: one pass over memory where torch's functions make many.

Each loop has its reference in plain torch beside its `leaf`. The reference runs on other devices and gives the same
bits. A loop computes the words low .. high of packed bits; element t W + w belongs to bit t of word w (`bitplanes.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import (
    BYTE,
    LINE,
    LINE_BYTES,
    LINE_WORDS,
    aligned_zeros,
    borrow_array,
    broadcast,
    call,
    compiled,
    has_bit_vectors,
    inlined,
    instruction,
    line_of,
    load,
    offset,
    shuffle,
    store,
)
from .jit import array as array
from .jit import run_on_words as run_on_words

# Bit matrices of 64 rows, transposed: the way from elements to bit planes. Where the processor has the vectors, eight
# rows at a time are transposed bit by bit and then byte by byte.


_UNIT_VECTORS = 0x8040201008040201
"""The identity matrix of 8 x 8 bits, by which GF2P8AFFINEQB transposes the other factor."""


def load_rows(builder: Any, address: Any, stride: Any) -> list:
    """Eight lines, `stride` bytes apart."""
    return [load(builder, offset(builder, address, stride, i)) for i in range(8)]


def transpose_bytes(builder: Any, rows: list) -> list:
    """Eight lines, each word as eight bytes: byte j of line i becomes byte i of line j, word by word."""
    rows = [builder.bitcast(row, LINE_BYTES) for row in rows]
    # A transposition by halves: each round exchanges the off-diagonal quarters of all squares of 2 distance rows and
    # bytes. In a shuffle of two lines, 64 + b is byte b of the second one.
    for distance in (4, 2, 1):
        result = list(rows)
        for i in (i for i in range(8) if not i & distance):
            x, y = rows[i], rows[i + distance]
            low = [b if not b & distance else 64 + b - distance for b in range(64)]
            high = [b + distance if not b & distance else 64 + b for b in range(64)]
            result[i], result[i + distance] = shuffle(builder, x, y, low), shuffle(builder, x, y, high)
        rows = result
    return rows


def times_bit_matrix(builder: Any, x: Any, matrices: Any) -> Any:
    """Each byte of a line times the matrix of 8 x 8 bits that is the word in its place of another line."""
    return call(builder, "llvm.x86.vgf2p8affineqb.512", LINE_BYTES, x, matrices, BYTE(0))


@instruction
def bits_of_rows(builder, x, apart, out, spread, threshold):
    """Eight lines, `apart` bytes apart and less a threshold, bit by bit.

    Line t // 8 of `out`, whose lines are `spread` bytes apart, has in byte t % 8 of a word the bits t of the same word
    of all eight, the last line's first.
    """
    identity, less = builder.bitcast(line_of(_UNIT_VECTORS), LINE_BYTES), broadcast(builder, threshold)
    rows = [builder.sub(row, less) for row in load_rows(builder, x, apart)]
    # The instruction takes bit i of a result from byte 7 - i of the matrix, so callers pass the rows from the last on.
    for i, row in enumerate(transpose_bytes(builder, rows)):
        bits = builder.bitcast(times_bit_matrix(builder, identity, row), LINE)
        store(builder, bits, offset(builder, out, spread, i))


@instruction
def _transpose_rows(builder, x, out, apart):
    """Eight lines after each other: byte j of a word of line i becomes byte i of that word of line j of `out`, whose
    lines are `apart` bytes apart."""
    for i, row in enumerate(transpose_bytes(builder, load_rows(builder, x, 64))):
        store(builder, builder.bitcast(row, LINE), offset(builder, out, apart, i))


_RUN = 64
"""Words of a row that are taken at a time. The rows stand far apart, and often fall into the same few sets of the
cache, where a line of each would be gone before its turn comes again."""


@compiled
def transpose_bits(a):
    """64 bit rows of some words each: row j becomes bit j of all 64. H. S. Warren, Hacker's Delight, 7-3."""
    words = a.reshape(a.size)
    j, mask = 32, np.uint64(0x00000000FFFFFFFF)
    while j:
        shift, size = np.uint64(j), a.shape[1] * j
        for k in range(0, len(words), 2 * size):
            x, y = words[k : k + size], words[k + size : k + 2 * size]
            for i in range(size):
                swap = ((x[i] >> shift) ^ y[i]) & mask
                y[i] ^= swap
                x[i] ^= swap << shift
        j >>= 1
        # From the lower j of every 2 j bits to the lower half of these: 0x00000000FFFFFFFF becomes 0x0000FFFF0000FFFF.
        mask ^= mask << np.uint64(j)


@compiled
def _lines_in_vectors(v, width, word, count, room, out, threshold):
    """The bit planes of the elements, less a threshold, in `count` words from `word` on: whole lines, _RUN at most."""
    x, apart, bits, to, spread = v.ctypes.data + 8 * word, 8 * width, room.ctypes.data, out.ctypes.data, out.strides[0]
    # From the last of eight rows up, as `bits_of_rows` takes them.
    for i in range(0, 64, 8):
        for c in range(0, count, LINE_WORDS):
            bits_of_rows(x + (i + 7) * apart + 8 * c, -apart, bits + 512 * c + 8 * i, 512, threshold)
    for i in range(0, 64, 8):
        for c in range(0, count, LINE_WORDS):
            _transpose_rows(bits + 512 * c + 64 * i, to + i * spread + 8 * c, spread)


@compiled
def _lines_by_shifts(v, width, word, count, room, out, threshold):
    """As `_lines_in_vectors`, on any processor, and of words that are not whole lines; zeros beyond the end."""
    a = room.reshape(room.size)[: 64 * count].reshape(64, count)
    a[:] = 0
    for t in range(64):
        row = v[t * width + word : t * width + word + count]
        for c in range(len(row)):
            a[t, c] = np.uint64(row[c]) - np.uint64(threshold)
    transpose_bits(a)
    for t in range(64):
        for c in range(count):
            out[t, c] = np.int64(a[t, c])


_whole_lines = _lines_in_vectors if has_bit_vectors() else _lines_by_shifts


@compiled
def planes_at(v, width, word, out, threshold):
    """The bit planes of elements int64 [N], less a threshold, in as many words from `word` on as `out` [64, ..] has
    columns."""
    count = out.shape[1]
    room = aligned_zeros(8 * min(_RUN, count))
    # The last bit's row is the shortest: it has len(v) - 63 width words, or none. Vectors may not read beyond its end,
    # where the shifts put zeros.
    whole = max(0, min(count, len(v) - 63 * width - word)) // LINE_WORDS * LINE_WORDS
    for start in range(0, whole, _RUN):
        _whole_lines(v, width, word + start, min(_RUN, whole - start), room, out[:, start:], threshold)
    for start in range(whole, count, _RUN):
        _lines_by_shifts(v, width, word + start, min(_RUN, count - start), room, out[:, start:], threshold)


# Layers of ANDs on packed bits (`mpc/star/and_layers.py`).


_SPAN = 512
"""Words combined at a time: their rows stay in the cache."""
_FEW = 32
"""The same where every value of a block, or every set of more than four operands, has a row of words."""


@inlined
def xor(x, y, out):
    """The xor of two rows. Callers slice rows: with indices that may be negative the compiler makes no vectors."""
    for w in range(len(out)):
        out[w] = x[w] ^ y[w]


@compiled
def mask_layer(state, alpha, opened, at, out, low, high):
    """The opened rows of a layer under their masks."""
    for i in range(len(opened)):
        xor(state[opened[i], low:high], alpha[at + i, low:high], out[i, low:high])


@compiled
def layer(
    mine, theirs, state, alpha, dealt, count, into, onto, kept, ands, shares, at, made, first, opened, beyond, new, out,
    low, high,
):  # fmt: skip
    """One party's half of the state after a layer of ANDs, and the rows that the next layer opens, under their masks.

    Args:
        mine, theirs: the opened rows as both sent them. count: new rows that are not kept.
        ands, into, shares: as in `and_layers.py`. first: all ones for the party that adds the public term.
        opened, beyond: the rows of the new state that the next layer opens, and where their masks begin.
    """
    mine, theirs, state, alpha = borrow_array(mine), borrow_array(theirs), borrow_array(state), borrow_array(alpha)
    dealt, ands, shares, new, out = (
        borrow_array(dealt),
        borrow_array(ands),
        borrow_array(shares),
        borrow_array(new),
        borrow_array(out),
    )
    # Opened rows are operands of several ANDs, so both parties' halves are combined once for a span.
    public = np.empty((len(mine), _SPAN), np.int64)
    sets = np.empty((shares.shape[1] // 2 if ands.shape[1] > 4 else 0, _FEW), np.int64)
    for start in range(low, high, _SPAN):
        end = min(high, start + _SPAN)
        for i in range(len(mine)):
            xor(mine[i, start:end], theirs[i, start:end], public[i, : end - start])
        for i in range(count):
            if i < len(onto):
                new[i, start:end] = state[onto[i], start:end]
            else:
                new[i, start:end] = 0
        for i in range(len(ands)):
            if ands.shape[1] > 4 and ands[i, 4] >= 0:
                _add_wide(public, alpha, dealt, ands[i], shares[i], at, made, first, start, end, new[into[i]], sets)
            else:
                _add_and(public, alpha, dealt, ands[i], shares[i], at, made, first, start, end, new[into[i]])
        for i in range(len(kept)):
            new[count + i, start:end] = state[kept[i], start:end]
        for i in range(len(opened)):
            xor(new[opened[i], start:end], alpha[beyond + i, start:end], out[i, start:end])


@inlined
def _add_and(public, alpha, dealt, rows, shares, at, made, first, start, end, new):
    """One party's half of an AND, xor-ed into a row.

    With x_i = d_i ^ a_i (d_i public, a_i a mask) the AND of all x_i is the sum, over all sets of operands, of the
    product of the set's masks times the d_i of the others. `shares` has the rows of this party's halves of the mask
    products, by set. The sum is computed like a polynomial by Horner: one operand is factored out after the other.
    """
    # shares[s] is the row of the products of set s, whose bits number the operands: 3 is {0, 1}, 13 is {0, 2, 3}. The
    # product of public values alone, with `first`, is added by one party: both halves of it would cancel.
    d0, d1 = public[rows[0], : end - start], public[rows[1], : end - start]
    a0, a1 = alpha[at + rows[0], start:end], alpha[at + rows[1], start:end]
    s01, row = dealt[made + shares[3], start:end], new[start:end]
    if rows[2] < 0:
        for w in range(end - start):
            row[w] ^= s01[w] ^ (d0[w] & a1[w]) ^ (d1[w] & (a0[w] ^ (d0[w] & first)))
        return
    d2, a2 = public[rows[2], : end - start], alpha[at + rows[2], start:end]
    s02, s12 = dealt[made + shares[5], start:end], dealt[made + shares[6], start:end]
    s012 = dealt[made + shares[7], start:end]
    if rows[3] < 0:
        for w in range(end - start):
            x, y = d0[w], d1[w]
            without = s01[w] ^ (x & a1[w]) ^ (y & (a0[w] ^ (x & first)))
            row[w] ^= s012[w] ^ (x & s12[w]) ^ (y & (s02[w] ^ (x & a2[w]))) ^ (d2[w] & without)
        return
    d3, a3 = public[rows[3], : end - start], alpha[at + rows[3], start:end]
    s03, s13 = dealt[made + shares[9], start:end], dealt[made + shares[10], start:end]
    s23, s013 = dealt[made + shares[12], start:end], dealt[made + shares[11], start:end]
    s023, s123 = dealt[made + shares[13], start:end], dealt[made + shares[14], start:end]
    s0123 = dealt[made + shares[15], start:end]
    for w in range(end - start):
        x, y = d0[w], d1[w]
        without = s01[w] ^ (x & a1[w]) ^ (y & (a0[w] ^ (x & first)))
        without = s012[w] ^ (x & s12[w]) ^ (y & (s02[w] ^ (x & a2[w]))) ^ (d2[w] & without)
        row[w] ^= d3[w] & without
    for w in range(end - start):
        x, y = d0[w], d1[w]
        masked = s013[w] ^ (x & s13[w]) ^ (y & (s03[w] ^ (x & a3[w])))
        row[w] ^= s0123[w] ^ (x & s123[w]) ^ (y & (s023[w] ^ (x & s23[w]))) ^ (d2[w] & masked)


@compiled
def _add_wide(public, alpha, dealt, rows, shares, at, made, first, start, end, new, sets):
    """`_add_and` of any number of operands; `sets` is room for half of their sets."""
    # Horner's rule over sets, from the last operand on. sets[s] is the sum of all terms whose masks, among the operands
    # that are not factored out yet, are those of the set s. Operand k is factored out by sets[s] = sets[s | 2^k] ^ d_k
    # sets[s].
    count = 0
    while count < len(rows) and rows[count] >= 0:
        count += 1
    half = 1 << (count - 1)
    for low in range(start, end, _FEW):
        size = min(_FEW, end - low)
        last = public[rows[count - 1], low - start : low - start + size]
        for s in range(half):
            found, with_last = sets[s], dealt[made + shares[s | half], low : low + size]
            if s == 0:
                with_last = alpha[at + rows[count - 1], low : low + size]
                for w in range(size):
                    found[w] = with_last[w] ^ (last[w] & first)
                continue
            own = dealt[made + shares[s], low : low + size]
            # The "product" of a single mask is the mask, which is not dealt.
            if s & (s - 1) == 0:
                own = alpha[at + shares[s], low : low + size]
            for w in range(size):
                found[w] = with_last[w] ^ (last[w] & own[w])
        for operand in range(count - 2, -1, -1):
            taken = public[rows[operand], low - start : low - start + size]
            for s in range(1 << operand):
                found, with_it = sets[s], sets[s | (1 << operand)]
                for w in range(size):
                    found[w] = with_it[w] ^ (taken[w] & found[w])
        for w in range(size):
            new[low + w] ^= sets[0, w]


@compiled
def products(alpha, other, mask, sets, out, low, high):
    """The products of two and more rows of alpha ^ other, under a mask."""
    alpha, other, mask, out = borrow_array(alpha), borrow_array(other), borrow_array(mask), borrow_array(out)
    both, several = np.empty((len(alpha), _SPAN), np.int64), np.empty(_SPAN, np.int64)
    for start in range(low, high, _SPAN):
        end = min(start + _SPAN, high)
        for i in range(len(alpha)):
            xor(alpha[i, start:end], other[i, start:end], both[i, : end - start])
        for i in range(len(sets)):
            # Sets have -1 for the operands that they lack. Sets of two and three, by far the most, are computed in one
            # pass.
            p, q, third, fourth = sets[i, 0], sets[i, 1], sets[i, 2], sets[i, 3]
            under, row = mask[i, start:end], out[i, start:end]
            if third < 0:
                for w in range(end - start):
                    row[w] = under[w] ^ (both[p, w] & both[q, w])
            elif fourth < 0:
                for w in range(end - start):
                    row[w] = under[w] ^ (both[p, w] & both[q, w] & both[third, w])
            else:
                for w in range(end - start):
                    several[w] = both[p, w] & both[q, w] & both[third, w] & both[fourth, w]
                for k in range(4, sets.shape[1]):
                    if sets[i, k] >= 0:
                        for w in range(end - start):
                            several[w] &= both[sets[i, k], w]
                xor(several, under, row)


@compiled
def _three(rows, low, high):
    return rows[0, low:high], rows[1, low:high], rows[2, low:high]


@compiled
def floor_products(alpha, other, wraps, mask, out, low, high):
    """The products of masks for the last layer of a ReLU (`relu.py`), and of bits that D knows, under a mask."""
    (p0, p1, p2), (q0, q1, q2) = _three(alpha, low, high), _three(other, low, high)
    (m0, m1, m2), (m3, m4, m5) = _three(mask, low, high), _three(mask[3:], low, high)
    (y0, y1, y2), (y3, y4, y5) = _three(out, low, high), _three(out[3:], low, high)
    # Row by row as `combine_floor` takes them, and as D proves them (`dealing_constraints.floor_products`).
    w = wraps[low:high]
    for i in range(len(w)):
        eq, k, u = p0[i] ^ q0[i], p1[i] ^ q1[i], p2[i] ^ q2[i]
        y0[i], y1[i], y2[i] = m0[i] ^ (eq & u), m1[i] ^ (k & u), m2[i] ^ (k & w[i])
        y3[i], y4[i], y5[i] = m3[i] ^ (u & w[i]), m4[i] ^ (eq & w[i]), m5[i] ^ (eq & u & w[i])


@compiled
def mask_floor_operands(equal, less, borrow, wraps, top, alpha, first, out, low, high):
    """One party's half of eq, k and u of a ReLU (`relu.py`), under alpha; `first` is all ones for A."""
    (a0, a1, a2), (y0, y1, y2) = _three(alpha, low, high), _three(out, low, high)
    eq, lt, u, w, bits = equal[low:high], less[low:high], borrow[low:high], wraps[low:high], top[low:high]
    for i in range(len(eq)):
        # The public c_63 and the negation go into one party's half.
        k = lt[i] ^ w[i] ^ (~bits[i] & first)
        y0[i], y1[i], y2[i] = a0[i] ^ eq[i], a1[i] ^ k, a2[i] ^ u[i]


@compiled
def combine_floor(of_A, of_S, alpha, dealt, wraps, top, mask, out, first, low, high):
    """One party's half of that layer's result, under a mask; `first` is all ones for A, which adds public terms."""
    (x0, x1, x2), (z0, z1, z2) = _three(of_A, low, high), _three(of_S, low, high)
    (a0, a1, a2), (y0, y1, y2) = _three(alpha, low, high), _three(out, low, high)
    (d0, d1, d2), (d3, d4, d5) = _three(dealt, low, high), _three(dealt[3:], low, high)
    (m0, m1, m2), w, above = _three(mask, low, high), wraps[low:high], top[low:high]
    # What this party sent of k is its own half under its own mask, so that half need not be kept beside it.
    own = x1 if first else z1
    for i in range(len(w)):
        eq, k, u = x0[i] ^ z0[i], x1[i] ^ z1[i], x2[i] ^ z2[i]
        # With x = X ^ a for each open X, this party's halves of a, and of w, which is never opened: every product of
        # open values and one half is local, and every product of two secrets is dealt. X Y without a secret is added by
        # one party.
        eq_u = d0[i] ^ (eq & a2[i]) ^ (u & (a0[i] ^ (eq & first)))
        k_u = d1[i] ^ (k & a2[i]) ^ (u & (a1[i] ^ (k & first)))
        wrapped = d2[i] ^ (k & w[i]) ^ (eq & u & w[i]) ^ (eq & d3[i]) ^ (u & d4[i]) ^ d5[i]
        half = own[i] ^ a1[i]
        y0[i], y1[i], y2[i] = m0[i] ^ half ^ eq_u, m1[i] ^ eq_u ^ k_u, m2[i] ^ (wrapped & ~above[i])


# From packed bits to ring elements, and on elements: `mpc/star/select.py`, `truncate.py`, `relu.py` and `maximum.py`.
#
# The elements of one bit of some words stand side by side, so these loops take slices of them. With indices from `low`
# on, the compiler could not tell that none is negative (which would count from the end), and would compute one element
# at a time instead of eight. A loop computes both values between which a bit chooses, since processors may mispredict
# a branch on the bit.


SPAN = 2048
"""Words whose 64 bits are taken in turns. They stay in the cache, and the elements of each bit are read in one run: in
longer runs the processor prefetches more."""


@compiled
def element_slice(t, width, low, high):
    """The slice of the elements of bit t of the words low .. high; it ends where there are no more elements."""
    return slice(t * width + low, t * width + high)


@compiled
def _xor(x, y, out):
    """The xor of two rows, at the beginning of `out`."""
    for w in range(len(x)):
        out[w] = x[w] ^ y[w]
    return out


@compiled
def _picked(opened, unset, whole):
    """`unset` where a bit is zero, and whole - unset where it is set."""
    # e xor b is 1 - b where e is set. Both parties negate their half of b, and the one with `whole` = 1 adds the one.
    return whole - unset if opened else unset


@compiled
def logical_shift_right(v, by):
    """v >> by (logical)."""
    return np.int64(np.uint64(v) >> np.uint64(by))


@compiled
def bits_less(b, other, mask, out, low, high):
    """The bits of b ^ other [K, W] as 0 and 1, less a mask: [K, N]."""
    (copies, width), words = b.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            words = _xor(b[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = element_slice(t, width, left, end), np.int64(1) << t
                less, found = mask[k, place], out[k, place]
                for i in range(len(found)):
                    found[i] = (1 if words[i] & bit else 0) - less[i]


@compiled
def masks(words, out, low, high):
    """All ones where the bits of words [K, W] are set, and 0 elsewhere: [K, N]."""
    copies, width = words.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            row = words[k, left:end]
            for t in range(64):
                found, bit = out[k, element_slice(t, width, left, end)], np.int64(1) << t
                for i in range(len(found)):
                    found[i] = -1 if row[i] & bit else 0


@compiled
def chosen_less(b, other, v, shift, mask, out, low, high):
    """v >> shift (logical) where the bits of b ^ other [K, W] are set and 0 elsewhere, less a mask: [K, N]."""
    (copies, width), words = b.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            words = _xor(b[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = element_slice(t, width, left, end), np.int64(1) << t
                x, less, found = v[place], mask[k, place], out[k, place]
                for i in range(len(found)):
                    value = logical_shift_right(x[i], shift)
                    found[i] = (value if words[i] & bit else 0) - less[i]


@compiled
def ring_bits(e, other, b, first, out, low, high):
    """One party's half of the opened bits xor b, from its half of b: [K, N]; first = 1 for the party that adds them."""
    (copies, width), words = e.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            words = _xor(e[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = element_slice(t, width, left, end), np.int64(1) << t
                half, found = b[k, place], out[k, place]
                for i in range(len(found)):
                    found[i] = _picked(words[i] & bit, half[i], first)


@compiled
def select_elements(e, other, c, b, r, chosen, first, out, low, high):
    """One party's half of s (c - r) for s = e xor b."""
    width, words = len(e), np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        words = _xor(e[left:end], other[left:end], words)
        for t in range(64):
            place, bit = element_slice(t, width, left, end), np.int64(1) << t
            x, half, whole, product, found = c[place], b[place], r[place], chosen[place], out[place]
            for i in range(len(found)):
                opened = words[i] & bit
                found[i] = _picked(opened, half[i], first) * x[i] - _picked(opened, product[i], whole[i])


@compiled
def operands(b, other, r, chosen, shift, mask, out, low, high):
    """r >> shift (logical), the bits of b ^ other [B, W], and r >> shift where those of the first are set, less a mask
    [1 + B + chosen, N]; see `truncate.py`."""
    (count, width), words = b.shape, np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(count):
            words = _xor(b[k, left:end], other[k, left:end], words)
            for t in range(64):
                place, bit = element_slice(t, width, left, end), np.int64(1) << t
                x, less, found = r[place], mask[0, place], out[0, place]
                # R is the same for all copies, and written in the pass over the first.
                if k == 0:
                    for i in range(len(found)):
                        found[i] = logical_shift_right(x[i], shift) - less[i]
                less, found = mask[1 + k, place], out[1 + k, place]
                for i in range(len(found)):
                    found[i] = (1 if words[i] & bit else 0) - less[i]
                if k < chosen:
                    less, found = mask[1 + count + k, place], out[1 + count + k, place]
                    for i in range(len(found)):
                        value = logical_shift_right(x[i], shift)
                        found[i] = (value if words[i] & bit else 0) - less[i]


@compiled
def floor_elements(e, other, c, dealt, wraps, number, copies, first, threshold, shift, out, low, high):
    """One party's half of s (C - R) - s u + 2^(64-f) s msb(r) for threshold `number`; see `relu.py`."""
    width, words, chosen = e.shape[1], np.empty((3, SPAN), np.int64), 1 + 2 * copies + number
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(3):
            row = k * copies + number
            _xor(e[row, left:end], other[row, left:end], words[k])
        e0, e1, e2 = words
        for t in range(64):
            place, bit = element_slice(t, width, left, end), np.int64(1) << t
            x, R, s0, s1 = c[place], dealt[0, place], dealt[1 + number, place], dealt[1 + copies + number, place]
            p, q, found = dealt[chosen, place], wraps[number, place], out[place]
            for i in range(len(found)):
                opened = e0[i] & bit
                s, half = _picked(opened, s0[i], first), _picked(opened, p[i], R[i])
                borrow = _picked(e1[i] & bit, s1[i], first)
                # s msb(r) is shared mod 2^32. The shift by 64 - f >= 32 leaves the low f bits of it, so a carry beyond
                # 2^32 falls off.
                wrap = _picked(e2[i] & bit, np.int64(q[i]), first) << (64 - shift)
                found[i] = s * logical_shift_right(np.uint64(x[i]) - np.uint64(threshold), shift) - half - borrow + wrap


@compiled
def winners(e, c, quotient, bits, chosen, wraps, wraps_chosen, first, shift, out, low, high):
    """One party's half of sum_i s_i (C_i - R_i + 2^(64-f) w_i) - u, for s and u = e xor b; see `maximum.py`.

    Args:
        e: words [(m + 1) W], public. bits: b in the ring [64, m + 1, W]. All others [64, m, W].
    """
    _, m, width = c.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for t in range(64):
            found, u, last = out[t, left:end], bits[t, m, left:end], e[m * width + left : m * width + end]
            bit = np.int64(1) << t
            for w in range(len(found)):
                found[w] = -_picked(last[w] & bit, u[w], first)
            for i in range(m):
                words, x, R = e[i * width + left : i * width + end], c[t, i, left:end], quotient[t, i, left:end]
                b, p = bits[t, i, left:end], chosen[t, i, left:end]
                q, whole = wraps_chosen[t, i, left:end], wraps[t, i, left:end]
                for w in range(len(found)):
                    opened = words[w] & bit
                    s, rest = _picked(opened, b[w], first), _picked(opened, p[w], R[w])
                    # As in `floor_elements`: a share mod 2^32 under a shift of 32 or more. 2^64 was lost only where the
                    # sign bit of c is clear.
                    wrap = _picked(opened, np.int64(q[w]), np.int64(whole[w])) << (64 - shift)
                    found[w] += s * logical_shift_right(x[w], shift) - rest + (wrap if x[w] >= 0 else 0)


@inlined
def _floor(x, wrap, shift, first):
    """The part of x in one party's half of a truncation: its wrap, and its quotient at the party that adds it."""
    lifted = np.uint64(x) + np.uint64(1 << 62)  # unsigned, since compilers assume that signed sums do not overflow
    wrap = np.int64(wrap) << (64 - shift)
    public = first * (logical_shift_right(lifted, shift) - (np.int64(1) << (62 - shift)))
    return (wrap if lifted < np.uint64(1 << 63) else 0) + public


@compiled
def floors(c, quotient, wraps, borrow, shift, first, out, low, high):
    """One party's half of a truncation; see `truncate.py`. `first` is the party that adds what is public."""
    place = slice(low, high)
    x, R, w, u, found = c[place], quotient[place], wraps[place], borrow[place], out[place]
    for i in range(len(found)):
        found[i] = _floor(x[i], w[i], shift, first) - R[i] - u[i]


@compiled
def floors_by_bit(e, other, c, dealt, wraps, half, shift, first, out, low, high):
    """As `floors`, of c + half, for a borrow e ^ other xor b: dealt are halves of the quotient and of b, [2, N]."""
    width, words = len(e), np.empty(SPAN, np.int64)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        words = _xor(e[left:end], other[left:end], words)
        for t in range(64):
            place, bit = element_slice(t, width, left, end), np.int64(1) << t
            x, R, b, w, found = c[place], dealt[0, place], dealt[1, place], wraps[place], out[place]
            for i in range(len(found)):
                borrow = _picked(words[i] & bit, b[i], first)
                found[i] = _floor(np.uint64(x[i]) + np.uint64(half), w[i], shift, first) - R[i] - borrow


@compiled
def shifted_less(v, shift, less, out, low, high):
    """v >> shift (logical), less another."""
    x, y, found = v[low:high], less[low:high], out[low:high]
    for i in range(len(found)):
        found[i] = logical_shift_right(x[i], shift) - y[i]


@compiled
def negative_less(v, less, out, low, high):
    """1 where v is negative and else 0, less another, mod 2^32."""
    x, y, found = v[low:high], less[low:high], out[low:high]
    for i in range(len(found)):
        found[i] = np.int32((1 if x[i] < 0 else 0) - np.int64(y[i]))


# Comparisons in one round (`mpc/star/compare.py`).


_CODED = 256
"""Words of which codes are made at a time: the more, the fewer places are written to by turns."""


@compiled
def wide_codes(r, mask, blocks, tops, out, low, high):
    """Thermometer codes of r's blocks, each of some width from some plane on, r's planes `tops`, and a mask on all."""
    width = -(-len(r) // 64)
    columns = min(_CODED, high - low)
    a = aligned_zeros(8 * columns).view(np.int64).reshape(64, columns)
    for start in range(low, high, _CODED):
        end = min(start + _CODED, high)
        planes_at(r, width, start, a[:, : end - start], 0)
        row = 0
        for b in range(len(blocks)):
            size = 0
            for plane in range(blocks[b, 0], blocks[b, 0] + blocks[b, 1]):
                # Row j is [v > j] for the value v of the lower k planes. With one more bit on top, it is bit | [v > j]
                # for j < 2^k - 1, the bit itself for j = 2^k - 1, and bit & [v > j - 2^k] above.
                bits = a[plane]
                for j in range(row, row + size):
                    code, above = out[j, start:end], out[j + size + 1, start:end]
                    for w in range(end - start):
                        above[w] = code[w] & bits[w]
                        code[w] |= bits[w]
                out[row + size, start:end] = bits[: end - start]
                size = 2 * size + 1
            row += size
        for i in range(len(tops)):
            out[row + i, start:end] = a[tops[i], : end - start]
        for i in range(len(out)):
            found, under = out[i, start:end], mask[i, start:end]
            for w in range(end - start):
                found[w] ^= under[w]


@compiled
def wide_leaves(bits, words, blocks, first, out, low, high):
    """One party's half of lt and eq of blocks, each of some width from some plane on, in rows b and len(blocks) + b.

    `words` are its halves of their thermometer codes, one block's after the other's.
    """
    hot = np.empty((1 << blocks[:, 1].max(), _FEW), np.int64)
    for left in range(low, high, _FEW):
        size, at = min(_FEW, high - left), 0
        for b in range(len(blocks)):
            # hot[j] is [the public planes so far have the value j]. Each further plane splits it into j and j + 2^k.
            for w in range(size):
                hot[0, w] = -1
            for k in range(blocks[b, 1]):
                plane = bits[blocks[b, 0] + k, left : left + size]
                for j in range(1 << k):
                    unset, taken = hot[j], hot[j + (1 << k)]
                    for w in range(size):
                        taken[w] = unset[w] & plane[w]
                        unset[w] ^= taken[w]
            less, equal = out[b, left : left + size], out[len(blocks) + b, left : left + size]
            for w in range(size):
                less[w], equal[w] = 0, hot[0, w] & first
            # For c = j: [r > c] is code j, and [r = c] is code j - 1 xor code j. The code before the first is 1, which
            # one party adds, and the one after the last is 0.
            for j in range((1 << blocks[b, 1]) - 1):
                code, here, above = words[at + j, left : left + size], hot[j], hot[j + 1]
                for w in range(size):
                    less[w] ^= here[w] & code[w]
                    equal[w] ^= (here[w] ^ above[w]) & code[w]
            at += (1 << blocks[b, 1]) - 1


@compiled
def planes(v, threshold, out, column, low, high):
    """Elements [N], less a threshold -> their bit planes [64, W], at a column of `out`."""
    planes_at(v, -(-len(v) // 64), low, out[:, column + low : column + high], threshold)


@compiled
def codes(r, mask, spans, tops, out, low, high):
    """Thermometer codes of the blocks of r in all spans [7 blocks, W], r's planes `tops`, and a mask on all of them."""
    width = -(-len(r) // 64)
    total = 0
    for s in range(len(spans)):
        total += -(-(spans[s, 1] - spans[s, 0]) // 3)
    mask, out = borrow_array(mask), borrow_array(out)
    size = min(_CODED, high - low)
    a = aligned_zeros(8 * size).view(np.int64).reshape(64, size)
    lower = np.empty((3, size), np.int64)
    for start in range(low, high, _CODED):
        end = min(start + _CODED, high)
        planes_at(r, width, start, a[:, : end - start], 0)
        row = 0
        for s in range(len(spans)):
            blocks = -(-(spans[s, 1] - spans[s, 0]) // 3)
            for p in range(spans[s, 1] - 3 * blocks, spans[s, 1], 3):
                for w in range(end - start):
                    # The lowest block of a span may reach below plane 0, where all numbers have zeros.
                    x0, x1 = a[p, w] if p >= 0 else 0, a[p + 1, w] if p >= -1 else 0
                    lower[0, w], lower[1, w], lower[2, w] = x1 | x0, x1, x1 & x0
                for i in range(3):
                    k = i * total + row
                    found, under = out[k, start:end], mask[k, start:end]
                    for w in range(end - start):
                        found[w] = under[w] ^ (a[p + 2, w] | lower[i, w])
                    k = (4 + i) * total + row
                    found, under = out[k, start:end], mask[k, start:end]
                    for w in range(end - start):
                        found[w] = under[w] ^ (a[p + 2, w] & lower[i, w])
                k = 3 * total + row
                xor(mask[k, start:end], a[p + 2], out[k, start:end])
                row += 1
        for i in range(len(tops)):
            k = 7 * total + i
            xor(mask[k, start:end], a[tops[i]], out[k, start:end])


@compiled
def signs(v, out, low, high):
    """The sign bits of elements as words."""
    width = len(out)
    for start in range(low, high, SPAN):
        found = out[start : min(start + SPAN, high)]
        found[:] = 0
        # From the last bit down, so that each shift makes room for the next. Rows that end early have no element: a
        # zero.
        for t in range(63, -1, -1):
            row = v[t * width + start : t * width + start + len(found)]
            for w in range(len(row)):
                found[w] = (found[w] << 1) | np.int64(np.uint64(row[w]) >> np.uint64(63))
            for w in range(len(row), len(found)):
                found[w] <<= 1


@compiled
def leaves(bits, words, total, block, start, blocks, first, out, row, low, high):
    """One party's half of lt and eq of the blocks from plane `start` on, in rows row and row + blocks of `out`.

    `words` are its halves of the codes of `total` blocks, of which those from `block` on are taken, for the columns
    modulo their width.
    """
    around, zero = words.shape[1], np.zeros(SPAN, np.int64)
    left = low
    while left < high:
        at = left % around
        size = min(SPAN, high - left, around - at)
        for b in range(blocks):
            p = start + 3 * b
            x0 = bits[p, left : left + size] if p >= 0 else zero
            x1 = bits[p + 1, left : left + size] if p >= -1 else zero
            x2 = bits[p + 2, left : left + size]
            u0, u1 = words[block + b, at : at + size], words[total + block + b, at : at + size]
            u2, u3 = words[2 * total + block + b, at : at + size], words[3 * total + block + b, at : at + size]
            u4, u5 = words[4 * total + block + b, at : at + size], words[5 * total + block + b, at : at + size]
            u6 = words[6 * total + block + b, at : at + size]
            less, equal = out[row + b, left : left + size], out[row + blocks + b, left : left + size]
            for w in range(size):
                # h_j is one where the public block c is j. The code u_j is a half of [r > j], so that [r > c] is the
                # sum of h_j u_j, [r > c - 1] that of h_{j+1} u_j (or one for c = 0), and [r = c] the xor of the two.
                c0, c1, c2 = x0[w], x1[w], x2[w]
                h3 = c1 & c0
                h1, h2, h0 = c0 ^ h3, c1 ^ h3, ~(c0 | c1)
                h4, h5, h6, h7 = h0 & c2, h1 & c2, h2 & c2, h3 & c2
                h0, h1, h2, h3 = h0 ^ h4, h1 ^ h5, h2 ^ h6, h3 ^ h7
                lt = (h0 & u0[w]) ^ (h1 & u1[w]) ^ (h2 & u2[w]) ^ (h3 & u3[w])
                lt ^= (h4 & u4[w]) ^ (h5 & u5[w]) ^ (h6 & u6[w])
                above = (h1 & u0[w]) ^ (h2 & u1[w]) ^ (h3 & u2[w]) ^ (h4 & u3[w])
                above ^= (h5 & u4[w]) ^ (h6 & u5[w]) ^ (h7 & u6[w])
                less[w] = lt
                equal[w] = (lt ^ above) ^ (h0 & first)
        left += size


@compiled
def planes_moved_by(bits, low, k, down, out, at, end):
    """The bit planes of c - 2^k (down is -1) or c + 2^k (down is 0) from plane `low` on, from those of c."""
    carry = np.empty(_SPAN, np.int64)  # of an addition, or the borrow of a subtraction: it passes ones, or zeros
    for start in range(at, end, _SPAN):
        stop = min(end, start + _SPAN)
        for t in range(low, k):
            before, found = bits[t, start:stop], out[t, start:stop]
            for w in range(len(found)):
                found[w] = before[w]
        carry[:] = -1
        for t in range(k, 64):
            before, found = bits[t, start:stop], out[t, start:stop]
            for w in range(len(found)):
                bit = before[w]
                found[w] = bit ^ carry[w]
                carry[w] &= bit ^ down


@compiled
def _part(x, y, row, left, size):
    """Words of a row of x or, numbered after them, of y."""
    return x[row, left : left + size] if row < len(x) else y[row - len(x), left : left + size]


@compiled
def sums_of_rows(x, y, ends, rows, starts, out, low, high):
    """The xor of some rows of x and, numbered after them, of y: of `rows` up to ends[i] at starts[i] of `out`."""
    none = np.zeros(_SPAN, np.int64)
    for left in range(low, high, _SPAN):
        size, start = min(_SPAN, high - left), 0
        for i in range(len(ends)):
            found = out[starts[i] + left : starts[i] + left + size]
            # The first two rows are combined as they are written, so that `out` is not cleared before.
            first, second = none[:size], none[:size]
            if start < ends[i]:
                first = _part(x, y, rows[start], left, size)
            if start + 1 < ends[i]:
                second = _part(x, y, rows[start + 1], left, size)
            for w in range(size):
                found[w] = first[w] ^ second[w]
            for k in range(start + 2, ends[i]):
                taken = _part(x, y, rows[k], left, size)
                for w in range(size):
                    found[w] ^= taken[w]
            start = ends[i]


# Claims about dealt values (`mpc/star/dealing_constraints.py`).


@compiled
def sum_bits(x, y, mask, out, low, high):
    """The bit planes of the sums of elements [N] and those of their last carries, xor a mask [65, W]."""
    width, count = mask.shape[1], len(x)
    a, carry = np.empty((64, LINE_WORDS), np.uint64), np.empty(LINE_WORDS, np.uint64)
    for word in range(low, high, LINE_WORDS):
        size = min(LINE_WORDS, high - word)
        a[:], carry[:] = 0, 0
        for t in range(64):
            for c in range(min(size, count - t * width - word)):
                at = t * width + word + c
                first, second = np.uint64(x[at]), np.uint64(y[at])
                found = first + second
                a[t, c] = found
                # The carry out of bit 63: both top bits are set, or one is and that of the sum is not.
                carry[c] |= (((first & second) | ((first | second) & ~found)) >> np.uint64(63)) << np.uint64(t)
        transpose_bits(a)
        for t in range(64):
            for c in range(size):
                out[t, word + c] = np.int64(a[t, c]) ^ mask[t, word + c]
        for c in range(size):
            out[64, word + c] = np.int64(carry[c]) ^ mask[64, word + c]


@compiled
def complements(words, v, zero, difference, low, high):
    """What the other half of a bit as a number must be, for one half v [K, N], where the other half of the packed bits
    [K, W] is 0; and its xor with what it must be where that is 1."""
    copies, width = words.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            bits = words[k, left:end]
            for t in range(64):
                place = element_slice(t, width, left, end)
                halves, unset, different = v[k, place], zero[k, place], difference[k, place]
                for i in range(len(unset)):
                    # In the ring of v, which may be that of 32 bits, and then with its sign in 64 bits, as the claims
                    # compare them.
                    bit, half = (bits[i] >> t) & 1, np.int64(halves[i])
                    found = np.int64(v.dtype.type(bit - half))
                    unset[i] = found
                    different[i] = found ^ np.int64(v.dtype.type(1 - bit - half))


@compiled
def choose_words(zero, one, words, base, difference, low, high):
    """The one of two words [K, N] that a bit of `words` [K, W] chooses, and its xor with the other one."""
    copies, width = words.shape
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        for k in range(copies):
            bits = words[k, left:end]
            for t in range(64):
                place = element_slice(t, width, left, end)
                x, y, taken, different = zero[k, place], one[k, place], base[k, place], difference[k, place]
                for i in range(len(taken)):
                    found = x[i] ^ y[i]
                    different[i] = found
                    # Minus a bit is a mask of ones, so there is no branch on it.
                    taken[i] = x[i] ^ (found & -((bits[i] >> t) & 1))


@compiled
def quotients(v, r, low_bit, last_bit, shift, out, low, high):
    """The coefficients [4, N] of 1, c, c' and c c' in (r >> shift) - v + low - 2^(64 - shift) last, where c and c' are
    the other party's halves of these two bits."""
    width, top = len(low_bit), np.int64(64 - shift)
    for left in range(low, high, SPAN):
        end = min(left + SPAN, high)
        lows, lasts = low_bit[left:end], last_bit[left:end]
        for t in range(64):
            place = element_slice(t, width, left, end)
            x, y = r[place], v[place]
            base, first, second, both = out[0, place], out[1, place], out[2, place], out[3, place]
            for i in range(len(base)):
                rest = logical_shift_right(x[i], shift) - y[i]
                bit, last = (lows[i] >> t) & 1, (lasts[i] >> t) & 1
                # The value for each choice of (c, c'), as bit xor c is bit or 1 - bit. The coefficients of 1, c, c' and
                # c c' over xor are f(0,0), f(0,0) ^ f(1,0), f(0,0) ^ f(0,1) and the xor of all four.
                zero, one = rest + bit, rest + 1 - bit
                last, without = last << top, (1 - last) << top
                base[i] = zero - last
                first[i] = (zero - last) ^ (one - last)
                second[i] = (zero - last) ^ (zero - without)
                both[i] = first[i] ^ (zero - without) ^ (one - without)


@compiled
def place_elements(elements, out, column):
    """Copies [K, N] of elements beside each other, from a column of a matrix [64, W] on, as bits of packed words stand;
    with zeros at the end of each."""
    copies, count = elements.shape
    width = (count + 63) // 64
    for k in range(copies):
        for t in range(64):
            row = out[t, column + k * width : column + (k + 1) * width]
            whole = max(0, min(width, count - t * width))
            for w in range(whole):
                row[w] = elements[k, t * width + w]
            for w in range(whole, width):
                row[w] = 0
