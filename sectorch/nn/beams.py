"""Beam search with secret tokens: `sectorch.generate(secure_model, input_ids, max_new_tokens, num_beams=4)`.

The beams' scores stay in shares, beside the keys and values. Q learns which beams go on, and with which tokens, and
gives the next step the order of the beams as a secret of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ArgumentError
from .choice import Choice
from .generation import Continuing, check_words, prompt_of
from .inputs import Inputs
from .module import SecureModule
from .step import Cache, Scoring, check_places, check_window, last, texts_of


class BeamStep(Scoring):
    """One call of a causal language model for all beams of a text, which stand one after the other among the rows."""

    def __init__(self, model: nn.Module, beams: int):
        super().__init__(model)
        self._beams = beams

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past: Cache, window: int, order: Any = None,
        before: Any = None,
    ) -> Any:  # fmt: skip
        """
        Args:
            order: of a later step, which beam each one goes on from, one-hot [rows, beams, beams].
            before: the beams' sums of log-probabilities so far [rows, beams].

        Returns:
            beam * words + token of each beam, the best first; their sums; the cache.
        """
        if order is not None:
            past = [(_ordered(keys, order), _ordered(values, order)) for keys, values in past]
        scores, cache = self.scores(input_ids, attention_mask, position_ids, past)
        found = torch.log_softmax(scores, -1)
        if order is not None:
            found = (found.reshape(*before.shape, -1) + before[..., None]).flatten(1)
        sums, chosen = found.topk(self._beams)
        cache = [tuple(last(x, window) for x in pair) for pair in cache]
        if order is None:
            cache = [tuple(x.repeat_interleave(self._beams, 0) for x in pair) for pair in cache]
        return chosen, sums, cache


def _ordered(x: Any, order: Any) -> Any:
    """A cache's tensor [rows * beams, ...] with the beams of each row in another order."""
    rows, beams = order.shape[:2]
    return (order.to(x.dtype) @ x.reshape(rows, beams, -1)).reshape(x.shape)


class Beams(Continuing):
    """Beam search with prompts of one shape: what `sectorch.generate` uses for `num_beams`.

    Args:
        model: what `sectorch.secure` made of a causal language model of `transformers`.
        max_new_tokens: how many tokens are generated, neither more nor less: no text ends before.
        num_beams: how many texts are kept; the best is given.
        eos_token_id: [] where the model's configuration names a token that ends a text.

    Attributes:
        secure: one step as a secure module.

    Raises:
        ArgumentError: fewer than two beams, or an end of texts; a model that is not secure, or that generates in
            another way.
    """

    def __init__(
        self, model: SecureModule, max_new_tokens: int, num_beams: int, eos_token_id: int | list[int] | None = None
    ):
        if not isinstance(model, SecureModule):
            raise ArgumentError(f"generate() takes what sectorch.secure() made, got {type(model).__name__}")
        if not isinstance(num_beams, int) or num_beams < 2:
            raise ArgumentError(f"num_beams must be a whole number of 2 or more, got {num_beams!r}")
        self.texts = texts_of(model.plain, max_new_tokens, Choice(), eos_token_id, None, False)
        if self.texts.ends:
            raise ArgumentError(
                f"a beam search does not stop at the end of a text (token {self.texts.ends[0]}): its sums stay secret; "
                f"eos_token_id=[] goes on to max_new_tokens"
            )
        if num_beams > self.texts.words:
            raise ArgumentError(f"num_beams must be at most {self.texts.words}, the number of words, got {num_beams}")
        step = BeamStep(model.plain, num_beams).eval()
        if model.session.present(model.party):
            check_window(step)
        self.secure, self._beams = model.over(step), num_beams

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **other: Any
    ) -> torch.Tensor:
        """Prompts and what follows them, [rows, positions + new tokens]: of each the text of the largest probability
        that was found.

        Raises:
            ArgumentError: other arguments, which beams do not take.
        """
        given = sorted(name for name, value in other.items() if value is not None)
        if given:
            raise ArgumentError(f"num_beams goes without {', '.join(given)}")
        ids, mask = prompt_of(input_ids, attention_mask)
        check_words(ids, self.texts.words)
        check_places(self.secure, ids, mask, self.texts.max_new_tokens)
        chosen, sums, past = self.secure.in_shares(Inputs(**self._prompt(ids, mask)).staying(1))
        texts = (chosen % self.texts.words)[..., None]
        mask = None if mask is None else mask.repeat_interleave(self._beams, 0)
        while texts.shape[-1] < self.texts.max_new_tokens:
            beam, token = chosen // self.texts.words, texts[..., -1].reshape(-1, 1)
            called = self._later(token, mask, past, texts.shape[-1])
            inputs = Inputs(**called, order=F.one_hot(beam, self._beams), before=sums).staying(1)
            chosen, sums, past = self.secure.in_shares(inputs)
            texts = texts.gather(1, (chosen // self.texts.words)[..., None].expand_as(texts))
            texts = torch.cat((texts, (chosen % self.texts.words)[..., None]), -1)
        return torch.cat((ids, texts[:, 0]), 1)
