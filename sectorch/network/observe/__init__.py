"""What an operator sees of a running party: health, metrics, traces, certificates that are about to expire."""
