"""The old name of `sectorch.dp`, for this release."""

import warnings
from typing import Any

from . import dp


def __getattr__(name: str) -> Any:
    value = getattr(dp, name)
    warnings.warn(f"sectorch.privacy.{name} is sectorch.dp.{name} now", DeprecationWarning, stacklevel=2)
    return value
