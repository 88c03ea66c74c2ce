"""Receipts as one page that can be printed, for whoever has to answer for the data."""

from __future__ import annotations

import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ... import files
from ...errors import ArgumentError
from ..names import readable
from .audit import Audit, Comparison, Entry

ROLES = {"Q": "the querying party (Q)", "A": "the answering party (A)", "S": "the server (S)"}
_OWN = {
    "Q": "This party learned what is listed, and nothing else of the models that it asked.",
    "A": "This party itself learned nothing: it held masked values, which tell neither questions nor results.",
    "S": "This party itself learned nothing: it held masked values, which tell no model, question or result.",
}
_ASSUMED = (
    "The server does not put together what it holds with what a client or an answering party holds.",
    "All parties follow the protocol. Who does not can make results wrong; a client that does not can read the model.",
    "The primitives hold: AES-128, X25519, HKDF-SHA256, Ed25519, TLS 1.3.",
    "Public are the architecture of a model, all shapes, how often and when was asked. What results tell of a model or "
    "of the data that it was trained on is not hidden by any of this.",
)
LISTED = 1000
"""Questions that are listed one by one, the last ones."""


def page(found: Audit, known: bool, other: Audit | None = None, compared: Comparison | None = None) -> str:
    """The page of an audit, as HTML that needs nothing from outside.

    Args:
        known: whether the file was held to a key that was named.
        other, compared: another party's receipts, and what `compare` said of both.
    """
    folder = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: readable(value) if isinstance(value, str) else value,
    )  # fmt: skip
    times = sorted(entry.time[:10] for entry in found.queries)
    return folder.get_template("page.html").render(
        audit=found, known=known, other=other, compared=compared, roles={**ROLES, **_others(found, other)},
        period=f"{times[0]} to {times[-1]}" if times else "", groups=_groups(found), queries=found.queries[-LISTED:],
        opened=[(entry, opened) for entry in found.queries for opened in entry.opened][-LISTED:],
        unfinished=sum(not entry.done for entry in found.queries), assumptions=_ASSUMED,
        own=_OWN.get(found.role, "What this party learned stands in its own record of each run."),
        now=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC", name=readable(found.path.name),
        version=metadata.version("sectorch"),
    )  # fmt: skip


def write_page(path: Path, text: str) -> None:
    """The page as a file that is its owner's alone.

    Raises:
        ArgumentError: it cannot be written, or does not go by a page's name: receipts and keys are never written over.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise ArgumentError(f"--page writes HTML, got {path}: name it {path.with_suffix('.html').name}, and print that")
    try:
        files.write(path, text.encode(), 0o600)
    except OSError as error:
        raise ArgumentError(f"cannot write the page {path}: {error.strerror}") from None


def _others(*audits: Audit | None) -> dict[str, str]:
    """Roles of programs of one's own go by their names."""
    return {a.role: f"the role {a.role}" for a in audits if a is not None and a.role not in ROLES}


def _groups(found: Audit) -> list[dict[str, Any]]:
    """What was learned, by whom, of which version of what."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for e in found.queries:
        known = e.key or (f"certificate {e.certificate}" if e.certificate else "its name alone")
        groups.setdefault((e.learned, e.client, known, e.model, e.version), []).append(e)
    return [
        dict(zip(("learned", "client", "known", "model", "version"), key, strict=True))
        | {"queries": len(of), "rows": sum(e.rows or 0 for e in of), "first": of[0].time[:19].replace("T", " ")}
        | {"last": of[-1].time[:19].replace("T", " ")}
        for key, of in sorted(groups.items())
    ]
