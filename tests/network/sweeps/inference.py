"""Secure inference: a server, an answering party and a client that asks again; LeNet, one image, receipts at all."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps import leaks
from sweeps.sweep import Cases, places, spread
from sweeps.world import Process, free_port, killed_at, listening, warm

PARTIES = ("server", "hospital-b", "alice")
WHOLE = 90.0
QUERIES = 4


def made(folder: Path) -> int:
    """Keys of all, the model file, an image."""
    import torch

    from sectorch.network import Pins
    from sectorch.network.identity.authority import make_authority
    from sectorch.network.identity.identity import fingerprint_of
    from sectorch.nn.models import ZOO
    from sectorch.serving.model_file import save_model
    from sectorch.testing.local_network import enrol

    folder.mkdir(parents=True)
    make_authority(folder)
    enrol(folder, "server", hosts=("localhost",))
    pins = Pins(folder / "pins")
    for name in PARTIES[1:]:
        pins.pin(name, fingerprint_of(enrol(folder, name).identity or b""))
    torch.manual_seed(0)
    model = ZOO["lenet"][0]().eval().requires_grad_(False)
    x = torch.rand(1, *ZOO["lenet"][1])
    save_model(model, x, folder / "model.safetensors")
    torch.save((x, model(x)), folder / "asked.pt")
    return 0


def asking(asks: Mapping[str, Any]) -> int:
    """A client that asks until it has so many results: one as it comes, one prepared ahead, and so on. A line for each
    result and each error, with the time; an error is followed by the next attempt of the same program.

    Args:
        asks: folder, port, out, run, queries, seconds.
    """
    import torch

    from sectorch.errors import SectorchError
    from sectorch.network import Pins, Store, connect
    from sectorch.network.identity.identity import Credentials

    folder, run = Path(asks["folder"]), Path(asks["run"])
    credentials = Credentials.read(folder / "alice.pem", folder / "alice-key.pem", folder / "ca.pem")
    x, plain = torch.load(folder / "asked.pt")
    connection = model = None
    store = Store(run / "store-q")
    end, right = time.monotonic() + asks["seconds"], 0
    with Path(asks["out"]).open("a", buffering=1) as out:
        while right < asks["queries"] and time.monotonic() < end:
            line: dict[str, Any] = {"began": time.monotonic()}
            try:
                if connection is None:
                    connection = connect(
                        f"localhost:{asks['port']}", credentials, pins=Pins(folder / "pins"),
                        store=store, receipts=run / "q.jsonl",
                    )  # fmt: skip
                model = model or connection.model("hospital-b")
                if right % 2 and not model.prepared():
                    model.prepare(x)
                y = model(x)
                right += 1
                line |= {"result": y.tolist(), "far": (y - plain).abs().max().item()}
            except SectorchError as error:
                line |= {"error": type(error).__name__, "text": str(error)}
                time.sleep(0.05)
            out.write(json.dumps(line | {"at": time.monotonic()}) + "\n")
        if connection is not None:
            connection.close()
    return 0 if right == asks["queries"] else 3


class Star:
    """The three processes; the server and the answering party run until they are stopped or killed."""

    def __init__(self, folder: Path, fresh: bool = False):
        self.folder, self.fresh = folder, fresh
        self.keys, self.run = folder / "keys", folder / "case"
        if not (self.keys / "asked.pt").exists():
            shutil.rmtree(self.keys, ignore_errors=True)
            setup = Process("setup", {"makes": str(self.keys)}, folder / "setup.log")
            if setup.wait(60) != 0:
                raise RuntimeError(setup.said)
        self.port, self.queries = free_port(), QUERIES
        self.running: dict[str, Process] = {}

    def begin(self, jobs: Mapping[str, Mapping] = {}) -> None:
        """All of them anew, in an empty folder."""
        self.close()
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir(parents=True)
        for name in PARTIES:
            self.start(name, jobs.get(name, {}))

    def start(self, name: str, job: Mapping[str, Any] = {}) -> Process:
        keys, run = self.keys, self.run
        tls = ["--cert", str(keys / f"{name}.pem"), "--key", str(keys / f"{name}-key.pem")]
        kept = ["--store", str(run / f"store-{name}"), "--receipts", str(run / f"{name}.jsonl")]
        common = {"traffic": str(run / name / "traffic"), **job}
        (run / name).mkdir(exist_ok=True)
        if name == "server":
            identity = keys / "server-identity.pem"
            if not identity.exists():
                shutil.copy(keys / "alice-identity.pem", identity)
            argv = ["server", "--listen", f"localhost:{self.port}", *tls, "--clients-ca", str(keys / "ca.pem"), *kept]
            job = {"argv": argv, "serves": True}
        elif name == "hospital-b":
            argv = [
                "answer", str(keys / "model.safetensors"), "--name", name, "--server", f"localhost:{self.port}", *tls,
                "--ca", str(keys / "ca.pem"), "--pins", str(keys / "pins"), *kept,
            ]  # fmt: skip
            job = {"argv": argv}
        else:
            asks = {"folder": str(keys), "port": self.port, "out": str(run / "asked"), "run": str(run)}
            job = {"asks": {**asks, "queries": self.queries - len(self.results()), "seconds": WHOLE}}
        process = self.running[name] = Process(name, {**common, **job}, run / name / "log", self.fresh)
        if name == "server":
            listening(self.port, process)
        return process

    def lines(self) -> list[dict]:
        path = self.run / "asked"
        found = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in found if line.startswith("{") and line.endswith("}")]

    def results(self) -> list[dict]:
        return [line for line in self.lines() if "result" in line]

    def audited(self, victim: str = "none") -> str:
        """What is wrong with the receipts: a file that does not verify, or fewer queries signed for than answered."""
        right, why = len(self.results()), []
        for name in ("server.jsonl", "hospital-b.jsonl", "q.jsonl"):
            audit = Process("audit", {"argv": ["audit", str(self.run / name), "--json"]}, self.run / "audit.log")
            if audit.wait(60) != 0:
                why.append(f"audit of {name}: {audit.last}")
                continue
            events = [json.loads(line) for line in (self.run / name).read_text().splitlines()]
            asked = [e for e in events if e["event"] == "asked" and "asked" in e and "predict" in str(e["asked"])]
            asked = asked or [e for e in events if e["event"] == "asked"]
            places = [(e["session"], e["call"]) for e in asked]
            if len(asked) < right:
                why.append(f"{name} has {len(asked)} queries, and {right} were answered")
            if len(set(places)) < len(places):
                why.append(f"{name} has a query twice")
            open_ = {e["number"] for e in asked} - {e["of"] for e in events if e["event"] == "ended"}
            if open_ and not name.startswith(victim):
                why.append(f"{name} does not say how {len(open_)} queries ended")
        return "; ".join(why)

    def close(self) -> None:
        for name in reversed(PARTIES):
            process = self.running.pop(name, None)
            if process is not None:
                process.stop(3.0)


class Whole:
    """An undisturbed run: its result, the events of each party, bytes of each link."""

    def __init__(self, star: Star):
        path = star.folder / "whole.json"
        if not path.exists():
            star.begin({name: {"events": str(star.folder / f"{name}.events")} for name in PARTIES})
            if star.running["alice"].wait(WHOLE) != 0:
                raise RuntimeError(star.running["alice"].said + str(star.lines()))
            results = star.results()
            why, view = star.audited(), leaks.seen(star.run, list(PARTIES))
            star.close()
            if why or any(line["result"] != results[0]["result"] or line["far"] > 1e-3 for line in results):
                raise RuntimeError(why or "results differ")
            events = {name: (star.folder / f"{name}.events").read_text() for name in PARTIES}
            path.write_text(json.dumps({"result": results[0]["result"], "events": events, "view": view}))
        for name in PARTIES:
            warm(star.folder / f"{name}.events.modules")
        said = json.loads(path.read_text())
        self.result, self.events, self.view = said["result"], said["events"], said["view"]


def kills(star: Star, whole: Whole, cases: Cases, count: int, only: str = "") -> None:
    """Each of the three at `count` places; the client goes on by itself, a killed party is started again at once."""
    for place in spread(count):
        for victim in PARTIES:
            chosen, case = places(whole.events[victim], count), f"inference kill {victim} {place}"
            if place < len(chosen) and only in case and cases.left(case):
                cases.add(case, **_killed(star, whole, victim, *chosen[place]))
    star.close()


def _killed(star: Star, whole: Whole, victim: str, among: str, number: int) -> dict[str, Any]:
    killed = star.folder / "killed"
    killed.unlink(missing_ok=True)
    row: dict[str, Any] = {"place": f"{among or 'all'} {number}"}
    star.begin({victim: {"kill": number, "among": among, "killed": str(killed)}})
    dying = star.running[victim]
    end = time.monotonic() + WHOLE
    while dying.poll() is None and star.running["alice"].poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    at = killed_at(killed)
    if at is None:
        return row | {"ok": star.running["alice"].status == 0, "outcome": "not reached", "reached": False}
    star.start(victim)
    return row | ended(star, whole, at, "q" if victim == "alice" else victim)


def ended(star: Star, whole: Whole, at: float, victim: str = "none") -> dict[str, Any]:
    """How the client went on after something happened: when it had the next error or result, and the next result."""
    status = star.running["alice"].wait(WHOLE)
    lines = star.lines()
    after = [line for line in lines if line["at"] >= at]
    right = [line["at"] - at for line in after if "result" in line]
    errors = [line for line in after if "error" in line]
    first = after[0]["at"] - at if after else 0.0
    found = {
        "outcome": f"{len(errors)} errors" if errors else "went on", "reaction": first,
        "recovered": right[0] if right else None, "errors": [f"{e['error']}: {e['text']}" for e in errors[:6]],
    }  # fmt: skip
    wrong = [line for line in lines if "result" in line and line["result"] != whole.result]
    why = []
    if status != 0:
        why.append(f"the client ended with {status}: {star.running['alice'].last}")
    if wrong:
        why.append(f"{len(wrong)} wrong results, {wrong[0]['far']:.2g} off")
    if any("Traceback" in process.said for process in star.running.values()):
        why.append("a traceback")
    if strange := [e["text"] for e in errors if "own log says more" in e["text"] and "Error: at" in e["text"]]:
        why.append(f"an error that is none of sectorch's: {strange[0]}")
    why += filter(None, [star.audited(victim), leaks.beyond(whole.view, star.run, list(PARTIES))])
    return found | {"ok": not why, "why": "; ".join(why)}
