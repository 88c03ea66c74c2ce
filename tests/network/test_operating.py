"""What an operator meets on a bad day: full disks, open files, floods. Each is one line with a way out."""

from __future__ import annotations

import datetime
import errno
import logging
import os
import re
import resource
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from network_world import Trio, logs_as_in_a_new_process, until
from torch import nn

from sectorch import __version__, errors, secure
from sectorch.choreography.program.projection import Setup, part_of
from sectorch.choreography.run import frames
from sectorch.cli.main import run
from sectorch.network import Pins, Server, Store, connect, memory, messages
from sectorch.network.commands import serve
from sectorch.network.commands.array_files import write_arrays
from sectorch.network.commands.options import check_store_room
from sectorch.network.commands.serve import keep_answering
from sectorch.network.federation.config import read_federation, read_party_config
from sectorch.network.federation.policy import AcceptancePolicy
from sectorch.network.identity.authority import make_authority
from sectorch.network.identity.identity import fingerprint_of, new_identity
from sectorch.network.limits import Charge, Usage, read_limits
from sectorch.network.log import begin
from sectorch.network.memory import MemoryBound, control_groups, is_out_of_memory, with_memory
from sectorch.network.names import worker_of
from sectorch.network.observe import SPARE, Management, Monitoring, health
from sectorch.network.parties import client
from sectorch.network.parties.session import PartySession
from sectorch.network.wire import endpoints
from sectorch.network.wire.endpoints import listen_address
from sectorch.network.wire.tls_stream import Tls, context_of
from sectorch.serving.model_file import save_model
from sectorch.session import A, S, Session
from sectorch.testing.local_network import PROGRAM, enrol, free_port

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def trio(pki, small_model, tmp_path):
    trio = Trio(pki[1], small_model, X, tmp_path)
    yield trio
    trio.close()


# Addresses.


def test_a_link_local_address_is_bound_on_its_interface(monkeypatch):
    at = ("fe80::1", 7100, 0, 3)
    asked, made = [], socket.socket()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", at)])
    monkeypatch.setattr(socket, "create_server", lambda address, **_: (asked.append(address), made)[1])
    with made:
        endpoints._bound_once("fe80::1%eth0", 7100, False)
    assert asked == [at]
    with pytest.raises(errors.ArgumentError, match="host:port"):
        endpoints.host_port("[fe80::1%eth0\n]:7100")


@pytest.mark.parametrize(
    ("server", "listen"),
    [
        ("localhost:7100", "localhost:7100"),
        ("127.0.0.1:7100", "127.0.0.1:7100"),
        ("127.9.9.9:7100", "127.9.9.9:7100"),
        ("[::1]:7100", "[::1]:7100"),
        ("[0:0:0:0:0:0:0:1]:7100", "[::1]:7100"),
        ("[2001:db8::7]:7100", "[::]:7100"),
        ("192.0.2.1:7100", "0.0.0.0:7100"),
        ("cloud.example:7100", "0.0.0.0:7100"),
        ("localhost.example:7100", "0.0.0.0:7100"),
    ],
)
def test_a_server_listens_where_its_clients_dial(tmp_path, capsys, server, listen):
    assert listen_address(server) == listen
    assert run(["keys", "try", str(tmp_path / "trial"), "--server", server]) == 0
    assert f"sectorch server --listen {listen} " in capsys.readouterr().out


@pytest.mark.parametrize("server", ["7100", "host:", ":7100", "host:x", "host:70000", "[]:7100"])
def test_keys_try_refuses_what_is_no_address(tmp_path, capsys, server):
    assert run(["keys", "try", str(tmp_path / "trial"), f"--server={server}"]) == 1
    assert "a server's address is host:port" in capsys.readouterr().err and not (tmp_path / "trial").exists()


# Files of secrets.


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_files_of_a_store_a_log_and_a_result_are_their_owners_alone(trio, open_umask, tmp_path):
    """With a umask that allows everything; pieces, bindings, names, keys, locks of S, A and Q."""
    trio.close()
    stores = {who: Store(tmp_path / who) for who in "SAQ"}
    assert all(len(store.name) == 32 for store in stores.values())
    trio.start_server(stores["S"])
    trio.start_answering(stores["A"])
    trio.start_querying(stores["Q"])
    trio.connection.model("hospital-b").prepare(X, 1)
    kept = [path for who in "SAQ" for path in (tmp_path / who).rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} >= {".piece", ".sealed", ".key", ".lock", ".name"}
    assert {path.name: mode(path) for path in kept if mode(path) != 0o600} == {}
    for suffix in (".npy", ".npz", ".safetensors", ""):
        (tmp_path / f"y{suffix}").touch(0o666)
        for name in ("x", "y"):
            write_arrays(torch.ones(2), tmp_path / f"{name}{suffix}")
            assert mode(tmp_path / f"{name}{suffix}") == 0o600


def test_a_log_is_its_owners_alone_and_one_that_exists_stays_as_it_is(tmp_path, open_umask):
    (tmp_path / "shared.log").touch(0o640)
    for name, wanted in (("new.log", 0o600), ("shared.log", 0o640)):
        with logs_as_in_a_new_process():
            begin(tmp_path / name)
            logging.getLogger("sectorch.server").warning("a line")
        assert mode(tmp_path / name) == wanted and "a line" in (tmp_path / name).read_text()


@pytest.mark.parametrize("permissions", [0o644, 0o640, 0o604, 0o660])
def test_a_key_of_a_store_that_others_can_read_is_refused(tmp_path, permissions):
    Store(tmp_path / "own").close()
    key = tmp_path / "own" / "store.key"
    key.chmod(permissions)
    with pytest.raises(errors.ArgumentError, match=f"others can read {key}, .*: chmod 600 {key}, and if"):
        Store(tmp_path / "own")
    with pytest.raises(errors.ArgumentError, match="others can read"):
        Store(tmp_path / "other", key)
    key.chmod(0o600)
    Store(tmp_path / "own").close()


# Full disks.


@pytest.fixture
def full_disk(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)


def test_a_store_that_is_there_may_be_full_and_one_that_is_not_says_what_it_needs(tmp_path, capsys, full_disk):
    with pytest.raises(errors.ArgumentError, match=r"has less than 1 MiB, which are needed to start\); make room"):
        check_store_room(tmp_path / "new", "--store")
    for at in (tmp_path / "one", tmp_path / "many" / "worker-0"):
        Store(at).close()
    for at in ("one", "many"):
        check_store_room(tmp_path / at, "--store")
        assert re.search(r"is full .*: nothing more is prepared until there is room; queries", capsys.readouterr().err)


# Health.


@pytest.fixture
def signed(pki, small_model, tmp_path):
    """The three parties, who write receipts, and count what is asked."""
    made = {**pki[1], "server": replace(pki[1]["server"], identity=new_identity())}
    trio = Trio(made, small_model, X, tmp_path, receipts=True, limits="[default]\nqueries_a_day = 1000\n")
    yield trio
    trio.close()


def test_a_full_disk_of_receipts_is_not_ready_until_there_is_room(signed, monkeypatch):
    """A quota of the disk, which its own figures do not show: known from the first query that fails."""
    remote = signed.connection.model("hospital-b")
    assert signed.server.unready() == signed.party.unready() == ""

    def full(*_, **__):
        raise OSError(122, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        patch.setattr(tempfile, "TemporaryFile", full)
        with pytest.raises(errors.ReceiptError):
            remote(X)
        with pytest.raises(errors.ReceiptError):
            signed.server._receipts.end_query(0, "done")
        why = signed.server.unready()
        assert why == "no receipt can be written (Disk quota exceeded), and what has none is not served"
    assert signed.server.unready() == ""
    remote(X)


@pytest.mark.parametrize("who", ["receipts", "usage"])
def test_a_disk_without_room_is_not_ready_before_a_query_fails(signed, monkeypatch, who):
    free = lambda folder: 0 if who in sys._getframe(1).f_globals["__name__"].replace("limits", "usage") else 1 << 40
    monkeypatch.setattr("sectorch.files.free_bytes", free)
    for party in (signed.server, signed.party):
        assert "make room for" in (why := party.unready()) and "is not served" in why and "\n" not in why
    monkeypatch.setattr("sectorch.files.free_bytes", lambda _: 1 << 40)
    assert signed.server.unready() == signed.party.unready() == ""


def test_receipts_that_another_program_has_removed_are_not_ready(signed):
    signed.receipts["S"].unlink()
    assert "another program has changed or removed the file" in signed.server.unready()
    assert signed.party.unready() == ""


def test_usage_that_cannot_be_counted_is_not_ready_until_it_can(signed):
    usage = signed.server._quotas.usage
    with closing(sqlite3.connect(usage.path, isolation_level=None)) as other:
        usage._db.execute("PRAGMA busy_timeout = 100")
        other.execute("BEGIN IMMEDIATE")  # another program holds the file
        with pytest.raises(errors.QuotaFileError):
            signed.connection.model("hospital-b")(X)
        assert "what is not counted is not served" in signed.server.unready()
        other.execute("ROLLBACK")
    assert signed.server.unready() == ""


@pytest.mark.parametrize("party", ["server", "answering"])
@pytest.mark.parametrize("what", ["certificate", "authority"])
def test_a_party_whose_certificate_has_expired_is_not_ready_and_is_warned_of_it_before(
    pki, tmp_path, caplog, monkeypatch, party, what
):
    """By its pages, its metrics and its log; in 10 days, and at the end."""
    caplog.set_level(logging.INFO, "sectorch.certificate")
    make_authority(tmp_path / "pki", days=10)
    hosts = ("localhost",) if party == "server" else ()
    used = enrol(tmp_path / "pki", "one", hosts=hosts, days=10 if what == "certificate" else 9.5)

    class Running:
        unready, figures, renew = (lambda self: ""), (lambda self: {}), (lambda self, _: None)

    watching = Monitoring()
    try:
        watching.begin(Running(), used, lambda: used)
        assert watching.unready() == ""
        assert until(lambda: any("certificate expires" in r.getMessage() for r in caplog.records), 10)
        (line,) = [r.getMessage() for r in caplog.records if "certificate expires" in r.getMessage()]
        assert "days=9" in line and any("CA expires" in r.getMessage() for r in caplog.records)
        assert 8 < watching.figures()["certificate_days_left"] < 10 > watching.figures()["authority_days_left"] > 8
        later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=11)
        clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda _: later), timezone=datetime.timezone)
        place = "identity" if what == "certificate" else "certificate_files"
        monkeypatch.setattr(f"sectorch.network.identity.{place}.datetime", clock)
        why = watching.unready()
        assert ("certificate of 'one' is valid from" if what == "certificate" else "the CA's certificate") in why
        assert "\n" not in why and watching.figures()["ready"] is False
        assert health(watching.unready)["/ready"]()[0] == 503
        monkeypatch.undo()
        assert watching.unready() == ""
    finally:
        watching.close()


# File descriptors.


def test_health_is_answered_where_the_process_has_no_descriptors_left():
    """The sockets of the probes are made before; the kernel connects them, and the process has to accept them."""
    management = Management("127.0.0.1:0", health(lambda: ""))
    probes = [socket.socket() for _ in range(2 * SPARE)]
    taken: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[0]), before[1]))
    try:
        with open(os.devnull) as one, pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(one.fileno()))
        os.close(taken.pop())  # that of `one` is free again, and another takes it
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for number, probe in enumerate(probes):
            probe.settimeout(30)
            probe.connect(("127.0.0.1", management.port))
            probe.sendall(f"GET /{'live' if number % 2 else 'ready'} HTTP/1.0\r\n\r\n".encode())
            assert probe.recv(4096).startswith(b"HTTP/1.0 200 OK"), "each gives its descriptor back"
            probe.close()
            with suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in taken:
            os.close(handle)
        for probe in probes:
            probe.close()
        management.close()


@pytest.mark.parametrize("bound", ["connections", "descriptors"])
def test_a_new_client_does_not_wait_until_strangers_run_out_of_time(pki, monkeypatch, bound):
    """They hold all places, by this process's own bound or the system's, and come again as soon as they are dropped."""
    monkeypatch.setattr(endpoints, "HANDSHAKE", 600.0)
    if bound == "connections":
        monkeypatch.setattr(endpoints, "connection_limit", lambda: 8)
    made, accept, refused = pki[1], socket.socket.accept, []
    server = Server("localhost:0", made["server"])

    def accept_eight(listening):
        if bound == "descriptors" and len(server.listener._pending) + len(server.listener._streams) >= 8:
            refused.append(listening)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accept_eight)
    try:
        with ExitStack() as opened:
            for _ in range(40):
                opened.enter_context(socket.create_connection(("localhost", server.port)))
            assert until(lambda: len(server.listener._pending) == 8, 30)
            with connect(f"localhost:{server.port}", made["alice"], patience=30) as alice:
                for _ in range(40):
                    opened.enter_context(socket.create_connection(("localhost", server.port)))
                assert alice.models() == [], "who has shown a certificate keeps its place"
        assert bool(refused) == (bound == "descriptors")
    finally:
        server.stop()


def test_a_host_with_many_connections_does_not_take_the_places_of_one_with_few(pki):
    server = Server("localhost:0", pki[1]["server"])
    listener = server.listener
    listener._stopped.set()
    listener._thread.join()
    for by in ("192.0.2.1:1", *(f"[2001:db8::1]:{port}" for port in range(3)), "192.0.2.2:5"):
        tls = Tls(context_of(pki[1]["server"], server=True))
        listener._pending[endpoints._PendingConnection(socket.socket(), by, tls)] = None
    dropped = []
    while listener._make_room():
        dropped.append([pending.by for pending in listener._pending])
    server.stop()
    assert dropped[1] == ["192.0.2.1:1", "[2001:db8::1]:2", "192.0.2.2:5"] and dropped[3:] == [["192.0.2.2:5"], []]


# Versions.


def test_two_releases_without_a_common_protocol_both_say_which_they_speak(pki, tmp_path, monkeypatch, caplog):
    """The server logs it, and the client has an error with both versions; an answering party ends with it."""
    caplog.set_level(logging.INFO, "sectorch.server")
    server = Server("localhost:0", pki[1]["server"])
    try:
        for name, hello in {
            "later": {"protocols": [9, 8], "release": "9.1.0"},
            "before": {},
        }.items():
            caplog.clear()
            monkeypatch.setattr(client, "Hello", lambda _hello=hello, **_: messages.Hello(**_hello))
            with pytest.raises(errors.VersionError) as caught:
                connect(f"localhost:{server.port}", pki[1]["alice"])
            words = "protocol 9 or 8 (sectorch 9.1.0)" if name == "later" else "protocol one before 4"
            text = (
                f"the server speaks protocol 4 (sectorch {__version__}), and 'alice' speaks {words}: install the same"
            )
            assert text in str(caught.value) and "\n" not in str(caught.value)
            assert any(
                r.getMessage().startswith("refused client=alice") and words in r.getMessage() for r in caplog.records
            )
            answering = SimpleNamespace(register=lambda _: connect(f"localhost:{server.port}", pki[1]["hospital-b"]))
            with pytest.raises(errors.VersionError):
                keep_answering(answering, "hospital-b", threading.Event(), "the server")
    finally:
        server.stop()


def test_a_client_of_several_protocols_gets_the_one_that_the_server_prefers(pki, monkeypatch):
    monkeypatch.setattr(messages, "PROTOCOLS", (5, 4))
    for asked, agreed in (([4], 4), ([4, 5], 5), ([3, 4, 9], 4)):
        assert messages.common_protocol(messages.Hello(protocols=asked), "alice") == agreed
    with pytest.raises(errors.VersionError, match=r"speaks protocol 5 or 4 .* and 'alice' speaks protocol 3 "):
        messages.common_protocol(messages.Hello(protocols=[3], release="0.1.0"), "alice")


@pytest.mark.parametrize("what", ["message", "frame", "reply", "silent"])
def test_a_server_of_an_earlier_release_is_a_line_with_this_clients_version(pki, monkeypatch, what, caplog):
    """It does not know the entries of the first message, or has other frames, or answers in another protocol."""
    server = Server("localhost:0", pki[1]["server"])
    if what == "message":
        monkeypatch.setattr(server, "_answer", lambda *_: (_ for _ in ()).throw(errors.FrameError("of no form")))
    elif what == "reply":
        monkeypatch.setattr("sectorch.network.parties.server.common_protocol", lambda *_: 77)
    elif what == "silent":  # an early one passes over entries that it does not know, and answers as it always did
        monkeypatch.setattr(server, "_answer", lambda *_: messages.ServerReply())
    else:
        read = frames._unpack_one
        other = lambda data, start: read(bytes(data[:2]) + b"\x02" + bytes(data[3:]), start)
        monkeypatch.setattr(frames, "_unpack_one", other)
    caplog.set_level(logging.INFO, "sectorch.server")
    try:
        with pytest.raises(
            errors.VersionError, match=f"does not speak protocol 4 .sectorch {__version__}., which 'alice'"
        ):
            connect(f"localhost:{server.port}", pki[1]["alice"])
        if what in ("reply", "silent"):
            words = {"reply": "it answers in protocol 77 .sectorch", "silent": "it answers in protocol one before 4.$"}
            with pytest.raises(errors.VersionError, match=words[what]):
                connect(f"localhost:{server.port}", pki[1]["alice"])
        if what == "frame":
            assert until(lambda: any("a frame of version 2, and" in r.getMessage() for r in caplog.records), 10)
    finally:
        server.stop()


REFUSING = """
import sys
from sectorch.network.parties import server

answer = server.Server._answer


def early(self, link, request):
    if isinstance(request, server.Hello):
        {how}
    return answer(self, link, request)


server.Server._answer = early
from sectorch.cli.main import main
main()
"""


@pytest.mark.sectorch_long
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("return server.ServerReply()", "it answers in protocol one before 4"),
        ("raise server.FrameError('object contains unknown field `protocols`')", "unknown field `protocols`"),
        ("request = server.Hello(protocols=[9], release='9.1.0')", "speaks protocol 9 (sectorch 9.1.0)"),
    ],
    ids=["a silent server", "a server that refuses the message", "a later party"],
)
def test_an_answering_party_without_a_common_protocol_ends_with_an_exit_code(pki, small_model, tmp_path, how, says):
    """The commands as processes: it says both versions in one line, and dials no more."""
    folder = pki[0]
    save_model(small_model, X, tmp_path / "m.safetensors")
    files = [f"--{name}={folder / file}" for name, file in (("cert", "server.pem"), ("key", "server-key.pem"))]
    port = free_port()
    command = ["server", f"--listen=localhost:{port}", *files, f"--clients-ca={folder / 'ca.pem'}"]
    (tmp_path / "early.py").write_text(REFUSING.format(how=how))
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen([sys.executable, str(tmp_path / "early.py"), *command], stdout=log, stderr=log)
    try:
        assert until(lambda: "listening" in (tmp_path / "log").read_text(), 120), (tmp_path / "log").read_text()
        own = [
            f"--{name}={folder / file}" for name, file in (("cert", "hospital-b.pem"), ("key", "hospital-b-key.pem"))
        ]
        ended = subprocess.run(
            [*PROGRAM, "answer", str(tmp_path / "m.safetensors"), "--name=hospital-b", f"--server=localhost:{port}",
             *own, f"--ca={folder / 'ca.pem'}", f"--pins={tmp_path / 'pins'}"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert ended.returncode == 1 and says in line and f"protocol 4 (sectorch {__version__})" in line
        assert "dialling again" not in ended.stderr
    finally:
        server.terminate()
        server.wait(60)
        log.close()


# Memory.


def test_work_beyond_the_bound_is_refused_and_what_is_reserved_counts_once(monkeypatch):
    held = 1 << 30  # that of a test process sinks as it likes
    monkeypatch.setattr("sectorch.network.memory.resident", lambda: held)
    monkeypatch.setattr("sectorch.network.memory.WAIT", 0.0)
    bound = MemoryBound((1 << 30) + (200 << 20))
    bound.reserve(60 << 20, 40 << 20)
    with pytest.raises(errors.BusyError, match=r"takes about 126 MB, .* 1179 are held, 42 of .* sessions and 63 for"):
        bound.reserve(120 << 20)
    held += 100 << 20  # the running call has taken what was reserved for it, which counts once
    bound.reserve(90 << 20)
    bound.release(90 << 20)
    held += 50 << 20  # and more than that
    with pytest.raises(errors.BusyError, match="1231 are held"):
        bound.reserve(90 << 20)
    held -= 100 << 20
    bound.release(60 << 20)
    bound.reserve(120 << 20)


def test_a_bound_below_what_the_process_holds_is_refused_at_the_start():
    with pytest.raises(errors.ArgumentError, match=r"--memory 0.01 is too little: .* name \d+\.\d or more"):
        MemoryBound(10**7)


def limited(option: str, size: int) -> str:
    """What a process under a limit of the system's, so many bytes above what it holds, says of its bound."""
    program = f"""
import resource, threading
from sectorch.errors import BusyError
from sectorch.network.memory import MemoryBound, {option} as counted
import mmap
untouched = mmap.mmap(-1, 300 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # in no resident memory
bound = MemoryBound(1 << 40)
which = {{"data": resource.RLIMIT_DATA, "address_space": resource.RLIMIT_AS}}["{option}"]
resource.setrlimit(which, (counted() + ({size} << 20),) * 2)
threading.Thread(target=lambda: None).start()
for size in (100, 80, 60, 40, 20):
    try:
        bound.reserve(size << 20)
    except BusyError as error:
        print(error)
    else:
        print("reserved", size, len(bytearray(size << 20)) >> 20)
        break
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert not found.returncode, found.stderr
    return found.stdout


@pytest.mark.parametrize(("option", "says"), [("data", "ulimit -d"), ("address_space", "ulimit -v")])
def test_the_bound_counts_what_the_system_counts(option, says):
    """Untouched memory counts under `ulimit`; what is refused is refused before the limit, and what is not fits."""
    said = limited(option, 110)
    assert f"({says}, with a reserve)" in said and "reserved" in said.splitlines()[-1], said
    least = limited(option, 10)
    assert "reserved" not in least and least.count("ask again later, or with fewer rows") == 5, least


def group(folder: Path, version: int, limit: int, usage: int, cached: int, mapped: int) -> None:
    """The files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        1: ("limit_in_bytes", "usage_in_bytes", "total_", "total_mapped_file"),
        2: ("max", "current", "", "file_mapped"),
    }
    most, now, prefix, mapping = named[version]
    (folder / f"memory.{most}").write_text(f"{limit}\n" if limit else {1: "9223372036854771712\n", 2: "max\n"}[version])
    (folder / f"memory.{now}").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"{prefix}active_file {cached - 5}\n{prefix}inactive_file 5\n{mapping} {mapped}\n"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_counts_all_its_processes_and_no_cache_of_files(version, tmp_path, monkeypatch):
    """Of a container, whose own group is at the mount; of a service, whose group is below; and one without a limit."""
    mount = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    (tmp_path / "proc/self").mkdir(parents=True)
    cgroup = tmp_path / "proc/self/cgroup"
    line = {1: "3:cpu:/\n4:memory:{}\n0::/\n", 2: "0::{}\n"}[version]
    cgroup.write_text(line.format("/docker/1234"))  # whose folder is not in the container
    group(mount, version, 1000, 700, 400, 100)
    (found,) = control_groups(tmp_path)
    assert (found.limit(), found.usage()) == (1000, 400)
    cgroup.write_text(line.format("/system.slice/a.service"))
    group(mount, version, 0, 9000, 0, 0)
    group(mount / "system.slice/a.service", version, 2000, 1500, 0, 0)
    assert [one.limit() for one in control_groups(tmp_path)] == [2000, None]
    cgroup.write_text(line.format("/../../etc"))
    assert [one.folder for one in control_groups(tmp_path)] == [mount]
    cgroup.write_text(line.format("/system.slice/a.service"))
    monkeypatch.setattr(memory, "control_groups", lambda: control_groups(tmp_path))
    monkeypatch.setattr(memory, "WAIT", 0.0)
    bound = MemoryBound()
    bound.reserve(200)
    with pytest.raises(errors.BusyError, match=r"\(0.9 of the container's\)"):
        bound.reserve(200)


def test_without_a_memory_limit_nothing_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "control_groups", lambda: control_groups(tmp_path))
    assert not MemoryBound().bounded
    MemoryBound().reserve(1 << 60)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=["Python", "torch", "thread", "system"],
)
@pytest.mark.parametrize("who", ["S", "A"])
def test_where_the_system_gives_no_memory_the_client_hears_busy_and_asks_again(
    trio, small_model, who, error, monkeypatch
):
    """In a call and at the opening of a session; the next query is right."""
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("another"))
    remote = trio.connection.model("hospital-b")
    places = [(PartySession, "_take_part"), (PartySession, "_take_batched")]
    opening = (trio.server, "_admit") if who == "S" else (trio.party, "_open_party_session")
    for patches in (places, [opening]):
        with monkeypatch.context() as patched:
            for place, name in patches:
                work = getattr(place, name)

                def fail(*args, do=work):
                    if not isinstance(args[0], PartySession) or args[0]._me.role == who:
                        raise error
                    return do(*args)

                patched.setattr(place, name, fail)
            with pytest.raises(errors.BusyError, match="the memory that the system allows is used up; ask again later"):
                remote(X)
        assert (remote(X) - small_model(X)).abs().max() < 1e-4
        remote.close()


def test_a_thread_that_cannot_start_ends_neither_the_listener_nor_a_connection(trio, small_model, monkeypatch):
    """At S for a connection and for a session, at A for a session."""
    start = threading.Thread.start

    def fails_for(name):
        def fail(self):
            if self.name.startswith(name):
                raise RuntimeError("can't start new thread")
            start(self)

        return fail

    for name in ("session of ", "answering"):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails_for(name))
            with pytest.raises(errors.BusyError, match="ask again later"):
                trio.connection.model("hospital-b")(X)
        assert (trio.connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails_for("from bob"))
        with pytest.raises(errors.PeerLostError):
            connect(trio.address, trio.made["bob"], pins=trio.pins, store=Store()).close()
    with connect(trio.address, trio.made["bob"], pins=trio.pins, store=Store()) as connection:
        assert (connection.model("hospital-b")(X) - small_model(X)).abs().max() < 1e-4


def test_memory_that_comes_back_is_waited_for(monkeypatch):
    left = [MemoryError(), RuntimeError("std::bad_alloc")]

    def work():
        if left:
            raise left.pop()
        return 7

    assert with_memory(work) == 7 and not left
    left += [MemoryError()] * 3
    monkeypatch.setattr(memory, "WAIT", -1.0)
    with pytest.raises(errors.BusyError, match="ask again later"):
        with_memory(work)
    with pytest.raises(RuntimeError, match="another"):
        with_memory(lambda: (_ for _ in ()).throw(RuntimeError("another")))


def test_a_call_waits_for_the_memory_of_calls_that_run_and_not_for_that_of_sessions(monkeypatch):
    monkeypatch.setattr("sectorch.network.memory.resident", lambda: 1 << 30)
    bound = MemoryBound((1 << 30) + 1000)
    bound.reserve(900, 100)
    waiting = threading.Thread(target=lambda: bound.reserve(800))
    waiting.start()
    assert until(lambda: bound._released._waiters, 30) and not bound.short
    bound.release(900)
    waiting.join(30)
    assert (bound._calls, bound._sessions) == (800, 100)
    bound.release(800)
    monkeypatch.setattr(bound._released, "wait", lambda _: pytest.fail("no call runs whose memory comes back"))
    with pytest.raises(errors.BusyError):
        bound.reserve(950)
    assert bound.short


def test_idle_sessions_end_sooner_where_others_are_refused_for_memory(trio, small_model, monkeypatch):
    """And their clients' next query is answered."""
    monkeypatch.setattr("sectorch.network.parties.server.IDLE_WHEN_SHORT", 0.2)
    remote = trio.connection.model("hospital-b")
    remote(X)
    assert not until(lambda: trio.server.sessions == 0, 1.0)
    trio.party._memory.limit = 10**6
    with pytest.raises(errors.NetworkError, match="--memory"):
        trio.connection.model("hospital-b")(X)
    assert until(lambda: trio.server.sessions == 0, 30)
    trio.party._memory.limit = None
    assert (remote(X) - small_model(X)).abs().max() < 1e-4


@pytest.mark.parametrize("rows", [1, 64])
def test_the_estimate_of_a_call_covers_its_values_and_is_not_many_times_as_large(rows):
    """The values of S and A in a call, counted as it runs; and what a session keeps, by what its setup has."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)).eval()
    x = torch.rand(rows, 1, 8, 8)
    module = secure(net, session=Session())
    module(x)
    program = module.choreography(x)
    for party in (S, A):
        part = part_of(program, frozenset({party}))
        most, live = 0, {one.slot for one in part.required_inputs}
        for line in part.lines:
            live |= {slot for _, slot in line.outputs}
            most = max(
                most, sum(part.shapes[slot].nbytes for slot in live if isinstance(part.shapes[slot], torch.Tensor))
            )
            live -= set(line.drops)
        assert most <= part.memory["call"] < 4 * most + (1 << 20)
        kept = Setup(0).missing_bytes(part)
        weights = sum(8 * p.numel() for p in net.parameters() if p.dim() > 1)
        assert weights <= kept <= 4 * weights + 4096, "biases stay at A"
    assert part.memory["prepare"] >= 2 * part.material > 0 < part.memory["resume"]


@pytest.mark.parametrize("who", ["S, at the session", "S, at the call", "A"])
def test_a_party_at_its_bound_refuses_and_answers_again_when_there_is_room(trio, small_model, who, monkeypatch):
    remote = trio.connection.model("hospital-b")
    bound = trio.party._memory if who == "A" else trio.server._memory
    monkeypatch.setattr("sectorch.network.memory.resident", lambda: 10**9)
    if who == "S, at the call":
        remote.close()
        monkeypatch.setattr(trio.server, "_admit", lambda *_: None)
    else:
        remote.close()
    bound.limit = 10**9
    with pytest.raises(errors.NetworkError, match=r"takes about .*--memory.* ask again later, or with fewer rows"):
        remote(X)
    bound.limit = None
    assert (remote(X) - small_model(X)).abs().max() < 1e-4 and until(lambda: bound._calls == 0, 30)


# Names.


def test_names_of_another_case_have_the_same_limits_and_places(signed, tmp_path):
    (tmp_path / "limits.toml").write_text("[clients.alice]\nqueries_a_day = 1\n")
    limits = read_limits(tmp_path / "limits.toml")
    assert limits.of("ALICE") == limits.of("alice") != limits.default
    assert Charge("Alice", "", (), {}).accounts == Charge("alice", "", (), {}).accounts
    (tmp_path / "limits.toml").write_text("[clients.alice]\n[clients.Alice]\n")
    with pytest.raises(errors.ArgumentError, match="differs from another table in case alone"):
        read_limits(tmp_path / "limits.toml")


def test_a_name_that_looks_like_one_that_is_pinned_is_not_trusted_at_first_use(tmp_path):
    pins = Pins(tmp_path / "pins", first_use=True)
    pins.check("alice", b"a" * 32)
    pins.check("alice", b"a" * 32)
    with pytest.raises(errors.IdentityError, match=r"'Alice' differs from 'alice', .* in case alone"):
        pins.check("Alice", b"b" * 32)
    for name in ("\uff41lice", "\u0430lice", "alice\u200b", "a\u0301lice", "alice ", "\u2170"):
        with pytest.raises(errors.IdentityError, match="is 1 to 64 letters"):
            pins.check(name, b"a" * 32)
        with pytest.raises(errors.ArgumentError, match="is 1 to 64 letters"):
            (tmp_path / "l.toml").write_text(f'[clients."{name}"]\n', encoding="utf-8")
            read_limits(tmp_path / "l.toml")
    assert list(pins.fingerprints()) == ["alice"]


LOOK_ALIKES = [
    "ALICE",
    "Alice",
    "\uff41lice",
    "\u0430lice",
    "alice\u200b",
    "a\u0301lice",
    "\u24d0lice",
    "ali\u017fe",
    "alice ",
]
"""Of alice: another case, full width, Cyrillic, an invisible mark, an accent, a circle, a long s, a space."""


@pytest.mark.parametrize("name", LOOK_ALIKES, ids=ascii)
def test_a_name_that_looks_like_another_passes_no_limit_pin_policy_share_or_certificate(tmp_path, name):
    """Whoever is called so is refused for its name, or shares all that alice has."""
    ascii_name = name.isascii() and name.isalnum()
    refused = pytest.raises(errors.SectorchError, match=r"1 to 64 letters|in case alone")

    (tmp_path / "limits.toml").write_text("[default]\nqueries_a_day = 100\n[clients.alice]\nqueries_a_day = 1\n")
    limits = read_limits(tmp_path / "limits.toml")
    own = Usage(tmp_path / "usage", "clinic", "A", "'clinic'")
    with closing(own):
        assert own.charge(Charge("alice", "", ("m",), {"queries": 1}), limits)
        if ascii_name:
            with pytest.raises(errors.QuotaError):
                own.charge(Charge(name, "", ("m",), {"queries": 1}), limits)
            assert worker_of(name, 4) == worker_of("alice", 4), "or a second worker would count anew"

    pins = Pins(tmp_path / "pins", first_use=True)
    pins.check("alice", b"a" * 32)
    with refused:
        pins.check(name, b"b" * 32)

    table = "[parties.'{}']\nidentity = '{}'\n"
    keys = [fingerprint_of(new_identity()) for _ in range(3)]
    whole = "[federation]\nname = 'f'\nserver = 'localhost:7100'\n" + table.format("alice", keys[0])
    (tmp_path / "f.toml").write_text(whole + table.format(name, keys[1]), encoding="utf-8")
    with pytest.raises(errors.ArgumentError, match=r"are one name|1 to 64 letters"):
        read_federation(tmp_path / "f.toml")
    (tmp_path / "f.toml").write_text(whole + table.format("bob", keys[1]) + table.format("carol", keys[2]))
    federated = read_federation(tmp_path / "f.toml")
    own = f"[[accept]]\nmodel = 'm.safetensors'\nclients = ['{name}']\n"
    (tmp_path / "bob.toml").write_text(own, encoding="utf-8")
    (tmp_path / "bob.toml").chmod(0o600)
    with pytest.raises(errors.ArgumentError, match="has no party"):
        AcceptancePolicy(read_party_config(tmp_path / "f.toml", "bob"), federated, "bob")

    make_authority(tmp_path / "ca")
    enrol(tmp_path / "ca", "alice")
    with refused:
        enrol(tmp_path / "one", name, pki=tmp_path / "ca")


def test_names_of_another_case_have_one_share_of_a_store(tmp_path):
    """A client with two names gets no second share of a store that another client needs."""
    sizes = {"alice": 400 << 10, "ALICE": 300 << 10, "bob": 200 << 10}
    shelves = [SimpleNamespace(bytes=size, binding=SimpleNamespace(client=name)) for name, size in sizes.items()]
    with closing(Store(tmp_path / "s", budget=1 << 20)) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "shelves", lambda: [])
        patch.setattr(store, "_sizes", lambda: Store._sizes(SimpleNamespace(shelves=lambda: shelves)))
        assert store._sizes() == {"alice": 700 << 10, "bob": 200 << 10}
        assert store.free_bytes("Alice") == store.free_bytes("alice") == 124 << 10
        assert store.free_bytes("Bob") == (512 << 10) - (200 << 10)


def test_names_of_another_case_wait_as_one_client(trio, pki):
    """At S and at A, in the queue that takes clients in turns."""
    made = enrol(trio.folder / "carol", "Carol", pki=pki[0])
    trio.pins.pin("Carol", fingerprint_of(made.identity))
    asked = []
    for party in (trio.server, trio.party):
        for inner in (party._turns.turn, party._turns.turn_if_idle):
            noted = lambda client, *tick, inner=inner: asked.append(client) or inner(client, *tick)
            setattr(party._turns, inner.__name__, noted)
    with connect(trio.address, made, pins=trio.pins) as connection:
        remote = connection.model("hospital-b")
        remote(X)  # by itself
        with trio.server._turns.turn("another", lambda: None):
            remote(X)  # in a batch
    assert asked == ["carol", "carol", "another", "carol", "carol", "carol"]


@pytest.mark.parametrize("given", ["Hospital-B", "hospital-c", "\u04bbospital-b", "hospital-b\n"], ids=ascii)
def test_a_party_answers_under_the_name_of_its_certificate_and_no_other(pki, small_model, tmp_path, capsys, given):
    folder = pki[0]
    save_model(small_model, X, tmp_path / "m.safetensors")
    own = [f"--cert={folder / 'hospital-b.pem'}", f"--key={folder / 'hospital-b-key.pem'}", f"--ca={folder / 'ca.pem'}"]
    with logs_as_in_a_new_process():
        assert run(["answer", str(tmp_path / "m.safetensors"), *own, "--server=localhost:1", "--name", given]) == 1
    said = capsys.readouterr().err
    assert "that is 'hospital-b': leave --name out" in said and said.isascii()


def test_a_party_says_its_name_once(trio):
    """`answer` without a name takes that of the certificate."""
    assert trio.party.connection.name == "hospital-b" and trio.connection.models() == ["hospital-b"]
    options = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "command_status", lambda p, given, *_: options.update(vars(p.parse_args(given))) or 0)
        serve.answer(["m.safetensors", "--server=a:1", "--cert=c", "--key=k", "--ca=a"])
    assert options["name"] is None
