"""What travels between P_k, who owns the samples, and P_l, its peer: Algorithm 1's exchange, and the same in the clear.

The protocols are read beside Algorithm 1 and Figure 1. `Exchange` runs them for the parties that are in this process:
all of them, or one.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import InitVar, dataclass
from functools import partial

import torch
from torch import nn

from ... import ckks
from ...choreography import Located, Message, Net, Roles, protocol
from ...ckks.scheme.seal import INTEGER_BITS
from ...ckks.tensor.ckks_tensor import blank_encryption
from ...data.seeds import generator
from ...errors import ArgumentError
from ...federated.folder import RunFolder, digest
from ...federated.parties import Parties, Simulation
from ...federated.training import predict
from ...nn.fhe import fold_batchnorms
from ...session import Session
from .settings import LEAST_SAMPLES, Directions, DisaggregationError, ModelError, Party, Settings, head_of
from .training import Meter, Question

PEERS = Roles("Pk Pl", edges="Pk-Pl")
"""P_k owns the samples and the key, P_l has a model. Each party plays Pk to each of its peers, and Pl for each."""

Ciphertexts = list[ckks.LocatedCKKSTensor]
"""One for each chunk of samples."""


@protocol("capride_publish", "CaPriDe, Algorithm 1, first loop", [
    Message("keys", "Pk", "Pl", "a public key", "P_k's public keys"),
    *ckks.ciphertext_messages("inputs", "Pk", "Pl", "encrypted"),
], roles=PEERS)  # fmt: skip
def publish(net: Net, keys: ckks.LocatedKeys, x: Ciphertexts) -> Ciphertexts:
    """Publish encrypted data {E(x_j)}, and the keys to compute on them, to one peer: once.

    Rounds 1; bytes: of the keys (`PublicKeys.message_bytes`), of the ciphertexts as words, and 32. P_l learns the
    public keys.
    """
    keys.to(net.Pl, "keys")
    return [part.to(net.Pl, "inputs", f"{net.Pk}'s inputs") for part in x]


@protocol("capride_announce", "CaPriDe, 3.3, ii", [
    Message("size", "Pk", "Pl", "nothing",
            "how many numbers P_k asks for, of how many samples, under how much noise, and the size of its logits"),
], roles=PEERS)  # fmt: skip
def announce(net: Net, size: Located) -> Located:
    """What P_l's ledger looks at before anything is computed, at both: int64 [4], the noise and the size in steps of
    2^-20. Rounds 1, bytes 32."""
    return size.send(net.Pk, net.Pl, "size")


@protocol("capride_divergence", "CaPriDe, Algorithm 1, inner loop; Eq. 12", [
    *ckks.ciphertext_messages("directions", "Pk", "Pl", "encrypted"),
    *ckks.ciphertext_messages("aggregates", "Pl", "Pk", "rerandomised",
                              "sums over a batch: directions of P_k's times P_l's logits / T"),
], roles=PEERS)  # fmt: skip
def pairwise_divergence(
    net: Net, p: Ciphertexts, x: Ciphertexts, model: nn.Module, T: float, groups: int, flood_bits: float
) -> Located:
    """sum_j p_j . z_j / T at P_k, and the same for each derivative of p that is beside it: float64 [B, C].

    Args:
        p: E(p_j) at P_k: B ciphertexts of C directions for each class. x: E(x_j) at P_l.
        model: M_l; at P_k its architecture.
        groups: C.

    Rounds 2; bytes: of the ciphertexts as words, and 32 each way. P_k learns the sums, P_l nothing.
    """
    p = [part.to(net.Pl, "directions", f"{net.Pk}'s directions") for part in p]  # Publish encrypted inferences
    z = [part.apply(model).smallest_form() for part in x]  # Perform inference on encrypted data
    kl = [(p_j * z_j.unsqueeze(1)).sum(2) / T for p_j, z_j in zip(p, z, strict=True)]  # Equation 12
    total = functools.reduce(operator.add, kl).sum(0, groups=groups)
    what = f"the aggregates of {net.Pl}"
    return total.decrypt_at(net.Pk, "aggregates", flood_bits=flood_bits, what=what)  # Send to participant k; d(.)


def copies(samples: int, slots: int) -> int:
    """C: how often a batch is laid into the slots. A power of two, at least 1."""
    return 1 << max(0, (slots // samples).bit_length() - 1)


def blocks(directions: torch.Tensor, count: int) -> torch.Tensor:
    """Directions [R, n, M] -> [n C, B, M] with B = ceil(R / C): copy c of a sample meets the directions b C + c."""
    missing = -len(directions) % count
    padded = torch.cat([directions, directions.new_zeros(missing, *directions.shape[1:])])
    blocked = padded.unflatten(0, (-1, count)).permute(2, 1, 0, 3)
    return blocked.reshape(-1, blocked.shape[2], blocked.shape[3])


@dataclass(frozen=True)
class Layout:
    """How a party's n samples and what is asked about them lie in ciphertexts. Public, and the same at both ends.

    A sample lies in C slots in a row, with C the largest power of two that fits: encrypted inference costs the same for
    all slots, and each ciphertext then carries C aggregates, one for each group of slots (`ckks.sum_batch`).

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
        """Samples of one ciphertext; the last chunk is filled up with zeros."""
        return min(self.samples, self.parameters.slots // self.count)

    def blocks(self, numbers: int) -> int:
        """B, ciphertexts of so many aggregates."""
        return -(-numbers // self.count)

    def inputs(self, images: torch.Tensor, keys: ckks.Keys | None = None) -> list[ckks.CKKSTensor]:
        """Enc(x): one ciphertext for each number of a sample and chunk. Without keys only their form."""
        # What the last level holds is looked at by `Peer.answering`, on the answering party's own data.
        return self._encrypted([x.repeat_interleave(self.count, dim=0) for x in self._chunks(images, 0)], keys, None)

    def directions(self, weights: torch.Tensor, keys: ckks.Keys | None = None) -> list[ckks.CKKSTensor]:
        """Enc(q) of weights [R, n, M]: M B ciphertexts for each chunk, of the two primes of an inner product."""
        return self._encrypted([blocks(part, self.count) for part in self._chunks(weights, 1)], keys, 1)

    def _chunks(self, x: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
        lacking = -x.shape[dim] % self.chunk
        shape = (*x.shape[:dim], lacking, *x.shape[dim + 1 :])
        return (torch.cat([x, x.new_zeros(shape)], dim) if lacking else x).split(self.chunk, dim)

    def _encrypted(self, parts: list[torch.Tensor], keys: ckks.Keys | None, level: int | None) -> list[ckks.CKKSTensor]:
        if keys is None:
            return [blank_encryption(part, self.parameters, None, level) for part in parts]
        return [ckks.encrypt(part, keys, bound=None, level=level) for part in parts]


class Owner:
    """P_k with its keys: encrypts what it publishes, the same for all peers."""

    def __init__(self, party: Party, layout: Layout):
        self.party, self.layout = party, layout
        self.inputs: list[ckks.CKKSTensor] = []
        p = layout.parameters
        self.keys = ckks.keygen(p.depth, degree=p.degree, scale_bits=p.scale_bits)

    def publish_inputs(self) -> None:
        """Encrypt {E(x_j)}."""
        self.inputs = self.layout.inputs(self.party.images, self.keys)

    def publish(self, directions: Directions) -> list[ckks.CKKSTensor]:
        """{E(q_rj)}, with q the predictions p and derivatives of p (`capride/settings.py`)."""
        return self.layout.directions(directions.weights, self.keys)


class Logits(nn.Module):
    """A model with BatchNorm folded, in float64, and the seconds of its calls: what P_l evaluates on ciphertexts."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.seconds = fold_batchnorms(model).double(), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        z = self.model(x)
        self.seconds += time.perf_counter() - start
        return z


class Peer:
    """P_l with its model in plain, and the ledger of what it released."""

    def __init__(self, party: Party, how: Settings, ledger: ckks.ReleaseLedger):
        self.party, self.how, self.ledger = party, how, ledger
        ledger.least_samples = 1 if how.leakage is None else LEAST_SAMPLES

    def admit(self, owner: str, layout: Layout, model: nn.Module, numbers: int, samples: int) -> None:
        """The ledger's count, before anything is computed; a model that did not change keeps its count.

        Raises:
            DisaggregationError: more would be released than P_l lets out, or of more samples than there are.
        """
        if samples > layout.samples:
            raise DisaggregationError(f"{owner} asks about {samples} samples, and published {layout.samples}")
        self.ledger.release(owner, digest(*model.state_dict().values()), numbers, samples, layout.classes - 1)

    def answering(self, owner: str, model: nn.Module, size: float) -> nn.Module:
        """The model that answers: with its logits scaled down to the stated size, where there is a limit on leakage.

        Raises:
            DisaggregationError: there is a limit, and no size is stated.
            ModelError: logits on P_l's own data that do not fit the last level: what does not would wrap around.
        """
        if self.how.leakage is not None:
            if not size > 0:
                raise DisaggregationError(
                    f"{owner} states no size of its logits; under a limit on leakage {self.party.name} answers in that "
                    f"size"
                )
            model = fitted(model, self.party.images, size)
        with torch.no_grad():
            largest, limit = float(model(self.party.images).abs().max()), 2.0 ** (INTEGER_BITS - 1)
        if not 2 * largest < limit:
            raise ModelError(
                f"{self.party.name}'s logits reach {largest:.3g} on its own data, too near the {limit:.0f} that a slot "
                f"of an aggregate holds; train with a smaller rate or weight, or scale the last layer down"
            )
        return model


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


@dataclass(eq=False)
class Exchange:
    """The exchange of whichever parties are in this process, encrypted; `Simulated` computes the same in the clear.

    What was released, and what was asked, is counted in a folder before anything is sent, and never taken back. Keys,
    sessions and published inputs live as long as this object, which is closed as a context manager.

    Args:
        parties: all of them. Of one that is in another process the name, the shape of its images and the architecture
            are used.
        classes: M.
        parameters: of all parties' keys.
        together: where the parties are; all in this process unless given.
        folder: of the counts.
    """

    parties: InitVar[Sequence[Party]]
    classes: int
    parameters: ckks.Parameters
    how: Settings
    together: InitVar[Parties | None] = None
    folder: InitVar[RunFolder | None] = None

    def __post_init__(self, parties: Sequence[Party], together: Parties | None, folder: RunFolder | None) -> None:
        self.people, self._together = {p.name: p for p in parties}, together or Simulation()
        shape = lambda p: (len(p.images), tuple(p.images.shape[1:]), self.classes)
        self.layouts = {p.name: Layout(self.parameters, *shape(p)) for p in parties}
        self._folder, self._open = folder or RunFolder(None), ExitStack()
        kept, keep = self._folder.record("released"), self._keep_counts
        self.peers = {p.name: Peer(p, self.how, ckks.ReleaseLedger(p.name, kept, keep)) for p in parties}
        self.known: dict[str, torch.Tensor] = self._folder.tensors("asked") or {}
        """By "peer>owner": the information in all answers that were asked for (`Meter.known`)."""
        self.owners: dict[str, Owner] = {}
        self._published: dict[tuple[str, str], tuple[Session, ckks.LocatedKeys, Ciphertexts]] = {}
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        """End the sessions. Keys and ciphertexts are gone."""
        self._open.close()
        self._published.clear()
        self.owners.clear()

    @property
    def released(self) -> dict[str, list[int]]:
        """The counts of the parties that are here; see `ckks.ReleaseLedger`."""
        return {place: count for peer in self.peers.values() for place, count in peer.ledger.released.items()}

    def _keep_counts(self) -> None:
        self._folder.keep("released", record=self.released)

    def spent(self) -> dict[str, float]:
        """Seconds by kind of work, since the last call."""
        found, self._seconds = self._seconds, {}
        return found

    def _link(self, k: str, peer: str) -> tuple[Session, ckks.LocatedKeys, Ciphertexts]:
        """The session of an owner and a peer, and what the owner has published there: once."""
        if (k, peer) not in self._published:
            layout, party = self.layouts[k], self.people[k]
            label = f"capride {k} {peer}"
            opened = self._together.session(PEERS, {"Pk": k, "Pl": peer}, label=label, agreed=str(self.how))
            session = self._open.enter_context(opened)
            with session.call() as net:
                if session.present(net.Pk) and k not in self.owners:
                    self.owners[k] = Owner(party, layout)
                    self._timed("encrypt inputs", self.owners[k].publish_inputs)
                own = self.owners.get(k)
                x = own.inputs if own else layout.inputs(party.images.to("meta"))
                keys = ckks.LocatedKeys(net, net.Pk, layout.parameters, own.keys if own else None)
                found = publish(net, keys, [keys.bring(net.Pk, part) for part in x])
            self._published[k, peer] = session, keys, found
        return self._published[k, peer]

    def measure(
        self, t: int, k: str, question: Question, published: Directions, peers: Sequence[str]
    ) -> tuple[dict[str, Meter], float, dict[str, float]]:
        """The meters of these peers, the noise that a question needs, and what each peer's answers will have told.

        It is counted before it is asked.

        Raises:
            DisaggregationError: the answers would tell more than `Settings.leakage`.
        """
        how, needed = self.how, [self.how.sigma or 0.0]
        meters = {peer: question.meters.get(peer) or Meter(*question.view, peer) for peer in peers}
        asked = {peer: meter.told(published, how.temperature) for peer, meter in meters.items()}
        for peer, meter in meters.items():
            meter.known = self.known.get(f"{peer}>{k}", meter.known)
            if how.sigma is None and how.leakage is not None:
                # The rounds to come will ask much the same; what this one may tell is its share of what is left.
                needed.append(meter.sigma_for(asked[peer], how.leakage, how.rounds - t + 1))
        noise = self.sigma(self.people[k], max(needed))
        told = {peer: meter.spend(k, asked[peer], noise, how.leakage) for peer, meter in meters.items()}
        self.known |= {f"{peer}>{k}": meter.known for peer, meter in meters.items()}
        self._folder.keep("asked", self.known)
        return meters, max(needed), told

    def sigma(self, party: Party, asked: float = 0.0) -> float:
        """Standard deviation of the noise on each aggregate that this party receives: asked for, or of the flooding."""
        layout = self.layouts[party.name]
        return ckks.sum_noise(layout.parameters, layout.count, self._flood(layout, asked), 1 / self.how.temperature)

    def _flood(self, layout: Layout, asked: float) -> float:
        sigma, factor = max(asked, self.how.sigma or 0.0), 1 / self.how.temperature
        return ckks.flood_bits_for(layout.parameters, layout.count, sigma, factor, self.how.flood_bits)

    def ask(
        self, round_: int, owner: Party, directions: Directions | None, samples: int, models: Mapping[str, nn.Module],
        sigma: float = 0.0, sizes: Mapping[str, float] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """One party's question to some peers: for each, float64 [R]; its shape only where the owner is elsewhere.

        Args:
            directions: over all of the owner's samples, zero outside of the round's subset; used where the owner is.
            samples: in the subset; used where the owner is.
            models: the asked peers' models, each used where the peer is; of another its architecture.
            sigma: deviation of the noise that is asked for; used where the owner is. A peer adds it, or its own
                `Settings.sigma` where that is more.
            sizes: of the owner's logits by peer (`Meter.size`), to which each scales its own down under a limit on
                leakage; used where the owner is.

        Raises:
            DisaggregationError, KeyMismatchError, CorruptedCiphertextError: nothing of the round is kept.
        """
        k, published, answers = owner.name, None, {}
        here = self._together.present(k)
        if here and directions is None:
            raise ArgumentError(f"{k} is in this process, and its question needs directions")
        for peer in (name for name in models if here or self._together.present(name)):
            question, link = None, self._link(k, peer)
            if directions is not None and k in self.owners:
                if published is None:
                    published = self._timed("encrypt directions", partial(self.owners[k].publish, directions))
                stated = steps_of((sizes or {}).get(peer, 0.0))
                question = torch.tensor([len(directions), samples, steps_of(sigma), stated]), published
            with link[0].call() as net:
                answers[peer] = self._answer(net, k, peer, *link, question, models[peer])
        return answers

    def _answer(
        self, net: Net, k: str, name: str, session: Session, keys: ckks.LocatedKeys, x: Ciphertexts,
        question: tuple | None, model: nn.Module,
    ) -> torch.Tensor:  # fmt: skip
        """What participant k gets of one other: at least one of them is here."""
        layout, peer = self.layouts[k], self.peers[name]
        announced = torch.empty(4, dtype=torch.int64, device="meta") if question is None else question[0]
        size = net.agreed(announce(net, net.own(net.Pk, announced)), (net.Pk, net.Pl))
        numbers, samples, noise, stated = size.tolist()
        if session.present(net.Pl):
            peer.admit(k, layout, model, numbers, samples)
            model = peer.answering(k, model, stated * STEP)
        blank = torch.empty(numbers, layout.samples, layout.classes, device="meta")
        q = layout.directions(blank) if question is None else question[1]
        start, logits = time.perf_counter(), Logits(model)
        found = pairwise_divergence(
            net, [keys.bring(net.Pk, part) for part in q], x, logits, self.how.temperature, layout.count,
            self._flood(layout, max(0, noise) * STEP),
        )  # fmt: skip
        self._spend("inference", logits.seconds)
        self._spend("aggregate", time.perf_counter() - start - logits.seconds)
        return net.read(found, net.Pk).reshape(-1)[:numbers]

    def _timed(self, what: str, call: Callable):
        start = time.perf_counter()
        result = call()
        self._spend(what, time.perf_counter() - start)
        return result

    def _spend(self, what: str, seconds: float) -> None:
        self._seconds[what] = self._seconds.get(what, 0.0) + seconds


STEP = 2.0**-20
"""Noise and sizes are announced in so large steps."""


def steps_of(value: float) -> int:
    """Of an announced number, rounded up."""
    return math.ceil(value / STEP)


class Simulated(Exchange):
    """The same aggregates in the clear, with the noise asked for and without the flooding. Protects nothing."""

    def sigma(self, party: Party, asked: float = 0.0) -> float:
        return max(asked, self.how.sigma or 0.0)

    def ask(
        self, round_: int, owner: Party, directions: Directions | None, samples: int, models: Mapping[str, nn.Module],
        sigma: float = 0.0, sizes: Mapping[str, float] | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        if directions is None:
            raise ArgumentError("a simulation has all parties, and the owner's directions")
        answers = {}
        for name, model in models.items():
            peer, layout = self.peers[name], self.layouts[owner.name]
            peer.admit(owner.name, layout, model, len(directions), samples)
            answering = peer.answering(owner.name, model, (sizes or {}).get(name, 0.0))
            released = directions.on(predict(answering, owner.images), self.how.temperature)
            draw = generator(self.how.seed, owner.name, name, round_, "noise")
            noise = self.sigma(owner, sigma) * torch.randn(len(released), generator=draw, dtype=torch.float64)
            answers[name] = released + noise
        return answers
