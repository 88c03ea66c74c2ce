"""The old name of `sectorch.dp`, for this release."""

from typing import Any

from . import dp
from .deprecation import deprecate


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # asked for by the import system, of every module
        raise AttributeError(name)
    value = getattr(dp, name)
    deprecate(f"sectorch.privacy.{name}", f"sectorch.dp.{name}")
    return value
