"""Errors of runs that several packages raise: about run folders, ciphertexts and plots."""

from __future__ import annotations

from .base import SectorchError


class CheckpointError(SectorchError, RuntimeError):
    """A run folder belongs to another run, or cannot be read.

    Example:
        runs/a holds another run, which differs in seed, rounds; name another folder or remove that one

    What to do:
        Name another folder (`--out`), or give the settings with which the folder was begun. Where a file is damaged,
        remove what the text names: finished rounds that are whole are kept.
    """


class CorruptedCiphertextError(SectorchError, RuntimeError):
    """Ciphertexts differ from those that were sent, or decrypt to numbers that no honest computation gives.

    Example:
        gradients arrived damaged: they do not have the digest that they were sent with; ask for them again

    What to do:
        Run again from the folder: what was damaged was not counted. If it comes again, a link or a machine damages
        data, or a party does not follow the protocol; or the model's values leave the number format: scale the inputs
        down.
    """


class PlotError(SectorchError, ImportError):
    """A plot needs matplotlib, which is not installed.

    Example:
        a plot needs matplotlib, which is not installed: pip install 'sectorch[plots]', or leave plots out
        (--no-plots)

    What to do:
        `pip install 'sectorch[plots]'`, or leave them out.
    """
