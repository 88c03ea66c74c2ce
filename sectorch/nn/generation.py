"""Text generation with secret tokens: `sectorch.generate(secure_model, input_ids, max_new_tokens)`.

A causal language model of `transformers` runs twice: once on the prompt, and then once for each token on that token
alone, with the keys and values of all tokens before it. These stay in shares from call to call. Q learns the tokens,
and nobody learns anything else; the model never leaves its owner.

The keys and values stand at the end of a window of prompt and tokens to come, whose empty places a secret mask hides,
so that every step is the same program: it is traced once, and can be prepared ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..choreography.program.trace import Program
from ..errors import ArgumentError, DimensionError, DtypeError, ShapeError
from .choice import Choice, Texts
from .held import as_shared
from .inputs import Inputs
from .module import SecureModule
from .step import Cache, Step, check_places, check_window, texts_of


class Continuing:
    """Continues texts: asks for one token after the other.

    Attributes:
        texts: how; public.
    """

    texts: Texts

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        generator: torch.Generator | None = None,
        streamer: Callable[[torch.Tensor], Any] | None = None,
    ) -> torch.Tensor:
        """Prompts and what follows them, [rows, positions + new tokens]; see `generate`.

        Raises:
            ArgumentError: more tokens than there is room for, or a streamer that cannot be called.
            DimensionError: a prompt with tokens that the model does not have.
        """
        ids, mask = prompt_of(input_ids, attention_mask)
        most = self.texts.max_new_tokens if max_new_tokens is None else max_new_tokens
        if type(most) is not int or not 1 <= most <= self.texts.max_new_tokens:
            raise ArgumentError(f"there is room for {self.texts.max_new_tokens} new tokens, {most} were asked for")
        if streamer is not None and not callable(streamer):
            raise ArgumentError(f"streamer is called with the token of each row, got {type(streamer).__name__}")
        check_words(ids, self.texts.words)
        taken: list[Any] = []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        token, past = self._call(self._first(ids, mask, generator), most - 1)
        while True:
            if not self.texts.until_end:
                token[ended] = self.texts.pad
                ended |= torch.isin(token[:, 0], torch.tensor(self.texts.ends, dtype=token.dtype))
                if streamer is not None:
                    streamer(token[:, 0].clone())
            taken.append(token)
            if len(taken) == most or bool(ended.all()):
                break
            token, past = self._call(self._next(token, mask, past, len(taken), generator))
        if self.texts.until_end:
            together: Any = torch.cat(taken, 1)
            return torch.cat((ids, together.reveal()), 1)
        return torch.cat((ids, *taken), 1)

    def _call(self, inputs: Inputs, later: int = 0) -> tuple[Any, Cache]:
        """One step: the token, and the cache in shares. Of the first one it is known how many may follow."""
        raise NotImplementedError

    @property
    def _learned(self) -> int:
        """How many results of a step Q learns: the token, or nothing before the end."""
        return 0 if self.texts.until_end else 1

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        noise = self.texts.choice.noise(len(ids), self.texts.words, generator)
        return Inputs(**self._prompt(ids, mask), noise=noise).staying(self._learned)

    def _prompt(self, ids: torch.Tensor, mask: torch.Tensor | None) -> dict[str, Any]:
        """The arguments of a step for the prompt."""
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        called = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {**called, "past": [], "window": self._window(ids)}

    def _window(self, ids: torch.Tensor) -> int:
        """Places of the cache that a step takes."""
        return ids.shape[1] + self.texts.max_new_tokens - 2

    def _next(
        self, token: Any, mask: torch.Tensor | None, past: Cache, count: int, generator: torch.Generator | None
    ) -> Inputs:
        """The step after so many tokens."""
        noise = self.texts.choice.noise(len(token), self.texts.words, generator)
        return Inputs(**self._later(token, mask, past, count), noise=noise).staying(self._learned)

    def _later(self, token: Any, mask: torch.Tensor | None, past: Cache, count: int) -> dict[str, Any]:
        """The arguments of a step after so many tokens."""
        rows, window = len(token), past[0][0].shape[-2]
        length = window + 2 - self.texts.max_new_tokens
        before = torch.ones(rows, length, dtype=torch.int64) if mask is None else mask
        seen = F.pad(
            torch.cat((before, torch.ones(rows, count, dtype=torch.int64)), 1), (window + 1 - length - count, 0)
        )
        called = {"input_ids": token, "attention_mask": seen, "position_ids": seen.sum(1, keepdim=True) - 1}
        return {**called, "past": past, "window": window}


class Generation(Continuing):
    """Generation with prompts of one shape: what `sectorch.generate` uses, for more than one text.

    Args:
        model: what `sectorch.secure` made of a causal language model of `transformers`.
        max_new_tokens: how many tokens are generated at most.
        do_sample, temperature, top_k: as in transformers' `generate`. Q draws the randomness, and nobody else knows it.
        eos_token_id: Q stops when every row has ended with one of these; the model's own unless named. All parties see
            how many steps are taken.
        pad_token_id: what follows an end.
        until_end: whether tokens stay secret of Q too until all are there: then the steps do not stop at an end.

    Attributes:
        secure: one step as a secure module.

    Raises:
        ArgumentError: a choice that is none; a model that is not secure, or that generates in another way.
    """

    def __init__(
        self,
        model: SecureModule,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        until_end: bool = False,
    ):
        if not isinstance(model, SecureModule):
            raise ArgumentError(f"generate() takes what sectorch.secure() made, got {type(model).__name__}")
        plain, choice = model.plain, Choice(do_sample, temperature, top_k)
        self.texts = texts_of(plain, max_new_tokens, choice, eos_token_id, pad_token_id, until_end)
        step = Step(plain, choice).eval()
        if model.session.present(model.party):
            check_window(step)
        self.secure = model.over(step)

    def _call(self, inputs: Inputs, later: int = 0) -> tuple[Any, Cache]:
        return self.secure.in_shares(inputs)

    def _first(self, ids: torch.Tensor, mask: torch.Tensor | None, generator: torch.Generator | None) -> Inputs:
        check_places(self.secure, ids, mask, self.texts.max_new_tokens)
        return super()._first(ids, mask, generator)

    def preprocess(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, steps: int | None = None
    ) -> int:
        """Run everything that does not depend on the prompt, for one text after a prompt of this shape.

        Args:
            input_ids, attention_mask: of the later prompt; only the shapes are used, and whether there is a mask.
            steps: how many of the later steps are prepared; all of them unless named.

        Returns:
            bytes of memory that the material takes until it is used.
        """
        first, later = self.forms(input_ids, attention_mask)
        held = self.secure.preprocess(first)
        for _ in range(self.texts.max_new_tokens - 1 if steps is None else steps):
            held += self.secure.preprocess(later)
        return held

    def programs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[Program, Program]:
        """What all parties do for a prompt of this shape, and what they do for each later token."""
        first, later = (self.secure.choreography(inputs) for inputs in self.forms(input_ids, attention_mask))
        return first, later

    def forms(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[Inputs, Inputs]:
        """The call with a prompt of this shape, and that of each later step; only shapes are used."""
        ids, mask = prompt_of(input_ids, attention_mask)
        first = self._first(ids, mask, None)
        module = self.secure
        found = module._check(first).outputs
        token, past = as_shared(found, [], module.session, module.party, module.scheme)
        token = token if self.texts.until_end else torch.zeros(len(ids), 1, dtype=torch.int64)
        return first, self._next(token, mask, past, 1, None)


def check_words(ids: torch.Tensor, words: int) -> None:
    """Raise `DimensionError` where a prompt holds what is no token: nobody then sees a question that ends midway."""
    if not ids.is_meta and bool(((ids < 0) | (ids >= words)).any()):
        wrong = int(((ids < 0) | (ids >= words)).sum())
        raise DimensionError(
            f"index out of range: {wrong} of {ids.numel()} tokens of input_ids are not among 0 to {words - 1}, which "
            f"the model has"
        )


def prompt_of(ids: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts and mask as they are used.

    Raises:
        DtypeError: no tensor of whole numbers. ShapeError: not [rows, positions], or the mask is not.
    """
    for name, x in (("input_ids", ids), ("attention_mask", mask)):
        dense = isinstance(x, torch.Tensor) and x.layout == torch.strided
        whole = dense and not (x.is_floating_point() or x.is_complex()) and (x.dtype != torch.bool or x is mask)
        if x is not None and not whole:
            said = f"{x.dtype} {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise DtypeError(f"{name} must be a tensor of whole numbers, got {said}; a tokenizer's return_tensors='pt'")
    if ids is None or ids.dim() != 2 or 0 in ids.shape:
        raise ShapeError(f"input_ids must be [rows, positions], got {[] if ids is None else list(ids.shape)}")
    if mask is not None and mask.shape != ids.shape:
        raise ShapeError(f"attention_mask is {list(mask.shape)}, input_ids {list(ids.shape)}")
    ids = ids.long()
    if mask is None:
        return ids, None
    mask = mask.long()
    if not mask.is_meta and not bool((mask[:, -1] == 1).all() and (mask.diff(dim=1) >= 0).all()):
        raise ArgumentError("prompts are padded on the left: tokenizer.padding_side = 'left'")
    return ids, mask
