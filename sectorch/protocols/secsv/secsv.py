"""SecSV's secure testing: encrypted models, shared test data, two servers (SecSV, section 5.1, Algorithms 3 and 4).

C is a client, P the principal and X the auxiliary server. First comes what everybody knows of a run, then what each
party computes alone, then the protocols, and last the tester, which `algorithm.test_shared` puts together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ... import ckks
from ...choreography import Located, Message, Net, Party, leaf, protocol, with_shapes
from ...choreography.located import run_in
from ...choreography.net import Runtime
from ...ckks.linalg import (
    ENCODING_BITS,
    SEED_WORDS,
    Reducing,
    decrypt_columns,
    encrypt_matrix,
    residues,
    second,
    to_centred,
    uniform,
)
from ...ckks.linalgloops import add_centred, reduce_residues
from ...ckks.scheme.ciphertext import Cipher, settle
from ...ckks.tensor.ckks_tensor import zeros
from ...errors import FixedPointRangeError, NonFiniteError
from ...ring.jit import run_in_threads
from .algorithm import Batch, test_shared
from .program import Layer, Program, gates
from .settings import Route, plan
from .testers import TWO_SERVERS, SecureTester, TestSet, during, tally, work
from .values import CorruptedCiphertextError, FederationError, bits, members

# Additive shares modulo the ciphertext modulus Q = q_0 q_1 .. : int64 [primes, ...], residues of each prime.
#
# x = x' + x'' mod Q, x' uniform (SecSV, section 2). Sharing modulo the modulus of the encryption, and not modulo a
# field of its own, makes enc(w) x' + enc(w) x'' = enc(w) x hold exactly: a mask costs no precision, and nothing of the
# wrapped sum is left for the client who decrypts (the paper's "modulo" step is not needed).


@dataclass(frozen=True)
class Field:
    """The residue ring of the shares: the primes of the ciphertexts, and the fraction bits of a feature."""

    primes: tuple[int, ...]
    frac_bits: int

    @property
    def first(self) -> Field:
        """The first prime alone: enough for labels, and a third of the work."""
        return Field(self.primes[:1], self.frac_bits)

    @property
    def bits(self) -> float:
        return math.log2(math.prod(self.primes))

    def column(self, dims: int) -> torch.Tensor:
        """The primes, shaped to broadcast over [primes, ...] with so many dimensions."""
        return torch.tensor(self.primes).view(-1, *[1] * (dims - 1))

    def reduce(self, integers: torch.Tensor) -> torch.Tensor:
        """Integers [...] -> residues [primes, ...]."""
        return integers.unsqueeze(0).remainder(self.column(integers.dim() + 1))

    def encode(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        """round(x * 2^(times * frac_bits)) as residues. Error: half a unit.

        Raises:
            NonFiniteError, FixedPointRangeError: NaN or infinity; |x| of 2^14 and more.
        """
        if not bool(torch.isfinite(x).all()):
            raise NonFiniteError("a feature is NaN or infinite")
        if x.numel() and float(x.abs().max()) >= 2.0**14:
            raise FixedPointRangeError(f"features must stay below 2^14, got {float(x.abs().max()):.3g}; scale them")
        return self.reduce((x.double() * 2.0 ** (times * self.frac_bits)).round().to(torch.int64))

    def share(self, residues: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two halves, the first uniform."""
        mask = uniform(tuple(residues.shape[1:]), self.primes)
        return mask, (residues - mask).remainder_(self.column(residues.dim()))

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).remainder_(self.column(x.dim()))

    def subtract(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).remainder_(self.column(x.dim()))

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Element by element; primes below 2^31 keep products in int64."""
        return (x * y).remainder_(self.column(x.dim()))

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Residues [primes, k, m] -> their sums over k."""
        return x.sum(dim=1).remainder_(self.column(x.dim() - 1))

    def small(self, residues: torch.Tensor) -> torch.Tensor:
        """The integers in [-q_0/2, q_0/2) that have these residues, from the first prime; int64."""
        q = self.primes[0]
        return torch.where(residues[0] > q // 2, residues[0] - q, residues[0])

    def mask(self, shape: tuple[int, ...]) -> torch.Tensor:
        """rho for `truncate`: residues of integers uniform in [0, Q/4), as mixed-radix digits (see `shifted`)."""
        digits = uniform(shape, self.primes)
        digits[-1] //= 4
        return self._residues(digits)

    def _residues(self, digits: torch.Tensor) -> torch.Tensor:
        """d_0 + q_0 d_1 + q_0 q_1 d_2 + .. as residues."""
        total, weight = torch.zeros_like(digits), 1
        for digit, prime in zip(digits, self.primes, strict=True):
            factors = torch.tensor([weight % q for q in self.primes]).view(-1, *[1] * digit.dim())
            total = self.add(total, self.multiply(self.reduce(digit), factors.expand_as(total)))
            weight *= prime
        return total

    def shifted(self, residues: torch.Tensor) -> torch.Tensor:
        """floor(v / 2^frac_bits) of the integer v in [0, Q) with these residues, as residues.

        v = d + q_0 D with D < Q / q_0 < 2^46. With q_0 = a 2^f + b, floor(v / 2^f) = a D + floor((b D + d) / 2^f): the
        second term fits int64, and a D does too where Q < 2^76.
        """
        q, f = self.primes[0], self.frac_bits
        digits = self._digits(residues)
        rest, weight = torch.zeros_like(digits[0]), 1
        for digit, prime in zip(digits[1:], self.primes[1:], strict=True):
            rest = rest + digit * weight
            weight *= prime
        a, b = q >> f, q & ((1 << f) - 1)
        return self.reduce(a * rest + ((b * rest + digits[0]) >> f))

    def _digits(self, residues: torch.Tensor) -> list[torch.Tensor]:
        """Garner's mixed-radix digits."""
        digits: list[torch.Tensor] = []
        for j, q in enumerate(self.primes):
            rest, weight = residues[j].clone(), 1
            for digit, below in zip(digits, self.primes, strict=False):
                rest = (rest - digit.remainder(q) * (weight % q)).remainder_(q)
                weight *= below
            digits.append((rest * pow(weight, -1, q)).remainder_(q))
        return digits


WEIGHT_BITS = 4
"""Weights are encrypted times 2^4, which uses the room that the last prime leaves: they stay below 2^3."""


@dataclass(frozen=True)
class Format:
    """The number format of a run. `value_bits`: log2 of the largest output of any layer."""

    field: Field
    value_bits: int

    def scale(self, delta: float) -> float:
        """The scale of a layer's outputs times the sum of the weights."""
        return delta * 2.0 ** (WEIGHT_BITS + self.field.frac_bits + ENCODING_BITS)

    @classmethod
    def fitting(cls, primes: tuple[int, ...], scale_bits: int, value_bits: int, frac_bits: int | None) -> Format:
        """A format for outputs of a size: 12 fraction bits, or what is left of the modulus, at least 6.

        Raises:
            LevelError: the modulus chain is too short.
        """
        room = math.floor(math.log2(math.prod(primes)) - scale_bits - WEIGHT_BITS - ENCODING_BITS - value_bits - 11)
        form = cls(Field(primes, frac_bits or max(6, min(12, room))), value_bits)
        form.check(scale_bits)
        return form

    def check(self, scale_bits: int) -> None:
        """Raises:
        LevelError: the modulus chain is too short for the format.
        """
        needed = scale_bits + WEIGHT_BITS + self.field.frac_bits + ENCODING_BITS + self.value_bits + 11
        if needed > self.field.bits:
            raise ckks.LevelError(
                f"outputs up to 2^{self.value_bits} with {self.field.frac_bits} fraction bits need {needed} bits, "
                f"and the chain has {self.field.bits:.0f}; lower frac_bits or value_bits, or keygen more"
            )


@dataclass(frozen=True)
class Public:
    """What every step of SecSV may be told."""

    program: Program
    form: Format
    keys: ckks.PublicKeys

    @property
    def field(self) -> Field:
        return self.form.field

    @property
    def primes(self) -> tuple[int, ...]:
        return self.keys.parameters.primes

    @property
    def lowered(self) -> tuple[int, ...]:
        """The primes of what is only to be decrypted: the last is divided away."""
        return self.primes[:-1]

    @property
    def output_scale(self) -> float:
        """Of a layer's outputs times the sum of the weights, as they are decrypted."""
        return self.form.scale(2.0**self.keys.parameters.scale_bits) / self.primes[-1]

    def layout(self, layer: Layer) -> Reducing:
        """How a layer's product is laid out in ciphertexts."""
        return Reducing(layer.rows, layer.inner, self.keys.parameters.degree)

    def ciphertexts(self, count: int) -> torch.Tensor:
        """The shape of so many: int64 [count, 2, primes, N]."""
        return self._blank(count, self.primes)

    def outputs(self, count: int) -> torch.Tensor:
        """The shape of so many that are only to be decrypted."""
        return self._blank(count, self.lowered)

    def _blank(self, count: int, primes: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(count, 2, len(primes), self.keys.parameters.degree, dtype=torch.int64, device="meta")


def bits_for(largest: float) -> int:
    """value_bits for outputs of a magnitude, a factor of two to spare for other clients' samples and models."""
    return max(3, math.ceil(math.log2(max(largest, 1e-9))) + 1)


# What a client of SecSV computes alone: it encrypts, shares, and decrypts the layers that routes give to it.
#
# The clients share one CKKS key pair (SecSV, section 3: honest but curious, not colluding); no server has the secret
# half. Each function here is a step of the choreography (`secsv.py`), on values that the client holds.


Half = torch.Tensor
"""One server's share: residues int64 [primes, ...]."""


@with_shapes(lambda *_: None)
def fits(public: Public, whose: str, x: torch.Tensor, *matrices: torch.Tensor) -> None:
    """Look whether a local model and its outputs on the client's own samples fit the number format.

    Args:
        matrices: of each weight in the program's order, with the bias as the last column.

    Raises:
        FixedPointRangeError: a weight of 2^3 and more, or outputs beyond half of what the format holds.
    """
    largest = max(float(m.abs().max()) for m in matrices)
    if not largest < 2.0 ** (7 - WEIGHT_BITS):
        raise FixedPointRangeError(
            f"{whose}'s model has a weight of {largest:.3g}; weights stay below 2^{7 - WEIGHT_BITS}: "
            f"use weight decay, or scale the inputs up"
        )
    reached = public.program.run(public.program.parts(matrices), x)[1]
    if reached >= 2.0**public.form.value_bits / 2:
        raise FixedPointRangeError(
            f"{whose}'s model reaches {reached:.3g} on its own samples, too close to the limit of "
            f"2^{public.form.value_bits}; scale the inputs down, or raise value_bits and lower frac_bits"
        )


def _encrypted_shapes(public: Public, layer: Layer, *_) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.empty(
        layer.inner + 1, len(public.primes), public.keys.parameters.degree, dtype=torch.int32, device="meta"
    )
    return half, half.new_empty(SEED_WORDS)


@work("encryption", _encrypted_shapes)
def encrypted(public: Public, layer: Layer, matrix: torch.Tensor, keys: ckks.Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [d_out, d_in + 1], its bias the last column, under the joint secret key: the first halves of d_in + 1
    ciphertexts, int32 [d_in + 1, primes, N], and the seed of the second ones.
    """
    return encrypt_matrix(public.layout(layer), matrix * 2.0**WEIGHT_BITS, keys)


def _shared_shapes(public: Public, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    shape = len(public.primes), public.program.features, len(x)
    features = torch.empty(shape, dtype=torch.int64, device="meta")
    unary = features.new_empty(1, public.program.classes, len(x))
    return features, unary, features, unary


@work("sharing", _shared_shapes)
def shared(public: Public, x: torch.Tensor, labels: torch.Tensor) -> tuple[Half, Half, Half, Half]:
    """For P and for X a share of the features [primes, d, m] and of the labels in unary, mod q_0 [1, classes, m]."""
    field, unary = public.field, F.one_hot(labels, public.program.classes).t()
    features = field.share(field.encode(x.reshape(len(x), -1).t()))
    truth = field.first.share(field.first.reduce(unary))
    return features[0], truth[0], features[1], truth[1]


def _decrypted_shapes(
    public: Public, layer: Layer, output: torch.Tensor, weight: int, parts: Sequence[int], *_
) -> torch.Tensor:
    return torch.empty(sum(parts), *layer.shape, dtype=torch.float64, device="meta")


@work("decryption", _decrypted_shapes)
def decrypted(
    public: Public, layer: Layer, output: torch.Tensor, weight: int, parts: Sequence[int], whose: str, keys: ckks.Keys
) -> torch.Tensor:
    """A layer's outputs [samples, *shape], float64.

    Args:
        parts: how many samples share ciphertexts, one number after the other.

    Raises:
        CorruptedCiphertextError: outputs that no honest computation gives.
    """
    primes, layout = torch.tensor(public.lowered).view(-1, 1), public.layout(layer)
    tiles = [layout.tiles(layer.columns * samples) for samples in parts]
    expected = tuple(public.outputs(sum(tiles)).shape)
    if tuple(output.shape) != expected or bool((output < 0).any()) or bool((output >= primes).any()):
        raise CorruptedCiphertextError(
            f"{whose} got {tuple(output.shape)} words, no ciphertexts of shape {expected} under "
            f"the clients' key; the batch was not counted: run again from the folder"
        )
    slots = decrypt_columns(layout, output, keys, public.output_scale) / weight
    if not float(slots.abs().max()) <= 2.0**public.form.value_bits:
        raise CorruptedCiphertextError(
            f"{whose} decrypted a value beyond 2^{public.form.value_bits}: a message was corrupted, or "
            f"the model leaves the number format; the batch was not counted: run again from the folder"
        )
    found = [
        layer.outputs(columns[: layer.rows, : layer.columns * samples], samples)
        for columns, samples in zip(slots.split([layout.columns * n for n in tiles], dim=1), parts, strict=True)
    ]
    return torch.cat(found)


def _activated_shapes(public: Public, layer: Layer, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = layer.after(values[:1])
    half = torch.empty(len(public.primes), out[0].numel(), len(values), dtype=torch.int64, device="meta")
    return half, half


@work("sharing", _activated_shapes)
@torch.no_grad()
def activated(public: Public, layer: Layer, values: torch.Tensor) -> tuple[Half, Half]:
    """Shares of the next layer's features [primes, d, samples]."""
    features = layer.after(values).reshape(len(values), -1).t()
    return public.field.share(public.field.encode(features))


def _material_shapes(primes: int, rows: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.empty(3, primes, rows, len(values), dtype=torch.int64, device="meta")
    return half, half


@work("sharing", lambda public, values: _material_shapes(len(public.primes), public.program.state, values))
def gate_material(public: Public, values: torch.Tensor) -> tuple[Half, Half]:
    """For the next state z h + u of a GRU: material to multiply the servers' h by z, and add u."""
    z, u = gates(values)
    field = public.field
    return _material(field, field.encode(z), field.encode(u, times=2))


@work("sharing", lambda public, values: _material_shapes(1, public.program.classes, values))
def match_material(public: Public, values: torch.Tensor) -> tuple[Half, Half]:
    """Material to multiply the servers' labels by the predictions, both in unary and mod q_0."""
    predicted = F.one_hot(values.argmax(1), public.program.classes).t()
    field = public.field.first
    return _material(field, field.reduce(predicted), None)


def _material(field: Field, factor: Half, addend: Half | None) -> tuple[Half, Half]:
    """For p h + a with p and a known here and h shared: shares of p, of a mask b, and of p b + a, [3, primes, ...].

    The servers open h - b to each other; then p (h - b) + (p b + a) is linear in shares. This client sees nothing.
    """
    b = uniform(tuple(factor.shape[1:]), field.primes)
    product = field.multiply(factor, b)
    if addend is not None:
        product = field.add(product, addend)
    halves = [field.share(v) for v in (factor, b, product)]
    at_P, at_X = (torch.stack([half[k] for half in halves]) for k in (0, 1))
    return at_P, at_X


# What a server of SecSV computes alone, on ciphertexts and its shares of the test data (Algorithms 3 and 4).
#
# Both servers compute the same. The auxiliary one adds a fresh encryption of zero to what it sends to the principal:
# without, its partial output is a known linear map of its share, with the models' ciphertexts as coefficients, and the
# principal, who has the same ciphertexts, could solve for the share.


OFFSET_BITS = 30
"""What is truncated is below 2^30 in magnitude: gates are below one, at twice the fraction bits."""
Prepared = list[list[torch.Tensor]]
"""A layer's encrypted matrix and bias as products want them, centred int32, a tensor for each prime; times aggregation
weights."""


def _opaque(*_) -> None:
    """A value that stays at its owner has no shape to others."""


def _like(public, x: torch.Tensor, *_) -> torch.Tensor:
    return torch.empty_like(x)


@work("arithmetic", _opaque)
def prepared(public: Public, layer: Layer, first: torch.Tensor, seed: torch.Tensor, weight: int) -> Prepared:
    """A client's encrypted layer, as it was sent, times its aggregation weight."""
    layout, primes = public.layout(layer), public.primes
    other = second(seed, len(first), public.keys.parameters)
    biases = torch.stack([first[-1], other[:, -1]])
    ones = layout.constant(1 << public.field.frac_bits, primes)
    addend = [
        to_centred((bias_j.long() * weight).remainder_(q).mul_(ones_j).remainder_(q), q).to(torch.int32)
        for bias_j, ones_j, q in zip(biases.unbind(1), ones, primes, strict=True)
    ]
    return [layout.prepare(first[:-1], other[:, :-1], primes, weight), addend]


_SPAN = 1 << 12
"""Residues of a row that are added up in one loop; N is a multiple."""


def _pieces(residues: torch.Tensor) -> list[np.ndarray]:
    """Rows of a matrix's residues, so many at a time that a sum of several stays in the cache."""
    rows = residues.view(-1, _SPAN).numpy()
    return [rows[start : start + 16] for start in range(0, len(rows), 16)]


GROUP = 3
"""Clients whose models' sums are kept: 2^3 - 1 of them for three models, in int32 no more memory than 5 of 8 bytes."""


class Aggregation:
    """A server's sums of a layer's encrypted models (Algorithm 3). One is good until the next is made.

    The sums within a group of neighbouring clients are made once in a round, so that a coalition takes an addition for
    each group and not for each member. The last one keeps its memory, for pages that were touched before are faster.
    """

    shapes = staticmethod(_opaque)

    def __init__(self):
        self._room: Prepared = []
        self._kept: dict[tuple[int, ...], Prepared] = {}

    def begun(self) -> None:
        """Other models come."""
        self._kept = {}

    def __call__(self, public: Public, members: Sequence[int], *models: Prepared) -> Prepared:
        """The coalition's layer, times the sum of its weights; centred."""
        with during("arithmetic"):
            groups: dict[int, dict[int, Prepared]] = {}
            for i, model in zip(members, models, strict=True):
                groups.setdefault(i // GROUP, {})[i] = model
            first, *others = [self._within(public, tuple(group), [*group.values()]) for group in groups.values()]
            if not others:
                return first
            self._room = self._room or _room(first)
            return _added(public, self._room, first, *others)

    def _within(self, public: Public, members: tuple[int, ...], models: list[Prepared]) -> Prepared:
        if len(members) == 1:
            return models[0]
        if members not in self._kept:
            before = self._within(public, members[:-1], models[:-1])
            self._kept[members] = _added(public, _room(before), before, models[-1])
        return self._kept[members]


def _room(like: Prepared) -> Prepared:
    return [[torch.empty_like(part) for part in half] for half in like]


def _added(public: Public, out: Prepared, *models: Prepared) -> Prepared:
    for half, rooms in enumerate(out):
        for j, q in enumerate(public.primes):
            parts = [_pieces(model[half][j]) for model in models]
            for room, first, *others in zip(_pieces(rooms[j]), *parts, strict=True):
                for other in others:
                    add_centred(first, other, q, room, 0, len(room))
                    first = room
    return out


def _chosen_shapes(tested: torch.Tensor, places: Sequence, count: int, *halves: torch.Tensor) -> torch.Tensor:
    return halves[0].new_empty(*halves[0].shape[:2], count)


@leaf(shapes=_chosen_shapes)
def chosen(tested: torch.Tensor, places: Sequence[tuple[int, int]], count: int, *halves: Half) -> Half:
    """Those samples of some clients that are to be tested, [primes, d, count].

    Args:
        tested: the set as a bitmap over all samples, uint8.
        places: first sample and number of samples of each client.
    """
    flags = torch.from_numpy(np.unpackbits(tested.numpy(), bitorder="little")).bool()
    taken = [half[:, :, flags[first : first + size]] for (first, size), half in zip(places, halves, strict=True)]
    return torch.cat(taken, dim=2)


@work("arithmetic", _opaque)
def encoded(public: Public, layer: Layer, features: Half) -> list[torch.Tensor]:
    """A share of the features as plaintexts of a layer's product, a tensor for each prime."""
    return public.layout(layer).encode(layer.features(features), public.primes)


def _output_shapes(public: Public, layer: Layer, samples: int, *_) -> torch.Tensor:
    return public.outputs(public.layout(layer).tiles(layer.columns * samples))


def _product(public: Public, layer: Layer, matrix: list, right: list) -> torch.Tensor:
    out = public.layout(layer).multiply(matrix, right, public.primes, [q / 2 + 1 for q in public.primes])
    tally(layer.inner * len(out))
    return out


def _lowered(public: Public, out: torch.Tensor) -> torch.Tensor:
    """Rescaled by the last prime: what is only to be decrypted takes two. int64 [ciphertexts, 2, 2, N]."""
    return settle(Cipher(out, public.keys, pending=1)).data


@work("arithmetic", _output_shapes)
def linear(public: Public, layer: Layer, samples: int, model: Prepared, right: list) -> torch.Tensor:
    """The principal's part of a layer's outputs, encrypted: int64 [ciphertexts, 2, 2, N] (Algorithm 4, step 4)."""
    out = _product(public, layer, model[0], right)
    addend = torch.stack([residues(bias, q) for bias, q in zip(model[1], public.primes, strict=True)], dim=1)
    return _lowered(public, _reduced(out.add_(addend), public.primes))


@leaf(shapes=_output_shapes)
def linear_hidden(public: Public, layer: Layer, samples: int, model: Prepared, right: list):
    """The auxiliary server's part, without the bias, hidden by a fresh encryption of zero (Algorithm 4, step 5)."""
    with during("arithmetic"):
        out = _lowered(public, _product(public, layer, model[0], right))
    return _hidden(public, out)


def _hidden(public: Public, out: torch.Tensor) -> torch.Tensor:
    with during("encryption"):
        return _reduced(out.add_(zeros(Cipher(out, public.keys))), public.lowered)


@work("arithmetic", _like)
def combined(public: Public, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The encrypted output from both parts (Algorithm 4, step 6)."""
    return _reduced(own + other, public.lowered)


@leaf(shapes=lambda public, members, *parts: public.outputs(sum(len(part) for part in parts[::members])))
def joined(public: Public, members: int, *parts: torch.Tensor) -> torch.Tensor:
    """A coalition's first outputs from its members', for one owner of samples after the other; hidden by a fresh
    encryption of zero, for what the members' sums were made of is the same in every coalition.

    Args:
        parts: of each owner those of each member.
    """
    with during("arithmetic"):
        sums = []
        for start in range(0, len(parts), members):
            total = parts[start].clone()
            for part in parts[start + 1 : start + members]:
                total.add_(part)
            sums.append(total)
        out = torch.cat(sums)
    return _hidden(public, out)


def _reduced(sums: torch.Tensor, primes: Sequence[int]) -> torch.Tensor:
    """Sums of residues int64 [n, 2, primes, N], reduced in place."""
    run_in_threads(len(sums), reduce_residues, sums.numpy(), np.array(primes, np.float64))
    return sums


@work("sharing", _like)
def masked(field: Field, h: Half, material: Half) -> Half:
    """This server's half of h - b, for the other server; h is the state, or the labels."""
    return field.subtract(h, material[1])


@work("sharing", _like)
def times(field: Field, own: Half, other: Half, material: Half) -> Half:
    """This server's half of p h + a, from both halves of h - b."""
    return field.add(field.multiply(material[0], field.add(own, other)), material[2])


@work("sharing", lambda field, half: (half, half))
def mask_sum(field: Field, half: Half) -> tuple[Half, Half]:
    """The auxiliary server's side of a truncation: its half under a mask rho, and its half of the quotient.

    rho is an integer of 40 and more bits above the value's size, so that value + rho tells the principal nothing.
    """
    rho = field.mask(tuple(half.shape[1:]))
    quotient = field.subtract(torch.zeros_like(rho), field.shifted(rho))
    return field.add(half, rho), quotient


@work("sharing", _like)
def quotient(field: Field, half: Half, hidden: Half) -> Half:
    """The principal's half of floor(v / 2^frac_bits), within one unit of it: it sees v + rho + 2^30 only."""
    offset = field.reduce(torch.full(tuple(half.shape[1:]), 1 << OFFSET_BITS))
    above = field.shifted(field.add(field.add(half, hidden), offset))
    lowered = field.reduce(torch.full(tuple(half.shape[1:]), 1 << (OFFSET_BITS - field.frac_bits)))
    return field.subtract(above, lowered)


@work("sharing", lambda field, half: half[:, 0])
def matches(field: Field, half: Half) -> Half:
    """This server's half of [prediction = label] for each sample: the product of both in unary, summed."""
    return field.reduce_sum(half)


@work("sharing", lambda field, own, other: own[0])
def opened(field: Field, own: Half, other: Half) -> torch.Tensor:
    """The opened matches, 0 or 1: int64 [samples]."""
    return field.small(field.add(own, other))


# What SecSV's servers compute on shares with each other: products with what a client knows, truncations, matches.


class Both(NamedTuple):
    """What P and X have: a located value of each, its share or its copy, or what each computes with."""

    P: Any
    X: Any


def to_both(net: Net, at_P: Located, at_X: Located, label: str) -> Both:
    C, P, X = net.C, net.P, net.X
    return Both(sent(at_P, C, P, f"{label}_P").at(P), sent(at_X, C, X, f"{label}_X").at(X))


def sent(residues: Located, src: Party, dst: Party, label: str) -> Located:
    """Residues go as int32, for the primes are below 2^31."""
    return residues.to(torch.int32).send(src, dst, label).to(torch.int64)


@protocol("secsv_product", "docs/secsv.md", [
    Message("material_P", "C", "P", "a share mod Q"), Message("material_X", "C", "X", "a share mod Q"),
    Message("masked_P", "P", "X", "a mask of C, mod Q"), Message("masked_X", "X", "P", "a mask of C, mod Q"),
], roles=TWO_SERVERS)  # fmt: skip
def multiply(net: Net, field: Field, material: tuple[Located, Located], h: Both) -> Both:
    """p h + a for shared h, with p and a known to C, who made `material` of them. Nobody learns anything.

    Rounds 2; per element and prime 12 bytes to each server and 4 between them, each way.
    """
    P, X = net.P, net.X
    m = to_both(net, *material, "material")
    at_P = sent(masked(field, h.P, m.P), P, X, "masked_P")
    at_X = sent(masked(field, h.X, m.X), X, P, "masked_X")
    return Both(times(field, at_P, at_X, m.P), times(field, at_X, at_P, m.X))


@protocol("secsv_truncate", "docs/secsv.md", [
    Message("masked_sum", "X", "P", "a mask of X, statistically"),
], roles=TWO_SERVERS)  # fmt: skip
def truncate(net: Net, field: Field, v: Both) -> Both:
    """floor(v / 2^frac_bits), within one unit. Rounds 1; 4 bytes per element and prime."""
    hidden, at_X = net.fresh(net.X, mask_sum, field, v.X)
    return Both(quotient(field, v.P, sent(hidden, net.X, net.P, "masked_sum")), at_X)


@protocol("secsv_open", "SecSV, Algorithm 4, steps 12 to 14", [
    Message("correct_P", "P", "X", "", "which samples are classified correctly"),
    Message("correct_X", "X", "P", "", "which samples are classified correctly"),
], roles=TWO_SERVERS)  # fmt: skip
def open_matches(net: Net, field: Field, products: Both) -> Located:
    """Whether prediction and label agree, int64 [samples] at P and X; equality only, not the difference of labels.

    Rounds 1; 4 bytes a sample, each way.
    """
    at_P = sent(matches(field, products.P), net.P, net.X, "correct_P")
    at_X = sent(matches(field, products.X), net.X, net.P, "correct_X")
    return opened(field, at_P, at_X)


SUMMED = 0.5
"""An estimate, of a whole ciphertext's cost: to add up, hide and decrypt one whose products are made. It decides only
whether leaving samples out of a test pays.
"""


def joint_keys() -> ckks.Keys:
    """The clients' keys: the smallest ring of 128-bit security, 2048 slots, 74 bits of modulus; no rotations."""
    return ckks.keygen(2, degree=4096)


def joint_parameters() -> ckks.Parameters:
    """Of the clients' keys."""
    return ckks.choose(2, degree=4096)


def named_format(value_bits: int | None, frac_bits: int | None) -> Format | None:
    """A number format for outputs below 2^value_bits under the joint keys; None where the clients are to agree on it.

    Raises:
        LevelError: the modulus chain is too short.
    """
    return None if value_bits is None else _format(value_bits, frac_bits)


def _format(value_bits: int, frac_bits: int | None) -> Format:
    parameters = joint_parameters()
    return Format.fitting(parameters.primes, parameters.scale_bits, value_bits, frac_bits)


@protocol("secsv_samples", "SecSV, Algorithm 3, step 3", [
    Message("features_P", "C", "P", "a share mod Q"), Message("features_X", "C", "X", "a share mod Q"),
    Message("labels_P", "C", "P", "a share mod Q"), Message("labels_X", "C", "X", "a share mod Q"),
], roles=TWO_SERVERS)  # fmt: skip
def share_samples(net: Net, public: Public, x: Located, labels: Located) -> tuple[Both, Both]:
    """C's features and its labels in unary, shared. Rounds 1; 12 bytes a feature and 4 a class, to each server."""
    features_P, labels_P, features_X, labels_X = net.fresh(net.C, shared, public, x, labels)
    return to_both(net, features_P, features_X, "features"), to_both(net, labels_P, labels_X, "labels")


@protocol("secsv_model", "SecSV, Algorithm 3, step 3", [
    Message("model_P", "C", "P", "encryption"), Message("model_X", "C", "X", "encryption"),
    Message("seed_P", "C", "P", "encryption, the seed of its uniform half"),
    Message("seed_X", "C", "X", "encryption, the seed of its uniform half"),
], roles=TWO_SERVERS)  # fmt: skip
def encrypt_model(net: Net, public: Public, x: Located, matrices: list[Located], weight: int, keys: Located) -> dict:
    """C's model at both servers, encrypted and times its aggregation weight, by layer.

    Rounds 1; d_in + 1 halves of ciphertexts a layer to each server, and the seed of the others, which are uniform.
    x, C's own samples, show C whether the format holds.
    """
    net.check(net.C, fits, public, str(net.C), x, *matrices)
    model = {}
    for (name, layer), matrix in zip(public.program.weights.items(), matrices, strict=True):
        half, seed = net.fresh(net.C, encrypted, public, layer, matrix, keys)
        got = (
            (half.send(net.C, net.P, "model_P").at(net.P), seed.send(net.C, net.P, "seed_P").at(net.P)),
            (half.send(net.C, net.X, "model_X").at(net.X), seed.send(net.C, net.X, "seed_X").at(net.X)),
        )
        model[name] = Both(*(prepared(public, layer, *m, weight) for m in got))
    return model


@protocol("secsv_choose", "SecSV, Algorithm 6", [
    Message("tested", "P", "X", "", "which samples are tested: not those that it saw classified correctly"),
], roles=TWO_SERVERS)  # fmt: skip
def choose(net: Net, tested: Located) -> Located:
    """The set of samples that are tested, as a bitmap at P and X. Rounds 1, bits 1 a sample."""
    return tested.send(net.P, net.X, "tested")


@protocol("secsv_layer", "SecSV, Algorithm 4, steps 4 to 7", [
    Message("partial_output", "X", "P", "encryption, with a fresh encryption of zero"),
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=TWO_SERVERS)  # fmt: skip
def evaluate(
    net: Net, public: Public, layer: Layer, samples: int, model: Both, right: Both, weights: list[int], keys: Located
) -> Located:
    """A layer's outputs [samples, *shape] at C. Rounds 2; two messages of ceil(columns / 2W) ciphertexts."""
    what = public, layer, samples
    at_X = net.fresh(net.X, linear_hidden, *what, model.X, right.X)  # 5
    at_X = sent(at_X, net.X, net.P, "partial_output")
    at_P = linear(*what, model.P, right.P)  # 4
    output = sent(combined(public, at_P, at_X), net.P, net.C, "layer_output").at(net.C)  # 6
    return decrypted(public, layer, output, sum(weights), (samples,), str(net.C), keys)  # 7


@protocol("secsv_first", "SecSV, Algorithm 4, steps 4 to 6", [
    Message("partial_output", "X", "P", "encryption, with a fresh encryption of zero"),
], roles=TWO_SERVERS)  # fmt: skip
def evaluate_first(net: Net, public: Public, samples: int, model: Both, right: Both) -> Located:
    """The first layer's outputs of one client's model on one client's samples, encrypted, at P, to be added up there.

    A coalition's model is the sum of its members', and the first layer's outputs are linear in the model. Rounds 1;
    ceil(columns / 2W) ciphertexts.
    """
    what = public, public.program.layers[0], samples
    at_X = net.fresh(net.X, linear_hidden, *what, model.X, right.X)  # 5
    at_X = sent(at_X, net.X, net.P, "partial_output")
    return combined(public, linear(*what, model.P, right.P), at_X)  # 4, 6


@protocol("secsv_first_sum", "SecSV, Algorithm 4, steps 6 and 7", [
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=TWO_SERVERS)  # fmt: skip
def open_first(
    net: Net, public: Public, samples: list[int], parts: list[list[Located]], weights: list[int], keys: Located
) -> Located:
    """The first layer's outputs [samples, *shape] of a coalition's model at C. Rounds 1; as many ciphertexts.

    Args:
        samples: of each owner in the batch.
        parts: for each owner what `evaluate_first` gave of each member of the coalition.
    """
    every = [part for of_owner in parts for part in of_owner]
    output = net.fresh(net.P, joined, public, len(weights), *every)
    output = sent(output, net.P, net.C, "layer_output").at(net.C)
    layer = public.program.layers[0]
    return decrypted(public, layer, output, sum(weights), samples, str(net.C), keys)


@protocol("secsv_features", "SecSV, Algorithm 4, step 9", [
    Message("features_P", "C", "P", "a share mod Q"), Message("features_X", "C", "X", "a share mod Q"),
], roles=TWO_SERVERS)  # fmt: skip
def share_features(net: Net, public: Public, layer: Layer, values: Located) -> Both:
    """The next layer's features, activated by C and shared. Rounds 1; 12 bytes a feature to each server."""
    at_P, at_X = net.fresh(net.C, activated, public, layer, values)
    return to_both(net, at_P, at_X, "features")


class SecSVTester(SecureTester):
    """Two servers P and X, and the clients. See docs/secsv.md for what each learns."""

    roles = TWO_SERVERS

    def __init__(
        self, program: Program, tests: TestSet, keys: ckks.Keys | ckks.PublicKeys, form: Format | None, level: str,
        runtime: Runtime | None = None,
    ):  # fmt: skip
        super().__init__(program, tests, keys, level, runtime)
        if form is not None:
            form.check(keys.parameters.scale_bits)
            self.public = Public(program, form, self.public_keys)
        self._aggregated: tuple[int, dict[str, Both]] = 0, {}
        self._sums = {name: Both(Aggregation(), Aggregation()) for name in program.weights}
        self._encoded: list[Both] = []
        self._outputs: dict[tuple[int, int], Located] = {}

    def agree(self, value_bits: Sequence[int], frac_bits: int | None) -> None:
        """The clients settle on a number format: each says what its models need, and the most is taken.

        Raises:
            LevelError: the modulus chain is too short.
        """
        needed = int(max(self.parties.numbers(value_bits)))
        self.public = Public(self.program, _format(needed, frac_bits), self.public_keys)

    def _begun(self):
        self._aggregated = 0, {}
        self._outputs = {}
        for sums in self._sums.values():
            sums.P.begun()
            sums.X.begun()

    def _sample(self, i, x, labels):
        return share_samples(self.nets[i], self.public, x, labels)

    def _model(self, i, matrices):
        x = self._own_samples(i)[0]
        return encrypt_model(self.nets[i], self.public, x, matrices, self._weights[i], self._keys[i])

    def routes(self, coalition: int) -> list[Route]:
        """Batches and their clients for a coalition's model."""
        everyone = range(len(self.nets))
        return plan(
            everyone, everyone, len(self.program.layers), self.level, members=members(coalition), turn=coalition
        )

    def cost(self, coalition, samples):
        total = 0.0
        for route in self.routes(coalition):
            count = self.tests.count(route.owners, samples)
            first, *others = [(layer, self.public.layout(layer)) for layer in self.program.layers]
            total += sum(layout.tiles(layer.columns * count) for layer, layout in others if count)
            whole, (layer, layout) = count == self._size(route), first
            if whole:
                total += SUMMED * sum(layout.tiles(layer.columns * self.tests.sizes[i]) for i in route.owners)
            elif count:
                total += layout.tiles(layer.columns * count) * (1 + layout.encoding_cost)
        return total

    def _size(self, route: Route) -> int:
        """All samples of its owners, on which P has every client's first outputs."""
        return sum(self.tests.sizes[i] for i in route.owners)

    def correct(self, coalition, samples):
        routes = self.routes(coalition)
        task = self._task(coalition, [self.tests.count(route.owners, samples) for route in routes])
        found = 0
        for route, matches in self._tested(task, samples) or ():
            numbers = {i: self.tests.of(i, samples) for i in route.owners}
            hits = self.nets[0].read(matches, self.nets[0].P).bool().numpy()
            found |= bits(self.tests.places(route.owners, numbers)[hits])
        return found

    def _tested(self, task: Sequence[int], samples: int) -> list[tuple[Route, Located]] | None:
        coalition, *counts = task
        if not coalition:
            return None
        net, routes = self.nets[0], self.routes(coalition)
        tested = None
        if any(0 < count < self._size(route) for route, count in zip(routes, counts, strict=False)):
            tested = choose(net, net.own(net.P, self.tests.bitmap(samples), name="tested"))
        return [
            (route, test_shared(self, Batch(coalition, route, count, None if count == self._size(route) else tested)))
            for route, count in zip(routes, counts, strict=False)
            if count
        ]

    def _aggregate(self, coalition: int, name: str) -> Both:
        """A layer of the coalition's model, times the sum of its weights (Algorithm 3)."""
        if coalition != self._aggregated[0]:
            self._aggregated = coalition, {}
        model = self._aggregated[1]
        if name not in model:
            net, sums = self.nets[0], self._sums[name]
            some = members(coalition)
            layers = [self._models[i][name] for i in some]
            model[name] = Both(
                net.fresh(net.P, sums.P, self.public, some, *(m.P for m in layers)),
                net.fresh(net.X, sums.X, self.public, some, *(m.X for m in layers)),
            )
        return model[name]

    # The steps of Algorithm 4.

    def features(self, batch: Batch) -> Both | None:
        """The servers' shares of a batch's features; None where P has the first layer's outputs of all of them."""
        if batch.tested is None and not self.program.state:
            return None
        return self._stated(self._taken(0, batch))

    def labels(self, batch: Batch) -> Both:
        """The servers' shares of a batch's labels, in unary."""
        return self._taken(1, batch)

    def outputs(self, batch: Batch, layer: Layer, client: int, features: Both | None) -> Located:
        """Steps 4 to 7: a layer's outputs at a client, who decrypts them."""
        net, keys, some = self.nets[client], self._keys[client], members(batch.coalition)
        weights = [self._weights[i] for i in some]
        if layer is self.program.layers[0] and batch.tested is None:
            sizes = [self.tests.sizes[i] for i in batch.route.owners]
            parts = [[self._first(i, owner) for i in some] for owner in batch.route.owners]
            return open_first(net, self.public, sizes, parts, weights, keys)
        model, right = self._aggregate(batch.coalition, layer.weight), self._encode(layer, _there(features))
        return evaluate(net, self.public, layer, batch.count, model, right, weights, keys)

    def next_features(self, client: int, layer: Layer, values: Located, features: Both | None) -> Both:
        """Step 9: the next layer's features in shares, from a layer's outputs at a client."""
        net = self.nets[client]
        if layer.gate:
            return self._next_state(net, _there(features), values)
        return share_features(net, self.public, layer, values)

    def matches(self, client: int, values: Located, labels: Both) -> Located:
        """Steps 11 to 14: whether a client's predictions are the labels, at P and X."""
        net, field = self.nets[client], self.public.field.first
        material = net.fresh(net.C, match_material, self.public, values)
        return open_matches(net, field, multiply(net, field, material, labels))

    def _next_state(self, net: Net, features: Both, values: Located) -> Both:
        """A GRU's features with the state z h + u, behind the input, in place of h."""
        field, hidden = self.public.field, self.program.state
        with run_in(net):
            state, inputs = (Both(*(f[:, part] for f in features)) for part in (slice(-hidden, None), slice(-hidden)))
            material = net.fresh(net.C, gate_material, self.public, values)
            state = truncate(net, field, multiply(net, field, material, state))
            return Both(*(torch.cat(parts, dim=1) for parts in zip(inputs, state, strict=True)))

    def _taken(self, what: int, batch: Batch) -> Both:
        """The servers' shares of the features (0) or labels (1) of a batch: of all its samples, or of those tested."""
        owners, tested = batch.route.owners, batch.tested
        shares = zip(*(self._samples[i][what] for i in owners), strict=True)
        with run_in(self.nets[0]):
            if tested is None:
                return Both(*(torch.cat(halves, dim=2) for halves in shares))
            places = [(self.tests.first[i], self.tests.sizes[i]) for i in owners]
            return Both(*(chosen(tested, places, batch.count, *halves) for halves in shares))

    def prepare(self):
        for i in self._models:
            for owner in range(len(self.nets)):
                self._first(i, owner)

    def _first(self, i: int, owner: int) -> Located:
        """The first layer's outputs of client i's model on an owner's samples, at P: made when first asked for."""
        first = self.program.layers[0]
        if not self._encoded:
            self._encoded = [self._encode(first, self._stated(features)) for features, _ in self._samples]
        if (i, owner) not in self._outputs:
            size, model = self.tests.sizes[owner], self._models[i][first.weight]
            self._outputs[i, owner] = evaluate_first(self.nets[0], self.public, size, model, self._encoded[owner])
        return self._outputs[i, owner]

    def _stated(self, features: Both) -> Both:
        """Features with a recurrent layer's state behind them, which is zero at first."""
        if not self.program.state:
            return features
        with run_in(self.nets[0]):
            return Both(*(F.pad(half, (0, 0, 0, self.program.state)) for half in features))

    def _encode(self, layer: Layer, features: Both) -> Both:
        with run_in(self.nets[0]):
            return Both(*(encoded(self.public, layer, half) for half in features))


def _there(features: Both | None) -> Both:
    """The features of a batch of which P has no first outputs."""
    if features is None:
        raise FederationError("internal error: a batch whose first outputs are known was asked for its features")
    return features
