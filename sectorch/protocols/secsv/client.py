"""A client of SecSV: its own test samples and local models, the clients' joint key, and what it does for others.

The clients share one CKKS key pair (SecSV, section 3: honest but curious, not colluding); no server has the secret
half. A client encrypts, shares, decrypts the layers that routes give to it, and keeps nothing of what it decrypted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ... import ckks
from ...errors import FixedPointRangeError
from .channel import CLIENT, Address
from .clock import Clock
from .errors import CorruptedCiphertextError
from .modular import uniform
from .program import Layer, Program, gates
from .reducing import ENCODING_BITS, Reducing, decrypt_columns, encrypt_matrix
from .sharing import Field

WEIGHT_BITS = 4
"""Weights are encrypted times 2^4, which uses the room that the last prime leaves: they stay below 2^3."""
TOTAL_WEIGHT = 1 << 10
"""Aggregation weights are integers that add up to at most this over all clients."""
Half = torch.Tensor


@dataclass(frozen=True)
class Format:
    """Public: the number format of a run. `value_bits`: log2 of the largest output of any layer."""

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


def bits_for(largest: float) -> int:
    """value_bits for outputs of a magnitude, a factor of two to spare for other clients' samples and models."""
    return max(3, math.ceil(math.log2(max(largest, 1e-9))) + 1)


class Client:
    """One organisation. `x` [m, ...] and `labels` [m] are its test samples; `keys` the clients' joint keys."""

    def __init__(
        self, name: str, keys: ckks.Keys, program: Program, form: Format, x: torch.Tensor, labels: torch.Tensor
    ):
        self.address = Address(name, CLIENT)
        self._keys, self._program, self._form = keys, program, form
        self._x, self._labels = x, labels

    def __repr__(self) -> str:
        return f"Client({self.address.name})"

    def encrypt_model(self, weights: Mapping[str, torch.Tensor], clock: Clock) -> dict[str, tuple]:
        """Each matrix and bias of a local model under the joint key: int64 [d_in, 2, primes, N], [1, 2, primes, N].

        Raises:
            FixedPointRangeError: a weight of 2^3 and more, or outputs on its own samples beyond the format.
        """
        matrices = self._program.matrices(weights)
        largest = max(float(part.abs().max()) for pair in matrices.values() for part in pair)
        if not largest < 2.0 ** (7 - WEIGHT_BITS):
            raise FixedPointRangeError(
                f"{self.address.name}'s model has a weight of {largest:.3g}; weights stay below 2^{7 - WEIGHT_BITS}: "
                f"use weight decay, or scale the inputs up"
            )
        _, reached = self._program.run(matrices, self._x)
        if reached >= 2.0**self._form.value_bits / 2:
            raise FixedPointRangeError(
                f"{self.address.name}'s model reaches {reached:.3g} on its own samples, too close to the limit of "
                f"2^{self._form.value_bits}; scale the inputs down, or raise value_bits and lower frac_bits"
            )
        out = {}
        degree = self._keys.parameters.degree
        with clock.during("encryption"):
            for name, (matrix, bias) in matrices.items():
                layout = Reducing(*matrix.shape, degree)
                factor = 2.0**WEIGHT_BITS
                out[name] = (
                    encrypt_matrix(layout, matrix * factor, self._keys),
                    encrypt_matrix(layout, bias.unsqueeze(1) * factor, self._keys),
                )
        return out

    def share_samples(self, clock: Clock) -> tuple[tuple[Half, Half], tuple[Half, Half]]:
        """For each server its share of the features [primes, d, m] and of the labels in unary [1, classes, m]."""
        unary = torch.nn.functional.one_hot(self._labels, self._program.classes).t()
        with clock.during("sharing"):
            features = self._form.field.share(self._form.field.encode(self._x.reshape(len(self._x), -1).t()))
            labels = self._form.field.first.share(self._form.field.first.reduce(unary))
        return (features[0], labels[0]), (features[1], labels[1])

    def activate(self, layer: Layer, last: bool, output: torch.Tensor, weight: int, samples: int, clock: Clock):
        """Decrypt a layer's outputs and go on: shares of the next features, or what a product needs.

        Returns:
            For each server a dict of shares: "features"; or "factor", "mask" and "product" for a product with what the
            servers hold (see `_deal_product`).

        Raises:
            CorruptedCiphertextError: outputs that no honest computation gives.
        """
        with clock.during("decryption"):
            values = layer.outputs(self._decrypt(layer, output, weight, samples), samples)
        with torch.no_grad():
            if layer.gate:
                z, u = gates(values)
                dealt = self._form.field.encode(z), self._form.field.encode(u, times=2)
            elif last:
                predicted = torch.nn.functional.one_hot(values.argmax(1), self._program.classes).t()
                dealt = self._form.field.first.reduce(predicted), None
            else:
                features = layer.after(values).reshape(samples, -1).t()
                dealt = None
        with clock.during("sharing"):
            if dealt is None:
                halves = self._form.field.share(self._form.field.encode(features))
                return {"features": halves[0]}, {"features": halves[1]}
            return self._deal_product(self._form.field.first if last else self._form.field, *dealt)

    def _deal_product(self, field: Field, factor: torch.Tensor, addend: torch.Tensor | None) -> tuple[dict, dict]:
        """For p h + a with p and a known here and h shared: shares of p, of a mask b, and of p b + a.

        The servers open h - b to each other; then p (h - b) + (p b + a) is linear in shares. This client sees nothing.
        """
        b = uniform(tuple(factor.shape[1:]), field.primes)
        product = field.multiply(factor, b)
        if addend is not None:
            product = field.add(product, addend)
        halves = [field.share(v) for v in (factor, b, product)]
        names = ("factor", "mask", "product")
        return tuple({name: h[k] for name, h in zip(names, halves, strict=True)} for k in (0, 1))

    def _decrypt(self, layer: Layer, output: torch.Tensor, weight: int, samples: int) -> torch.Tensor:
        """[d_out, columns * samples]."""
        public = self._keys.public
        primes = torch.tensor(public.parameters.primes).view(-1, 1)
        layout = Reducing(layer.rows, layer.inner, public.parameters.degree)
        columns = layer.columns * samples
        expected = (layout.tiles(columns), 2, len(primes), layout.degree)
        if tuple(output.shape) != expected or bool((output < 0).any()) or bool((output >= primes).any()):
            raise CorruptedCiphertextError(
                f"{self.address.name} got {tuple(output.shape)} words, no ciphertexts of shape {expected} under "
                f"the clients' key; the batch was not counted: run again from the folder"
            )
        scale = self._form.scale(2.0**public.parameters.scale_bits)
        slots = decrypt_columns(layout, output, self._keys, scale) / weight
        if not float(slots.abs().max()) <= 2.0**self._form.value_bits:
            raise CorruptedCiphertextError(
                f"{self.address.name} decrypted a value beyond 2^{self._form.value_bits}: a message was corrupted, or "
                f"the model leaves the number format; the batch was not counted: run again from the folder"
            )
        return slots[: layer.rows, :columns]
