"""Each link failing in each way and direction: an error or recovery in time, and then the right result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sweeps import inference
from sweeps.links import MODES
from sweeps.papers import IN_TIME, WHOLE, Federated
from sweeps.sweep import Cases, Reference
from sweeps.world import Process, free_port, killed_at, listening, running, wait_all

FRACTIONS = (0.5, 0.15, 0.85)
"""Of the bytes that go in that direction of a whole run: where the link fails."""
SLOWER = ("delay",)
"""Modes in which all goes on, later."""


class PeerLink:
    """A proxy before the server, in a process of its own."""

    def __init__(self, folder: Path, target: int, mode: str = "none", up: bool = True, after: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.noted, self.passed = free_port(), folder / "failed", folder / "passed"
        self.noted.unlink(missing_ok=True)
        proxy = dict(
            port=self.port, target=target, mode=mode, up=up, after=after, noted=str(self.noted), passed=str(self.passed)
        )
        self.process = Process("proxy", {"proxy": proxy}, folder / "proxy.log")
        listening(self.port, self.process)

    @property
    def at(self) -> float | None:
        return killed_at(self.noted)

    def close(self) -> tuple[int, int]:
        """Ends it; the bytes that passed up and down."""
        self.process.signal(9)
        self.process.wait(10)
        if not self.passed.exists():
            return 0, 0
        up, down = self.passed.read_text().split()
        return int(up), int(down)


def _ways(
    links: Mapping[str, tuple[int, int]], before: str, fractions: int
) -> Iterator[tuple[str, str, str, bool, int]]:
    """Case, link, mode, direction and bytes."""
    for number, fraction in enumerate(FRACTIONS[:fractions]):
        for mode in MODES:
            for name, sizes in links.items():
                for up in (True, False):
                    case = f"{before} link {name} {'up' if up else 'down'} {mode} {number}"
                    yield case, name, mode, up, int(fraction * sizes[not up])


def of_paper(world: Federated, reference: Reference, cases: Cases, fractions: int = 1, only: str = "") -> None:
    """All links of a paper's federation."""
    if world.server is None or world.server.poll() is not None:
        world.serve()
    folder = world.folder / "measured"
    shutil.rmtree(folder, ignore_errors=True)
    links = {name: PeerLink(folder / name, world.port) for name in world.paper.parties}
    processes = world.whole(folder, {name: {"port": link.port} for name, link in links.items()})
    sizes = {name: link.close() for name, link in links.items()}
    if any(p.status for p in processes):
        raise RuntimeError([p.last for p in processes])
    print(sizes, flush=True)
    for case, *way in _ways(sizes, world.paper.name, fractions):
        if only in case and cases.left(case):
            cases.add(case, **_failing(world, reference, *way))


def _failing(world: Federated, reference: Reference, name: str, mode: str, up: bool, after: int) -> dict[str, Any]:
    run = world.folder / "case"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    if world.server is None or world.server.poll() is not None:
        world.serve()
    link = PeerLink(run / "link", world.port, mode, up, after)
    parties = {n: world.start(run, n, {"port": link.port} if n == name else {}) for n in world.paper.parties}
    row: dict[str, Any] = {"after": after}
    try:
        end = time.monotonic() + WHOLE
        while link.at is None and running(parties.values()) and time.monotonic() < end:
            time.sleep(0.01)
        if link.at is None:
            return row | {
                "ok": all(p.status == 0 for p in parties.values()),
                "outcome": "not reached",
                "reached": False,
            }
        row |= _told(parties, link.at, mode)
        row["why"] = row["why"] or "; ".join(_then(world, reference, run, row))
        return row | {"ok": not row["why"]}
    finally:
        link.close()
        for process in parties.values():
            process.signal(9)
            process.wait(10)


def _told(parties: Mapping[str, Process], at: float, mode: str) -> dict[str, Any]:
    everyone = list(parties.values())
    wait_all(everyone, WHOLE)
    late = {n: p.ended - at if p.status is not None else WHOLE for n, p in parties.items()}
    failed = {n: p.last for n, p in parties.items() if p.status != 0}
    reaction, why = max(late.values()), ""
    if any(p.status not in (0, 1) or "Traceback" in p.said for p in everyone):
        why = "; ".join(f"{n} ended with {p.status}: {p.last}" for n, p in parties.items() if p.status)
    elif mode in SLOWER and failed:
        why = f"slower, and it ended: {failed}"
    elif mode not in SLOWER and failed and reaction > IN_TIME:
        why = f"ended after { ({n: round(s, 1) for n, s in late.items()}) }: {failed}"
    return {
        "outcome": "error" if failed else "went on",
        "reaction": reaction if failed else 0.0,
        "why": why,
        "said": failed,
    }


def _then(world: Federated, reference: Reference, run: Path, row: dict[str, Any]) -> Iterator[str]:
    """What is wrong when the same commands run again, over links that are whole."""
    if row["outcome"] == "error":
        again = world.whole(run)
        yield from (f"{p.name} ended with {p.status} again: {p.last}" for p in again if p.status != 0)
    if differs := reference.differs(world, run):
        yield differs
    if leak := reference.leaked(world, run):
        yield leak


def of_inference(
    star: inference.Star, whole: inference.Whole, cases: Cases, fractions: int = 1, only: str = ""
) -> None:
    """The client's link and the answering party's; the client asks again by itself."""
    links = {name: PeerLink(star.folder / "measured" / name, star.port) for name in inference.PARTIES[1:]}
    star.begin({name: {"port": link.port} for name, link in links.items()})
    status = star.running["alice"].wait(inference.WHOLE)
    sizes = {name: link.close() for name, link in links.items()}
    if status != 0:
        raise RuntimeError(star.running["alice"].said + str(star.lines()))
    print(sizes, flush=True)
    for case, name, mode, up, after in _ways(sizes, "inference", fractions):
        if not (only in case and cases.left(case)):
            continue
        link = PeerLink(star.folder / "link", star.port, mode, up, after)
        try:
            star.begin({name: {"port": link.port}})
            end = time.monotonic() + inference.WHOLE
            while link.at is None and star.running["alice"].poll() is None and time.monotonic() < end:
                time.sleep(0.005)
            if link.at is None:
                cases.add(case, ok=star.running["alice"].status == 0, outcome="not reached", reached=False)
                continue
            row = inference.ended(star, whole, link.at)
            late = mode not in SLOWER and row["reaction"] > IN_TIME
            row["why"] = "; ".join(filter(None, [row["why"], "late" if late else ""]))
            cases.add(case, **row | {"ok": not row["why"]})
        finally:
            link.close()
    star.close()
