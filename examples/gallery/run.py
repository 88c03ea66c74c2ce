"""Every broken protocol of the gallery and its twin under `check_protocol`: what is found, and how long it takes.

python examples/gallery/run.py
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from sectorch.testing import ProtocolFault, check_protocol

sys.path.insert(0, str(Path(__file__).parent))
import own_roles
import shares

GALLERY = [*shares.GALLERY, *own_roles.GALLERY]

if __name__ == "__main__":
    for exhibit in GALLERY:
        try:
            check_protocol(exhibit.broken, exhibit.given, exhibit.reference, **exhibit.options, **exhibit.allowed)
            print(f"{exhibit.name}: nothing was found")
        except ProtocolFault as fault:
            print(f"{exhibit.name} ({exhibit.source}), {fault.report.seconds:.1f} s:")
            print(textwrap.indent(textwrap.fill(str(fault.report.findings[0]), 110), "    "))
        report = check_protocol(exhibit.repaired, exhibit.given, exhibit.right or exhibit.reference, **exhibit.options)
        print(f"    its twin: nothing in {report.seconds:.1f} s")
