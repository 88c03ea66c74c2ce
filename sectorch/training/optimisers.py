"""What torch's optimisers are not told by themselves: that no gradient will come to what was revealed."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import ArgumentError
from .tensor import REVEALED


def _refuse_revealed(optimiser: Optimizer, *_: Any) -> None:
    """An optimiser passes over what has no gradient, so that such a step would change nothing without a word.

    Revealed values that are trained on in plain require gradients, and are no concern of this.

    Raises:
        ArgumentError: one of its parameters is the revealed value of a shared one.
    """
    for group in optimiser.param_groups:
        for p in group["params"]:
            if p in REVEALED and not p.requires_grad:
                raise ArgumentError(
                    f"the optimiser has a revealed parameter of shape {tuple(p.shape)}, to which no gradient comes; "
                    f"give it the shared model's: {type(optimiser).__name__}(model.parameters(), ...)"
                )


register_optimizer_step_pre_hook(_refuse_revealed)
