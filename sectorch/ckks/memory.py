"""How much memory ciphertexts may take. Asked before room is made, so that a refusal leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MemoryBudgetError

LIMIT_BYTES = 12 << 30
_limit = [LIMIT_BYTES]


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[None]:
    """Within this context one operation may make at most so many bytes of ciphertexts."""
    previous, _limit[0] = _limit[0], int(limit_bytes)
    try:
        yield
    finally:
        _limit[0] = previous


def limit() -> int:
    """The bytes allowed now."""
    return _limit[0]


def check_memory(needed: int, what: str, dry: bool = False) -> None:
    """Raises:
    MemoryBudgetError: with the estimate and the ways out. Never in a dry run, which makes nothing.
    """
    if needed > _limit[0] and not dry:
        raise MemoryBudgetError(
            f"{what} would take {needed / 2**30:.1f} GiB of ciphertexts, more than the {_limit[0] / 2**30:.1f} GiB "
            f"allowed. Every element is a ciphertext whatever the batch: use a smaller input or network, a smaller "
            f"depth (a smaller ring), or sectorch.ckks.memory_limit(bytes)"
        )
