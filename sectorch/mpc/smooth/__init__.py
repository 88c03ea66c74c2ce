"""Functions that are not piecewise linear: series with dealt powers, sines, and normalisation to one binade."""
