"""`sectorch server`, `sectorch answer` and `sectorch up`: processes that run until they are stopped.

`MultiServer` connects an answering party to several servers and workers. `supervise` runs a server as several worker
processes behind one port.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console

from ...cli.command import Parser, above_zero, at_least, command_status, not_negative, number
from ...errors import ArgumentError, IdentityError, NetworkError, PeerLostError, SectorchError, VersionError
from ...files import write as write_file
from ...serving.model_file import read_model
from ..federation.config import (
    SERVER,
    FederationFile,
    ListedPins,
    PartyConfig,
    credentials,
    read_federation,
    read_party_config,
    server_credentials,
)
from ..federation.policy import AcceptancePolicy, AcceptanceRule
from ..federation.service import PartyService
from ..identity.certificate_files import check_own_files
from ..identity.identity import Credentials
from ..messages import MAX_WORKERS, ServerProcess
from ..names import LONGEST, NAME, name_of, readable
from ..observe import add_watch, monitoring
from ..parties.answer import Answering
from ..parties.server import IDLE, RUNNING, Server
from ..store import Store
from ..warm_up import warm
from ..wire.channel import CALL
from ..wire.endpoints import check_free, host_port, listen_address, listen_error
from .options import (
    add_certificate,
    add_client,
    add_core,
    add_drain,
    add_limits,
    add_log,
    add_memory,
    add_patience,
    add_pins,
    add_receipts,
    add_store,
    begin_log,
    check_room,
    console,
    few_arenas,
    many_files,
    memory_of,
    on_core,
    pins_of,
    store_of,
    tell,
)

log = logging.getLogger("sectorch.answer")
FATAL = (IdentityError, VersionError)
"""Errors with which an answering party ends: connecting again does not mend them."""
RETRY = 2.0
"""Seconds between attempts of an answering party to reach the server again."""


def addresses(server: str) -> list[str]:
    """The addresses of servers in an option, separated by commas.

    Raises:
        ArgumentError: an address is repeated, or there are none or too many.
    """
    named = [address.strip() for address in server.split(",") if address.strip()]
    if not named or len(set(named)) < len(named) or len(named) > MAX_WORKERS:
        raise ArgumentError(
            f"--server names 1 to {MAX_WORKERS} different servers, with commas between them; got {server}"
        )
    return named


def keep_answering(
    party: Answering, name: str, stopped: threading.Event, server: str, retry: float = RETRY,
    registered: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Answer until stopped, and connect again whenever the server cannot be reached, which one line reports.

    Args:
        registered: called after each registration.

    Raises:
        IdentityError, VersionError: this party or the server has another identity or version than expected.
    """
    last = ""
    while not stopped.is_set():
        try:
            party.register(name)
            last = ""
            console.print(f"'{name}' answers through {server}; Ctrl-C stops", highlight=False)
            registered()
            party.wait()
        except FATAL:
            raise
        except NetworkError as error:
            if str(error) != last and not stopped.is_set():
                last = str(error)
                console.print(f"{last}; dialling again every {retry:g} s until it is there", highlight=False)
        stopped.wait(retry)


class MultiServer:
    """Connects one answering party to several servers, and to each of their workers.

    Args:
        party: with the first connection.
        name: under which it answers.
        servers: their addresses.
        stopped: set to stop it.
    """

    def __init__(self, party: Answering, name: str, servers: list[str], stopped: threading.Event):
        self._party, self._name, self._servers, self._stopped = party, name, servers, stopped
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, int], Answering] = {}
        self._error: IdentityError | VersionError | None = None

    def run(self) -> None:
        """Answer at all servers until stopped.

        Raises:
            IdentityError, VersionError: see `keep_answering`.
        """
        first, *others = self._servers
        for address in others:
            self._connect(address, 0)
        try:
            self._keep(self._party, first)
        except FATAL:
            self._stopped.set()
            raise
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all connections but the first one, which its owner closes."""
        with self._lock:
            others = list(self._connections.values())
        for other in others:
            other.leave()

    def _connect(self, address: str, worker: int) -> None:
        with self._lock:
            if (address, worker) in self._connections or self._stopped.is_set():
                return
            other = self._connections[address, worker] = self._party.at_server(address, worker)
        thread = threading.Thread(target=self._run_thread, args=(other, address), daemon=True, name=f"at {address}")
        thread.start()

    def _run_thread(self, other: Answering, address: str) -> None:
        try:
            self._keep(other, address)
        except FATAL as error:
            self._error = error
            self._stopped.set()
            with suppress(NetworkError):  # ends the wait of `run`
                self._party.connection.link.close(error)

    def _keep(self, party: Answering, address: str) -> None:
        def connect_workers() -> None:
            for worker in range(1, party.connection.place.workers):
                self._connect(address, worker)

        keep_answering(party, self._name, self._stopped, address, registered=connect_workers)


def models_by_name(models: Sequence[str]) -> dict[str, Path]:
    """The model files of a command line, by name: FILE alone, or NAME=FILE for each.

    Raises:
        ArgumentError: several models lack a name, or have the same.
    """
    found: dict[str, Path] = {}
    for argument in models:
        name, equals, path = argument.partition("=")
        if not equals or not NAME.fullmatch(name) or Path(argument).exists():
            name, path = "", argument
        if name in found:
            what = f"two models are called {name}" if name else "several models have a name each"
            raise ArgumentError(f"{what}: NAME=FILE NAME=FILE ..., which are asked for as PARTY/NAME")
        found[name] = Path(path)
    if len(found) > 1 and "" in found:
        raise ArgumentError(
            f"several models have a name each: NAME=FILE for {found['']}, which is asked for as PARTY/NAME"
        )
    return found


def reload_models(party: Answering, models: dict[str, Path]) -> None:
    """Read the model files again, and answer with their models; a model whose file cannot be read stays in use."""
    for name, path in models.items():
        try:
            if not party.offer(*read_model(path), name):
                log.info("%s has the model that is answered with", path)
        except NetworkError as error:
            log.error("the server has not heard of the model in %s yet: %s", path, error)
        except SectorchError as error:
            log.error("%s is not used, and the model before it goes on: %s", path, error)


PROGRAM = [sys.executable, "-c", "from sectorch.cli.main import main; main()"]
SHORT, LIVES = 10.0, 3
"""A worker that ends within so many seconds has failed. After so many failures in a row, all workers are stopped."""
PAUSE = 0.5
"""Seconds before a worker is started again."""
ENDING = 15.0
"""Seconds beyond the drain that workers have to end."""


def add_workers(p: Parser) -> None:
    p.add_argument(
        "--workers", type=number(int, lambda n: 1 <= n <= MAX_WORKERS, f"1 to {MAX_WORKERS}"), default=1,
        help="processes behind the port, each with clients of its own",
    )  # fmt: skip
    p.add_argument("--replica", default="", help="this server's name, where several share an address; kept over starts")
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)


def supervise(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run a server as several worker processes until this process is stopped; returns the exit status.

    The workers share the port (SO_REUSEPORT), and files that several processes may use. A client belongs to the worker
    that its name determines (`names.worker_of`), and connects until that one answers; an answering party is connected
    to each. A worker that ends is started again.

    Raises:
        ArgumentError: a key file cannot be made.
        PeerLostError: the address is in use.
    """
    key = _make_key(options)
    with ExitStack() as stack:
        listen = ["--listen", _reserve_port(stack, options.listen)]
        common = [*PROGRAM, "server", *_without_listen(arguments)]
        commands = [[*common, *_worker_options(options, key, i), *listen] for i in range(options.workers)]
        return _Workers(commands, options.drain).run()


class _Workers:
    """The worker processes of a server."""

    def __init__(self, commands: list[list[str]], drain: float):
        self._commands, self._drain = commands, drain
        self._processes: list[subprocess.Popen] = []
        self._started: list[float] = []
        self._short = [0] * len(commands)
        self._stopping = 0

    def run(self) -> int:
        signals = [signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # ignored in a script's background job
            signals.append(signal.SIGINT)
        previous = {sign: signal.signal(sign, self._on_signal) for sign in signals}
        try:
            for command in self._commands:
                self._processes.append(self._start(command))
                self._started.append(time.monotonic())
            while not self._stopping:
                for i, process in enumerate(self._processes):
                    code = process.poll()
                    if code is not None and not self._stopping:
                        failed = self._restart(i, code)
                        if failed:
                            return failed
                time.sleep(0.1)
            return 0
        finally:
            self._end()
            for sign, handler in previous.items():
                signal.signal(sign, handler)

    def _start(self, command: list[str]) -> subprocess.Popen:
        # In a session of its own, so that it gets a terminal's signals from this process only.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def _restart(self, i: int, code: int) -> int:
        """Start a worker again; returns an exit status where it has failed too often."""
        short = time.monotonic() - self._started[i] < SHORT
        self._short[i] = self._short[i] + 1 if short else 0
        if (code > 0 and short) or self._short[i] >= LIVES:
            console.print(f"worker {i} ended with {code} as soon as it was started; stopping")
            return code if code > 0 else 1
        console.print(f"worker {i} ended with {code}: its clients' calls are lost, and it is started again")
        time.sleep(PAUSE)
        self._processes[i], self._started[i] = self._start(self._commands[i]), time.monotonic()
        return 0

    def _on_signal(self, sign: int, _: object) -> None:
        if sign != signal.SIGHUP:
            self._stopping += 1
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(sign)

    def _end(self) -> None:
        for process in self._processes:
            if not self._stopping and process.poll() is None:
                process.terminate()
        end = time.monotonic() + self._drain + ENDING
        for process in self._processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _without_listen(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--listen`, of which the workers get one with the port's number."""
    found, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--listen":
            skip = True
        elif not argument.startswith("--listen="):
            found.append(argument)
    return found


def _worker_options(options: argparse.Namespace, key: Path | None, i: int) -> list[str]:
    """The options that differ between workers: store folder, file of receipts, address of monitoring."""
    own = ["--worker", str(i), "--store-budget", str(options.store_budget / options.workers)]
    if options.store is not None:
        used = options.store_used or options.store.with_name(f"{options.store.name}.used")
        own += ["--store", str(options.store / f"worker-{i}"), "--store-key", str(key)]
        own += ["--store-used", str(used.with_name(f"{used.name}.{i}"))]
    if options.receipts is not None:
        own += ["--receipts", str(options.receipts.with_suffix(f".{i}{options.receipts.suffix}"))]
    if options.manage is not None:
        host, _, port = options.manage.rpartition(":")
        own += ["--manage", f"{host}:{int(port) + i if port.isdigit() else port}"]
    return own


def _make_key(options: argparse.Namespace) -> Path | None:
    """The file of the store's key; made here, since workers would make it at the same time. None without a store."""
    if options.store is None:
        return None
    path = options.store_key or options.store / "store.key"
    try:
        options.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_file(path, os.urandom(32), 0o600)
        return path
    except OSError as error:
        raise ArgumentError(f"cannot keep material in {options.store}: {error.strerror}") from None


def _reserve_port(stack: ExitStack, address: str) -> str:
    """Reserve the port for the workers by a socket that does not listen; returns the address with its port.

    Raises:
        ArgumentError: the address is invalid.
        PeerLostError: it is in use.
    """
    host, number = host_port(address)
    try:
        for family, kind, _, _, where in socket.getaddrinfo(host, number, type=socket.SOCK_STREAM):
            to = (where[0], number, *where[2:])
            with socket.socket(family, kind) as probe:  # a shared socket could be bound to a port that is in use
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(to)
                number = probe.getsockname()[1]
            shared = stack.enter_context(socket.socket(family, kind))
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                shared.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            shared.bind((where[0], number, *where[2:]))
    except OSError as error:
        raise PeerLostError(f"cannot listen on {address}: {listen_error(error)}") from None
    return f"{address.rpartition(':')[0]}:{number}"


_ADDED = add_memory, add_store, add_patience, add_drain, add_log, add_receipts, add_limits
"""Options that a server and an answering party have in common."""


def server(arguments: Sequence[str] | None = None) -> int:
    """`sectorch server`: runs until Ctrl-C or SIGTERM, and then ends with exit code 0."""
    p = Parser(
        "server",
        "Run the server S, which stands between the clients and learns nothing. Ctrl-C stops it.",
        ["sectorch server --listen 0.0.0.0:7100 --cert server.pem --key server-key.pem --clients-ca ca.pem"],
    )
    add_certificate(p)
    p.add_argument("--clients-ca", type=Path, required=True, help="CA of the clients' certificates (PEM)")
    p.add_argument(
        "--identity", type=Path, help="identity key, for --receipts; NAME-identity.pem beside the certificate"
    )
    p.add_argument("--listen", default="0.0.0.0:7100", help="host:port to listen on")
    p.add_argument("--running", type=at_least(1), default=RUNNING, help="calls that run at the same time")
    p.add_argument(
        "--call-limit",
        type=above_zero,
        default=CALL,
        help="seconds, and one for each MiB, that a party may hold up a call",
    )
    p.add_argument("--idle", type=above_zero, default=IDLE, help="seconds without a call after which a session ends")
    for add in (*_ADDED, add_watch, add_core, add_workers):
        add(p)
    given = list(sys.argv[2:] if arguments is None else arguments)
    return command_status(p, arguments, lambda options, _: _server(options, given))


def _server(options: argparse.Namespace, given: list[str]) -> int:
    if options.replica:
        name_of(options.replica, "--replica", ArgumentError)
    waits = options.patience, options.call_limit
    read_own = lambda: check_own_files(options.cert, options.key, options.clients_ca, options.identity, serving=True)
    credentials = read_own()
    check_room(options)
    if options.workers > 1 and options.worker is None:
        return supervise(options, given)
    if options.worker is None:  # a worker shares its port with others
        check_free(options.listen)
    else:
        with suppress(OSError, AttributeError):  # the system stops a worker when its supervisor ends
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    begin_log(options)
    on_core(options, options.worker or 0)
    few_arenas()
    many_files()
    with monitoring(options) as watching:
        warm(tell)
        kept = store_of(options)
        place = ServerProcess(options.worker or 0, options.workers, options.replica)
        running = Server(
            options.listen, credentials, options.running, kept, *waits, receipts=options.receipts,
            limits=options.limits, idle=options.idle, place=place, memory=memory_of(options),
        )  # fmt: skip
        watching.begin(running, credentials, read_own)
        which = "" if options.worker is None else f"worker {options.worker}: "
        console.print(f"{which}listening on port {running.port}; Ctrl-C stops")
        on_hangup = hangup_handler(watching.check_renewal, running.reload)
        until_stopped(running.wait, running.drain, running.stop, options.drain, on_hangup)
    return 0


def answer(arguments: Sequence[str] | None = None) -> int:
    """`sectorch answer`: runs until Ctrl-C or SIGTERM, and then ends with exit code 0."""
    p = Parser(
        "answer",
        "Answer queries with a model of your own, which nobody sees. Ctrl-C stops it.",
        [
            "sectorch answer model.safetensors --name clinic --cert clinic.pem --key clinic-key.pem --ca ca.pem",
            "sectorch answer lenet=a.safetensors vgg=b.safetensors --name clinic ...   asked for as clinic/lenet",
        ],
    )
    p.add_argument(
        "model", nargs="+", help="a model file, of save_model or `sectorch convert`; NAME=FILE for each of several"
    )
    p.add_argument("--name", help="the name in this party's certificate, which it is anyway: any other is refused")
    p.add_argument(
        "--answer-unchecked", action="store_true", help="answer questions that are asked with --no-range-check too"
    )
    p.add_argument(
        "--audited", type=at_least(1), default=1, metavar="N",
        help="answer those only who use one of N or more calls that they deal, and have the others looked at",
    )  # fmt: skip
    p.add_argument("--verified", action="store_true", help="answer those only who prove what they deal")
    p.add_argument(
        "--audit-server", nargs="?", const=True, default=False, metavar="KEY",
        help="check what the server computes in clients' decoys; KEY is the fingerprint of its identity key",
    )  # fmt: skip
    p.add_argument(
        "--keep-decoys", metavar="FOLDER",
        help="keep each decoy that was checked for an auditor, who runs `sectorch check-model`",
    )  # fmt: skip
    p.add_argument("--imprecise", action="store_true", help="answer with a model that loses digits in fixed point, too")
    p.add_argument("--replica", action="store_true", help="others of this party answer too, with stores of their own")
    for add in (add_client, add_pins, *_ADDED, add_core, add_watch):
        add(p)
    return command_status(p, arguments, _answer)


def _answer(options: argparse.Namespace, _: Console) -> None:
    check_room(options)
    begin_log(options)
    on_core(options)
    few_arenas()
    with monitoring(options) as watching:
        files = models_by_name(options.model)
        (first, path), *others = files.items()
        description, weights = read_model(path)
        read_own = lambda: check_own_files(options.cert, options.key, options.ca, options.identity)
        credentials = read_own()
        name = credentials.name
        if options.name not in (None, name):
            raise IdentityError(
                f"--name {readable(options.name, LONGEST)!a} is not the name in {options.cert}: that is '{name}': "
                f"leave --name out, or name another certificate"
            )
        kept = store_of(options)
        known, patience = pins_of(options), options.patience
        servers = addresses(options.server)
        warm(tell)
        party = Answering(
            servers[0], credentials, description, weights, known, kept, patience, options.answer_unchecked,
            options.receipts, options.limits, model=first, replica=options.replica,
            audited=options.audited, verified=options.verified, imprecise=options.imprecise,
            memory=memory_of(options), audit_server=options.audit_server, keep_decoys=options.keep_decoys,
        )  # fmt: skip
        for model, path in others:
            party.offer(*read_model(path), model)
        watching.begin(party, credentials, read_own)
        stopped = threading.Event()
        connections = MultiServer(party, name, servers, stopped)

        def drain(seconds: float) -> bool:
            stopped.set()
            return party.drain(seconds)

        def stop() -> None:
            stopped.set()
            connections.close()
            party.close()

        on_hangup = hangup_handler(watching.check_renewal, party.reload, lambda: reload_models(party, files))
        until_stopped(connections.run, drain, stop, options.drain, on_hangup)


# `sectorch up`: a party of a federation, in all its functions.


def up(arguments: Sequence[str] | None = None) -> int:
    """`sectorch up`: runs until Ctrl-C or SIGTERM, which is how it ends, with exit code 0."""
    p = Parser(
        "up",
        "Be a party of a federation: serve as its server, answer with a model, and take part in programs, each only\n"
        "if this party has accepted it (`sectorch federation accept`). Ctrl-C stops it.",
        [
            "sectorch up federation.toml --as north",
            "sectorch up federation.toml --as server        where [federation] names the server's address",
        ],
    )
    p.add_argument("file", type=Path, help="the federation file")
    p.add_argument("--as", dest="name", required=True, help="which party this process is, or the server")
    p.add_argument("--folder", type=Path, help="where its certificate and keys are, whatever its own file says")
    p.add_argument(
        "--drain", type=not_negative, help="seconds that SIGTERM leaves to what runs, whatever its own file says"
    )
    add_core(p)
    add_log(p)
    add_watch(p)
    return command_status(p, arguments, _up)


def _up(options: argparse.Namespace, _: Console) -> None:
    federated, name = read_federation(options.file), options.name
    if name not in federated.servers:
        federated.member(name)
    own = read_party_config(options.file, name, options.folder)
    own.check_room(name)
    options.log = options.log or own.files.get("log")
    begin_log(options)
    on_core(options)
    seconds = own.limits.drain_seconds if options.drain is None else options.drain
    with monitoring(options) as watching, _FederationParty(options.file, federated, name, own) as party:
        party.start_services()
        watching.begin(party, party.read_credentials(), party.read_credentials)
        party.start_threads()
        until_stopped(party.wait, party.drain, party.stopped.set, seconds, watching.check_renewal)
    if party.error is not None:
        raise party.error


Service = Server | Answering | PartyService


class _FederationParty:
    """What one party of a federation does in this process: its server, its model, and its part of programs.

    The end of the block stops the services, the server last.
    """

    def __init__(self, path: Path, federated: FederationFile, name: str, own: PartyConfig):
        self._path, self._federated, self._name, self._own = path, federated, name, own
        self._services: list[Service] = []
        self._stops: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []
        self._failed = threading.Event()
        self.error: BaseException | None = None
        self.stopped = threading.Event()

    def __enter__(self) -> _FederationParty:
        return self

    def __exit__(self, *_: object) -> None:
        for stop in self._stops:
            stop()

    def read_credentials(self) -> Credentials:
        if self._name in self._federated.servers:
            return server_credentials(self._name, self._own.folder)
        return credentials(self._federated, self._name, self._own.folder)

    def start_services(self) -> None:
        """Start what this party serves and accepts. The server's port opens last, after all other checks.

        Raises:
            ArgumentError: it is no server and accepts nothing, or a file is not right.
        """
        policy = AcceptancePolicy(self._own, self._federated, self._name)
        if any(rule.kind != "model" for rule in policy.accepted):
            self._start_programs(policy)
        if policy.model is not None:
            self._start_answering(policy.model)
        if self._name in self._federated.servers:
            self._start_server()
        if not self._services:
            raise ArgumentError(
                f"'{self._name}' is no server and accepts nothing yet: `sectorch federation accept {self._path} "
                f"PROGRAM --as {self._name}` writes what it accepts into {self._own.path}"
            )

    def _start_programs(self, policy: AcceptancePolicy) -> None:
        name, federated = self._name, self._federated
        if name == SERVER and federated.server and not self._is_member:
            raise ArgumentError(
                f"{self._own.path}: the server is no party of the federation, and takes part in no program"
            )
        policy.check()
        own = credentials(federated, name, self._own.folder)
        service = PartyService(self._path, federated, self._own, policy, own)
        self._add(service, service.stop, lambda: service.keep(self.stopped, tell))

    def _start_answering(self, rule: AcceptanceRule) -> None:
        name, own, federated = self._name, self._own, self._federated
        if not self._is_member:
            raise ArgumentError(f"{own.path}: '{name}' is no party with an identity, and cannot answer with a model")
        description, weights = read_model(own.resolve(rule.what))
        address = federated.servers[name if name in federated.servers else federated.home(name)]
        clients = ListedPins({name: federated.member(name).identity for name in rule.starters}, str(own.path))
        party = Answering(
            address, credentials(federated, name, own.folder), description, weights, clients,
            self._store("A"), own.limits.patience_seconds, rule.unchecked, own.receipts(name, "A"),
            audited=rule.audited, verified=rule.verified, imprecise=rule.imprecise,
        )  # fmt: skip
        self._add(party, party.close, lambda: keep_answering(party, name, self.stopped, address))

    def _start_server(self) -> None:
        few_arenas()
        many_files()
        name, own = self._name, self._own
        shown, address, limits = server_credentials(name, own.folder), self._federated.servers[name], own.limits
        server = Server(
            own.listen or listen_address(address), shown, limits.calls, self._store("S"),
            limits.patience_seconds, limits.call_seconds, receipts=own.receipts(name, "S"),
        )  # fmt: skip
        tell(f"'{name}' serves on port {server.port}; Ctrl-C stops")
        self._add(server, server.stop)

    @property
    def _is_member(self) -> bool:
        return self._name in {member.name for member in self._federated.members}

    def _store(self, role: str) -> Store | None:
        folder, key = self._own.files.get("store"), self._own.files.get("store_key")
        budget = int(self._own.limits.store_gb * 1e9)
        used = None if folder is None else folder.with_name(f"{folder.name}-{role}.used")
        return None if folder is None else Store(folder / role, key, budget, used)

    def _add(self, service: Service, stop: Callable[[], None], work: Callable[[], None] | None = None) -> None:
        """Add a service that has started; `work` is its loop, if it has no thread of its own."""
        self._services.append(service)
        self._stops.append(stop)
        if work is not None:
            self._threads.append(threading.Thread(target=self._run_thread, args=(work,), daemon=True))

    def _run_thread(self, work: Callable[[], None]) -> None:
        """Run a service's loop; its error ends the process."""
        try:
            work()
        except BaseException as error:
            self.error = error
            self._failed.set()

    def start_threads(self) -> None:
        """Start the services' loops."""
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait until a loop fails."""
        self._failed.wait()

    def drain(self, seconds: float) -> bool:
        """Begin nothing more; returns whether all that runs ended within `seconds`."""
        self.stopped.set()
        drained = [service.drain(seconds) for service in self._services]
        return all(drained)

    def unready(self) -> str:
        return next((why for service in self._services if (why := service.unready())), "")

    def renew(self, credentials: Credentials) -> None:
        """Renew the server's credentials, if there is a server; the other services read theirs when they connect."""
        for service in [s for s in self._services if isinstance(s, Server)] or self._services:
            service.renew(credentials)

    def figures(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for service in self._services:
            found.update(service.figures())
        return dict(found)


def hangup_handler(*actions: Callable[[], None]) -> Callable[[], None]:
    """A handler of SIGHUP that runs these in turn, in a thread: the interrupted thread may hold locks they need."""

    def run() -> None:
        for action in actions:
            action()

    return lambda: threading.Thread(target=run, daemon=True, name="on SIGHUP").start()


class _Terminated(BaseException):
    """Raised in the main thread by SIGTERM."""


def until_stopped(
    wait: Callable[[], None],
    drain: Callable[[float], bool],
    stop: Callable[[], None],
    seconds: float,
    on_hangup: Callable[[], None] = lambda: None,
) -> None:
    """Run `wait` until a signal, then `stop`.

    SIGTERM lets running calls end first, for `seconds` at most; Ctrl-C and a second SIGTERM do not. SIGHUP, which a
    closed terminal sends too, ends nothing and calls `on_hangup`, to read changed files.
    """

    def hung_up(*_: object) -> None:
        console.print("SIGHUP: going on, and looking for new files; SIGTERM stops")
        on_hangup()

    def on(sign: signal.Signals, error: type[BaseException]) -> None:
        signal.signal(sign, lambda *_: (_ for _ in ()).throw(error()))

    on(signal.SIGTERM, _Terminated)
    signal.signal(signal.SIGHUP, hung_up)
    try:
        try:
            wait()
        except _Terminated:
            on(signal.SIGTERM, KeyboardInterrupt)
            console.print(f"stopping; running calls have {seconds:g} s to end, and no more are begun", highlight=False)
            if not drain(seconds):
                console.print("stopping although calls are running")
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        stop()
