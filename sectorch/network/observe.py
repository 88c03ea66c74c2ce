"""Prometheus metrics of one party, through `prometheus_client`, an optional dependency (the extra `metrics`).

Who watches the metrics learns what the log says in sums: of each model how often it was asked, how that ended, how long
it took and how many bytes went. No label holds a value, a key, an address or, unless it is asked for, a client's name.
Labels are bounded: a name that a stranger made up is counted as `other`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from typing import Any

from .. import errors
from ..errors import ArgumentError, SectorchError
from ..optional_deps import required_imports
from .log import Watcher

# A small HTTP server for the machinery around a party: `/live`, `/ready`, and `/metrics` if it is asked for.
#
# It is no part of the protocol: it answers GET, reads nothing of what is asked but the path, and says nothing secret.
# Orchestrators, load balancers and monitoring speak plain HTTP and have no certificate, so it has a port of its own, on
# loopback unless the operator says otherwise. Nobody can hold it up: a connection is for one question, ends after
# `PATIENCE` seconds, and when there are `MOST` of them the oldest is closed for a new one.


PATIENCE = 5.0
"""Seconds that a connection may take in all."""
MOST = 16
"""Connections at once."""

Page = tuple[int, str, bytes]
"""Status, type of content, content."""


class Management:
    """Serves pages on an address until `close`.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        pages: what is answered, by path; each is called in a thread of its own.
        anywhere: whether the address may be one that other machines reach.

    Raises:
        ArgumentError: no such address, one that is in use, or one that others reach.
    """

    def __init__(self, address: str, pages: Mapping[str, Callable[[], Page]], anywhere: bool = False):
        family, place = _place(address, anywhere)
        try:
            self._server = _Server(family, place, dict(pages))
        except OSError as error:
            raise ArgumentError(f"cannot listen on {address} for --manage: {error.strerror}") from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True, name="management")
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.drop(everyone=True)


def _place(address: str, anywhere: bool) -> tuple[socket.AddressFamily, tuple]:
    """What to bind: the address's own loopback, or any if `anywhere`."""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ArgumentError(f"--manage takes HOST:PORT, as 127.0.0.1:7101, got {ascii(address)[:80]}")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ArgumentError(f"--manage {address}: no such host: {error.strerror}") from None
    family, _, _, _, place = found[0]
    if not anywhere and not all(ipaddress.ip_address(str(each[4][0])).is_loopback for each in found):
        raise ArgumentError(
            f"--manage {address} can be reached from other machines, and whoever reaches it sees names of models and "
            f"how much is asked: name a loopback address, or add --manage-anywhere where a firewall stands before it"
        )
    return family, place


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 2 * MOST

    def __init__(self, family: socket.AddressFamily, place: tuple, pages: dict[str, Callable[[], Page]]):
        self.address_family, self.pages = family, pages
        self._open: OrderedDict[socket.socket, float] = OrderedDict()
        self._lock = threading.Lock()
        super().__init__(place, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= MOST
            oldest = next(iter(self._open)) if full else None
            self._open[request] = time.monotonic()
        if oldest is not None:
            self._drop(oldest)
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True, name="managed").start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            request.settimeout(PATIENCE)
            with suppress(OSError, ValueError):  # it went, or was closed for being slow
                self.finish_request(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        self.drop()

    def drop(self, everyone: bool = False) -> None:
        """End the connections that took too long, or all of them."""
        late = time.monotonic() - PATIENCE
        with self._lock:
            ended = [request for request, since in self._open.items() if everyone or since < late]
        for request in ended:
            self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Its own thread notices, and closes it."""
        with self._lock:
            self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is written of who asks: a probe comes every few seconds."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        self._send(*((404, TEXT, b"not here\n") if page is None else page()))

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A line that repeats nothing of what was sent."""
        status = 405 if code == 501 else code
        self._send(status, TEXT, b"GET only\n" if status == 405 else b"not understood\n")

    def version_string(self) -> str:
        return "sectorch"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: see `handle_error`."""


TEXT = "text/plain; charset=utf-8"


def health(unready: Callable[[], str]) -> dict[str, Callable[[], Page]]:
    """The pages `/live` and `/ready`.

    Args:
        unready: why the party takes nothing on now; empty if it does.
    """

    def ready() -> Page:
        why = unready()
        return (503, TEXT, f"{why}\n".encode()) if why else (200, TEXT, b"ready\n")

    return {"/live": lambda: (200, TEXT, b"live\n"), "/ready": ready}


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
        with required_imports("--metrics", "prometheus-client", ArgumentError, "or leave it out"):
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
            self._query(**facts)
        elif event == "refused":
            self._refused.inc()
        elif event == "session ended" and facts["why"]:
            self._ended.inc()
        elif event == "over its limit":
            self._over.inc()
        elif event == "evicted":
            self._evicted.inc(facts["calls"])
        elif event == "certificate":
            self._renewed.labels(facts["outcome"]).inc()

    def _query(
        self, *, model: str, asked: str, outcome: str, client: str, seconds: float = 0, bytes: int = 0,
        rows: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        by = ["several" if "," in model else self._models.of(model), asked if asked in ASKED else "other"]
        who = [self._names.of(client)] if self._clients else []
        self._queries.labels(*by, outcome if _is_known(outcome) else "error", *who).inc()
        self._seconds.labels(*by).observe(seconds)
        self._bytes.labels(*by).observe(bytes)
        if outcome == "done":
            self._rows.labels(*by, *who).inc(rows or 0)

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


# What an operator sees of a running party: health, metrics, traces, certificates that are about to expire.


# OpenTelemetry traces of queries, through the OpenTelemetry SDK, an optional dependency (the extra `traces`).
#
# A query is one trace of all parties that trace: a span `query` at Q, S and A each, and in it `dry run`, `prepare` or
# `online`. Q's request carries the trace's identifier (W3C `traceparent`) to S, and S to A: public metadata, as the
# time of a query is, drawn at random and unrelated to its content. Spans hold names of models, rows, outcomes and the
# session's identifier, by which a receipt is found; no values, no clients' names, and of an error its type alone.


_PARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
KEPT = ("party", "model", "version", "asked", "rows", "learned", "session", "call", "prepared")
"""Facts that become attributes, as `sectorch.NAME`."""


class SpanWriter(Watcher):
    """Makes spans of steps.

    Args:
        provider: an OpenTelemetry TracerProvider, which says where spans go. By default one that sends them by OTLP
            over HTTP to where the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT`).

    Raises:
        ArgumentError: the SDK is not installed.
    """

    def __init__(self, provider: Any = None):
        with required_imports("--traces", "opentelemetry-sdk", ArgumentError, "or leave it out"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._provider = provider or _exporting()
        self._api, self._propagator = trace, TraceContextTextMapPropagator()
        self._tracer = self._provider.get_tracer("sectorch")

    @contextmanager
    def step(self, name: str, trace: object, facts: dict[str, Any]) -> Iterator[None]:
        parent = trace if isinstance(trace, str) and _PARENT.fullmatch(trace) else None
        context = None if parent is None else self._propagator.extract({"traceparent": parent})
        about = {f"sectorch.{k}": v for k, v in facts.items() if k in KEPT and v is not None}
        with self._tracer.start_as_current_span(
            name, context, attributes=about, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except BaseException as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(self._api.StatusCode.ERROR)
                raise

    def carried(self) -> str | None:
        found: dict[str, str] = {}
        self._propagator.inject(found)
        return found.get("traceparent")

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def _exporting() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "sectorch"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
