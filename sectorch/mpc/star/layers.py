"""Circuits of ANDs on XOR-shared words, layer by layer: every operand of a layer is opened once, however many ANDs
take it.

By Beaver, with alpha = alpha_A xor alpha_S from streams and d = x xor alpha open to A and S,

    x y = d_x d_y xor d_x alpha_y xor alpha_x d_y xor alpha_x alpha_y,

of which D deals only the last term.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...choreography import Message, Net, leaf, protocol
from ...ring.bitplanes import fast
from .deal import Made, deal_bits
from .shares import Shares, each


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

    @functools.cached_property
    def rows(self) -> tuple[np.ndarray, ...]:
        """These numbers for compiled loops."""
        return tuple(np.array(v, np.int64) for v in (self.opened, self.left, self.right, self.onto, self.kept))


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
    count = sum(len(layer.left) for layer in layers)
    triples = deal_bits(net, Made(_products, (count, width), (alpha_A, alpha_S, tuple(layers))))

    sent = each(_masked, state, Shares(alpha_A, alpha_S), layers[0])
    at, made = 0, 0
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        sent_A, sent_S = sent.A.send(A, S, "masked_A"), sent.S.send(S, A, "masked_S")
        public, place = (sent_A, sent_S), (layer, following, at, made)
        at, made = at + len(layer.opened), made + len(layer.left)
        at_A = _joined(*public, state.A, alpha_A, triples.A, *place, True)
        at_S = _joined(*public, state.S, alpha_S, triples.S, *place, False)
        state, sent = Shares(at_A[0], at_S[0]), Shares(at_A[1], at_S[1])
    return state


@leaf(shapes=lambda state, alpha, layer: alpha[: len(layer.opened)])
def _masked(state: torch.Tensor, alpha: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The rows that the first layer opens, under their masks."""
    if not (loops := fast(state, alpha)):
        return pick(state, layer.opened) ^ alpha[: len(layer.opened)]
    out = state.new_empty(len(layer.opened), state.shape[1])
    loops.on_words(state.shape[1], loops.masked, state.numpy(), alpha.numpy(), layer.rows[0], 0, out.numpy())
    return out


def _shapes_of_joined(sent, _0, state, _1, _2, layer: Layer, following: Layer | None, *_):
    rows = len(layer.left) + len(layer.kept), len(following.opened) if following else 0
    return tuple(state.new_empty(count, state.shape[1]) for count in rows)


@leaf(shapes=_shapes_of_joined)
def _joined(
    sent_A, sent_S, state, alpha, triples, layer: Layer, following: Layer | None, at: int, made: int, first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One party's half of the state after a layer, and the rows that the next one opens, under their masks.

    Args:
        at, made: the rows of alpha and of the triples that came before this layer's.
    """
    opened, beyond = following.opened if following else (), at + len(layer.opened)
    if not (loops := fast(sent_A, sent_S, state, alpha, triples)):
        own, dealt = alpha[at:beyond], triples[made : made + len(layer.left)]
        new = beaver(sent_A ^ sent_S, own, dealt, layer.left, layer.right, first)
        if layer.onto:
            new[: len(layer.onto)].bitwise_xor_(pick(state, layer.onto))
        new = torch.cat((new, pick(state, layer.kept))) if layer.kept else new
        return new, pick(new, opened) ^ alpha[beyond : beyond + len(opened)]
    new = state.new_empty(len(layer.left) + len(layer.kept), state.shape[1])
    out = state.new_empty(len(opened), state.shape[1])
    arrays = (v.numpy() for v in (sent_A, sent_S, state, alpha, triples))
    after = following.rows[0] if following else layer.rows[0][:0]
    place = at, made, -int(first), after, beyond, new.numpy(), out.numpy()
    loops.on_words(state.shape[1], loops.layer, *arrays, *layer.rows[1:], *place)
    return new, out


@leaf(shapes=lambda alpha_A, alpha_S, layers, v_A: torch.empty_like(v_A))
def _products(alpha_A: torch.Tensor, alpha_S: torch.Tensor, layers: tuple[Layer, ...], v_A: torch.Tensor):
    """alpha_x & alpha_y for every AND of every layer, under v_A."""
    left, right = _operands(layers)
    if loops := fast(alpha_A, alpha_S, v_A):
        out = torch.empty_like(v_A)
        arrays = alpha_A.numpy(), alpha_S.numpy(), v_A.numpy(), left, right, out.numpy()
        loops.on_words(v_A.shape[1], loops.products, *arrays)
        return out
    alpha = alpha_A ^ alpha_S
    left, right = (torch.from_numpy(rows).to(alpha.device) for rows in (left, right))
    return (alpha[left] & alpha[right]).bitwise_xor_(v_A)


@functools.lru_cache(maxsize=64)
def _operands(layers: tuple[Layer, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all masks that the ANDs of all layers take."""
    starts = itertools.accumulate((len(layer.opened) for layer in layers), initial=0)
    pairs = [(layer.rows[1] + at, layer.rows[2] + at) for layer, at in zip(layers, starts, strict=False)]
    left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return left, right
