"""Neural networks on secure tensors."""
