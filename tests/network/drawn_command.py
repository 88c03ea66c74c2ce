"""`sectorch`, with draws that repeat: what the tests of whole commands start in a process of its own."""

from __future__ import annotations

import sys

from drawn import repeating

from sectorch.cli.main import run

if __name__ == "__main__":
    with repeating():
        sys.exit(run(sys.argv[1:]))
