"""Circuits of ANDs on XOR-shared words, layer by layer: every operand of a layer is opened once, however many ANDs
take it.

By Beaver, with alpha = alpha_A xor alpha_S from streams and d = x xor alpha open to A and S,

    x y = d_x d_y xor d_x alpha_y xor alpha_x d_y xor alpha_x alpha_y,

of which D deals only the last term.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..choreography import Message, Net, leaf, protocol
from .deal import deal_bits
from .shares import Shares


@dataclass(frozen=True)
class Layer:
    """One round on a state of rows of words.

    The rows `opened` are masked and opened; AND number i takes the opened ones `left[i]` and `right[i]`. The new state
    is the first ANDs, each xor the row of the old state that `onto` names, the other ANDs, and the old rows `kept`.
    """

    opened: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    onto: tuple[int, ...]
    kept: tuple[int, ...] = ()


@functools.cache
def _index(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=torch.int64, device=device)


def pick(words: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """Some rows of [n, W], in this order; a view where they follow each other."""
    first = rows[0] if rows else 0
    if rows == tuple(range(first, first + len(rows))):
        return words[first : first + len(rows)]
    return words.index_select(0, _index(rows, words.device))


def beaver(public: torch.Tensor, alpha: torch.Tensor, dealt: torch.Tensor, left, right, first: bool) -> torch.Tensor:
    """One party's half of the ANDs of opened rows; `first` is the party that adds the public term."""
    d_left, d_right = pick(public, left), pick(public, right)
    ands = (d_left & pick(alpha, right)).bitwise_xor_(pick(alpha, left) & d_right).bitwise_xor_(dealt)
    return ands.bitwise_xor_(d_left & d_right) if first else ands


@protocol("and_layers", "docs/protocols.md; PrivHFL, C.4.1 (Beaver), on bits", [
    Message("masked_A", "A", "S", "alpha_A of k_DA"), Message("masked_S", "S", "A", "alpha_S of k_DS"),
])  # fmt: skip
def and_layers(net: Net, state: Shares, layers: Sequence[Layer]) -> Shares:
    """The state after these layers.

    Args:
        state: words [rows, W], XOR-shared.

    Rounds: one a layer; two bits an element online for each row opened, one dealt for each AND. Nobody learns anything.
    """
    if not layers:
        return state
    D, A, S = net.D, net.A, net.S
    width, opened = state.shape[1], sum(len(layer.opened) for layer in layers)
    alpha_A = net.common(D, A, (opened, width), "alpha_A")
    alpha_S = net.common(D, S, (opened, width), "alpha_S")
    triples = deal_bits(net, _products(alpha_A ^ alpha_S, layers))

    at, made = 0, 0
    for layer in layers:
        mine, dealt = slice(at, at + len(layer.opened)), slice(made, made + len(layer.left))
        at, made = mine.stop, dealt.stop
        sent_A = _masked(state.A, alpha_A, layer, mine).send(A, S, "masked_A")
        sent_S = _masked(state.S, alpha_S, layer, mine).send(S, A, "masked_S")
        public = sent_A ^ sent_S
        state = Shares(
            _joined(public, state.A, alpha_A, triples.A, layer, mine, dealt, True),
            _joined(public, state.S, alpha_S, triples.S, layer, mine, dealt, False),
        )
    return state


@leaf(shapes=lambda state, alpha, layer, mine: alpha[mine])
def _masked(state: torch.Tensor, alpha: torch.Tensor, layer: Layer, mine: slice) -> torch.Tensor:
    """The opened rows of a layer under their masks."""
    return pick(state, layer.opened) ^ alpha[mine]


@leaf(shapes=lambda public, _0, _1, _2, layer, *_: public.new_empty(len(layer.left) + len(layer.kept), public.shape[1]))
def _joined(public, state, alpha, triples, layer: Layer, mine: slice, dealt: slice, first: bool) -> torch.Tensor:
    """One party's half of the state after a layer."""
    ands = beaver(public, alpha[mine], triples[dealt], layer.left, layer.right, first)
    if layer.onto:
        ands[: len(layer.onto)].bitwise_xor_(pick(state, layer.onto))
    return torch.cat((ands, pick(state, layer.kept))) if layer.kept else ands


@leaf(shapes=lambda alpha, layers: alpha.new_empty(sum(len(layer.left) for layer in layers), alpha.shape[1]))
def _products(alpha: torch.Tensor, layers: Sequence[Layer]) -> torch.Tensor:
    """alpha_x & alpha_y for every AND of every layer."""
    out, at = [], 0
    for layer in layers:
        mine = alpha[at : at + len(layer.opened)]
        out.append(pick(mine, layer.left) & pick(mine, layer.right))
        at += len(layer.opened)
    return torch.cat(out)
