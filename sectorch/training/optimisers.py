"""torch's optimisers on shared models: what is refused before a step, and what is computed one by one."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..errors import ArgumentError, UnsupportedOpError
from .tensor import REVEALED, DifferentiableTensor

REFUSED = {
    "LBFGS": "LBFGS chooses its steps by numbers that it looks at, which are secret on shares; take SGD or Adam",
    "Adafactor": "Adafactor chooses its steps by numbers that it looks at, which are secret on shares; take Adam",
    "Muon": "Muon rounds to bfloat16, which shares have not; take SGD with momentum, or AdamW",
    "SparseAdam": "SparseAdam takes sparse gradients, which shares have not; take Adam",
}
"""Optimisers of torch's that cannot step on shares, and what can."""


def _held(optimiser: Optimizer, *_: Any) -> None:
    """Refuses what cannot be trained, and has the lists of `foreach` and `fused` taken one by one: the same numbers.

    An optimiser passes over what has no gradient, so that a step of a revealed parameter would change nothing without a
    word. Revealed values that are trained on in plain require gradients, and are no concern of this.

    Raises:
        ArgumentError: one of its parameters is the revealed value of a shared one.
        UnsupportedOpError: an optimiser that looks at numbers, or that needs what shares have not.
    """
    for group in optimiser.param_groups:
        for p in group["params"]:
            if p in REVEALED and not p.requires_grad:
                raise ArgumentError(
                    f"the optimiser has a revealed parameter of shape {tuple(p.shape)}, to which no gradient comes; "
                    f"give it the shared model's: {type(optimiser).__name__}(model.parameters(), ...)"
                )
        if any(isinstance(p, DifferentiableTensor) for p in group["params"]):
            for kind in type(optimiser).__mro__:
                if kind.__name__ in REFUSED and kind.__module__.startswith("torch.optim"):
                    raise UnsupportedOpError(REFUSED[kind.__name__])
            for option in ("capturable", "differentiable"):
                if group.get(option):
                    raise UnsupportedOpError(f"{option}=True is not supported on shares; leave {option} out")
            group.update({name: False for name in ("foreach", "fused") if group.get(name) is not None})


register_optimizer_step_pre_hook(_held)
