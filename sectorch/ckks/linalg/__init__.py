"""Linear algebra between ciphertexts."""
