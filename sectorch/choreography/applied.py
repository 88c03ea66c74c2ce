"""A function with its arguments, of which the tensors are still to come: what a step computes beyond f(x, y)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where an argument of an `Applied` is still to come."""

    number: int


@dataclass(frozen=True, slots=True)
class Applied:
    """A function with arguments, of which the tensors are still to come."""

    f: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return getattr(self.f, "__name__", type(self.f).__name__)

    @property
    def shapes(self) -> Callable:
        return Applied(getattr(self.f, "shapes", self.f), self.args, self.kwargs)

    def __call__(self, *values: Any) -> Any:
        if not self.kwargs:
            return self.f(*filled(self.args, values))
        return self.f(*filled(self.args, values), **{k: filled(v, values) for k, v in self.kwargs.items()})


def filled(value: Any, values: Sequence[Any]) -> Any:
    """An argument of an `Applied` with its operands in their places."""
    kind = type(value)
    if kind is Place:
        return values[value.number]
    return kind([filled(v, values) for v in value]) if kind is tuple or kind is list else value
