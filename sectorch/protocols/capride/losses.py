"""The distillation losses, Eq. 8 to 12, and what they are compared with. Sums over the batch, as in the paper.

P_k's own prediction is p = softmax(u / T) (Eq. 1), the peer's logits on the same samples are z. All take [n, M].
"""

from __future__ import annotations

import torch


def local_uncertainty(u: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 11: sum_j p_j . log p_j, which the owner computes alone."""
    logs = (u / temperature).log_softmax(1)
    return (logs.exp() * logs).sum()


def pairwise(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 12: sum_j p_j . z_j / T, what the peer computes under encryption."""
    return ((u / temperature).softmax(1) * z / temperature).sum()


def approximate_kl(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 9 summed as in Eq. 10: the KL divergence of p from the peer's prediction without its normalisation."""
    return local_uncertainty(u, temperature) - pairwise(u, z, temperature)


def true_kl(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. 8: D_KL(p || softmax(z / T)).

    The last term is sum_j log C_j: the paper prints M log C, but the M terms p^m log C add up to log C. It does not
    depend on the owner's model, so Eq. 8 and Eq. 9 have the same gradient.
    """
    return approximate_kl(u, z, temperature) + (z / temperature).logsumexp(1).sum()


def l2(u: torch.Tensor, z: torch.Tensor, temperature: float) -> torch.Tensor:
    """The L2 distance of the logits (section 2.2), which the paper finds to be of less use."""
    return (u - z).square().sum() / temperature**2
