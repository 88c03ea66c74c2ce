"""The rows of the op table, by kind of operation."""
