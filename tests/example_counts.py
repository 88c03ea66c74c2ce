"""Settings of properties whose examples take a tenth of a second and more."""

from __future__ import annotations

from hypothesis import settings


def fewer(count: int, long: int | None = None) -> settings:
    """So many examples in place of 20, and in long runs `long`, or so many in 40 of theirs."""
    most = settings.default.max_examples
    return settings(max_examples=long if long and most > 20 else max(count, count * most // 40))
