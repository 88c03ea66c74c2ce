"""Chromium, without a window: what pages of a site look like to a reader, as numbers.

One page frames the others one after the other at a width, measures them by a script, and leaves what it found as JSON
in its own text, which Chromium prints. So nothing is needed but the browser.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROOT = Path(__file__).parent


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is its own."""

    def copyfile(self, source, outputfile) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the browser has gone on to the next page
            super().copyfile(source, outputfile)


def browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which this machine alone reaches the folder's files."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def measured(site: Path, pages: list[str], width: int, scheme: str, profile: Path) -> list[dict]:
    """What `page_metrics.js` finds on each page of a site in a frame of a width, in a palette ("default" or "slate").

    Args:
        pages: paths from the site's root. profile: an empty folder for the browser.
    """
    given = json.dumps({"pages": pages, "width": width, "scheme": scheme})
    script = (ROOT / "page_metrics.js").read_text(encoding="utf-8")
    frame = site / "_look.html"
    frame.write_text(
        f"<!doctype html><meta charset=utf-8><script>const GIVEN = {given};\n{script}</script>", encoding="utf-8"
    )
    command = [
        str(browser()),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ]
    command += ["--disable-background-networking", "--no-first-run", "--virtual-time-budget=600000", "--dump-dom"]
    try:
        with served(site) as address:
            done = subprocess.run([*command, f"{address}/_look.html"], capture_output=True, text=True, timeout=400)
    finally:
        frame.unlink()
    found = re.search(r"<pre id=\"found\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
