"""The command of a paper: options from its settings, several seeds, values and controls, an estimate, files, tables."""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.console import Console, RenderableType

from ..cli.command import GOES_ON, Parser, at_least, ended, plotting, print_json, watched, writable
from ..data.datasets import ROOT_HELP
from .errors import FederationError
from .estimate import Estimate, agree
from .folder import RunFolder
from .options import Options, add_options, chosen, declared, sweeps
from .outcome import Outcome
from .parallel import KINDS, Workers
from .parties import Parties, Simulation
from .study import Study
from .watch import Screen, Watch

F = TypeVar("F", bound=Options)
S = TypeVar("S", bound=Options)


class Join(Protocol):
    """Makes this process one party of a federation."""

    def __call__(
        self, path: Path, as_: str, folder: Path | None, *, needs: Sequence[str]
    ) -> AbstractContextManager[Parties]: ...


class Run(Protocol):
    """What a paper's class is to the harness."""

    def run(self, watch: Watch | None = None) -> Outcome: ...

    def so_far(self) -> RenderableType: ...

    def estimate(self) -> Estimate | None: ...


@dataclass(frozen=True)
class Place:
    """Where a run keeps its work, and who does it.

    Args:
        out: its own folder.
        shared: a folder for what several runs of one command have in common.
        workers: that work beside each other.
        root: where data sets lie.
        parties: who is here; all of them unless given.
    """

    out: Path
    shared: Path
    workers: Workers
    root: Path | None = None
    parties: Parties = field(default_factory=Simulation)

    def own(self, seed: int) -> int:
        """The seed of what a party draws for itself, its first weights and its batches.

        Where all parties are here it is that of the command line. Parties apart all know that one: each draws its own
        from the operating system, once for a run folder.
        """
        if isinstance(self.parties, Simulation):
            return seed
        folder = RunFolder(self.out)
        kept = folder.record("own")
        if kept is None:
            kept = {"seed": int.from_bytes(os.urandom(7), "big")}
            folder.keep("own", record=kept)
        return int(kept["seed"])


@dataclass(frozen=True)
class Command(Generic[F, S]):
    """
    Args:
        name, about, examples: for help.
        federation: who takes part, with which data; with a field `seed`.
        settings: of the algorithm; a field `seed` takes the federation's.
        cast: the roles of a federation that take part.
        prepare: makes a run; it checks everything that can be known before any work.
        base: the settings that a federation's data set has unless the command line says otherwise.
        controls: what a run can be compared with, by name: other settings, from the run's own.
    """

    name: str
    about: str
    examples: Sequence[str]
    federation: F
    settings: S
    cast: Callable[[F, S], Sequence[str]]
    prepare: Callable[[F, S, Place], Run]
    base: Callable[[F], S]
    controls: Mapping[str, Callable[[S], S]] = field(default_factory=dict)

    def parser(self, join: Join | None = None) -> Parser:
        """The options: the federation's, the settings', and those of all papers' commands."""
        p = Parser(self.name, self.about, tuple(self.examples))
        p.add_argument("--data-root", type=Path, help=ROOT_HELP)
        add_options(p, type(self.federation))
        add_options(p, type(self.settings))
        if self.controls:
            named = f"compare with: {', '.join(self.controls)} (all, if none is named)"
            p.add_argument("--controls", nargs="*", choices=list(self.controls), metavar="NAME", help=named)
        p.add_argument(
            "--processes", dest="worker_count", type=at_least(1), default=1, metavar="N", help="that share the work"
        )
        p.add_argument(
            "--parallel",
            dest="worker_kind",
            default=KINDS[0],
            choices=KINDS,
            help="processes of this machine, or a Ray cluster",
        )
        if join is not None:
            p.add_argument("--federation", type=Path, help="run as one party of this federation (docs/federation.md)")
            p.add_argument("--as", dest="party", help="which of its parties this process is")
            p.add_argument("--folder", type=Path, help="where that party's certificate and keys are; the file's folder")
        p.add_argument("--yes", action="store_true", help="agree to a run of a day or of a terabyte")
        p.writes_results(f"runs/{self.name}")
        return p

    def main(self, arguments: Sequence[str] | None = None, join: Join | None = None) -> int:
        """Run, and return the exit status: see `sectorch.cli.command`.

        Args:
            join: makes this process one party of a federation, where `--federation` and `--as` ask for it.
        """
        return ended(self.parser(join), arguments, functools.partial(self._joined, join=join), GOES_ON)

    def take_part(self, arguments: Sequence[str], parties: Parties, out: Path, root: Path | None = None) -> None:
        """Run as one party, without a screen: what there is to say stands in the folder `out`.

        Args:
            arguments: of the command line, all parties' the same. root: where data sets lie.

        Raises:
            FederationError: more than one run. Whatever a run raises.
        """
        root_ = [] if root is None else ["--data-root", str(root)]
        options = self.parser().parse_args([*arguments, *root_, "--out", str(out), "--no-plots", "--yes"])
        self._run(options, Console(file=io.StringIO()), parties)

    def needs(self, options: argparse.Namespace) -> Sequence[str]:
        """The roles that take part with these options."""
        federation = chosen(options, self.federation)
        return self.cast(federation, chosen(options, self.base(federation)))

    def _joined(self, options: argparse.Namespace, console: Console, join: Join | None) -> None:
        file, party = getattr(options, "federation", None), getattr(options, "party", None)
        if (file is None) != (party is None):
            raise FederationError("--federation and --as go together: the file, and which of its parties this one is")
        if join is None or file is None or party is None:
            self._run(options, console, Simulation())
            return
        with join(file, party, options.folder, needs=self.needs(options)) as parties:
            console.print(f"{party} is connected", highlight=False)
            self._run(options, console, parties)

    def _run(self, options: argparse.Namespace, console: Console, parties: Parties) -> None:
        writable(options.out)
        drawn = plotting(options, console)
        trials = list(self._trials(options))
        if len(trials) > 1 and not isinstance(parties, Simulation):
            raise FederationError("a federation makes one run at a time: one seed, one value, no controls")
        runs = [(c, seed, out, self._prepared(options, f, s, out, parties)) for c, seed, out, f, s in trials]
        expected = [found for *_, run in runs if (found := run.estimate()) is not None]
        if expected:
            agree(sum(expected[1:], expected[0]), console, options.yes)
        study, last = Study(self._across(options)), None
        for condition, seed, out, run in runs:
            screen = Screen(run, console, condition)
            last = watched(lambda run=run, screen=screen: run.run(screen), screen, console)
            files = last.write(out, drawn)
            study.add(condition, seed, last)
            if not options.json and len(runs) == 1:
                last.show(console)
                _written(console, out, files)
        if len(runs) > 1:
            files = study.write(options.out, drawn)
            if not options.json:
                console.print(study.table())
                _written(console, options.out, files)
        if options.json and last is not None:
            print_json(study.as_dict() if len(runs) > 1 else last.as_dict())

    def _trials(self, options: argparse.Namespace):
        """Condition, seed, folder, federation and settings of each run; one run alone has the folder itself."""
        swept = sweeps(options, type(self.federation), type(self.settings))
        seeds = swept.pop("seed", [getattr(options, "seed", [0])[0]])
        if len(swept) > 1:
            raise FederationError(f"one option takes several values at a time, got {', '.join(swept)}")
        name, values = next(iter(swept.items()), ("", [None]))
        named = getattr(options, "controls", None)
        controls = [None] if named is None else [None, *(named or self.controls)]
        found = []
        for value, control, seed in itertools.product(values, controls, seeds):
            changes = {"seed": seed, **({name: value} if name else {})}
            federation = _with(chosen(options, self.federation), changes)
            settings = _with(chosen(options, self.base(federation)), changes)
            if control is not None:
                settings = self.controls[control](settings)
            words = [f"{name} {value}"] if name else []
            condition = ", ".join([*words, *([control] if control else [])]) or self.name
            found.append((condition, seed, federation, settings))
        for condition, seed, federation, settings in found:
            place = f"{re.sub('[^a-z0-9]+', '-', condition.lower())}-seed-{seed}"
            yield condition, seed, options.out / place if len(found) > 1 else options.out, federation, settings

    def _prepared(self, options: argparse.Namespace, federation: F, settings: S, out: Path, parties: Parties) -> Run:
        workers = Workers(options.worker_count, options.worker_kind)
        place = Place(out, options.out / "shared", workers, options.data_root, parties)
        return self.prepare(federation, settings, place)

    def _across(self, options: argparse.Namespace) -> str:
        names = [n for n in sweeps(options, type(self.federation), type(self.settings)) if n != "seed"]
        return names[0] if names else "condition"


def _with(options: S, changes: Mapping[str, Any]) -> S:
    """The changes that these settings have a field for."""
    known = {name for name, *_ in declared(type(options))}
    return options.but(**{n: v for n, v in changes.items() if n in known})


def _written(console: Console, out: Path, files: Sequence[Path]) -> None:
    names = ", ".join(file.name for file in files)
    console.print(f"written: {out}: {names}", markup=False, highlight=False, soft_wrap=True)
