"""Function secret sharing: sign, ReLU and borrow from one opening, without a further message.

For few elements, on any link. With c = x + r public to A and S, the sign of x is a function of c that D knows, so D
deals keys for it:

    [x >= 0] = c_63 xor not u,      u = r_63 xor [c mod 2^63 < r mod 2^63].

The keys are those of a distributed comparison function (DCF): A and S evaluate them at c to shares of u. With the
payload (1, r) they get shares of u and of u r, from which ReLU needs no opening. The borrow of a truncation is a
comparison of the low planes, with the payload 1.

Source: Boyle, Chandran, Gilboa, Gupta, Ishai, Kumar, Rathee, "Function Secret Sharing for Mixed-Mode and Fixed-Point
Secure Computation", EUROCRYPT 2021, Figure 1.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ...choreography import Located, Message, Net, leaf, protocol
from ...ring import as_signed
from ...ring.bitplanes import fast
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
# The generator is AES-128 with a fixed public key, G_j(s) = AES(s xor j) xor s xor j (Matyas, Meyer, Oseas): j = 0
# and 1 give the seeds of the left and the right child, j = 2 and 3 their payloads, so that a level takes one call of
# AES for all elements. What stands between the calls is one compiled loop (`ring/keyloops.py`), or torch's functions
# below on a device. A block is two int64 words, [..., 2]; a seed has its two low bits clear, where j stands, and where
# a generated block carries the control bit. With n seeds in use, guessing one of them takes about 2^126 / n
# evaluations.
# This rests on AES under one public key being like a random permutation (docs/protocols.md).


_CIPHER = Cipher(algorithms.AES(b"sectorch dcf s/1"), modes.ECB())
SPAN = 1 << 13
"""Elements at a time: the blocks of a level stay in the cache."""


def _permute(blocks: torch.Tensor) -> torch.Tensor:
    """AES(x) xor x for contiguous blocks [..., 2]."""
    if blocks.is_meta or not blocks.numel():
        return torch.empty_like(blocks)
    # `update_into` asks for room for almost a block more than it writes.
    padded = torch.empty(blocks.numel() + 2, dtype=torch.int64, device="cpu")
    source, target = blocks.cpu().numpy().data, padded.numpy().data
    _CIPHER.encryptor().update_into(source.cast("B"), target.cast("B"))
    return padded[:-2].view(blocks.shape).to(blocks.device).bitwise_xor_(blocks)


class _Generator:
    """AES of an array of blocks into another, again and again: [..., 2] each, from `inputs` to `outputs`."""

    def __init__(self, *shape: int):
        self.inputs, padded = np.empty((*shape, 2), np.int64), np.empty(2 * math.prod(shape) + 2, np.int64)
        self.outputs = padded[:-2].reshape(self.inputs.shape)
        self._source, self._target = self.inputs.data.cast("B"), padded.data.cast("B")
        self._encryptor = _CIPHER.encryptor()

    def run(self) -> None:
        """Write AES of all inputs; the loops add the inputs to it."""
        self._encryptor.update_into(self._source, self._target)


@functools.cache
def _loops() -> ModuleType:
    return importlib.import_module("sectorch.ring.keyloops")  # imports numba, which an import of the package must not


def _tweak(n: int, j: int, like: torch.Tensor) -> torch.Tensor:
    """j in the low word of n blocks: [n, 2]."""
    out = like.new_zeros(n, 2, dtype=torch.int64)
    out[:, 0].fill_(j)
    return out


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
        payload: [N, P], P = 1 or 2 words.

    Returns:
        The words for the seeds [L, N, 2] and for the payload [L + 1, N, P], L = high - low.
    """
    n, depth = r.shape[0], high - low
    path = r << (64 - high) if high < 64 else r
    seed_words, value_words = r.new_empty(depth, n, 2), r.new_empty(depth + 1, *payload.shape)
    if fast(r, payload, *seeds):
        _generate_in_loops(seeds, path, flip, payload, seed_words, value_words)
    else:
        _generate(torch.stack(seeds), _both(path), flip.unsqueeze(-1), payload, seed_words, value_words)
    return seed_words, value_words


def _generate_in_loops(seeds, path, flip, payload, seed_words, value_words) -> None:
    loops, (depth, n, _) = _loops(), seed_words.shape
    path, flip, payload = (v.contiguous().numpy() for v in (path, flip, payload))
    both = torch.stack(seeds).numpy()
    for start in range(0, n, SPAN):
        part = slice(start, min(n, start + SPAN))
        count = part.stop - start
        generator, sums = _Generator(2, 4, count), np.zeros((count, payload.shape[1]), np.int64)
        controls = np.zeros((2, count), np.int64)
        controls[1] = -1
        words = seed_words[:, part].numpy(), value_words[:, part].numpy()
        known = flip[part], payload[part], controls, sums, generator.inputs, generator.outputs
        loops.first_generation(both[:, part], generator.inputs)
        for level in range(depth):
            generator.run()
            loops.next_generation(level, path[part], *known, *words)
        generator.run()
        loops.last_generation(*known, words[1])


def _generate(s, path, flip, payload, seed_words, value_words) -> None:
    """`generate` by torch's functions; the bits of `path` are used from the top."""
    n, width = payload.shape
    tweaks = torch.stack([_tweak(n, j, s) for j in range(4)])
    s = _clear(s)
    t = torch.stack((torch.zeros_like(path), torch.full_like(path, -1)))
    given = torch.zeros_like(payload)  # the difference of the two evaluators' payloads along r's path so far
    for level in range(seed_words.shape[0]):
        right = (path << level).bitwise_right_shift_(63)
        made = _permute(s[:, None] ^ tweaks)
        (children, control), values = _split(made[:, :2].contiguous()), made[:, 2:, :, :width]

        # Beside r's path the seeds of the two evaluators must become equal, so that they cancel from there on: the
        # correction word is the difference of the children that leave the path.
        on_path, on_path_control = _pick(children, right), _pick(control, right)
        lost = children[0, 0] ^ children[0, 1] ^ children[1, 0] ^ children[1, 1] ^ on_path[0] ^ on_path[1]
        to_left = control[0, 0] ^ control[1, 0] ^ ~right
        to_right = control[0, 1] ^ control[1, 1] ^ right
        word = seed_words[level]
        word.copy_(lost)
        word[:, 0] |= (to_left[:, 0] & 1) | (to_right[:, 0] & 2)

        value_on_path = _pick(values, right[:, :width])
        value_lost = values[:, 0] ^ values[:, 1] ^ value_on_path
        # Where r's bit is 1, the points that leave the path lie left of r, where c < r: they get the payload, or with
        # `flip` the others do. The second evaluator subtracts its share, so the word has the sign of its control bit.
        change = (value_lost[1] - value_lost[0]).sub_(given).add_(payload & (right[:, :1] ^ flip))
        given += value_on_path[0] - value_on_path[1] + change
        value_words[level] = _signed(change, t[1, :, :width])

        # An evaluator applies the correction where its control bit is set, and on r's path exactly one of the two has
        # it set.
        s = (t & lost).bitwise_xor_(on_path)
        t = t.bitwise_and_(_step_control(word, right)).bitwise_xor_(on_path_control)
    leaves = _permute(s ^ tweaks[2])[..., :width]
    change = (leaves[1] - leaves[0]).sub_(given).add_(payload & flip)
    value_words[-1] = _signed(change, t[1, :, :width])


def evaluate(seed, c: torch.Tensor, seed_words: torch.Tensor, value_words: torch.Tensor, high: int, second: bool):
    """Compute one evaluator's additive share of the payload at the public points c.

    Args:
        seed: this evaluator's, [N, 2].
        c: [M]; its bits high - L .. high - 1 are compared. Point i belongs to key i mod N.
        seed_words, value_words: the correction words.
        second: whether this is the evaluator of the second seed.

    Returns:
        [M, P].
    """
    path = c << (64 - high) if high < 64 else c
    if fast(seed, c, seed_words, value_words):
        out = torch.zeros(c.shape[0], value_words.shape[2], dtype=torch.int64)
        _evaluate_in_loops(seed, path.contiguous(), seed_words, value_words, second, out)
        return out
    times = c.shape[0] // max(1, seed.shape[0])
    copied = seed.repeat(times, 1), seed_words.repeat(1, times, 1), value_words.repeat(1, times, 1)
    out = _evaluate(copied[0], _both(path), *copied[1:], second)
    return out.neg_() if second else out


def _evaluate_in_loops(seed, path, seed_words, value_words, second: bool, out) -> None:
    loops, depth = _loops(), seed_words.shape[0]
    seeds, paths, totals = seed.contiguous().numpy(), path.numpy(), out.numpy()
    words = seed_words.numpy(), value_words.numpy()
    for keys, points in _pieces(len(seeds), len(paths)):
        generator, own = _Generator(2, points.stop - points.start), tuple(w[:, keys] for w in words)
        controls = np.full(points.stop - points.start, -int(second), np.int64)
        place = paths[points], controls, generator.inputs, generator.outputs
        loops.first_evaluation(seeds[keys], paths[points], generator.inputs)
        for level in range(depth):
            generator.run()
            loops.next_evaluation(level, level == depth - 1, *place, *own, totals[points])
        generator.run()
        loops.last_evaluation(*place[1:], own[1], totals[points], -int(second))


def _pieces(keys: int, points: int) -> Iterator[tuple[slice, slice]]:
    """Cut points, of which each row has one for every key, into pieces: their keys and the points."""
    if keys <= SPAN:
        step = keys * max(1, SPAN // max(1, keys))
        for start in range(0, points, step or 1):
            yield slice(0, keys), slice(start, min(points, start + step))
        return
    for row in range(0, points, keys):
        for start in range(0, keys, SPAN):
            end = min(keys, start + SPAN)
            yield slice(start, end), slice(row + start, row + end)


def _evaluate(s, path, seed_words, value_words, second: bool) -> torch.Tensor:
    depth, n, width = value_words.shape
    one, payload = _tweak(n, 1, s), _tweak(n, 2, s)
    s = _clear(s.clone())
    t = torch.full_like(s, -1 if second else 0)
    total = torch.zeros_like(value_words[0])
    for level in range(depth - 1):
        right = (path << level).bitwise_right_shift_(63)
        side = s ^ (one & right)
        made = _permute(torch.stack((side, side ^ payload)))
        total += made[1, :, :width] + (value_words[level] & t[:, :width])
        child, control = _split(made[0])
        word = seed_words[level]
        s = _clear((t & word).bitwise_xor_(child))
        t = t.bitwise_and_(_step_control(word, right)).bitwise_xor_(control)
    return total.add_(_permute(s ^ payload)[:, :width]).add_(value_words[-1] & t[:, :width])


@dataclass(frozen=True)
class Key:
    """Keys for one masked tensor: seeds at A and S, correction words at both. Planes 0 .. high - 1 are compared."""

    seeds: Shares
    words: tuple[Located, Located]
    high: int


def key_bytes(planes: int, payloads: int = 1) -> int:
    """Bytes an element that a key of one payload, or two, takes, to S and on to A."""
    return 2 * (16 * planes + 8 * payloads * (planes + 1))


def _words_shapes(seed_A, seed_S, r, high: int, signed: bool, factor=None) -> tuple[torch.Tensor, torch.Tensor]:
    n = r.numel()
    return r.new_empty(high, n, 2), r.new_empty(high + 1, n) if factor is None else r.new_empty(high + 1, n, 2)


@leaf(shapes=_words_shapes)
def _correction_words(seed_A, seed_S, r, high: int, signed: bool, factor=None) -> tuple[torch.Tensor, torch.Tensor]:
    """At D: the correction words as they are sent; of the payload one word, or two with a factor."""
    r = r.reshape(-1)
    flip = (r << (63 - high)).bitwise_right_shift_(63) if signed else torch.zeros_like(r)
    ones = torch.ones_like(r)
    payload = ones.unsqueeze(-1) if factor is None else torch.stack((ones, factor.reshape(-1)), -1)
    seeds, values = generate((seed_A, seed_S), r, flip, payload, 0, high)
    return seeds, values[..., 0] if factor is None else values


@protocol("deal_key", "Boyle et al., EUROCRYPT 2021, Figure 1", [
    Message("seeds", "D", "S", "the generator at A's seed of k_DA"),
    Message("values", "D", "S", "the generator at A's seed of k_DA"),
    Message("seeds_on", "S", "A", "the generator at S's seed of k_DS"),
    Message("values_on", "S", "A", "the generator at S's seed of k_DS"),
])  # fmt: skip
def deal_key(net: Net, x: Masked, high: int, signed: bool = True, factor: Located | None = None) -> Key:
    """Deal keys that compare any public c, in the planes 0 .. high - 1, with x's mask r.

    Args:
        signed: the payload is u as above, with the sign of r, and not [c < r] alone.
        factor: at D; the second payload is this number times the first one.

    Ahead of the query. D sends 24 high + 8 bytes per element to S, with a factor 32 high + 16, and S sends the same on
    to A. Each sees uniform bits (computationally: AES).

    Raises:
        UnsupportedOpError: D has to prove what it deals; there is no proof for keys.
    """
    refuse_unproved(net)
    D, A, S = net.D, net.A, net.S
    count = x.shape.numel()
    seed_A, seed_S = net.common(D, A, (count, 2), "seed_A"), net.common(D, S, (count, 2), "seed_S")
    factors = () if factor is None else (factor,)
    seeds, values = _correction_words(seed_A, seed_S, x.r, high, signed, *factors)
    seeds, values = seeds.send(D, S, "seeds"), values.send(D, S, "values")
    seeds, values = seeds.send(S, A, "seeds_on"), values.send(S, A, "values_on")
    return Key(Shares(seed_A, seed_S), (seeds, values), high)


def _at(key: Key, c: Located) -> Shares:
    """Each evaluator's half of the payload at c: [N, 1], or [N, 2] of a key with a product."""
    return Shares(
        _payload(key.seeds.A, c, *key.words, key.high, False), _payload(key.seeds.S, c, *key.words, key.high, True)
    )


@leaf(shapes=lambda seed, c, _0, values, *_: seed.new_empty(seed.shape[0], 1 if values.dim() == 2 else 2))
def _payload(seed, c, seeds, values, high: int, second: bool) -> torch.Tensor:
    return evaluate(seed, c.reshape(-1), seeds, _in_words(values), high, second)


def _in_words(values: torch.Tensor) -> torch.Tensor:
    """The payload's correction words as `evaluate` takes them: [L + 1, N, P]."""
    return values.unsqueeze(-1) if values.dim() == 2 else values


@protocol("borrow", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def borrow(net: Net, x: Masked, c: Located, shift: int) -> Shares:
    """Compute [c mod 2^shift < r mod 2^shift] for x's mask r and a public c, as additive shares of 0 and 1. Exact.

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    return each(torch.Tensor.view, _at(deal_key(net, x, shift, signed=False), c)[:, 0], x.shape)


@protocol("borrow_and_product", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def borrow_and_product(net: Net, x: Masked, c: Located, shift: int, factor: Located) -> tuple[Shares, Shares]:
    """Compute `borrow`, and its product with a number of D's. Dealt as in `deal_key` with a factor.

    No message online. Nobody learns anything.
    """
    found = _at(deal_key(net, x, shift, signed=False, factor=factor), c)
    first, second = (each(torch.Tensor.view, found[:, i], x.shape) for i in range(2))
    return first, second


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
    key = deal_key(net, x, high, factor=x.r)
    if limit_bits is not None and limit_bits < high:
        raise_flags(net, flags_of_bits(net, _signs(key, x, (thresholds[0] + (1 << limit_bits),))[0]))
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


def _signs(key: Key, x: Masked, thresholds: tuple[int, ...]) -> Shares:
    """[x - t >= 0] for each t as additive shares of 0 and 1, in the planes of the key: [T, *shape]."""
    place = x.c, *key.words, tuple(map(as_signed, thresholds)), key.high
    return Shares(_signs_half(key.seeds.A, *place, first=True), _signs_half(key.seeds.S, *place, first=False))


@leaf(shapes=lambda seed, c, _0, _1, thresholds, *_, **__: c.new_empty(len(thresholds), *c.shape))
def _signs_half(seed, c, seeds, values, thresholds: tuple[int, ...], high: int, first: bool) -> torch.Tensor:
    """One party's half of u where the top bit of c - t is set, and else of 1 - u; the first party adds the 1."""
    moved = c.reshape(1, -1) - torch.tensor(thresholds, device=c.device).unsqueeze(-1)
    clear = _top_clear(moved, high)
    u = evaluate(seed, moved.view(-1), seeds, _in_words(values), high, second=not first)[:, 0].view(clear.shape)
    s = (u ^ clear).sub_(clear)
    return (s.sub_(clear) if first else s).view(len(thresholds), *c.shape)


@protocol("choose_by_keys", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def choose_by_keys(net: Net, x: Masked, thresholds: tuple[int, ...], high: int = 63) -> tuple[Shares, Shares]:
    """Compute s = [x - t >= 0] for each public threshold t, as 0 and 1, and s * x: [T, *shape] each. Exact.

    Args:
        high: x - t is known to lie in [-2^high, 2^high).

    No message online. One key per element is dealt (`deal_key` with a product). Nobody learns anything.
    """
    check_planes(high)
    key = deal_key(net, x, high, factor=x.r)
    place = x.c, *key.words, tuple(map(as_signed, thresholds)), high
    at_A, at_S = _choices(key.seeds.A, x.r_A, *place, True), _choices(key.seeds.S, x.r_S, *place, False)
    return Shares(at_A[0], at_S[0]), Shares(at_A[1], at_S[1])


def _choices_shapes(seed, r, c, _0, _1, thresholds: tuple[int, ...], *_2) -> tuple[torch.Tensor, torch.Tensor]:
    return c.new_empty(len(thresholds), *c.shape), c.new_empty(len(thresholds), *c.shape)


@leaf(shapes=_choices_shapes)
def _choices(
    seed, r, c, seeds, values, thresholds: tuple[int, ...], high: int, first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One party's halves of s and of s (c - r): s is u where the top bit of c - t is set, and else 1 - u."""
    moved = c.reshape(1, -1) - torch.tensor(thresholds, device=c.device).unsqueeze(-1)
    clear = _top_clear(moved, high)
    found = evaluate(seed, moved.view(-1), seeds, values, high, not first)
    u, product = (v.view(clear.shape) for v in found.unbind(-1))
    s = (u ^ clear).sub_(clear)
    s = s.sub_(clear) if first else s
    masked = (product ^ clear).sub_(clear).add_(r.reshape(1, -1) & clear)
    shape = len(thresholds), *c.shape
    return s.view(shape), (s * c.reshape(1, -1)).sub_(masked).view(shape)


@protocol("signs", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def signs(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), high: int = 63) -> Shares:
    """Compute [x - t >= 0] for each public threshold t, as additive shares of 0 and 1: [T, *shape]. Exact.

    Args:
        high: x - t is known to lie in [-2^high, 2^high).

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    check_planes(high)
    return _signs(deal_key(net, x, high), x, thresholds)
