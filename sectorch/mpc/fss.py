"""Function secret sharing for slow networks: sign, ReLU and borrow from one opening, without a further message.

With c = x + r public to A and S, the sign of x is a public function of c once r is given, so Q deals keys of it:

    [x >= 0] = c_63 xor not u,      u = r_63 xor [c mod 2^63 < r mod 2^63],

u by a distributed comparison function (`mpc/dcf.py`). With the payload (1, r) its shares at c are those of u and u r,
from which ReLU needs no opening. The borrow of a truncation is a comparison of the low planes, with the payload 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choreography import Located, Message, Net, protocol
from .compare import check_planes
from .dcf import evaluate, generate
from .guard import flags_of_bits, raise_flags
from .mask import Masked
from .shares import Shares, each, whole


@dataclass(frozen=True)
class Key:
    """Keys for one masked tensor: seeds at A and S, correction words at both; planes 0 .. high - 1 count."""

    seeds: Shares
    words: tuple[Located, Located]
    high: int


def _deal(seed_A, seed_S, r, high: int, signed: bool, product: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The correction words as they are sent: of the payload's second word only where there is one."""
    r = r.reshape(-1)
    flip = (r << (63 - high)).bitwise_right_shift_(63) if signed else torch.zeros_like(r)
    payload = torch.stack((torch.ones_like(r), r if product else torch.zeros_like(r)), -1).unsqueeze(0)
    seeds, values = generate((seed_A, seed_S), r, flip, payload, 0, high)
    return seeds, values[:, 0] if product else values[:, 0, :, 0].contiguous()


@protocol("deal_key", "Boyle et al., EUROCRYPT 2021, Figure 1", [
    Message("seeds", "Q", "S", "the generator at A's seed of k_QA"),
    Message("values", "Q", "S", "the generator at A's seed of k_QA"),
    Message("seeds_on", "S", "A", "the generator at S's seed of k_SQ"),
    Message("values_on", "S", "A", "the generator at S's seed of k_SQ"),
])  # fmt: skip
def deal_key(net: Net, x: Masked, high: int, signed: bool = True, product: bool = False) -> Key:
    """Deal keys that compare any public c, in the planes 0 .. high - 1, with x's mask r.

    Args:
        signed: give u (above), and not [c < r] alone.
        product: give u r as well.

    Ahead of the query. Q sends 24 high + 8 bytes per element to S, with `product` 32 high + 16, and S sends the same on
    to A. Each sees uniform bits (computationally: AES).
    """
    Q, A, S = net.Q, net.A, net.S
    count = x.shape.numel()
    seed_A, seed_S = net.common(Q, A, (count, 2), "seed_A"), net.common(Q, S, (count, 2), "seed_S")
    dealt = net.locally(Q, lambda a, s, r: _deal(a, s, r, high, signed, product), seed_A, seed_S, x.r)
    at_S = [net.send(words, Q, S, label) for words, label in zip(dealt, ("seeds", "values"), strict=True)]
    seeds, values = (net.send(words, S, A, label) for words, label in zip(at_S, ("seeds_on", "values_on"), strict=True))
    return Key(Shares(seed_A, seed_S), (seeds, values), high)


def _at(net: Net, key: Key, c: Located) -> Shares:
    """Each evaluator's half of the payload at c: [N, 2], of which the second word counts with `product` only."""
    high = key.high

    def half(seed, c, seeds, values, second=False):
        if values.dim() == 2:  # no second word: nobody looks at what comes of it
            values = torch.stack((values, torch.zeros_like(values)), -1)
        return evaluate(seed, c.reshape(-1), seeds, values.unsqueeze(1), high, second)[0]

    return Shares(
        net.locally(net.A, half, key.seeds.A, c, *key.words),
        net.locally(net.S, lambda *v: half(*v, second=True), key.seeds.S, c, *key.words),
    )


@protocol("borrow", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def borrow(net: Net, x: Masked, c: Located, shift: int) -> Shares:
    """[c mod 2^shift < r mod 2^shift] for x's mask r and a public c, as additive shares of 0 and 1.

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    shape, at = x.shape, _at(net, deal_key(net, x, shift, signed=False), c)
    return each(lambda words: words[:, 0].view(shape), at)


def _ramps(
    net: Net, x: Masked, high: int = 63, thresholds: tuple[int, ...] = (0,), limit_bits: int | None = None
) -> list[Shares]:
    """The ideal functionality of `gate`."""
    found = [whole(net, lambda v, t=t: (v - t).clamp(min=0), x.c) for t in thresholds]
    if limit_bits is not None:
        raise_flags(net, whole(net, lambda y: (y >= 1 << limit_bits).to(torch.int64), found[0].A))
    return found


@protocol("gate", "docs/protocols.md; Boyle et al., EUROCRYPT 2021", ideal=_ramps)
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
        raise_flags(net, flags_of_bits(net, _sign(net, key, x, thresholds[0] + (1 << limit_bits))))
    results = []
    for t in thresholds:
        c = net.locally((net.A, net.S), torch.sub, x.c, t) if t else x.c
        clear = net.locally((net.A, net.S), lambda c: ~(c << (63 - high)).bitwise_right_shift_(63), c)

        def half(public: bool, words, c, clear, r):
            # s (c - r) with s = u where the top bit of c is set, and else 1 - u.
            chosen = words[:, 0].view(c.shape) * c - words[:, 1].view(c.shape)
            all_of_it = c - r if public else -r
            return (chosen ^ clear).sub_(clear).add_(all_of_it.bitwise_and_(clear))

        at = _at(net, key, c)
        results.append(
            Shares(
                net.locally(net.A, lambda *v: half(True, *v), at.A, c, clear, x.r_A),
                net.locally(net.S, lambda *v: half(False, *v), at.S, c, clear, x.r_S),
            )
        )
    return results


def _sign(net: Net, key: Key, x: Masked, t: int) -> Shares:
    """[x - t >= 0] as additive shares of 0 and 1, in the planes of the key."""
    shift = 63 - key.high
    c = net.locally((net.A, net.S), lambda c: (c - t) << shift, x.c)

    def half(public: bool, words, c):
        u, clear = words[:, 0].view(c.shape), ~(c >> 63)
        u = (u ^ clear).sub_(clear)
        return u.sub_(clear) if public else u

    at = _at(net, key, net.locally((net.A, net.S), torch.sub, x.c, t))
    return Shares(
        net.locally(net.A, lambda *v: half(True, *v), at.A, c),
        net.locally(net.S, lambda *v: half(False, *v), at.S, c),
    )


@protocol("signs", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def signs(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,)) -> Shares:
    """[x - t >= 0] for each public threshold t, as additive shares of 0 and 1: [T, *shape]. Exact.

    No message online. Dealt as in `deal_key`. Nobody learns anything.
    """
    key = deal_key(net, x, 63)
    found = [_sign(net, key, x, t) for t in thresholds]
    return Shares(
        net.locally(net.A, lambda *v: torch.stack(v), *(f.A for f in found)),
        net.locally(net.S, lambda *v: torch.stack(v), *(f.S for f in found)),
    )
