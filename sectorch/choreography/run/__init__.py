"""Runtimes of choreographies: with all parties in this process, with one of them, or with none."""
