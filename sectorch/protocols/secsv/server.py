"""A server of SecSV: encrypted models, one share of the test data, and no key that decrypts (Algorithms 3 and 4).

Both servers run the same code. The auxiliary one adds a fresh encryption of zero to what it sends to the principal:
without, its partial output is a known linear map of its share, with the models' ciphertexts as coefficients, and the
principal, who has the same ciphertexts, could solve for the share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ckks import PublicKeys
from ...ckks.cipher import Cipher
from ...ckks.rerandomise import zeros
from .channel import Address
from .client import Half
from .clock import Clock
from .modular import centred, residues
from .program import Layer
from .reducing import Counts, Reducing
from .sharing import Field
from .values import members

KEPT = 16
"""Encoded whole batches that a server keeps, the oldest leaving first: five clients' routes have at most ten."""
OFFSET_BITS = 30
"""What is truncated is below 2^30 in magnitude: gates are below one, at twice the fraction bits."""


class Server:
    """`role` is PRINCIPAL or AUXILIARY. What it holds: public keys, ciphertexts, shares."""

    def __init__(self, address: Address, public: PublicKeys, field: Field, state: int):
        self.address, self._public, self._field, self._state = address, public, field, state
        self._primes = public.parameters.primes
        self._models: dict[int, dict[str, tuple[list, list]]] = {}
        self._weights: dict[int, int] = {}
        self._samples: dict[int, tuple[Half, Half]] = {}
        self._encoded: dict = {}
        self._model: dict[str, tuple[list, list]] = {}
        self._room: dict[str, list[list[torch.Tensor]]] = {}
        self._coalition = 0
        self._batch: dict[str, Half] = {}
        self._key: tuple | None = None
        self.counts = Counts()

    def __repr__(self) -> str:
        return f"Server({self.address.name})"

    def receive_samples(self, owner: int, features: Half, labels: Half) -> None:
        """A client's share of its test samples."""
        self._samples[owner] = features, labels

    def receive_model(self, owner: int, layers: dict[str, tuple], weight: int, layouts: dict[str, Reducing]) -> None:
        """A client's encrypted model; kept times its aggregation weight, as the products want it."""
        kept = {}
        for name, (matrix, bias) in layers.items():
            layout = layouts[name]
            ones = layout.constant(1 << self._field.frac_bits, self._primes)
            addend = [
                centred((bias[0, :, j] * weight).remainder_(q).mul_(ones[j]).remainder_(q), q)
                for j, q in enumerate(self._primes)
            ]
            kept[name] = layout.prepare(matrix, self._primes, weight), addend
        self._models[owner], self._weights[owner] = kept, weight
        self._coalition = 0

    def forget_models(self) -> None:
        """A round is over."""
        self._models, self._weights, self._model, self._room, self._coalition = {}, {}, {}, {}, 0

    def aggregate(self, coalition: int, clock: Clock) -> int:
        """The coalition's model under encryption, times the sum of its weights, which is returned (Algorithm 3)."""
        owners = members(coalition)
        if coalition != self._coalition:
            with clock.during("arithmetic"):
                parts = [self._models[i] for i in owners]
                if not self._room:  # pages that were touched before are faster than fresh ones
                    self._room = {
                        n: [[torch.empty_like(v) for v in half] for half in pair] for n, pair in parts[0].items()
                    }
                self._model = {
                    name: tuple(
                        [_sum([p[name][k][j] for p in parts], room) for j, room in enumerate(pair[k])] for k in (0, 1)
                    )
                    for name, pair in self._room.items()
                }
            self._coalition = coalition
        return sum(self._weights[i] for i in owners)

    def load(self, owners: Sequence[int], chosen: dict[int, list[int]] | None) -> int:
        """Make a batch of the samples of some clients, all of them (None) or those with these numbers."""
        # Whole batches come again for every model: their first layer is encoded once.
        self._key = (tuple(owners), 0) if chosen is None and not self._state else None
        parts = [self._samples[i] if chosen is None else _taken(self._samples[i], chosen[i]) for i in owners]
        labels = torch.cat([part[1] for part in parts], dim=2)
        self._batch = {"labels": labels}
        if self._key not in self._encoded:
            features = torch.cat([part[0] for part in parts], dim=2)
            if self._state:
                state = torch.zeros(len(self._primes), self._state, features.shape[2], dtype=torch.int64)
                features = torch.cat([features, state], dim=1)
            self._batch["features"] = features
        return labels.shape[2]

    def linear(self, layer: Layer, clock: Clock, *, fresh: bool) -> torch.Tensor:
        """This server's part of a layer's outputs, encrypted: int64 [ciphertexts, 2, primes, N] (Algorithm 4, 4-5).

        Args:
            fresh: add an encryption of zero (the auxiliary server), or else the bias (the principal).
        """
        layout = Reducing(layer.rows, layer.inner, self._public.parameters.degree)
        model, bias = self._model[layer.weight]
        with clock.during("arithmetic"):
            right = self._encoded.get(self._key)
            if right is None:
                columns = layer.features(self._batch["features"])
                right = layout.encode(columns, self._primes)
                if self._key:
                    if len(self._encoded) >= KEPT:
                        self._encoded.pop(next(iter(self._encoded)))
                    self._encoded[self._key] = right
            self._key = None
            # A sum of n centred residues; the sum of five is what is multiplied, without being reduced.
            largest = [max(1, self._coalition.bit_count()) * (q / 2 + 1) for q in self._primes]
            out = layout.multiply(model, right, self._primes, largest)
            self.counts.products += layer.inner * len(out)
            moduli = torch.tensor(self._primes).view(1, 1, -1, 1)
            if not fresh:
                addend = torch.stack([residues(bias[j], q) for j, q in enumerate(self._primes)], dim=1)
                return out.add_(addend).remainder_(moduli)
        with clock.during("encryption"):
            return out.add_(zeros(Cipher(out, self._public))).remainder_(moduli)

    def combine(self, own: torch.Tensor, other: torch.Tensor, clock: Clock) -> torch.Tensor:
        """The encrypted output from both parts (Algorithm 4, step 6)."""
        with clock.during("arithmetic"):
            return (own + other).remainder_(torch.tensor(self._primes).view(1, 1, -1, 1))

    def receive_features(self, features: Half) -> None:
        """The next layer's features, from the client who activated."""
        self._batch["features"] = features

    def masked(self, material: dict[str, Half], what: str) -> Half:
        """This server's half of h - b, for the other server; h is the state, or the labels."""
        return self._ring(what).subtract(self._operand(what), material["mask"])

    def times(self, material: dict[str, Half], own: Half, other: Half, what: str) -> Half:
        """This server's half of p h + a, from both halves of h - b."""
        ring = self._ring(what)
        return ring.add(ring.multiply(material["factor"], ring.add(own, other)), material["product"])

    def mask_sum(self, half: Half) -> tuple[Half, Half]:
        """The auxiliary server's side of a truncation: its half under a mask rho, and its half of the quotient.

        rho is an integer of 40 and more bits above the value's size, so that value + rho tells the principal nothing.
        """
        rho = self._field.mask(tuple(half.shape[1:]))
        quotient = self._field.subtract(torch.zeros_like(rho), self._field.shifted(rho))
        return self._field.add(half, rho), quotient

    def quotient(self, half: Half, masked: Half) -> Half:
        """The principal's half of floor(v / 2^frac_bits), within one unit of it: it sees v + rho + 2^30 only."""
        offset = self._field.reduce(torch.full(tuple(half.shape[1:]), 1 << OFFSET_BITS))
        above = self._field.shifted(self._field.add(self._field.add(half, masked), offset))
        lowered = self._field.reduce(torch.full(tuple(half.shape[1:]), 1 << (OFFSET_BITS - self._field.frac_bits)))
        return self._field.subtract(above, lowered)

    def receive_state(self, share: Half) -> None:
        """The next state of a recurrent layer, behind the input."""
        features = self._batch["features"]
        self._batch["features"] = torch.cat([features[:, : -self._state], share], dim=1)

    def matches(self, half: Half) -> Half:
        """This server's half of [prediction = label] for each sample: the product of both in unary, summed."""
        return self._field.first.reduce_sum(half)

    def opened(self, own: Half, other: Half) -> list[int]:
        """The opened matches, 0 or 1."""
        return self._field.small(self._field.first.add(own, other)).tolist()

    def _ring(self, what: str) -> Field:
        return self._field.first if what == "labels" else self._field

    def _operand(self, what: str) -> Half:
        return self._batch["labels"] if what == "labels" else self._batch["features"][:, -self._state :]


def _taken(halves: tuple[Half, Half], chosen: list[int]) -> tuple[Half, Half]:
    return tuple(half[:, :, chosen] for half in halves)


def _sum(parts: list[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    torch.add(parts[0], parts[1], out=room)
    for part in parts[2:]:
        room.add_(part)
    return room
