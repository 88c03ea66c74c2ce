"""hypothesis, which is not needed by anything else: one error with the way out where it is missing."""

from __future__ import annotations

from ..errors import ArgumentError

try:
    import hypothesis.strategies as strategies
except ImportError:
    raise ArgumentError(
        "sectorch.testing.strategies needs hypothesis, which is not installed: pip install hypothesis"
    ) from None

__all__ = ["strategies"]
