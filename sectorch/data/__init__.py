"""Data sets, partitions among clients, expansion of a private data set, and selection of queries.

A client does all of this with its own data before it asks; nothing here is secret-shared or sent. The randomness is
seeded and reproducible, and protects no secret.
"""

from __future__ import annotations

from .datasets import DATASETS as DATASETS
from .datasets import Dataset as Dataset
from .datasets import load as load
from .errors import DataError as DataError
from .errors import DatasetMissingError as DatasetMissingError
from .errors import PartitionError as PartitionError
from .errors import SelectionError as SelectionError
from .partition import PARTITIONS as PARTITIONS
from .partition import federation as federation
from .partition import partition as partition
from .selection import EXPANSIONS as EXPANSIONS
from .selection import SELECTIONS as SELECTIONS
from .selection import expand as expand
from .selection import select as select

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
