"""Packed sequences of public lengths, through recurrent layers, in a program and operation by operation."""

from __future__ import annotations

import pytest
import torch
from op_stage import reference_stage
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import sectorch
from sectorch.errors import ArgumentError, SectorchError, UnsupportedOpError


class Reader(nn.Module):
    def __init__(self, layer: nn.Module, is_sorted: bool = False):
        super().__init__()
        self.layer, self.is_sorted = layer, is_sorted

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        y, last = self.layer(packed)
        padded, counts = pad_packed_sequence(y, batch_first=True, padding_value=-1.0, total_length=5)
        return padded, last, counts


LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "projected both ways": lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, proj_size=2),
    "gru both ways": lambda: nn.GRU(3, 4, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 4, 2, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_packed_sequences_give_what_they_give(name: str):
    """A step of a layer errs by less than 1e-5, and at most 8 follow one another."""
    torch.manual_seed(0)
    plain, x, lengths = Reader(LAYERS[name]()).eval(), torch.randn(3, 4, 3), torch.tensor([2, 4, 1])
    secure = sectorch.secure(plain, session=sectorch.Session(reference=True))
    with torch.no_grad():
        wanted = plain(x, lengths)
    padded, last, counts = secure(x, sectorch.public(lengths))
    assert counts.tolist() == [2, 4, 1]
    assert float((padded - wanted[0]).abs().max()) < 1e-4
    pairs = zip(last, wanted[1], strict=True) if isinstance(last, tuple) else [(last, wanted[1])]
    assert all(float((a - b).abs().max()) < 1e-4 for a, b in pairs)


def test_lengths_are_public_and_in_their_domain():
    x, at = torch.randn(2, 4, 3), reference_stage()
    secure = sectorch.secure(Reader(nn.GRU(3, 4, batch_first=True)).eval(), session=at.session)
    with pytest.raises(UnsupportedOpError, match=r"sectorch\.public"):
        secure(x, torch.tensor([4, 1]))
    for lengths in ([1, 4], [4, 0], [5, 4], [4], [2, 2, 2]):
        with pytest.raises(ArgumentError, match="lengths"):
            pack_padded_sequence(at.share(x), torch.tensor(lengths), batch_first=True)


def test_sequences_of_secrets_are_packed_too():
    parts = [torch.randn(3, 2), torch.randn(1, 2)]
    packed = pack_sequence([reference_stage().share(v) for v in parts])
    wanted = pack_sequence(parts)
    assert torch.equal(packed.batch_sizes, wanted.batch_sizes)
    assert float((packed.data.reveal() - wanted.data).abs().max()) < 1e-6  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(SectorchError):
        pad_packed_sequence(packed, total_length=3)[0].tolist()


@pytest.mark.parametrize("name", ["lstm", "projected", "gru", "rnn"])
def test_both_directions_at_once_are_bit_for_bit_one_after_the_other(name: str):
    options = {"lstm": (nn.LSTM, {}), "projected": (nn.LSTM, {"proj_size": 2}), "gru": (nn.GRU, {"bias": False}),
               "rnn": (nn.RNN, {"nonlinearity": "relu"})}  # fmt: skip
    make, more = options[name]
    torch.manual_seed(1)
    both, x = make(3, 4, bidirectional=True, **more).eval(), torch.randn(5, 2, 3)
    secure = lambda layer, x: sectorch.secure(layer, session=sectorch.Session(reference=True))(x)[0]
    parts = []
    for direction in ("", "_reverse"):
        one = make(3, 4, **more).eval()
        one.load_state_dict({k: both.state_dict()[k + direction] for k in one.state_dict()})
        parts.append(secure(one, x.flip(0)).flip(0) if direction else secure(one, x))
    assert torch.equal(secure(both, x), torch.cat(parts, -1))
