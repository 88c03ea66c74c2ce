"""The registry of the core's protocols is read before those of this part join it."""

from __future__ import annotations

import helpers  # noqa: F401 - its list of shipped protocols is of the core
