"""The guarded reveal: Q learns a result only if no value left its range, and else that one did.

While a program runs, protocols raise flags: XOR-shared bits that are 1 where a value is outside the range in which the
program is proven right. No party knows them. Before the reveal A and S hash all flags w that a result depends on into
one element of GF(2^64), under keys of k_SA, which Q never holds:

    z = sum_j k_j w_j.

The hash is linear, so each party computes it on its own half. It is zero if no flag is set, and uniform if one is. A
flag may be left as e u xor l of three bits; the ANDs of all flags are computed here in one round.

A and S draw a key n of two words. A adds the key stream of n to its half of the result, and Q receives n + (z, k z).
If no flag is set that is n, and Q subtracts the stream. If one is set it is uniform and independent of n: Q sees a tag
that does not match, and learns neither the result nor which value it was. S receives uniform words only.
"""

from __future__ import annotations

import functools

import torch

from ...backend import RaisedFlags
from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute
from ...choreography.streams import key_stream
from ...ring.bitplanes import planes, to_rows
from ...ring.field import inner_product
from .and_layers import AndLayer, and_layers
from .dealing_proofs import prove_pending
from .shares import Shares, concatenate, each


def raise_flags(net: Net, flags: Shares) -> None:
    """Add flags to those of this call: a guarded reveal shows its result only if they are all zero. No message.

    Args:
        flags: XOR-shared words [W], or [3, W]: e, u and l of flags e u xor l, whose ANDs `guard` computes.
    """
    net.state(RaisedFlags).append(flags)


def flags_of_bits(net: Net, bits: Shares) -> Shares:
    """Convert additive shares of 0 and 1 to XOR-shared words. No message: the halves' lowest bits share the bit."""
    return each(_lowest, bits)


@leaf
def _lowest(v: torch.Tensor) -> torch.Tensor:
    return planes(to_rows(v))[0].clone()  # a view would hold the memory of all planes until the reveal


def clear_padding(words: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Packed bits of a tensor of this shape, with zeros in the place of padding."""
    count = shape.numel()
    return words if count % 64 == 0 or words.is_meta else words & _elements_mask(count, words.device)


@functools.lru_cache(maxsize=32)
def _elements_mask(count: int, device: torch.device) -> torch.Tensor:
    """Packed ones for so many elements, and zeros for padding: bit t of word w of W is element t W + w."""
    with torch.inference_mode(False):
        return planes(to_rows(torch.ones(count, dtype=torch.int64, device=device)))[0].clone()


def linear_hash(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Hash words: z = sum_j k_j w_j in GF(2^64), [W] and [W + 1] -> (z, k z), where k is the last key."""
    # Both words of n are hidden where a flag is set: by z alone one would be, and Q could try its 2^64 values.
    z = inner_product(words, keys[:-1])
    return torch.cat((z, inner_product(z, keys[-1:])))


_FLAG_LAYER = (AndLayer(opened_rows=(0, 1), ands=((0, 1),), into=(0,), onto=(2,)),)
"""Computes e u xor l of the rows e, u, l."""


def finish_flags(net: Net, flags: tuple[Shares, ...]) -> list[Shares]:
    """Return all flags as words [W], with the ANDs of those that are left as e, u and l.

    Rounds 0, or 1 for ANDs: online four bits a flag, dealt one. Nobody learns anything.
    """
    words = [f for f in flags if len(f.shape) == 1]
    if len(words) < len(flags):
        rows = each(concatenate, *(f for f in flags if len(f.shape) == 2), dim=-1)
        words.append(and_layers(net, rows, _FLAG_LAYER)[0])
    return words


@leaf(shapes=lambda keys, *flags: keys.new_empty(1))
def _one_word(keys: torch.Tensor, *flags: torch.Tensor) -> torch.Tensor:
    """One party's half of z."""
    return inner_product(torch.cat([keys[:0], *(f.reshape(-1) for f in flags)]), keys)


@protocol("joined", "docs/training.md")
def join_flags(net: Net, flags: tuple[Shares, ...]) -> Shares:
    """Hash many flags to one word [1], under keys of k_SA.

    It is zero if no flag is set; if one is, it is zero with a probability of 2^-64.

    Rounds 0, or 1 for ANDs that are left (`finish_flags`). Nobody learns anything.
    """
    words = finish_flags(net, flags)
    keys = net.common(net.A, net.S, (sum(f.shape.numel() for f in words),), "join_keys")
    return each(_one_word, keys, *words)


@leaf
def _padded(v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """The tag and the elements of v, with the key stream of n added."""
    stream = key_stream(n, v.numel() + 1)
    stream[1:] += v.reshape(-1)
    return stream


@leaf(shapes=lambda keys, *flags: keys.new_empty(2))
def _hashed(keys: torch.Tensor, *flags: torch.Tensor) -> torch.Tensor:
    """One party's half of (z, k z)."""
    return linear_hash(torch.cat([keys[:0], *(f.reshape(-1) for f in flags)]), keys)


@protocol("guard", "docs/protocols.md", [
    Message("flags_A", "A", "S", "rho of k_QA", opens="Q"),
    Message("key", "S", "Q", "n, where no flag is set, and z else", "whether a value left its range"),
])  # fmt: skip
def guard(net: Net, x: Shares, flags: tuple[Shares, ...]) -> tuple[Shares, Located]:
    """Pad a result so that Q can read it only if no flag is set, and send Q the key.

    Args:
        x: the result, any shape.
        flags: as in `raise_flags`; may be empty.

    Returns:
        Shares [N + 1] of a tag and the padded elements of x, to be revealed; and the key, at Q, for `remove_pad`.

    Rounds 2, at the same time as the reveal's own, and 1 for ANDs that are left (`finish_flags`). 16 bytes from A to S,
    16 from S to Q, and 8 for the tag in the reveal's messages. Q learns whether a flag is set, the others nothing. A
    flag that is set is missed with a probability of 2^-64.
    """
    Q, A, S, words = net.Q, net.A, net.S, finish_flags(net, flags)
    # Before Q can learn anything: a false dealing has to be found while the result is still padded.
    prove_pending(net)
    count = sum(f.shape.numel() for f in words)
    keys = net.common(A, S, (count + 1,), "hash_keys")
    n = net.common(A, S, (2,), "n")
    rho = net.common(Q, A, (2,), "rho")
    hashed = each(_hashed, keys, *words)
    sent = (hashed.A ^ n ^ rho).send(A, S, "flags_A")
    key = (sent ^ hashed.S).send(S, Q, "key")
    return Shares(_padded(x.A, n), compute(beside_tag, x.S)), key ^ rho


def beside_tag(values: torch.Tensor) -> torch.Tensor:
    """Elements that can be added to a padded result, with zero for its tag: [N + 1]."""
    return torch.cat((values.new_zeros(1), values.reshape(-1)))


@leaf(shapes=lambda words, shape, *keys: (words[1:].view(shape), words[:1] == 0))
def remove_pad(words: torch.Tensor, shape: torch.Size, *keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """At Q: the result, and whether the tag matches [1]. The result is zeros where it does not.

    Args:
        words: [N + 1], the sum of padded results.
        keys: the key of every summand.
    """
    streams = sum(key_stream(key, words.shape[0]) for key in keys)
    plain = words - streams
    right = plain[:1] == 0
    return plain[1:].view(shape) * right[0], right
