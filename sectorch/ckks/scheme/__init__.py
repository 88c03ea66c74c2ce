"""The scheme: parameters, keys, ciphertexts, their arithmetic on residues, and its noise."""
