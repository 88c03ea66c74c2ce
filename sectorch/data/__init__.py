"""Data sets, partitions among clients, expansion of a private data set, and selection of queries.

A client does all of this with its own data before it asks; nothing here is secret-shared or sent. The randomness is
seeded and reproducible, and protects no secret.
"""

from __future__ import annotations

from ..errors import DataError, DatasetMissingError, PartitionError, SelectionError
from .datasets import DATASETS, Dataset, load
from .partition import PARTITIONS, federation, partition
from .selection import EXPANSIONS, SELECTIONS, expand, select

__all__ = [
    "DATASETS",
    "EXPANSIONS",
    "PARTITIONS",
    "SELECTIONS",
    "DataError",
    "Dataset",
    "DatasetMissingError",
    "PartitionError",
    "SelectionError",
    "expand",
    "federation",
    "load",
    "partition",
    "select",
]
