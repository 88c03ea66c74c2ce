"""What travels between P_k, who owns the samples, and P_l, its peer, and who computes what: Algorithm 1's exchange.

The protocols are read beside Algorithm 1 and Figure 1; what P_k and P_l compute on their own is in `parties.py`.
`Exchange` runs the protocols for the parties that are in this process: all of them, or one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from ... import ckks
from ...choreography import Located, Message, Net, Roles, protocol, shaped
from ...choreography.located import compute
from ...data.seeds import generator
from ...errors import ArgumentError, MisplacedValueError
from ...federated.folder import digest
from ...federated.training import predict
from ...federated.watch import Watch
from ...session import Session
from .aggregate import TAG_BYTES, Layout, flood_for, noise_of
from .directions import Directions
from .guard import Guard
from .parties import Owner, Peer
from .settings import Party, Settings
from .traffic import Traffic

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
        divergence: E(p_j), its tag and E(z_j) to Eq. 12, sealed (`aggregate.py`), and its tag.
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

    @shaped(lambda *_: result)
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
