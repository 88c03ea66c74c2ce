"""Which channels of which tensors carry the same secret scale: a union-find over single channels.

A tensor of the perturbed network equals the true one times a positive number per channel (Lemmas 1 and 2). Each channel
of each layer starts with a scale of its own. An addition makes the scales of its two sides one, channel by channel; a
concatenation only joins the lists. One scale, `ONE`, is not drawn but is 1: that of the input and of whatever has to
be seen at its true size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ONE = 0


class Channels:
    """A growing set of channels, some of which are known to have the same scale."""

    def __init__(self) -> None:
        self._parent = [ONE]

    def fresh(self, count: int) -> np.ndarray:
        """`count` new channels with scales of their own, int64 [count]."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, channel: int) -> int:
        parent = self._parent
        while parent[channel] != channel:
            parent[channel] = parent[parent[channel]]
            channel = parent[channel]
        return channel

    def unify(self, left: np.ndarray, right: np.ndarray) -> None:
        """Give left[c] and right[c] one scale, for each c. `ONE` stays the root of what it meets."""
        for a, b in zip(left, right, strict=True):
            low, high = sorted((self.root(int(a)), self.root(int(b))))
            self._parent[high] = low

    def roots(self, channels: np.ndarray) -> np.ndarray:
        """The representative of each channel, int64 of the same shape."""
        return np.array([self.root(int(channel)) for channel in channels], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._parent)


@dataclass(frozen=True)
class Located:
    """What is known of one tensor of the graph: its channels, along dimension 1.

    Attributes:
        channels: int64 [C]; None where C is not known yet and every scale is 1 (the input).
        flattened: the tensor was flattened from [N, C, ...] to [N, C * positions]; each channel's scale repeats over an
            unknown number of positions, which the next linear layer's width tells.
        spatial: whether positions follow the channel dimension ([N, C, ...]); None where that is not known.
    """

    channels: np.ndarray | None
    flattened: bool = False
    spatial: bool | None = None
