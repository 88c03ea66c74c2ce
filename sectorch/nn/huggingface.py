"""What HuggingFace's models need beside their forward: nothing is kept for a next call."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from .inputs import flattened


def suited(model: nn.Module) -> None:
    """Change a copy of a model to what computes the same on secrets, at less cost.

    Its own configuration is set to no cache of keys and values, and to experts as products of matrices. GELUs that are
    spelled out by tanh are torch's `gelu(approximate="tanh")`, the same function: half the bytes, and a sixth of the
    rounds.
    """
    spelled_out = tuple(getattr(sys.modules.get("transformers.activations"), name, ()) for name in _GELUS)
    for layer in list(model.modules()):
        for name, part in layer.named_children():
            if isinstance(part, spelled_out) and not part._forward_hooks and not part._forward_pre_hooks:
                setattr(layer, name, nn.GELU("tanh").eval())
        config: Any = getattr(layer, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"


_GELUS = ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation")


def without_caches(result: Any) -> Any:
    """A model's result with None in the place of each cache of keys and values.

    A cache is a state of the model for its next call, of intermediate values that nobody may learn; it is dropped.
    `transformers` is not imported: where it was not, there is no cache.
    """
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if cache is None:
        return result
    leaves, spec = flattened(result)
    return pytree.tree_unflatten([None if isinstance(leaf, cache) else leaf for leaf in leaves], spec)
