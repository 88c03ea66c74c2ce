"""The papers' runs as federations: small, real command lines; what they have to end with, and what they charge."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.world import Process, free_port, listening, wait_all

IN_TIME = 5.0
"""Seconds in which the others have to end, or to go on."""
WHOLE = 150.0
"""Seconds for a whole run, on a machine that is busy."""


@dataclass(frozen=True)
class Paper:
    """
    Args:
        parties: names and roles. line: the command, without --federation, --as and --out.
        kept: glob of the files, under a party's --out, whose tensors are the result.
        of_file: what of such a file's content is.
        learns: whose these are; everybody's unless named.
        charges: of the runs' folders, by party: what was charged, as counts by name.
        lost_round: what is charged once more for a round that was lost, as the paper's page says.
    """

    name: str
    parties: Mapping[str, str]
    line: str
    kept: str
    charges: Callable[[Mapping[str, Path]], dict[str, int]] = field(default=lambda outs: {})
    lost_round: int = 0
    learns: tuple[str, ...] = ()
    of_file: Callable[[Any], Any] = lambda content: content


def _models(content: Any) -> Any:
    """CaPriDe: the models and their optimisers' state. The meters beside them heard answers of another noise."""
    return content[0]["models"]


def _released(outs: Mapping[str, Path]) -> dict[str, int]:
    """CaPriDe: how many numbers each party has released of its logits to each other one, as itself has counted."""
    found: dict[str, int] = {}
    for name, out in outs.items():
        path = out / "released.json"
        released = json.loads(path.read_text()) if path.exists() else {}
        for place, count in released.items():
            pair = f"{name}: {place.split('@')[0]}"
            found[pair] = found.get(pair, 0) + count[0]
    return found


def _answered(outs: Mapping[str, Path]) -> dict[str, int]:
    """PrivHFL: files of answers, one for each client and round."""
    return {f"{name}: answers": len(list(out.glob("round-*/*/labels-*.pt"))) for name, out in outs.items()}


def _budgets(outs: Mapping[str, Path]) -> dict[str, int]:
    """CaPC: the queries that each organisation's own budget has paid for, by asker, and what of it is spent."""
    found: dict[str, int] = {}
    for name, out in outs.items():
        for path in sorted((out / "budgets").glob("*.json")):
            budget = json.loads(path.read_text())
            found[f"{name}: spent"] = round(1e6 * budget["spent"])
            for charge in budget["charges"].values():
                paid = f"{name}: queries of {charge['asker']}"
                found[paid] = found.get(paid, 0) + charge["queries"]
    return found


_CAPRIDE = (
    "capride --parties 2 --samples 16 --test-samples 60 --network mlp --rounds 2 --warmup 2 --epochs 1 --head-rank 2 "
    "--temperature 2 --leakage 0.99 --activation square"
)
_PRIVHFL = (
    "privhfl --architectures mlp --clients 3 --samples 40 --test-samples 60 --queries 8 --iterations 2 "
    "--local-epochs 2 --retraining-epochs 2"
)
_CAPC = (
    "capc --architectures mlp --parties 3 --querying 2 --pool 6 --queries 4 --chunk 2 --argmax shares --local-epochs 2 "
    "--reliability 0.01 --epsilon 2000 --budget-epsilon 9000 --budgets OUT/budgets"
)
_SHAPLEY = "shapley --clients 3 --rounds 2 --samples 120 --tests 24 --skip --no-compare"
_PERTURBED = "perturbed-fl --clients 3 --rounds 6 --batch-size 8"
_CLIENTS = {"north": "C0", "south": "C1", "west": "C2"}
PAPERS = {
    "perturbed-fl": Paper("perturbed-fl", {"hub": "Server", **_CLIENTS}, _PERTURBED, "round-6-*.pt", learns=("hub",)),
    "capride": Paper(
        "capride", {"north": "P1", "south": "P2"}, _CAPRIDE, "round-2/*/model-*.pt", _released, lost_round=19,
        of_file=_models,
    ),
    "privhfl": Paper(
        "privhfl", {"north": "c1", "south": "c2", "west": "c3", "hub": "S"}, _PRIVHFL, "round-*/*/model-*.pt", _answered
    ),
    "capc": Paper(
        "capc", {"north": "p1", "south": "p2", "west": "p3", "hub": "S"}, _CAPC, "p*/*/labels-*.pt", _budgets,
        learns=("north", "south"),
    ),
    "shapley": Paper(
        "shapley", {"north": "c1", "south": "c2", "west": "c3", "hub": "P", "helper": "X"}, _SHAPLEY, "results.json",
        learns=("hub",),
    ),
}  # fmt: skip


class Federated:
    """A federation's folder and its server, which runs until it is stopped or killed."""

    def __init__(self, paper: Paper, folder: Path, fresh: bool = False):
        self.paper, self.folder, self.fresh = paper, folder, fresh
        self.trial = folder / "trial"
        self.logs = folder / "logs"
        self.server: Process | None = None
        if not (self.trial / "federation.toml").exists():
            shutil.rmtree(self.trial, ignore_errors=True)
            entries = [f"{name}={role}" for name, role in paper.parties.items()]
            argv = ["federation", "try", str(self.trial), *entries, "--server", f"localhost:{free_port()}"]
            made = Process("try", {"argv": argv}, self.logs / "try.log")
            if made.wait(60) != 0:
                raise RuntimeError(made.said)
        text = (self.trial / "federation.toml").read_text()
        self.port = int(text.split('server = "localhost:')[1].split('"')[0])

    def serve(self, job: Mapping[str, Any] = {}) -> Process:
        argv = [
            "server", "--listen", f"localhost:{self.port}", "--cert", str(self.trial / "server.pem"), "--key",
            str(self.trial / "server-key.pem"), "--clients-ca", str(self.trial / "ca.pem"),
        ]  # fmt: skip
        self.server = Process("server", {"argv": argv, "serves": True, **job}, self.logs / "server.log", self.fresh)
        listening(self.port, self.server)
        return self.server

    def out(self, run: Path, name: str) -> Path:
        return run / name / "out"

    def start(self, run: Path, name: str, job: Mapping[str, Any] = {}) -> Process:
        """One party's command. Its own seed is given, so that runs differ in keys, masks and noise alone."""
        out = self.out(run, name)
        if not out.exists():
            out.mkdir(parents=True)
            (out / "own.json").write_text(json.dumps({"seed": 1 + sorted(self.paper.parties).index(name)}))
        argv = [
            *self.paper.line.replace("OUT", str(out)).split(), "--federation", str(self.trial / "federation.toml"),
            "--as", name, "--out", str(out), "--no-plots", "--json", "--yes",
        ]  # fmt: skip
        job = {"argv": argv, "traffic": str(run / name / "traffic"), **job}
        return Process(name, job, run / name / "log", self.fresh)

    def whole(self, run: Path, jobs: Mapping[str, Mapping] = {}, seconds: float = WHOLE) -> list[Process]:
        """All parties' commands, to their end."""
        processes = [self.start(run, name, jobs.get(name, {})) for name in self.paper.parties]
        wait_all(processes, seconds)
        for process in processes:
            process.signal(9)
            process.wait(10)
        return processes

    def charges(self, run: Path) -> dict[str, int]:
        return self.paper.charges({name: self.out(run, name) for name in self.paper.parties})

    def result(self, run: Path) -> dict[str, Any]:
        """All tensors that the parties ended with, by party, file and name."""
        import torch

        found: dict[str, Any] = {}
        for name in self.paper.learns or self.paper.parties:
            out = self.out(run, name)
            for path in sorted(out.glob(self.paper.kept)):
                if path.suffix == ".json":
                    value = {k: torch.tensor(v) for k, v in json.loads(path.read_text())["values"].items()}
                else:
                    value = self.paper.of_file(torch.load(path, weights_only=True))
                stage = re.sub(r"-[0-9a-f]{12}(?=\.pt$)", "", str(path.relative_to(out)))  # its key is of drawn marks
                _flat(f"{name}/{stage}", value, found)
        return found

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()


def _flat(name: str, value: Any, into: dict[str, Any]) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        into[name] = value.double()
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _flat(f"{name}/{key}", inner, into)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            _flat(f"{name}/{key}", inner, into)


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """The largest difference of each tensor of two results; infinite where one has what the other has not, or another
    shape of it."""
    found = dict.fromkeys(one.keys() ^ other.keys(), float("inf"))
    for key in one.keys() & other.keys():
        same = one[key].shape == other[key].shape
        found[key] = (
            float("inf") if not same else (one[key] - other[key]).abs().max().item() if one[key].numel() else 0.0
        )
    return found or {"nothing": float("inf")}
