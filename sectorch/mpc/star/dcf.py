"""A distributed comparison function in tensor code: shares of payload * [c < r], evaluated without a message.

Boyle, Chandran, Gilboa, Gupta, Ishai, Kumar, Rathee, "Function Secret Sharing for Mixed-Mode and Fixed-Point Secure
Computation" (EUROCRYPT 2021), Figure 1; here for all elements of a tensor at once, level by level. A key is a seed for
each of the two evaluators and, for both, correction words: per level one block for the seeds and one for two words of
payload. Whoever holds one seed sees correction words that are uniform to them.

The payload is given on the left of r's path, or per element on its right and at r itself: [c < r] or [c >= r].

The generator is AES-128 with fixed public keys, G_j(s) = AES_k(s xor j) xor s xor j (Matyas, Meyer, Oseas), one k for
seeds and one for payload. A block is two int64 words, [..., 2]; a seed has its two low bits clear, where j stands, and
where a generated block carries the control bit. With n seeds in use, guessing one of them takes about 2^126 / n
evaluations.
"""

from __future__ import annotations

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_SEEDS = Cipher(algorithms.AES(b"sectorch dcf s/1"), modes.ECB())
_VALUES = Cipher(algorithms.AES(b"sectorch dcf v/1"), modes.ECB())
SPAN = 1 << 13
"""Elements at a time: the blocks of a level stay in the cache."""


def _permute(cipher: Cipher, blocks: torch.Tensor) -> torch.Tensor:
    """AES_k(x) xor x for contiguous blocks [..., 2]."""
    if blocks.is_meta:
        return torch.empty_like(blocks)
    padded = torch.empty(blocks.numel() + 2, dtype=torch.int64, device="cpu")
    source, target = blocks.cpu().numpy().data, padded.numpy().data
    cipher.encryptor().update_into(source.cast("B"), target.cast("B"))
    return padded[:-2].view(blocks.shape).to(blocks.device).bitwise_xor_(blocks)


def _tweak(n: int, j: int, like: torch.Tensor) -> torch.Tensor:
    """j in the low word of n blocks: [n, 2]."""
    out = like.new_zeros(n, 2, dtype=torch.int64)
    out[:, 0].fill_(j)
    return out


def _tweaks(n: int, blocks: int, like: torch.Tensor) -> torch.Tensor:
    """The payload's blocks on the left, [B, n, 2]; on the right they differ by one."""
    return torch.stack([_tweak(n, 2 * b, like) for b in range(blocks)])


def _both(bits: torch.Tensor) -> torch.Tensor:
    """[N] -> [N, 2]: the same in both words of a block."""
    return bits.unsqueeze(-1).expand(*bits.shape, 2).contiguous()


def _clear(blocks: torch.Tensor) -> torch.Tensor:
    """Blocks -> seeds, in place."""
    blocks[..., 0].bitwise_and_(~3)
    return blocks


def _split(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Generated blocks -> seeds, in place, and the control bits as masks."""
    control = _both(blocks[..., 0] << 63).bitwise_right_shift_(63)
    return _clear(blocks), control


def _pick(pair: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of [P, 2, ...] the left or, where the mask is set, the right: [P, ...]."""
    return (pair[:, 0] ^ pair[:, 1]).bitwise_and_(right).bitwise_xor_(pair[:, 0])


def _signed(values: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """-values where the mask is set."""
    return (values ^ negative).sub_(negative)


def _step_control(word: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The control correction of the side taken, from the two low bits of a seed's correction word."""
    return _both(word[..., 0] << (63 + right[..., 0])).bitwise_right_shift_(63)


def generate(seeds, r: torch.Tensor, flip: torch.Tensor, payload: torch.Tensor, low: int, high: int):
    """The correction words of N keys.

    Args:
        seeds: two of [N, 2], uniform.
        r: [N]; its bits low .. high - 1 are compared.
        flip: [N], masks; where set the payload is given for c >= r, elsewhere for c < r.
        payload: [B, N, 2].

    Returns:
        [L, N, 2] for the seeds and [L + 1, B, N, 2] for the payload, L = high - low.
    """
    n, depth = r.shape[0], high - low
    seed_words = r.new_empty(depth, n, 2)
    value_words = r.new_empty(depth + 1, *payload.shape)
    for start in range(0, n, SPAN):
        part = slice(start, min(n, start + SPAN))
        path = r[part] << (64 - high) if high < 64 else r[part]
        _generate(
            torch.stack([s[part] for s in seeds]), _both(path), _both(flip[part]), payload[:, part],
            seed_words[:, part], value_words[:, :, part],
        )  # fmt: skip
    return seed_words, value_words


def _generate(s, path, flip, payload, seed_words, value_words) -> None:
    """`generate` for a few elements; the bits of `path` are taken from the top."""
    blocks, n, _ = payload.shape
    one, tweaks = _tweak(n, 1, s), _tweaks(n, blocks, s)
    s = _clear(s)
    t = torch.stack((torch.zeros_like(path), torch.full_like(path, -1)))
    given = torch.zeros_like(payload)
    for level in range(seed_words.shape[0]):
        right = (path << level).bitwise_right_shift_(63)
        children, control = _split(_permute(_SEEDS, torch.stack((s, s ^ one), 1)))
        values = _permute(_VALUES, s[:, None, None] ^ torch.stack((tweaks, tweaks ^ one)))

        kept, kept_control = _pick(children, right), _pick(control, right)
        lost = children[0, 0] ^ children[0, 1] ^ children[1, 0] ^ children[1, 1] ^ kept[0] ^ kept[1]
        to_left = control[0, 0] ^ control[1, 0] ^ ~right
        to_right = control[0, 1] ^ control[1, 1] ^ right
        word = seed_words[level]
        word.copy_(lost)
        word[:, 0] |= (to_left[:, 0] & 1) | (to_right[:, 0] & 2)

        value_kept = _pick(values, right)
        value_lost = values[:, 0] ^ values[:, 1] ^ value_kept
        change = (value_lost[1] - value_lost[0]).sub_(given).add_(payload & (right ^ flip))
        given += value_kept[0] - value_kept[1] + change
        value_words[level] = _signed(change, t[1])

        s = (t & lost).bitwise_xor_(kept)
        t = t.bitwise_and_(_step_control(word, right)).bitwise_xor_(kept_control)
    leaves = _permute(_VALUES, s[:, None] ^ tweaks)
    change = (leaves[1] - leaves[0]).sub_(given).add_(payload & flip)
    value_words[-1] = _signed(change, t[1])


def evaluate(seed, c: torch.Tensor, seed_words: torch.Tensor, value_words: torch.Tensor, high: int, second: bool):
    """One evaluator's additive share of the payload at the public points c.

    Args:
        seed: [N, 2], this evaluator's.
        c: [N]; its bits high - L .. high - 1 are compared.
        seed_words, value_words: the correction words.
        second: whether this is the evaluator of the second seed.

    Returns:
        [B, N, 2].
    """
    n = seed_words.shape[1]
    out = value_words.new_empty(value_words.shape[1:])
    for start in range(0, n, SPAN):
        part = slice(start, min(n, start + SPAN))
        path = c[part] << (64 - high) if high < 64 else c[part]
        out[:, part] = _evaluate(seed[part], _both(path), seed_words[:, part], value_words[:, :, part], second)
    return out.neg_() if second else out


def _evaluate(s, path, seed_words, value_words, second: bool) -> torch.Tensor:
    depth, blocks, n, _ = value_words.shape
    one, tweaks = _tweak(n, 1, s), _tweaks(n, blocks, s)
    s = _clear(s.clone())
    t = torch.full_like(s, -1 if second else 0)
    total = torch.zeros_like(value_words[0])
    for level in range(depth - 1):
        right = (path << level).bitwise_right_shift_(63)
        side = s ^ (one & right)
        total += _permute(_VALUES, side ^ tweaks).add_(value_words[level] & t)
        child, control = _split(_permute(_SEEDS, side))
        word = seed_words[level]
        s = _clear((t & word).bitwise_xor_(child))
        t = t.bitwise_and_(_step_control(word, right)).bitwise_xor_(control)
    return total.add_(_permute(_VALUES, s ^ tweaks)).add_(value_words[-1] & t)
