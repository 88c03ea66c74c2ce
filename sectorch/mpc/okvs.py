"""An oblivious key-value store, in which a key finds its row: its own file, since it is a term of the field.

The owner of the rows encodes n of them, each under a key, as a matrix of 64-bit words. The row of a key is the XOR of
the matrix's rows at three places and at a random subset of `DENSE` further ones, which all follow from the key's hash.
Without the secret of the hash and of the pads the matrix is uniform, whatever keys it has: a row is stored under a pad
that follows from its key as well, so the stored values are uniform, and what no key determines is drawn at random.

    hash(key) = AES(HMAC-SHA256(key)[:15] || 0), AES(... || 1)          -> three places and a subset
    pads(key) = AES(HMAC-SHA256(key)[:15] || 2), AES(... || 3), ...     -> one word for each word of a row

HMAC and AES-128 have keys of their own, derived from the secret by HKDF. The blocks are distinct unless two MACs
collide, with probability n^2 / 2^121, and AES of distinct blocks is uniform up to as much again.

Encoding peels the keys: a place that one key alone has is assigned last, and the key is taken away. The keys that are
left (none, nearly always, in a large table) are solved with the dense places by elimination over GF(2). They have no
solution with a probability below 2^-40 (`tests/test_okvs.py` measures how many dense places are needed).

Sources: Garimella, Pinkas, Rosulek, Trieu, Yanai, "Oblivious key-value stores and amplification for private set
intersection", CRYPTO 2021 (three places and dense ones, 3H-GCT); Kolesnikov, Matania, Pinkas, Rosulek, Trieu,
"Practical multi-party PSI from symmetric-key techniques", CCS 2017 (rows under pads of their keys, an OPPRF).
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..choreography.streams import KeyStream, derive, random_secret
from ..errors import ArgumentError

DENSE = 64
"""Places of which each key has a random subset: one word of its hash."""
HASH_WORDS = 5
"""Words of 32 bits of a key's hash: three places, and two for the subset."""
_MAC_BYTES, _BLOCK = 15, 16


def segment(rows: int) -> int:
    """The length of each of the three parts of which a key has one place, for so many rows: 1.3 n / 3 and some more.

    A part of 0.41 n is enough for a large table; the excess is for small ones, in which more keys meet.
    """
    return max(1, math.ceil(1.3 * rows / 3 + 2 * math.sqrt(rows)))


def length(rows: int) -> int:
    """The number of rows of the matrix."""
    return 3 * segment(rows) + DENSE


def hashes_and_pads(secret: bytes, keys: Iterable[bytes], width: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each key and the pads of its row.

    Args:
        secret: 32 bytes that have no other use.
        keys: bytes of any length.
        width: the words of a row.

    Returns:
        int32 [n, `HASH_WORDS`] and int64 [n, width].
    """
    mac = derive(secret, b"", "key-value store/mac", 32)
    digests = b"".join([hmac.digest(mac, key, "sha256")[:_MAC_BYTES] for key in keys])
    count, blocks = len(digests) // _MAC_BYTES, 2 + (width + 1) // 2
    inputs = np.empty((count, blocks, _BLOCK), dtype=np.uint8)
    inputs[:, :, :_MAC_BYTES] = np.frombuffer(digests, np.uint8).reshape(count, 1, _MAC_BYTES)
    if blocks > 256:
        raise ArgumentError(f"a row has at most 508 words, got {width}: share fewer columns")
    inputs[:, :, _MAC_BYTES] = np.arange(blocks, dtype=np.uint8)
    # ECB shows whether two blocks are equal, and no two are.
    cipher = Cipher(algorithms.AES(derive(secret, b"", "key-value store/blocks", 16)), modes.ECB()).encryptor()
    drawn = bytearray(inputs.size + _BLOCK - 1)
    cipher.update_into(inputs.tobytes(), drawn)
    found = np.frombuffer(drawn, np.uint8, inputs.size).reshape(count, blocks * _BLOCK)
    hashes = found[:, : 4 * HASH_WORDS].copy().view(np.int32).reshape(count, HASH_WORDS)
    pads = found[:, 2 * _BLOCK : 2 * _BLOCK + 8 * width].copy().view(np.int64).reshape(count, width)
    return hashes, pads


def random_words(shape: tuple[int, ...]) -> np.ndarray:
    """Uniform words from the operating system's randomness, int64."""
    out = np.empty(math.prod(shape), dtype=np.int64)
    if out.size:
        KeyStream(random_secret(), b"", "key-value store").fill(out.data.cast("B"))
    return out.reshape(shape)


def encode(hashes: np.ndarray, values: np.ndarray, rows: int) -> np.ndarray:
    """The matrix in which each hash finds its value.

    Args:
        hashes: int32 [k, `HASH_WORDS`], of different keys.
        values: int64 [k, w], uniform to whoever shall learn nothing.
        rows: the public number of rows, at least k.

    Returns:
        int64 [`length(rows)`, w].

    Raises:
        ArgumentError: the keys have no encoding: two have one hash, or a chance of less than 2^-40.
    """
    matrix = random_words((length(rows), values.shape[1]))
    places, subsets = _places(hashes, rows), _subsets(hashes)
    order, left = _peeled(places, len(matrix) - DENSE)
    if len(left):
        _solve(matrix, places[left], subsets[left], values[left])
    rest = values ^ _dense_sums(matrix, subsets)
    for keys, pivots in reversed(order):
        other = places[keys]
        # Of a key's three rows, the XOR of all is that of the two others once its own is zero.
        matrix[pivots] = 0
        matrix[pivots] = rest[keys] ^ matrix[other[:, 0]] ^ matrix[other[:, 1]] ^ matrix[other[:, 2]]
    return matrix


def decode(hashes: np.ndarray, matrix: np.ndarray, rows: int) -> np.ndarray:
    """The value that each hash finds, int64 [n, w]; for the hash of another key it is a uniform one.

    Args:
        hashes: int32 [n, `HASH_WORDS`].
        matrix: as from `encode` for so many rows.
    """
    places = _places(hashes, rows)
    return _dense_sums(matrix, _subsets(hashes)) ^ matrix[places[:, 0]] ^ matrix[places[:, 1]] ^ matrix[places[:, 2]]


def _places(hashes: np.ndarray, rows: int) -> np.ndarray:
    """Each key's three places, one in each part: [n, 3]."""
    size = segment(rows)
    drawn = np.ascontiguousarray(hashes[:, :3]).view(np.uint32).astype(np.uint64)
    return ((drawn * np.uint64(size)) >> np.uint64(32)).astype(np.int64) + np.arange(3) * size


def _subsets(hashes: np.ndarray) -> np.ndarray:
    """Each key's subset of the dense places as eight bytes: [n, 8]."""
    return np.ascontiguousarray(hashes[:, 3:]).view(np.uint8)


def _dense_sums(matrix: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """The XOR of each key's subset of the matrix's last rows: a table of 256 sums for each byte."""
    dense = matrix[len(matrix) - DENSE :].reshape(8, 8, -1)
    sums = np.zeros((8, 256, matrix.shape[1]), dtype=np.int64)
    for bit in range(8):
        sums[:, 1 << bit : 2 << bit] = sums[:, : 1 << bit] ^ dense[:, bit : bit + 1]
    out = sums[0][subsets[:, 0]]
    for i in range(1, 8):
        out ^= sums[i][subsets[:, i]]
    return out


def _peeled(places: np.ndarray, count: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """The keys in rounds, each with a place that no key of its round or of a later one has; and the keys that are left.

    A round takes all keys that have such a place at once, so that a large table takes some tens of rounds.
    """
    flat, keys = places.reshape(-1), np.repeat(np.arange(len(places)), 3)
    degree = np.bincount(flat, minlength=count)
    held = np.zeros(count, dtype=np.int64)  # at a place of degree 1 its key
    np.bitwise_xor.at(held, flat, keys)
    taken = np.zeros(len(places), dtype=bool)
    order, single = [], np.flatnonzero(degree == 1)
    while len(single):
        found, first = np.unique(held[single], return_index=True)
        pivots = single[first]
        order.append((found, pivots))
        taken[found] = True
        touched = places[found].reshape(-1)
        np.subtract.at(degree, touched, 1)
        np.bitwise_xor.at(held, touched, np.repeat(found, 3))
        single = np.unique(touched[degree[touched] == 1])
    return order, np.flatnonzero(~taken)


def _solve(matrix: np.ndarray, places: np.ndarray, subsets: np.ndarray, values: np.ndarray) -> None:
    """Change rows of the matrix so that each of these keys finds its value, by elimination over GF(2).

    A column is a place; an equation has a bit for each of its columns. Columns without a pivot keep their random rows.
    """
    columns, at = np.unique(places.reshape(-1), return_inverse=True)
    columns = np.concatenate([columns, np.arange(len(matrix) - DENSE, len(matrix))])
    dense = len(columns) - DENSE
    rest = values ^ _dense_sums(matrix, subsets)
    for i in range(3):
        rest = rest ^ matrix[places[:, i]]
    # `rest` is what the changes of a key's rows have to sum to. Its three places differ, since the parts are disjoint.
    words = np.ascontiguousarray(subsets).view("<u8").reshape(-1).tolist()
    equations = [
        (1 << a) | (1 << b) | (1 << c) | (word << dense)
        for (a, b, c), word in zip(at.reshape(-1, 3).tolist(), words, strict=True)
    ]
    solved: list[tuple[int, int]] = []
    for i, equation in enumerate(equations):
        for pivot, j in solved:
            if equation >> pivot & 1:
                equation ^= equations[j]
                rest[i] ^= rest[j]
        if not equation:
            raise ArgumentError(
                "the keys of a table have no encoding: two of them are equal to the hash or, once in 2^40 tables, by "
                "chance; join again"
            )
        equations[i] = equation
        solved.append((equation.bit_length() - 1, i))
    change = np.zeros((len(columns), matrix.shape[1]), dtype=np.int64)
    for pivot, i in reversed(solved):
        # Its other columns have no pivot, or that of a later equation, whose change is known.
        equation, total = equations[i] ^ (1 << pivot), rest[i].copy()
        while equation:
            column = equation.bit_length() - 1
            total ^= change[column]
            equation ^= 1 << column
        change[pivot] = total
    matrix[columns] ^= change
