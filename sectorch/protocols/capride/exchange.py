"""What travels between P_k, who owns the samples, and P_l, its peer, and who computes what: Algorithm 1's exchange.

The protocols are read beside Algorithm 1 and Figure 1; what P_k and P_l compute on their own is in `parties.py`.
`Exchange` runs the protocols for the parties that are in this process: all of them, or one.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np
import torch
from tenseal import sealapi
from torch import nn

from ... import ckks
from ...choreography import Located, Message, Net, Roles, protocol, with_shapes
from ...choreography.located import compute
from ...ckks.scheme.ciphertext import Cipher, clear_pending_factor, fresh_error, prepare_factor, residues, settle
from ...ckks.scheme.encryption import coefficient_error, encode_slots, encrypt_fresh
from ...ckks.scheme.ntt import transform
from ...ckks.scheme.seal import INTEGER_BITS
from ...data.seeds import generator
from ...errors import ArgumentError, MisplacedValueError
from ...federated.folder import digest
from ...federated.training import predict
from ...federated.watch import Watch
from ...nn.fhe import fold_batchnorms
from ...session import Session
from .report import Traffic
from .settings import (
    LEAST_SAMPLES,
    CorruptedCiphertextError,
    Directions,
    DisaggregationError,
    ModelError,
    Party,
    Settings,
    head_of,
)

# An aggregate over the batch out of ciphertexts whose slots hold single samples, without rotations.
#
# The slots of a CKKS ciphertext are the values of its message m at the roots x of X^N = -1. The 2C coefficients of m at
# the multiples of g = N / 2C are those of a polynomial in Y = X^g whose value at y is the mean of m over the g slots
# with x^g = y. SEAL's slot i lies at x = zeta^(3^i), and 3^i mod 4C repeats after C slots: slot i is in group i mod C.
# So
#
#     the sums over C groups of slots are 2C coefficients, and the others need not be sent.
#
# `seal` sends these 2C coefficients of the first polynomial c_0 and the whole of the second, c_1 (an LWE ciphertext
# where C = 1). Decryption, c_0 + c_1 s, gives the owner of the key the sums; every other coefficient of c_0 stays with
# the sender, so that of single samples nothing is there to be decrypted. A sum over the slots by rotations would give
# the same, for log2(N/2) rotations of each ciphertext and a set of rotation keys.
#
# A party's n samples are published C times, sample j in the slots j C .. j C + C - 1, with C the largest power of two
# that fits: encrypted inference costs the same for all slots, and each ciphertext then carries C aggregates.


TERMS = 64
"""The error of an aggregate is taken to be that of so many fresh ones added up (`sectorch.ckks.scheme.encryption`)."""
TAG_BYTES = 32
"""Of the tag that goes with ciphertexts: half is the identity of their keys."""


def copies(samples: int, slots: int) -> int:
    """C: how often a batch is laid into the slots. A power of two, at least 1."""
    return 1 << max(0, (slots // samples).bit_length() - 1)


def spread(x: torch.Tensor, count: int) -> torch.Tensor:
    """[n, ...] -> [n C, ...], each sample C times in a row."""
    return x.repeat_interleave(count, dim=0)


def blocks(directions: torch.Tensor, count: int) -> torch.Tensor:
    """Directions [R, n, M] -> [n C, B, M] with B = ceil(R / C): copy c of a sample meets the directions b C + c."""
    missing = -len(directions) % count
    padded = torch.cat([directions, directions.new_zeros(missing, *directions.shape[1:])])
    blocked = padded.unflatten(0, (-1, count)).permute(2, 1, 0, 3)
    return blocked.reshape(-1, blocked.shape[2], blocked.shape[3])


@dataclass(frozen=True)
class Layout:
    """How a party's n samples and what is asked about them lie in ciphertexts. Public, and the same at both ends.

    Attributes:
        row: the shape of a sample. classes: M.
    """

    parameters: ckks.Parameters
    samples: int
    row: tuple[int, ...]
    classes: int

    @property
    def count(self) -> int:
        """C."""
        return copies(self.samples, self.parameters.slots)

    @property
    def chunk(self) -> int:
        """Samples of one ciphertext."""
        return self.parameters.slots // self.count

    @property
    def chunks(self) -> list[int]:
        """Samples of each chunk; the last may be smaller."""
        return [min(self.chunk, self.samples - start) for start in range(0, self.samples, self.chunk)]

    @property
    def inputs(self) -> torch.Size:
        """Of Enc(x): one ciphertext for each number of a sample and chunk."""
        return self._ciphertexts(math.prod(self.row), self.parameters.depth + 1)

    @property
    def logits(self) -> torch.Size:
        """Of Enc(z)."""
        return self._ciphertexts(self.classes, 2)

    def directions(self, numbers: int) -> torch.Size:
        """Of Enc(q): M ciphertexts for each C directions and chunk, of the two primes that an inner product needs."""
        return self._ciphertexts(self.blocks(numbers) * self.classes, 2)

    def aggregates(self, numbers: int) -> torch.Size:
        """Of what `seal` gives."""
        return torch.Size((self.blocks(numbers), 2 * self.count + self.parameters.degree))

    def blocks(self, numbers: int) -> int:
        """B, ciphertexts of so many aggregates."""
        return -(-numbers // self.count)

    def tensors(self, residues: torch.Tensor, keys: ckks.PublicKeys, *row: int) -> list[ckks.CKKSTensor]:
        """Residues of these shapes as one tensor [samples C, *row] for each chunk, bound by nothing."""
        p, level = self.parameters, residues.shape[2] - 1
        error = fresh_error(p.degree, p.scales[level])
        pieces = zip(residues.chunk(len(self.chunks)), self.chunks, strict=True)
        ciphers = [(Cipher(data, keys, largest=math.nan, error=error), n * self.count) for data, n in pieces]
        return [ckks.CKKSTensor(cipher, batch, row, torch.float64) for cipher, batch in ciphers]

    def _ciphertexts(self, each: int, primes: int) -> torch.Size:
        return torch.Size((len(self.chunks) * each, 2, primes, self.parameters.degree))


def encrypt_low(x: torch.Tensor, keys: ckks.Keys, level: int = 1) -> ckks.CKKSTensor:
    """x [n, ...] encrypted by the owner of the key with the primes of one level only.

    What an inner product needs is two primes, and an encryption's time and size go with their number. The scale is the
    level's canonical one, the error that of any fresh encryption.
    """
    p = keys.parameters
    columns = x.double().flatten(1).t().numpy()
    data = encrypt_fresh(keys.public, len(columns), level + 1, encode_slots(columns, p.degree, p.scales[level]))
    cipher = Cipher(data, keys.public, largest=math.nan, error=fresh_error(p.degree, p.scales[level]))
    return ckks.CKKSTensor(cipher, len(x), tuple(x.shape[1:]), torch.float64)


def tagged(residues: torch.Tensor, identity: str) -> torch.Tensor:
    """What goes with ciphertexts: the identity of their keys and a digest of the residues, uint8 [TAG_BYTES].

    Damage on the way is seen by it, and what is under other keys. It is no defence against a liar.
    """
    found = hashlib.blake2b(residues.contiguous().numpy().data.cast("B"), digest_size=TAG_BYTES // 2)
    return torch.frombuffer(bytearray(bytes.fromhex(identity) + found.digest()), dtype=torch.uint8)


def intact(residues: torch.Tensor, tag: torch.Tensor, identity: str, what: str) -> torch.Tensor:
    """The residues as they were sent.

    Args:
        identity: of the keys that they are expected to be under.
        what: they are, in words, in an error.

    Raises:
        KeyMismatchError: they are under other keys.
        CorruptedCiphertextError: damaged on the way.
    """
    expected = tagged(residues, identity)
    if not torch.equal(tag[: TAG_BYTES // 2], expected[: TAG_BYTES // 2]):
        came = bytes(tag[:4].tolist()).hex()
        raise ckks.KeyMismatchError(f"{what} are under keys {came}, expected were {identity[:8]}")
    if not torch.equal(tag, expected):
        raise CorruptedCiphertextError(
            f"{what} arrived damaged: they do not have the digest that they were sent with; ask for them again"
        )
    return residues


def seal(products: ckks.CKKSTensor, count: int, flood_bits: float) -> torch.Tensor:
    """Aggregate over the batch: products [n C, B] -> B C sums over n samples each, as int64 residues [B, 2C + N].

    A row is the 2C coefficients of the first polynomial and the whole of the second. The ciphertexts are rerandomised
    (a fresh encryption of zero: the second polynomial is then pseudo-random to the owner as well) and flooded by
    2^flood_bits times the error's standard deviation, so that the error, which depends on the sender's weights, is
    hidden. Costs: settles B ciphertexts, B encryptions of zero, B inverse transforms.

    Raises:
        LevelError: they have more than one level left to be rescaled by.
    """
    c = ckks.rerandomise(products, flood_bits=flood_bits).cipher
    if c.level:
        raise ckks.LevelError(f"aggregates are of one prime, and {c.level + 1} are left; multiply at the first level")
    data, q = residues(c), c.primes[0]
    degree = data.shape[3]
    stride = degree // (2 * count)
    constants = transform(degree, q).inverse(data[:, 0, 0].contiguous())[:, ::stride]
    return torch.cat([constants, data[:, 1, 0]], 1)


def unseal(sealed: torch.Tensor, keys: ckks.Keys, factor: float = 1.0) -> torch.Tensor:
    """The aggregates times a public factor, float64 [B C], at the owner of the key."""
    p, context = keys.parameters, keys.public.context
    q, count = p.primes[0], (sealed.shape[1] - p.degree) // 2
    stride = p.degree // (2 * count)
    first = torch.zeros(len(sealed), p.degree, dtype=torch.int64)
    first[:, ::stride] = sealed[:, : 2 * count]
    residues = torch.stack([transform(p.degree, q).forward(first), sealed[:, 2 * count :]], 1).unsqueeze(2)
    plain, rows = sealapi.Plaintext(), []
    for one in residues:
        keys.secret.decryptor.decrypt(context.write(one.contiguous(), p.scales[0]), plain)
        rows.append(torch.from_numpy(np.array(context.parse_plain(plain, 0)[0])))
    message = transform(p.degree, q).inverse(torch.stack(rows))[:, ::stride]
    message = torch.where(message > q // 2, message - q, message).double()
    means = message @ _cosines(count).t() * (factor / p.scales[0])
    return (means * stride).reshape(-1)


def _cosines(count: int) -> torch.Tensor:
    """cos(pi k 3^c / 2C), float64 [C, 2C]: how coefficient k of the polynomial in Y enters group c."""
    powers = torch.tensor([pow(3, c, 4 * count) for c in range(count)])
    angles = powers[:, None] * torch.arange(2 * count) % (4 * count)
    return torch.cos(angles.double() * (math.pi / (2 * count)))


def noise_of(parameters: ckks.Parameters, count: int, flood_bits: float, factor: float = 1.0) -> float:
    """Standard deviation of an aggregate's noise under `flood_bits`: iid Gaussian coefficients of deviation t give the
    group's mean t sqrt(C), and its sum g times that.
    """
    deviation = 2.0**flood_bits * coefficient_error(parameters.degree, TERMS)
    stride = parameters.degree / (2 * count)
    return abs(factor) * stride * math.sqrt(count) * deviation / parameters.scales[0]


def flood_for(parameters: ckks.Parameters, count: int, sigma: float, factor: float, least: float) -> float:
    """The flood_bits with which aggregates carry noise of at least this standard deviation, and of `least` bits."""
    unit = noise_of(parameters, count, 0.0, factor)
    return max(least, math.log2(sigma / unit)) if sigma > 0 else least


# The guard: what P_l, who sees shapes only, refuses by itself, and its record of what it has released.
#
# P_l cannot see how much its answers tell; P_k measures that before it asks (`capride/algorithm.py`), and announces the
# noise it needs. P_l adds it, refuses aggregates over too few samples, and keeps count.


class Guard:
    """What the model of one party, `peer`, has released so far. Counts are never taken back.

    Args:
        released: what was counted before, as `released` was then; that of other parties is left out.
        before_release: called after a release is counted and before anything is computed for it.
    """

    def __init__(
        self,
        peer: str,
        released: Mapping[str, list[int]] | None = None,
        before_release: Callable[[], None] = lambda: None,
    ):
        self.peer, self.before_release = peer, before_release
        self.released = {k: list(v) for k, v in (released or {}).items() if k.startswith(f"{peer}>")}
        """By receiver and version: numbers that were released, and the unknowns of the smallest batch they are of."""

    def release(self, receiver: str, version: str, numbers: int, samples: int, classes: int, how: Settings) -> None:
        """P_l's count, before it computes anything.

        Args:
            version: names the weights of the peer's model; a model that did not change keeps its count.
            samples: that the aggregates are over.

        Raises:
            DisaggregationError: too few samples, or no numbers. What was refused is not counted.
        """
        if numbers < 1 or samples < 1:
            raise DisaggregationError(f"{self.peer} releases no {numbers} numbers over {samples} samples of {receiver}")
        if how.leakage is not None and samples < LEAST_SAMPLES:
            raise DisaggregationError(
                f"{self.peer} releases no aggregate over {samples} samples of {receiver}; at least "
                f"{LEAST_SAMPLES} are needed"
            )
        unknowns = samples * (classes - 1)
        count, least = self.released.get(f"{self.peer}>{receiver}@{version}", [0, unknowns])
        self.released[f"{self.peer}>{receiver}@{version}"] = [count + numbers, min(least, unknowns)]
        self.before_release()


# What each end of an exchange has and does on its own: P_k, who owns the samples and the key, and P_l, its peer.


class Owner:
    """P_k with its keys: encrypts what it publishes, and opens what comes back."""

    def __init__(self, party: Party, layout: Layout, how: Settings):
        self.party, self.layout, self.how = party, layout, how
        p = layout.parameters
        self.keys = ckks.keygen(p.depth, degree=p.degree, scale_bits=p.scale_bits)

    def publish_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The public keys, Enc(x_j) and its tag: one ciphertext for each number of a sample and chunk of samples."""
        # What the last level holds is looked at by `_check_range`, on the answering party's own data.
        each = [spread(x, self.layout.count) for x in self.party.images.split(self.layout.chunk)]
        inputs = _joined([ckks.encrypt(x, self.keys, bound=None).cipher for x in each])
        return self.keys.public.message(), inputs, tagged(inputs, self.keys.public.identity)

    def publish(self, directions: Directions) -> tuple[torch.Tensor, torch.Tensor]:
        """Enc(q_rj) and its tag, with q the predictions p and derivatives of p (`capride/settings.py`)."""
        chunks = directions.weights.split(self.layout.chunk, dim=1)
        found = _joined([encrypt_low(blocks(weights, self.layout.count), self.keys).cipher for weights in chunks])
        return found, tagged(found, self.keys.public.identity)

    def open(self, peer: str, numbers: int, sealed: torch.Tensor, tag: torch.Tensor) -> torch.Tensor:
        """The aggregates, one for each direction: all that is ever decrypted."""
        intact(sealed, tag, self.keys.public.identity, f"the aggregates of {peer}")
        return unseal(sealed, self.keys, 1 / self.how.temperature)[:numbers]


class Peer:
    """P_l with its model in plain, and the count of what it released: answers on ciphertexts of others."""

    def __init__(self, party: Party, how: Settings, guard: Guard):
        self.party, self.how, self.guard = party, how, guard
        self._published: dict[str, tuple[Layout, ckks.PublicKeys, torch.Tensor]] = {}
        self._logits: dict[str, tuple[str, torch.Tensor]] = {}

    def receive(self, owner: str, layout: Layout, keys: torch.Tensor, inputs: torch.Tensor, tag: torch.Tensor) -> None:
        """What `owner` published.

        Raises:
            CorruptedCiphertextError, KeyMismatchError, SerialisationError: it is not what was sent.
        """
        public = ckks.PublicKeys.from_message(layout.parameters, keys)
        self._published[owner] = layout, public, intact(inputs, tag, public.identity, f"{owner}'s inputs")

    def inputs(self, owner: str) -> torch.Tensor:
        """Enc(x_j), as they arrived."""
        return self._published[owner][2]

    def admit(self, owner: str, version: str, numbers: int, samples: int) -> None:
        """The guard, before anything is computed.

        Raises:
            DisaggregationError: more would be released than the guard lets out, or of more samples than there are.
        """
        layout = self._published[owner][0]
        if samples > layout.samples:
            raise DisaggregationError(f"{owner} asks about {samples} samples, and published {layout.samples}")
        self.guard.release(owner, version, numbers, samples, layout.classes, self.how)

    def fitted(self, owner: str, model: nn.Module, size: float) -> nn.Module:
        """The model that answers: with its logits scaled down to the stated size, where there is a limit on leakage.

        Raises:
            DisaggregationError: there is a limit, and no size is stated.
        """
        if self.how.leakage is None:
            return model
        if not size > 0:
            raise DisaggregationError(
                f"{owner} states no size of its logits; under a limit on leakage {self.party.name} answers in that size"
            )
        return fitted(model, self.party.images, size)

    def logits(self, owner: str, model: nn.Module, version: str, inputs: torch.Tensor) -> torch.Tensor:
        """Enc(z_j), reused for all directions while the model stays as it is.

        Raises:
            ModelError: they do not fit the last level, or would tell P_k more than their sums do.
        """
        known = self._logits.get(owner)
        if known is None or known[0] != version:
            _check_range(self.party, model)
            layout, keys, _ = self._published[owner]
            with torch.no_grad():
                net = fold_batchnorms(model).double()
                found = [settle(clear_pending_factor(net(x).cipher)) for x in layout.tensors(inputs, keys, *layout.row)]
            if found[0].levels_left < 1:
                raise ckks.LevelError(f"{self.party.name}'s model leaves no level for the product with the predictions")
            if found[0].factor != 1:
                raise ModelError(
                    f"{self.party.name}'s logits come with a factor of its weights, which P_k would need to decrypt; "
                    f"end the model with nn.Linear"
                )
            self._logits[owner] = known = (version, _joined([prepare_factor(c, 1) for c in found]))
        return known[1]

    def divergence(
        self, owner: str, flood_bits: float, q: torch.Tensor, tag: torch.Tensor, z: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enc(sum_j q_rj . z_j / T), aggregated before it leaves, and its tag."""
        layout, keys, _ = self._published[owner]
        intact(q, tag, keys.identity, f"{owner}'s directions")
        shape = len(q) // len(z), layout.classes
        chunks = zip(layout.tensors(q, keys, *shape), layout.tensors(z, keys, layout.classes), strict=True)
        products = (ckks.inner(part, logits.unsqueeze(1)) / self.how.temperature for part, logits in chunks)
        # The last chunk may be shorter; its missing slots hold nothing.
        sealed = seal(functools.reduce(_added, products), layout.count, flood_bits)
        return sealed, tagged(sealed, keys.identity)


@torch.no_grad()
def fitted(model: nn.Module, images: torch.Tensor, size: float) -> nn.Module:
    """A copy whose logits about their row means are no larger than `size` on the images, as a root mean square over
    samples; the model itself where they are not.

    P_l sees its own images only: on P_k's samples its logits may be larger.
    """
    logits = predict(model, images).double()
    found = float((logits - logits.mean(1, keepdim=True)).norm()) / len(logits) ** 0.5
    if found <= size:
        return model
    smaller = copy.deepcopy(model)
    for weight in head_of(smaller).parameters():
        weight.mul_(size / found)
    return smaller


def _joined(parts: Sequence[Cipher]) -> torch.Tensor:
    """The residues of all chunks together."""
    found = [residues(part) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _added(total: ckks.CKKSTensor, part: ckks.CKKSTensor) -> ckks.CKKSTensor:
    return total + ckks.CKKSTensor(part.cipher, total.batch, part.row_shape, part.float_dtype)


def _check_range(party: Party, model: nn.Module) -> None:
    """P_l looks, on its own data, whether its logits fit the last level; what does not would wrap around."""
    with torch.no_grad():
        largest = float(model(party.images).abs().max())
    limit = 2.0 ** (INTEGER_BITS - 1)
    if not 2 * largest < limit:
        raise ModelError(
            f"{party.name}'s logits reach {largest:.3g} on its own data, too near the {limit:.0f} that a slot of an "
            f"aggregate holds; train with a smaller rate or weight, or scale the last layer down"
        )


PEERS = Roles("Pk Pl", edges="Pk-Pl")
"""P_k owns the samples and the key, P_l has a model. Each party plays Pk to each of its peers, and Pl for each."""


@protocol("capride_publish", "CaPriDe, Algorithm 1, first loop", [
    Message("keys", "Pk", "Pl", "a public key", "P_k's public keys"),
    Message("inputs", "Pk", "Pl", "encrypted"),
    Message("inputs_tag", "Pk", "Pl", "a digest of what is encrypted"),
], roles=PEERS)  # fmt: skip
def publish(net: Net, keys: Located, x: Located, tag: Located) -> tuple[Located, Located, Located]:
    """Publish encrypted data {E(x_j)}, and the keys to compute on them, to one peer: once.

    Rounds 1; bytes: of the keys (`PublicKeys.message_bytes`), of the ciphertexts as words (`Layout.inputs`), 32. P_l
    learns the public keys.
    """
    Pk, Pl = net.Pk, net.Pl
    return keys.send(Pk, Pl, "keys"), x.send(Pk, Pl, "inputs"), tag.send(Pk, Pl, "inputs_tag")


@protocol("capride_announce", "CaPriDe, 3.3, ii", [
    Message("size", "Pk", "Pl", "nothing",
            "how many numbers P_k asks for, of how many samples, under how much noise, and the size of its logits"),
], roles=PEERS)  # fmt: skip
def announce(net: Net, size: Located) -> Located:
    """What P_l's guard looks at before anything is computed, at both: int64 [4], the noise and the size in steps of
    2^-20. Rounds 1, bytes 32."""
    return size.send(net.Pk, net.Pl, "size")


@protocol("capride_divergence", "CaPriDe, Algorithm 1, inner loop; Eq. 12", [
    Message("directions", "Pk", "Pl", "encrypted"),
    Message("directions_tag", "Pk", "Pl", "a digest of what is encrypted"),
    Message("aggregates", "Pl", "Pk", "rerandomised", "sums over a batch: directions of P_k's times P_l's logits / T"),
    Message("aggregates_tag", "Pl", "Pk", "a digest of what is encrypted"),
], roles=PEERS)  # fmt: skip
def pairwise_divergence(
    net: Net, p: Located, tag: Located, x: Located, model: Callable, divergence: Callable, d: Callable
) -> Located:
    """sum_j p_j . z_j / T at P_k, and the same for each derivative of p that is beside it: float64 [R].

    Args:
        p, tag: E(p_j) at P_k. x: E(x_j) at P_l.
        model: M_l, on ciphertexts.
        divergence: E(p_j), its tag and E(z_j) to Eq. 12, sealed, and its tag.
        d: decrypts, at P_k.

    Rounds 2; bytes: of the ciphertexts as words (`Layout.directions`, `Layout.aggregates`), and 32 each way. P_k learns
    the R sums, P_l nothing.
    """
    Pk, Pl = net.Pk, net.Pl
    p, tag = p.send(Pk, Pl, "directions"), tag.send(Pk, Pl, "directions_tag")  # Publish encrypted inferences
    z = compute(model, x)  # Perform inference on encrypted data
    kl, tag = net.fresh(Pl, divergence, p, tag, z)  # Compute pairwise divergence in encrypted domain, Equation 12
    kl, tag = kl.send(Pl, Pk, "aggregates"), tag.send(Pl, Pk, "aggregates_tag")  # Send to participant k
    return compute(d, kl.at(Pk), tag.at(Pk))  # Equation 10


class Exchange:
    """The exchange of whichever parties are in this process, encrypted; `Simulated` computes the same in the clear.

    Args:
        parties: all of them. Of one that is in another process only the name and the shape of its images are used.
        classes: M.
        parameters: of all parties' keys.
        guards: by name, of the parties that are here; new ones unless given.
        traffic: where messages are counted.
        sessions: by owner and peer, with a `PartyRuntime` where the other one is in another process, who runs the
            same exchanges in the same order. All parties are in this process unless given.
    """

    def __init__(
        self,
        parties: Sequence[Party],
        classes: int,
        parameters: ckks.Parameters,
        how: Settings,
        *,
        guards: Mapping[str, Guard] | None = None,
        traffic: Traffic | None = None,
        watch: Watch | None = None,
        sessions: Mapping[tuple[str, str], Session] | None = None,
    ):
        self.how, self.traffic, self.watch = how, traffic or Traffic(), watch or Watch()
        self.parties = {p.name: p for p in parties}
        self.layouts = {p.name: Layout(parameters, len(p.images), tuple(p.images.shape[1:]), classes) for p in parties}
        self.seconds = {"encrypt inputs": 0.0, "encrypt directions": 0.0, "inference": 0.0, "aggregate": 0.0}
        self.counts = dict.fromkeys(self.seconds, 0)
        self.owners: dict[str, Owner] = {}
        self.peers = {p.name: Peer(p, how, (guards or {}).get(p.name) or Guard(p.name)) for p in parties}
        self._sessions, self._given = dict(sessions or {}), sessions is not None
        self._started = False

    def start(self) -> None:
        """Keys, and the encrypted inputs: published once."""
        self.owners.clear()
        if not self._given and not self._sessions:
            with self.traffic:
                self._sessions = {
                    (k, peer): Session(roles=PEERS, names={"Pk": k, "Pl": peer})
                    for k, peer in itertools.permutations(self.parties, 2)
                }
        for k in self.parties:
            tick = self.watch.step(f"{k}: keys and encrypted inputs", 1)
            self._publish(k)
            tick()
        self._started = True

    def _publish(self, k: str) -> None:
        layout = self.layouts[k]
        key_bytes = ckks.PublicKeys.message_bytes(layout.parameters)
        published = _shape(key_bytes, dtype=torch.uint8), _shape(*layout.inputs), _TAG
        for peer, session in self._peers_of(k).items():
            with self.traffic, session.call() as net:
                if session.present(net.Pk) and k not in self.owners:
                    self.owners[k] = Owner(self.parties[k], layout, self.how)
                    published = self._timed("encrypt inputs", self.owners[k].publish_inputs)
                arrived = publish(net, *(net.own(net.Pk, value) for value in published))
                if session.present(net.Pl):
                    self.peers[peer].receive(k, layout, *(net.read(value, net.Pl) for value in arrived))

    def _peers_of(self, k: str) -> dict[str, Session]:
        return {peer: session for (owner, peer), session in self._sessions.items() if owner == k}

    def sigma(self, party: Party, asked: float = 0.0) -> float:
        """Standard deviation of the noise on each aggregate that this party receives: asked for, or of the flooding."""
        layout = self.layouts[party.name]
        return noise_of(layout.parameters, layout.count, self._flood(layout, asked), 1 / self.how.temperature)

    def _flood(self, layout: Layout, asked: float) -> float:
        sigma, factor = max(asked, self.how.sigma or 0.0), 1 / self.how.temperature
        return flood_for(layout.parameters, layout.count, sigma, factor, self.how.flood_bits)

    def ask(
        self,
        round_: int,
        owner: Party,
        directions: Directions | None,
        samples: int,
        models: Mapping[str, nn.Module],
        sigma: float = 0.0,
        sizes: Mapping[str, float] | None = None,
    ) -> dict[str, torch.Tensor]:
        """One party's question to some peers: for each, float64 [R]; its shape only where the owner is elsewhere.

        Args:
            directions: over all of the owner's samples, zero outside of the round's subset; used where the owner is.
            samples: in the subset; used where the owner is.
            models: the asked peers' models, each used where the peer is.
            sigma: deviation of the noise that is asked for; used where the owner is. A peer adds it, or its own
                `Settings.sigma` where that is more.
            sizes: of the owner's logits by peer (`Meter.size`), to which each scales its own down under a limit on
                leakage; used where the owner is.

        Raises:
            DisaggregationError, KeyMismatchError, CorruptedCiphertextError: nothing of the round is kept.
        """
        if not self._started:
            self.start()
        k, published, answers = owner.name, None, {}
        if k in self.owners:
            if directions is None:
                raise ArgumentError(f"{k} is in this process, and its question needs directions")
            published = self._timed("encrypt directions", partial(self.owners[k].publish, directions))
        sessions = self._peers_of(k)
        for peer in (name for name in models if name in sessions):
            question = None
            if directions is not None and published is not None:
                stated = steps_of((sizes or {}).get(peer, 0.0))
                question = torch.tensor([len(directions), samples, steps_of(sigma), stated]), *published
            with self.traffic, sessions[peer].call() as net:
                answers[peer] = self._answer(net, k, peer, question, models[peer])
            self.watch.note(f"encrypted part: {self.pace():.1f} s an answer")
        return answers

    def _answer(self, net: Net, k: str, name: str, question: tuple | None, model: nn.Module) -> torch.Tensor:
        """What participant k gets of one other: at least one of them is here."""
        layout, peer, here = self.layouts[k], self.peers[name], self._sessions[k, name].present(net.Pl)
        size = announce(net, net.own(net.Pk, _shape(4) if question is None else question[0]))
        numbers, samples, noise, stated = net.read(size, net.Pl if here else net.Pk).tolist()
        x, version = _shape(*layout.inputs), ""
        if here:
            x = peer.inputs(k)
            peer.admit(k, digest(*model.state_dict().values()), numbers, samples)
            model = peer.fitted(k, model, stated * STEP)
            version = digest(*model.state_dict().values())
        p, tag = (_shape(*layout.directions(numbers)), _TAG) if question is None else question[1:]
        infer = partial(peer.logits, k, model, version)
        aggregate = partial(peer.divergence, k, self._flood(layout, max(0, noise) * STEP))
        decrypt = partial(self.owners[k].open, name, numbers) if k in self.owners else _nobody
        found = pairwise_divergence(
            net,
            net.own(net.Pk, p),
            net.own(net.Pk, tag),
            net.own(net.Pl, x),
            _step(partial(self._timed, "inference", infer), _shape(*layout.logits)),
            _step(partial(self._timed, "aggregate", aggregate), (_shape(*layout.aggregates(numbers)), _TAG)),
            _step(decrypt, _shape(numbers, dtype=torch.float64)),
        )
        return net.read(found, net.Pk)

    def pace(self) -> float:
        """Seconds for one party's question to one peer, as measured so far."""
        done = max(1, self.counts["aggregate"])
        return sum(self.seconds[k] for k in ("encrypt directions", "inference", "aggregate")) / done

    def _timed(self, what: str, call: Callable, *values: torch.Tensor):
        start = time.perf_counter()
        result = call(*values)
        self.seconds[what] += time.perf_counter() - start
        self.counts[what] += 1
        return result


STEP = 2.0**-20
"""Noise and sizes are announced in so large steps."""


def steps_of(value: float) -> int:
    """Of an announced number, rounded up."""
    return math.ceil(value / STEP)


def _shape(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """What is known of a value by whoever does not hold it."""
    return torch.empty(shape, dtype=dtype, device="meta")


_TAG = _shape(TAG_BYTES, dtype=torch.uint8)


def _nobody(*_: torch.Tensor) -> NoReturn:
    raise MisplacedValueError("only the owner decrypts what its peers aggregate")


def _step(f: Callable, result: torch.Tensor | tuple[torch.Tensor, ...]) -> Callable:
    """f as a step of a choreography, whose result is of a public shape for whoever does not compute it."""

    @with_shapes(lambda *_: result)
    def step(*values: torch.Tensor):
        return f(*values)

    return step


class Simulated(Exchange):
    """The same aggregates in the clear, with the noise asked for and without the flooding. Protects nothing."""

    def sigma(self, party: Party, asked: float = 0.0) -> float:
        return max(asked, self.how.sigma or 0.0)

    def ask(
        self,
        round_: int,
        owner: Party,
        directions: Directions | None,
        samples: int,
        models: Mapping[str, nn.Module],
        sigma: float = 0.0,
        sizes: Mapping[str, float] | None = None,
    ) -> dict[str, torch.Tensor]:
        if directions is None:
            raise ArgumentError("a simulation has all parties, and the owner's directions")
        answers, classes = {}, directions.weights.shape[2]
        for name, model in models.items():
            guard = self.peers[name].guard
            guard.release(owner.name, digest(*model.state_dict().values()), len(directions), samples, classes, self.how)
            answering = self.peers[name].fitted(owner.name, model, (sizes or {}).get(name, 0.0))
            released = directions.on(predict(answering, owner.images), self.how.temperature)
            draw = generator(self.how.seed, owner.name, name, round_, "noise")
            noise = self.sigma(owner, sigma) * torch.randn(len(released), generator=draw, dtype=torch.float64)
            answers[name] = released + noise
        return answers
