"""Q's side of generation with a language model at another party."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...errors import ArgumentError, ShapeError
from ...nn.generation import Continuing
from ...nn.inputs import Inputs
from ...nn.served import Served
from ...nn.step import Cache


class Steps(Protocol):
    """What is asked for each token (`query.RemoteModel`)."""

    served: Served

    def in_shares(self, inputs: Inputs, later: Sequence[Inputs] = ()) -> Any: ...
    def prepare(self, inputs: Inputs, count: int = 1, progress: Callable[[], None] | None = None) -> None: ...


class RemoteTexts(Continuing):
    """Continues texts with a model at another party.

    Raises:
        ArgumentError: the model's owner does not serve it for generation.
    """

    def __init__(self, model: Steps):
        if model.served.texts is None:
            raise ArgumentError(
                "the model is not served for generation: its owner writes it by sectorch.network.save_generation"
            )
        self.texts, self._model = model.served.texts, model

    def _call(self, inputs: Inputs, later: int = 0) -> tuple[Any, Cache]:
        following = [self._form(inputs.tensors[0])] * later if later else []
        return self._model.in_shares(inputs, following)

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        return super()._first(ids, self._mask(ids, mask), generator)

    def prepare(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        steps: int | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        """Do all that does not depend on the prompt, for one later text.

        Args:
            input_ids, attention_mask: of the later prompt; only the shapes are used.
            steps: how many of the later steps are prepared; all of them unless named.
            progress: called after each of them.

        Raises:
            ShapeError: prompts of this shape are not served. StoreFullError: as of `RemoteModel.prepare`.
        """
        self._model.prepare(self._first(input_ids, attention_mask, None).meta(), 1, progress)
        steps = self.texts.max_new_tokens - 1 if steps is None else steps
        if steps:
            self._model.prepare(self._form(input_ids), steps, progress)

    def _form(self, ids: torch.Tensor) -> Inputs:
        """A later step, as the description has it."""
        seen = (len(ids), self._window(ids) + 1)
        for call in self._model.served.calls:
            if any(call.inputs.held) and call.inputs.shapes[:2] == ((len(ids), 1), seen):
                return call.inputs
        raise ShapeError(f"prompts of shape {list(ids.shape)} are not served; {self._model.served.said}")

    def _mask(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
        if self.texts.masked:
            return torch.ones_like(ids) if mask is None else mask
        if mask is not None and not bool((mask == 1).all()):
            raise ArgumentError("the model's owner serves prompts without a mask: pass prompts that are not padded")
        return None
