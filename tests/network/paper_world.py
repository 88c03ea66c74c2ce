"""The five papers' commands as processes whose draws repeat, and what of their results has to be equal."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from commands import PIPE, STDOUT, Command
from seeded_system import FOLDER
from torch.utils import _pytree as pytree

HERE = Path(__file__).parent


@dataclass
class Paper:
    """A command, its parties, the names in its results that all who have them must have alike, and whose files.

    Args:
        beside: protocols of which a federation has more, to agree on what is next, or to train.
        own: what each party says for itself.
    """

    line: str
    parties: dict[str, str]
    results: tuple[str, ...] = ()
    keeping: tuple[str, ...] | None = None
    beside: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


CLIENTS = ("north", "south", "west")
PAPERS = {
    "perturbed-fl": Paper(
        "perturbed-fl --data digits --clients 3 --rounds 4 --batch-size 8",
        {"hub": "Server", **{name: f"C{i}" for i, name in enumerate(CLIENTS)}},
        keeping=("hub",),  # a client has no model
        beside=("run_turn", "run_turn_relay"),
    ),
    "capride": Paper(
        "capride --parties 3 --samples 32 --test-samples 100 --network mlp --rounds 2 --warmup 2 --head-rank 4",
        {name: f"P{i + 1}" for i, name in enumerate(CLIENTS)},
        beside=("run_turn", "run_turn_relay"),
    ),
    "privhfl": Paper(
        "privhfl --clients 3 --samples 60 --test-samples 100 --queries 8 --local-epochs 2 --retraining-epochs 2",
        {"hub": "S", **{name: f"c{i + 1}" for i, name in enumerate(CLIENTS)}},
        beside=("run_turn", "run_turn_relay"),
    ),
    "capc": Paper(
        "capc --parties 4 --querying 2 --pool 6 --queries 4 --epsilon 60 --argmax shares --local-optimizer sgd "
        "--local-lr 0.1 --local-epochs 2",
        {"hub": "S", **{name: f"p{i + 1}" for i, name in enumerate((*CLIENTS, "east"))}},
        beside=("agree", "run_turn", "run_turn_relay", "capc_turn", "capc_told", "capc_affords", "capc_afforded"),
        own=("budgets", "budget_epsilon"),
    ),
    "shapley": Paper(
        "shapley --clients 3 --rounds 2 --samples 120 --tests 24 --skip --no-compare",
        {"hub": "P", "helper": "X", **{name: f"c{i + 1}" for i, name in enumerate(CLIENTS)}},
        ("values", "intervals", "rounds"),
        keeping=("hub",),  # the others have no values
        # Apart, they train in shares and hand out keys; who one process has trained is known there.
        beside=(
            "agree", "run_turn", "run_turn_relay",
            "shapley_keys", "shapley_share", "shapley_open_sum",
            "shapley_tell", "shapley_publish", "shapley_publish_X",
        ),
    ),
}  # fmt: skip


def started(folder: Path, *line: str, **more: str) -> Command:
    """`sectorch` with draws that repeat."""
    paths = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, FOLDER: str(folder / "keys"), **more}
    command = [sys.executable, str(HERE / "seeded_command.py"), *line]
    return Command(command, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT)


def tensors(folder: Path) -> dict[str, object]:
    return {str(path.relative_to(folder)): torch.load(path, weights_only=True) for path in folder.rglob("*.pt")}


def leaves(value: object) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def compared(paper: Paper, whole: Path, folders: dict[str, Path]) -> int:
    """How many files of the parties are equal to those of one process: all that both have, and there are some."""
    expected, count = tensors(whole), 0
    results = json.loads((whole / "results.json").read_text())
    for party in paper.keeping or paper.parties:
        for path, value in tensors(folders[party]).items():
            if path in expected and leaves(value):
                count += 1
                pairs = zip(leaves(value), _of(expected[path], value), strict=True)
                assert all(torch.equal(x, y) for x, y in pairs), (party, path)
        own = json.loads((folders[party] / "results.json").read_text())
        for key in paper.results:
            assert key not in own or own[key] == results[key], (party, key)
    assert count or paper.results
    return count


def _of(whole: object, part: object) -> list[torch.Tensor]:
    """Of a file with all parties' tensors by name, those of the party that has the other file."""
    if isinstance(whole, dict) and isinstance(part, dict) and whole.keys() > part.keys():
        return leaves({key: whole[key] for key in part})
    return leaves(whole)


def costs(paper: Paper, whole: Path, folders: Iterable[Path]) -> dict[str, int]:
    """Bytes and online rounds, which each process counted as one process does: each message, and each call's rounds.

    What only a federation exchanges has to be of the paper's protocols for that, and is counted by itself.
    """
    one, together = json.loads((whole / "counted.json").read_text()), {}
    for folder in folders:
        for what, counts in json.loads((folder / "counted.json").read_text()).items():
            for key, value in counts.items():
                assert together.setdefault(what, {}).setdefault(key, value) == value, (folder, what, key)
    for what in ("messages", "bytes"):
        more = {k: v - one[what].get(k, 0) for k, v in together[what].items() if v != one[what].get(k)}
        assert one[what].keys() <= together[what].keys()
        assert all(count > 0 and key.split()[1] in paper.beside for key, count in more.items()), more
    alone, apart = (Counter(_call(paper, *item) for item in found["calls"].items()) for found in (one, together))
    assert not alone - apart and not any(protocols for *_, protocols in apart - alone), (alone, apart)
    online = lambda calls: sum(rounds * count for (phase, rounds, _), count in calls.items() if phase == "ONLINE")
    total = sum(one["bytes"].values())
    return {
        "bytes": total, "rounds": online(alone), "bytes to agree": sum(together["bytes"].values()) - total,
        "rounds to agree": online(apart - alone),
    }  # fmt: skip


def _call(paper: Paper, call: str, found: list) -> tuple[str, int, tuple[str, ...]]:
    """Phase, rounds, and the paper's protocols of a call; there are none in one that only a federation has."""
    return call.split()[0], found[0], tuple(name for name in found[1] if name not in paper.beside)
