"""What P_k publishes beside its predictions: derivatives of its own predictions along directions.

L~ = sum_j p_j . z_j / T (Eq. 12) is linear in p. Along a direction v of P_k's parameters its derivative is
sum_j (dp_j/dtheta v) . z_j / T: the same aggregate, with dp_j/dtheta v in the place of p_j. dp is P_k's own, in plain
at P_k, so P_k can publish it encrypted and get the directional derivative of its loss back, one number over the whole
batch.

**Head.** With logits u = W h, the derivative along the matrix c v^T is (diag p - p p^T) c (h . v) / T. The gradient of
L~ with respect to W lies in the span of c v^T with c orthogonal to the all-ones vector (a shift of the logits changes
no p) and v in the row space of the features H = U S V^T. An orthonormal basis of it, M - 1 contrasts c times the right
singular vectors v, therefore gives the whole gradient from (M - 1) rank(H) numbers and not from M (d + 1).

**Deep layers.** For random v with E[v v^T] = 1, (dL~/dtheta . v) v is an unbiased estimate of the gradient (forward
gradient; Baydin et al., 2022). D directions are drawn orthogonal to each other, which keeps it unbiased and lowers the
variance. Their derivatives are forward-mode: `torch.func.jvp`, no graph is kept.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, jvp, vmap

from ...nn.watched import calls_of
from .errors import FederationError, ModelError


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
