"""Function secret sharing for slow networks: sign, ReLU and borrow from one opening, without a further message.

With c = x + r public to A and S, the sign of x is a public function of c once r is given, so D deals keys of it:

    [x >= 0] = c_63 xor not u,      u = r_63 xor [c mod 2^63 < r mod 2^63],

u by a distributed comparison function (`dcf.py`). With the payload (1, r) its shares at c are those of u and u r,
from which ReLU needs no opening. The borrow of a truncation is a comparison of the low planes, with the payload 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute
from .claims import check_unproved
from .compare import check_planes
from .dcf import evaluate, generate
from .guard import flags_of_bits, raise_flags
from .mask import Masked
from .shares import Shares, each


@dataclass(frozen=True)
class Key:
    """Keys for one masked tensor: seeds at A and S, correction words at both; planes 0 .. high - 1 count."""

    seeds: Shares
    words: tuple[Located, Located]
    high: int


def _words_shapes(seed_A, seed_S, r, high: int, signed: bool, product: bool) -> tuple[torch.Tensor, torch.Tensor]:
    n = r.numel()
    return r.new_empty(high, n, 2), r.new_empty(high + 1, n, 2) if product else r.new_empty(high + 1, n)


@leaf(shapes=_words_shapes)
def _correction_words(seed_A, seed_S, r, high: int, signed: bool, product: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For the seeds and for the payload, as they are sent: of the payload's second word only where there is one."""
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
        signed: give u (above), and not [c < r] alone.
        product: give u r as well.

    Ahead of the query. D sends 24 high + 8 bytes per element to S, with `product` 32 high + 16, and S sends the same on
    to A. Each sees uniform bits (computationally: AES).
    """
    check_unproved(net)
    D, A, S = net.D, net.A, net.S
    count = x.shape.numel()
    seed_A, seed_S = net.common(D, A, (count, 2), "seed_A"), net.common(D, S, (count, 2), "seed_S")
    seeds, values = _correction_words(seed_A, seed_S, x.r, high, signed, product)
    seeds, values = seeds.send(D, S, "seeds"), values.send(D, S, "values")
    seeds, values = seeds.send(S, A, "seeds_on"), values.send(S, A, "values_on")
    return Key(Shares(seed_A, seed_S), (seeds, values), high)


def _at(key: Key, c: Located) -> Shares:
    """Each evaluator's half of the payload at c: [N, 2], of which the second word counts with `product` only."""
    return Shares(
        _payload(key.seeds.A, c, *key.words, key.high, False),
        _payload(key.seeds.S, c, *key.words, key.high, True),
    )


@leaf(shapes=lambda seed, *_: torch.empty_like(seed))
def _payload(seed, c, seeds, values, high: int, second: bool) -> torch.Tensor:
    if values.dim() == 2:  # no second word: nobody looks at what comes of it
        values = torch.stack((values, torch.zeros_like(values)), -1)
    return evaluate(seed, c.reshape(-1), seeds, values.unsqueeze(1), high, second)[0]


@protocol("borrow", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def borrow(net: Net, x: Masked, c: Located, shift: int) -> Shares:
    """[c mod 2^shift < r mod 2^shift] for x's mask r and a public c, as additive shares of 0 and 1.

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    u = _at(deal_key(net, x, shift, signed=False), c)[:, 0]
    return each(torch.Tensor.view, u, x.shape)


@protocol("gate", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def gate(
    net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,), limit_bits: int | None = None
) -> list[Shares]:
    """max(x - t, 0) for each public threshold t. Exact.

    Args:
        x: a masked opening.
        high: x - t is known to lie in [-2^high, 2^high).
        limit_bits: raise a flag where the first result is 2^limit_bits or more; the key is evaluated once more.

    No message online: with the opening one round. Dealt per element: one key, which serves all thresholds. Nobody
    learns anything.
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
    """A half of s (c - r) with s = u where the top bit of c is set, and else 1 - u; the first party adds c."""
    chosen = words[:, 0].view(c.shape) * c - words[:, 1].view(c.shape)
    all_of_it = c - r if first else -r
    return (chosen ^ clear).sub_(clear).add_(all_of_it.bitwise_and_(clear))


def _sign(key: Key, x: Masked, t: int) -> Shares:
    """[x - t >= 0] as additive shares of 0 and 1, in the planes of the key."""
    c = x.c - t
    clear, at = _top_clear(c, key.high), _at(key, c)
    return Shares(_sign_half(at.A, clear, first=True), _sign_half(at.S, clear, first=False))


@leaf
def _sign_half(words, clear, first: bool) -> torch.Tensor:
    """A half of u where the top bit of c is set, and else of 1 - u; the first party adds the 1."""
    s = (words[:, 0].view(clear.shape) ^ clear).sub_(clear)
    return s.sub_(clear) if first else s


@protocol("signs", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def signs(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,), high: int = 63) -> Shares:
    """[x - t >= 0] for each public threshold t, as additive shares of 0 and 1: [T, *shape]. Exact.

    x - t is known to lie in [-2^high, 2^high). No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    check_planes(high)
    key = deal_key(net, x, high)
    found = [_sign(key, x, t) for t in thresholds]
    return Shares(compute(torch.stack, [f.A for f in found]), compute(torch.stack, [f.S for f in found]))
