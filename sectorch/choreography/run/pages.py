"""Memory of freed tensors is kept for the next ones."""

from __future__ import annotations

import functools

import torch

LARGEST = (32 << 20) - (1 << 16)
"""Bytes; of no larger block does glibc learn."""


@functools.cache
def keep_pages() -> None:
    """From now on glibc keeps up to 64 MiB of what is freed, as in any process that has freed a large tensor.

    Until then it gives each block of 128 KiB and more back to the operating system, and every page of the next one is
    made anew when it is first touched: half the time of 100,000 ReLUs. It goes by the largest block that was freed, so
    one is, untouched. Where the environment names limits, or the C library is another one, nothing changes.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")
