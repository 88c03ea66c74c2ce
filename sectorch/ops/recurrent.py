"""RNN, GRU and LSTM, step by step on secret tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import ArgumentError
from ..tensor import SharedTensor
from ..tensor.table import COMPOSED, ON_META, Context, implements
from .common import is_secret, refuse

Product = Callable[[Any], Any]
"""The recurrent part of the gates, from a state."""


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


def _direction(kind: str, x: torch.Tensor, state: tuple, w: Any, sizes: list[int], backward: bool) -> tuple:
    """One layer in one direction over rows of steps, of which each has as many rows as the one before, or fewer.

    Sequences that are over keep their last state; backward, those that have not begun keep the first.
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


def _both(kind: str, x: torch.Tensor, state: tuple, weights: tuple, steps: int) -> tuple:
    """One layer in both directions, over as many rows in each step: step t of one beside the other's, t from the end.

    Half as many steps follow one another as with a direction at a time, and the values are the same.
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
    """w_ih, w_hh, b_ih, b_hh and w_hr of a layer and direction; None for those that there are not."""
    w = [*weights[at * each : (at + 1) * each]]
    biases = [w.pop(2), w.pop(2)] if has_biases else [None, None]
    return (*w[:2], *biases, w[2] if len(w) > 2 else None)


def _run(kind: str, x: torch.Tensor, sizes: list[int], hidden: tuple, weights: Any, has_biases: bool, layers: int,
         dropout: float, train: bool, bidirectional: bool) -> tuple:  # fmt: skip
    """All layers and directions, of rows of steps. The input's part of the gates is one product for all of them."""
    if train and dropout and isinstance(x, SharedTensor):
        refuse("dropout between recurrent layers in training mode", "call model.eval() first")
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    last: list[Any] = []
    for layer in range(layers):
        at = range(layer * directions, (layer + 1) * directions)
        w = [_weights_of(weights, has_biases, k, each) for k in at]
        if bidirectional and min(sizes) == max(sizes):
            x, state = _both(kind, x, tuple(h[at[0] : at[1] + 1] for h in hidden), tuple(w), len(sizes))
        else:
            made = [_direction(kind, x, tuple(h[k] for h in hidden), w[d], sizes, d == 1) for d, k in enumerate(at)]
            x = made[0][0] if directions == 1 else torch.cat([y for y, _ in made], -1)
            state = tuple(torch.stack(values) for values in zip(*(s for _, s in made), strict=True))
        last.append(state)
        x = F.dropout(x, dropout, train) if dropout and layer < layers - 1 else x
    return (x, *(torch.cat(values) for values in zip(*last, strict=True)))


PACKED = ("data", "batch_sizes", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional")
"""What torch calls the arguments of a recurrent layer of packed sequences."""


def _register(kind: str, function: Any) -> None:
    @implements(kind, function, note="every step of every layer; error grows with the length; packed by public lengths")
    def handler(context: Context, x: SharedTensor, *args: Any) -> tuple[SharedTensor, ...]:
        hx, *rest, batch_first = args
        steps = x.transpose(0, 1) if batch_first else x
        length, rows = steps.shape[:2]
        flat = steps.reshape((length * rows, steps.shape[2]))
        y, *last = _run(kind, flat, [rows] * length, tuple(hx) if kind == "lstm" else (hx,), *rest)
        y = y.reshape((length, rows, y.shape[-1]))
        return (y.transpose(0, 1) if batch_first else y, *last)

    def packed(*args: Any, **kwargs: Any) -> Any:
        """Of the rows of a packed sequence, whose number at each step is public."""
        given = dict(zip(PACKED, args, strict=False)) | kwargs
        sizes = given.get("batch_sizes")
        if not isinstance(sizes, torch.Tensor) or sizes.is_floating_point() or sizes.dim() != 1:
            return NotImplemented
        data, sizes, hx, *rest = (given[name] for name in PACKED)
        return _run(kind, data, _public_lengths(sizes), tuple(hx) if kind == "lstm" else (hx,), *rest)

    def on_meta(input: torch.Tensor, hx: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The shapes of a call with one step, of which torch takes each on its own."""
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


def _pack(input: Any, lengths: torch.Tensor, batch_first: bool) -> tuple:
    """The rows of each step one after the other, and how many there are at each."""
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


def _padded(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right") -> Any:
    """Sequences of several lengths, one beside the other."""
    longest = max(v.shape[0] for v in sequences)
    missing = [(0, longest - v.shape[0]) if padding_side == "right" else (longest - v.shape[0], 0) for v in sequences]
    rows = [F.pad(v, (0, 0) * (v.dim() - 1) + m, value=padding_value) for v, m in zip(sequences, missing, strict=True)]
    return torch.stack(rows, 0 if batch_first else 1)


COMPOSED[torch._C._nn.pad_sequence] = _padded  # pyright: ignore[reportAttributeAccessIssue]
COMPOSED[torch._VF._pack_padded_sequence] = _pack  # pyright: ignore[reportAttributeAccessIssue]
COMPOSED[torch._VF._pad_packed_sequence] = _unpack  # pyright: ignore[reportAttributeAccessIssue]


for _kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _register(_kind, getattr(torch, _kind))


def _cell(name: str, function: Any) -> None:
    @implements(name, function, note="one step")
    def handler(
        context: Context, x: SharedTensor, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ):
        state = tuple(hidden) if name == "lstm_cell" else (hidden,)
        recurrent = lambda h: F.linear(h, w_hh, b_hh)
        made = CELLS[name.removesuffix("_cell")](state, F.linear(x, w_ih, b_ih), recurrent)
        return made if name == "lstm_cell" else made[0]


for _name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
    _cell(_name, getattr(torch, _name))
