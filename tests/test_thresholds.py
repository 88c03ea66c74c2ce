"""Which elements raise a flag, one by one: each limit, shift and number of planes, at the limit's own edges."""

from __future__ import annotations

import torch
from helpers import session
from hypothesis import example, given
from hypothesis import strategies as st

from sectorch.backend import RaisedFlags
from sectorch.mpc.star.compare import RoundBudget
from sectorch.mpc.star.guard import finish_flags
from sectorch.mpc.star.masking import open_masked
from sectorch.mpc.star.relu import ramps
from sectorch.mpc.star.shares import Shares
from sectorch.mpc.star.thresholds import raise_outside
from sectorch.mpc.star.truncate import truncate
from sectorch.ring import rounded_shift
from sectorch.ring.bitplanes import from_rows, spread, words_for


def flagged(x: torch.Tensor, protocol, seed: int) -> torch.Tensor:
    """Where `protocol(net, shares)` raises a flag for these ring elements; with odd seeds trees have more levels."""
    mask = torch.randint(-(1 << 63), (1 << 63) - 1, x.shape, generator=torch.Generator().manual_seed(seed))
    with session().call(session().answering[0]) as net:
        net.state(RoundBudget).round_bytes = 0 if seed % 2 else None
        protocol(net, Shares(net.own(net.A, x - mask), net.own(net.S, mask)))
        bits = [(net.read(f.A, net.A), net.read(f.S, net.S)) for f in finish_flags(net, tuple(net.state(RaisedFlags)))]
    words = [w for a, s in bits for w in (a ^ s).split(words_for(x.numel()))]
    assert words, "no flag was raised"
    for w in words:
        padding = from_rows(spread(w), torch.Size([64 * w.shape[0]]))[x.numel() :]
        assert not padding.any(), "a flag stands where there is no element"
    return torch.stack([from_rows(spread(w), x.shape) != 0 for w in words]).any(0)


def at_the_edges(bits: int, shift: int, draws: list[int], most: int) -> torch.Tensor:
    """Elements around the limit 2^bits of a result by `shift`, both signs, and others."""
    k = 1 << bits + shift
    near = [m * k + d for m in (1, -1) for d in (0, -1, 1, (1 << shift) >> 1, -((1 << shift) >> 1), k >> 2, -(k >> 1))]
    return torch.tensor([max(-most, min(most - 1, v)) for v in [*near, 0, most - 1, -most, *draws]])


SEEDS = st.integers(0, 99)
DRAWS = st.lists(st.integers(-(1 << 61), (1 << 61) - 1), min_size=1, max_size=140)


@given(st.integers(0, 32), st.integers(1, 60), st.integers(0, 12), DRAWS, SEEDS, st.sampled_from([1, 3]))
@example(20, 32, 0, [0], 0, 1)
@example(32, 29, 0, [0] * 113, 0, 3)
def test_relu_and_truncation_flag_what_reaches_the_limit(shift, bits, less, draws, seed, copies):
    bits = min(bits, 60 - shift)
    high = 63 - less if shift + bits + 2 < 63 - less else 63
    most = min(1 << 61, 1 << high - 1)
    x = at_the_edges(bits, shift, [d >> 62 - high if high < 62 else d for d in draws], most)
    y = rounded_shift(x, shift) if shift else x
    thresholds = tuple(range(copies))
    found = flagged(x, lambda net, s: ramps(net, s, thresholds, shift, high, limit_bits=bits), seed)
    assert torch.equal(found, y >= 1 << bits)
    if shift:
        found = flagged(x, lambda net, s: truncate(net, s, shift, limit_bits=bits), seed)
        assert torch.equal(found, (y < -(1 << bits)) | (y >= 1 << bits))


@given(st.integers(1, 62), DRAWS, SEEDS)
def test_what_lies_outside_is_flagged(k, draws, seed):
    x = at_the_edges(k, 0, draws, 1 << 62)
    found = flagged(x, lambda net, s: (lambda m: raise_outside(net, m, k))(open_masked(net, s)), seed)
    assert torch.equal(found, (x < -(1 << k)) | (x >= 1 << k))


TOP = 1 << 63


@given(st.integers(0, 62), st.lists(st.integers(-TOP, TOP - 1), max_size=140), SEEDS)
@example(0, [], 0)
@example(62, [], 1)
def test_what_lies_outside_is_flagged_up_to_the_ends_of_the_ring(k, draws, seed):
    """At all borders: the range's own, those that wrap into it, the ring's, and every power of two."""
    borders = [1 << k, -(1 << k), TOP, TOP - (1 << k), (1 << k) - TOP, *(s << e for s in (1, -1) for e in range(63))]
    near = {(b + d + TOP) % (2 * TOP) - TOP for b in borders for d in range(-3, 4)}
    x = torch.tensor([*sorted(near), *draws])
    found = flagged(x, lambda net, s: (lambda m: raise_outside(net, m, k, everywhere=True))(open_masked(net, s)), seed)
    assert torch.equal(found, (x < -(1 << k)) | (x >= 1 << k))
