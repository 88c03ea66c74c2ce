"""SEAL's per-ciphertext work over the cores.

SEAL's Python binding holds the interpreter's lock, so threads do not help. Forked children do their share with the
SEAL objects that they inherit (no key is ever serialised for it), write residues into shared memory, and end. They call
SEAL, numpy and zstd only: torch's threads do not exist in a fork.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable

import numpy as np
import torch

from ..errors import SerialisationError
from .memory import room

_WORTH_IT = 24  # ciphertexts; below, a fork costs more than it gives
_WORKERS = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1]


def set_workers(count: int) -> None:
    """Processes that share SEAL's work; 1 forks none."""
    _WORKERS[0] = max(1, int(count))


def spread(one: Callable[[int], np.ndarray], shape: tuple[int, ...], what: str) -> torch.Tensor:
    """A tensor of residues with one(i) at every i, made in forked processes where that pays.

    Raises:
        MemoryBudgetError: before anything is done.
        SerialisationError: a child failed; the first failing call is run again here, so that its own error appears.
    """
    count, workers = shape[0], min(_WORKERS[0], shape[0])
    forked = workers > 1 and count >= _WORTH_IT
    out = room(shape, False, what, shared=forked)
    array = out.numpy()
    bounds = [count * w // workers for w in range(workers + 1)] if forked else [0, count]
    children = []
    for low, high in itertools.pairwise(bounds[1:]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                for i in range(low, high):
                    array[i] = one(i)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    try:
        for i in range(bounds[1]):
            array[i] = one(i)
    finally:
        failed = [low for low, child in zip(bounds[1:], children, strict=False) if os.waitpid(child, 0)[1] != 0]
    if failed:
        one(failed[0])
        raise SerialisationError("a worker process failed; sectorch.ckks.set_workers(1) runs everything in this one")
    return out
