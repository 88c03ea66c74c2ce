"""The recorded traffic of all roles: uniform where it has to be, and never the same mask over two secrets."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

P_VALUE = 1e-12
"""Of each test; see sectorch/testing/outcomes.py."""
DIFFERENT = 0.4
"""Of the bytes of two messages, so many differ where nothing is used again: a tag of CaPriDe's is half the identity of
the keys, and of the 16 other bytes four are the same by chance once in two million pairs."""
START = 4 << 20
"""Bytes of a message that are compared with others: a mask is a message's, or a ciphertext's, and begins with it."""
PIECE = 1 << 18
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


def view(run: Path, parties: list[str]) -> dict[str, bool]:
    """What each role is sent, by protocol and label, and whether all its bytes together are uniform."""
    found: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(256, np.int64))
    for party in parties:
        for head, data in messages(run / party / "traffic"):
            found[f"{head['role']} {head['path']}/{head['label']} ({head['dtype']})"] += counts(data)
    return {key: even(each) for key, each in found.items()}


def beyond(whole: dict[str, Any], run: Path, parties: list[str]) -> str:
    """What a run that was disturbed tells somebody and an undisturbed one, of which `seen` was kept, does not."""
    found = seen(run, parties)
    said = [f"{key} is sent in no whole run" for key in found["uniform"] if key not in whole["uniform"]]
    said += [
        f"{key} is not uniform" for key, same in found["uniform"].items() if whole["uniform"].get(key) and not same
    ]
    return "; ".join([*said, *(text for text in found["twice"] if text not in whole["twice"])])


def seen(run: Path, parties: list[str]) -> dict[str, Any]:
    """Of a run's traffic: what each role is sent, whether that is uniform, and what is sent twice."""
    return {"uniform": view(run, parties), "twice": sorted(across(run, parties))}


def counts(data: np.ndarray) -> np.ndarray:
    """How often each byte is there; a piece at a time, for `bincount` makes eight bytes of each."""
    found = np.zeros(256, np.int64)
    for at in range(0, len(data), PIECE):
        found += np.bincount(data[at : at + PIECE], minlength=256)
    return found


def even(found: np.ndarray) -> bool:
    return bool(found.sum() < FEW or stats.chisquare(found).pvalue >= P_VALUE)


def uniform(data: np.ndarray) -> bool:
    return even(counts(data))


def across(run: Path, parties: list[str]) -> set[str]:
    """Whether a mask is used twice in a run that was stopped: two messages would show the difference of what they hide.
    Messages of the same place that are uniform each have to differ by something uniform; of long ones their start.
    What its protocol declares as hidden by nothing has no mask.
    """
    found: dict[tuple, list[np.ndarray]] = defaultdict(list)
    for party in parties:
        for head, data in messages(run / party / "traffic"):
            if head["dtype"] in ("int64", "uint8") and head["size"] and head["hidden"]:
                found[head["src"], head["dst"], head["path"], head["label"], head["size"]].append(data[:START])
    said = set()
    for key, values in found.items():
        if not all(map(uniform, values)):
            continue
        name = f"two messages {key[2]}/{key[3]} from {key[0]} to {key[1]}"
        for i, one in enumerate(values):
            for other in values[:i]:
                if len(one) >= 32 and (one != other).mean() < DIFFERENT:
                    said.add(f"{name} are the same in most bytes")
                elif len(one) >= FEW:
                    apart = one.view(np.int64) - other.view(np.int64) if len(one) % 8 == 0 else one ^ other
                    if not uniform(apart.view(np.uint8)):
                        said.add(f"{name} differ by what is not uniform")
    return said
