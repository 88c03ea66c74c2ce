"""Receipts: what a party signs of each query before it takes part, and what an auditor makes of such a file."""
