"""A module that is for inference alone: where it computes, and in which mode, is settled when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import ArgumentError, TrainingModeError
from ..session import Session
from .arguments import refuse_move
from .compiling import exported


class Inference(nn.Module):
    """A module without parameters, in evaluation mode, that nothing records; torch.compile leaves it as it is, and so
    does `compile()`.

    Raises:
        TrainingModeError: of `train()`.
        ArgumentError: of a move to another device or dtype, which would change nothing; of a call inside torch.export
            or torch.jit.trace, which see tensors without content; of `state_dict()` and `load_state_dict()`, which
            would be empty and load nothing.
    """

    session: Session

    def train(self, mode: bool = True):
        if mode:
            raise TrainingModeError("a secure module is for inference; train the plain model and call secure() again")
        return super().train(False)

    def _apply(self, fn: Callable, recurse: bool = True):
        """What .to(), .cuda(), .half() and their like do to a module's tensors."""
        refuse_move(fn, self.session.device)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        pass

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(
            "a secure module has no weights to save, they are their owner's secret: its state_dict() would be empty; "
            "take that of the plain model"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError("a secure module loads no weights: load them into the plain model, and call secure() again")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentError(
            "a secure module has keys and shares, and cannot be copied or saved: save the plain model, and call "
            "secure() again; sectorch.network.save_model writes one for `sectorch answer`"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # torch.compile leaves the call, and all in it, as it is
            return torch.compiler.disable(super().__call__)(*args, **kwargs)
        if exported() or torch._C._is_tracing():
            raise ArgumentError(
                "torch.export and torch.jit.trace cannot follow a secure module: call it as it is; a model is exported "
                "before it is given to secure()"
            )
        return super().__call__(*args, **kwargs)
