"""What each end of an exchange has and does on its own: P_k, who owns the samples and the key, and P_l, its peer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import nn

from ... import ckks
from ...ckks.scheme.cipher import Cipher
from ...ckks.scheme.leaving import cleared, residues
from ...ckks.scheme.levels import settle
from ...ckks.scheme.multiply import prepared
from ...ckks.scheme.parameters import INTEGER_BITS
from ...federated.training import predict
from ...nn.fhe import folded
from .aggregate import Layout, blocks, encrypt_low, intact, seal, spread, tagged, unseal
from .directions import Directions, head_of
from .errors import DisaggregationError, ModelError
from .guard import Guard
from .settings import Party, Settings


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
        """Enc(q_rj) and its tag, with q the predictions p and derivatives of p (`directions.py`)."""
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
                net = folded(model).double()
                found = [settle(cleared(net(x).cipher)) for x in layout.tensors(inputs, keys, *layout.row)]
            if found[0].left < 1:
                raise ckks.LevelError(f"{self.party.name}'s model leaves no level for the product with the predictions")
            if found[0].factor != 1:
                raise ModelError(
                    f"{self.party.name}'s logits come with a factor of its weights, which P_k would need to decrypt; "
                    f"end the model with nn.Linear"
                )
            self._logits[owner] = known = (version, _joined([prepared(c, 1) for c in found]))
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
