"""Slow and independent: AES-128 and Edwards25519 from their definitions, half gates one gate at a time."""

from __future__ import annotations

# AES-128 as in FIPS 197, on lists of bytes; the tables are computed.


def _times(a: int, b: int) -> int:
    """A product in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = (a << 1) ^ (0x11B if a & 0x80 else 0), b >> 1
    return product


def _sbox() -> list[int]:
    boxes = []
    for x in range(256):
        inverse = next((y for y in range(256) if _times(x, y) == 1), 0)
        rotated = [(inverse << r | inverse >> (8 - r)) & 0xFF for r in range(5)]
        boxes.append(rotated[0] ^ rotated[1] ^ rotated[2] ^ rotated[3] ^ rotated[4] ^ 0x63)
    return boxes


SBOX = _sbox()


def aes(key: bytes, block: bytes) -> bytes:
    words = [list(key[i : i + 4]) for i in range(0, 16, 4)]
    power = 1
    for i in range(4, 44):
        word = words[-1]
        if i % 4 == 0:
            word = [SBOX[b] for b in word[1:] + word[:1]]
            word[0] ^= power
            power = _times(power, 2)
        words.append([a ^ b for a, b in zip(words[i - 4], word, strict=True)])
    keys = [[b for word in words[i : i + 4] for b in word] for i in range(0, 44, 4)]
    state = [a ^ b for a, b in zip(block, keys[0], strict=True)]
    for number, round_key in enumerate(keys[1:], 1):
        state = [SBOX[b] for b in state]
        state = [state[(i + 4 * (i % 4)) % 16] for i in range(16)]
        if number < 10:
            mixed = []
            for c in range(0, 16, 4):
                column = state[c : c + 4]
                mixed += [
                    _times(column[r], 2) ^ _times(column[(r + 1) % 4], 3) ^ column[(r + 2) % 4] ^ column[(r + 3) % 4]
                    for r in range(4)
                ]
            state = mixed
        state = [a ^ b for a, b in zip(state, round_key, strict=True)]
    return bytes(state)


# Labels as numbers of 128 bits: the first int64 word of a tensor is the low half, little-endian.

MASK = (1 << 64) - 1


def number(words) -> int:
    return (int(words[0]) & MASK) | (int(words[1]) & MASK) << 64


def hashed(x: int, tweak: int) -> int:
    """E(tweak, sigma(x)) xor sigma(x), with sigma(l, r) = (l xor r, l) on the two words in the tensor's order."""
    first, second = x & MASK, x >> 64
    prepared = ((first ^ second) | first << 64).to_bytes(16, "little")
    out = aes((tweak % (1 << 128)).to_bytes(16, "little"), prepared)
    return int.from_bytes(out, "little") ^ int.from_bytes(prepared, "little")


def garbled_and(delta: int, a0: int, b0: int, tweak: int) -> tuple[int, int, int]:
    """T_G, T_E and the zero label of an AND: Zahur, Rosulek, Evans 2015, Figure 2, procedure GbAnd."""
    pa, pb = a0 & 1, b0 & 1
    ha0, ha1 = hashed(a0, tweak), hashed(a0 ^ delta, tweak)
    hb0, hb1 = hashed(b0, tweak + 1), hashed(b0 ^ delta, tweak + 1)
    tg = ha0 ^ ha1 ^ (delta if pb else 0)
    wg = ha0 ^ (tg if pa else 0)
    te = hb0 ^ hb1 ^ a0
    we = hb0 ^ (te ^ a0 if pb else 0)
    return tg, te, wg ^ we


def evaluated_and(a: int, b: int, tg: int, te: int, tweak: int) -> int:
    """The label of an AND from one label of each input: the same figure, procedure Ev."""
    return hashed(a, tweak) ^ (tg if a & 1 else 0) ^ hashed(b, tweak + 1) ^ (te ^ a if b & 1 else 0)


# Edwards25519 in affine coordinates.

P = 2**255 - 19
D = -121665 * pow(121666, P - 2, P) % P
ORDER = 2**252 + 27742317777372353535851937790883648493


def add_points(p: tuple[int, int], q: tuple[int, int]) -> tuple[int, int]:
    (x1, y1), (x2, y2) = p, q
    t = D * x1 * x2 * y1 * y2
    return (x1 * y2 + x2 * y1) * pow(1 + t, P - 2, P) % P, (y1 * y2 + x1 * x2) * pow(1 - t, P - 2, P) % P


def multiple(scalar: int, point: tuple[int, int]) -> tuple[int, int]:
    total = (0, 1)
    while scalar:
        total = add_points(total, point) if scalar & 1 else total
        point, scalar = add_points(point, point), scalar >> 1
    return total


def on_curve(y: int) -> tuple[int, int] | None:
    """The point with this y and an even x, if there is one."""
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P:
        return None
    return (P - x if x & 1 else x), y


def encoded(point: tuple[int, int]) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


BASE = on_curve(4 * pow(5, P - 2, P) % P)


def low_order_points() -> list[tuple[int, int]]:
    """The eight points whose order divides the cofactor: the order of the subgroup times any point is one of them."""
    found, y = {(0, 1)}, 2
    while len(found) < 8:
        point = on_curve(y)
        if point is not None:
            low = multiple(ORDER, point)
            found |= {multiple(k, low) for k in range(8)}
        y += 1
    return sorted(found)
