"""The recorded traffic of all roles: uniform where it has to be, and never the same mask over two secrets."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats

P_VALUE = 1e-12
"""Of each test; see tests/test_leaks.py."""
FEW = 4096
"""Bytes below which a histogram of bytes says too little."""


def messages(path: Path) -> Iterator[tuple[dict, np.ndarray]]:
    """What a party was sent, in the order in which it came; a last one that a kill cut short is left out."""
    content = path.read_bytes() if path.exists() else b""
    at = 0
    while at < len(content):
        end = content.find(b"\n", at)
        head = json.loads(content[at:end])
        data = content[end + 1 : end + 1 + head["size"]]
        if len(data) < head["size"]:
            return
        yield head, np.frombuffer(data, dtype=np.uint8)
        at = end + 1 + head["size"]


def view(runs: list[Path], parties: list[str]) -> dict[str, np.ndarray]:
    """All bytes by receiver's role, protocol and label."""
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for run in runs:
        for party in parties:
            for head, data in messages(run / party / "traffic"):
                if not head["shows"]:
                    found[f"{head['role']} {head['path']}/{head['label']} ({head['dtype']})"].append(data)
    return {key: np.concatenate(values) for key, values in found.items()}


def uniform(data: np.ndarray) -> bool:
    return len(data) < FEW or bool(stats.chisquare(np.bincount(data, minlength=256)).pvalue >= P_VALUE)


def across(run: Path, parties: list[str]) -> str:
    """Whether a mask is used twice in a run that was stopped: two messages would show the difference of what they hide.
    Messages of the same place that are uniform each have to differ by something uniform.
    """
    found: dict[tuple, list[np.ndarray]] = defaultdict(list)
    for party in parties:
        for head, data in messages(run / party / "traffic"):
            if not head["shows"] and head["dtype"] in ("int64", "uint8") and head["size"]:
                found[head["src"], head["dst"], head["path"], head["label"], head["size"]].append(data)
    for key, values in found.items():
        if not all(map(uniform, values)):
            continue
        for i, one in enumerate(values):
            for other in values[:i]:
                if len(one) >= 32 and (one != other).mean() < 0.5:
                    return f"two messages {key[2]}/{key[3]} from {key[0]} to {key[1]} are the same in most bytes"
                if len(one) >= FEW:
                    apart = one.view(np.int64) - other.view(np.int64) if len(one) % 8 == 0 else one ^ other
                    if not uniform(apart.view(np.uint8)):
                        return f"two messages {key[2]}/{key[3]} from {key[0]} to {key[1]} differ by what is not uniform"
    return ""
