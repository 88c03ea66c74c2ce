"""Settings declared once (`Options`), studies of several runs (`Study`), and the command of a paper (`Command`)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import re
import statistics
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from inspect import Signature, signature
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from ..cli.command import (
    GOES_ON,
    OldOption,
    Parser,
    at_least,
    command_status,
    number,
    plots_wanted,
    print_json,
    run_with_screen,
    writable,
)
from ..data.datasets import ROOT_HELP
from ..deprecation import deprecate
from ..display import Plot
from ..dp.budget import BudgetFile
from ..errors import FederationError
from .folder import KINDS, RunFolder, Workers
from .outcome import Outcome, titled, write_csv
from .parties import Parties, Simulation
from .run import Experiment, digest_of
from .watch import Screen, agree

# Settings that are declared once: a field gives the check, the command line's option, and the line in the docs.
#
# @dataclass(frozen=True)
# class Settings(Options):
#     queries: int | None = option(None, "B, of each client and round", least=1)
#     secure: bool = option(True, "use the protocol", flag="plain", off="the same in the clear; protects nothing")
#     local: Training = option(Training(), "local training")      # --local-epochs, --local-lr, ...

Spec = TypeVar("Spec", bound="Options")


@dataclass(frozen=True)
class Option:
    """The properties of a field besides its type and default.

    Args:
        about: a description with the unit, for help and docs.
        least, above, most, below: the range of a number, or of each of a tuple.
        among: the allowed words.
        flag: its name on the command line; by default the field's.
        off: the help of a flag that switches it off, for a field that is on by default.
        short: a name of one letter.
        several: whether the command line takes several values, with a run for each.
        hidden: whether the command line leaves it out.
        own: "value", or "folder" for a path, if each party of a federation sets it for itself.
        bare: the value of an option that the command line names without one.
        objects: classes of which Python code may give an object in the place of a word.
    """

    about: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    among: Collection[str] | None = None
    flag: str | None = None
    off: str | None = None
    short: str | None = None
    several: bool = False
    hidden: bool = False
    own: str | None = None
    bare: str | None = None
    objects: tuple[Any, ...] = ()

    @property
    def limits(self) -> str:
        """The range in words; empty where there is none."""
        words = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {limit:g}" for word, limit in words if limit is not None)

    def allows(self, value: float) -> bool:
        """NaN lies in no range."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def option(default: Any, about: str, **properties: Any) -> Any:
    """A field of `Options`: its default (None where something else decides, which `about` names), and the properties
    of `Option` by name."""
    return field(default=default, metadata={"option": Option(about, **properties)})


_names = [p if p.name == "about" else p.replace(kind=p.KEYWORD_ONLY) for p in signature(Option).parameters.values()]
_signature = Signature([signature(option).parameters["default"], *_names])
option.__signature__ = _signature  # pyright: ignore[reportFunctionMemberAccess]


class Options:
    """The base of settings. Subclasses are frozen dataclasses, whose docstring is completed by their fields.

    Raises:
        FederationError: when made with a value that a field does not allow.
    """

    renamed_fields: ClassVar[dict[str, str]] = {}
    """Old names of fields, for this release."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        own = [(n, v.metadata["option"]) for n, v in vars(cls).items() if isinstance(v, dataclasses.Field)]
        if own:
            cls.__doc__ = "\n".join([cls.__doc__ or "", "", "Args:", *(f"    {n}: {o.about}." for n, o in own)])

    def __post_init__(self) -> None:
        for name, kind, several, o in declared(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            for one in value if several else (value,):
                _check(name, one, kind, o)

    def but(self: Spec, **changes: Any) -> Spec:
        """The same settings with others in some places."""
        for old, new in self.renamed_fields.items():
            if old in changes:
                deprecate(f"but({old}=)", f"but({new}=)")
                changes[new] = changes.pop(old)
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]  subclasses are dataclasses

    def as_dict(self) -> dict[str, Any]:
        """All settings, for JSON and for recognising a run. An object in the place of a word is known by its class, or
        a function by its name, and by what it holds (`sectorch.federated.run.digest_of`)."""
        found = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]  subclasses are dataclasses
        for name, _, _, o in declared(type(self)):
            if isinstance(value := getattr(self, name), o.objects):
                own = found[name] if isinstance(found[name], dict) else {}
                kind = getattr(getattr(value, "func", value), "__qualname__", type(value).__qualname__)
                found[name] = {"kind": kind, **own, "digest": digest_of(value)[:16]}
        return found

    @property
    def agreed(self) -> dict[str, Any]:
        """The settings that all parties have to have alike: without those that each sets for itself."""
        own = owned(type(self))
        return {name: value for name, value in self.as_dict().items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Options):
    """The settings of a run that charges budgets which last. They are given by name, so a subclass's own come first."""

    delta: float = option(1e-5, "of (epsilon, delta)", above=0, below=1)
    budgets: str | None = option(
        None, "a folder with the budget that each answering party or organisation has of its own, over all runs and "
        "askers, charged before it answers (default: what runs add up to is not counted)", own="folder",
    )  # fmt: skip
    budget_epsilon: float | None = option(
        None, "of such a budget where there is none yet, at the run's delta; one that is there must have it",
        above=0, below=math.inf, own="value",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget_epsilon is not None and self.budgets is None:
            raise FederationError("budget_epsilon is of budgets that last; name the folder they lie in, budgets")

    def budget_file(self, owner: str) -> BudgetFile:
        """The budget of who answers."""
        limit = None if self.budget_epsilon is None else (self.budget_epsilon, self.delta)
        return BudgetFile(Path(self.budgets or "") / f"{owner}.json", limit)


def _check(name: str, value: Any, kind: type, o: Option) -> None:
    if isinstance(value, o.objects):
        return
    if issubclass(kind, Options):
        wanted: Any = kind
    else:
        wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise FederationError(f"{name} must be of type {kind.__name__}, got {value!r}")
    if o.among is not None and value not in o.among:
        raise FederationError(f"there is no {name} {value!r}; there are {', '.join(o.among)}")
    if isinstance(value, int | float) and not isinstance(value, bool) and not o.allows(value):
        raise FederationError(f"{name} must be {o.limits}, got {value}")


def declared(cls: type[Options]) -> Iterator[tuple[str, type, bool, Option]]:
    """Fields in order: name, type of one value, whether it is a tuple of them, and what is known of it."""
    hints = typing.get_type_hints(cls)
    for one in fields(cls):  # pyright: ignore[reportArgumentType]  subclasses are dataclasses
        if (o := one.metadata.get("option")) is not None:
            kind, several = _kind(hints[one.name])
            yield one.name, kind, several, o


def _kind(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def add_options(parser: argparse.ArgumentParser, cls: type[Options], prefix: str = "", base: Any = None) -> None:
    """Options of a command line, one for each field that can be written there and that another class did not bring.

    Nothing is a default there: `chosen` gives what was named. Help names the dataclass's defaults.
    """
    known = {action.dest for action in parser._actions}
    for name, kind, several, o in declared(cls):
        default = getattr(base, name) if base is not None else _default(cls, name)
        if o.hidden:
            continue
        if issubclass(kind, Options):
            add_options(parser, kind, f"{prefix}{(o.flag or name).replace('_', '-')}-", default)
            continue
        dest = f"{prefix}{name}".replace("-", "_")
        if dest in known:
            continue
        flags = [f"--{prefix}{(o.flag or name).replace('_', '-')}", *([f"-{o.short}"] if o.short else [])]
        common: dict[str, Any] = dict(dest=dest, default=argparse.SUPPRESS)
        if kind is bool:
            on = not default
            parser.add_argument(*flags, action="store_const", const=on, help=o.about if on else o.off, **common)
            continue
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        about = o.about if shown in (None, "") else f"{o.about} (default {shown})"
        if o.several:
            about += "; several make a run of each"
        many: dict[str, Any] = dict(nargs="+") if several or o.several else {}
        if o.bare is not None:
            many = dict(nargs="?", const=o.bare)
        metavar = (
            None if o.among else kind.__name__.upper().replace("STR", "NAME").replace("FLOAT", "X").replace("INT", "N")
        )
        read = number(kind, o.allows, o.limits) if o.limits else kind
        parser.add_argument(
            *flags, type=read, choices=o.among, metavar=metavar, help=about.replace("%", "%%"), **many, **common
        )
        for old in (old for old, new in cls.renamed_fields.items() if new == name):
            flag = f"--{prefix}{old.replace('_', '-')}"
            known_by: dict[str, Any] = dict(type=read, choices=o.among, help=argparse.SUPPRESS, **many, **common)
            parser.add_argument(flag, action=OldOption, const=flags[0], **known_by)


def chosen(options: argparse.Namespace, base: Spec, prefix: str = "") -> Spec:
    """`base`, with what was named on the command line in its place; of several values the first."""
    changes: dict[str, Any] = {}
    for name, kind, several, o in declared(type(base)):
        if issubclass(kind, Options):
            inner = getattr(base, name)
            if inner is not None:
                changes[name] = chosen(options, inner, f"{prefix}{(o.flag or name).replace('-', '_')}_")
            continue
        dest = f"{prefix}{name}".replace("-", "_")
        if hasattr(options, dest):
            value = getattr(options, dest)
            changes[name] = tuple(value) if several else value[0] if o.several else value
    return base.but(**changes)


def sweeps(options: argparse.Namespace, *classes: type[Options]) -> dict[str, list]:
    """The values of each option for which several were given."""
    names = [name for cls in classes for name, _, several, o in declared(cls) if o.several and not several]
    return {n: getattr(options, n) for n in dict.fromkeys(names) if len(getattr(options, n, ())) > 1}


def owned(*classes: type[Options]) -> dict[str, Option]:
    """What each party says for itself where parties are apart: by the field's name."""
    return {name: o for cls in classes for name, _, _, o in declared(cls) if o.own is not None}


def _default(cls: type[Options], name: str) -> Any:
    return next(f.default for f in fields(cls) if f.name == name)  # pyright: ignore[reportArgumentType]  as above


# Several runs side by side: values of one setting, controls and seeds, with means, spreads and differences.


@dataclass
class Study:
    """Headlines of runs, by condition and seed. The others are compared with the first condition.

    Args:
        across: the name of the difference between conditions, for titles and plots.
    """

    across: str
    unit: str = "%"
    found: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)

    def add(self, condition: str, seed: int, outcome: Outcome) -> None:
        """Add a run."""
        self.unit = outcome.unit
        self.found.setdefault(condition, {})[seed] = outcome.headline()

    @property
    def factor(self) -> float:
        """The factor for display: fractions are shown in percent."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def names(self) -> list[str]:
        """What the headlines hold."""
        return list(dict.fromkeys(n for seeds in self.found.values() for h in seeds.values() for n in h))

    def values(self, condition: str, name: str) -> list[float]:
        """Of each seed that has it."""
        return [h[name] for h in self.found[condition].values() if name in h]

    def difference(self, condition: str, name: str, other: str) -> list[float]:
        """Of the same seeds: this condition's less the other's."""
        mine, theirs = self.found[condition], self.found[other]
        return [mine[s][name] - theirs[s][name] for s in mine if s in theirs and name in mine[s] and name in theirs[s]]

    def table(self) -> Table:
        """Means and standard deviations over seeds; the last columns compare with the first condition."""
        seeds, last = max(len(found) for found in self.found.values()), self.names[-1]
        count = f"{len(self.found)} conditions, {seeds} seed{'s' if seeds > 1 else ''}"
        heads = (self.across, *self.names, f"{last} against the first")
        shown = titled(f"{count}: mean and spread, {self.unit}", heads, 1)
        scaled = lambda values: [self.factor * value for value in values]
        first = next(iter(self.found))
        for condition in self.found:
            cells = [shown_with_spread(scaled(self.values(condition, name))) for name in self.names]
            against = "" if condition == first else verdict(scaled(self.difference(condition, last, first)))
            shown.add_row(condition, *cells, against)
        return shown

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "across": self.across,
            "runs": {c: {str(s): h for s, h in found.items()} for c, found in self.found.items()},
        }

    def plot(self, ax: Any = None) -> Any:
        """Draw the last number of the headlines in each condition, with its range over seeds, and give the Axes.

        Args:
            ax: matplotlib's Axes to draw into; those of a new figure unless given.

        Raises:
            PlotError: matplotlib is not installed.
        """
        return self.as_plot().plot(ax)

    def as_plot(self) -> Plot:
        """What `plot` draws, as data."""
        name = self.names[-1]
        points = {c: [self.factor * v for v in self.values(c, name)] for c in self.found}
        try:
            places: Mapping = {float(c.split()[-1]): v for c, v in points.items()}
        except ValueError:
            return Plot("study", self.across, f"{name}, {self.unit}", {name: points}, kind="bars")
        return Plot("study", self.across, f"{name}, {self.unit}", {name: places})

    def write(self, folder: Path, drawn: bool) -> list[Path]:
        """study.json, study.csv (a row for each run) and, where wanted, study.png."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "study.json", folder / "study.csv"]
        paths[0].write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        rows = [{"condition": c, "seed": s, **h} for c, found in self.found.items() for s, h in found.items()]
        write_csv(paths[1], rows)
        return [*paths, *([self.as_plot().draw(folder)] if drawn else [])]


def verdict(differences: Sequence[float]) -> str:
    """A difference with its spread over seeds, and whether the seeds tell it from none.

    One seed shows no spread, and is said to be one. Otherwise a difference counts where Student's t test of the paired
    differences has p < 0.05; else it is "within the spread".
    """
    if not differences:
        return ""
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return f"{mean:+.4g} (one seed)"
    spread = statistics.stdev(differences)
    return f"{mean:+.4g} +- {spread:.2g}{'' if differs(differences) else ', within the spread'}"


def differs(differences: Sequence[float]) -> bool:
    """Whether paired differences are told from none: two-sided t test, p < 0.05; equal ones are, unless they are 0."""
    from scipy.stats import ttest_1samp

    if len(differences) < 2:
        return False
    if statistics.stdev(differences) == 0:
        return differences[0] != 0
    return float(np.asarray(ttest_1samp(differences, 0.0))[1]) < 0.05


def shown_with_spread(values: Sequence[float]) -> str:
    """The mean and the standard deviation of values; nothing of nothing."""
    if not values:
        return ""
    spread = f" +- {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{spread}"


F = TypeVar("F", bound=Options)
S = TypeVar("S", bound=Options)


Join = Callable[..., AbstractContextManager[Parties]]
"""join(path, as_, folder, needs=): makes this process one party of a federation."""


@dataclass(frozen=True)
class Place:
    """The folders, workers and parties of a run.

    Args:
        out: the run's folder.
        shared: a folder for the common files of several runs of one command.
        workers: its worker processes.
        root: the folder of data sets.
        parties: the parties; by default all in this process.
    """

    out: Path
    shared: Path
    workers: Workers
    root: Path | None = None
    parties: Parties = field(default_factory=Simulation)

    def own(self, seed: int) -> int:
        """The seed of a party's own draws: its first weights and its batches.

        In a simulation it is the command line's seed. In a federation all parties know that one, so each draws its own
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
        controls: what a run can be compared with, by name: changes of the run's settings.
    """

    name: str
    about: str
    examples: Sequence[str]
    federation: F
    settings: S
    cast: Callable[[F, S], Sequence[str]]
    prepare: Callable[[F, S, Place], Experiment]
    base: Callable[[F], S]
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
            "--parallel", dest="worker_kind", default=KINDS[0], choices=KINDS,
            help="processes of this machine, or a Ray cluster",
        )  # fmt: skip
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
        return command_status(self.parser(join), arguments, functools.partial(self._joined, join=join), GOES_ON)

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
        drawn = plots_wanted(options, console)
        trials = list(self._trials(options))
        if len(trials) > 1 and not isinstance(parties, Simulation):
            raise FederationError("a federation makes one run at a time: one seed, one value, no controls")
        workers, shared = Workers(options.worker_count, options.worker_kind), options.out / "shared"
        place = functools.partial(Place, shared=shared, workers=workers, root=options.data_root, parties=parties)
        runs = [(c, seed, out, self.prepare(f, s, place(out))) for c, seed, out, f, s in trials]
        expected = [found for *_, run in runs if (found := run.estimate()) is not None]
        if expected:
            agree(sum(expected[1:], expected[0]), console, options.yes)
        study, last = Study(self._across(options)), None
        for condition, seed, out, run in runs:
            screen = Screen(run, console, condition)
            last = run_with_screen(lambda run=run, screen=screen: run.run(screen), screen, console)
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
                settings = settings.but(**self.controls[control])
            words = [f"{name} {value}"] if name else []
            condition = ", ".join([*words, *([control] if control else [])]) or self.name
            found.append((condition, seed, federation, settings))
        for condition, seed, federation, settings in found:
            place = f"{re.sub('[^a-z0-9]+', '-', condition.lower())}-seed-{seed}"
            yield condition, seed, options.out / place if len(found) > 1 else options.out, federation, settings

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
