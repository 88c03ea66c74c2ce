"""Retraining on shares: labels that no party holds, and the training of a querying party's model on them.

A stage of the querying party Q, an answering party A and the server S takes what `kept_halves` gave: Q's half of the
labels, in Q's folder, and S's half, in S's. A and S hold the shares of the training, and Q deals.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..config import Scheme
from ..errors import FixedPointRangeError
from ..session import S, Session
from ..tensor import SharedTensor, share_tensor
from ..tensor.holders import from_halves, halves_of
from ..training.fixed_point import parameter_bits
from ..training.programs import step
from ..training.tensor import DifferentiableTensor, shared
from .run import progress
from .training import Training, train

LABELS = ("open", "shares")
"""What becomes of labels: the querying party learns them, or they stay in shares and so does its retraining."""
Halves = Mapping[str, torch.Tensor]
"""Of a tensor of Q and S, by their names; of the parties that are here."""


def kept_halves(labels: SharedTensor, querying: str) -> dict[str, torch.Tensor]:
    """The halves of labels that Q and S hold, as a stage's result of these two.

    Nobody learns anything, but Q one bit: whether a value on which the labels depend left its range.

    Raises:
        RangeExceededError: one did.
    """
    pairs = zip((querying, S.name), halves_of(labels), strict=True)
    return {name: half for name, half in pairs if not half.is_meta}


def check_shareable(name: str, model: nn.Module, frac_bits: int) -> None:
    """The stage at a party whose model is to be trained on shares, before it asks: whether its numbers fit.

    Raises:
        FixedPointRangeError: a parameter, or a running statistic, reaches half of the limit.
    """
    limit = 2.0 ** parameter_bits(Scheme(frac_bits))
    for key, value in model.state_dict().items():
        if value.is_floating_point() and 2 * (largest := float(value.abs().max())) >= limit:
            raise FixedPointRangeError(
                f"{key} of {name}'s model reaches {largest:.4g}, too close to {limit:.0f}, the limit of training with "
                f"{frac_bits} fraction bits; choose fewer fraction bits"
            )


def retrain_on_shares(
    session: Session, querying: str, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, x: torch.Tensor,
    halves: Sequence[Halves], classes: int, how: Training, seed: int, frac_bits: int, whole: bool = False,
) -> nn.Module | None:  # fmt: skip
    """The stage: a model trained on a party's own samples and on queries whose labels nobody holds.

    Q learns the trained model, and A and S nothing: uniform bits, the shapes, the settings and the order of batches.
    The model is a function of the labels, and tells Q of them what it tells anybody who knows all else it is made of
    (docs/privhfl.md#retraining-on-shares).

    Args:
        session: of Q, S and the answering party that holds shares beside S.
        model: Q's; elsewhere its architecture counts.
        images, labels: Q's own samples [N, ...] and their labels [N].
        x: Q's queries [B, ...].
        halves: of their labels [B, classes], one after another, what `kept_halves` gave.
        seed: public: of the order of batches and of layers that draw.
        whole: whether these labels are whole numbers, one-hot codes.

    Returns:
        the trained model at Q, in evaluation mode; elsewhere None.

    Rounds and bytes: of `sectorch.step` for each batch; and 8 bytes for each number of the model and the samples.

    Raises:
        RangeExceededError: a gradient, parameter or activation left its range; nothing of the model was revealed.
    """
    present = {querying: session.present(session.Q), S.name: session.present(S)}
    here, scheme = present[querying], Scheme(frac_bits)
    trained = copy.deepcopy(model)
    own = F.one_hot(labels, classes).to(x.dtype) if here else torch.empty(len(labels), classes, device="meta")
    owned = lambda tensor: share_tensor(tensor if here else tensor.to("meta"), session=session, scheme=scheme)
    learner = shared(copy.deepcopy(model) if here else trained.to("meta"), session=session, scheme=scheme)
    rows = owned(torch.cat((images, x)))
    both = [torch.cat([one[name] for one in halves]) if here_is else None for name, here_is in present.items()]
    dtype = torch.int64 if whole else x.dtype
    answers = from_halves(
        both, session, ("Q", "S"), shape=(len(x), classes), scheme=scheme, dtype=dtype, limit=2.0
    )  # fmt: skip
    targets = torch.cat((owned(own), answers.to(x.dtype)))
    train(learner, rows, targets, how, seed, progress(how.epochs), step=functools.partial(step, session))
    state = learner.state_dict().items()
    found = {name: v.reveal() if isinstance(v, DifferentiableTensor) else v for name, v in state}
    if not here:
        return None
    trained.load_state_dict(found)
    return trained.eval()
