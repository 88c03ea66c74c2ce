"""What an operator sees: health and metrics over HTTP, traces, and logs as JSON; and what nobody sees there."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import logging
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from network_world import Trio, until
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import sectorch
from sectorch import errors
from sectorch.cli.main import run
from sectorch.network import log, observe
from sectorch.network.identity.identity import fingerprint_of
from sectorch.network.log import JsonFormatter, Watcher, begin, step, watch, write
from sectorch.network.messages import Predict
from sectorch.network.observe import GAUGES, KEPT, MOST, NAMES, Management, Metrics, SpanWriter, health

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    yield trio
    trio.close()


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture
def managed():
    """A management port whose party takes nothing on while `why` says something."""
    why = [""]
    management = Management("127.0.0.1:0", health(lambda: why[0]))
    yield management.port, why
    management.close()


# Health.


def test_health_is_answered_by_path_and_to_get_alone(managed):
    port, why = managed
    assert get(port, "/live") == (200, "live\n") and get(port, "/ready?x=1") == (200, "ready\n")
    why[0] = "stopping"
    assert get(port, "/live") == (200, "live\n") and get(port, "/ready") == (503, "stopping\n")
    assert get(port, "/")[0] == get(port, "/metrics")[0] == get(port, "/../etc/passwd")[0] == 404
    for method in ("POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "<script>"):
        status, said = get(port, "/ready", method)
        assert status == 405 and said in ("GET only\n", "")


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01" + bytes(200), b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 70_000 + b"\r\n", b"\r\n"]
)
def test_what_is_no_question_is_refused_without_an_echo(managed, junk):
    with socket.create_connection(("127.0.0.1", managed[0]), timeout=30) as s:
        s.sendall(junk)
        s.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while more := s.recv(4096):
                said += more
        except ConnectionResetError:  # it closed with some of the junk unread
            pass
    assert said.partition(b"\r\n\r\n")[2] in (b"", b"not understood\n")
    assert get(managed[0], "/live") == (200, "live\n")


def test_slow_clients_hold_nothing_up(managed, monkeypatch):
    """Three times as many as there is room for, which say nothing, or half a line: the next question is answered."""
    held = []
    try:
        for i in range(3 * MOST):
            s = socket.create_connection(("127.0.0.1", managed[0]), timeout=30)
            s.sendall(b"GET /re" if i % 2 else b"")
            held.append(s)
        assert get(managed[0], "/ready") == (200, "ready\n")
        monkeypatch.setattr(observe, "PATIENCE", 0.0)  # those that are left are late now, and are ended
        for s in held:
            with contextlib.suppress(ConnectionResetError):
                assert s.recv(1) == b""
    finally:
        for s in held:
            s.close()


def test_only_loopback_unless_it_is_said(managed):
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:7101"):
        with pytest.raises(errors.ArgumentError, match="--manage-anywhere"):
            Management(address, {})
    for address in ("7101", "localhost:", "localhost:x", ":7101", "localhost:70000", ""):
        with pytest.raises(errors.ArgumentError, match="HOST:PORT"):
            Management(address, {})
    with pytest.raises(errors.ArgumentError, match="Address already in use"):
        Management(f"127.0.0.1:{managed[0]}", {})
    Management("0.0.0.0:0", {}, anywhere=True).close()
    Management("localhost:0", {}).close()


def test_a_party_says_when_it_takes_on_nothing(trio):
    """The server while it drains; the answering party also while it has no server."""
    assert trio.server.unready() == trio.party.unready() == ""
    trio.server.drain(0.0)
    assert "stopping" in trio.server.unready()
    trio.server.stop()
    assert until(lambda: "not registered" in trio.party.unready(), 30)
    trio.start_server()
    trio.party.register("hospital-b")
    assert trio.party.unready() == ""
    trio.party.drain(0.0)
    assert "stopping" in trio.party.unready()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--metrics"], "--manage HOST:PORT"),
        (["--manage-anywhere"], "--manage HOST:PORT"),
        (["--manage", "127.0.0.1:0", "--metrics-clients"], "--metrics"),
        (["--manage", "0.0.0.0:0"], "--manage-anywhere"),
        (["--manage", "nowhere"], "HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_are_one_line_before_a_port_opens(options, words, pki, capsys):
    folder = pki[0]
    files = ["--cert", "server.pem", "--key", "server-key.pem", "--clients-ca", "ca.pem"]
    files = [part if part.startswith("--") else str(folder / part) for part in files]
    assert run(["server", "--listen", "localhost:0", *files, *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and words in said


# Metrics.


def values(page: tuple[int, str, bytes]) -> dict[str, float]:
    lines = [line for line in page[2].decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.fixture
def metrics():
    ends = []

    def begin_(figures=dict, clients=False) -> Metrics:
        made = Metrics(figures, clients)
        ends.append(watch(made))
        return made

    yield begin_
    for end in ends:
        end()


def test_metrics_count_what_the_log_says(trio, metrics):
    """Q, S and A are in this process: each query is counted three times, and figures are read from S."""
    metrics = metrics(trio.server.figures)
    remote = trio.connection.model("hospital-b")
    remote.prepare(2, 3)
    found = values(metrics.page())
    assert found["sectorch_calls_prepared"] == 3 and found["sectorch_store_bytes"] > 0
    remote(X)
    by = 'sectorch_queries_total{asked="%s",model="hospital-b",outcome="%s"}'
    assert until(lambda: values(metrics.page()).get(by % ("predict", "done")) == 3, 30)
    found = values(metrics.page())
    assert found[by % ("prepare", "done")] == 9
    assert found['sectorch_rows_total{asked="predict",model="hospital-b"}'] == 6
    assert found['sectorch_query_seconds_count{asked="predict",model="hospital-b"}'] == 3
    assert found["sectorch_sessions"] == 1 and found["sectorch_connections"] == 2 and found["sectorch_models"] == 1
    assert found["sectorch_masked_weight_bytes"] == sum(8 * w.numel() for w in trio.described[1].values())
    assert found["sectorch_calls_running"] == found["sectorch_calls_waiting"] == 0
    assert found["process_cpu_seconds_total"] > 0 and found["process_resident_memory_bytes"] > 1e7
    with pytest.raises(errors.FixedPointRangeError):
        remote(X * 1e9)  # refused before it is a query
    assert values(metrics.page())[by % ("predict", "done")] == 3


def test_the_bytes_of_a_query_are_those_that_crossed(trio, metrics):
    """The sum over the three parties, which are in this process; the first query of a session has its setup too."""
    from sectorch.choreography.ledger import Profile

    metrics = metrics()
    remote = trio.connection.model("hospital-b")
    with Profile() as cost:
        remote(X)
    size = 'sectorch_query_bytes_sum{asked="predict",model="hospital-b"}'
    assert until(lambda: values(metrics.page()).get(size.replace("_sum", "_count")) == 3, 30)
    assert values(metrics.page())[size] == 2 * cost.bytes  # what crosses an edge is at both its ends


def test_every_figure_has_a_meaning(trio):
    assert {*trio.server.figures(), *trio.party.figures()} <= set(GAUGES)


def test_a_stranger_makes_no_labels(metrics):
    """Names without end, questions that do not exist, errors of another's making: a bounded number of series."""
    metrics = metrics(clients=True)
    log = logging.getLogger("sectorch.query")
    for i in range(500):
        facts = {"client": f"c{i}", "model": f"m{i}", "asked": f"a{i}", "outcome": f"E{i}Error", "rows": 1}
        write(log, "query", logging.DEBUG, **facts)
    write(log, "query", logging.DEBUG, model="a,b", asked="aggregate", outcome="BusyError", client="c1")
    lines = [line for line in values(metrics.page()) if line.startswith("sectorch_queries_total")]
    assert len(lines) <= 2 * NAMES and 'model="several"' in "".join(lines)
    assert not any(f'"{made}"' in line for line in lines for made in ("a7", "E7Error", f"m{NAMES}", f"c{NAMES}"))


def test_nothing_but_names_and_sums_is_in_the_metrics(trio, metrics):
    """No fingerprint, key, address or session; a client's name only where it was asked for."""
    without, with_names = metrics(), metrics(clients=True)
    trio.connection.model("hospital-b")(X)
    assert until(lambda: any("query_bytes_count" in line for line in values(without.page())), 30)
    text = without.page()[2].decode()
    secret = [
        fingerprint_of(trio.made["alice"].identity),
        trio.party._offers.latest()[0].edition,
        "127.0.0.1",
        "localhost",
        "SHA256",
    ]
    assert not any(word in text for word in ("alice", *secret)) and not re.search(r"[0-9a-f]{32}", text)
    assert 'client="alice"' in with_names.page()[2].decode()


# Traces.


@pytest.fixture
def spans():
    """Spans of all parties, which are in this process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = SpanWriter(provider)
    end = watch(traces)
    yield exporter.get_finished_spans
    end()
    traces.close()


def test_one_trace_shows_all_parties(trio, spans):
    """Asked twice, ahead and online: two traces, each with a query of Q, S and A, and its steps at each."""
    remote = trio.connection.model("hospital-b")
    remote.prepare(2)
    remote(X)
    assert until(lambda: len(spans()) == 2 * 3 * 3, 30)
    for asked, step_ in (("prepare", "prepare"), ("predict", "online")):
        (root,) = (s for s in spans() if s.parent is None and s.attributes["sectorch.asked"] == asked)
        mine = [s for s in spans() if s.context.trace_id == root.context.trace_id]
        queries = {s.attributes["sectorch.party"]: s for s in mine if s.name == "query"}
        assert set(queries) == {"Q", "S", "A"} and queries["Q"] is root
        assert {queries[who].parent.span_id for who in "SA"} == {root.context.span_id}
        for query in queries.values():
            children = [s.name for s in mine if s.parent is not None and s.parent.span_id == query.context.span_id]
            assert [c for c in children if c != "query"] == ["dry run", step_]
            assert query.attributes["sectorch.session"] == root.attributes["sectorch.session"]


def test_spans_hold_no_values_and_no_names_of_clients(trio, spans, monkeypatch):
    monkeypatch.setattr("sectorch.network.parties.session.PartySession._take_part", lambda *_: 1 / 0)
    with pytest.raises(errors.NetworkError):
        trio.connection.model("hospital-b")(X)
    assert until(lambda: sum(s.name == "query" for s in spans()) == 3, 30)
    for span in spans():
        assert {name.removeprefix("sectorch.") for name in span.attributes} <= {*KEPT, "error.type"}
        assert span.events == () and span.status.description is None
        assert "alice" not in json.dumps(dict(span.attributes))
    assert "ZeroDivisionError" in {s.attributes.get("error.type") for s in spans()}


@pytest.mark.parametrize("trace", [None, 7, {"a": 1}, "junk", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 10**6])
def test_what_is_no_trace_is_no_parent(spans, trace):
    with step("query", trace, rows=1, client="alice"):
        pass
    (span,) = spans()
    assert span.parent is None and dict(span.attributes) == {"sectorch.rows": 1}


def test_nothing_is_carried_unless_traces_are_on(trio):
    told, inner = [], Watcher.trace_context
    assert inner(Watcher()) is None
    channel = "sectorch.network.wire.channel.Channel"
    with pytest.MonkeyPatch.context() as patch:
        from sectorch.network.wire.channel import Channel

        before = Channel.tell
        patch.setattr(f"{channel}.tell", lambda self, request: (told.append(request), before(self, request))[1])
        trio.connection.model("hospital-b")(X)
    asked = [message for message in told if isinstance(message, Predict)]
    assert asked and all(message.trace is None for message in asked)


# Logs.


def test_a_line_as_json_has_its_facts_and_cannot_be_forged():
    record = []
    log = logging.getLogger("sectorch.test-json")
    handler = logging.Handler()
    handler.emit = record.append
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        write(log, "query", rows=3, why='a "b"\n{"event": "x"}\x1b[2J', key=None, logger="root")
        log.warning("plain %s", "words\nin lines")
    finally:
        log.removeHandler(handler)
    first, other = map(JsonFormatter().format, record)
    assert first.isprintable() and first.isascii() and other.isprintable()
    said = json.loads(first)
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "INFO", "logger": "sectorch.test-json", "event": "query", "rows": 3,
        "why": 'a "b"\n{"event": "x"}\x1b[2J',
    }  # fmt: skip
    assert json.loads(other)["message"] == "plain words\nin lines"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_file_that_logrotate_moved_away_is_made_anew(form, tmp_path, monkeypatch):
    root, made = logging.getLogger(), []
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(root, "handlers", made)  # pytest's own would keep the log from beginning
    begin(tmp_path / "log", form=form)
    log = logging.getLogger("sectorch.query")
    write(log, "query", rows=1)
    (tmp_path / "log").rename(tmp_path / "log.1")
    write(log, "query", rows=2)
    write(log, "query", rows=3)
    for handler in made:
        handler.close()
    old, new = ((tmp_path / name).read_text().splitlines() for name in ("log.1", "log"))
    assert len(old) == 1 and len(new) == 2
    if form == "json":
        assert [json.loads(line)["rows"] for line in (*old, *new)] == [1, 2, 3]
    else:
        assert [line.partition("query ")[2] for line in (*old, *new)] == ["rows=1", "rows=2", "rows=3"]


def test_strangers_do_not_fill_the_disk(metrics, monkeypatch, caplog):
    """Ten thousand refused connections: a hundred lines a minute, all are counted, and the next line says how many."""
    now = [1000.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(log, "_LINE_LIMITS", {})
    caplog.set_level(logging.INFO)
    metrics = metrics()
    for i in range(10_000):
        write(logging.getLogger("sectorch.server"), "refused", by=f"192.0.2.1:{i}", why="no certificate")
    assert len(caplog.records) == log.MOST and values(metrics.page())["sectorch_refused_total"] == 10_000
    now[0] += log.PERIOD
    write(logging.getLogger("sectorch.server"), "refused", by="192.0.2.1:1", why="no certificate")
    assert f"unsaid={10_000 - log.MOST}" in caplog.records[-1].getMessage()
    write(logging.getLogger("sectorch.server"), "refused", by="192.0.2.1:1", why="no certificate")
    assert "unsaid" not in caplog.records[-1].getMessage()


def test_a_question_that_is_cut_off_leaves_the_server_as_it_was(managed):
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", managed[0], timeout=30)
        connection.putrequest("GET", "/ready")
        connection.close()
    assert get(managed[0], "/ready") == (200, "ready\n")


# The page of whoever operates it.

PAGE = (Path(__file__).parent.parent.parent / "docs" / "operating.md").read_text()


def test_the_page_names_every_metric_and_no_other(trio, metrics):
    from prometheus_client.parser import text_string_to_metric_families

    metrics = metrics(lambda: dict.fromkeys(GAUGES, 0.0))
    found = {family.name for family in text_string_to_metric_families(metrics.page()[2].decode())}
    rows = [line for line in PAGE.splitlines() if line.startswith(("| `sectorch_", "| `process_"))]
    named = {name for line in rows for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    plain = lambda names: {name.removesuffix("_total") for name in names}
    assert {name for name in plain(named) if name.startswith("sectorch")} == {
        name for name in found if name.startswith("sectorch")
    }
    assert plain(named) <= plain(found)
    (rules,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    alerts = rules["groups"][0]["rules"]
    used = {name for rule in alerts for name in re.findall(r"\b(?:sectorch|process)_\w+", rule["expr"])}
    assert len(alerts) == 9 and used <= named
    outcomes = {kind for rule in alerts for kind in re.findall(r"\b\w+Error\b", rule["expr"])}
    assert all(issubclass(getattr(errors, kind), errors.SectorchError) for kind in outcomes)


def test_the_page_names_every_event_of_the_server_and_the_answering_party():
    """From the code: each `write(log, "event", ...)`, with its facts."""
    written: dict[str, set[str]] = {"certificate expires": {"until", "days"}, "CA expires": {"until", "days"}}
    network = Path(sectorch.__file__).parent / "network"
    for path in network.rglob("*.py"):
        if path.is_relative_to(network / "federation"):
            continue  # its events are on its own page
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "write" and len(node.args) > 1:
                event = node.args[1]
                if isinstance(event, ast.Constant) and isinstance(event.value, str):
                    written.setdefault(event.value, set()).update(k.arg for k in node.keywords if k.arg)
    rows = [line.split("|") for line in PAGE.partition("## Logs")[2].partition("## Traces")[0].splitlines()]
    named = {e: row[2] for row in rows if len(row) == 5 for e in re.findall(r"`([\w ]+)`", row[1])}
    elsewhere = {"another version answers"}  # at Q
    assert set(written) - elsewhere <= set(named)
    for event, facts in named.items():
        if event not in written or event == "evicted":  # whose it is differs from shelf to shelf
            continue
        assert {f for f in written[event] if event != "session ended"} <= set(re.findall(r"`(\w+)`", facts)) | {
            "client"
        }
