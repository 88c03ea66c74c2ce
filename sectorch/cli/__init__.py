"""The command `sectorch`."""
