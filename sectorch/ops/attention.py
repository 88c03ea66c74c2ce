"""Attention: scaled dot products, and the whole of nn.MultiheadAttention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..ring import HEADROOM_BITS, products
from ..tensor import SharedTensor
from ..tensor.infinity import infinite_of, of_public, size_of
from ..tensor.table import Context, implements
from .common import SLACK_BITS, is_secret, refuse, settled, shortened, summand, typed
from .ranges import CAPACITY, fitted, limit_at


class Masks:
    """What is added to scores, and the rows that it leaves nothing of: torch gives zeros for them.

    Where a mask is secret, a row gets one more entry, below every score and above all that is masked, which takes the
    weight of a row that has nothing else.
    """

    def __init__(self, context: Context | None):
        self._context = context
        self._least = -math.inf if context is None else -size_of(context.scheme, torch.float32)
        self._parts: list[Any] = []
        self._public: Any = None
        self._secret = False

    def add(self, mask: Any, keep: bool, shape: Any = None) -> None:
        """Takes a boolean mask, of which `keep` says whether True means "attend", or one that is added."""
        kept, added = None, mask
        if mask.dtype == torch.bool:
            kept = mask if keep else ~mask
            added = torch.where(kept, 0.0, self._least)
        elif not is_secret(mask) and type(mask) is torch.Tensor:
            kept = mask != -math.inf
            if self._context is not None:
                added = of_public(self._context.scheme, mask, mask.dtype)[1]
        else:
            known = infinite_of(mask)
            kept = mask if known is not None and known.low is not None and not math.isfinite(known.low) else None
        self._parts.append(added if shape is None else added.view(shape))
        if kept is None:
            return
        if type(kept) is not torch.Tensor:
            self._secret = True
        else:
            kept = kept if shape is None else kept.view(shape)
            self._public = kept if self._public is None else self._public & kept

    def weights(self, scores: Any) -> Any:
        """softmax(scores + masks) along the last dimension, and zeros where that leaves nothing."""
        if self._parts:  # as one: what two put at minus infinity would be beyond it
            scores = scores + sum(self._parts[1:], self._parts[0])
        if self._secret:
            least = self._least if self._context is not None else -4 * 4096.0
            beside = torch.full((*scores.shape[:-1], 1), least / 2, dtype=scores.dtype)
            return F.softmax(torch.cat((scores, beside), -1), -1)[..., :-1]
        weights = F.softmax(scores, -1)
        if self._public is None:
            return weights
        empty = ~self._public.any(-1, keepdim=True)
        return weights.masked_fill(empty, 0.0) if bool(empty.any()) else weights


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
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores, masks = torch.matmul(query * scale, key.transpose(-2, -1)), Masks(context)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        masks.add(attn_mask, True)
    return _mixed(context, F.dropout(masks.weights(scores), dropout_p), value)


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
    masks = Masks(context)
    if attn_mask is not None:
        each = (batch, num_heads, *attn_mask.shape[-2:]) if attn_mask.dim() == 3 else None
        masks.add(attn_mask, False, each)
    elif is_causal:
        refuse("is_causal without attn_mask", "give the mask too, as torch asks")
    if key_padding_mask is not None:
        masks.add(key_padding_mask, False, (batch, 1, 1, -1))
    shares = F.dropout(masks.weights(scores), dropout_p, training)
    mixed = _mixed(context, shares, v).permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(mixed, out_proj_weight, out_proj_bias)
    weights_out = None
    if need_weights:
        shares = shares.mean(1) if average_attn_weights else shares
        weights_out = shares if batched else shares.squeeze(0)
    return out if batched else out.squeeze(1), weights_out
