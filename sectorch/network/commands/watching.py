"""Options by which an operator sees a party: health and metrics over HTTP, and traces; all off by default."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from ...cli.command import Parser
from ...errors import ArgumentError
from ..identity.certificates import Credentials
from ..identity.renewal import Renewal
from ..log import watch
from ..observe.manage import Management, health
from ..observe.metrics import Metrics
from ..observe.traces import Traces
from .options import console


class Watched(Protocol):
    """A party that runs (`Server`, `Answering`)."""

    def unready(self) -> str: ...

    def figures(self) -> dict[str, float]: ...

    def renew(self, credentials: Credentials) -> None: ...


def add_watch(p: Parser) -> None:
    """Options of a party that runs until it is stopped."""
    p.add_argument("--manage", metavar="HOST:PORT", help="answer /live and /ready there, by plain HTTP")
    p.add_argument("--manage-anywhere", action="store_true", help="although other machines reach that address")
    p.add_argument("--metrics", action="store_true", help="answer /metrics for Prometheus there too")
    p.add_argument("--metrics-clients", action="store_true", help="with the names of clients, which are personal data")
    add_traces(p)


def add_traces(p: Parser) -> None:
    p.add_argument("--traces", action="store_true", help="send a trace of each query to OTEL_EXPORTER_OTLP_ENDPOINT")


class Watching:
    """What is watched, once it is there."""

    def __init__(self):
        self.party: Watched | None = None
        self._renewal: Renewal | None = None

    def begin(self, party: Watched, credentials: Credentials, read: Callable[[], Credentials]) -> None:
        """This party is there; it began with these credentials, whose files are looked at from now on."""
        self.party = party
        self._renewal = Renewal(credentials, read, party.renew)
        self._renewal.start()

    def look(self) -> None:
        """Look at the files of the certificate at once."""
        if self._renewal is not None:
            self._renewal.soon()

    def close(self) -> None:
        if self._renewal is not None:
            self._renewal.close()

    def unready(self) -> str:
        return "starting" if self.party is None else self.party.unready()

    def figures(self) -> dict[str, float]:
        party = {} if self.party is None else self.party.figures()
        return {"ready": not self.unready(), **party, **({} if self._renewal is None else self._renewal.figures())}


@contextmanager
def watched(options: argparse.Namespace) -> Iterator[Watching]:
    """In the block a party can be watched, as far as the options ask for it; it is starting until it is named.

    Raises:
        ArgumentError: options that do not go together; an address that is none, is in use, or is reached by others; a
            package that is not installed.
    """
    _check(options)
    watching = Watching()
    with ExitStack() as stack:
        stack.enter_context(traced(options))
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
def traced(options: argparse.Namespace) -> Iterator[None]:
    """In the block queries are traced, if the options ask for it. Raises ArgumentError."""
    if not options.traces:
        yield
        return
    traces = Traces()
    end: Callable[[], None] = watch(traces)
    try:
        yield
    finally:
        end()
        traces.close()


def _check(options: argparse.Namespace) -> None:
    metrics = options.metrics or options.metrics_clients
    if options.manage is None and (metrics or options.manage_anywhere):
        raise ArgumentError("--metrics and --manage-anywhere say what is on the port of --manage HOST:PORT; name one")
    if options.metrics_clients and not options.metrics:
        raise ArgumentError("--metrics-clients adds names to --metrics; add that, or leave it out")
