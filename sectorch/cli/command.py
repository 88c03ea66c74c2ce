"""The common parts of all commands: help with examples, one-line errors, exit codes, `--json`, `--debug`, progress.

| exit code | when |
| --- | --- |
| 0 | done |
| 1 | the run failed, or its data or settings do not fit; one line on standard error says what to do |
| 2 | the command line is invalid |
| 130 | stopped by Ctrl-C |
| 141 | the reader of its output has closed it, as `head` does |
| 143 | stopped by SIGTERM, in the same way as by Ctrl-C; `server`, `answer` and `up` drain, and end with 0 |

Ctrl-C is ignored if the process that started the command ignores it, as a shell script does for commands behind `&`.
SIGTERM stops it also then.

Results go to standard output: tables, or with `--json` JSON only. Then all other output goes to standard error.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..config import LINKS, Link, link_of
from ..display import require
from ..errors import ArgumentError, PlotError, SectorchError

DONE, FAILED, USAGE, STOPPED, UNREAD, TERMINATED = 0, 1, 2, 130, 141, 143

GOES_ON = "stopped; what is finished is in {out}, and the same command goes on from there"
"""What a command prints after Ctrl-C if its run can be continued."""

_ROOM = 1 << 20
"""Bytes for which a folder must have room."""
Run = Callable[[argparse.Namespace, Console], Any]


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows examples unchanged, and each option's default unless its help text has it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if (
            action.default is None
            or action.default is False
            or action.default == []
            or "default" in (action.help or "")
        ):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Options of one command. Help ends with examples; an error is one line, without the usage above it.

    Args:
        name: the word after `sectorch`.
        description: what the command does, for its help.
        examples: command lines, some with a comment after two or more spaces.
    """

    def __init__(self, name: str, description: str, examples: Sequence[str]):
        super().__init__(
            prog=f"sectorch {name}",
            description=description,
            epilog="\n  ".join(("examples:", *examples)),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self.set_defaults(json=False)
        # It has no default, so that the parser of an action does not overwrite a --debug before the action.
        self.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )

    rest: str | None = None
    """The name of the option that gets the arguments after `--`; None allows no such arguments."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (-[^ :]+): (?=must be )", lambda m: m[1].split("/")[0] + " ", message)
        if message.startswith("unrecognized arguments: "):
            wrong = message.split()[2].split("=")[0]
            near = difflib.get_close_matches(wrong, self._option_string_actions, 1, 0.7)
            message += f" (perhaps {near[0]})" if near else ""
        self.refuse(f"{message}; {self.prog} --help lists the options")

    def refuse(self, message: str) -> NoReturn:
        """End the process with an error of one line."""
        self.exit(USAGE, f"error: {message}\n")

    def takes_json(self, what: str) -> None:
        """Add `--json`."""
        self.add_argument("--json", action="store_true", help=f"print {what} as JSON, and nothing else")

    def writes_results(self, folder: str) -> None:
        """Add the options of a command that writes a folder of results: `--out`, `--no-plots`, `--json`."""
        self.add_argument("--out", type=Path, default=Path(folder), help="folder of results (default %(default)s)")
        self.add_argument("--no-plots", action="store_true", help="draw nothing; plots need matplotlib")
        self.takes_json("results.json")


Report = tuple[dict[str, Any], str]
"""What an action made or found, for JSON and in words."""
Action = Callable[[argparse.Namespace], Report]


class ActionParser(Parser):
    """Options of one action of a command, as `sectorch keys issue`. All actions take `--json`."""

    def __init__(self, prog: str, line: str, run: Action, example: str):
        example = f"{prog.rpartition(' ')[0]} {example}"
        super().__init__(prog.removeprefix("sectorch "), f"{line[0].upper()}{line[1:]}.", [example])
        self.set_defaults(run=run)
        self.takes_json("what was made or found")


def action_adder(parser: Parser) -> Callable[[str, Action, str], ActionParser]:
    """A function that adds an action to a command: takes its line of help, what runs it, and an example."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=ActionParser)
    return lambda line, run, example: actions.add_parser(
        example.split()[0], help=line, line=line, run=run, example=example
    )


def run_action(options: argparse.Namespace, _: Console) -> None:
    """Run the action that was named, and print its report."""
    facts, words = options.run(options)
    print_json(facts) if options.json else print(words)


class OldOption(argparse.Action):
    """An option's old name, for one release; prints its new name, `const`, on standard error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        print(f"{option_string} is {self.const} now and will be removed", file=sys.stderr)
        setattr(namespace, self.dest, values)


def number(kind: type, allows: Callable[[Any], bool], limits: str) -> Callable[[str], Any]:
    """The `type` of an option that takes numbers for which `allows` is true. An error has the option and `limits`."""

    def read(word: str) -> Any:
        value = kind(word)
        if not allows(value):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {word}")
        return value

    read.__name__ = kind.__name__  # argparse has this name in its error
    return read


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an option that takes integers of at least `least`."""
    return number(int, lambda value: value >= least, f"at least {least}")


above_zero = number(float, lambda value: value > 0, "above 0")
not_negative = number(float, lambda value: value >= 0, "at least 0")


def add_link(parser: Parser) -> None:
    """Add the options of the parties' link; `chosen_network` reads them."""
    names = " or ".join(f"{name} ({link})" for name, link in LINKS.items())
    parser.add_argument("--network", default="lan", choices=tuple(LINKS), help=f"the parties' link: {names}")
    parser.add_argument("--round-trip", type=above_zero, metavar="MS", help="its round trip, instead of the network's")
    parser.add_argument("--mbit", type=above_zero, help="its Mbit/s each way, instead of the network's")


def chosen_network(options: argparse.Namespace) -> str | Link:
    """What the options say for `Scheme.network`.

    Raises:
        ArgumentError: numbers that are no link.
    """
    link = link_of(options.network, options.round_trip, options.mbit)
    return options.network if link == LINKS[options.network] else link


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came: open files and connections are closed as after Ctrl-C."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise `TerminatedError` on SIGTERM in the block, unless SIGTERM has a handler already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_: Any) -> NoReturn:
    raise TerminatedError


class ParserRequest(list[str]):
    """Given to a command as its arguments: it leaves its parser here, and does nothing else."""

    parser: Parser


def command_status(parser: Parser, arguments: Sequence[str] | None, run: Run, stopped: str = "stopped") -> int:
    """Run a command; returns its exit status (see the top of this file).

    Args:
        arguments: by default those of the process.
        run: called with the options and a console; returns the exit status, or None for 0.
        stopped: printed after Ctrl-C and SIGTERM; `{out}` stands for the option of that name.

    Raises:
        SystemExit: after an invalid command line, and after help.
        Exception: any error of `run`, with `--debug`.
    """
    if isinstance(arguments, ParserRequest):
        arguments.parser = parser
        return DONE
    words = sys.argv[1:] if arguments is None else list(arguments)
    cut = words.index("--") if parser.rest is not None and "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    if parser.rest is not None:
        setattr(options, parser.rest, words[cut + 1 :])
    errors = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    try:
        with terminable():
            return run(options, Console(stderr=options.json)) or DONE
    except KeyboardInterrupt as interrupt:
        errors.print(stopped.format(**vars(options)))
        return TERMINATED if isinstance(interrupt, TerminatedError) else STOPPED
    except BrokenPipeError:  # standard output was closed; a lost connection is a SectorchError
        raise
    except Exception as error:
        if "debug" in options:
            raise
        errors.print(f"error: {error_line(error)}")
        return FAILED


def error_line(error: Exception) -> str:
    """An error as one line for the user."""
    text = " ".join(str(error).split())
    if isinstance(error, SectorchError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    if at := _in_users_code(error):
        return f"{at}: {type(error).__name__}: {text}; --debug shows all of it"
    return f"{type(error).__name__}: {text}; this should not happen: please report it with what --debug adds"


def _in_users_code(error: Exception) -> str:
    """The last file and line of an error's traceback outside this package and installed packages; empty if none."""
    ours = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    users = [f for f in frames if not f.filename.startswith(ours) and "-packages" not in f.filename]
    return f"{users[-1].filename}, line {users[-1].lineno}" if users else ""


def print_json(value: Any) -> None:
    """Print a result as JSON on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def writable(folder: Path, named: str = "--out") -> None:
    """Check, before a long run, that files can be written to a folder, which need not exist; leaves no file.

    Args:
        named: the option that names the folder.

    Raises:
        ArgumentError: they cannot be written.
    """
    there, error = room_error(folder)
    if error is not None and is_full(error):
        raise ArgumentError(
            f"cannot write to {folder}: {error.strerror} ({there} has less than {_ROOM >> 20} MiB, which are needed to "
            f"start); make room, or name another with {named}"
        )
    if error is not None:
        raise ArgumentError(f"cannot write to {folder}: {error.strerror} ({there}); name another with {named}")


def room_error(folder: Path) -> tuple[Path, OSError | None]:
    """Why no file of `_ROOM` bytes can be written to a folder, which need not exist; leaves no file.

    Returns:
        The folder that was tried, the first that exists, and the error, or None.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_ROOM))
            file.flush()
    except OSError as error:
        return there, error
    return there, None


def is_full(error: OSError) -> bool:
    """Whether an error says that a disk, or a share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def bars(console: Console | None = None) -> Progress:
    """The progress bars of all commands."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True)


def run_with_screen(work: Callable[[], Any], screen: RenderableType, console: Console) -> Any:
    """The result of `work()`; on a terminal, `screen` is shown and updated meanwhile."""
    if not console.is_terminal:
        return work()
    with Live(screen, console=console, transient=True, refresh_per_second=4):
        return work()


def plots_wanted(options: argparse.Namespace, console: Console) -> bool:
    """Whether plots are wanted and matplotlib is installed; prints a line if it is not."""
    if options.no_plots:
        return False
    try:
        require()
    except PlotError as error:
        console.print(f"no plots: {error}", style="yellow", markup=False)
        return False
    return True
