"""What a broken protocol of the gallery is shown with: the check's arguments, and its repaired twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sectorch.testing import Given


@dataclass(frozen=True)
class Exhibit:
    """A broken protocol and its repaired twin.

    Args:
        source: where it was published or found.
        broken, repaired: each f(net, *values).
        given, reference: as of `check_protocol`; `right` is the twin's reference where it computes something else.
        named: words that the finding has to have.
        options: further arguments of `check_protocol`, of both; `allowed` those of the broken one alone.
    """

    name: str
    source: str
    broken: Callable
    repaired: Callable
    given: Sequence[Given]
    reference: Callable
    named: Sequence[str]
    right: Callable | None = None
    options: dict[str, Any] = field(default_factory=dict)
    allowed: dict[str, Any] = field(default_factory=dict)
