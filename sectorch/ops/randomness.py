"""Random numbers in the shape of a secret tensor: refused, for torch's name does not say who may know them.

Noise that everybody knows hides nothing, noise that S knows does not protect from S, and noise of a party's choice is
that party's word. A forward takes it as an input instead: Q draws it and shares it, as it does with its data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..errors import UnsupportedOpError
from ..tensor.table import COMPOSED, spell

T = torch.Tensor


def _drawing(func: Callable) -> Callable:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOpError(
            f"{spell(func)} of a secret tensor is not supported, since it does not say who may know the numbers; "
            f"give them to the forward as an input, or use torch.rand(x.shape), which is public"
        )

    return refused


for _function in (
    torch.randn_like, torch.rand_like, torch.bernoulli, T.bernoulli, T.bernoulli_, torch.normal, T.normal_,
    torch.multinomial, T.multinomial, torch.poisson, T.uniform_, T.exponential_, T.random_, T.cauchy_, T.geometric_,
    T.log_normal_, torch.randint_like,
):  # fmt: skip
    COMPOSED[_function] = _drawing(_function)


def _empty_like(x: Any, **how: Any) -> Any:
    """What is in such memory is anybody's guess: zeros."""
    return torch.zeros_like(x, **how)


def _new_empty(x: Any, *size: Any, **how: Any) -> Any:
    return x.new_zeros(*size, **how)


COMPOSED[torch.empty_like], COMPOSED[T.new_empty] = _empty_like, _new_empty
