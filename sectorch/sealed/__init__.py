"""What a party keeps on disk under a key of its own: sealed files, and tensors as their content."""
