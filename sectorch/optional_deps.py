"""Packages that only some of sectorch needs: which of its extras brings each, and one error where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from .errors import SectorchError

EXTRA = {
    "hypothesis": "testing",
    "matplotlib": "plots",
    "opentelemetry-sdk": "traces",
    "pandas": "tables",
    "pillow": "privhfl",
    "prometheus-client": "metrics",
    "pyarrow": "tables",
    "ray": "ray",
    "scikit-learn": "demo",
    "scipy": "tables",
    "shapiq": "shapley",
    "shtab": "completion",
    "torchvision": "privhfl",
    "transformers": "hf",
}
"""Names that pip knows, and the extra of sectorch's that has them, or that has one that brings them."""


@contextmanager
def required_imports(
    what: str, package: str, error: type[SectorchError], instead: str = "", extra: str = ""
) -> Iterator[None]:
    """Imports of a package that only some of sectorch needs: they stand inside.

    Args:
        what: what needs it, for people.
        package: its name as pip knows it.
        error: what is raised.
        instead: another way out, as in "or leave out --metrics".
        extra: that brings it; as in the table unless given.

    Raises:
        SectorchError: it is not installed, or too old; of the kind `error`, and says how to install it.
    """
    try:
        yield
    except ImportError as missing:
        way = f"pip install '{_here()}[{extra or EXTRA[package]}]'" + (f", {instead}" if instead else "")
        raise error(f"{what} needs {package}, which is not installed: {way}") from missing


def _here() -> str:
    """What pip calls this package: by name it takes one that is installed, and otherwise whatever an index has."""
    try:
        metadata.distribution("sectorch")
    except metadata.PackageNotFoundError:
        return "."
    return "sectorch"
