"""Whose inputs a value was computed from, as far as its steps are taken one by one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from .parties import Party

_MOVES = frozenset((
    "cat", "chunk", "clone", "concat", "contiguous", "diagonal", "expand", "expand_as", "flatten", "flip", "gather",
    "getitem", "hstack", "index_select", "masked_select", "movedim", "moveaxis", "narrow", "permute", "ravel", "repeat",
    "reshape", "roll", "select", "split", "squeeze", "stack", "swapaxes", "t", "take", "transpose", "unbind",
    "unflatten", "unsqueeze", "view", "vstack", "encoded_input",
    "itself", "encode", "decode", "add", "sub", "radd", "neg",
))  # fmt: skip
"""Steps after which a value is still the input: in other places, in another form, or beside a mask."""


class Origins:
    """Notes of each value which inputs it depends on. `current` is of the values that the running step takes.

    A value is (inputs, same): the inputs as pairs of a party's name and the input's; whether it is one itself.
    """

    def __init__(self):
        self.current: tuple[frozenset[tuple[str, str]], bool] | None = None

    def brought(self, value: Any, party: Party, name: str) -> None:
        """A party brings an input in."""
        value._origin = frozenset({(party.name, name)}), True

    def taking(self, values: Iterable[Any]) -> None:
        """A step is about to be taken on these."""
        known = [origin for value in values if (origin := getattr(value, "_origin", None)) is not None]
        inputs = frozenset[tuple[str, str]]().union(*(inputs for inputs, _ in known))
        self.current = inputs, all(same for _, same in known)

    def taken(self, step: Any, results: Iterable[Any]) -> None:
        """It gave these."""
        if self.current is not None and self.current[0]:
            inputs, same = self.current
            f = getattr(step, "f", None)
            f = f.func if isinstance(f, functools.partial) else f
            moved = f is None or getattr(f, "__name__", type(f).__name__).strip("_") in _MOVES
            for result in results:
                result._origin = inputs, same and moved
        self.current = None
