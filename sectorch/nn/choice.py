"""How a token is chosen from a language model's scores: the largest, or at random with noise of Q's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError


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
        if not self.temperature > 0:
            raise ArgumentError(
                f"temperature must be above 0, got {self.temperature}; do_sample=False takes the largest"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"top_k must be at least 1, got {self.top_k}")
        if not self.do_sample and (self.temperature != 1.0 or self.top_k is not None):
            raise ArgumentError("temperature and top_k are for do_sample=True")

    def noise(self, rows: int, words: int, generator: torch.Generator | None) -> torch.Tensor | None:
        """Q's randomness for one token of each row: standard Gumbel noise for every score that is left."""
        if not self.do_sample:
            return None
        shape = rows, min(self.top_k or words, words)
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
