"""Whose inputs a value was computed from, as far as its steps are taken one by one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
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

    A value is (inputs, same, place): the inputs as pairs of a party's name and the input's; whether it is one itself;
    a digest by which it is told from other values of the same inputs: of the steps that it comes from, by their places
    in the program, whatever their content.

    Args:
        computed: all that was computed before, as a digest; the same at all parties.
    """

    def __init__(self, computed: Callable[[], bytes] = bytes):
        self.current: tuple[frozenset[tuple[str, str]], bool, bytes] | None = None
        self._computed = computed

    def brought(self, value: Any, party: Party, name: str, call: int = 0) -> None:
        """A party brings an input in."""
        value._origin = frozenset({(party.name, name)}), True, self._place(f"{call} {party.name} {name}")

    def taking(self, values: Iterable[Any], call: int = 0, number: int = 0) -> None:
        """A step is about to be taken on these, the one of this number in the call of that."""
        known = [origin for value in values if (origin := getattr(value, "_origin", None)) is not None]
        inputs = frozenset[tuple[str, str]]().union(*(inputs for inputs, *_ in known))
        place = self._place(f"{call} {number}", *(place for *_, place in known))
        self.current = inputs, all(same for inputs, same, _ in known if inputs), place

    def taken(self, step: Any, results: Iterable[Any]) -> None:
        """It gave these."""
        if self.current is not None:
            inputs, same, place = self.current
            f = getattr(step, "f", None)
            f = f.func if isinstance(f, functools.partial) else f
            moved = f is None or getattr(f, "__name__", type(f).__name__).strip("_") in _MOVES
            for i, result in enumerate(results):
                result._origin = inputs, same and moved, self._place(str(i), place) if i else place
        self.current = None

    def _place(self, text: str, *places: bytes) -> bytes:
        return hashlib.sha256(b"".join((self._computed(), *places, text.encode()))).digest()
