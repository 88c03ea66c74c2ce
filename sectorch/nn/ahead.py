"""Offline material that a module has at hand, by the inputs that it serves."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..choreography.program.material import Material
from ..errors import ArgumentError
from .inputs import Inputs


def shown(inputs: Inputs) -> tuple:
    """Inputs for people: the shape of a single tensor, and else name and shape of each."""
    return inputs.shapes[0] if inputs.single else tuple(zip(inputs.names, inputs.shapes, strict=True))


class Ahead:
    """Material of later calls: each piece is handed out once, to one of several threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._held: dict[Any, tuple[Inputs, list[Material]]] = {}

    def keep(self, inputs: Inputs, material: Material) -> None:
        """Have it at hand for one call with inputs of this form, shape and dtype."""
        with self._lock:
            self._held.setdefault(inputs.key, (inputs.meta(), []))[1].append(material)

    def take(self, inputs: Inputs) -> Material | None:
        """What was kept for such inputs, or None; it is not at hand any more."""
        with self._lock:
            made = self._held.get(inputs.key, (inputs, []))[1]
            return made.pop() if made else None

    def all(self) -> list[tuple[Inputs, Material]]:
        """What is at hand, with the inputs that it serves."""
        with self._lock:
            return [(inputs, one) for inputs, made in self._held.values() for one in made]

    def counts(self) -> dict[tuple, int]:
        """How many calls are served, by the shape of a single tensor, and else by name and shape of each."""
        found: dict[tuple, int] = {}
        for inputs, _ in self.all():
            found[shown(inputs)] = found.get(shown(inputs), 0) + 1
        return found

    def clear(self) -> None:
        """Drop all of it unused."""
        with self._lock:
            self._held.clear()


def check_ahead(inputs: Inputs, alone: str | None, verified: bool) -> None:
    """Raise ArgumentError where such a call cannot be prepared.

    Args:
        alone: why the module runs operation by operation, if it does.
        verified: whether dealing is proved. What Q learns of tensors that were shared before is then shown in a call of
            its own, under their flags, which the program does not know.
    """
    if alone is not None:
        raise ArgumentError(f"nothing can be prepared: the module runs operation by operation, since {alone}")
    if verified and inputs.learned and any(held is not None for held in inputs.held):
        raise ArgumentError(
            "nothing can be prepared: with verified=True what is learned of tensors in shares is shown in a call of "
            "its own; ask without preparing it, or leave all results in shares"
        )


def later(
    asked: list[Inputs],
    size: int | torch.Tensor | Inputs,
    sample_shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    usual: torch.dtype,
) -> Inputs:
    """What `preprocess` prepares for, without content.

    Args:
        asked: the inputs of earlier calls, the latest first.
        size, sample_shape, dtype: as `SecureModule.preprocess` takes them.
        usual: the dtype where none is named, and none is known.
    """
    if isinstance(size, (bool, float, str)) or (
        isinstance(size, (list, tuple)) and all(isinstance(n, int) for n in size)
    ):
        raise ArgumentError(
            f"preprocess takes a number of rows, or inputs like the later ones, got {size!r}: preprocess(x) for "
            f"a tensor x, or preprocess(rows, sample_shape=x.shape[1:])"
        )
    if not isinstance(size, int):
        return Inputs.of(size).meta()
    if size < 1:
        raise ArgumentError(f"preprocess needs a batch of at least one row, got {size}")
    asked = [x for x in asked if not x.in_shares]
    if sample_shape is not None:
        asked = [x for x in asked if x.single and x.shapes[0][1:] == tuple(sample_shape)]
        dtype = dtype or (asked[0].dtypes[0] if asked else usual)
        return Inputs(torch.empty((size, *sample_shape), dtype=dtype, device="meta"))
    if not asked:
        raise ArgumentError("name sample_shape (the shape of one row): the module has not been called yet")
    if asked[0].rows is None:
        raise ArgumentError(f"the last call, {asked[0]!r}, has no rows in common: pass Inputs(...) like the later ones")
    made = asked[0].meta(size)
    return made if dtype is None else made.having([x.to(dtype) for x in made.tensors])
