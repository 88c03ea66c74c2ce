"""Connections that say nothing beside a working client: idle ones, with and without TLS, and handshakes that stop."""

from __future__ import annotations

import socket
import ssl
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sweeps.inference import WHOLE, Star, Whole
from sweeps.sweep import Cases

IDLE, HALF = 200, 50
QUERIES = 60
HELLO = bytes.fromhex("16030100c4010000c00303")
"""The first bytes of a TLS handshake, whose rest does not come."""


def beside(star: Star, whole: Whole, cases: Cases) -> None:
    """A client's latencies alone, and beside `IDLE` idle and `HALF` half-open connections; all results are right."""
    if not cases.left("inference idle"):
        return
    star.queries = QUERIES
    alone, wrong = _latencies(star, whole)
    found: dict[str, Any] = {"alone_ms": round(1e3 * alone, 2)}
    server_before = _descriptors(star.running["server"].pid)
    kept = _connections(star)
    beside_, more = _latencies(star, whole, begin=False)
    open_ = sum(_open(one) for one in kept)
    found |= {"beside_ms": round(1e3 * beside_, 2), "made": len(kept), "still open": open_}
    for one in kept:
        one.close()
    time.sleep(2)
    left = _descriptors(star.running["server"].pid) - server_before
    why = [text for text in (wrong, more, f"{left} descriptors stay open" if left > 10 else "") if text]
    if beside_ > 1.5 * alone + 0.01:
        why.append("the client is slower")
    star.close()
    outcome = f"p50 {found['alone_ms']} ms alone, {found['beside_ms']} ms beside {len(kept)} ({open_} still open)"
    cases.add("inference idle", ok=not why, outcome=outcome, why="; ".join(why), **found)


def _latencies(star: Star, whole: Whole, begin: bool = True) -> tuple[float, str]:
    if begin:
        star.begin()
    else:
        (star.run / "asked").unlink()
        star.start("alice")
    if star.running["alice"].wait(WHOLE) != 0:
        return 0.0, f"the client ended: {star.running['alice'].last} {star.lines()[-1:]}"
    lines = star.lines()
    lines = lines[next(i for i, line in enumerate(lines) if "result" in line) :]  # the answering party is there
    wrong = [line for line in lines if line.get("result") != whole.result]
    times = [line["at"] - line["began"] for line in lines[10:]]
    return statistics.median(times), f"{len(wrong)} wrong results or errors: {wrong[0]}" if wrong else ""


def _connections(star: Star) -> list[socket.socket]:
    """Of the idle ones a third are bare, a third show alice's certificate, a third a server's; all say nothing."""
    kept = []
    for number in range(IDLE + HALF):
        with suppress(OSError):
            one = socket.create_connection(("127.0.0.1", star.port), timeout=5)
            if number >= IDLE:
                one.sendall(HELLO)
            elif number % 3:
                one = _secured(star.keys, "alice" if number % 3 == 1 else "server", one)
            kept.append(one)
    return kept


def _secured(keys: Path, name: str, one: socket.socket) -> socket.socket:
    context = ssl.create_default_context(cafile=str(keys / "ca.pem"))
    context.load_cert_chain(keys / f"{name}.pem", keys / f"{name}-key.pem")
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(one, server_hostname="localhost")


def _open(one: socket.socket) -> bool:
    one.settimeout(0.01)
    try:
        while one.recv(1 << 16):
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
