"""SEAL's per-ciphertext work over the cores.

SEAL's Python binding holds the interpreter's lock, so threads do not help. Forked children do their share with the
SEAL objects that they inherit (no key is ever serialised for it), write residues into shared memory, and end. They call
SEAL, numpy and zstd only.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable

import numpy as np
import torch

from .errors import SerialisationError

_WORTH_IT = 24  # ciphertexts; below, a fork costs more than it gives
_WORKERS = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1]


def set_workers(count: int) -> None:
    """Processes that share SEAL's work; 1 forks none."""
    _WORKERS[0] = max(1, int(count))


def spread(one: Callable[[int], np.ndarray], out: torch.Tensor) -> None:
    """out[i] = one(i) for every i, in forked processes where that pays. One failing call fails the whole.

    Raises:
        SerialisationError: a child failed; the first failing call is run again here, so that its own error appears.
    """
    count, workers = out.shape[0], min(_WORKERS[0], out.shape[0])
    array = out.numpy()
    if workers < 2 or count < _WORTH_IT:
        for i in range(count):
            array[i] = one(i)
        return
    bounds = [count * w // workers for w in range(workers + 1)]
    size = array[0].nbytes
    shared = mmap.mmap(-1, max(1, (count - bounds[1]) * size))
    view = np.frombuffer(shared, dtype=array.dtype, count=(count - bounds[1]) * (size // 8))
    view = view.reshape(count - bounds[1], *array.shape[1:])
    children = []
    for w in range(1, workers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                for i in range(bounds[w], bounds[w + 1]):
                    view[i - bounds[1]] = one(i)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    try:
        for i in range(bounds[1]):
            array[i] = one(i)
    finally:
        failed = [w for w, child in enumerate(children, 1) if os.waitpid(child, 0)[1] != 0]
    if failed:
        one(bounds[failed[0]])
        raise SerialisationError("a worker process failed; sectorch.ckks.set_workers(1) runs everything in this one")
    array[bounds[1] :] = view
