"""Oblivious transfer extension: any number of transfers from 128 base transfers and symmetric operations.

Q has two seeds in each of 128 rows, the garbler the ones that the bits of Delta choose. Q expands both to streams t
and t' of one bit for each transfer, and sends u = t xor t' xor r for its choice bits r, row by row. The garbler has in
row i either t_i or t'_i, and with Delta_i u_i gets q_i = t_i xor Delta_i r. Transposed, row j says

    t_j = q_j xor r_j Delta.

That is a label of free-XOR garbling as it stands: q_j the label for zero, and Q holds the one for its bit. So garbled
inputs need no further message. Sources: Y. Ishai, J. Kilian, K. Nissim, E. Petrank, "Extending oblivious transfers
efficiently", CRYPTO 2003; with streams in place of transferred columns G. Asharov, Y. Lindell, T. Schneider, M. Zohner,
"More efficient oblivious transfer and extensions for faster secure computation", CCS 2013; hashed as in V. Kolesnikov,
R. Kumaresan, "Improved OT extension for transferring short secrets", CRYPTO 2013, for one choice of two.
"""

from __future__ import annotations

import torch

from ..choreography import Located, Message, Net, leaf, protocol
from ..ring.bitplanes import planes, rows, words_for
from .hashing import WORDS, expand, hash_blocks
from .pair import TRANSFERS, Pair
from .sealing import deliver


@leaf
def pack(bits: torch.Tensor) -> torch.Tensor:
    """Bits (int64, any shape) -> words [W]: bit t of word w is element t W + w, as in `sectorch.ring.bitplanes`."""
    positions = torch.arange(64, device=bits.device).unsqueeze(1)
    return (rows(bits) << positions).sum(0)


def unpack(words: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `pack`."""
    positions = torch.arange(64, device=words.device).unsqueeze(1)
    return ((words >> positions) & 1).reshape(-1)[: shape.numel()].view(shape)


def transposed(columns: torch.Tensor, count: int) -> torch.Tensor:
    """Streams [128, W] -> blocks [count, 2]: block j holds bit j of every stream."""
    halves = planes(columns.view(WORDS, 64, -1))
    return halves.permute(1, 2, 0).reshape(-1, WORDS)[:count]


def _column_shapes(_seeds: torch.Tensor, bits: torch.Tensor, _nonce: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return bits.new_empty((TRANSFERS, words_for(bits.numel()))), bits.new_empty((*bits.shape, WORDS))


@leaf(shapes=_column_shapes)
def choose_columns(both_seeds: torch.Tensor, bits: torch.Tensor, nonce: torch.Tensor):
    """Q's message [128, W], and its blocks [*bits.shape, 2], for choice bits."""
    packed = pack(bits)
    first, second = (expand(both_seeds[:, i], nonce, packed.shape[0]) for i in range(2))
    return second.bitwise_xor_(first).bitwise_xor_(packed), transposed(first, bits.numel()).view(*bits.shape, WORDS)


@leaf(shapes=lambda _seeds, _delta, columns, shape, _nonce: columns.new_empty((*shape, WORDS)))
def zero_blocks(
    seeds: torch.Tensor, delta: torch.Tensor, columns: torch.Tensor, shape: torch.Size, nonce: torch.Tensor
):
    """The garbler's blocks [*shape, 2] from Q's message."""
    chosen = -unpack_bits(delta).unsqueeze(1)
    own = expand(seeds, nonce, columns.shape[1])
    return transposed(own.bitwise_xor_(chosen & columns), shape.numel()).view(*shape, WORDS)


def unpack_bits(block: torch.Tensor) -> torch.Tensor:
    """The 128 bits of one block [2]."""
    return ((block.unsqueeze(1) >> torch.arange(64)) & 1).view(-1)


@protocol(
    "garbled_choices",
    "Asharov, Lindell, Schneider, Zohner 2013",
    [Message("columns", "Q", "S", "the streams of seeds that the garbler lacks")],
)
def correlated_transfer(net: Net, pair: Pair, bits: Located) -> tuple[Located, Located]:
    """Blocks q at the garbler and t = q xor r Delta at Q, for Q's choice bits r.

    Args:
        bits: int64 zeros and ones at Q, any shape.

    Returns:
        q and t, [*shape, 2].

    Rounds 1 with S, 2 with A. 16 bytes per bit (padded to 64 bits in all), from Q. The garbler receives pseudorandom
    bits, Q nothing.
    """
    Q, garbler = net.Q, pair.garbler
    nonce, shape = net.common(Q, garbler, (2,), "nonce"), bits.shape
    columns, at_Q = choose_columns(pair.both_seeds, bits, nonce)
    columns = deliver(net, columns, Q, garbler, "columns")
    return zero_blocks(pair.seeds, pair.delta, columns, shape, nonce), at_Q


@protocol(
    "garbled_transfer",
    "Ishai, Kilian, Nissim, Petrank 2003",
    [Message("sealed", "S", "Q", "hashes of q and q xor Delta", "of each two messages the one it chose")],
)
def oblivious_transfer(net: Net, pair: Pair, messages: Located, bits: Located) -> Located:
    """1-out-of-2 oblivious transfer: Q learns message r of each two, and the garbler does not learn r.

    Args:
        messages: int64 [*shape, 2 (choice), 2 (words)] at the garbler: 128 bits each.
        bits: int64 zeros and ones [*shape] at Q.

    Returns:
        [*shape, 2] at Q: the chosen messages.

    Rounds 2 with S, 4 with A; bytes 16 per transfer from Q and 32 from the garbler.
    """
    garbler = pair.garbler
    tweak = net.common(net.Q, garbler, (2,), "tweak")
    q, t = correlated_transfer(net, pair, bits)
    sealed = _sealed(messages, q, pair.delta, tweak)
    return _opened(deliver(net, sealed, garbler, net.Q, "sealed"), t, bits, tweak)


def _key(tweak: torch.Tensor) -> list[bytes]:
    return [tweak.numpy().tobytes()]


@leaf(shapes=lambda messages, *_: torch.empty_like(messages))
def _sealed(messages: torch.Tensor, q: torch.Tensor, delta: torch.Tensor, tweak: torch.Tensor) -> torch.Tensor:
    both = torch.stack((q, q ^ delta), -2)
    return hash_blocks(_key(tweak), both.unsqueeze(0))[0].bitwise_xor_(messages)


@leaf(shapes=lambda _sealed, t, *_: torch.empty_like(t))
def _opened(sealed: torch.Tensor, t: torch.Tensor, bits: torch.Tensor, tweak: torch.Tensor) -> torch.Tensor:
    chosen = torch.where(bits.unsqueeze(-1) == 1, sealed[..., 1, :], sealed[..., 0, :])
    return hash_blocks(_key(tweak), t.unsqueeze(0))[0].bitwise_xor_(chosen)
