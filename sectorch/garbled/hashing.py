"""The hash of garbling: H(x, i) = E(i, sigma(x)) xor sigma(x), with AES-128 as the ideal cipher E.

sigma(l | r) = (l xor r | l) is a linear orthomorphism. H is tweakable circular correlation robust for an ideal cipher,
and what p evaluations of AES give an adversary grows with mu p / 2^127, where mu is how often one tweak is used:
C. Guo, J. Katz, X. Wang, C. Weng, Y. Yu, "Better concrete security for half-gates garbling (in the multi-instance
setting)", CRYPTO 2020. The tweak i is the AES key: public, and one for each half gate. It serves a whole batch, so its
key schedule costs nothing that counts. With one fixed key, as in H(x, i) = pi(2x xor i) xor 2x xor i of the half-gates
paper, the number of all gates ever garbled takes the place of mu; the paper named above has the attack.

A label, as any 128-bit block, is a pair of int64 words [..., 2].
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..choreography.streams import PairKey, random_secret

WORDS = 2
"""int64 words in a label."""

LABEL_BYTES = 16

SLACK = 2
"""Words after an output buffer, which ECB of the `cryptography` package asks for and leaves alone."""

_ZEROS = memoryview(bytes(1 << 16))


def sigma(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """(l | r) -> (l xor r | l), blocks [..., 2]."""
    out = torch.empty_like(x) if out is None else out
    torch.bitwise_xor(x[..., 0], x[..., 1], out=out[..., 0])
    out[..., 1] = x[..., 0]
    return out


def tweaks(nonce: torch.Tensor, first: int, count: int) -> list[bytes]:
    """The AES keys nonce + first ... nonce + first + count - 1 (mod 2^128), for a nonce of two words."""
    start = int.from_bytes(nonce.numpy().data.cast("B"), "little") + first
    return [((start + i) % (1 << 128)).to_bytes(LABEL_BYTES, "little") for i in range(count)]


def encrypt(keys: Iterable[bytes], blocks: torch.Tensor, out: torch.Tensor) -> None:
    """AES-128 of blocks [k, ..., 2], contiguous, under the k keys; `out` is flat, with `SLACK` words to spare."""
    source, target = (t.numpy().reshape(-1).data.cast("B") for t in (blocks, out))
    size = len(source) // max(1, blocks.shape[0])
    for i, key in enumerate(keys):
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        cipher.update_into(source[i * size : (i + 1) * size], target[i * size : (i + 1) * size + 8 * SLACK])


def hash_blocks(keys: list[bytes], x: torch.Tensor) -> torch.Tensor:
    """H of blocks x [k, ..., 2], the i-th of the first dimension under the i-th key."""
    prepared = sigma(x)
    out = torch.empty(x.numel() + SLACK, dtype=torch.int64)
    encrypt(keys, prepared, out)
    return out[: x.numel()].view(x.shape).bitwise_xor_(prepared)


def expand(seeds: torch.Tensor, nonce: torch.Tensor, words: int) -> torch.Tensor:
    """Streams [k, words] from seeds [k, 2]: AES-128 in counter mode, from the nonce (two words) on."""
    out = torch.empty(seeds.shape[0], words, dtype=torch.int64)
    start = bytes(nonce.numpy().data.cast("B"))
    for seed, row in zip(seeds.contiguous().numpy(), out.numpy(), strict=True):
        stream = Cipher(algorithms.AES(seed.tobytes()), modes.CTR(start)).encryptor()
        target = row.data.cast("B") if words else memoryview(b"")
        for at in range(0, len(target), len(_ZEROS)):
            part = target[at : at + len(_ZEROS)]
            stream.update_into(_ZEROS[: len(part)], part)
    return out


def private_words(*shape: int) -> torch.Tensor:
    """Uniform int64 words that only the caller has: a stream (`choreography/streams.py`) under a fresh secret."""
    count = torch.Size(shape).numel()
    return PairKey(random_secret(), b"").words("private", 0, 0, count).view(shape)
