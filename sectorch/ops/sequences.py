"""Layers over sequences: attention (scaled dot products, nn.MultiheadAttention), and RNN, GRU and LSTM."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..ring import HEADROOM_BITS, products
from ..tensor import SharedTensor
from ..tensor.shared import infinite_of, of_public, size_of
from ..tensor.table import COMPOSED, ON_META, Context, implements
from .common import (
    CAPACITY,
    SLACK_BITS,
    as_factor,
    check_fits,
    is_secret,
    limit_at,
    refuse,
    round_scale,
    summand,
    with_dtype,
)
from .linear import bilinear
from .normalization import softmax_factors


class Masks:
    """The masks that are added to attention scores. A row in which everything is masked gives zeros, as in torch.

    With a secret mask each row gets one more entry, below every score and above everything masked. It takes the weight
    of a row that has no other entry.
    """

    def __init__(self, context: Context | None):
        self._context = context
        self._least = -math.inf if context is None else -size_of(context.scheme, torch.float32)
        self._parts: list[Any] = []
        self._public: Any = None
        self._secret = False

    def add(self, mask: Any, keep: bool, shape: Any = None) -> None:
        """Add a boolean mask, in which True means "attend" if `keep`, or a mask of summands."""
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

    def apply(self, scores: Any) -> Any:
        """scores + masks, and with a secret mask one entry more in each row."""
        if self._parts:  # first their sum: two of minus infinity, one after the other, would leave the range
            scores = scores + sum(self._parts[1:], self._parts[0])
        if not self._secret:
            return scores
        least = self._least if self._context is not None else -4 * 4096.0
        beside = torch.full((*scores.shape[:-1], 1), least / 2, dtype=scores.dtype)
        return torch.cat((scores, beside), -1)

    def without_beside(self, weights: Any) -> Any:
        """The weights of `apply`'s scores without those of entries beside them."""
        return weights[..., :-1] if self._secret else weights

    def empty_rows_to_zero(self, x: Any) -> Any:
        """x with zeros in the rows in which a public mask leaves nothing."""
        if self._public is None:
            return x
        empty = ~self._public.any(-1, keepdim=True)
        return x.masked_fill(empty, 0.0) if bool(empty.any()) else x

    def weights(self, scores: Any) -> Any:
        """The softmax of `apply`'s scores along the last dimension; zeros for a row in which everything is masked."""
        return self.empty_rows_to_zero(self.without_beside(F.softmax(scores, -1)))


@implements("scaled_dot_product_attention", F.scaled_dot_product_attention,
            note="error as softmax; n keys add n 2^-23 of the largest value", exact=False)  # fmt: skip
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
    scores, masks = _scores(context, query * scale, key.transpose(-2, -1)), Masks(context)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        masks.add(attn_mask, True)
    scores = masks.apply(scores)
    if context is not None and isinstance(scores, SharedTensor) and isinstance(value, SharedTensor):
        mixed = _values_before_quotient(context, scores, masks, value)
        if mixed is not None:
            return mixed
    return _weighted_values(context, F.dropout(masks.weights(scores), dropout_p), value)


def _scores(context: Context | None, query: Any, key: Any) -> Any:
    """query @ key with room for the difference of two scores, so that the factors are checked and no score is."""
    if context is None or not (isinstance(query, SharedTensor) and isinstance(key, SharedTensor)):
        return torch.matmul(query, key)
    return bilinear(context, products.matmul, query, key, query.shape[-1], most=CAPACITY / 2)


def _weighted_values(context: Context, weights: torch.Tensor, value: Any) -> torch.Tensor:
    """weights @ value, where each row's weights sum to one, so that no result is much larger than the largest value.

    The weights keep more than f fraction bits if the ring has room: the errors of n equal weights, each 1 / n, add up
    to n times as much. The result's bound includes them.
    """
    if not isinstance(value, SharedTensor):
        return torch.matmul(weights, value)
    f = context.frac_bits
    spare = max(0, min(SLACK_BITS, HEADROOM_BITS - 2 - 2 * f - context.scheme.activation_bits))
    w, v = round_scale(context, summand(context, weights), f + spare), as_factor(context, value, 0)
    most = 1.01 + 2.0 ** (4 - f) + weights.shape[-1] * 2.0 ** -(w.scale_bits + 1)  # the largest sum of a row's weights
    v = check_fits(context, v, min(limit_at(context, v.scale_bits), CAPACITY / most / 2.0**w.scale_bits))
    shares = context.backend.multiply(products.matmul, w.shares, v.shares)
    bound = None if v.bound is None else most * 2.0**w.scale_bits * v.bound
    return with_dtype(w.like(shares, w.scale_bits + v.scale_bits, bound), value.dtype)


MOST_KEYS = 1 << 7
"""Up to so many keys, e^(x - max x) has room for bits enough beside a value to be summed up before it is divided."""


def _values_before_quotient(
    context: Context, scores: SharedTensor, masks: Masks, value: SharedTensor
) -> SharedTensor | None:
    """softmax(scores + masks) @ value as (e^(x - max x) @ value) / sum, or None where e lacks bits for that.

    The sums of values do not wait for the inverse of the sum of e, and what is multiplied by it and rounded has the
    result's size and not that of the scores.

    Room, for a limit of a bits: e is below 1.01 and has w bits, so that the sum of e @ value is below 1.01 keys
    2^(w+f+a) <= 2^62. The product with the inverse, of f + k bits for k = 6 and sums up to 2^k
    (`reciprocal_of_sum`), is below `most` 2^(2f+k+a). Error: e is
    rounded by 2^-(w+1), which adds n 2^-(w+1) of the largest value where the sum of e is about 1; w is 22 for f = 20,
    a = 12 and 128 keys.
    """
    f, mark, keys = context.frac_bits, infinite_of(scores), scores.shape[-1]
    sums = math.ceil(math.log2(1.01 * keys))
    bits = HEADROOM_BITS - sums - f - context.scheme.activation_bits
    if keys > MOST_KEYS + 1 or bits < f + 1 or value.bound is None:
        return None
    most = 1.01 + 2.0 ** (4 - f) + keys * 2.0 ** -(bits + 1)  # the largest sum of a row's weights
    if most * 2.0 ** (2 * f + max(SLACK_BITS, sums + 1) + context.scheme.activation_bits) >= CAPACITY:
        return None
    if mark is not None:
        empty = mark.low == -math.inf and (mark.at is None or bool(mark.at.all(-1).any()))
        if empty or mark.high == math.inf:  # such rows have no quotient
            return None
        scores = with_dtype(scores, scores.dtype)
    v = as_factor(context, value, 0)
    v = check_fits(context, v, limit_at(context, v.scale_bits))
    if v.bound is None:
        return None
    e, inverse = softmax_factors(context, scores, scores.dim() - 1)
    e = masks.without_beside(e)
    w = round_scale(context, e, bits)
    shares = context.backend.multiply(products.matmul, w.shares, v.shares)
    mixed = w.like(shares, w.scale_bits + v.scale_bits, 2.0 ** (w.scale_bits + sums) * v.bound)
    mixed = round_scale(context, mixed, f)
    shares = context.backend.multiply(torch.mul, mixed.shares, inverse.shares)
    found = mixed.like(shares, f + inverse.scale_bits, most * 2.0**inverse.scale_bits * v.bound)
    return masks.empty_rows_to_zero(with_dtype(found, value.dtype))


@implements("multi_head_attention", F.multi_head_attention_forward,
            note="nn.MultiheadAttention, its fast path too", exact=False)  # fmt: skip
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
    shares = F.dropout(masks.weights(masks.apply(scores)), dropout_p, training)
    mixed = _weighted_values(context, shares, v).permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(mixed, out_proj_weight, out_proj_bias)
    weights_out = None
    if need_weights:
        shares = shares.mean(1) if average_attn_weights else shares
        weights_out = shares if batched else shares.squeeze(0)
    return out if batched else out.squeeze(1), weights_out


# RNN, GRU and LSTM, step by step.


Product = Callable[[Any], Any]
"""A function of a state, for example the recurrent part of the gates."""


def _gru_cell(state: tuple, gates_x: Any, recurrent: Product, project: Product | None = None) -> tuple:
    """One step of a GRU, from the input's part of the gates."""
    (h,) = state
    rx, zx, nx = gates_x.chunk(3, -1)
    rh, zh, nh = recurrent(h).chunk(3, -1)
    r, z = torch.sigmoid(torch.cat((rx + rh, zx + zh), -1)).chunk(2, -1)
    n = torch.tanh(nx + r * nh)
    return (n + z * (h - n),)


def _lstm_cell(state: tuple, gates_x: Any, recurrent: Product, project: Product | None = None) -> tuple:
    """One step of an LSTM. tanh g = 2 sigmoid(2 g) - 1, so that one function serves four gates."""
    h, c = state
    i, f, g, o = (gates_x + recurrent(h)).chunk(4, -1)
    i, f, g, o = torch.sigmoid(torch.cat((i, f, g + g, o), -1)).chunk(4, -1)
    tanh: Any = g + g - 1
    c = f * c + i * (tanh.bounded(g.bound) if isinstance(g, SharedTensor) else tanh)
    h = o * torch.tanh(c)
    return h if project is None else project(h), c


def _rnn_cell(activation: Product, state: tuple, gates_x: Any, recurrent: Product, project: Any = None) -> tuple:
    return (activation(gates_x + recurrent(state[0])),)


CELLS: dict[str, Callable[..., tuple]] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": partial(_rnn_cell, torch.tanh),
    "rnn_relu": partial(_rnn_cell, torch.relu),
}


def _one_direction(kind: str, x: torch.Tensor, state: tuple, w: Any, sizes: list[int], backward: bool) -> tuple:
    """One layer in one direction, over steps with non-increasing numbers of rows.

    A sequence that has ended keeps its last state; backward, one that has not begun keeps its first.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = w
    recurrent = lambda h: F.linear(h, w_hh, b_hh)
    project = None if w_hr is None else lambda h: F.linear(h, w_hr)
    gates = F.linear(x, w_ih, b_ih).split(sizes)
    outputs: list[Any] = [None] * len(sizes)
    for t in range(len(sizes) - 1, -1, -1) if backward else range(len(sizes)):
        rows, count = sizes[t], state[0].shape[0]
        now = state if rows == count else tuple(v[:rows] for v in state)
        made = CELLS[kind](now, gates[t], recurrent, project)
        outputs[t] = made[0]
        state = made if rows == count else tuple(torch.cat((a, b[rows:])) for a, b in zip(made, state, strict=True))
    return torch.cat(outputs), state


def _both_directions(kind: str, x: torch.Tensor, state: tuple, weights: tuple, steps: int) -> tuple:
    """One layer in both directions, over steps with equal numbers of rows: step t beside step t from the end.

    This takes half as many consecutive steps as one direction after the other, and gives the same values.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = zip(*weights, strict=True)
    w_hh, bias = torch.stack(w_hh).mT, None if b_hh[0] is None else torch.stack(b_hh)[:, None]
    recurrent = lambda h: torch.matmul(h, w_hh) if bias is None else torch.baddbmm(bias, h, w_hh)
    w_hr = None if w_hr[0] is None else torch.stack(w_hr).mT
    project = None if w_hr is None else lambda h: torch.matmul(h, w_hr)
    gates = [F.linear(x, w, b).reshape(steps, -1, w.shape[0]) for w, b in zip(w_ih, b_ih, strict=True)]
    gates = torch.stack((gates[0], gates[1].flip(0)), 1)
    outputs = []
    for t in range(steps):
        state = CELLS[kind](state, gates[t], recurrent, project)
        outputs.append(state[0])
    forward, backward = torch.stack(outputs).unbind(1)
    return torch.cat((forward, backward.flip(0)), -1).flatten(0, 1), state


def _weights_of(weights: Any, has_biases: bool, at: int, each: int) -> tuple:
    """w_ih, w_hh, b_ih, b_hh and w_hr of a layer and direction; None for those that are missing."""
    w = [*weights[at * each : (at + 1) * each]]
    biases = [w.pop(2), w.pop(2)] if has_biases else [None, None]
    return (*w[:2], *biases, w[2] if len(w) > 2 else None)


def _run_layers(kind: str, x: torch.Tensor, sizes: list[int], hidden: tuple, weights: Any, has_biases: bool,
                layers: int, dropout: float, train: bool, bidirectional: bool) -> tuple:  # fmt: skip
    """All layers and directions, over rows of steps. The input's part of the gates is one product for all steps."""
    if train and dropout and isinstance(x, SharedTensor):
        refuse("dropout between recurrent layers in training mode", "call model.eval() first")
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    last: list[Any] = []
    for layer in range(layers):
        at = range(layer * directions, (layer + 1) * directions)
        w = [_weights_of(weights, has_biases, k, each) for k in at]
        if bidirectional and min(sizes) == max(sizes):
            x, state = _both_directions(kind, x, tuple(h[at[0] : at[1] + 1] for h in hidden), tuple(w), len(sizes))
        else:
            made = [_one_direction(kind, x, tuple(h[k] for h in hidden), w[d], sizes, d == 1) for d, k in enumerate(at)]
            x = made[0][0] if directions == 1 else torch.cat([y for y, _ in made], -1)
            state = tuple(torch.stack(values) for values in zip(*(s for _, s in made), strict=True))
        last.append(state)
        x = F.dropout(x, dropout, train) if dropout and layer < layers - 1 else x
    return (x, *(torch.cat(values) for values in zip(*last, strict=True)))


PACKED = ("data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
"""torch's names for the arguments of a recurrent layer of packed sequences."""


def _register(kind: str, function: Any) -> None:
    @implements(kind, function, exact=kind == "rnn_relu",
                note="every step of every layer; error grows with the length; packed by public lengths")  # fmt: skip
    def handler(context: Context, x: SharedTensor, *args: Any) -> tuple[SharedTensor, ...]:
        hx, *rest, batch_first = args
        steps = x.transpose(0, 1) if batch_first else x
        length, rows = steps.shape[:2]
        flat = steps.reshape((length * rows, steps.shape[2]))
        y, *last = _run_layers(kind, flat, [rows] * length, tuple(hx) if kind == "lstm" else (hx,), *rest)
        y = y.reshape((length, rows, y.shape[-1]))
        return (y.transpose(0, 1) if batch_first else y, *last)

    def packed(*args: Any, **kwargs: Any) -> Any:
        """The layer on packed sequences, whose lengths are public."""
        given = dict(zip(PACKED, args, strict=False)) | kwargs
        sizes = given.get("batch_sizes")
        if not isinstance(sizes, torch.Tensor) or sizes.is_floating_point() or sizes.dim() != 1:
            return NotImplemented
        data, sizes, hx, *rest = (given[name] for name in PACKED)
        return _run_layers(kind, data, _public_lengths(sizes), tuple(hx) if kind == "lstm" else (hx,), *rest)

    def on_meta(input: torch.Tensor, hx: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The result's shapes from a call with one step; torch's own shape function takes every step."""
        batch_first = kwargs.get("batch_first", args[-1] if args else False)
        if not isinstance(batch_first, bool) or input.dim() != 3 or isinstance(hx, torch.Tensor) != (kind != "lstm"):
            return function(input, hx, *args, **kwargs)
        at = 1 if batch_first else 0
        y, *last = function(input.narrow(at, 0, min(1, input.shape[at])), hx, *args, **kwargs)
        shape = (input.shape[0], input.shape[1], y.shape[2])
        return (y.new_empty(shape), *last)

    COMPOSED[function] = packed
    ON_META[function] = on_meta


def _public_lengths(lengths: torch.Tensor) -> list[int]:
    if is_secret(lengths):
        refuse("a packed sequence of secret lengths", "mark them as sectorch.public(lengths), or pad and mask")
    return lengths.tolist()


def _pack_sequence(input: Any, lengths: torch.Tensor, batch_first: bool) -> tuple:
    """The rows of all steps, one step after the other, and the number of rows at each."""
    counts = _public_lengths(lengths)
    steps = input.transpose(0, 1) if batch_first else input
    if len(counts) != steps.shape[1]:
        raise ArgumentError(f"expected {steps.shape[1]} lengths, one for each sequence, got {len(counts)}")
    if counts != sorted(counts, reverse=True) or counts[-1] < 1 or counts[0] > steps.shape[0]:
        raise ArgumentError(
            f"lengths are from 1 to {steps.shape[0]}, in decreasing order unless enforce_sorted=False; got {counts}"
        )
    sizes = [sum(n > t for n in counts) for t in range(counts[0])]
    step = torch.tensor([t for t, rows in enumerate(sizes) for _ in range(rows)])
    row = torch.tensor([b for rows in sizes for b in range(rows)])
    return steps[step, row], torch.tensor(sizes)


def _unpack(data: Any, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int) -> tuple:
    sizes = _public_lengths(batch_sizes)
    places, start = torch.full((max(total_length, len(sizes)), sizes[0]), sum(sizes)), 0
    for t, rows in enumerate(sizes):
        places[t, :rows] = torch.arange(start, start + rows)
        start += rows
    filled = torch.full((1, *data.shape[1:]), float(padding_value)).to(data.dtype)
    padded = torch.cat((data, filled))[places]
    lengths = torch.tensor([sum(rows > b for rows in sizes) for b in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _pad(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> Any:
    """Sequences of several lengths, padded and stacked."""
    longest = max(v.shape[0] for v in sequences)
    missing = [(0, longest - v.shape[0]) if padding_side == "right" else (longest - v.shape[0], 0) for v in sequences]
    rows = [F.pad(v, (0, 0) * (v.dim() - 1) + m, value=padding_value) for v, m in zip(sequences, missing, strict=True)]
    return torch.stack(rows, 0 if batch_first else 1)


COMPOSED[torch._C._nn.pad_sequence] = _pad  # pyright: ignore[reportAttributeAccessIssue]
COMPOSED[torch._VF._pack_padded_sequence] = _pack_sequence  # pyright: ignore[reportAttributeAccessIssue]
COMPOSED[torch._VF._pad_packed_sequence] = _unpack  # pyright: ignore[reportAttributeAccessIssue]


for _kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _register(_kind, getattr(torch, _kind))


def _cell(name: str, function: Any) -> None:
    @implements(name, function, note="one step", exact=name == "rnn_relu_cell")
    def handler(
        context: Context, x: SharedTensor, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ):
        state = tuple(hidden) if name == "lstm_cell" else (hidden,)
        recurrent = lambda h: F.linear(h, w_hh, b_hh)
        made = CELLS[name.removesuffix("_cell")](state, F.linear(x, w_ih, b_ih), recurrent)
        return made if name == "lstm_cell" else made[0]


for _name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
    _cell(_name, getattr(torch, _name))
