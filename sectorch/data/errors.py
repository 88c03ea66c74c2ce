"""What can be wrong with data, its partition, or the queries made from it."""

from __future__ import annotations

from ..errors import SectorchError


class DataError(SectorchError, ValueError):
    """Images, labels or an option of this package that do not fit."""


class DatasetMissingError(SectorchError, FileNotFoundError):
    """A data set that is not on disk; the message says where it was looked for and how to get it."""


class PartitionError(DataError):
    """A partition that gives some client nothing useful."""


class SelectionError(DataError):
    """More queries than the pool holds, or a strategy that lacks what it needs."""
