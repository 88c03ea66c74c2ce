"""Functions that are made of exponentials, logarithms and roots."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..tensor import SecretTensor, SharedTensor
from ..tensor.table import Context, implements
from .common import refuse

T = torch.Tensor


@implements("logit", torch.logit, T.logit, torch.special.logit, in_place=(T.logit_, torch.logit_),
            note="0 < x < 1; error 1e-5 + 1e-6 / x (1 - x)")  # fmt: skip
def logit(context: Context, x: SharedTensor, eps: float | None = None) -> torch.Tensor:
    if eps is not None:
        if not 0 <= eps <= 0.5:
            refuse(f"logit with eps={eps}", "the bounds eps and 1 - eps would cross")
        x = x.clamp(eps, 1 - eps)
    return torch.log(x) - torch.log(1 - x)


@implements("logaddexp", torch.logaddexp, T.logaddexp, note="everywhere; error 5e-6")
def logaddexp(context: Context, x: Any, y: Any) -> torch.Tensor:
    return torch.maximum(x, y) + F.softplus(-(x - y).abs())


@implements("logaddexp2", torch.logaddexp2, T.logaddexp2, note="everywhere; error 8e-6")
def logaddexp2(context: Context, x: Any, y: Any) -> torch.Tensor:
    return torch.maximum(x, y) + F.softplus((x - y).abs() * -math.log(2)) * (1 / math.log(2))


@implements("logcumsumexp", torch.logcumsumexp, T.logcumsumexp, note="error 5e-6 log2 n")
def logcumsumexp(context: Context, x: SharedTensor, dim: int) -> torch.Tensor:
    if not x.dim():
        return x
    line, step = x.movedim(dim, 0), 1
    while step < line.shape[0]:
        line = torch.cat((line[:step], torch.logaddexp(line[step:], line[:-step])))
        step *= 2
    return line.movedim(0, dim)


@implements("hypot", torch.hypot, T.hypot, in_place=(T.hypot_,), note="as norm")
def hypot(context: Context, x: Any, y: Any) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return torch.linalg.vector_norm(torch.stack((x.expand(shape), y.expand(shape))), 2, 0)


def _log_where(x: Any, y: torch.Tensor) -> torch.Tensor:
    """log y, and 0 where x is zero, whatever y is there."""
    return torch.log(torch.where(torch.as_tensor(x == 0), 1.0, y))


@implements("xlog1py", torch.special.xlog1py, note="as log1p, times x; 0 where x is 0")
def xlog1py(context: Context, x: Any, y: Any) -> torch.Tensor:
    y = y if isinstance(y, torch.Tensor) else torch.tensor(float(y))
    if isinstance(y, SecretTensor):
        return x * _log_where(x, y + 1)
    logs = torch.log1p(y)
    finite = logs.isfinite()
    result = x * logs.where(finite, 0)
    return result if finite.all() else result + x * _log_where(x, (y + 1).where(~finite, 1))


@implements("xlogy", torch.xlogy, T.xlogy, torch.special.xlogy, in_place=(T.xlogy_,),
            note="as log, times x; 0 where x is 0")  # fmt: skip
def xlogy(context: Context, x: Any, y: Any) -> torch.Tensor:
    if isinstance(y, SecretTensor):
        return x * _log_where(x, y)
    logs = torch.log(y if isinstance(y, torch.Tensor) else torch.tensor(float(y)))
    finite = logs.isfinite()
    result = x * logs.where(finite, 0)
    return result if finite.all() else result + x * _log_where(x, torch.as_tensor(y).where(~finite, 1))


@implements("ndtr", torch.special.ndtr, note="everywhere; error 4e-6")
def ndtr(context: Context, x: SharedTensor) -> torch.Tensor:
    return (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5


@implements("ldexp", torch.ldexp, T.ldexp, in_place=(T.ldexp_,), note="public whole exponents; local")
def ldexp(context: Context, x: SharedTensor, other: torch.Tensor) -> torch.Tensor:
    return x * torch.exp2(other.to(torch.float32))
