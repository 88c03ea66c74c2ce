"""Memory of freed tensors is kept for the next ones."""

from __future__ import annotations

import ctypes
import functools
import os

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
    limit = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if limit is not None:
        limit(_TRIM_THRESHOLD, KEPT)
