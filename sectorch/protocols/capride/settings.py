"""The parties and settings of a run, and every check that can be made before anything is trained or encrypted."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call, jvp, vmap

from ... import ckks
from ...ckks import DisaggregationError as DisaggregationError
from ...errors import CorruptedCiphertextError as CorruptedCiphertextError
from ...errors import FederationError, SectorchError
from ...federated.command import Options, option
from ...federated.folder import digest
from ...federated.participants import Participant, Samples, check_federation
from ...federated.training import OPTIMIZERS, Training
from ...nn.fhe import fold_batchnorms
from ...nn.symbolic_trace import calls_of

# What can be wrong with a CaPriDe run. None of it changes a model: a round is kept only when all of it went well.


class ModelError(FederationError):
    """A model that cannot be evaluated under encryption, or whose chain of levels is too short.

    Example:
        the model has no linear layer, so it has no classifier head; end it with nn.Linear

    What to do:
        End the model with one `nn.Linear`, keep its logits small (a smaller rate, weight decay), or make keys with one
        more level.
    """


# What P_k publishes beside its predictions: derivatives of its own predictions along directions.
#
# L~ = sum_j p_j . z_j / T (Eq. 12) is linear in p. Along a direction v of P_k's parameters its derivative is sum_j
# (dp_j/dtheta v) . z_j / T: the same aggregate, with dp_j/dtheta v in the place of p_j. dp is P_k's own, in plain at
# P_k, so P_k can publish it encrypted and get the directional derivative of its loss back, one number over the whole
# batch.
#
# **Head.** With logits u = W h, the derivative along the matrix c v^T is (diag p - p p^T) c (h . v) / T. The gradient
# of L~ with respect to W lies in the span of c v^T with c orthogonal to the all-ones vector (a shift of the logits
# changes no p) and v in the row space of the features H = U S V^T. An orthonormal basis of it, M - 1 contrasts c times
# the right singular vectors v, therefore gives the whole gradient from (M - 1) rank(H) numbers and not from M (d + 1).
#
# **Deep layers.** For random v with E[v v^T] = 1, (dL~/dtheta . v) v is an unbiased estimate of the gradient (forward
# gradient; Baydin et al., 2022). D directions are drawn orthogonal to each other, which keeps it unbiased and lowers
# the variance. Their derivatives are forward-mode: `torch.func.jvp`, no graph is kept.


@dataclass(frozen=True)
class Directions:
    """What is published: `weights` float64 [R, n, M], and the numbers by which they were divided, [R].

    Each direction is divided by the largest sum of magnitudes that a sample has in it: no sample enters an aggregate
    with more than the weight that Eq. 12 gives it, and the ciphertexts' precision is used.
    """

    weights: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, weights: torch.Tensor) -> Directions:
        weights = weights.double()
        scales = weights.abs().sum(2).amax(1).clamp_min(1e-12)
        return cls(weights / scales.view(-1, 1, 1), scales)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, part: slice) -> Directions:
        return Directions(self.weights[part], self.scales[part])

    def on(self, z: torch.Tensor, temperature: float) -> torch.Tensor:
        """What a peer with logits z [n, M] releases: float64 [R]."""
        return torch.einsum("rnm,nm->r", self.weights, z.double()) / temperature

    def beside(self, other: Directions) -> Directions:
        """Both, one after the other."""
        return Directions(torch.cat([self.weights, other.weights]), torch.cat([self.scales, other.scales]))


def head_of(model: nn.Module) -> nn.Linear:
    """The last linear layer, whose output the logits are."""
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not linear:
        raise ModelError("the model has no linear layer, so it has no classifier head; end it with nn.Linear")
    return linear[-1]


def features_and_logits(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the head [n, d] and what leaves the model [n, M], with their graph.

    Other threads may call the model meanwhile.

    Raises:
        ModelError: the logits are not what the head gives.
    """
    with calls_of(head_of(model)) as seen:
        logits = model(x)
    if len(seen) != 1 or seen[0][1] is not logits:
        raise ModelError("the model's output must be that of its last linear layer, used once")
    return seen[0][0], logits


def predictions(logits: torch.Tensor, temperature: float) -> Directions:
    """Eq. 12 itself: one direction, p. [1, n, M]."""
    p = (logits.double() / temperature).softmax(1)
    return Directions(p.unsqueeze(0), torch.ones(1, dtype=torch.float64))


@dataclass(frozen=True)
class HeadBasis:
    """The orthonormal basis of the head's gradient: contrasts [M, M - 1] and feature directions [d (+ 1 of the
    bias), r].
    """

    contrasts: torch.Tensor
    features: torch.Tensor

    def gradient(self, derivatives: torch.Tensor) -> torch.Tensor:
        """[M, d (+ 1)] from the directional derivatives, in the order of `head_directions`."""
        table = derivatives.view(self.contrasts.shape[1], self.features.shape[1])
        return self.contrasts @ table @ self.features.t()


def of_predictions(changes: torch.Tensor, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Derivatives of p from those of the logits: (diag p - p p^T) du / T, float64 [R, n, M]."""
    p = (logits.detach().double() / temperature).softmax(1)
    return p * (changes - (p * changes).sum(2, keepdim=True)) / temperature


def contrasts(classes: int) -> torch.Tensor:
    """Orthonormal [M, M - 1], each orthogonal to the all-ones vector (Helmert)."""
    out = torch.zeros(classes, classes - 1, dtype=torch.float64)
    for k in range(1, classes):
        out[:k, k - 1], out[k, k - 1] = 1 / math.sqrt(k * (k + 1)), -k / math.sqrt(k * (k + 1))
    return out


def head_directions(
    features: torch.Tensor, classes: int, bias: bool, rank: int | None = None
) -> tuple[torch.Tensor, HeadBasis]:
    """Derivatives of the logits along a basis of the head's parameters: float64 [(M - 1) r, n, M].

    Args:
        features: [n, d], of the owner's model on its own samples.
        rank: of the feature directions, the strongest so many; then what comes out is the gradient's part in their
            span. All unless named, which is exact.
    """
    h = features.detach().double()
    if bias:
        h = torch.cat([h, torch.ones(len(h), 1, dtype=torch.float64)], 1)
    left, singular, right = torch.linalg.svd(h, full_matrices=False)
    r = int((singular > 1e-9 * singular[0]).sum())
    r = min(r, rank) if rank is not None else r
    basis = HeadBasis(contrasts(classes), right[:r].t())
    changes = torch.einsum("ma,nr->arnm", basis.contrasts, left[:, :r] * singular[:r])
    return changes.flatten(0, 1), basis


def deep_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything trainable but the head's weights."""
    own = {id(p) for p in head_of(model).parameters()}
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}


def draw(model: nn.Module, count: int, generator: torch.Generator) -> torch.Tensor:
    """Directions [D, P] of the deep parameters with E[v v^T] = 1: orthogonal to each other, of length sqrt(P).

    Raises:
        FederationError: more directions than parameters.
    """
    size = sum(p.numel() for p in deep_parameters(model).values())
    if not 1 <= count <= size:
        raise FederationError(f"between 1 and {size} directions can be drawn for the deep layers, got {count}")
    # The orthogonal factor of a Gaussian matrix, with the signs of R taken out, is uniform (Mezzadri, 2007).
    q, r = torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).t() * math.sqrt(size)


def deep_directions(model: nn.Module, x: torch.Tensor, directions: torch.Tensor, chunk: int = 16) -> torch.Tensor:
    """Derivatives of the logits along directions [D, P] of the deep parameters: [D, n, M], by forward mode."""
    parameters = deep_parameters(model)

    def derivative(direction: torch.Tensor) -> torch.Tensor:
        return jvp(lambda p: functional_call(model, p, (x,)), (parameters,), (unflattened(direction, parameters),))[1]

    parts = directions.to(x.dtype).split(chunk)
    with torch.no_grad(), warnings.catch_warnings():
        # torch's own forward-mode rules are compiled on first use by torch.jit.script, which it has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        return torch.cat([vmap(derivative)(part) for part in parts]).double()


def unflattened(vector: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A vector [P] as tensors of these names and shapes."""
    parts = vector.split([p.numel() for p in like.values()])
    return {name: part.view_as(p).to(p.dtype) for (name, p), part in zip(like.items(), parts, strict=True)}


INFINITY = float("inf")
METHODS = ("capride", "local", "fedavg", "fedavg-dp", "dml", "l2")
UPDATES = ("scalar", "head", "forward")
WEIGHT_OF_A_PEER = 2.0
LEAST_SAMPLES = 16
"""An aggregate is over at least so many samples ("significantly harder when the batch size is large (above 16)",
section 3.3)."""


@dataclass
class Party(Participant):
    """P_k: its private data and its FHE-friendly model; with a second, large model in the two-model arrangement."""

    large: nn.Module | None = field(default=None, repr=False)

    def few(self, count: int) -> torch.Tensor:
        """The first images; black ones of a party elsewhere."""
        return torch.zeros(count, *self.shape) if self.images.is_meta else self.images[:count]

    def fingerprint(self) -> str:
        if self.images.is_meta:
            return digest(self.images, self.labels)
        return digest(
            self.images, self.labels, *self.model.state_dict().values(),
            *(self.large or nn.Identity()).state_dict().values(),
        )  # fmt: skip


@dataclass(frozen=True)
class Settings(Options):
    """Algorithm 1's inputs and options."""

    method: str = option("capride", "this protocol, or a baseline that protects nothing", among=METHODS, several=True)
    update: str = option(
        "head", "scalar is the paper's letter: a number without a gradient", among=UPDATES, several=True
    )
    rounds: int = option(20, "tau, of asking and training", least=1)
    warmup: int = option(10, "epochs of local training before the first round (paper: 25)", least=0)
    epochs: int = option(4, "of local training in a round", least=1)
    batch: int = option(32, "of local training", least=2)
    optimiser: str = option("adam", "of local training; sgd has the paper's momentum of 0.9", among=OPTIMIZERS)
    rate: float = option(1e-2, "of local training; gradients are clipped to norm 1", above=0, below=INFINITY)
    milestones: tuple[int, ...] = option(
        (), "rounds from which the rate is a tenth of what it was (paper: 50, 75)", least=1, hidden=True
    )
    smoothing: float = option(
        0.1, "of labels in local training; without it the logits of classes that a party lacks fall for ever, and "
        "little is learned of a peer where p is nearly 0", least=0, below=1,
    )  # fmt: skip
    temperature: float = option(5.0, "T, of both distributions", above=0, below=INFINITY, short="T")
    weight: float | None = option(
        None, "lambda_k, of T^2 times Eq. 9, a mean over samples (default: 2 for each peer, as Eq. 5 divides by their "
        "number); the T^2 keeps the gradient's size as T changes, and the paper's 50 at T = 5 is 2 here", least=0,
        below=INFINITY, several=True,
    )  # fmt: skip
    fraction: float = option(1.0, "of the samples, drawn anew for each round's aggregates", above=0, most=1)
    peers: int | None = option(None, "asked in a round, drawn anew (default: all)", least=1)
    directions: int = option(
        8,
        "D, random ones of forward gradients, a round; under the noise of the default leakage 8, 32 and 128 end alike",
        least=1,
        several=True,
    )
    plain_forward: bool = option(False, "train on forward gradients as they are: unbiased, and very noisy")
    head_rank: int | None = option(
        None, "feature directions of the head's basis, the strongest (default: all)", least=1
    )
    leakage: float | None = option(
        0.5, "the largest share of what sets a peer's logits on a sample apart from P_k's own that P_k may explain by "
        "all answers together (`capride/training.py`); None in Python sets no limit", above=0, most=1, several=True,
    )  # fmt: skip
    sigma: float | None = option(
        None, "of Gaussian noise on each aggregate (default: what keeps all rounds below leakage)", least=0,
        below=INFINITY, several=True,
    )  # fmt: skip
    logit_change: float = option(
        1.0, "of one sample's largest logit, that (epsilon, delta) is stated for", above=0, below=INFINITY
    )
    delta: float = option(1e-5, "of epsilon, delta", above=0, below=1)
    flood_bits: float = option(16.0, "of noise over an aggregate's own error; hides weights", least=1, hidden=True)
    encrypted: bool = option(True, "under CKKS", flag="simulate", off="the same updates in the clear; protects nothing")
    scale_bits: int | None = option(40, "of CKKS", least=20, hidden=True)
    degree: int | None = option(None, "of CKKS (default: the smallest that is 128-bit secure)", hidden=True)
    levels: int | None = option(None, "of the CKKS chain (default: what the models take)", least=1)
    model_sigma: float = option(
        0.01, "of fedavg-dp's noise on the parameters, as in the paper", least=0, below=INFINITY
    )
    seed: int = option(0, "of everything but keys, encryption and noise", least=0, several=True)

    @property
    def asks(self) -> bool:
        """Whether peers are asked under encryption (or in its simulation)."""
        return self.method == "capride"

    @property
    def local(self) -> Training:
        """Training on a party's own machine."""
        return Training(
            self.optimiser, self.rate, self.batch, self.epochs, momentum=0.9, label_smoothing=self.smoothing,
            max_norm=1.0,
        )  # fmt: skip

    def rate_in(self, round_: int) -> float:
        """The learning rate of a round."""
        return self.rate * 0.1 ** sum(round_ >= milestone for milestone in self.milestones)

    def subset(self, samples: int) -> int:
        """Samples in a round's aggregates."""
        return max(1, round(self.fraction * samples))


def check(parties: Sequence[Party], test: Samples, classes: int, how: Settings) -> None:
    """Everything that can be known before any training.

    Raises:
        FederationError: parties or data that do not fit.
        ModelError: a model that encryption cannot evaluate, naming the layer; other classes than the peers have.
    """
    if how.peers is not None and how.peers > len(parties) - 1:
        raise FederationError(f"each party has {len(parties) - 1} peers, {how.peers} were to be asked")
    check_federation([(p.name, (p.images, p.labels)) for p in parties], test, classes, "parties")
    for party in parties:
        if how.asks and how.subset(len(party.images)) < LEAST_SAMPLES:
            raise FederationError(
                f"{party.name}'s aggregates would be over {how.subset(len(party.images))} samples; from fewer than "
                f"{LEAST_SAMPLES} a peer's answer can be told for single ones. Give it more samples, or a "
                f"larger fraction"
            )
        _check_model(party, party.model, classes)
        if party.large is not None:
            _check_model(party, party.large, classes)
    if how.method.startswith("fedavg") and len({str(party.model) for party in parties}) > 1:
        raise FederationError("FedAvg averages models of one architecture; the parties' models differ")


def _check_model(party: Party, model: nn.Module, classes: int) -> None:
    training = model.training
    try:
        with torch.no_grad():
            _, logits = features_and_logits(model.eval(), party.few(2))
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, SectorchError):
            raise
        raise ModelError(f"{party.name}'s model does not take its images: {str(error).splitlines()[0]}") from error
    finally:
        model.train(training)
    if logits.shape[1:] != (classes,):
        raise ModelError(
            f"{party.name}'s model gives {tuple(logits.shape[1:])} logits, but the parties share {classes} classes; "
            f"change its last layer ({head_of(model)})"
        )


def chain(parties: Sequence[Party], how: Settings) -> ckks.Parameters:
    """The CKKS parameters on which every model and the inner product with it can be evaluated.

    Raises:
        ModelError: a layer that CKKS does not have, or a chain that is too short for a model.
        SecurityLevelError: nothing secure is deep enough.
    """
    depths: dict[str, int] = {}
    for party in parties:
        # A peer's values are not bounded by what could be said of its weights before they are trained.
        report = ckks.explain(fold_batchnorms(party.model), party.few(1), bound=float("nan"))
        if report.depth is None:
            raise ModelError(
                f"{party.name}'s model is not FHE-friendly: {report.problem} Layers that are not: "
                f"{', '.join(unfriendly(party)) or 'see above'}; sectorch.nn.fhe_friendly(model) makes a copy "
                f"that is, to be fine-tuned"
            )
        depths[party.name] = report.depth
    needed = max(depths.values())
    levels = how.levels or needed + 1
    if levels < needed + 1:
        deepest = max(depths, key=depths.__getitem__)
        raise ModelError(
            f"a chain of {levels} levels is too short: {deepest}'s model takes {needed} and the inner "
            f"product with the predictions one more; ask for levels={needed + 1} or leave it out, or fold layers"
        )
    most = max(len(p.images) for p in parties)
    try:
        return ckks.choose(levels, slots=min(most, 1 << 14), scale_bits=how.scale_bits, degree=how.degree)
    except ckks.SecurityLevelError:
        if how.scale_bits is None or how.degree is not None:
            raise
        return ckks.choose(levels, slots=min(most, 1 << 14))


def unfriendly(party: Party) -> list[str]:
    """The layers that homomorphic encryption lacks, each tried alone on what it receives."""
    model, found = copy.deepcopy(party.model).eval(), []
    leaves = {name: layer for name, layer in model.named_modules() if name and not list(layer.children())}
    with torch.no_grad(), ExitStack() as stack:
        calls = {name: stack.enter_context(calls_of(layer)) for name, layer in leaves.items()}
        model(party.few(2))
    for name, seen in calls.items():
        if seen and ckks.explain(leaves[name], seen[0][0][:1]).depth is None:
            found.append(f"'{name}' ({type(leaves[name]).__name__})")
    return found
