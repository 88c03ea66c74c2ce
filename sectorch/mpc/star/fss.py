"""Function secret sharing: sign, ReLU and borrow from one opening, without a further message.

For slow networks. With c = x + r public to A and S, the sign of x is a function of c that D knows, so D deals keys for
it:

    [x >= 0] = c_63 xor not u,      u = r_63 xor [c mod 2^63 < r mod 2^63].

The keys are those of a distributed comparison function (DCF): A and S evaluate them at c to shares of u. With the
payload (1, r) they get shares of u and of u r, from which ReLU needs no opening. The borrow of a truncation is a
comparison of the low planes, with the payload 1.

Source: Boyle, Chandran, Gilboa, Gupta, Ishai, Kumar, Rathee, "Function Secret Sharing for Mixed-Mode and Fixed-Point
Secure Computation", EUROCRYPT 2021, Figure 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute
from .compare import check_planes
from .dealing_proofs import refuse_unproved
from .guard import flags_of_bits, raise_flags
from .masking import Masked
from .shares import Shares, each

# The distributed comparison function: shares of payload * [c < r], for all elements of a tensor at once, level by level
#
# A key is a seed for each of the two evaluators and correction words for both: per level one block for the seeds and
# one for two words of payload. To an evaluator, who holds one seed, the correction words are uniform.
#
# The payload is at the points left of r's path, or for some elements at r and right of it: [c < r] or [c >= r].
#
# The generator is AES-128 with fixed public keys, G_j(s) = AES_k(s xor j) xor s xor j (Matyas, Meyer, Oseas), one k for
# seeds and one for payload. A block is two int64 words, [..., 2]; a seed has its two low bits clear, where j stands,
# and where a generated block carries the control bit. With n seeds in use, guessing one of them takes about 2^126 / n
# evaluations.


_SEEDS = Cipher(algorithms.AES(b"sectorch dcf s/1"), modes.ECB())
_VALUES = Cipher(algorithms.AES(b"sectorch dcf v/1"), modes.ECB())
SPAN = 1 << 13
"""Elements at a time: the blocks of a level stay in the cache."""


def _permute(cipher: Cipher, blocks: torch.Tensor) -> torch.Tensor:
    """AES_k(x) xor x for contiguous blocks [..., 2]."""
    if blocks.is_meta:
        return torch.empty_like(blocks)
    # `update_into` asks for room for almost a block more than it writes.
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
    """Turn blocks into seeds, in place."""
    blocks[..., 0].bitwise_and_(~3)
    return blocks


def _split(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn generated blocks into seeds, in place, and return them with the control bits as masks."""
    control = _both(blocks[..., 0] << 63).bitwise_right_shift_(63)
    return _clear(blocks), control


def _pick(pair: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Select from [P, 2, ...] the left or, where the mask is set, the right: [P, ...]."""
    return (pair[:, 0] ^ pair[:, 1]).bitwise_and_(right).bitwise_xor_(pair[:, 0])


def _signed(values: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """-values where the mask is set."""
    return (values ^ negative).sub_(negative)


def _step_control(word: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The control correction of the chosen side, from the two low bits of a seed's correction word."""
    # `right` is 0 or -1, so the shift by 63 or 62 brings bit 0 or 1 to the top, and the arithmetic shift fills the
    # word.
    return _both(word[..., 0] << (63 + right[..., 0])).bitwise_right_shift_(63)


def generate(seeds, r: torch.Tensor, flip: torch.Tensor, payload: torch.Tensor, low: int, high: int):
    """Compute the correction words of N keys.

    Args:
        seeds: the two evaluators' seeds, uniform, [N, 2] each.
        r: [N]; its bits low .. high - 1 are compared.
        flip: [N], masks: all ones where the payload is at c >= r, zero where it is at c < r.
        payload: [B, N, 2].

    Returns:
        The words for the seeds [L, N, 2] and for the payload [L + 1, B, N, 2], L = high - low.
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
    """`generate` for up to `SPAN` elements; the bits of `path` are used from the top."""
    blocks, n, _ = payload.shape
    one, tweaks = _tweak(n, 1, s), _tweaks(n, blocks, s)
    s = _clear(s)
    t = torch.stack((torch.zeros_like(path), torch.full_like(path, -1)))
    given = torch.zeros_like(payload)  # the difference of the two evaluators' payloads along r's path so far
    for level in range(seed_words.shape[0]):
        right = (path << level).bitwise_right_shift_(63)
        children, control = _split(_permute(_SEEDS, torch.stack((s, s ^ one), 1)))
        values = _permute(_VALUES, s[:, None, None] ^ torch.stack((tweaks, tweaks ^ one)))

        # Beside r's path the seeds of the two evaluators must become equal, so that they cancel from there on: the
        # correction word is the difference of the children that leave the path.
        on_path, on_path_control = _pick(children, right), _pick(control, right)
        lost = children[0, 0] ^ children[0, 1] ^ children[1, 0] ^ children[1, 1] ^ on_path[0] ^ on_path[1]
        to_left = control[0, 0] ^ control[1, 0] ^ ~right
        to_right = control[0, 1] ^ control[1, 1] ^ right
        word = seed_words[level]
        word.copy_(lost)
        word[:, 0] |= (to_left[:, 0] & 1) | (to_right[:, 0] & 2)

        value_on_path = _pick(values, right)
        value_lost = values[:, 0] ^ values[:, 1] ^ value_on_path
        # Where r's bit is 1, the points that leave the path lie left of r, where c < r: they get the payload, or with
        # `flip` the others do. The second evaluator subtracts its share, so the word has the sign of its control bit.
        change = (value_lost[1] - value_lost[0]).sub_(given).add_(payload & (right ^ flip))
        given += value_on_path[0] - value_on_path[1] + change
        value_words[level] = _signed(change, t[1])

        # An evaluator applies the correction where its control bit is set, and on r's path exactly one of the two has
        # it set.
        s = (t & lost).bitwise_xor_(on_path)
        t = t.bitwise_and_(_step_control(word, right)).bitwise_xor_(on_path_control)
    leaves = _permute(_VALUES, s[:, None] ^ tweaks)
    change = (leaves[1] - leaves[0]).sub_(given).add_(payload & flip)
    value_words[-1] = _signed(change, t[1])


def evaluate(seed, c: torch.Tensor, seed_words: torch.Tensor, value_words: torch.Tensor, high: int, second: bool):
    """Compute one evaluator's additive share of the payload at the public points c.

    Args:
        seed: this evaluator's, [N, 2].
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


@dataclass(frozen=True)
class Key:
    """Keys for one masked tensor: seeds at A and S, correction words at both. Planes 0 .. high - 1 are compared."""

    seeds: Shares
    words: tuple[Located, Located]
    high: int


def _words_shapes(seed_A, seed_S, r, high: int, signed: bool, product: bool) -> tuple[torch.Tensor, torch.Tensor]:
    n = r.numel()
    return r.new_empty(high, n, 2), r.new_empty(high + 1, n, 2) if product else r.new_empty(high + 1, n)


@leaf(shapes=_words_shapes)
def _correction_words(seed_A, seed_S, r, high: int, signed: bool, product: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """At D: the correction words as they are sent; of the payload one word, or two with a product."""
    r = r.reshape(-1)
    flip = (r << (63 - high)).bitwise_right_shift_(63) if signed else torch.zeros_like(r)
    payload = torch.stack((torch.ones_like(r), r if product else torch.zeros_like(r)), -1).unsqueeze(0)
    seeds, values = generate((seed_A, seed_S), r, flip, payload, 0, high)
    return seeds, values[:, 0] if product else values[:, 0, :, 0].contiguous()


@protocol("deal_key", "Boyle et al., EUROCRYPT 2021, Figure 1", [
    Message("seeds", "D", "S", "the generator at A's seed of k_DA"),
    Message("values", "D", "S", "the generator at A's seed of k_DA"),
    Message("seeds_on", "S", "A", "the generator at S's seed of k_DS"),
    Message("values_on", "S", "A", "the generator at S's seed of k_DS"),
])  # fmt: skip
def deal_key(net: Net, x: Masked, high: int, signed: bool = True, product: bool = False) -> Key:
    """Deal keys that compare any public c, in the planes 0 .. high - 1, with x's mask r.

    Args:
        signed: the payload is u as above, with the sign of r, and not [c < r] alone.
        product: the second payload is r times the first one.

    Ahead of the query. D sends 24 high + 8 bytes per element to S, with `product` 32 high + 16, and S sends the same on
    to A. Each sees uniform bits (computationally: AES).

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for keys.
    """
    refuse_unproved(net)
    D, A, S = net.D, net.A, net.S
    count = x.shape.numel()
    seed_A, seed_S = net.common(D, A, (count, 2), "seed_A"), net.common(D, S, (count, 2), "seed_S")
    seeds, values = _correction_words(seed_A, seed_S, x.r, high, signed, product)
    seeds, values = seeds.send(D, S, "seeds"), values.send(D, S, "values")
    seeds, values = seeds.send(S, A, "seeds_on"), values.send(S, A, "values_on")
    return Key(Shares(seed_A, seed_S), (seeds, values), high)


def _at(key: Key, c: Located) -> Shares:
    """Each evaluator's half of the payload at c: [N, 2]. The second word has a meaning with `product` only."""
    return Shares(
        _payload(key.seeds.A, c, *key.words, key.high, False), _payload(key.seeds.S, c, *key.words, key.high, True)
    )


@leaf(shapes=lambda seed, *_: torch.empty_like(seed))
def _payload(seed, c, seeds, values, high: int, second: bool) -> torch.Tensor:
    if values.dim() == 2:  # no second word was sent; the result's second word is not used
        values = torch.stack((values, torch.zeros_like(values)), -1)
    return evaluate(seed, c.reshape(-1), seeds, values.unsqueeze(1), high, second)[0]


@protocol("borrow", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def borrow(net: Net, x: Masked, c: Located, shift: int) -> Shares:
    """Compute [c mod 2^shift < r mod 2^shift] for x's mask r and a public c, as additive shares of 0 and 1. Exact.

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    u = _at(deal_key(net, x, shift, signed=False), c)[:, 0]
    return each(torch.Tensor.view, u, x.shape)


@protocol("gate", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def gate(
    net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,), limit_bits: int | None = None
) -> list[Shares]:
    """Compute max(x - t, 0) for each public threshold t. Exact.

    Args:
        x: a masked opening.
        high: x - t is known to lie in [-2^high, 2^high).
        limit_bits: raise a flag where the first result is 2^limit_bits or more; the key is evaluated once more.

    Returns:
        One tensor of shares for each threshold.

    No message online, so that with the opening it takes one round. One key per element is dealt (`deal_key` with a
    product), which serves all thresholds. Nobody learns anything.
    """
    check_planes(high)
    key = deal_key(net, x, high, product=True)
    if limit_bits is not None and limit_bits < high:
        raise_flags(net, flags_of_bits(net, _sign(key, x, thresholds[0] + (1 << limit_bits))))
    results = []
    for t in thresholds:
        c = x.c - t if t else x.c
        clear, at = _top_clear(c, high), _at(key, c)
        results.append(Shares(_ramp(at.A, c, clear, x.r_A, first=True), _ramp(at.S, c, clear, x.r_S, first=False)))
    return results


@leaf
def _top_clear(c: torch.Tensor, high: int) -> torch.Tensor:
    """All ones where bit `high` of c is clear."""
    return (c << (63 - high)).bitwise_right_shift_(63).bitwise_not_()


@leaf
def _ramp(words, c, clear, r, first: bool) -> torch.Tensor:
    """One party's half of s (c - r), s = u where the top bit of c is set and else 1 - u; the first party adds c."""
    chosen = words[:, 0].view(c.shape) * c - words[:, 1].view(c.shape)
    total = c - r if first else -r
    return (chosen ^ clear).sub_(clear).add_(total.bitwise_and_(clear))


def _sign(key: Key, x: Masked, t: int) -> Shares:
    """[x - t >= 0] as additive shares of 0 and 1, in the planes of the key."""
    c = x.c - t
    clear, at = _top_clear(c, key.high), _at(key, c)
    return Shares(_sign_half(at.A, clear, first=True), _sign_half(at.S, clear, first=False))


@leaf
def _sign_half(words, clear, first: bool) -> torch.Tensor:
    """One party's half of u where the top bit of c is set, and else of 1 - u; the first party adds the 1."""
    s = (words[:, 0].view(clear.shape) ^ clear).sub_(clear)
    return s.sub_(clear) if first else s


@protocol("signs", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def signs(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), high: int = 63) -> Shares:
    """Compute [x - t >= 0] for each public threshold t, as additive shares of 0 and 1: [T, *shape]. Exact.

    Args:
        high: x - t is known to lie in [-2^high, 2^high).

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    check_planes(high)
    key = deal_key(net, x, high)
    found = [_sign(key, x, t) for t in thresholds]
    return Shares(compute(torch.stack, [f.A for f in found]), compute(torch.stack, [f.S for f in found]))
