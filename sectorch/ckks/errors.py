"""The exceptions of the CKKS side. Each says what came, what was expected, and the way out; none carries a secret."""

from __future__ import annotations

from ..errors import SectorchError


class SecurityLevelError(SectorchError, ValueError):
    """Parameters below 128-bit security, by SEAL's own table and check."""


class LevelError(SectorchError, RuntimeError):
    """The modulus chain has no prime left for an operation."""


class ScaleError(SectorchError, ValueError):
    """A value or a weight does not fit the scale and the modulus that a ciphertext has left."""


class SlotError(SectorchError, ValueError):
    """More samples than slots, or two tensors whose slots hold different batches."""


class KeyMismatchError(SectorchError, RuntimeError):
    """A key, a ciphertext or a file of other parameters, or of another key set."""


class MissingKeyError(SectorchError, RuntimeError):
    """An operation needs a key that this holder was not given."""


class MemoryBudgetError(SectorchError, MemoryError):
    """An operation or a run would take more memory than allowed; refused before it starts, with the estimate."""


class SerialisationError(SectorchError, ValueError):
    """Bytes that are not what they should be: wrong magic, length, shape, parameters, or a residue beyond its prime."""
