"""What everybody knows of a run of SecSV: the architecture, the number format, and the clients' public keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import ckks
from ...choreography import Located, Net, Party, with_shapes
from ...ckks import CKKSTensor, EncryptedMatrix
from ...ckks.linalg import ENCODING_BITS, PackedOperand, Reducing, uniform
from ...ckks.scheme.ciphertext import Cipher, residues
from ...errors import FixedPointRangeError, NonFiniteError
from .program import Layer, Program

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
TOTAL_WEIGHT = 1 << 10
"""Aggregation weights are integers that add up to at most this over all clients."""


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


def quantised(weights: Mapping[int, float]) -> dict[int, int]:
    """Aggregation weights as integers of at most TOTAL_WEIGHT together: exact where they are integers and fit.

    Error otherwise: 2^-11 of the largest possible sum, for each weight.
    """
    everyone = sum(weights.values())
    if everyone <= TOTAL_WEIGHT and all(float(w).is_integer() for w in weights.values()):
        return {i: int(w) for i, w in weights.items()}
    return {i: max(1, round(w * (TOTAL_WEIGHT - len(weights)) / everyone)) for i, w in weights.items()}


# Ciphertexts in a choreography: what they look like is public, their residues are located and travel as messages.
#
# A ciphertext's level, scale and size follow from the architecture, so everybody works them out: each computation is
# made on shapes as well. What travels is one int64 tensor of residues, [ciphertexts, 2, primes, N].


@dataclass(frozen=True)
class Sealed:
    """Ciphertexts, or keys, that some parties hold.

    Attributes:
        form: a `Cipher`, a `CKKSTensor`, a matrix of them or a tuple, whose residues have no content; or public keys.
        content: the residues, or the keys.
    """

    form: Any
    content: Located

    def send(self, src: Party, dst: Party, label: str) -> Sealed:
        """The same at `dst`; 8 bytes a residue."""
        return Sealed(self.form, self.content.send(src, dst, label).at(dst))


def compute(net: Net, party: Party, f: Callable, *values: Any) -> Any:
    """`party` computes f(*values), with randomness of its own; a `Sealed` where that is ciphertexts.

    Args:
        f: takes ciphertexts where a value is `Sealed`, tensors where it is located. It is called on shapes as well, by
            its attribute `shapes` where it has one.
    """
    forms = [_form(value) for value in values]
    form = getattr(f, "shapes", f)(*forms)
    sealed = next(_ciphers(form), None) is not None

    @with_shapes(lambda *_: _residues(form) if sealed else form)
    def taken(*contents: Any) -> Any:
        found = getattr(f, "kernel", f)(*(_opened(v, c) for v, c in zip(values, contents, strict=True)))
        return _residues(found) if sealed else found

    taken.__name__ = getattr(f, "__name__", "f")
    content = net.fresh(party, taken, *(v.content if isinstance(v, Sealed) else v for v in values))
    return Sealed(form, content) if sealed else content


def _form(value: Any) -> Any:
    if isinstance(value, Sealed):
        return value.form
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Located) else value


def _opened(value: Any, content: Any) -> Any:
    if isinstance(value, Sealed) and isinstance(content, torch.Tensor):
        return _filled(value.form, iter(content.split([c.count for c in _ciphers(value.form)])))
    return content


def _residues(value: Any) -> torch.Tensor:
    parts = [residues(cipher) for cipher in _ciphers(value)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ciphers(value: Any) -> Iterator[Cipher]:
    """All that are in a value, in one order."""
    if isinstance(value, Cipher):
        yield value
    elif isinstance(value, CKKSTensor):
        yield value.cipher
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _ciphers(part)
    elif isinstance(value, PackedOperand | EncryptedMatrix):
        for block in value.blocks.values():
            yield from _ciphers(block)


def _filled(form: Any, parts: Iterator[torch.Tensor]) -> Any:
    """The form with residues."""
    if isinstance(form, Cipher):
        return replace(form, data=next(parts))
    if isinstance(form, CKKSTensor):
        return CKKSTensor(_filled(form.cipher, parts), form.batch, form.row_shape, form.float_dtype)
    if isinstance(form, tuple | list):
        return type(form)(_filled(part, parts) for part in form)
    return replace(form, blocks={at: _filled(block, parts) for at, block in form.blocks.items()})
