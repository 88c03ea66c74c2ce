"""A traced choreography as a value, and what is read from it: a party's part, its text, its setup and material."""
