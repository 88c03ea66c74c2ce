"""The smallest call that still fails: tensors are cut to one element a dimension, and numbers made simpler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .calls import Call

TRIES = 200
"""Calls that are tried at most."""


def smallest(call: Call, fails: Callable[[Call], bool]) -> Call:
    """A call that fails and of which no simpler one was found to fail; `fails` is asked of each that is tried."""
    tries = 0
    simpler = True
    while simpler:
        simpler = False
        for other in _simpler(call):
            tries += 1
            if tries > TRIES:
                return call
            if fails(other):
                call, simpler = other, True
                break
    return call


def _simpler(call: Call) -> Iterator[Call]:
    """Calls with less in them, those with the least first."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def having(changed: dict[int, Any]) -> Call:
        args, kwargs = pytree.tree_unflatten([changed.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return Call(*args, **kwargs)

    shapes = {tuple(leaves[i].shape) for i in at}
    for shape in shapes:  # tensors of one shape together, as an element-wise function wants them
        for dim, size in enumerate(shape):
            for start, length in ((0, 1), (size - 1, 1), (0, size // 2), (size // 2, size - size // 2)):
                if 0 < length < size:
                    same = [i for i in at if tuple(leaves[i].shape) == shape]
                    yield having({i: leaves[i].narrow(dim, start, length).clone() for i in same})
    for i in at:
        x = leaves[i]
        for dim, size in enumerate(x.shape):
            if size > 1:
                yield having({i: x.narrow(dim, 0, 1).clone()})
                yield having({i: x.narrow(dim, size - 1, 1).clone()})
        for changed in _plainer(x):
            yield having({i: changed})


def _plainer(x: torch.Tensor) -> Iterator[torch.Tensor]:
    if not x.is_floating_point() or not x.numel():
        return
    for other in (torch.zeros_like(x), torch.ones_like(x), x.round(), (x * 8).round() / 8, x.abs()):
        if not torch.equal(other, x) and _weight(other) < _weight(x):
            yield other


def _weight(x: torch.Tensor) -> float:
    """Fewer digits are simpler, and then fewer signs and smaller numbers."""
    digits = float(sum((x * 2.0**k != (x * 2.0**k).round()).sum() for k in range(0, 21, 4)))
    return digits * 1e6 + float((x < 0).sum()) + float((x != 0).sum()) + 1e-3 * float(x.abs().clamp(max=1e5).sum())
