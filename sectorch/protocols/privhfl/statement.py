"""The privacy statement of a run: what each role received, counted from the ledger as the run went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from rich.table import Table

from ...choreography.ledger import Observer
from ...choreography.steps import Sent

Key = tuple[str, str, str, str, str]
"""Receiver's role, protocol, message, what hides it, what it shows (empty: uniform bits)."""


class Received(Observer):
    """Counts messages and bytes for each role, in memory that does not grow with the run."""

    def __init__(self):
        self.messages: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def message(self, line: Sent, value: torch.Tensor) -> None:
        key = (line.dst.role, line.protocol, line.label, line.mask, line.shows)
        self.messages[key] += 1
        self.bytes[key] += line.bytes

    def rows(self) -> list[dict]:
        """For JSON."""
        names = ("role", "protocol", "message", "hidden_by", "shows")
        return [
            {**dict(zip(names, key, strict=True)), "messages": count, "bytes": self.bytes[key]}
            for key, count in sorted(self.messages.items())
        ]


def merged(reports: Iterable[list[dict]]) -> list[dict]:
    """Rows of several ledgers added up."""
    total: dict[Key, dict] = {}
    for row in (row for report in reports for row in report):
        key = (row["role"], row["protocol"], row["message"], row["hidden_by"], row["shows"])
        if key in total:
            total[key] = {**row, "messages": total[key]["messages"] + row["messages"],
                          "bytes": total[key]["bytes"] + row["bytes"]}  # fmt: skip
        else:
            total[key] = dict(row)
    return [total[key] for key in sorted(total)]


def table(rows: list[dict]) -> Table:
    """What each role received over all queries of the run, by what it shows; each message is in results.json."""
    shown = Table(title="What each role received (from the ledger)")
    for column in ("role", "learns", "protocols", "messages", "MB"):
        shown.add_column(column, justify="right" if column in ("messages", "MB") else "left")
    for key in sorted({(row["role"], row["shows"]) for row in rows}):
        mine = [row for row in rows if (row["role"], row["shows"]) == key]
        protocols = ", ".join(sorted({row["protocol"] for row in mine}))
        messages, size = (sum(row[name] for row in mine) for name in ("messages", "bytes"))
        learns = key[1] or "nothing (uniform bits)"
        shown.add_row(key[0], learns, protocols, str(messages), f"{size / 1e6:.3f}")
    return shown


def sentences(rows: list[dict], *, secure: bool, answering: int, normalise: bool) -> list[str]:
    """The statement in words. What a role learns comes from the rows; the rest is what no ledger can see."""
    if not secure:
        return ["This run was in the clear (secure=False): every query, model and prediction was open. An ablation."]
    out = []
    for role, who in (("A", "Answering parties"), ("S", "The server"), ("Q", "Querying parties")):
        mine = [row for row in rows if row["role"] == role]
        size = sum(row["bytes"] for row in mine) / 1e6
        shown = sorted({f"{row['shows']} ({row['protocol']})" for row in mine if row["shows"]})
        what = "; ".join(shown) if shown else "nothing: uniform bits under masks that they do not know"
        out.append(f"{who} received {size:.2f} MB and learned: {what}.")
    kind = "normalised predictions" if normalise else "logits"
    if answering == 1:
        out.append(f"One party answered each query, so the sum that Q learned IS that party's {kind}. Raise C.")
    else:
        out.append(f"Q learned the sum of the {kind} of {answering} parties for each of its queries, and no summand.")
    out += [
        "Public: architectures, shapes, who asks whom, how many queries, the number format.",
        "Not covered: what the sum itself says about the models (no noise was added), the server colluding with a "
        "client, parties that cheat.",
        "All parties ran in one process, which therefore protected nothing: this is a simulation.",
    ]
    return out
