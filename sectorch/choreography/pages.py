"""Memory of freed tensors is kept for the next ones, until there is much of it that they cannot use."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch

LARGEST = (32 << 20) - (1 << 16)
"""Bytes; of no larger block does glibc learn."""
KEPT = 1 << 30
"""Bytes that are kept: ResNet-50 at 224 frees and takes some 300 MiB in each call."""
_TRIM_THRESHOLD = -1  # malloc.h
_NAMED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


@functools.cache
def keep_pages() -> None:
    """From now on glibc keeps up to 1 GiB of what is freed, in blocks of up to 32 MiB.

    Until then it gives each block of 128 KiB and more back to the operating system, and every page of the next one is
    made anew when it is first touched: half the time of 100,000 ReLUs. How large a block it keeps goes by the largest
    that was freed, so one is, untouched. Where the environment names limits, or the C library is another one, nothing
    changes.
    """
    if any(name in os.environ for name in _NAMED):
        return
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")
    limit = _glibc("mallopt")
    if limit is not None:
        limit(_TRIM_THRESHOLD, KEPT)


def give_back() -> None:
    """Have glibc give what is kept back to the operating system.

    Weights are encoded, masked and brought into tiles between small objects that stay. Each leaves a gap that is too
    small for the next one of its size: half as much memory again as all tiles take.
    """
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


class Spare:
    """Memory of the last update, handed out again once nobody holds it any more: the first touch of fresh pages costs
    more than a small net's whole step."""

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def take(self, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the dtype and device of `like`."""
        kept = self._kept
        fits = (kept.shape, kept.dtype, kept.device) == (shape, like.dtype, like.device)
        # Two holders: the tensor kept here, and the storage object that is asked. Views, arrays and aliases add one.
        if not fits or torch._C._storage_Use_Count(kept.untyped_storage()._cdata) > 2:
            self._kept = like.new_empty(shape)
        return self._kept.view(shape)
