"""Where choreographies run: all parties in this process, none, or one of them."""
