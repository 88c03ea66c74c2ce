"""Function secret sharing for slow networks: sign, ReLU and truncation from one opening, without a further message.

With c = x + r public to A and S, the sign of x is a public function of c once r is given, so Q deals keys of it:

    [x >= 0] = c_63 xor not u,      u = r_63 xor [c mod 2^63 < r mod 2^63],

u by a distributed comparison function (`mpc/dcf.py`). The payload is (1, R, w) with R = r >> f and w = msb(r): its
shares at c are those of u, u R and u w, from which the select of `mpc/select.py` needs no opening.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choreography import Located, Message, Net, protocol
from .compare import check_planes
from .dcf import evaluate, generate
from .mask import Masked
from .shares import Shares
from .truncate import Quotient, deal_quotient, public_quotient, wrap_term


@dataclass(frozen=True)
class Key:
    """Keys for one masked tensor: seeds at A and S, correction words at both; planes high - L .. high - 1 count."""

    seeds: Shares
    words: tuple[Located, ...]
    high: int


def _payload(value: torch.Tensor, wrap: torch.Tensor | None) -> torch.Tensor:
    """(1, R), and (w, 0) where there is a wrap-around bit: [B, N, 2]."""
    blocks = [torch.stack((torch.ones_like(value), value), -1)]
    if wrap is not None:
        blocks.append(torch.stack((wrap.to(torch.int64), torch.zeros_like(value)), -1))
    return torch.stack(blocks)


def _deal(seed_A, seed_S, r, value, low: int, high: int, wrap=None) -> tuple[torch.Tensor, ...]:
    """The correction words as they are sent: of the wrap-around bit only 32 bits count."""
    flip = (r << (63 - high)).bitwise_right_shift_(63)
    seeds, values = generate((seed_A, seed_S), r, flip, _payload(value, wrap), low, high)
    return (seeds, values[:, 0]) if wrap is None else (seeds, values[:, 0], values[:, 1, :, 0].to(torch.int32))


def _values(words: torch.Tensor, wraps: torch.Tensor | None = None) -> torch.Tensor:
    """The correction words of the payload as `evaluate` takes them: [L + 1, B, N, 2]."""
    if wraps is None:
        return words.unsqueeze(1)
    wide = wraps.to(torch.int64)
    return torch.stack((words, torch.stack((wide, torch.zeros_like(wide)), -1)), 1)


@protocol("deal_key", "Boyle et al., EUROCRYPT 2021, Figure 1", [
    Message("seeds", "Q", "S", "the generator at A's seed of k_QA"),
    Message("values", "Q", "S", "the generator at A's seed of k_QA"),
    Message("wraps", "Q", "S", "the generator at A's seed of k_QA"),
    Message("seeds_on", "S", "A", "the generator at S's seed of k_SQ"),
    Message("values_on", "S", "A", "the generator at S's seed of k_SQ"),
    Message("wraps_on", "S", "A", "the generator at S's seed of k_SQ"),
])  # fmt: skip
def deal_key(net: Net, x: Masked, quotient: Quotient, low: int = 0, high: int = 63) -> Key:
    """Keys that compare any public c, in the planes low .. high - 1, with x's mask.

    Ahead of the query. With L = high - low: Q sends 32 L + 16 bytes per element, and with a shift 4 L + 4 more, to S,
    and S sends the same on to A. Each sees uniform bits (computationally: AES).
    """
    check_planes(low, high)
    Q, A, S = net.Q, net.A, net.S
    count = x.shape.numel()
    seed_A, seed_S = net.common(Q, A, (count, 2), "seed_A"), net.common(Q, S, (count, 2), "seed_S")
    secret = [quotient.value] + ([quotient.wrap] if quotient.wrap is not None else [])

    def deal(seed_A, seed_S, r, value, wrap=None):
        flat = [v if v is None else v.reshape(-1) for v in (r, value, wrap)]
        return _deal(seed_A, seed_S, flat[0], flat[1], low, high, flat[2])

    dealt = net.locally(Q, deal, seed_A, seed_S, x.r, *secret)
    labels = ("seeds", "values", "wraps")
    at_S = [net.send(words, Q, S, label) for words, label in zip(dealt, labels, strict=False)]
    both = [net.send(words, S, A, f"{label}_on") for words, label in zip(at_S, labels, strict=False)]
    return Key(Shares(seed_A, seed_S), tuple(both), high)


def _at(net: Net, key: Key, c: Located) -> Shares:
    """Each evaluator's half of the payload at c: [B, N, 2]."""

    high = key.high

    def half(seed, c, seeds, values, wraps=None, second=False):
        return evaluate(seed, c.reshape(-1), seeds, _values(values, wraps), high, second)

    return Shares(
        net.locally(net.A, half, key.seeds.A, c, *key.words),
        net.locally(net.S, lambda *v: half(*v, second=True), key.seeds.S, c, *key.words),
    )


@protocol("gate", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def gate(
    net: Net, x: Masked, shift: int = 0, low: int = 0, high: int = 63, thresholds: tuple[int, ...] = (0,)
) -> list[Shares]:
    """max(x - t, 0) >> shift for each public threshold t.

    Args:
        x: a masked opening; with a shift |x - t| < 2^62.
        shift: 0, or 1..32; rounds as in `truncate`.
        low: planes below are dropped: exact for x - t outside (-2^low, 0), where x - t may come instead of 0.
        high: x - t is known to lie in [-2^high, 2^high - 2^low).

    No message online: with the opening one round. Dealt per element: the key, and 12 bytes with a shift; one key serves
    all thresholds. Nobody learns anything.
    """
    quotient = deal_quotient(net, x, shift)
    key = deal_key(net, x, quotient, low, high)
    results = []
    for t in thresholds:
        moved = Masked(net.locally((net.A, net.S), torch.sub, x.c, t), x.r, x.r_A, x.r_S) if t else x
        at = _at(net, key, moved.c)
        C, no_wrap = public_quotient(net, moved, shift)
        low_half = net.locally((net.A, net.S), lambda c: ~(c << (63 - high)).bitwise_right_shift_(63), moved.c)
        results.append(_combine(net, at, C, no_wrap, low_half, quotient, shift))
    return results


def _combine(net: Net, at: Shares, C: Located, no_wrap: Located, low_half: Located, quotient: Quotient, shift: int):
    """s * (C - R + wrap) from the halves of u, u R and u w: s = u where the top bit of c is set, else 1 - u."""

    def half(public: bool, words, C, no_wrap, low_half, rho, wrap=None):
        chosen = words[0, :, 0].view(C.shape) * C - words[0, :, 1].view(C.shape)
        whole = C - rho if public else -rho
        if shift:
            chosen += (words[1, :, 0].view(C.shape) << (64 - shift)).bitwise_and_(no_wrap)
            whole += wrap_term(wrap, shift).bitwise_and_(no_wrap)
        # minus the chosen part and plus the whole where the top bit is clear
        return (chosen ^ low_half).sub_(low_half).add_(whole.bitwise_and_(low_half))

    rho, wraps = quotient.shares, quotient.wraps
    return Shares(
        net.locally(net.A, lambda *v: half(True, *v), at.A, C, no_wrap, low_half, rho.A, *([wraps.A] if wraps else [])),
        net.locally(
            net.S, lambda *v: half(False, *v), at.S, C, no_wrap, low_half, rho.S, *([wraps.S] if wraps else [])
        ),
    )


@protocol("signs", "docs/protocols.md; Boyle et al., EUROCRYPT 2021")
def signs(net: Net, x: Masked, thresholds: tuple[int, ...] = (0,)) -> Shares:
    """[x - t >= 0] for each public threshold t, as additive shares of 0 and 1: [T, *shape].

    No message online. Dealt as in `gate` without a shift. Nobody learns anything.
    """
    key = deal_key(net, x, deal_quotient(net, x, 0))
    found = []
    for t in thresholds:
        c = net.locally((net.A, net.S), torch.sub, x.c, t)

        def half(public: bool, words, c):
            u, low_half = words[0, :, 0].view(c.shape), ~(c >> 63)
            u = (u ^ low_half).sub_(low_half)
            return u.sub_(low_half) if public else u

        at = _at(net, key, c)
        found.append(
            Shares(
                net.locally(net.A, lambda *v: half(True, *v), at.A, c),
                net.locally(net.S, lambda *v: half(False, *v), at.S, c),
            )
        )
    return Shares(
        net.locally(net.A, lambda *v: torch.stack(v), *(f.A for f in found)),
        net.locally(net.S, lambda *v: torch.stack(v), *(f.S for f in found)),
    )
