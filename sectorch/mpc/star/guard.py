"""The guarded reveal: whether any value left its range is one bit, which Q learns in place of a result.

While a program runs, protocols raise flags: XOR-shared bits that are 1 where a value is outside the range in which the
program is proven right. Nobody knows them. At the end A and S hash all flags w that a result depends on into one
element of GF(2^64), under keys of k_SA, which Q never holds:

    z = sum_j k_j w_j,

zero if no flag is set, and uniform if one is: the hash is linear, so each party computes it on its own half. Where a
flag is e u xor l of bits that a comparison leaves, its AND is made here, all at once. A draws a key n of two words,
adds the key stream of n to its half of the result, and Q receives n + (z, k z). Without a flag that is n, and Q takes
the stream off again. With one it is uniform and says nothing of n: Q sees a tag that does not match, no result, and not
which value it was. S sees uniform words only.
"""

from __future__ import annotations

import functools

import torch

from ...choreography import Located, Message, Net, leaf, protocol
from ...choreography.located import compute
from ...choreography.streams import key_stream
from ...ring.bitplanes import planes, to_rows
from ...ring.field import inner_product
from .and_layers import AndLayer, and_layers
from .dealing_proofs import prove_pending
from .shares import Shares, each


def raise_flags(net: Net, flags: Shares) -> None:
    """Make what this call reveals depend on these XOR-shared words being zero. No message.

    Args:
        flags: words [W], or [3, W]: e, u and l of flags e u xor l. `guard` makes these ANDs, all in one round.
    """
    net.raised.append(flags)


def flags_of_bits(net: Net, bits: Shares) -> Shares:
    """Additive shares of 0 and 1 as XOR-shared words: the lowest bits of the halves are shares of the bit."""
    return each(_lowest, bits)


@leaf
def _lowest(v: torch.Tensor) -> torch.Tensor:
    return planes(to_rows(v))[0].clone()  # a view would keep all planes until the reveal


def kept_rows(words: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Packed bits of a tensor of this shape, without those that pad its last words."""
    count = shape.numel()
    return words if count % 64 == 0 or words.is_meta else words & _filled(count, words.device)


@functools.lru_cache(maxsize=32)
def _filled(count: int, device: torch.device) -> torch.Tensor:
    """Ones where a tensor of so many elements has them; of word w of W these are the first that t W + w < count."""
    with torch.inference_mode(False):
        return planes(to_rows(torch.ones(count, dtype=torch.int64, device=device)))[0].clone()


def linear_hash(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """sum_j k_j w_j in GF(2^64): [W] and [W + 1] -> (z, k z), with the last key for k."""
    z = inner_product(words, keys[:-1])
    return torch.cat((z, inner_product(z, keys[-1:])))


_LAST = (AndLayer(opened=(0, 1), ands=((0, 1),), into=(0,), onto=(2,)),)
"""e u xor l of the rows e, u, l."""


@leaf
def _beside(*words: torch.Tensor) -> torch.Tensor:
    return torch.cat(words, -1)


def finish_flags(net: Net, flags: tuple[Shares, ...]) -> list[Shares]:
    """The flags as words [W]. Rounds 1 where there are rows of e, u and l: online four bits a flag, dealt one."""
    found = [f for f in flags if len(f.shape) == 1]
    if len(found) < len(flags):
        rows = each(_beside, *(f for f in flags if len(f.shape) == 2))
        found.append(and_layers(net, rows, _LAST)[0])
    return found


@leaf(shapes=lambda keys, *flags: keys.new_empty(1))
def _one_word(keys: torch.Tensor, *flags: torch.Tensor) -> torch.Tensor:
    """One party's half of z."""
    return inner_product(torch.cat([keys[:0], *(f.reshape(-1) for f in flags)]), keys)


@protocol("joined", "docs/training.md")
def join_flags(net: Net, flags: tuple[Shares, ...]) -> Shares:
    """Many flags as one word [1], hashed under keys of k_SA: zero if none is set, and zero by chance once in 2^64.

    Rounds 0, and 1 for ANDs that are left to make. Nobody learns anything.
    """
    words = finish_flags(net, flags)
    keys = net.common(net.A, net.S, (sum(f.shape.numel() for f in words),), "join_keys")
    return each(_one_word, keys, *words)


@leaf
def _padded(v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """The tag and the elements of v, with the key stream of n on them."""
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
    """x padded by A so that who gets all of it can read it only if no flag is set.

    Args:
        x: the result, any shape. flags: as in `raise_flags`; may be none.

    Returns:
        shares [N + 1] of a tag and the padded elements of x, and the key, at Q, for `unpadded`.

    Rounds 2, beside the reveal's own, and 1 for ANDs that are left to make. 16 bytes from A to S, 16 from S to Q, and
    8 for the tag each way. A flag that is set goes unseen with a probability of 2^-64.
    """
    Q, A, S, words = net.Q, net.A, net.S, finish_flags(net, flags)
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
    """What is to be added to a padded value: nothing to its tag."""
    return torch.cat((values.new_zeros(1), values.reshape(-1)))


@leaf(shapes=lambda words, shape, *keys: (words[1:].view(shape), words[:1] == 0))
def remove_pad(words: torch.Tensor, shape: torch.Size, *keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """At Q: the result, and whether it is one [1]: zeros where the tag does not match.

    Args:
        words: [N + 1], the sum of what was padded. keys: those of every summand.
    """
    streams = sum(key_stream(key, words.shape[0]) for key in keys)
    plain = words - streams
    right = plain[:1] == 0
    return plain[1:].view(shape) * right[0], right
