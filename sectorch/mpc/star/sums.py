"""The dealt half of a linear layer is looked at by random sums of its rows, or of its columns.

A layer is a product of matrices, c = b a^T: b [R, K] at S has a row for each place of the output, a [N, K] at A one for
each channel, and of c, which is shared, D deals S's half. With k = 40 bits chi for each place, which A and S draw and D
never learns, and k further rows b' that D and S draw, of which D deals c' = b' a^T as well,

    (chi b + b') a^T = chi c + c'        [k, N]

holds if all is dealt as it should be. S shows A chi b + b', which b' makes uniform, and the hash of its half of the
right side, which is what A finds from these and its own half. If anything is false, each of the k rows fails with
probability 1/2 at least, for itself, also where only highest bits are wrong, since sums with coefficients 0 and 1 lose
nothing of them.

Where there are fewer places than twice the channels, the sums are of channels: psi a + a' [k, K] goes to S once a
session, and each call has k further channels. D does not learn psi either. Whether a call fails depends on what D has
dealt and on the coins alone, and tells D one guess of k coins that was wrong: t false calls pass with t 2^-40 at most.

Source: R. Freivalds, 1977, with an instance that masks it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute, running, shaped
from ...errors import FalseDealingError
from ...ring import unfolded
from ...ring.bitplanes import words_for
from ...ring.subsets import subset_sums
from .claims import check_unproved
from .halves import Halves

TESTS = 40
"""Sums that are looked at: a false dealing passes with probability 2^-40."""


@dataclass(frozen=True)
class Sums:
    """Of a weight of shape `kernel`: psi, packed, at A and S; a' at A and D; psi a + a' at S."""

    kernel: torch.Size
    psi: Located
    more: Located
    masked: Located


class Weight(Protocol):
    """What a check needs of a masked weight (`linear.Weight`)."""

    sums: dict[int, Sums]

    @property
    def a(self) -> Located: ...

    @property
    def shape(self) -> torch.Size: ...


def check_linear(net: Net, setup: Net, product: Callable, b: Located, weight: Weight, c: Halves) -> None:
    """A or S raises FalseDealingError unless c = product(b, a), but for a probability of 2^-40.

    Args:
        b: at S and D. weight: whose mask is a, at A and D. c: in shares, of which D knows both halves.

    Raises:
        UnsupportedOpError: of another product than `ring.products.Linear` and `Conv2d`.
    """
    if not unfolded.known(product):
        check_unproved(net)
    if not c.A.shape.numel():
        return
    groups, places, channels = unfolded.outputs(product, torch.empty(c.A.shape, device="meta")).shape
    if places < 2 * channels:  # fewer bytes than sums of places take, or hardly more, and no products twice over
        if groups not in weight.sums:
            with setup.lock, running(setup):
                if groups not in weight.sums:  # another thread may have made them meanwhile
                    weight.sums[groups] = sum_channels(setup, product, weight.a)
        check_channels(net, product, b, weight.sums[groups], c)
    else:
        check_places(net, product, b, weight.a, c)


@protocol("check_places", "Freivalds, 1977; docs/verified.md", [
    Message("more_S", "D", "S", "more_A of k_DA"),
    Message("sums", "S", "A", "more_b of k_DS"),
    Message("half", "S", "A", "the hash of what follows from what A has"),
])  # fmt: skip
def check_places(net: Net, product: Callable, b: Located, a: Located, c: Halves) -> None:
    """`check_linear` by sums over the places of the output.

    Rounds 2, ahead of the query; 320 bytes for each channel from D to S, and 320 for each element of the input that an
    output depends on, once a group, and 32 from S to A. Nobody learns anything: to A the sums of inputs are uniform, as
    each is under a row that is used once, and those of the outputs follow.
    """
    D, A, S = net.D, net.A, net.S
    rows = compute(unfolded.matrix, product, a)
    (groups, channels, depth), places = rows.shape, c.A.shape.numel() // (rows.shape[0] * rows.shape[1])
    chi = net.common(A, S, (TESTS, words_for(places)), "chi")
    more_b = net.common(D, S, (groups, TESTS, depth), "more_b")
    more_A = net.common(D, A, (groups, TESTS, channels), "more_A")
    more_S = (compute(_products, more_b, rows) - more_A).send(D, S, "more_S")
    sums = compute(_sums_of_inputs, product, a.shape, b, more_b, chi).send(S, A, "sums")
    half = compute(_half_by_places, product, c.S, more_S, chi).send(S, A, "half")
    net.check(A, _compared_places, product, sums, rows, half, c.A, more_A, chi)


@protocol("sum_channels", "Freivalds, 1977; docs/verified.md", [Message("sums", "A", "S", "more_a of k_DA")])
def sum_channels(setup: Net, product: Callable, a: Located) -> Sums:
    """Sums of the channels of a weight's mask, under further masks.

    Once a session: rounds 1, 320 bytes from A to S for each element of the input that an output depends on, in each
    group. S receives uniform words.
    """
    D, A, S = setup.D, setup.A, setup.S
    rows = compute(unfolded.matrix, product, a)
    groups, channels, depth = rows.shape
    psi = setup.common(A, S, (TESTS, words_for(channels)), "psi")
    more = setup.common(D, A, (groups, TESTS, depth), "more_a")
    return Sums(a.shape, psi, more, compute(_sums_of_channels, rows, more, psi).send(A, S, "sums"))


@protocol("check_channels", "Freivalds, 1977; docs/verified.md", [
    Message("more_S", "D", "S", "more_A of k_DA"),
    Message("half", "A", "S", "the hash of what follows from what S has"),
])  # fmt: skip
def check_channels(net: Net, product: Callable, b: Located, sums: Sums, c: Halves) -> None:
    """`check_linear` by sums over the channels of the output.

    Rounds 1, ahead of the query: 320 bytes for each place and group from D to S, and 32 from A to S. Nobody learns
    anything: to S the sums follow from what it has.
    """
    D, A, S = net.D, net.A, net.S
    kernel, (groups, places, _) = sums.kernel, unfolded.outputs(product, torch.empty(c.A.shape, device="meta")).shape
    more_A = net.common(D, A, (groups, places, TESTS), "more_A")
    more_S = (compute(_of_inputs, product, kernel, b, sums.more) - more_A).send(D, S, "more_S")
    half = compute(_half_by_channels, product, c.A, more_A, sums.psi).send(A, S, "half")
    net.check(S, _compared_channels, product, kernel, b, sums.masked, half, c.S, more_S, sums.psi)


@leaf
def _products(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return unfolded.times_each(x, rows.transpose(1, 2))


def _summed(bits: torch.Tensor, parts: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Sums of rows, of all groups by the same bits: [k, W] and [groups, R, n] -> [groups, k, n]."""
    groups, count, width = parts.shape
    sums = subset_sums(bits, parts.transpose(0, 1).reshape(count, groups * width), start)
    return sums.view(len(sums), groups, width).transpose(0, 1)


@leaf(shapes=lambda product, kernel, b, more_b, chi: torch.empty_like(more_b))
def _sums_of_inputs(product: Callable, kernel: torch.Size, b, more_b, chi) -> torch.Tensor:
    """At S: chi b + b', [groups, 40, K]."""
    total, at = more_b.clone(), 0
    for rows in unfolded.inputs(product, b, kernel):
        total += _summed(chi, rows, at)
        at += rows.shape[1]
    return total


def _by_places(product: Callable, c: torch.Tensor, more: torch.Tensor, chi: torch.Tensor) -> torch.Tensor:
    """A half of chi c + c'."""
    return _summed(chi, unfolded.outputs(product, c)) + more


def _hash(values: torch.Tensor) -> torch.Tensor:
    """SHA-256 of words: equal sums have equal ones, and nobody finds others that have."""
    found = hashlib.sha256(values.contiguous().cpu().numpy().tobytes()).digest()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).to(values.device)


def _hashed(*_: Any) -> torch.Tensor:
    return torch.empty(32, dtype=torch.uint8, device="meta")


@leaf(shapes=_hashed)
def _half_by_places(product: Callable, c_S, more_S, chi) -> torch.Tensor:
    return _hash(_by_places(product, c_S, more_S, chi))


def _fails(different: torch.Tensor) -> torch.Tensor:
    """Raise FalseDealingError unless there is no difference; a byte."""
    if bool(different.any()):
        raise FalseDealingError("the dealer has dealt something else for a linear layer than the product of its masks")
    return torch.zeros(1, dtype=torch.uint8)


def _checked(*_: Any) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="meta")


@shaped(_checked)
def _compared_places(product: Callable, sums, rows, half, c_A, more_A, chi) -> torch.Tensor:
    """At A: raises FalseDealingError unless the sums agree."""
    return _fails(_hash(_products(sums, rows) - _by_places(product, c_A, more_A, chi)) != half)


@leaf
def _sums_of_channels(rows: torch.Tensor, more: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """At A: psi a + a'."""
    return _summed(psi, rows) + more


@leaf
def _of_inputs(product: Callable, kernel: torch.Size, b: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows of inputs times rows [groups, 40, K]: [groups, R, 40]."""
    found = [_products(part, rows) for part in unfolded.inputs(product, b, kernel)]
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def _by_channels(product: Callable, c: torch.Tensor, more: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """A half of c psi^T + c'."""
    return _summed(psi, unfolded.outputs(product, c).transpose(1, 2)).transpose(1, 2) + more


@leaf(shapes=_hashed)
def _half_by_channels(product: Callable, c_A, more_A, psi) -> torch.Tensor:
    return _hash(_by_channels(product, c_A, more_A, psi))


@shaped(_checked)
def _compared_channels(product: Callable, kernel: torch.Size, b, masked, half, c_S, more_S, psi) -> torch.Tensor:
    """At S: raises FalseDealingError unless the sums agree."""
    return _fails(_hash(_of_inputs(product, kernel, b, masked) - _by_channels(product, c_S, more_S, psi)) != half)
