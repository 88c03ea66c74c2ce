"""What a client may ask of a party: limits in a file, and what it has used of them, which lasts."""
