"""Sweeps over real processes: parties that are killed, and links that fail. `python -m sweeps --help` says how to run.

child.py     one party's process: a command line, its events counted, a place at which it kills itself
links.py     a TCP proxy that fails as it is told
world.py     processes, keys and folders; forked from this process, which has imported everything, or fresh
papers.py    the papers' runs: command lines, what they have to end with, what is charged
inference.py secure inference: a server, an answering party and a client that asks again
leaks.py     the recorded traffic of all roles, by the statistics of tests/test_leaks.py
sweep.py     the cases and their table
"""
