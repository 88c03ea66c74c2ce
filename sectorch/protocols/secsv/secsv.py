"""SecSV's secure testing: encrypted models, shared test data, two servers (SecSV, section 5.1, Algorithms 3 and 4).

C is a client, P the principal and X the auxiliary server. First comes what everybody knows of a run, then what each
party computes alone, then the protocols, and last the tester, which `algorithm.test_shared` puts together. Matrices
are ciphertexts (`ckks.linalg.ReducingOperand`), features shares modulo the ciphertext modulus
(`ckks/convert.py`), and `matrix @ share` at both servers adds up to the encrypted product.
"""

from __future__ import annotations

import functools
import math
import operator
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
from ...ckks.convert import ResidueRing
from ...ckks.exchange import LocatedCKKSTensor, LocatedKeys
from ...ckks.linalg import ENCODING_BITS, EncodedShare, EncryptedColumns, Reducing, ReducingOperand, encrypt_matrix
from ...errors import FixedPointRangeError
from .algorithm import Batch, test_shared
from .program import Layer, Program, gates, unary
from .settings import Route, Settings
from .testers import TWO_SERVERS, SecureTester, TestSet, during, tally, work
from .values import CorruptedCiphertextError, FederationError, bits, members

WEIGHT_BITS = 4
"""Weights are encrypted times 2^4, which uses the room that the last prime leaves: they stay below 2^3."""


@dataclass(frozen=True)
class Format:
    """The number format of a run. `value_bits`: log2 of the largest output of any layer."""

    ring: ResidueRing
    value_bits: int

    @classmethod
    def fitting(cls, value_bits: int, frac_bits: int | None) -> Format:
        """Under the joint keys, for outputs below 2^value_bits: 12 fraction bits, or what is left of the modulus, at
        least 6.

        Raises:
            LevelError: the modulus chain is too short.
        """
        p = joint_parameters()
        room = math.floor(math.log2(math.prod(p.primes)) - p.scale_bits - WEIGHT_BITS - ENCODING_BITS - value_bits - 11)
        form = cls(ResidueRing(p.primes, frac_bits or max(6, min(12, room))), value_bits)
        form.check(p.scale_bits)
        return form

    def check(self, scale_bits: int) -> None:
        """Raises:
        LevelError: the modulus chain is too short for the format.
        """
        needed = scale_bits + WEIGHT_BITS + self.ring.frac_bits + ENCODING_BITS + self.value_bits + 11
        if needed > self.ring.bits:
            raise ckks.LevelError(
                f"outputs up to 2^{self.value_bits} with {self.ring.frac_bits} fraction bits need {needed} bits, "
                f"and the chain has {self.ring.bits:.0f}; lower frac_bits or value_bits, or keygen more"
            )


@dataclass(frozen=True)
class Public:
    """What every step of SecSV may be told."""

    program: Program
    form: Format
    parameters: ckks.Parameters

    @property
    def ring(self) -> ResidueRing:
        return self.form.ring

    def layout(self, layer: Layer) -> Reducing:
        """How a layer's product is laid out in ciphertexts; its bias is the matrix's last column."""
        return Reducing(layer.rows, layer.inner + 1, self.parameters.degree)


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


@work("encryption")
def encrypted(public: Public, layer: Layer, matrix: torch.Tensor, keys: ckks.Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [d_out, d_in + 1], its bias the last column, under the joint secret key: the first halves of d_in + 1
    ciphertexts, int32 [d_in + 1, primes, N], and the seed of the second ones.
    """
    return encrypt_matrix(public.layout(layer), matrix * 2.0**WEIGHT_BITS, keys)


@work("sharing")
def shared(public: Public, x: torch.Tensor, labels: torch.Tensor) -> tuple[Half, Half, Half, Half]:
    """For P and for X a share of the features [primes, d, m] and of the labels in unary, mod q_0 [1, classes, m]."""
    ring, truth = public.ring, unary(labels, public.program.classes).t()
    features = ring.share(ring.encode(x.reshape(len(x), -1).t()))
    truths = ring.first.share(ring.first.reduce(truth))
    return features[0], truths[0], features[1], truths[1]


def _output_shapes(public: Public, layer: Layer, weight: int, whose: str, *columns: torch.Tensor) -> torch.Tensor:
    count = sum(values.shape[1] for values in columns) // layer.columns
    return torch.empty(count, *layer.shape, dtype=torch.float64, device="meta")


@leaf(shapes=_output_shapes)
def outputs(public: Public, layer: Layer, weight: int, whose: str, *columns: torch.Tensor) -> torch.Tensor:
    """A layer's outputs [samples, *shape], float64, from decrypted products [d_out, columns], one after the other.

    Args:
        weight: the sum of the aggregation weights.

    Raises:
        CorruptedCiphertextError: outputs that no honest computation gives.
    """
    found = [values * 2.0 ** -(WEIGHT_BITS + public.ring.frac_bits) / weight for values in columns]
    if not all(float(values.abs().max()) <= 2.0**public.form.value_bits for values in found):
        raise CorruptedCiphertextError(
            f"{whose} decrypted a value beyond 2^{public.form.value_bits}: a message was corrupted, or "
            f"the model leaves the number format; the batch was not counted: run again from the folder"
        )
    return torch.cat([layer.outputs(values, values.shape[1] // layer.columns) for values in found])


@work("sharing")
@torch.no_grad()
def activated(public: Public, layer: Layer, values: torch.Tensor) -> tuple[Half, Half]:
    """Shares of the next layer's features [primes, d, samples]."""
    features = layer.after(values).reshape(len(values), -1).t()
    return public.ring.share(public.ring.encode(features))


@work("sharing")
def gate_material(public: Public, values: torch.Tensor) -> tuple[Half, Half]:
    """For the next state z h + u of a GRU: material to multiply the servers' h by z, and add u."""
    z, u = gates(values)
    ring = public.ring
    return _material(ring, ring.encode(z), ring.encode(u, times=2))


@work("sharing")
def match_material(public: Public, values: torch.Tensor) -> tuple[Half, Half]:
    """Material to multiply the servers' labels by the predictions, both in unary and mod q_0."""
    ring = public.ring.first
    return _material(ring, ring.reduce(unary(values.argmax(1), public.program.classes).t()), None)


def _material(ring: ResidueRing, factor: Half, addend: Half | None) -> tuple[Half, Half]:
    """For p h + a with p and a known here and h shared: shares of p, of a mask b, and of p b + a, [3, primes, ...].

    The servers open h - b to each other; then p (h - b) + (p b + a) is linear in shares. This client sees nothing.
    """
    b, _ = ring.share(factor)
    product = ring.multiply(factor, b)
    if addend is not None:
        product = ring.add(product, addend)
    halves = [ring.share(v) for v in (factor, b, product)]
    at_P, at_X = (torch.stack([half[k] for half in halves]) for k in (0, 1))
    return at_P, at_X


# What a server of SecSV computes alone, on ciphertexts and its shares of the test data (Algorithms 3 and 4).
#
# Both servers compute the same. The auxiliary one adds a fresh encryption of zero to what it sends to the principal:
# without, its partial output is a known linear map of its share, with the models' ciphertexts as coefficients, and the
# principal, who has the same ciphertexts, could solve for the share.


OFFSET_BITS = 30
"""What is truncated is below 2^30 in magnitude: gates are below one, at twice the fraction bits."""
GROUP = 3
"""Clients whose models' sums are kept, so that a coalition takes an addition for each group and not for each member."""


@work("arithmetic")
def prepared(
    public: Public, layer: Layer, first: torch.Tensor, seed: torch.Tensor, weight: int, keys: ckks.PublicKeys
) -> ReducingOperand:  # fmt: skip
    """A client's encrypted layer, as it was sent, times its aggregation weight."""
    return ReducingOperand.from_seeded(public.layout(layer), keys, first, seed, weight)


@work("arithmetic")
def encoded(public: Public, layer: Layer, one: int, features: Half) -> EncodedShare:
    """A share of the features as plaintexts of a layer's product. one: the share of what the bias is multiplied by."""
    columns = layer.features(features)
    columns = torch.cat([columns, torch.full_like(columns[:, :1], one)], dim=1)
    return EncodedShare.of(public.layout(layer), columns, public.ring.primes)


@work("arithmetic")
def linear(layer: Layer, model: ReducingOperand, right: EncodedShare) -> EncryptedColumns:
    """A server's part of a layer's outputs, encrypted (Algorithm 4, steps 4 and 5). The bias counts as no product."""
    out = model @ right
    if not out.cipher.data.is_meta:
        tally(layer.inner * out.cipher.count)
    return out


@work("arithmetic")
def joined(members: int, *parts: EncryptedColumns) -> list[EncryptedColumns]:
    """A coalition's first outputs from its members', for one owner of samples after the other.

    Args:
        parts: of each owner those of each member.
    """
    return [functools.reduce(operator.add, parts[k : k + members]) for k in range(0, len(parts), members)]


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


@work("sharing")
def masked(ring: ResidueRing, h: Half, material: Half) -> Half:
    """This server's half of h - b, for the other server; h is the state, or the labels."""
    return ring.subtract(h, material[1])


@work("sharing")
def times(ring: ResidueRing, own: Half, other: Half, material: Half) -> Half:
    """This server's half of p h + a, from both halves of h - b."""
    return ring.add(ring.multiply(material[0], ring.add(own, other)), material[2])


@work("sharing", lambda ring, half: (half, half))
def mask_sum(ring: ResidueRing, half: Half) -> tuple[Half, Half]:
    """The auxiliary server's side of a truncation: its half under a mask rho, and its half of the quotient.

    rho is an integer of 40 and more bits above the value's size, so that value + rho tells the principal nothing.
    """
    rho = ring.mask(tuple(half.shape[1:]))
    quotient = ring.subtract(torch.zeros_like(rho), ring.shifted(rho))
    return ring.add(half, rho), quotient


@work("sharing", lambda ring, half, hidden: torch.empty_like(half))
def quotient(ring: ResidueRing, half: Half, hidden: Half) -> Half:
    """The principal's half of floor(v / 2^frac_bits), within one unit of it: it sees v + rho + 2^30 only."""
    offset = ring.reduce(torch.full(tuple(half.shape[1:]), 1 << OFFSET_BITS))
    above = ring.shifted(ring.add(ring.add(half, hidden), offset))
    lowered = ring.reduce(torch.full(tuple(half.shape[1:]), 1 << (OFFSET_BITS - ring.frac_bits)))
    return ring.subtract(above, lowered)


@work("sharing")
def matches(ring: ResidueRing, half: Half) -> Half:
    """This server's half of [prediction = label] for each sample: the product of both in unary, summed."""
    return ring.reduce_sum(half)


@work("sharing")
def opened(ring: ResidueRing, own: Half, other: Half) -> torch.Tensor:
    """The opened matches, 0 or 1: int64 [samples]."""
    return ring.small(ring.add(own, other))


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
def multiply(net: Net, ring: ResidueRing, material: tuple[Located, Located], h: Both) -> Both:
    """p h + a for shared h, with p and a known to C, who made `material` of them. Nobody learns anything.

    Rounds 2; per element and prime 12 bytes to each server and 4 between them, each way.
    """
    P, X = net.P, net.X
    m = to_both(net, *material, "material")
    at_P = sent(masked(ring, h.P, m.P), P, X, "masked_P")
    at_X = sent(masked(ring, h.X, m.X), X, P, "masked_X")
    return Both(times(ring, at_P, at_X, m.P), times(ring, at_X, at_P, m.X))


@protocol("secsv_truncate", "docs/secsv.md", [
    Message("masked_sum", "X", "P", "a mask of X, statistically"),
], roles=TWO_SERVERS)  # fmt: skip
def truncate(net: Net, ring: ResidueRing, v: Both) -> Both:
    """floor(v / 2^frac_bits), within one unit. Rounds 1; 4 bytes per element and prime."""
    hidden, at_X = net.fresh(net.X, mask_sum, ring, v.X)
    return Both(quotient(ring, v.P, sent(hidden, net.X, net.P, "masked_sum")), at_X)


@protocol("secsv_open", "SecSV, Algorithm 4, steps 12 to 14", [
    Message("correct_P", "P", "X", "", "which samples are classified correctly"),
    Message("correct_X", "X", "P", "", "which samples are classified correctly"),
], roles=TWO_SERVERS)  # fmt: skip
def open_matches(net: Net, ring: ResidueRing, products: Both) -> Located:
    """Whether prediction and label agree, int64 [samples] at P and X; equality only, not the difference of labels.

    Rounds 1; 4 bytes a sample, each way.
    """
    at_P = sent(matches(ring, products.P), net.P, net.X, "correct_P")
    at_X = sent(matches(ring, products.X), net.X, net.P, "correct_X")
    return opened(ring, at_P, at_X)


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


def named_format(how: Settings) -> Format | None:
    """The number format that the settings name; None where the clients are to agree on it.

    Raises:
        LevelError: the modulus chain is too short.
    """
    return None if how.value_bits is None else Format.fitting(how.value_bits, how.frac_bits)


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
def encrypt_model(
    net: Net, public: Public, x: Located, matrices: list[Located], weight: int, keys: LocatedKeys
) -> dict[str, Both]:  # fmt: skip
    """C's model at both servers, encrypted and times its aggregation weight, by layer.

    Rounds 1; d_in + 1 halves of ciphertexts a layer to each server, and the seed of the others, which are uniform.
    x, C's own samples, show C whether the format holds.
    """
    net.check(net.C, fits, public, str(net.C), x, *matrices)
    model = {}
    for (name, layer), matrix in zip(public.program.weights.items(), matrices, strict=True):
        half, seed = net.fresh(net.C, encrypted, public, layer, matrix, keys.secrets[net.C])
        both = []
        for server in (net.P, net.X):
            own = half.send(net.C, server, f"model_{server}"), seed.send(net.C, server, f"seed_{server}")
            own = (value.at(server) for value in own)
            both.append(keys.run(server, prepared, public, layer, *own, weight, keys.public(server)))
        model[name] = Both(*both)
    return model


@protocol("secsv_choose", "SecSV, Algorithm 6", [
    Message("tested", "P", "X", "", "which samples are tested: not those that it saw classified correctly"),
], roles=TWO_SERVERS)  # fmt: skip
def choose(net: Net, tested: Located) -> Located:
    """The set of samples that are tested, as a bitmap at P and X. Rounds 1, bits 1 a sample."""
    return tested.send(net.P, net.X, "tested")


def _multiplied(net: Net, layer: Layer, model: Both, right: Both) -> LocatedCKKSTensor:
    """A layer's outputs, encrypted, at P (Algorithm 4, steps 4 to 6)."""
    keys = model.P.keys
    at_X = keys.run(net.X, linear, layer, model.X, right.X)  # 5
    with during("encryption"):
        at_X = at_X.rerandomise()
    at_P = keys.run(net.P, linear, layer, model.P, right.P)  # 4
    at_X = at_X.to(net.P, "partial_output")
    with during("arithmetic"):
        return at_P + at_X  # 6


def _decrypted(
    net: Net, public: Public, layer: Layer, output: LocatedCKKSTensor, weights: list[int], rerandomised: bool = False
) -> Located:  # fmt: skip
    """A layer's outputs at C, who decrypts them (Algorithm 4, step 7)."""
    with during("decryption"):
        found = output.decrypt_at(net.C, "layer_output", what=f"{net.C}'s ciphertexts", rerandomised=rerandomised)
        return outputs(public, layer, sum(weights), str(net.C), *(found if isinstance(found, tuple) else (found,)))


@protocol("secsv_layer", "SecSV, Algorithm 4, steps 4 to 7", [
    Message("partial_output", "X", "P", "encryption, with a fresh encryption of zero"),
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=TWO_SERVERS)  # fmt: skip
def evaluate(net: Net, public: Public, layer: Layer, model: Both, right: Both, weights: list[int]) -> Located:
    """A layer's outputs [samples, *shape] at C. Rounds 2; two messages of ceil(columns / 2W) ciphertexts."""
    output = _multiplied(net, layer, model, right)
    return _decrypted(net, public, layer, output, weights, rerandomised=True)  # by X's zero, once for each output


@protocol("secsv_first", "SecSV, Algorithm 4, steps 4 to 6", [
    Message("partial_output", "X", "P", "encryption, with a fresh encryption of zero"),
], roles=TWO_SERVERS)  # fmt: skip
def evaluate_first(net: Net, layer: Layer, model: Both, right: Both) -> LocatedCKKSTensor:
    """The first layer's outputs of one client's model on one client's samples, encrypted, at P, to be added up there.

    A coalition's model is the sum of its members', and the first layer's outputs are linear in the model. Rounds 1;
    ceil(columns / 2W) ciphertexts.
    """
    return _multiplied(net, layer, model, right)


@protocol("secsv_first_sum", "SecSV, Algorithm 4, steps 6 and 7", [
    Message("layer_output", "P", "C", "encryption, which C takes off", "a layer's outputs"),
], roles=TWO_SERVERS)  # fmt: skip
def open_first(net: Net, public: Public, parts: list[list[LocatedCKKSTensor]], weights: list[int]) -> Located:
    """The first layer's outputs [samples, *shape] of a coalition's model at C. Rounds 1; as many ciphertexts.

    P adds a fresh encryption of zero, for what the members' sums were made of is the same in every coalition.

    Args:
        parts: for each owner what `evaluate_first` gave of each member of the coalition.
    """
    every = [part for of_owner in parts for part in of_owner]
    output = every[0].keys.run(net.P, joined, len(weights), *every)
    with during("encryption"):
        output = output.rerandomise()
    return _decrypted(net, public, public.program.layers[0], output, weights)


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
            self.public = Public(program, form, self.keys.parameters)
        self._aggregated: dict[str, tuple[int, Both]] = {}
        self._sums: dict[tuple[str, tuple[int, ...]], Both] = {}
        self._encoded: list[Both] = []

    def agree(self, value_bits: Sequence[int], frac_bits: int | None) -> None:
        """The clients settle on a number format: each says what its models need, and the most is taken.

        Raises:
            LevelError: the modulus chain is too short.
        """
        needed = int(max(self.parties.numbers(value_bits)))
        self.public = Public(self.program, Format.fitting(needed, frac_bits), self.keys.parameters)

    def _begun(self):
        self._aggregated, self._sums = {}, {}

    def _sample(self, i, x, labels):
        return share_samples(self.nets[i], self.public, x, labels)

    def _model(self, i, matrices):
        x = self._own_samples(i)[0]
        return encrypt_model(self.nets[i], self.public, x, matrices, self._weights[i], self.keys)

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
        """A layer of the coalition's model, times the sum of its weights (Algorithm 3); the last one is kept."""
        if self._aggregated.get(name, (0,))[0] != coalition:
            groups: dict[int, list[int]] = {}
            for i in members(coalition):
                groups.setdefault(i // GROUP, []).append(i)
            sums = [self._sum(name, tuple(group)) for group in groups.values()]
            self._aggregated[name] = coalition, functools.reduce(self._added, sums)
        return self._aggregated[name][1]

    def _sum(self, name: str, group: tuple[int, ...]) -> Both:
        """A layer of some neighbouring clients' models, made once a round."""
        if (name, group) not in self._sums:
            own = self._models[group[-1]][name]
            self._sums[name, group] = self._added(self._sum(name, group[:-1]), own) if len(group) > 1 else own
        return self._sums[name, group]

    def _added(self, x: Both, y: Both) -> Both:
        with during("arithmetic"), run_in(self.nets[0]):
            return Both(x.P + y.P, x.X + y.X)

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
        net, some = self.nets[client], members(batch.coalition)
        weights = [self._weights[i] for i in some]
        if layer is self.program.layers[0] and batch.tested is None:
            parts = [[self._first(i, owner) for i in some] for owner in batch.route.owners]
            return open_first(net, self.public, parts, weights)
        model, right = self._aggregate(batch.coalition, layer.weight), self._encode(layer, _there(features))
        return evaluate(net, self.public, layer, model, right, weights)

    def next_features(self, client: int, layer: Layer, values: Located, features: Both | None) -> Both:
        """Step 9: the next layer's features in shares, from a layer's outputs at a client."""
        net = self.nets[client]
        if layer.gate:
            return self._next_state(net, _there(features), values)
        return share_features(net, self.public, layer, values)

    def matches(self, client: int, values: Located, labels: Both) -> Located:
        """Steps 11 to 14: whether a client's predictions are the labels, at P and X."""
        net, ring = self.nets[client], self.public.ring.first
        material = net.fresh(net.C, match_material, self.public, values)
        return open_matches(net, ring, multiply(net, ring, material, labels))

    def _next_state(self, net: Net, features: Both, values: Located) -> Both:
        """A GRU's features with the state z h + u, behind the input, in place of h."""
        ring, hidden = self.public.ring, self.program.state
        with run_in(net):
            state, inputs = (Both(*(f[:, part] for f in features)) for part in (slice(-hidden, None), slice(-hidden)))
            material = net.fresh(net.C, gate_material, self.public, values)
            state = truncate(net, ring, multiply(net, ring, material, state))
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

    def _first_product(self, i, owner):
        first = self.program.layers[0]
        if not self._encoded:
            self._encoded = [self._encode(first, self._stated(features)) for features, _ in self._samples]
        return evaluate_first(self.nets[0], first, self._models[i][first.weight], self._encoded[owner])

    def _stated(self, features: Both) -> Both:
        """Features with a recurrent layer's state behind them, which is zero at first."""
        if not self.program.state:
            return features
        with run_in(self.nets[0]):
            return Both(*(F.pad(half, (0, 0, 0, self.program.state)) for half in features))

    def _encode(self, layer: Layer, features: Both) -> Both:
        with run_in(self.nets[0]):
            one = 1 << self.public.ring.frac_bits
            return Both(encoded(self.public, layer, one, features.P), encoded(self.public, layer, 0, features.X))


def _there(features: Both | None) -> Both:
    """The features of a batch of which P has no first outputs."""
    if features is None:
        raise FederationError("internal error: a batch whose first outputs are known was asked for its features")
    return features
