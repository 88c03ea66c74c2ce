"""Reproducible generators, one for each use, so that a run can be resumed.

For experiments only: secrets draw from `sectorch.choreography.streams`.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *path: object) -> int:
    """A 63-bit seed for one use, from the seed of a run and the names that lead to the use."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *path: object) -> torch.Generator:
    """A generator for one use; two uses with other names draw independently."""
    return torch.Generator().manual_seed(derive(seed, *path))
