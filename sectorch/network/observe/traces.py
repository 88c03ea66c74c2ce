"""OpenTelemetry traces of queries, through the OpenTelemetry SDK, an optional dependency (the extra `traces`).

A query is one trace of all parties that trace: a span `query` at Q, S and A each, and in it `dry run`, `prepare` or
`online`. Q's request carries the trace's identifier (W3C `traceparent`) to S, and S to A: public metadata, as the time
of a query is, drawn at random and unrelated to its content. Spans hold names of models, rows, outcomes and the
session's identifier, by which a receipt is found; no values, no clients' names, and of an error its type alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import ArgumentError
from ...extras import needed
from ..log import Watcher

_PARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
KEPT = ("party", "model", "version", "asked", "rows", "learned", "session", "call", "prepared")
"""Facts that become attributes, as `sectorch.NAME`."""


class Traces(Watcher):
    """Makes spans of steps.

    Args:
        provider: an OpenTelemetry TracerProvider, which says where spans go. By default one that sends them by OTLP
            over HTTP to where the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT`).

    Raises:
        ArgumentError: the SDK is not installed.
    """

    def __init__(self, provider: Any = None):
        with needed("--traces", "opentelemetry-sdk", ArgumentError, "or leave it out"):
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
