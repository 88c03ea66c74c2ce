"""The exceptions of the CKKS side. Each says what came, what was expected, and the way out; none carries a secret."""

from __future__ import annotations

from ..errors import SectorchError


class SecurityLevelError(SectorchError, ValueError):
    """Parameters below 128-bit security, by SEAL's own table and check.

    Example:
        a modulus of 240 bits at degree 8192 is weaker than 128 bits of security; 218 bits is SEAL's limit: take a
        larger degree or a smaller depth

    What to do:
        Let `ckks.keygen(depth=...)` choose: it takes the smallest ring that is secure. A smaller depth, or fewer scale
        bits, needs a smaller modulus. Weaker parameters cannot be had.
    """


class LevelError(SectorchError, RuntimeError):
    """The modulus chain has no prime left for an operation.

    Example:
        square needs one more level, and the modulus chain (depth 3) is used up. Make keys with a larger depth
        (sectorch.ckks.explain(model, x) says which), fold layers, or lower a polynomial's degree

    What to do:
        Make keys with the depth that `ckks.explain(model, x)` names, or make the network shallower.
    """


class ScaleError(SectorchError, ValueError):
    """A value or a weight does not fit the scale and the modulus that a ciphertext has left.

    Example:
        the tensor was encrypted with bound=None; declare one with e.bounded(...) before it is shared

    What to do:
        Declare a bound (`e.bounded(...)`), scale weights or inputs, or make keys with more depth or another
        `scale_bits`, as the text says.
    """


class SlotError(SectorchError, ValueError):
    """More samples than slots, or two tensors whose slots hold different batches.

    Example:
        a batch of 9000 does not fit 8192 slots; keygen(depth, slots=9000) or cut it

    What to do:
        Cut the batch, or make keys with as many slots. Two tensors meet when they hold the same batch.
    """


class KeyMismatchError(SectorchError, RuntimeError):
    """A key, a ciphertext or a file of other parameters, or of another key set.

    Example:
        two tensors under different keys cannot meet; encrypt both under one public key

    What to do:
        Encrypt all that meets under one public key, and decrypt with the secret key that was made with it. The first
        letters of a key's identity stand in the text.
    """


class MissingKeyError(SectorchError, RuntimeError):
    """An operation needs a key that this holder was not given.

    Example:
        decrypt() needs the secret key, which is not here: decrypt(keys.secret)

    What to do:
        Decrypt at the key's holder. Keys for products and for rotations are made with the key pair: `ckks.keygen(...,
        rotations=steps)`.
    """


class MemoryBudgetError(SectorchError, MemoryError):
    """An operation or a run would take more memory than allowed; refused before it starts, with the estimate.

    Example:
        the run would take about 9.5 GiB of ciphertexts, more than the 4.0 GiB allowed; use a smaller input or network,
        or sectorch.ckks.memory_limit(bytes)

    What to do:
        Use a smaller input, network or depth; a smaller batch does not help, since each element is a ciphertext
        whatever the batch. Or allow more: `ckks.memory_limit(bytes)`.
    """


class SerialisationError(SectorchError, ValueError):
    """Bytes that are not what they should be: wrong magic, length, shape, parameters, or a residue beyond its prime.

    Example:
        weights.ckks is damaged: its length does not fit its head

    What to do:
        Have it sent or saved again. If the sender's file is whole, compare the versions of sectorch.
    """


class DisaggregationError(SectorchError, RuntimeError):
    """One more release would let the receiver take an aggregate apart. Nothing was released.

    Example:
        north releases no aggregate over 3 samples of south; at least 8 are needed

    What to do:
        Ask over more samples, for fewer numbers, or with more noise, as the text says. Allowing more (`leakage=`) is
        for the owner of the logits to decide.
    """
