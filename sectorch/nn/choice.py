"""How a token is chosen from a language model's scores: the largest, or at random with noise of Q's."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, ProgramError


@dataclass(frozen=True)
class Choice:
    """How a token is chosen from a model's scores; public.

    Attributes:
        do_sample: at random, in proportion to exp(score / temperature); else the token of the largest score.
        top_k: only among so many tokens of the largest scores.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None

    def __post_init__(self):
        if type(self.temperature) not in (int, float) or not self.temperature > 0:
            raise ArgumentError(
                f"temperature must be a number above 0, got {self.temperature!r:.40}; do_sample=False takes the largest"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ArgumentError(f"top_k must be a whole number of 1 or more, got {self.top_k!r}")
        if not self.do_sample and (self.temperature != 1.0 or self.top_k is not None):
            raise ArgumentError("temperature and top_k are for do_sample=True")

    def noise(self, rows: int, words: int, generator: torch.Generator | None) -> torch.Tensor | None:
        """Q's randomness for one token of each row: standard Gumbel noise for every score that is left."""
        if not self.do_sample:
            return None
        shape = rows, min(self.top_k or words, words)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ArgumentError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        if generator is not None:
            uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        else:
            drawn = np.frombuffer(os.urandom(8 * rows * shape[1]), dtype=np.uint64) >> np.uint64(11)
            uniform = torch.from_numpy(drawn.astype(np.float64) * 2.0**-53).reshape(shape)
        return -torch.log(-torch.log(uniform.clamp(2.0**-54, 1 - 2.0**-53))).float()

    def token(self, scores: Any, noise: Any) -> Any:
        """The chosen token of each row, [rows, 1]: argmax of score / temperature + Gumbel noise (Gumbel, 1954)."""
        if noise is None:
            return scores.argmax(-1, keepdim=True)
        index = None
        if noise.shape[-1] < scores.shape[-1]:
            scores, index = scores.topk(noise.shape[-1])
        chosen = (scores / self.temperature + noise).argmax(-1, keepdim=True)
        return chosen if index is None else index.gather(-1, chosen)


@dataclass(frozen=True)
class Texts:
    """How a model continues texts; public.

    Attributes:
        max_new_tokens: how many tokens there is room for.
        words: how many different tokens there are. choice: how one is chosen.
        ends: tokens that end a text. pad: what follows an end.
        masked: whether prompts come with a mask, which says where they are padded.
        until_end: whether tokens stay secret of Q too until all are there.
    """

    max_new_tokens: int
    words: int
    choice: Choice
    ends: tuple[int, ...] = ()
    pad: int = 0
    masked: bool = False
    until_end: bool = False

    @property
    def said(self) -> dict[str, Any]:
        """As a description has it."""
        return asdict(self)

    @classmethod
    def read(cls, said: Any) -> Texts:
        """What a description says.

        Raises:
            ProgramError: it is none.
        """
        try:
            made = cls(**{**said, "ends": tuple(said["ends"]), "choice": Choice(**said["choice"])})
        except (TypeError, KeyError, ArgumentError):
            raise ProgramError("a model description does not say how texts are continued") from None
        numbers = (made.max_new_tokens, made.words, made.pad, *made.ends, made.choice.top_k or 0)
        marks = (made.masked, made.until_end, made.choice.do_sample)
        sized = all(type(n) is int and 0 <= n < 1 << 31 for n in numbers) and len(made.ends) <= 1024
        if not sized or not made.max_new_tokens or not all(type(mark) is bool for mark in marks):
            raise ProgramError("a model description holds impossible numbers of tokens")
        return made
