"""Federations: parties run any choreography among themselves, through a server that relays what it cannot read."""
