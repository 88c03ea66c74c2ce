"""Half gates: garbling with free XOR and two ciphertexts for an AND, and the hash of garbling.

A wire has a label for zero, K, and a label for one, K xor Delta. The lowest bit of Delta is one, so the lowest bit of a
label, its colour, distinguishes the two without showing which is which (point and permute). A step of a circuit is
garbled for the whole batch at once, a part of the gates at a time so that the work stays in the cache.

Wire labels are int64 [wires, n, 2] for a batch of n, tables [ands, 2, n, 2].

Source: S. Zahur, M. Rosulek, D. Evans, "Two halves make a whole", EUROCRYPT 2015, Figure 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..choreography import Located, leaf
from ..choreography.streams import PairKey, random_secret
from .circuit import ONE, Circuit, GateStep

# The hash H(x, i) = E(i, sigma(x)) xor sigma(x), with AES-128 as the ideal cipher E.
#
# sigma(l | r) = (l xor r | l) is a linear orthomorphism. H is tweakable circular correlation robust for an ideal
# cipher. The advantage of an adversary after p evaluations of AES grows with mu p / 2^127, where mu is the number of
# uses of one tweak: C. Guo, J. Katz, X. Wang, C. Weng, Y. Yu, "Better concrete security for half-gates garbling (in the
# multi- instance setting)", CRYPTO 2020. The tweak i is the AES key: public, and one for each half gate. One key
# schedule serves a batch. With one fixed key, as in H(x, i) = pi(2x xor i) xor 2x xor i of the half-gates paper, mu is
# the number of all gates ever garbled; the paper of 2020 has the attack.
#
# A label, like any 128-bit block, is a pair of int64 words [..., 2].


WORDS = 2
"""int64 words in a label."""

LABEL_BYTES = 16

SLACK = 2
"""Words after an output buffer: ECB of the `cryptography` package requires them, and does not write them."""

_ZEROS = memoryview(bytes(1 << 16))


def sigma(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """(l | r) -> (l xor r | l), blocks [..., 2]."""
    out = torch.empty_like(x) if out is None else out
    torch.bitwise_xor(x[..., 0], x[..., 1], out=out[..., 0])
    out[..., 1] = x[..., 0]
    return out


def tweaks(nonce: torch.Tensor, first: int, count: int) -> list[bytes]:
    """The AES keys nonce + first ... nonce + first + count - 1 (mod 2^128), for a nonce of two words."""
    start = int.from_bytes(nonce.numpy().data.cast("B"), "little") + first
    return [((start + i) % (1 << 128)).to_bytes(LABEL_BYTES, "little") for i in range(count)]


def encrypt(keys: Iterable[bytes], blocks: torch.Tensor, out: torch.Tensor) -> None:
    """AES-128 of contiguous blocks [k, ..., 2] under k keys, into `out`, which is flat with `SLACK` more words."""
    source, target = (t.numpy().reshape(-1).data.cast("B") for t in (blocks, out))
    size = len(source) // max(1, blocks.shape[0])
    for i, key in enumerate(keys):
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        cipher.update_into(source[i * size : (i + 1) * size], target[i * size : (i + 1) * size + 8 * SLACK])


def hash_blocks(keys: list[bytes], x: torch.Tensor) -> torch.Tensor:
    """H of blocks x [k, ..., 2], the i-th of the first dimension under the i-th key."""
    prepared = sigma(x)
    out = torch.empty(x.numel() + SLACK, dtype=torch.int64)
    encrypt(keys, prepared, out)
    return out[: x.numel()].view(x.shape).bitwise_xor_(prepared)


def expand(seeds: torch.Tensor, nonce: torch.Tensor, words: int) -> torch.Tensor:
    """Streams [k, words] from seeds [k, 2]: AES-128 in counter mode, from the nonce (two words) on."""
    out = torch.empty(seeds.shape[0], words, dtype=torch.int64)
    start = bytes(nonce.numpy().data.cast("B"))
    for seed, row in zip(seeds.contiguous().numpy(), out.numpy(), strict=True):
        stream = Cipher(algorithms.AES(seed.tobytes()), modes.CTR(start)).encryptor()
        target = row.data.cast("B") if words else memoryview(b"")
        for at in range(0, len(target), len(_ZEROS)):
            part = target[at : at + len(_ZEROS)]
            stream.update_into(_ZEROS[: len(part)], part)
    return out


def private_words(*shape: int) -> torch.Tensor:
    """Uniform int64 words that only the caller knows, from a stream (`choreography/streams.py`) under a fresh
    secret."""
    count = torch.Size(shape).numel()
    return PairKey(random_secret(), b"").words("private", 0, 0, count).view(shape)


PART = 1 << 13
"""The labels of one operand that are processed at a time: 128 KiB."""


class _Scratch:
    """Buffers for a part of a step, reused for every part: 2 sides x `values` blocks for each gate and element."""

    def __init__(self, n: int, values: int):
        self.gates = max(1, PART // max(1, n))
        self._shape = (2, values, n, 2)
        size = self.gates * torch.Size(self._shape).numel()
        self._prepared = torch.empty(size, dtype=torch.int64)
        self._hashed = torch.empty(size + SLACK, dtype=torch.int64)
        self._masks = torch.empty(self.gates, 2, n, 2, dtype=torch.int64)

    def blocks(self, gates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cipher's input [gates, side, value, n, 2], and the flat buffer for its output."""
        size = gates * torch.Size(self._shape).numel()
        return self._prepared[:size].view(gates, *self._shape), self._hashed[: size + SLACK]

    def colours(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """All ones for labels of colour one, in both words: [gates, side, n, 2]."""
        masks = self._masks[: left.shape[0]]
        torch.bitwise_and(left[..., 0], 1, out=masks[:, 0, :, 0])
        torch.bitwise_and(right[..., 0], 1, out=masks[:, 1, :, 0])
        masks[..., 0].neg_()
        masks[..., 1] = masks[..., 0]
        return masks

    def hashed(self, nonce: torch.Tensor, first: int, gates: int) -> torch.Tensor:
        """H of the cipher's inputs under the tweaks 2 g and 2 g + 1 of gate g: [gates, side, value, n, 2]."""
        prepared, out = self.blocks(gates)
        encrypt(tweaks(nonce, 2 * first, 2 * gates), prepared.view(2 * gates, -1), out)
        return out[:-SLACK].view(prepared.shape).bitwise_xor_(prepared)

    def parts(self, step: GateStep, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Iterator[tuple]:
        """A step in parts: the number of a part's first AND, its operands x and y, its place for results, and the
        cipher's input with sigma of x and y at value 0."""
        count = step.out.stop - step.out.start
        for at in range(0, count, self.gates):
            x, y = left[at : at + self.gates], right[at : at + self.gates]
            prepared, _ = self.blocks(x.shape[0])
            sigma(x, prepared[:, 0, 0])
            sigma(y, prepared[:, 1, 0])
            yield step.first + at, x, y, out[at : at + self.gates], prepared


def _store(circuit: Circuit, one: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    store = inputs.new_empty((circuit.slots, *inputs.shape[1:]))
    store[ONE] = one
    store[1 : 1 + circuit.inputs] = inputs
    return store


def _garbled_shapes(
    circuit: Circuit, _delta: torch.Tensor, inputs: torch.Tensor, _nonce: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n = inputs.shape[1]
    return inputs.new_empty((circuit.ands, 2, n, 2)), inputs.new_empty((len(circuit.outputs), n, 2))


@leaf(shapes=_garbled_shapes)
def garble(
    circuit: Circuit, delta: torch.Tensor, inputs: torch.Tensor, nonce: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Garble a circuit: the garbler's part.

    Args:
        delta: [2], its lowest bit is one.
        inputs: zero labels of all inputs, [inputs, n, 2].
        nonce: [2], public, used for this garbling alone.

    Returns:
        The tables, [ands, 2, n, 2], and the zero labels of the outputs, [outputs, n, 2].
    """
    n = inputs.shape[1]
    tables = inputs.new_empty((circuit.ands, 2, n, 2))
    scratch = _Scratch(n, 2)
    wide, wide_sigma = delta.expand(n, 2).contiguous(), sigma(delta).expand(n, 2).contiguous()

    def gate(step: GateStep, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        for first, x, y, result, prepared in scratch.parts(step, left, right, out):
            torch.bitwise_xor(prepared[:, :, 0], wide_sigma, out=prepared[:, :, 1])
            hashed = scratch.hashed(nonce, first, x.shape[0])
            colours = scratch.colours(x, y)
            table, zero = tables[first : first + x.shape[0]], hashed[:, :, 0]
            both = hashed[:, :, 1].bitwise_xor_(zero)
            # T_G = H(A0) + H(A1) + p_b Delta, T_E = H(B0) + H(B1) + A0, and the zero label of the result is
            # H(A0) + p_a T_G + H(B0) + p_b (T_E + A0).
            torch.bitwise_and(colours[:, 1], wide, out=table[:, 0]).bitwise_xor_(both[:, 0])
            torch.bitwise_xor(both[:, 1], x, out=table[:, 1])
            colours[:, 0].bitwise_and_(table[:, 0])
            colours[:, 1].bitwise_and_(both[:, 1])
            colours.bitwise_xor_(zero)
            torch.bitwise_xor(colours[:, 0], colours[:, 1], out=result)

    return tables, circuit.run(_store(circuit, delta, inputs), gate)


@leaf(shapes=lambda circuit, inputs, *_: inputs.new_empty((len(circuit.outputs), *inputs.shape[1:])))
def evaluate(circuit: Circuit, inputs: torch.Tensor, tables: torch.Tensor, nonce: torch.Tensor) -> torch.Tensor:
    """Evaluate a garbled circuit: one label of each input, [inputs, n, 2], to one of each output, [outputs, n, 2]."""
    n = inputs.shape[1]
    scratch = _Scratch(n, 1)

    def gate(step: GateStep, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        for first, x, y, result, _ in scratch.parts(step, left, right, out):
            hashed = scratch.hashed(nonce, first, x.shape[0])[:, :, 0]
            colours = scratch.colours(x, y)
            table = tables[first : first + x.shape[0]]
            # The label of the result is H(A) + s_a T_G + H(B) + s_b (T_E + A).
            colours[:, 0].bitwise_and_(table[:, 0])
            colours[:, 1].bitwise_and_(torch.bitwise_xor(table[:, 1], x))
            colours.bitwise_xor_(hashed)
            torch.bitwise_xor(colours[:, 0], colours[:, 1], out=result)

    return circuit.run(_store(circuit, torch.zeros_like(inputs[:1, :, :]), inputs), gate)


Labels = TypeVar("Labels", torch.Tensor, Located)


def colours(labels: Labels) -> Labels:
    """The colour bits of labels [..., 2]. The colours of zero labels decode those of an evaluation."""
    return labels[..., 0] & 1


@leaf(shapes=lambda _circuit, _delta, zero, _nonce: (zero[..., 0], zero[..., 0]))
def share_outputs(
    circuit: Circuit, delta: torch.Tensor, zero: torch.Tensor, nonce: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the garbler's additive share of each output bit, and the word from which the evaluator gets its own.

    A projection to Z_2^64 (Ball, Malkin, Rosulek, "Garbling gadgets for Boolean and arithmetic circuits", CCS 2016)
    with row reduction: the evaluator's share for the label of colour zero is that label's hash, and one word
    corrects the hash of the other. Both shares are pseudorandom.

    Args:
        zero: zero labels of the outputs, [outputs, n, 2].

    Returns:
        Shares [outputs, n] and words [outputs, n].
    """
    # The label of colour zero stands for the bit p, the colour of the zero label.
    p = colours(zero)
    plain = zero ^ (-p).unsqueeze(-1) & delta
    both = torch.stack((plain, plain ^ delta), 1)
    # The ANDs have used the tweaks before: a tweak must not hash a second label.
    hashed = hash_blocks(tweaks(nonce, 2 * circuit.ands, both.shape[0]), both)[..., 0]
    return p - hashed[:, 0], 1 - 2 * p + hashed[:, 0] - hashed[:, 1]


@leaf(shapes=lambda _circuit, _labels, words, _nonce: torch.empty_like(words))
def take_share(circuit: Circuit, labels: torch.Tensor, words: torch.Tensor, nonce: torch.Tensor) -> torch.Tensor:
    """The evaluator's additive share of each output bit, [outputs, n], from its labels and the garbler's words."""
    hashed = hash_blocks(tweaks(nonce, 2 * circuit.ands, labels.shape[0]), labels)[..., 0]
    return hashed + words * colours(labels)
