"""The three-party protocols, one to a file, each a choreography."""
