"""Where choreographies run, and what is written down about it."""
