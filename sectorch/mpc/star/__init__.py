"""Three parties: shares at A and S, correlated randomness from Q, who is offline until the result is revealed."""
