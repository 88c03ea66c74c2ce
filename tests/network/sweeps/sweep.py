"""The cases of a paper: each party killed at each place, and each link failing in each way; a line of JSON for each."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps import leaks
from sweeps.papers import IN_TIME, WHOLE, Federated, Paper, apart
from sweeps.world import Process, killed_at, rehearsed, running, settled, wait_all, warm

PLACES = 20
RUNS = 3
"""Undisturbed runs, from which it is read how far a right result may be from another one."""


def places(events: str, count: int, files: int = 6) -> list[tuple[str, int]]:
    """`count` places of a run with these events, evenly: some of those at which files change, the rest of all.

    Each is the kinds of events that are counted ("" for all) and a number among them.
    """
    changing = sum(kind in "fp" for kind in events)
    files = min(files, changing, count // 3)
    found = [("fp", (2 * i + 1) * changing // (2 * files)) for i in range(files)]
    rest = min(count - files, len(events))
    return found + [("", (2 * i + 1) * len(events) // (2 * rest)) for i in range(rest)]


def spread(count: int) -> list[int]:
    """Numbers below `count` in an order in which each beginning is spread over all: a sweep may be stopped anywhere."""
    return sorted(range(count), key=lambda place: f"{place:012b}"[::-1])


class Cases:
    """The results of a sweep, in a file to which each case is added as it ends; those in it are not run again.

    Args:
        path: of that file. seconds: after which no case is begun. pause: a file; while it exists none is begun either.
    """

    def __init__(self, path: Path, seconds: float | None, pause: Path | None = None):
        self._pause = pause
        self.path, self._end = path, None if seconds is None else time.monotonic() + seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._known = {row["case"] for row in self.rows}

    def left(self, case: str) -> bool:
        """Whether there is time for this one, and it has not been run."""
        if case in self._known:
            return False
        while self._pause is not None and self._pause.exists() and not self._over():
            time.sleep(1)
        return not self._over()

    def _over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def add(self, case: str, **row: Any) -> None:
        row = {"case": case, **row}
        self.rows.append(row)
        self._known.add(case)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = "ok  " if row["ok"] else "FAIL"
        print(
            f"{said} {case}: {row.get('outcome', '')} {row.get('reaction', 0) or 0:.2f} s {row.get('why', '')}",
            flush=True,
        )


class Reference:
    """Undisturbed runs of a paper: the result, how far each tensor of it is apart in them, the events of all."""

    def __init__(self, world: Federated, folder: Path):
        self.folder = folder
        for number in range(RUNS):
            run = folder / f"whole-{number}"
            if (run / "done").exists():
                for name in world.paper.parties:
                    warm(run / name / "events.modules")
                continue
            shutil.rmtree(run, ignore_errors=True)
            events = {name: {"events": str(run / name / "events")} for name in world.paper.parties}
            for name in world.paper.parties:
                (run / name).mkdir(parents=True)
            if world.server is not None:
                world.close()
            world.serve({"events": str(run / "server.events")})
            start = time.monotonic()
            for process in world.whole(run, events):
                if process.status != 0:
                    raise RuntimeError(f"{process.name} ended with {process.status}: {process.said}")
            took = time.monotonic() - start
            world.close()
            (run / "done").write_text(str(took))
            for name in world.paper.parties:
                warm(run / name / "events.modules")
        self.runs = [folder / f"whole-{number}" for number in range(RUNS)]
        results = [world.result(run) for run in self.runs]
        self.result = results[0]
        self.spread: dict[str, float] = {}
        for one, other in itertools.combinations(results, 2):
            for name, far in apart(one, other).items():
                self.spread[name] = max(far, self.spread.get(name, 0.0))
        self.charges = world.charges(self.runs[0])
        self.seconds = min(float((run / "done").read_text()) for run in self.runs)
        names = world.paper.parties
        self.view = leaks.seen(self.runs[0], list(names))
        self.events = {name: (self.runs[0] / name / "events").read_text() for name in names}
        self.events["server"] = (self.runs[0] / "server.events").read_text()

    def differs(self, world: Federated, run: Path) -> str:
        """How a run's result and charges are not those of an undisturbed one; empty if they are.

        Undisturbed runs differ by their masks' and noise's rounding; ten times as much is allowed, of each tensor.
        """
        for name, far in apart(self.result, world.result(run)).items():
            spread = self.spread.get(name, 0.0)
            if not far <= 10 * spread + 1e-12:
                return f"the result differs by {far:.2g} at {name}; undisturbed runs by {spread:.2g}"
        charges, more = world.charges(run), world.paper.lost_round
        wrong = [
            f"{key}: {charges.get(key)} for {self.charges.get(key)}"
            for key in charges.keys() | self.charges.keys()
            if not self.charges.get(key, 0) <= charges.get(key, 0) <= self.charges.get(key, 0) + more
        ]
        return f"charged otherwise: {'; '.join(wrong[:3])}" if wrong else ""

    def leaked(self, world: Federated, run: Path) -> str:
        """What the run's traffic, of all attempts, tells somebody beyond an undisturbed one's; empty if nothing."""
        names = list(world.paper.parties)
        return leaks.beyond(self.view, run, names)


def kills(world: Federated, reference: Reference, cases: Cases, count: int, only: str = "") -> None:
    """Each party, and the server, at `count` places."""
    for place in spread(count):
        for victim in ("server", *world.paper.parties):
            chosen = places(reference.events[victim], count)
            case = f"{world.paper.name} kill {victim} {place}"
            if place < len(chosen) and only in case and cases.left(case):
                cases.add(case, **_killed(world, reference, victim, *chosen[place], world.folder / "case"))


def _killed(world: Federated, reference: Reference, victim: str, among: str, number: int, run: Path) -> dict[str, Any]:
    """One case: the victim dies, the others end in time or go on, all start again and end with the right result."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    kill = {"kill": number, "among": among, "killed": str(run / "killed")}
    row: dict[str, Any] = {"place": f"{among or 'all'} {number}"}
    if victim == "server" or world.server is None or world.server.poll() is not None:
        world.close()
        world.serve(kill if victim == "server" else {})
    parties = {n: world.start(run, n, kill if n == victim else {}) for n in world.paper.parties}
    others = [p for n, p in parties.items() if n != victim]
    dying = world.server if victim == "server" else parties[victim]
    assert dying is not None
    wait_all([dying] if victim != "server" else others, WHOLE) if victim != "server" else _first(dying, others)
    at = killed_at(run / "killed")
    try:
        if at is None:
            wait_all(list(parties.values()), WHOLE)
            if victim == "server":  # its place may still come, in the next case
                world.close()
            return row | {
                "ok": all(p.status == 0 for p in parties.values()),
                "outcome": "not reached",
                "reached": False,
            }
        row |= _reacted(world, run, victim, at, parties, others)
        if not row["ok"]:
            return row
        again = world.whole(run) if row["outcome"] != "went on" else []
        bad = [f"{p.name} ended with {p.status}: {p.last}" for p in again if p.status != 0]
        why = "; ".join(bad) or reference.differs(world, run) or reference.leaked(world, run)
        return row | {"ok": not why, "why": why}
    finally:
        for process in parties.values():
            process.signal(9)
            process.wait(10)


def _first(dying: Process, others: list[Process]) -> None:
    """Until the server is gone, or all are done."""
    end = time.monotonic() + WHOLE
    while dying.poll() is None and running(others) and time.monotonic() < end:
        time.sleep(0.01)


def _reacted(
    world: Federated, run: Path, victim: str, at: float, parties: dict[str, Process], others: list[Process]
) -> dict[str, Any]:
    """What the others did after a party was lost, and how fast."""
    if victim == "server":
        world.serve()
    while not wait_all(others, 0) and time.monotonic() < at + IN_TIME:
        time.sleep(0.01)
    if running(others):  # they wait for those that have not come, and say so: these come again
        ended = [name for name, p in parties.items() if p.poll() is not None]
        parties.update({name: world.start(run, name) for name in ended})
        wait_all(list(parties.values()), WHOLE)
        for hanging in running(parties.values()):
            hanging.signal(signal.SIGUSR1)  # its log has where it is
        failed = [f"{n} hangs: {p.last}" for n, p in parties.items() if p.status is None]
        failed += [
            f"{n} ended with {p.status} after {p.ended - at:.1f} s: {p.last}" for n, p in parties.items() if p.status
        ]
        return {"ok": not failed, "outcome": "late" if failed else "went on", "reaction": 0.0, "why": "; ".join(failed)}
    reaction = max([p.ended - at for p in others if p.ended > at], default=0.0)
    if victim == "server":
        named = lambda p: "server" in p.last or "connection" in p.last or "connect" in p.last
    else:
        named = lambda p: f"'{victim}'" in p.last
    strange = [
        f"{p.name} ended with {p.status}: {p.last}" for p in others if p.status not in (0, 1) or "Traceback" in p.said
    ]
    nameless = [f"{p.name} does not name it: {p.last}" for p in others if p.status == 1 and not named(p)]
    found = {"ok": not strange, "outcome": "error", "reaction": reaction, "why": "; ".join(strange)}
    if nameless:
        found["nameless"] = nameless
    return found


def table(rows: list[dict]) -> Iterator[str]:
    """For each paper and party, or link: cases, passed, slowest reaction."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(" ".join(row["case"].split()[:3]), []).append(row)
    for name, found in groups.items():
        reached = [row for row in found if row.get("reached", True)]
        slowest = max([row.get("reaction") or 0.0 for row in reached], default=0.0)
        ok = sum(row["ok"] for row in reached)
        went = sum(row.get("outcome") == "went on" for row in reached)
        rest = f"{went} went on, {len(found) - len(reached)} not reached"
        yield f"{name:34} {ok:4} of {len(reached):4}  slowest {slowest:5.2f} s  {rest}"


def prepared(paper: Paper, folder: Path) -> tuple[Federated, Reference]:
    out = folder / paper.name / "rehearsal"
    shutil.rmtree(out, ignore_errors=True)
    argv = paper.line.replace("OUT", str(out)).split()
    rehearsed([*argv, "--out", str(out), "--no-plots", "--json"], folder / paper.name / "rehearsal.log")
    settled()
    world = Federated(paper, folder / paper.name)
    return world, Reference(world, folder / paper.name)
