"""RNN, GRU and LSTM, step by step on secret tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..tensor import SharedTensor
from ..tensor.table import Context, implements
from .common import refuse


def _gru_cell(x: torch.Tensor, h: Any, gates_x: Any, w_hh: Any, b_hh: Any) -> Any:
    """One step of a GRU, from the input's part of the gates."""
    rx, zx, nx = gates_x.chunk(3, -1)
    rh, zh, nh = F.linear(h, w_hh, b_hh).chunk(3, -1)
    both = torch.sigmoid(torch.cat((rx + rh, zx + zh), -1))
    r, z = both.chunk(2, -1)
    n = torch.tanh(nx + r * nh)
    return n + z * (h - n)


def _lstm_cell(x: torch.Tensor, state: tuple, gates_x: Any, w_hh: Any, b_hh: Any) -> tuple:
    h, c = state
    i, f, g, o = (gates_x + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    i, f, o = torch.sigmoid(torch.cat((i, f, o), -1)).chunk(3, -1)
    c = f * c + i * torch.tanh(g)
    return o * torch.tanh(c), c


def _run(kind: str, x: torch.Tensor, hidden: tuple, weights: Any, has_biases: bool, layers: int, dropout: float,
         train: bool, bidirectional: bool, batch_first: bool) -> tuple:  # fmt: skip
    """All layers and directions. The input's part of the gates is one product for the whole sequence."""
    if train and dropout:
        refuse("dropout between recurrent layers in training mode", "call model.eval() first")
    if batch_first:
        x = x.transpose(0, 1)
    per_layer = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    if len(weights) != per_layer * layers * directions:
        refuse("an LSTM with projections", "use proj_size=0")
    last: list[list[Any]] = [[] for _ in hidden]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            w = weights[at * per_layer : (at + 1) * per_layer]
            w_ih, w_hh, b_ih, b_hh = (*w, None, None) if not has_biases else w
            gates = F.linear(x, w_ih, b_ih)
            state = tuple(h[at] for h in hidden)
            steps = range(x.shape[0]) if direction == 0 else range(x.shape[0] - 1, -1, -1)
            made: list[Any] = [None] * x.shape[0]
            for t in steps:
                if kind == "lstm":
                    state = _lstm_cell(x, state, gates[t], w_hh, b_hh)
                elif kind == "gru":
                    state = (_gru_cell(x, state[0], gates[t], w_hh, b_hh),)
                else:
                    activation = torch.tanh if kind == "rnn_tanh" else torch.relu
                    state = (activation(gates[t] + F.linear(state[0], w_hh, b_hh)),)
                made[t] = state[0]
            outputs.append(torch.stack(made))
            for values, value in zip(last, state, strict=True):
                values.append(value)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
    y = x.transpose(0, 1) if batch_first else x
    return (y, *(torch.stack(values) for values in last))


def _register(kind: str, function: Any) -> None:
    @implements(kind, function, note="every step of every layer; error grows with the length")
    def handler(context: Context, x: SharedTensor, *args: Any) -> tuple[SharedTensor, ...]:
        if len(args) != 8 or not isinstance(args[0], (torch.Tensor, tuple, list)):
            refuse(f"{kind} on packed sequences", "pad the sequences and run them in one tensor")
        hidden = tuple(args[0]) if kind == "lstm" else (args[0],)
        outputs = _run(kind, x, hidden, *args[1:])
        return tuple(y for y in outputs)


for _kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _register(_kind, getattr(torch, _kind))


def _cell(name: str, function: Any) -> None:
    @implements(name, function, note="one step")
    def handler(
        context: Context, x: SharedTensor, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ):
        gates = F.linear(x, w_ih, b_ih)
        if name == "lstm_cell":
            return tuple(v for v in _lstm_cell(x, tuple(hidden), gates, w_hh, b_hh))
        if name == "gru_cell":
            return _gru_cell(x, hidden, gates, w_hh, b_hh)
        activation = torch.tanh if name == "rnn_tanh_cell" else torch.relu
        return activation(gates + F.linear(hidden, w_hh, b_hh))


for _name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
    _cell(_name, getattr(torch, _name))
