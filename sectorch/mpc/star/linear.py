"""Linear layers (Pi_Matmul): products of shared values with a secret weight of A, for any bilinear map.

The map may be a matrix product, a convolution, an element-wise product or an einsum. A masks its weight once a session
(`mask_weight`, or `mask_streamed_weight` for a weight that is too large to be kept in several forms). After that,
`linear` costs one message from S to A online. The dealer's term a b is deferred (`masking.py`), or dealt and checked
where the dealer has to prove what it deals (`check_linear`).

Source: PrivHFL, Figure 3, where Q deals. The figure prints S's half as (w + a)b . [c]_1; the sign that makes the sum
right is (w + a)b - [c]_1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute, run_in, with_shapes
from ...choreography.streams import key_stream
from ...errors import FalseDealingError
from ...ring import products
from ...ring.bitplanes import words_for
from ...ring.products import PreparedProduct, subset_sums
from .dealing_proofs import DealerShares, DealingProofs, refuse_unproved
from .masking import DeferredShares, PendingCorrection
from .shares import Shares

# Masked weights


class MaskedWeight:
    """A's secret weight, masked once a session.

    Attributes:
        omega: the weight, at A. a: its mask, at D and A. masked: omega + a, at S.
        sums: what `check_channels` needs of the weight, by the number of groups of channels; see `sum_channels`.
    """

    def __init__(self, omega: Located, a: Located, masked: Located):
        self.omega = omega
        self.a = a
        self.masked = masked
        self._forms: dict[tuple[str, str], tuple[Located, Located, Located]] = {}
        self.sums: dict[int, FreivaldsSums] = {}

    @property
    def shape(self) -> torch.Size:
        return self.masked.shape

    def viewed(self, setup: Net, view: Callable) -> MaskedWeight:
        """Return a view (a transpose, a slice) of the weight, of its mask and of their sum. No message."""
        with run_in(setup):
            return MaskedWeight(*(compute(view, w) for w in (self.omega, self.a, self.masked)))

    def products(self, setup: Net, product: Callable, shape: torch.Size) -> tuple[Callable, Callable, Callable]:
        """Return product(x, omega), product(b, a) and product(b, omega + a) as functions of x and b of this shape."""
        forms: tuple = (None, None, None)
        if isinstance(product, PreparedProduct) and (form := product.prepared(shape, self.shape)):
            product, forms = form, self.prepare(setup, form)
            if (alone := form.by_form(self.shape)) is not None:
                omega, a, masked = forms
                return (
                    lambda x: compute(alone, x, omega),
                    lambda b: compute(alone, b, a),
                    lambda b: compute(alone, b, masked),
                )
        omega, a, masked = zip((self.omega, self.a, self.masked), forms, strict=True)
        return (
            lambda x: compute(product, x, *omega),
            lambda b: compute(product, b, *a),
            lambda b: compute(product, b, *masked),
        )

    def prepare(self, setup: Net, product: PreparedProduct) -> tuple[Located, Located, Located]:
        """Return the three tensors in the form that `product` takes; computed on first use, once a session."""
        kind = type(product).__name__, product.form
        if kind not in self._forms:
            with setup.lock, run_in(setup):
                if kind not in self._forms:  # another thread may have computed them meanwhile
                    tensors = self.omega.at("A"), self.a.at(setup.D), self.masked.at("S")
                    omega, a, masked = (compute(product.prepare, w) for w in tensors)
                    self._forms[kind] = omega, a, masked
        return self._forms[kind]


@protocol("mask_weight", "PrivHFL, Figure 3", [Message("omega_masked", "A", "S", "a of k_DA")])
def mask_weight(setup: Net, omega: Located) -> MaskedWeight:
    """Mask A's weight for use in products: A sends S omega + a, for a mask a of k_DA.

    Args:
        setup: the net for what is done once a session.
        omega: int64 at A, any shape.

    Once a session: rounds 1, bytes 8 per weight (A to S). S receives uniform bits, D nothing.
    """
    a = setup.common(setup.D, setup.A, omega.shape, "a")
    return MaskedWeight(omega, a, (omega + a).send(setup.A, setup.S, "omega_masked"))


# Streamed weights
#
# A `MaskedWeight` is kept as ring elements at A, as a mask at A and D and as their sum at S, and each of the three also
# in the form that products take: 48 bytes an element where all parties run in one process. Of a `StreamedWeight` only
# the sum is kept.


class StreamedWeight:
    """A masked weight that is too large to be kept in several forms: 8 bytes an element at S, nothing at A and D.

    For every product A encodes its numbers anew, and A and D draw the mask anew from its key.

    Args:
        numbers: the weight at A, before it is encoded.
        encoded: a pure function of `numbers`; returns the ring elements.
        key: two words, at D and A; the mask a is their AES-CTR stream.
        masked: omega + a, at S.
        views: the views that were applied to all three, in this order.
    """

    def __init__(
        self, numbers: Located, encoded: Callable, key: Located, masked: Located, views: tuple[Callable, ...] = ()
    ):
        self._numbers, self._encoded, self._key = numbers, encoded, key
        self.masked = masked
        self._views = views
        self.sums: dict[int, FreivaldsSums] = {}

    @property
    def shape(self) -> torch.Size:
        return self.masked.shape

    @property
    def a(self) -> Located:
        """The mask, at D and A, drawn in the running program."""
        return compute(self._mask, self._key)

    @property
    def _mask(self) -> Callable:
        return DerivedTensor(StreamTensor(self._numbers.shape), self._views)

    def viewed(self, setup: Net, view: Callable) -> StreamedWeight:
        """As `MaskedWeight.viewed`."""
        with run_in(setup):
            masked = compute(view, self.masked)
        return StreamedWeight(self._numbers, self._encoded, self._key, masked, (*self._views, view))

    def products(self, setup: Net, product: Callable, _shape: torch.Size) -> tuple[Callable, Callable, Callable]:
        """As `MaskedWeight.products`."""
        by_omega = ProductBy(product, DerivedTensor(self._encoded, self._views))
        by_mask = ProductBy(product, self._mask)
        return (
            lambda x: compute(by_omega, x, self._numbers),
            lambda b: compute(by_mask, b, self._key.at(setup.D)),
            lambda b: compute(product, b, self.masked, None),
        )


@dataclass(frozen=True)
class StreamTensor:
    """Callable that returns a key's stream as a tensor of this shape."""

    shape: torch.Size

    def __call__(self, key: torch.Tensor) -> torch.Tensor:
        return key_stream(key, self.shape.numel()).view(self.shape)


@dataclass(frozen=True)
class DerivedTensor:
    """Callable that derives a tensor from another one and applies views to it."""

    derive: Callable
    views: tuple[Callable, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = self.derive(x)
        for view in self.views:
            result = view(result)
        return result


@dataclass(frozen=True)
class ProductBy:
    """Callable that multiplies by a tensor that is derived from the second operand."""

    product: Callable
    derive: Callable

    def __call__(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.derive(source), None)


@protocol("mask_streamed", "PrivHFL, Figure 3", [Message("omega_masked", "A", "S", "key of k_DA")])
def mask_streamed_weight(setup: Net, numbers: Located, encoded: Callable) -> StreamedWeight:
    """`mask_weight` for a weight that A and D do not keep: its mask is the stream of a key that A and D draw.

    Args:
        numbers: at A, any shape.
        encoded: a pure function of `numbers`; returns ring elements of that shape.

    Once a session: rounds 1, bytes 8 per weight (A to S). S receives uniform bits, D nothing.
    """
    key = setup.common(setup.D, setup.A, (2,), "key")
    masked = compute(_masked, numbers, encoded, key).send(setup.A, setup.S, "omega_masked")
    return StreamedWeight(numbers, encoded, key, masked)


@leaf
def _masked(numbers: torch.Tensor, encoded: Callable, key: torch.Tensor) -> torch.Tensor:
    return encoded(numbers) + StreamTensor(numbers.shape)(key)


# Products


@protocol("linear", "PrivHFL, Figure 3", [Message("m", "S", "A", "b of k_DS")])
def linear(net: Net, setup: Net, product: Callable, x: Shares, weight: MaskedWeight | StreamedWeight) -> Shares:
    """Compute y = product(x, omega) for a map that is linear in both arguments (Pi_Matmul).

    With b of k_DS, S sends A m = x_S - b. A's half is product(x_A + m, omega), S's product(b, omega + a), and D holds
    the term product(b, a) by which their sum is too large.

    Args:
        product: exact integer kernel `f(x, w, form)`. `form` is the weight in the form that the kernel's `prepare`
            returns where the kernel is a `PreparedProduct` (`sectorch.ring.products`), and None otherwise.
        x: shares, any shape that the product takes.
        weight: A's masked weight.

    Returns:
        Shares of y, exactly mod 2^64; with a deferred correction unless dealing is proved.

    Rounds 1, online 8 bytes per element of x (S to A). S's half of y does not depend on the query. D's term costs
    nothing where y is opened under a mask next, and else 8 bytes per element of y ahead. A receives x_S - b, which is
    uniform to it; S and D receive nothing online.
    """
    D, A, S = net.D, net.A, net.S
    by_omega, by_a, by_masked = weight.products(setup, product, x.shape)
    b = net.common(S, D, x.shape, "b")
    # (x_A + m) omega + b (omega + a) = (x_A + x_S) omega + b a, so that D's c = b a is what the sum has too much.
    c = by_a(b)
    dealt = deal_product(net, setup, product, b, weight, c) if net.state(DealingProofs).required else None
    m = (x.S - b).send(S, A, "m")
    halves = by_omega(x.A + m), by_masked(b)
    return DeferredShares(*halves, PendingCorrection(net, c)) if dealt is None else Shares(*halves) - dealt


@protocol("deal_product", "PrivHFL, Figure 3; docs/verified.md", [Message("c_S", "D", "S", "c_A of k_DA")])
def deal_product(
    net: Net, setup: Net, product: Callable, b: Located, weight: MaskedWeight | StreamedWeight, c: Located
) -> Shares:
    """Deal c = product(b, a) in shares of A and S, and check it.

    Args:
        product, weight: as for `linear`.
        b: at S and D.
        c: at D.

    Ahead of the query: 8 bytes per element of c from D to S, and those of `check_linear`. S receives c - c_A, which is
    uniform to it.

    Raises:
        FalseDealingError: at A or S, where D has dealt something else.
    """
    c_A = net.common(net.D, net.A, c.shape, "c_A")
    dealt = DealerShares(c_A, (c - c_A).send(net.D, net.S, "c_S"))
    check_linear(net, setup, product, b, weight, dealt)
    return dealt.shares


# Freivalds' check of the term that D deals for a linear layer: random sums of its rows, or of its columns
#
# A layer is a product of matrices, c = b a^T: b [R, K] at S has a row for each place of the output, a [N, K] at A one
# for each channel, and of c, which is shared, D deals S's half. With k = 40 bits chi for each place, which A and S draw
# and D never learns, and k further rows b' that D and S draw, of which D deals c' = b' a^T as well,
#
#     (chi b + b') a^T = chi c + c'        [k, N]
#
# holds if all is dealt as it should be. S shows A chi b + b', which b' makes uniform, and the hash of its half of the
# right side, which is what A finds from these and its own half. If anything is false, each of the k rows fails with
# probability 1/2 at least, for itself, also where only highest bits are wrong, since sums with coefficients 0 and 1
# lose nothing of them.
#
# Where there are fewer places than twice the channels, the sums are of channels: psi a + a' [k, K] goes to S once a
# session, and each call has k further channels. D does not learn psi either. Whether a call fails depends on what D has
# dealt and on the coins alone, and tells D one guess of k coins that was wrong: t false calls pass with t 2^-40 at
# most.
#
# Source: R. Freivalds, 1977, with an instance that masks it.


TESTS = 40
"""Random sums that are compared: a false dealing passes with probability 2^-40."""


@dataclass(frozen=True)
class FreivaldsSums:
    """What a session keeps of a weight of shape `kernel` for `check_channels`.

    Attributes:
        psi: the coefficients, as packed bits, at A and S. more: the masking channels a', at A and D.
        masked: psi a + a', at S.
    """

    kernel: torch.Size
    psi: Located
    more: Located
    masked: Located


def check_linear(
    net: Net, setup: Net, product: Callable, b: Located, weight: MaskedWeight | StreamedWeight, c: DealerShares
) -> None:
    """Check that D has dealt c = product(b, a); a false dealing passes with probability 2^-40.

    Args:
        b: at S and D.
        weight: its mask is a, at A and D.
        c: in shares, of which D knows both halves.

    Raises:
        FalseDealingError: at A or S, where c is another tensor.
        UnsupportedOpError: the product is neither `ring.products.Linear` nor `Conv2d`.
    """
    if not products.is_known_product(product):
        refuse_unproved(net)
    if not c.A.shape.numel():
        return
    groups, places, channels = products.outputs(product, torch.empty(c.A.shape, device="meta")).shape
    if places < 2 * channels:  # sums of channels take fewer bytes then, or hardly more, and fewer products
        if groups not in weight.sums:
            with setup.lock, run_in(setup):
                if groups not in weight.sums:  # another thread may have computed them meanwhile
                    weight.sums[groups] = sum_channels(setup, product, weight.a)
        check_channels(net, product, b, weight.sums[groups], c)
    else:
        check_places(net, product, b, weight.a, c)


@protocol("check_places", "Freivalds, 1977; docs/verified.md", [
    Message("more_S", "D", "S", "more_A of k_DA"),
    Message("sums", "S", "A", "more_b of k_DS"),
    Message("half", "S", "A", "the hash of what follows from what A has"),
])  # fmt: skip
def check_places(net: Net, product: Callable, b: Located, a: Located, c: DealerShares) -> None:
    """`check_linear` by random sums over the places of the output; A compares.

    Rounds 2, ahead of the query. D sends S 320 bytes for each channel; S sends A 320 for each element of the input that
    an output depends on, once a group, and 32. Nobody learns anything: each sum of inputs has a row of b' added that is
    used once, so that it is uniform to A, and the sums of outputs follow from it.
    """
    D, A, S = net.D, net.A, net.S
    rows = compute(products.matrix, product, a)
    (groups, channels, depth), places = rows.shape, c.A.shape.numel() // (rows.shape[0] * rows.shape[1])
    chi = net.common(A, S, (TESTS, words_for(places)), "chi")
    more_b = net.common(D, S, (groups, TESTS, depth), "more_b")
    more_A = net.common(D, A, (groups, TESTS, channels), "more_A")
    more_S = (compute(_products, more_b, rows) - more_A).send(D, S, "more_S")
    sums = compute(_sum_inputs, product, a.shape, b, more_b, chi).send(S, A, "sums")
    half = compute(_half_by_places, product, c.S, more_S, chi).send(S, A, "half")
    net.check(A, _compare_places, product, sums, rows, half, c.A, more_A, chi)


@protocol("sum_channels", "Freivalds, 1977; docs/verified.md", [Message("sums", "A", "S", "more_a of k_DA")])
def sum_channels(setup: Net, product: Callable, a: Located) -> FreivaldsSums:
    """Give S random sums of the channels of a weight's mask, psi a + a'.

    Once a session: rounds 1, 320 bytes from A to S for each element of the input that an output depends on, in each
    group. S receives uniform words.
    """
    D, A, S = setup.D, setup.A, setup.S
    rows = compute(products.matrix, product, a)
    groups, channels, depth = rows.shape
    psi = setup.common(A, S, (TESTS, words_for(channels)), "psi")
    more = setup.common(D, A, (groups, TESTS, depth), "more_a")
    return FreivaldsSums(a.shape, psi, more, compute(_sum_channels, rows, more, psi).send(A, S, "sums"))


@protocol("check_channels", "Freivalds, 1977; docs/verified.md", [
    Message("more_S", "D", "S", "more_A of k_DA"),
    Message("half", "A", "S", "the hash of what follows from what S has"),
])  # fmt: skip
def check_channels(net: Net, product: Callable, b: Located, sums: FreivaldsSums, c: DealerShares) -> None:
    """`check_linear` by random sums over the channels of the output; S compares.

    Rounds 1, ahead of the query: 320 bytes for each place and group from D to S, and 32 from A to S. Nobody learns
    anything: the sums that S compares follow from what it has.
    """
    D, A, S = net.D, net.A, net.S
    kernel, (groups, places, _) = sums.kernel, products.outputs(product, torch.empty(c.A.shape, device="meta")).shape
    more_A = net.common(D, A, (groups, places, TESTS), "more_A")
    more_S = (compute(_times_inputs, product, kernel, b, sums.more) - more_A).send(D, S, "more_S")
    half = compute(_half_by_channels, product, c.A, more_A, sums.psi).send(A, S, "half")
    net.check(S, _compare_channels, product, kernel, b, sums.masked, half, c.S, more_S, sums.psi)


@leaf
def _products(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return products.times_each(x, rows.transpose(1, 2))


def _sum_rows(bits: torch.Tensor, parts: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Sums of those rows that the bits choose, in all groups alike: [k, W] and [groups, R, n] -> [groups, k, n]."""
    groups, count, width = parts.shape
    sums = subset_sums(bits, parts.transpose(0, 1).reshape(count, groups * width), start)
    return sums.view(len(sums), groups, width).transpose(0, 1)


@leaf(shapes=lambda product, kernel, b, more_b, chi: torch.empty_like(more_b))
def _sum_inputs(product: Callable, kernel: torch.Size, b, more_b, chi) -> torch.Tensor:
    """At S: chi b + b', [groups, 40, K]."""
    total, at = more_b.clone(), 0
    for rows in products.inputs(product, b, kernel):
        total += _sum_rows(chi, rows, at)
        at += rows.shape[1]
    return total


def _by_places(product: Callable, c: torch.Tensor, more: torch.Tensor, chi: torch.Tensor) -> torch.Tensor:
    """A half of chi c + c'."""
    return _sum_rows(chi, products.outputs(product, c)) + more


def _hash(values: torch.Tensor) -> torch.Tensor:
    """SHA-256 of words, as uint8 [32]."""
    found = hashlib.sha256(values.contiguous().cpu().numpy().tobytes()).digest()
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).to(values.device)


def _hash_shape(*_: Any) -> torch.Tensor:
    return torch.empty(32, dtype=torch.uint8, device="meta")


@leaf(shapes=_hash_shape)
def _half_by_places(product: Callable, c_S, more_S, chi) -> torch.Tensor:
    return _hash(_by_places(product, c_S, more_S, chi))


def _refuse_difference(different: torch.Tensor) -> torch.Tensor:
    """Raise FalseDealingError if anything is different; else return the byte that `net.check` needs."""
    if bool(different.any()):
        raise FalseDealingError("the dealer has dealt something else for a linear layer than the product of its masks")
    return torch.zeros(1, dtype=torch.uint8)


def _check_shape(*_: Any) -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="meta")


@with_shapes(_check_shape)
def _compare_places(product: Callable, sums, rows, half, c_A, more_A, chi) -> torch.Tensor:
    """At A: raise FalseDealingError unless the sums agree."""
    return _refuse_difference(_hash(_products(sums, rows) - _by_places(product, c_A, more_A, chi)) != half)


@leaf
def _sum_channels(rows: torch.Tensor, more: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """At A: psi a + a'."""
    return _sum_rows(psi, rows) + more


@leaf
def _times_inputs(product: Callable, kernel: torch.Size, b: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The inputs of all places, times rows [groups, 40, K]: [groups, R, 40]."""
    found = [_products(part, rows) for part in products.inputs(product, b, kernel)]
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def _by_channels(product: Callable, c: torch.Tensor, more: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    """A half of c psi^T + c'."""
    return _sum_rows(psi, products.outputs(product, c).transpose(1, 2)).transpose(1, 2) + more


@leaf(shapes=_hash_shape)
def _half_by_channels(product: Callable, c_A, more_A, psi) -> torch.Tensor:
    return _hash(_by_channels(product, c_A, more_A, psi))


@with_shapes(_check_shape)
def _compare_channels(product: Callable, kernel: torch.Size, b, masked, half, c_S, more_S, psi) -> torch.Tensor:
    """At S: raise FalseDealingError unless the sums agree."""
    return _refuse_difference(
        _hash(_times_inputs(product, kernel, b, masked) - _by_channels(product, c_S, more_S, psi)) != half
    )
