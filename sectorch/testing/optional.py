"""hypothesis, which is not needed by anything else: one error with the way out where it is missing."""

from __future__ import annotations

from ..errors import ArgumentError
from ..extras import needed

with needed("sectorch.testing.strategies", "hypothesis", ArgumentError):
    import hypothesis.strategies as strategies

__all__ = ["strategies"]
