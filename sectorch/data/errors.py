"""What can be wrong with data, its partition, or the queries made from it."""

from __future__ import annotations

from ..errors import SectorchError


class DataError(SectorchError, ValueError):
    """Images, labels or an option of this package that do not fit.

    Example:
        a pool needs at least one image, got 0

    What to do:
        Correct what the text names: the name of a data set, a shape, or a count.
    """


class DatasetMissingError(SectorchError, FileNotFoundError):
    """A data set that is not on disk; the message says where it was looked for and how to get it.

    Example:
        ham10000 is not on disk: looked for HAM10000_metadata.csv in data and data/ham10000; get it from
        https://doi.org/10.7910/DVN/DBW86T, or name another folder (--data-root)

    What to do:
        Get it by the command or from the address in the text; sectorch downloads nothing by itself. `digits` is there
        without a file.
    """


class PartitionError(DataError):
    """A partition that gives some client nothing useful.

    Example:
        with alpha 0.01, 100 draws left some client with less than half of 50 samples; take a larger alpha, fewer
        clients or more samples each

    What to do:
        Take a larger alpha, fewer clients, or more samples.
    """


class SelectionError(DataError):
    """More queries than the pool holds, or a strategy that lacks what it needs.

    Example:
        500 queries of a pool of 300: ask for at least one and at most 300

    What to do:
        Ask for fewer queries or make a larger pool; strategies by uncertainty need the client's own predictions.
    """
