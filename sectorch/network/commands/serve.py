"""`sectorch server` and `sectorch answer`: the processes that run until they are stopped."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ...cli.command import Parser, above_zero, at_least, ended
from ...nn.model_file import read_model
from ..identity.ready import ready
from ..parties.answer import Answering
from ..parties.place import Place
from ..parties.server import RUNNING, Server
from ..parties.serving import IDLE
from ..store.store import Store
from ..warm import warm
from ..wire.deadline import CALL
from ..wire.listen import check_free
from .everywhere import Everywhere, addresses
from .offered import named, read_anew
from .options import (
    add_certificate,
    add_client,
    add_drain,
    add_limits,
    add_log,
    add_patience,
    add_pins,
    add_receipts,
    add_store,
    begin_log,
    check_room,
    console,
    known_pins,
    tell,
)
from .process import add_core, few_arenas, many_files, on_core
from .watching import add_watch, watched
from .workers import add_workers, checked, in_worker, supervise


def server(arguments: Sequence[str] | None = None) -> int:
    """`sectorch server`: runs until Ctrl-C or SIGTERM, which is how it ends, with exit code 0."""
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
    add_store(p)
    add_patience(p)
    add_drain(p)
    add_log(p)
    add_receipts(p)
    add_limits(p)
    add_watch(p)
    add_core(p)
    add_workers(p)
    given = list(sys.argv[2:] if arguments is None else arguments)
    return ended(p, arguments, lambda options, _: _server(options, given))


def _server(options: argparse.Namespace, given: list[str]) -> int:
    checked(options)
    waits = options.patience, options.call_limit
    read_own = lambda: ready(options.cert, options.key, options.clients_ca, options.identity, serving=True)
    credentials = read_own()
    check_room(options)
    if options.workers > 1 and options.worker is None:
        return supervise("server", options, given)
    if options.worker is None:  # a worker shares its port with others
        check_free(options.listen)
    in_worker(options)
    begin_log(options)
    on_core(options, options.worker or 0)
    few_arenas()
    many_files()
    with watched(options) as watching:
        warm(tell)
        kept = Store(options.store, options.store_key, int(options.store_budget * 1e9))
        place = Place(options.worker or 0, options.workers, options.replica)
        running = Server(
            options.listen, credentials, options.running, kept, *waits, receipts=options.receipts,
            limits=options.limits, idle=options.idle, place=place,
        )  # fmt: skip
        watching.begin(running, credentials, read_own)
        which = "" if options.worker is None else f"worker {options.worker}: "
        console.print(f"{which}listening on port {running.port}; Ctrl-C stops")
        until_stopped(running.wait, running.drain, running.stop, options.drain, both(watching.look, running.reload))
    return 0


def answer(arguments: Sequence[str] | None = None) -> int:
    """`sectorch answer`: runs until Ctrl-C or SIGTERM, which is how it ends, with exit code 0."""
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
    p.add_argument("--name", required=True, help="the name in this party's certificate")
    p.add_argument(
        "--answer-unchecked", action="store_true", help="answer questions that are asked with --no-range-check too"
    )
    p.add_argument(
        "--audited", type=at_least(1), default=1, metavar="N",
        help="answer those only who use one of N or more calls that they deal, and have the others looked at",
    )  # fmt: skip
    p.add_argument("--verified", action="store_true", help="answer those only who prove what they deal")
    p.add_argument("--imprecise", action="store_true", help="answer with a model that loses digits in fixed point, too")
    p.add_argument("--replica", action="store_true", help="others of this party answer too, with stores of their own")
    add_client(p)
    add_pins(p)
    add_store(p)
    add_patience(p)
    add_drain(p)
    add_log(p)
    add_receipts(p)
    add_limits(p)
    add_core(p)
    add_watch(p)
    return ended(p, arguments, _answer)


def _answer(options: argparse.Namespace, _: Console) -> None:
    check_room(options)
    begin_log(options)
    on_core(options)
    few_arenas()
    with watched(options) as watching:
        files, name = named(options.model), options.name
        (first, path), *others = files.items()
        description, weights = read_model(path)
        read_own = lambda: ready(options.cert, options.key, options.ca, options.identity)
        credentials = read_own()
        kept = Store(options.store, options.store_key, int(options.store_budget * 1e9))
        known, patience = known_pins(options), options.patience
        servers = addresses(options.server)
        warm(tell)
        party = Answering(
            servers[0], credentials, description, weights, known, kept, patience, options.answer_unchecked,
            options.receipts, options.limits, model=first, replica=options.replica,
            audited=options.audited, verified=options.verified, imprecise=options.imprecise,
        )  # fmt: skip
        for model, path in others:
            party.offer(*read_model(path), model)
        watching.begin(party, credentials, read_own)
        stopped = threading.Event()
        everywhere = Everywhere(party, name, servers, stopped)

        def drain(seconds: float) -> bool:
            stopped.set()
            return party.drain(seconds)

        def stop() -> None:
            stopped.set()
            everywhere.close()
            party.close()

        def anew() -> None:
            party.reload()
            read_anew(party, files)

        until_stopped(everywhere.run, drain, stop, options.drain, both(watching.look, anew))


def both(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    """What SIGHUP has a party do: in a thread, as a signal must not wait for locks that whoever it interrupts holds."""
    one_after_another = lambda: (one(), other())
    return lambda: threading.Thread(target=one_after_another, daemon=True, name="on SIGHUP").start()


class _Terminated(BaseException):
    """SIGTERM came."""


def until_stopped(
    wait: Callable[[], None],
    drain: Callable[[float], bool],
    stop: Callable[[], None],
    seconds: float,
    look: Callable[[], None] = lambda: None,
) -> None:
    """SIGTERM lets running calls end first, for so many seconds; Ctrl-C, or a second SIGTERM, does not. SIGHUP, as of
    a terminal that is closed, ends nothing; it has the files of the certificate and of limits looked at."""

    def hung_up(*_: object) -> None:
        console.print("SIGHUP: going on, and looking for new files; SIGTERM stops")
        look()

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
