"""The commands of the processes over TLS."""
