"""Tensors put together into one: cat, stack and their kin. No message, unless fraction bits have to agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import SLACK_BITS, aligned, settled, summand


@implements("cat", torch.cat, torch.concat, torch.concatenate, note="local")
def cat(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return _joined(context, tensors, torch.cat, dim)


@implements("stack", torch.stack, note="local")
def stack(context: Context, tensors: Any, dim: int = 0) -> SharedTensor:
    return _joined(context, tensors, torch.stack, dim)


implements("hstack", torch.hstack, note="local")(lambda context, tensors: _joined(context, tensors, torch.hstack))
implements("vstack", torch.vstack, note="local")(lambda context, tensors: _joined(context, tensors, torch.vstack))


def _together(join: Callable, public: tuple, *values: torch.Tensor) -> torch.Tensor:
    return join(values, *public)


def _rounded(context: Context, operands: list[SharedTensor], given: Any) -> list[SharedTensor]:
    """Products beside shares that are factors already, a cache and its new row, say, become factors themselves.

    Else the shares that are would have to be rounded again.
    """
    ready = lambda x: 0 < x.scale_bits <= context.frac_bits + SLACK_BITS
    if any(isinstance(x, SharedTensor) and ready(x) for x in given):
        return [settled(context, x) for x in operands]
    return operands


def _joined(context: Context, tensors: Any, join: Callable, *public: Any) -> SharedTensor:
    parts = aligned(context, *_rounded(context, [summand(context, x) for x in tensors], tensors))
    bounds = [x.bound for x in parts if x.bound is not None]
    bound = max(bounds) if len(bounds) == len(parts) else None
    shares = context.backend.each(_together, join, public, *(x.shares for x in parts))
    return parts[0].like(shares, bound=bound)
