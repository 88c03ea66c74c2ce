"""Protocols of secret sharing, one to a file, each a choreography."""
