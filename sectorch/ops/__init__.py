"""The handlers behind the dispatch table, by kind. Importing this package fills the table."""

from . import activation, arithmetic, compare, linear, pooling, reduction, structure

__all__ = ["activation", "arithmetic", "compare", "linear", "pooling", "reduction", "structure"]
