"""Prometheus metrics of one party, through `prometheus_client`, an optional dependency (the extra `metrics`).

Who watches the metrics learns what the log says in sums: of each model how often it was asked, how that ended, how long
it took and how many bytes went. No label holds a value, a key, an address or, unless it is asked for, a client's name.
Labels are bounded: a name that a stranger made up is counted as `other`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from ... import errors
from ...errors import ArgumentError, SectorchError
from ...extras import needed
from ..log import Watcher
from .manage import Page

NAMES = 64
"""Different models, and different clients, that have a label of their own; those that come later share `other`."""
ASKED = ("predict", "prepare", "aggregate")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
BYTES = tuple(10.0**power for power in range(4, 11))

GAUGES = {
    "ready": "Whether this party takes on sessions (1) or not (0).",
    "sessions": "Open sessions.",
    "connections": "Connections of clients that are open.",
    "calls_running": "Calls that run.",
    "calls_waiting": "Calls that wait for their turn.",
    "store_bytes": "Bytes of prepared material on disk.",
    "store_budget_bytes": "Bytes of prepared material that may be on disk.",
    "calls_prepared": "Calls whose material is prepared.",
    "masked_weight_bytes": "Bytes of masked weights of open sessions.",
    "models": "Answering parties that are connected.",
    "certificate_expiry_timestamp_seconds": "When this party's certificate expires, in seconds since 1970.",
    "authority_expiry_timestamp_seconds": "When the CA of the other side expires, in seconds since 1970.",
}
"""What a party's `figures` may name, and what it means."""


class Metrics(Watcher):
    """Counts what happens, and reads a party's figures when it is asked (`page`).

    Args:
        figures: what there is now, by the names of `GAUGES`; called at each reading.
        clients: whether clients' names are a label too. They say who asks how often, which is personal data.

    Raises:
        ArgumentError: prometheus_client is not installed.
    """

    def __init__(self, figures: Callable[[], dict[str, float]], clients: bool = False):
        with needed("--metrics", "prometheus-client", ArgumentError, "or leave it out"):
            from prometheus_client import (
                CollectorRegistry,
                Counter,
                Histogram,
                ProcessCollector,
                disable_created_metrics,
            )
        disable_created_metrics()  # when a series began: twice as many lines, which nobody reads
        self._figures, self._clients = figures, clients
        self._models, self._names = _Bounded(NAMES), _Bounded(NAMES)
        self.registry = CollectorRegistry()
        by = ["model", "asked"]
        who = ["client"] if clients else []
        made = {"registry": self.registry, "namespace": "sectorch"}
        self._queries = Counter("queries", "Queries that ended, and how.", [*by, "outcome", *who], **made)
        self._seconds = Histogram(
            "query_seconds", "Seconds that a query took at this party.", by, buckets=SECONDS, **made
        )
        self._bytes = Histogram(
            "query_bytes", "Bytes that this party sent and received in a query.", by, buckets=BYTES, **made
        )
        self._rows = Counter("rows", "Rows that were asked about in queries that were done.", [*by, *who], **made)
        self._refused = Counter("refused", "Connections that were refused.", **made)
        self._ended = Counter("sessions_failed", "Sessions that ended with an error.", **made)
        self._over = Counter("over_limit", "Questions that were refused for a client's limits.", **made)
        self._evicted = Counter("calls_evicted", "Prepared calls that had to make room for others.", **made)
        self._renewed = Counter(
            "certificate_changes", "Files of the certificate that changed: used, or not.", ["outcome"], **made
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(_Gauges(self._figures))  # pyright: ignore[reportArgumentType]

    def happened(self, event: str, facts: dict[str, Any]) -> None:
        if event == "query":
            self._query(facts)
        elif event == "refused":
            self._refused.inc()
        elif event == "session ended" and facts.get("why"):
            self._ended.inc()
        elif event == "over its limit":
            self._over.inc()
        elif event == "evicted":
            self._evicted.inc(float(facts.get("calls") or 0))
        elif event == "certificate":
            outcome = str(facts.get("outcome"))
            self._renewed.labels(outcome if outcome in ("renewed", "kept") else "other").inc()

    def _query(self, facts: dict[str, Any]) -> None:
        model, asked, outcome = str(facts.get("model")), str(facts.get("asked")), str(facts.get("outcome"))
        by = [
            "several" if "," in model else self._models.of(model),
            asked if asked in ASKED else "other",
        ]
        who = [self._names.of(str(facts.get("client")))] if self._clients else []
        self._queries.labels(*by, outcome if _is_known(outcome) else "error", *who).inc()
        self._seconds.labels(*by).observe(float(facts.get("seconds") or 0))
        self._bytes.labels(*by).observe(float(facts.get("bytes") or 0))
        if outcome == "done":
            self._rows.labels(*by, *who).inc(float(facts.get("rows") or 0))

    def page(self) -> Page:
        """All of them, as Prometheus reads them."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)


class _Bounded:
    """The first so many different names; all others are `other`."""

    def __init__(self, most: int):
        self._most, self._known, self._lock = most, set[str](), threading.Lock()

    def of(self, name: str) -> str:
        with self._lock:
            if name not in self._known and len(self._known) < self._most:
                self._known.add(name)
            return name if name in self._known else "other"


class _Gauges:
    """What there is when somebody reads."""

    def __init__(self, figures: Callable[[], dict[str, float]]):
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        for name, value in self._figures().items():
            yield GaugeMetricFamily(f"sectorch_{name}", GAUGES[name], value=value)
        yield InfoMetricFamily("sectorch", "What runs.", value={"version": metadata.version("sectorch")})


def _is_known(outcome: str) -> bool:
    """Whether it is `done` or a kind of error of sectorch's own; others are `error`."""
    kind = getattr(errors, outcome, None)
    return outcome == "done" or (isinstance(kind, type) and issubclass(kind, SectorchError))
