"""Attention: scaled dot products, and the whole of nn.MultiheadAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..ring import HEADROOM_BITS, products
from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import SLACK_BITS, refuse, settled, shortened, summand, typed
from .ranges import CAPACITY, fitted, limit_at


def _additive(mask: torch.Tensor, keep: bool) -> torch.Tensor:
    """A boolean mask as one that is added; `keep` says whether True means "attend"."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask if keep else ~mask, 0.0, -math.inf)


@implements(
    "scaled_dot_product_attention",
    F.scaled_dot_product_attention,
    note="error as softmax; n equal keys add n 2^-27 of the largest value",
)
def attention(
    context: Context, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if dropout_p and context is not None:  # without a context these are tensors that autograd follows
        refuse("attention with dropout", "call model.eval() first")
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query * (scale or 1 / math.sqrt(query.shape[-1])), key.transpose(-2, -1))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores + _additive(attn_mask, True)
    return _mixed(context, F.dropout(F.softmax(scores, -1), dropout_p), value)


def _mixed(context: Context, weights: torch.Tensor, value: Any) -> torch.Tensor:
    """weights @ value, where each row's weights sum to one: no result is much larger than the largest value.

    The weights keep more than f fraction bits where the ring has room: of n equal ones each is 1 / n, and rounding them
    all alike is off by n times as much. That is in the result's bound as well.
    """
    if not isinstance(value, SharedTensor):
        return torch.matmul(weights, value)
    f = context.frac_bits
    spare = max(0, min(SLACK_BITS, HEADROOM_BITS - 2 - 2 * f - context.scheme.activation_bits))
    w, v = shortened(context, summand(context, weights), f + spare), settled(context, value, 0)
    most = 1.01 + 2.0 ** (4 - f) + weights.shape[-1] * 2.0 ** -(w.scale_bits + 1)  # that a row's weights sum to
    v = fitted(context, v, min(limit_at(context, v.scale_bits), CAPACITY / most / 2.0**w.scale_bits))
    shares = context.backend.multiply(products.matmul, w.shares, v.shares)
    bound = None if v.bound is None else most * 2.0**w.scale_bits * v.bound
    return typed(w.like(shares, w.scale_bits + v.scale_bits, bound), value.dtype)


@implements("multi_head_attention", F.multi_head_attention_forward, note="nn.MultiheadAttention, its fast path too")
def multi_head_attention(
    context: Context, query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any,
    in_proj_bias: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Any,
    out_proj_bias: Any, training: bool = True, key_padding_mask: Any = None, need_weights: bool = True,
    attn_mask: Any = None, use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None,
    v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """[L, N, E] queries, [S, N, E] keys and values, as `F.multi_head_attention_forward` has them."""
    if training and dropout_p and context is not None:  # as in `attention`
        refuse("attention with dropout", "call model.eval() first")
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        refuse("attention with bias_k, bias_v, add_zero_attn or static keys", "leave them out")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    length, batch, width = query.shape
    if width != embed_dim_to_check:
        raise ArgumentError(f"was expecting embedding dimension of {embed_dim_to_check}, but got {width}")
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = query, key, value

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], batch, num_heads, -1).permute(1, 2, 0, 3)

    q, k, v = (heads(F.linear(x, w, b)) for x, w, b in zip(inputs, weights, biases, strict=True))
    scores = torch.matmul(q * (1 / math.sqrt(width // num_heads)), k.transpose(-2, -1))
    masks = []
    if attn_mask is not None:
        mask = _additive(attn_mask, False)
        masks.append(mask.view(batch, num_heads, *mask.shape[-2:]) if mask.dim() == 3 else mask)
    elif is_causal:
        refuse("is_causal without attn_mask", "give the mask too, as torch asks")
    if key_padding_mask is not None:
        masks.append(_additive(key_padding_mask, False).view(batch, 1, 1, -1))
    if masks:  # as one: what two put at minus infinity would be beyond it
        scores = scores + sum(masks[1:], masks[0])
    shares = F.dropout(F.softmax(scores, -1), dropout_p, training)
    mixed = _mixed(context, shares, v).permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(mixed, out_proj_weight, out_proj_bias)
    weights_out = None
    if need_weights:
        shares = shares.mean(1) if average_attn_weights else shares
        weights_out = shares if batched else shares.squeeze(0)
    return out if batched else out.squeeze(1), weights_out
