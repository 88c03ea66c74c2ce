"""Functions of the user's own, by name: MODULE:FUNCTION of this folder or an installed module, or FILE.py:FUNCTION."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, SectorchError

FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):([A-Za-z_]\w*)")


def is_function(text: str) -> bool:
    """Whether it is written as one."""
    return FUNCTION.fullmatch(text) is not None


def function_of(text: str) -> Callable[..., Any]:
    """The function of that name. Its module is run: it is code that its user trusts.

    Raises:
        ArgumentError: not written so, or there is none.
    """
    named = FUNCTION.fullmatch(text)
    if named is None:
        raise ArgumentError(f"a function is MODULE:FUNCTION or FILE.py:FUNCTION, got {text[:80]!r}")
    module, function = named.groups()
    try:
        found = getattr(_file(Path(module)) if module.endswith(".py") else _module(module), function)
    except (ImportError, AttributeError, OSError) as error:
        raise ArgumentError(f"cannot call {text}: {error}") from error
    except SectorchError:
        raise
    except Exception as error:  # of code that is its user's, and to be mended there
        raise ArgumentError(f"cannot call {text}: {type(error).__name__}: {error}; --debug shows where") from error
    if not callable(found):
        raise ArgumentError(f"{text} is a {type(found).__name__} and no function")
    return found


def _module(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
