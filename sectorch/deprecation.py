"""Old forms of the public API, each of which works for one release with a warning that spells the new form."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def deprecate(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that an old form of the API is in use.

    Args:
        old: the form that the caller wrote.
        new: what to write in its place.
        stacklevel: as of `warnings.warn`; 3 is the line that called the function that calls this one.

    Warns:
        DeprecationWarning: always.
    """
    warnings.warn(f"{old} is {new} now; the old form goes with the next release", DeprecationWarning, stacklevel)


def renamed(**names: str) -> Callable[[F], F]:
    """Let a function take keyword arguments by their old names too.

    The signature shows the new names only.

    Args:
        names: old name=new name.
    """

    def decorator(f: F) -> F:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in [name for name in kwargs if name in names]:
                new = names[old]
                call_name = f.__qualname__.removesuffix(".__init__")
                if new in kwargs:
                    raise TypeError(f"{call_name}() got both '{new}' and its old name '{old}'")
                deprecate(f"{call_name}(..., {old}=)", f"{call_name}(..., {new}=)")
                kwargs[new] = kwargs.pop(old)
            return f(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return decorator


def renamed_attribute(old: str, new: str) -> Any:
    """A property that reads an attribute by its old name."""

    def read(self: Any) -> Any:
        deprecate(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`, for this release.")


C = TypeVar("C", bound=type)


def renamed_fields(**names: str) -> Callable[[C], C]:
    """Let a dataclass take and give its fields by their old names too.

    Args:
        names: old name=new name. The class keeps them as `renamed_fields`.
    """

    def decorator(cls: C) -> C:
        cls.__init__ = renamed(**names)(cls.__init__)
        for old, new in names.items():
            setattr(cls, old, renamed_attribute(old, new))
        cls.renamed_fields = names  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorator
