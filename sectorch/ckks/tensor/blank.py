"""What an encryption would be, on shapes: for a dry run, and for the form of another party's ciphertexts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from ..scheme.bounds import fresh_error
from ..scheme.cipher import Cipher
from ..scheme.memory import room
from .encrypted import CKKSTensor


def blank(x: torch.Tensor, parameters: Any, bound: float | None) -> CKKSTensor:
    """`encrypt(x, keys, bound=bound)` without keys or values: only x's shape and dtype, and the parameters, enter."""
    keys: Any = SimpleNamespace(parameters=parameters, identity="dry run", context=None, relin=None)
    data = room((math.prod(x.shape[1:]), 2, parameters.depth + 1, parameters.degree), True, "encrypting")
    error = fresh_error(parameters.degree, parameters.scales[parameters.depth])
    cipher = Cipher(data, keys, largest=math.nan if bound is None else float(bound), error=error, declared=True)
    return CKKSTensor(
        cipher, x.shape[0], tuple(x.shape[1:]), torch.float64 if x.dtype == torch.float64 else torch.float32
    )
