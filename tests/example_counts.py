"""Settings of properties whose examples take a tenth of a second and more."""

from __future__ import annotations

from hypothesis import settings


def fewer(count: int) -> settings:
    """So many examples in place of 20, and in long runs so many in 40 of theirs."""
    return settings(max_examples=max(count, count * settings.default.max_examples // 40))
