"""The must-shows that take minutes: accuracy gains over seeds, and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sectorch.protocols.privhfl import PrivHFL, Settings, federation

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.sectorch_long
def test_mixup_queries_beat_what_needs_no_queries_and_private_queries(tmp_path: Path):
    """Digits, 10 clients with 30 samples each, three architectures, one iteration; one seed of `benchmarks`' five.

    Above the model before, the model retrained for as long on its own data, and the query of private data.
    """
    clients, test, classes = federation("digits", 10)
    run = lambda **how: PrivHFL(clients, test, classes, Settings(**how), local=tmp_path).run()
    mixup = run(queries=500)
    others = [run(queries=500, control="longer"), run(expansion="private", secure=False)]
    assert mixup.mean(-1) > max(mixup.mean(0), *(result.mean(-1) for result in others))


@pytest.mark.sectorch_long
def test_memory_is_bounded_by_the_chunk():
    """Eight times the queries, 16 at once: the peak grows by what the queries and logits themselves take (1.3 MB of
    images here), and by less than a tenth."""
    peaks = []
    for queries in (32, 256):
        command = [sys.executable, str(ROOT / "benchmarks/privhfl.py"), "here", "vgg7", str(queries), "16"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        peaks.append(json.loads(done.stdout.splitlines()[-1])["peak_GB"])
    assert peaks[1] < 1.1 * peaks[0]
