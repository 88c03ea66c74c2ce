"""What a walk over a module's graph knows so far, and the few moves that the rules make on it."""

from __future__ import annotations

import numpy as np
from torch import fx, nn

from ...nn.symbolic import where
from .errors import NotPerturbableError
from .scales import ONE, Channels, Located


class Walk:
    """One pass over the graph in its own order.

    Attributes:
        known: what is known of the tensor of each node; None for what is no tensor.
        scaled: parameter -> (channels of its rows, channels of its columns), None for scale 1.
        batch_norms: name of a batch norm with running statistics -> whether it uses the batch's own.
        norm_inputs: name of a batch norm that uses its running statistics -> channels that enter it.
    """

    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self.channels = Channels()
        self.known: dict[fx.Node, Located | None] = {}
        self.scaled: dict[str, tuple[np.ndarray | None, np.ndarray | None]] = {}
        self.batch_norms: dict[str, bool] = {}
        self.norm_inputs: dict[str, np.ndarray] = {}

    def module(self, node: fx.Node) -> nn.Module:
        """The layer that a node calls."""
        return self.graph.get_submodule(str(node.target))

    def refuse(self, node: fx.Node, reason: str) -> NotPerturbableError:
        """The error that says which layer, on which line of the model, and why."""
        return NotPerturbableError(f"{where(node, self.graph)} cannot be perturbed: {reason}")

    def pin(self, channels: np.ndarray) -> None:
        """Make these scales 1."""
        self.channels.unify(channels, np.full(len(channels), ONE))

    def same(self, node: fx.Node, a: Located, b: Located) -> None:
        """Make the scales of two tensors one, channel by channel."""
        if a.channels is not None and b.channels is not None:
            if len(a.channels) != len(b.channels):
                raise self.refuse(node, f"it joins {len(a.channels)} with {len(b.channels)} channels")
            self.channels.unify(a.channels, b.channels)
        elif (known := a.channels if a.channels is not None else b.channels) is not None:
            self.pin(known)

    def columns(self, node: fx.Node, source: Located, width: int) -> np.ndarray:
        """The channels of `width` inputs of a linear layer, or `width` channels of a convolution."""
        channels = source.channels
        if channels is None:
            return np.full(width, ONE)
        if source.flattened:
            if width % len(channels):
                raise self.refuse(node, f"its {width} inputs are no multiple of the {len(channels)} channels flattened")
            return np.repeat(channels, width // len(channels))
        if len(channels) != width:
            raise self.refuse(node, f"it takes {width} channels and is given {len(channels)}")
        return channels
