"""`sectorch up`: run a party of a federation in all its functions (server, model, programs) until it is stopped."""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ...cli.command import Parser, command_status, not_negative
from ...errors import ArgumentError
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
from ..federation.policy import AcceptanceRule, Policy
from ..federation.service import PartyService
from ..identity.identity import Credentials
from ..parties.answer import Answering
from ..parties.server import Server
from ..store import Store
from .options import add_core, add_log, add_watch, begin_log, few_arenas, many_files, monitoring, on_core, tell
from .serve import keep_answering, until_stopped


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
    stopped, background = threading.Event(), _Background()
    seconds = own.limits.drain_seconds if options.drain is None else options.drain
    with monitoring(options) as watching, _Services() as services:
        for make in (_start_programs, _start_answering, _start_server):  # the port opens after all other checks
            services.all += make(options.file, federated, name, own, stopped, background)
        if not services.all:
            raise ArgumentError(
                f"'{name}' is no server and accepts nothing yet: `sectorch federation accept {options.file} PROGRAM "
                f"--as {name}` writes what it accepts into {own.path}"
            )
        read_again = (
            (lambda: server_credentials(name, own.folder))
            if name in federated.servers
            else (lambda: credentials(federated, name, own.folder))
        )
        watching.begin(services, read_again(), read_again)
        for thread in background.threads:
            thread.start()

        def drain(seconds: float) -> bool:
            stopped.set()
            return services.drain(seconds)

        until_stopped(background.wait, drain, stopped.set, seconds, watching.check_renewal)
    if background.error is not None:
        raise background.error


class _AnsweringService:
    """An answering party with the interface of the other services."""

    def __init__(self, party: Answering):
        self.drain, self.stop = party.drain, party.close
        self.unready, self.figures, self.renew = party.unready, party.figures, party.renew


Service = Server | _AnsweringService | PartyService


class _Services:
    """The services of this process. The end of the block stops them, the server last."""

    def __init__(self):
        self.all: list[Service] = []

    def __enter__(self) -> _Services:
        return self

    def __exit__(self, *_: object) -> None:
        for service in self.all:
            service.stop()

    def drain(self, seconds: float) -> bool:
        drained = [service.drain(seconds) for service in self.all]
        return all(drained)

    def unready(self) -> str:
        return next((why for service in self.all if (why := service.unready())), "")

    def renew(self, credentials: Credentials) -> None:
        """Renew the server's credentials, if there is a server; the other services read theirs when they connect."""
        for service in [s for s in self.all if isinstance(s, Server)] or self.all:
            service.renew(credentials)

    def figures(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for service in self.all:
            found.update(service.figures())
        return dict(found)


class _Background:
    """The threads beside the main thread, and the first error, which ends the process."""

    def __init__(self):
        self.error: BaseException | None = None
        self._event = threading.Event()
        self.threads: list[threading.Thread] = []

    def add(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.error = error
                self._event.set()

        self.threads.append(threading.Thread(target=run, daemon=True))

    def wait(self) -> None:
        self._event.wait()


def _start_server(
    path: Path,
    federated: FederationFile,
    name: str,
    own: PartyConfig,
    stopped: threading.Event,
    background: _Background,
) -> list[Service]:
    if name not in federated.servers:
        return []
    few_arenas()
    many_files()
    given = server_credentials(name, own.folder)
    listen = own.listen or _listen_address(federated.servers[name])
    limits, receipts = own.limits, own.receipts(name, "S")
    server = Server(
        listen, given, limits.calls, _store(own, "S"), limits.patience_seconds, limits.call_seconds, receipts=receipts
    )
    tell(f"'{name}' serves on port {server.port}; Ctrl-C stops")
    return [server]


def _start_answering(
    path: Path,
    federated: FederationFile,
    name: str,
    own: PartyConfig,
    stopped: threading.Event,
    background: _Background,
) -> list[Service]:
    accepted = _policy(own, federated, name).model
    if accepted is None:
        return []
    if name not in {member.name for member in federated.members}:
        raise ArgumentError(f"{own.path}: '{name}' is no party with an identity, and cannot answer with a model")
    description, weights = read_model(own.within(accepted.what))
    address = federated.servers[name if name in federated.servers else federated.home(name)]
    party = Answering(
        address, credentials(federated, name, own.folder), description, weights, _clients(accepted, federated, own),
        _store(own, "A"), own.limits.patience_seconds, accepted.unchecked, own.receipts(name, "A"),
        audited=accepted.audited, verified=accepted.verified, imprecise=accepted.imprecise,
    )  # fmt: skip
    background.add(lambda: keep_answering(party, name, stopped, address))
    return [_AnsweringService(party)]


def _start_programs(
    path: Path,
    federated: FederationFile,
    name: str,
    own: PartyConfig,
    stopped: threading.Event,
    background: _Background,
) -> list[Service]:
    policy = _policy(own, federated, name)
    if all(entry.kind == "model" for entry in policy.accepted):
        return []
    if name == SERVER and federated.server and name not in {member.name for member in federated.members}:
        raise ArgumentError(f"{own.path}: the server is no party of the federation, and takes part in no program")
    policy.check()
    given = credentials(federated, name, own.folder)
    running = PartyService(path, federated, own, policy, given)
    background.add(lambda: running.keep(stopped, tell))
    return [running]


def _policy(own: PartyConfig, federated: FederationFile, name: str) -> Policy:
    return Policy(own, federated, name)


def _clients(accepted: AcceptanceRule, federated: FederationFile, own: PartyConfig) -> ListedPins:
    return ListedPins({name: federated.member(name).identity for name in accepted.starters}, str(own.path))


def _store(own: PartyConfig, role: str) -> Store | None:
    folder = own.files.get("store")
    return None if folder is None else Store(folder / role, own.files.get("store_key"), int(own.limits.store_gb * 1e9))


def _listen_address(address: str) -> str:
    """Where a server with this address listens: a loopback address itself, otherwise on all interfaces."""
    host, _, port = address.rpartition(":")
    return address if host in ("localhost", "127.0.0.1", "[::1]") else f"0.0.0.0:{port}"
