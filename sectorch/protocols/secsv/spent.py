"""What a run took: seconds by kind of work, as Table 2 of SecSV divides them; what was sent; products and rotations."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...choreography import leaf
from ...choreography.ledger import Observer, observers
from ...choreography.steps import Sent

KINDS = ("arithmetic", "encryption", "decryption", "sharing")


class Spent(Observer):
    """Adds up what happens inside its block: of all parties, who in a simulation work one after another.

    Attributes:
        seconds: by kind of work.
        bytes, messages: of what crossed the edges, by "sender's role>receiver's role>protocol/label".
        products, rotations: homomorphic operations.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: Counter = Counter()
        self.messages: Counter = Counter()
        self.products = self.rotations = 0

    def message(self, line: Sent, value: torch.Tensor) -> None:
        key = f"{line.src.role}>{line.dst.role}>{line.protocol}/{line.label}"
        self.bytes[key] += line.bytes
        self.messages[key] += 1

    def record(self) -> dict:
        """For a line of the run folder."""
        return dict(
            seconds=dict(self.seconds), bytes=dict(self.bytes), messages=dict(self.messages),
            products=self.products, rotations=self.rotations,
        )  # fmt: skip


def _running() -> Iterator[Spent]:
    return (observer for observer in observers() if isinstance(observer, Spent))


@contextmanager
def during(kind: str) -> Iterator[None]:
    """Count the block's seconds as work of a kind."""
    start = time.perf_counter()
    try:
        yield
    finally:
        for spent in _running():
            spent.seconds[kind] += time.perf_counter() - start


def tally(products: int, rotations: int = 0) -> None:
    """Count homomorphic operations."""
    for spent in _running():
        spent.products += products
        spent.rotations += rotations


def work(kind: str, shapes: Callable | None = None) -> Callable[[Callable], Callable[..., Any]]:
    """Decorate what one party computes alone: a step of the choreography, whose seconds are work of a kind.

    Args:
        shapes: the result's shapes from those of the operands, as meta tensors; f itself unless given.
    """

    def decorate(f: Callable) -> Callable[..., Any]:
        @functools.wraps(f)
        def timed(*args, **kwargs):
            with during(kind):
                return f(*args, **kwargs)

        return leaf(timed, shapes=shapes or f)

    return decorate


def communication(size: int, gigabits: float = 1.0) -> float:
    """Seconds that so many bytes take on a link of so many Gbit/s."""
    return 8 * size / (gigabits * 1e9)
