"""What travels between the parties in a round, and who computes what: Algorithm 1's inner loop.

    P_k -> peers   once: Enc(x_j), and the public and relinearisation keys
    P_k -> peers   each round: Enc(q_rj), with q the predictions p and derivatives of p (`directions.py`)
    P_l -> P_k     Enc(sum_j q_rj . z_j / T), sealed (`aggregate.py`), with z_j = M_l(Enc(x_j))
    P_k            decrypts these, and nothing else

Each object below stands for one party and holds only what that party holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ... import ckks
from ...data.seeds import generator
from .aggregate import Published, Sealed, blocks, encrypt_low, flood_for, noise_of, seal, spread, unseal
from .checkpoint import weights_digest
from .directions import Directions
from .errors import ModelError
from .ledger import Ledger, check_spread
from .settings import Party, Settings, layout
from .watch import Watch


class Owner:
    """P_k with its keys: publishes, and opens what comes back."""

    def __init__(self, party: Party, parameters: ckks.Parameters, how: Settings):
        self.party, self.how = party, how
        p = parameters
        self.keys = ckks.keygen(p.depth, degree=p.degree, scale_bits=p.scale_bits)
        self.count = layout(self.keys.parameters, len(party.images))
        self.chunk = p.slots // self.count
        self.inputs: Published | None = None

    def publish_inputs(self) -> Published:
        """Enc(x_j), once: one ciphertext for each number of a sample and chunk of samples."""
        if self.inputs is None:
            chunks = self.party.images.split(self.chunk)
            # What the last level holds is looked at by `_check_range`, on the answering party's own data.
            parts = [ckks.encrypt(spread(x, self.count), self.keys, bound=None) for x in chunks]
            self.inputs = Published.of(self.party.name, "inputs", parts)
        return self.inputs

    def publish(self, directions: Directions) -> Published:
        """Enc(q_rj): M ciphertexts for each C directions and chunk, of the two primes that an inner product needs."""
        check_spread(self.party.name, directions, self.how)
        chunks = directions.weights.split(self.chunk, dim=1)
        parts = [encrypt_low(blocks(weights, self.count), self.keys) for weights in chunks]
        return Published.of(self.party.name, "directions", parts)

    def open(self, sealed: Sealed, directions: Directions) -> torch.Tensor:
        """The aggregates, one for each direction: all that is ever decrypted."""
        return unseal(sealed, self.keys)[: len(directions)]


class Peer:
    """P_l with its model in plain: answers on ciphertexts of others."""

    def __init__(self, party: Party, how: Settings):
        self.party, self.how = party, how
        self._logits: dict[str, tuple[str, list[ckks.CKKSTensor]]] = {}

    def logits(self, model: nn.Module, version: str, inputs: Published) -> list[ckks.CKKSTensor]:
        """Enc(z_j), reused for all directions while the model stays as it is."""
        known = self._logits.get(inputs.owner)
        if known is None or known[0] != version:
            _check_range(self.party, model)
            with torch.no_grad():
                found = [model(part).settled() for part in inputs.checked()]
            self._logits[inputs.owner] = known = (version, found)
        return known[1]

    def answer(self, logits: Iterable[ckks.CKKSTensor], published: Published, count: int, flood_bits: float) -> Sealed:
        """Enc(sum_j q_rj . z_j / T): aggregated before it leaves."""
        total = None
        for q, z in zip(published.checked(), logits, strict=True):
            product = ckks.inner(q, z.unsqueeze(1)) / self.how.temperature
            # The last chunk may be shorter; its missing slots hold nothing.
            total = product if total is None else _added(total, product)
        return seal(total, count, self.party.name, flood_bits)


def _added(total: ckks.CKKSTensor, part: ckks.CKKSTensor) -> ckks.CKKSTensor:
    return total + ckks.CKKSTensor(part.cipher, total.batch, part.row_shape, part.float_dtype)


def _check_range(party: Party, model: nn.Module) -> None:
    """P_l looks, on its own data, whether its logits fit the last level; what does not would wrap around."""
    with torch.no_grad():
        largest = float(model(party.images).abs().max())
    limit = 2.0 ** (ckks.parameters.INTEGER_BITS - 1)
    if not 2 * largest < limit:
        raise ModelError(
            f"{party.name}'s logits reach {largest:.3g} on its own data, too near the {limit:.0f} that a slot of an "
            f"aggregate holds; train with a smaller rate or weight, or scale the last layer down"
        )


class Exchange:
    """All parties' exchange in one process, encrypted; `Simulated` computes the same in the clear."""

    def __init__(self, parties: list[Party], parameters: ckks.Parameters, how: Settings, ledger: Ledger, watch: Watch):
        self.parties, self.parameters = {p.name: p for p in parties}, parameters
        self.how, self.ledger, self.watch = how, ledger, watch
        self.seconds = {"encrypt inputs": 0.0, "encrypt directions": 0.0, "inference": 0.0, "aggregate": 0.0}
        self.counts = dict.fromkeys(self.seconds, 0)
        self.owners: dict[str, Owner] = {}
        self.peers = {p.name: Peer(p, how) for p in parties}

    def start(self) -> None:
        """Keys, and the encrypted inputs: published once."""
        for party in self.parties.values():
            tick = self.watch.step(f"{party.name}: keys and encrypted inputs", 1)
            owner = self.owners[party.name] = Owner(party, self.parameters, self.how)
            inputs = self._timed("encrypt inputs", owner.publish_inputs)
            for peer in self.parties:
                if peer != party.name:
                    self.ledger.message(0, party.name, peer, "public keys", owner.keys.public.nbytes, "public")
                    self.ledger.message(0, party.name, peer, "inputs", inputs.nbytes, f"{party.name}'s secret key")
            tick()

    def sigma(self, party: Party) -> float:
        """Standard deviation of the noise on each aggregate that this party receives: asked for, or of the flooding."""
        count = layout(self.parameters, len(party.images))
        return noise_of(self.parameters, count, self._flood(count), 1 / self.how.temperature)

    def _flood(self, count: int) -> float:
        return flood_for(self.parameters, count, self.how.sigma, 1 / self.how.temperature, self.how.flood_bits)

    def ask(
        self, round_: int, owner: Party, directions: Directions, samples: int, models: Mapping[str, nn.Module]
    ) -> dict[str, torch.Tensor]:
        """One party's question to some peers: for each, float64 [R].

        Args:
            directions: over all of the owner's samples, zero outside of the round's subset.
            samples: in the subset.
            models: the asked peers' models.

        Raises:
            DisaggregationError, KeyMismatchError, CorruptedCiphertextError: nothing of the round is kept.
        """
        if not self.owners:
            self.start()
        me, classes = self.owners[owner.name], directions.weights.shape[2]
        published = self._timed("encrypt directions", lambda: me.publish(directions))
        answers = {}
        for name, model in models.items():
            version = weights_digest(model)
            self.ledger.message(round_, owner.name, name, "directions", published.nbytes, f"{owner.name}'s secret key")
            self.ledger.release(name, owner.name, version, len(directions), samples, classes, self.how)
            peer = self.peers[name]
            logits = self._timed("inference", lambda p=peer, m=model, v=version: p.logits(m, v, me.publish_inputs()))
            sealed = self._timed(
                "aggregate", lambda p=peer, z=logits: p.answer(z, published, me.count, self._flood(me.count))
            )
            self.ledger.message(round_, name, owner.name, "aggregates", sealed.nbytes, f"{owner.name}'s secret key")
            answers[name] = me.open(sealed, directions)
            self.ledger.decrypted(round_, name, owner.name, len(directions))
            self.watch.encrypted(self.pace())
        return answers

    def pace(self) -> float:
        """Seconds for one party's question to one peer, as measured so far."""
        done = max(1, self.counts["aggregate"])
        return sum(self.seconds[k] for k in ("encrypt directions", "inference", "aggregate")) / done

    def _timed(self, what: str, call):
        start = time.perf_counter()
        result = call()
        self.seconds[what] += time.perf_counter() - start
        self.counts[what] += 1
        return result


class Simulated(Exchange):
    """The same aggregates in the clear, with the noise asked for and without the flooding. Protects nothing."""

    def start(self) -> None:
        return

    def sigma(self, party: Party) -> float:
        return self.how.sigma

    def ask(
        self, round_: int, owner: Party, directions: Directions, samples: int, models: Mapping[str, nn.Module]
    ) -> dict[str, torch.Tensor]:
        answers = {}
        for name, model in models.items():
            version, classes = weights_digest(model), directions.weights.shape[2]
            self.ledger.release(name, owner.name, version, len(directions), samples, classes, self.how)
            with torch.no_grad():
                released = directions.on(model(owner.images), self.how.temperature)
            draw = generator(self.how.seed, owner.name, name, round_, "noise")
            noise = self.how.sigma * torch.randn(len(released), generator=draw, dtype=torch.float64)
            answers[name] = released + noise
            self.ledger.decrypted(round_, name, owner.name, len(directions))
        return answers
