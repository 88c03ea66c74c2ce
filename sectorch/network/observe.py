"""Monitoring of a running party, off by default: health and Prometheus metrics over HTTP, and OpenTelemetry traces.

The packages `prometheus_client` and `opentelemetry` are optional dependencies (the extras `metrics` and `traces`).

Metrics are sums of what the log says: for each model, the number of queries by outcome, their seconds and their bytes.
No label holds a value, a key, an address or, unless an option asks for it, a client's name. The number of labels is
bounded: further names are counted as `other`.

A query is one trace of all parties that trace: a span `query` at Q, S and A each, and in it `dry run`, `prepare` or
`online`. Q's request carries the trace's identifier (W3C `traceparent`) to S, and S to A. It is public metadata, as the
time of a query is: drawn at random and unrelated to the content. Spans hold names of models, rows, outcomes and the
session's identifier, by which a receipt is found. They hold no values, no clients' names, and of an error its type.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import re
import socket
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from typing import Any, Protocol

from .. import errors
from ..cli.command import Parser
from ..errors import ArgumentError, SectorchError
from ..optional_deps import required_imports
from .commands.options import console
from .identity.certificate_files import Renewal
from .identity.identity import Credentials
from .log import Watcher, watch

PATIENCE = 5.0
"""Seconds that a connection may take in all."""
MOST = 16
"""Connections at the same time."""
SPARE = 4
"""File descriptors that are kept for connections where the process has no others left."""

Page = tuple[int, str, bytes]
"""Status, type of content, content."""


class Management:
    """A small HTTP server that serves pages (`/live`, `/ready`, `/metrics`) until `close`.

    Orchestrators, load balancers and monitoring speak plain HTTP and have no certificate. So it has a port of its own,
    by default on loopback. It answers GET and reads the path only. A client cannot hold it up: a connection is for one
    request and ends after `PATIENCE` seconds, and where there are `MOST` the oldest is closed for a new one.
    Where the process has no file descriptors left, it answers by those that it keeps for that.

    Args:
        address: host:port; port 0 takes a free one (see `port`).
        pages: functions that give the pages, by path; each is called in a thread of its own.
        anywhere: whether other machines may reach the address.

    Raises:
        ArgumentError: the address is invalid, in use, or reached by other machines.
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
    """The family and address to bind. Raises ArgumentError: it is no loopback address, and not `anywhere`."""
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
        self._spare: list[int] = []
        super().__init__(place, _Handler)
        self._spare += [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(SPARE + 1)]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection, with a descriptor that was kept for it if the process has no other."""
        while True:
            try:
                return super().get_request()
            except OSError as error:
                with self._lock:
                    if error.errno not in (errno.EMFILE, errno.ENFILE) or len(self._spare) < 2:
                        raise
                    os.close(self._spare.pop())

    def _end(self, request: socket.socket) -> None:
        """Close a connection; its descriptor is kept where one is missing, before another thread can take it."""
        with self._lock, suppress(OSError):
            if 0 < len(self._spare) <= SPARE:
                request.shutdown(socket.SHUT_WR)
                os.dup2(self._spare[0], handle := request.detach())
                self._spare.append(handle)
                return
        self.shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            while self._spare:
                os.close(self._spare.pop())

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
            with suppress(OSError, ValueError):  # the client has gone, or was closed for being slow
                self.finish_request(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self._end(request)

    def service_actions(self) -> None:
        self.drop()

    def drop(self, everyone: bool = False) -> None:
        """Close the connections that took too long, or all of them."""
        late = time.monotonic() - PATIENCE
        with self._lock:
            ended = [request for request, since in self._open.items() if everyone or since < late]
        for request in ended:
            self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Shut a connection down; its own thread closes it."""
        with self._lock:
            self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing: a probe comes every few seconds."""


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
        """Answer with a line that repeats nothing of the request."""
        status = 405 if code == 501 else code
        self._send(status, TEXT, b"GET only\n" if status == 405 else b"not understood\n")

    def version_string(self) -> str:
        return "sectorch"

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: see `_Server.handle_error`."""


TEXT = "text/plain; charset=utf-8"


def health(unready: Callable[[], str]) -> dict[str, Callable[[], Page]]:
    """The pages `/live` and `/ready`.

    Args:
        unready: gives the reason why the party accepts no sessions now; empty if it accepts them.
    """

    def ready() -> Page:
        why = unready()
        return (503, TEXT, f"{why}\n".encode()) if why else (200, TEXT, b"ready\n")

    return {"/live": lambda: (200, TEXT, b"live\n"), "/ready": ready}


NAMES = 64
"""Models, and clients, that have a label of their own; later ones share `other`."""
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
    "certificate_days_left": "Days until this party's certificate expires; below 0 it has.",
    "authority_days_left": "Days until the CA of the other side expires; below 0 it has.",
}
"""The gauges that a party's `figures` may have, and their help texts."""


class Metrics(Watcher):
    """Counts events, and reads a party's figures for each `page`.

    Args:
        figures: gives the current values of `GAUGES`, by name.
        clients: whether clients' names are a label too. They tell who asks how often, which is personal data.

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
        disable_created_metrics()  # the times at which series began would double the lines
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

    def on_event(self, event: str, facts: dict[str, Any]) -> None:
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
        kind = getattr(errors, outcome, None)  # the outcome is "done", or the type of the error
        known = outcome == "done" or (isinstance(kind, type) and issubclass(kind, SectorchError))
        self._queries.labels(*by, outcome if known else "error", *who).inc()
        self._seconds.labels(*by).observe(seconds)
        self._bytes.labels(*by).observe(bytes)
        if outcome == "done":
            self._rows.labels(*by, *who).inc(rows or 0)

    def page(self) -> Page:
        """All metrics in Prometheus's format."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)


class _Bounded:
    """Keeps the first `most` different names; later ones are `other`."""

    def __init__(self, most: int):
        self._most, self._known, self._lock = most, set[str](), threading.Lock()

    def of(self, name: str) -> str:
        with self._lock:
            if name not in self._known and len(self._known) < self._most:
                self._known.add(name)
            return name if name in self._known else "other"


class _Gauges:
    """Reads a party's figures when Prometheus collects."""

    def __init__(self, figures: Callable[[], dict[str, float]]):
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        for name, value in self._figures().items():
            yield GaugeMetricFamily(f"sectorch_{name}", GAUGES[name], value=value)
        yield InfoMetricFamily("sectorch", "What runs.", value={"version": metadata.version("sectorch")})


_PARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
KEPT = ("party", "model", "version", "asked", "rows", "learned", "session", "call", "prepared")
"""Facts that become attributes, as `sectorch.NAME`."""


class SpanWriter(Watcher):
    """Makes spans of steps.

    Args:
        provider: an OpenTelemetry TracerProvider, which decides where spans go. By default they are sent by OTLP over
            HTTP to `OTEL_EXPORTER_OTLP_ENDPOINT`.

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

    def trace_context(self) -> str | None:
        found: dict[str, str] = {}
        self._propagator.inject(found)
        return found.get("traceparent")

    def close(self) -> None:
        """Send the spans that were not sent yet."""
        self._provider.shutdown()


def _exporting() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "sectorch"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


# The options of monitoring, and a party under it.


class MonitoredParty(Protocol):
    """A running party, as monitoring sees it: `Server`, `Answering`, or the services of `sectorch up`."""

    def unready(self) -> str: ...

    def figures(self) -> dict[str, float]: ...

    def renew(self, credentials: Credentials) -> None: ...


def add_watch(p: Parser) -> None:
    """Add the options of monitoring, which is off by default: health and metrics over HTTP, and traces."""
    p.add_argument("--manage", metavar="HOST:PORT", help="answer /live and /ready there, by plain HTTP")
    p.add_argument("--manage-anywhere", action="store_true", help="although other machines reach that address")
    p.add_argument("--metrics", action="store_true", help="answer /metrics for Prometheus there too")
    p.add_argument("--metrics-clients", action="store_true", help="with the names of clients, which are personal data")
    add_traces(p)


def add_traces(p: Parser) -> None:
    p.add_argument("--traces", action="store_true", help="send a trace of each query to OTEL_EXPORTER_OTLP_ENDPOINT")


class Monitoring:
    """Health and figures of a party, and the renewal of its credentials."""

    def __init__(self):
        self.party: MonitoredParty | None = None
        self._renewal: Renewal | None = None  # while there is a party

    def begin(self, party: MonitoredParty, credentials: Credentials, read: Callable[[], Credentials]) -> None:
        """Monitor a party that has started with these credentials, and renew them when their files change."""
        self.party = party
        self._renewal = Renewal(credentials, read, party.renew)
        self._renewal.start()

    def check_renewal(self) -> None:
        """Check the files of the credentials now."""
        if self._renewal is not None:
            self._renewal.soon()

    def close(self) -> None:
        if self._renewal is not None:
            self._renewal.close()

    def unready(self) -> str:
        if self.party is None or self._renewal is None:
            return "starting"
        return self._renewal.unready() or self.party.unready()

    def figures(self) -> dict[str, float]:
        party = {} if self.party is None else self.party.figures()
        return {"ready": not self.unready(), **party, **({} if self._renewal is None else self._renewal.figures())}


@contextmanager
def monitoring(options: argparse.Namespace) -> Iterator[Monitoring]:
    """Monitor the block, as the options ask for it. Health says "starting" until `Monitoring.begin`.

    Raises:
        ArgumentError: the options contradict each other, the address is invalid, in use or reachable by other machines,
            or a package is not installed.
    """
    if options.manage is None and (options.metrics or options.metrics_clients or options.manage_anywhere):
        raise ArgumentError("--metrics and --manage-anywhere say what is on the port of --manage HOST:PORT; name one")
    if options.metrics_clients and not options.metrics:
        raise ArgumentError("--metrics-clients adds names to --metrics; add that, or leave it out")
    watching = Monitoring()
    with ExitStack() as stack:
        stack.enter_context(tracing(options))
        stack.callback(watching.close)
        if options.manage is not None:
            pages = health(watching.unready)
            if options.metrics:
                metrics = Metrics(watching.figures, options.metrics_clients)
                stack.callback(watch(metrics))
                pages["/metrics"] = metrics.page
            management = Management(options.manage, pages, options.manage_anywhere)
            stack.callback(management.close)
            console.print(f"port {management.port} answers {', '.join(pages)}", highlight=False)
        yield watching


@contextmanager
def tracing(options: argparse.Namespace) -> Iterator[None]:
    """Trace the queries of the block, if the options ask for it. Raises ArgumentError."""
    if not options.traces:
        yield
        return
    traces = SpanWriter()
    end: Callable[[], None] = watch(traces)
    try:
        yield
    finally:
        end()
        traces.close()
