"""Programs on a party's own disk: their digests, and a dry run that finds what they send and reveal.

No code comes over the network. A program is a file that each party has. A proposal names it by the digest of its
source, and by the digest of the messages that it sends, which the dry run finds.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from ...choreography import Party
from ...choreography.ledger import Profile
from ...choreography.net import Origins, Read, Sent
from ...choreography.program.trace import Program
from ...choreography.roles import STAR, Roles
from ...choreography.run.local import DryRuntime
from ...cli.command import Parser
from ...errors import ArgumentError, FederationError, IdentityError, SectorchError
from ...federated.command import Command, Option, chosen, owned, sweeps
from ...federated.parties import Names, as_list, star
from ...mpc.star.key_agreement import Identities
from ...session import Session, answering_parties
from ..identity.identity import fingerprint
from .config import FederationFile
from .reveals import Reveal, compares, message_key, origins_of, reveal_texts, session_key

# Secure inference among parties of a federation.


def star_of(names: Names) -> dict[Party, str]:
    """The parties of secure inference and their names: Q, S, the answering parties, a dealer and owners.

    Raises:
        ArgumentError: the names do not fit these roles.
    """
    single = [role for role in ("Q", "S", "D") if role in names]
    if not {"Q", "S", "A"} <= set(names) <= {"Q", "S", "A", "D", "O"} or not all(
        isinstance(names[role], str) for role in single
    ):
        raise ArgumentError(
            f"secure inference has one Q, one S, one A or a list of them, and may have a D and a list O of owners; got "
            f"{dict(names)}"
        )
    answering = as_list(names["A"])
    if not answering:
        raise ArgumentError("a session needs at least one answering party, got none")
    return {
        **{Party(role, role): str(names[role]) for role in single},
        **dict(zip(answering_parties(len(answering)), answering, strict=True)),
        **{Party(name, "O"): name for name in as_list(names.get("O", ()))},
    }


def roles_of(cast: dict[Party, str]) -> Roles:
    """The roles that give these parties their edges and streams; any number of owners play one role."""
    return OWNED if any(party.role == "O" for party in cast) else STAR


OWNED = Roles("Q A S D O", edges="Q-S A-S D-S O-S", streams="Q-A D-A O-A")
"""The roles of secure inference, and O for parties that own an input or learn a result and hold no shares."""


@dataclass
class FederationIdentities(Identities):
    """Identities of which each party knows the other's key from the federation file."""

    file: FederationFile | None = None

    def trust(self, name: str, public: bytes) -> None:
        if self.file is None or fingerprint(public) != self.file.member(name).identity:
            raise IdentityError(f"the key that came for '{name}' is not the one that the federation file names")


# Functions of the user's own, by name.

FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):([A-Za-z_]\w*)")
"""MODULE:FUNCTION, of this folder or an installed module; or FILE.py:FUNCTION."""


def is_function(text: str) -> bool:
    """Whether a text has the form of a function's name."""
    return FUNCTION.fullmatch(text) is not None


def function_of(text: str) -> Callable[..., Any]:
    """The function of that name. This runs its module, whose code the user trusts.

    Raises:
        ArgumentError: the text is no such name, or there is no such function.
    """
    named = FUNCTION.fullmatch(text)
    if named is None:
        raise ArgumentError(f"a function is MODULE:FUNCTION or FILE.py:FUNCTION, got {text[:80]!r}")
    module, function = named.groups()
    try:
        found = getattr(_run_file(Path(module)) if module.endswith(".py") else _import(module), function)
    except (ImportError, AttributeError, OSError) as error:
        raise ArgumentError(f"cannot call {text}: {error}") from error
    except SectorchError:
        raise
    except Exception as error:  # an error in the user's code
        raise ArgumentError(f"cannot call {text}: {type(error).__name__}: {error}; --debug shows where") from error
    if not callable(found):
        raise ArgumentError(f"{text} is a {type(found).__name__} and no function")
    return found


def _import(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove("")


def _run_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# The source of a program, and its digest.

_INSTALLED = tuple(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGES = ("site-packages", "dist-packages")
_OWN = Path(__file__).resolve().parents[2]
_loaded: dict[Path, tuple[str, ModuleType]] = {}
_LOADING = threading.RLock()


@dataclass(frozen=True)
class Source:
    """The source of a program.

    Args:
        path: of the file. function: the function's name in it.
        digest: SHA-256 of the file; if it imports files that are not installed, a digest of all of them.
        imports: those files.
    """

    path: Path
    function: str
    digest: str
    imports: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """The program's name for people, without its folder."""
        return f"{self.path.name}:{self.function}"

    def folder_name(self, job: str) -> str:
        """The name of the folder in which one of several jobs of this source keeps what a later run continues from."""
        return f"{self.path.stem[:40]}-{self.function[:40]}-{self.digest[:12]}-{job}"

    def load(self) -> Callable[..., Any]:
        """The function, loaded from the content that has the digest.

        Raises:
            ArgumentError: there is no such function, it takes other arguments than the federation, or this process has
                loaded the file with another content.
        """
        with _LOADING:
            known, module = _loaded.get(self.path, ("", None))
            if module is not None and known != self.digest:
                raise ArgumentError(f"{self.path} was changed since this process loaded it; start it again")
            if module is None:
                module = self._module()
                _loaded[self.path] = self.digest, module
        found = getattr(module, self.function, None)
        if not callable(found):
            raise ArgumentError(f"there is no function {self.function} in {self.path}")
        try:
            inspect.signature(found).bind(None)
        except ValueError:  # it has no signature
            pass
        except TypeError as error:
            raise ArgumentError(
                f"{self.name} is called with the federation that it runs in, and nothing else: {error}"
            ) from None
        return found

    def _module(self) -> ModuleType:
        content = self.path.read_bytes()
        if _digest(self.path, content, self.imports) != self.digest:
            raise ArgumentError(f"{self.path} was changed a moment ago; try again")
        name = f"sectorch_program_{self.digest[:16]}"
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = str(self.path)
        sys.path.insert(0, "")
        try:  # compiled from the content that was read: a cached .pyc could differ
            exec(compile(content, str(self.path), "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            raise ArgumentError(f"cannot load {self.path}: {type(error).__name__}: {error}") from error
        finally:
            sys.path.remove("")
        return module


def source_of(program: str, folder: Path | None = None) -> Source:
    """The source of FILE.py:FUNCTION or MODULE:FUNCTION; none of its code is run.

    Args:
        folder: to which a file's path is relative; the current one by default.

    Raises:
        ArgumentError: the text has another form, or the file is missing or is no Python.
    """
    named = FUNCTION.fullmatch(program)
    if named is None:
        raise ArgumentError(f"a program is FILE.py:FUNCTION, MODULE:FUNCTION or a paper's name, got {program[:80]!r}")
    module, function = named.groups()
    path = (folder or Path()) / module if module.endswith(".py") else _file_of(module)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read the program {path}: {error.strerror}") from None
    used = tuple(_local_imports(path, content))
    return Source(path.resolve(), function, _digest(path, content, used), used)


def _file_of(module: str) -> Path:
    """The file of a module, which is not imported."""
    places = ["", *sys.path]
    spec = None
    for step in module.split("."):
        name = step if spec is None else f"{spec.name}.{step}"
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            raise ArgumentError(f"there is no module {module}")
        places = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None:
        raise ArgumentError(f"the module {module} is no file")
    return Path(spec.origin)


def _local_imports(path: Path, content: bytes) -> Iterator[Path]:
    """The files that a program imports and that are not installed; of a package, all files."""
    seen, queue = {path.resolve()}, [(path, content)]
    while queue:
        at, text = queue.pop()
        for name in _import_names(at, text):
            spec = PathFinder.find_spec(name, [*([str(at.parent)] if at != path else []), "", *sys.path])
            origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
            if origin is None or origin.suffix != ".py" or _is_installed(origin):
                continue
            for file in sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]:
                if file not in seen:
                    seen.add(file)
                    queue.append((file, file.read_bytes()))
                    yield file


@functools.lru_cache(256)
def _import_names(path: Path, content: bytes) -> frozenset[str]:
    """The top-level packages that a file imports, without Python's own and this one."""
    try:
        with _LOADING:  # two threads that parse at the same time crash Python 3.11
            tree = ast.parse(content, str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is no Python: {error}") from None
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.split(".")[0])
    return frozenset(found - {"sectorch"} - sys.stdlib_module_names)


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to this environment, or to one on its path: the user's, the system's, one of a .pth."""
    seen = (Path(place).resolve() for place in sys.path if Path(place).name in _PACKAGES)
    return path.is_relative_to(_OWN) or any(path.is_relative_to(place) for place in (*_INSTALLED, *seen))


def _digest(path: Path, content: bytes, used: tuple[Path, ...]) -> str:
    """The file's SHA-256; with other files, the SHA-256 of the digests and names of all of them."""
    own = hashlib.sha256(content).hexdigest()
    if not used:
        return own
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in used]
    return hashlib.sha256("\n".join([own, *sorted(lines)]).encode()).hexdigest()


# The dry run of a program.


@dataclass(frozen=True)
class ProgramReport:
    """What a program does among the parties of a federation, found on shapes.

    Args:
        traced: a digest of its sessions and their messages; empty if the dry run stopped.
        parties: names of the parties that take part.
        reveals: all values that a party learns, until the dry run stopped.
        reads: who reads a result, in words. sessions: those that it opened (`reveals.session_key`).
        digests: those that parties compare. messages: `reveals.message_key` of each; both None if the dry run stopped.
        results: shapes of the results, by name.
        stopped: why the dry run did not reach the program's end; empty if it did.
        cost: rounds and bytes of all parties; None if the dry run stopped.
    """

    traced: str
    parties: tuple[str, ...]
    reveals: tuple[Reveal, ...] = ()
    reads: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    digests: tuple[str, ...] | None = None
    messages: tuple[str, ...] | None = None
    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stopped: str = ""
    cost: Mapping[str, float] | None = None

    @property
    def complete(self) -> bool:
        """Whether the dry run reached the program's end."""
        return not self.stopped

    @property
    def learned(self) -> tuple[str, ...]:
        """Who learns what, in words."""
        return (*dict.fromkeys(self.reads), *reveal_texts(self.reveals))


@functools.lru_cache(64)
def dry_run_program(source: Source, federated: FederationFile) -> ProgramReport:
    """The dry run of a program on the disk. Raises ArgumentError."""
    return dry_run_source(source.load(), federated)


def dry_run_source(program: Callable[..., Any], federated: FederationFile) -> ProgramReport:
    """Run a program on shapes, without any party's inputs, as far as it goes.

    Raises:
        ArgumentError: it needs a role that nobody plays, or an edge that the federation lacks.
    """
    parties, stopped, results = DryParties(federated), "", {}
    with Profile() as profile:
        try:
            found = program(parties)
            named = (
                {"result": found} if isinstance(found, torch.Tensor) else found if isinstance(found, Mapping) else {}
            )
            results = {str(k): tuple(v.shape) for k, v in named.items() if isinstance(v, torch.Tensor)}
        except ArgumentError as error:
            if not parties.names:
                raise
            stopped = str(error)
        except _TooLong:
            stopped = f"it sends more than {MAX_MESSAGES} messages"
        except Exception as error:  # the program needs values, which a dry run lacks
            stopped = f"{type(error).__name__} without inputs"
    everybody = tuple(m.name for m in federated.members if m.role)
    complete = not stopped
    return ProgramReport(
        parties.digest() if complete and parties.sessions else "", tuple(sorted(parties.names)) or everybody,
        tuple(parties.reveals), tuple(parties.reads), tuple(parties.sessions),
        tuple(sorted(parties.digests)) if complete else None, tuple(sorted(parties.headers)) if complete else None,
        results, stopped, profile.as_dict() if complete else None,
    )  # fmt: skip


MAX_MESSAGES = 20_000
"""Messages after which a dry run stops: that of a program that trains for hours would take hours."""


class _TooLong(BaseException):
    """Stops a dry run. It is no Exception, so that a program does not catch it and go on."""


class DryParties:
    """`federated.parties.Parties` none of which is in this process; records what a program does."""

    inputs: Mapping[str, torch.Tensor] = {}
    folder = Path(os.devnull)
    """A dry run keeps nothing, and continues from nothing."""

    def __init__(self, federated: FederationFile):
        self._file = federated
        self.names: set[str] = set()
        self.sessions: list[str] = []
        self.reads: list[str] = []
        self.reveals: list[Reveal] = []
        self.digests = set[str]()
        self.headers = set[str]()
        self._steps, self._messages = hashlib.sha256(), 0

    def digest(self) -> str:
        """The digest of all sessions, reads and messages."""
        return self._steps.hexdigest()

    def name_of(self, party: Party) -> str:
        """The party's name in the federation file."""
        return self._file.member_named(party.name).name

    def present(self, party: str) -> bool:
        self._file.member_named(party)
        return False

    def step(self, *facts: Any) -> None:
        """Add a step to the digest."""
        self._steps.update(json.dumps(facts).encode() + b"\n")

    def message(
        self, line: Sent, label: str, cast: Mapping[Party, str], origins: Origins | None, session: Session | None
    ) -> None:
        """Record a message of a session. A dry run that is too long stops at the same message at all parties."""
        self._messages += 1
        if self._messages > MAX_MESSAGES:
            raise _TooLong
        self.headers.add(message_key(line, label, cast))
        reveal = Reveal.of(line, label, cast, origins, session)
        self.step(
            label, line.path, line.label, reveal.src, reveal.dst, list(line.shape), str(line.dtype), line.phase.name,
            line.from_package, *([reveal.to, reveal.before, reveal.place] if line.learner is not None else []),
            *([reveal.policy] if reveal.policy else []),
        )  # fmt: skip
        if compares(line) and session is not None:
            self.digests |= {digest.hex() for digest in session.agreement._digests.values()}
        elif line.learner is not None:
            self.reveals.append(reveal)

    @contextmanager
    def session(
        self, roles: Roles, names: Names | None = None, *, label: str = "session", agreed: str = ""
    ) -> Iterator[Session]:
        called = dict(names or {})
        if roles is STAR:
            cast = star_of(called)
            runtime = self._meet(roles_of(cast), cast, label, agreed)
            session = _Star(called, runtime)
            runtime.begin(session)
            yield session
            return
        single = {role: str(called.get(role, role)) for role in roles.names}
        runtime = self._meet(roles, {Party(name, role): name for role, name in single.items()}, label, agreed)
        session = _RecordingSession(self, roles, single, runtime)
        runtime.begin(session)
        yield session

    @contextmanager
    def runtime(
        self, roles: Roles, parties: Mapping[Party, str], *, label: str = "session", agreed: str = ""
    ) -> Iterator[DryRuntime]:
        runtime = self._meet(roles, parties, label, agreed)
        runtime.begin()
        yield runtime

    def _meet(self, roles: Roles, parties: Mapping[Party, str], label: str, agreed: str) -> _RecordingRuntime:
        cast = {party: self._file.member_named(name).name for party, name in parties.items()}
        check_edges(self._file, roles, cast)
        self.names |= set(cast.values())
        self.sessions.append(session_key(label, agreed, cast))
        self.step(self.sessions[-1])
        return _RecordingRuntime(self, label, cast)


class _RecordingRuntime(DryRuntime):
    """Records each message of a session once it has begun, whatever observers a program adds."""

    def __init__(self, recorder: DryParties, label: str, cast: Mapping[Party, str]):
        super().__init__()
        self._recorder, self._label, self._cast = recorder, label, cast
        self._origins: Origins | None = None
        self._session: Session | None = None
        self._begun = False

    def begin(self, session: Session | None = None) -> None:
        """Begin to record: the parties have their keys."""
        self._origins, self._begun = None if session is None else origins_of(session), True
        self._session = None if session is None else weakref.proxy(session)

    def transfer(self, line: Sent, value: torch.Tensor) -> torch.Tensor:
        if self._begun:
            self._recorder.message(line, self._label, self._cast, self._origins, self._session)
        return super().transfer(line, value)


class _Star(Session):
    """Secure inference on shapes, which computes the digests that distributed parties compare."""

    def __init__(self, names: Names, runtime: DryRuntime):
        alike = star(names, dry=True)
        owners = [owner.name for owner in alike.owners]
        super().__init__(len(alike.answering), dealer=alike.dealer.name, owners=owners, dry=True, runtime=runtime)

    @property
    def is_distributed(self) -> bool:
        return True


class _RecordingSession(Session):
    """A session on shapes that records the programs that it runs, and who reads their results."""

    def __init__(self, recorder: DryParties, roles: Roles, names: Mapping[str, str], runtime: DryRuntime):
        self._recorder = recorder
        super().__init__(roles=roles, names=names, dry=True, runtime=runtime)

    def run(
        self, program: Program, inputs: Mapping[str, torch.Tensor], material: Any = None, audited: int = 1,
        accountable: bool = False,
    ) -> Any:  # fmt: skip
        self._recorder.step(program.digest)
        for node in program.nodes:
            if isinstance(node.step, Read):
                by = ", ".join(sorted(self._recorder.name_of(party) for party in node.step.owners))
                self._recorder.reads.append(f"{by} reads a result")
        return super().run(program, inputs, material, audited, accountable)


def check_edges(federated: FederationFile, roles: Roles, cast: Mapping[Party, str]) -> None:
    """Check that the federation has the edges of these roles. Raises ArgumentError."""
    places = list(cast.items())
    for at, (one, name) in enumerate(places):
        for other, there in places[at + 1 :]:
            if frozenset((one.role, other.role)) in roles.edges:
                federated.check_edge(name, there)


# The papers that parties which are up can run, by their commands' names.


PAPERS = {
    "capc": "protocols.capc.experiment",
    "capride": "protocols.capride.experiment",
    "perturbed-fl": "protocols.perturbation.experiment",
    "privhfl": "protocols.privhfl.experiment",
    "shapley": "protocols.secsv.experiment",
}
"""The module of each paper's `COMMAND`."""
_EXCLUDED = ("data_root", "worker_count", "worker_kind", "yes", "out", "no_plots", "json", "debug", "controls")
"""Options that are each party's own, or for simulations only."""


def command_of(paper: str) -> Command:
    """The command of a paper. Raises ArgumentError: there is no such paper."""
    if paper not in PAPERS:
        raise ArgumentError(f"there is no paper {ascii(paper)[:60]}; there are {', '.join(PAPERS)}")
    return importlib.import_module(f"sectorch.{PAPERS[paper]}").COMMAND


def cast_of(paper: str, arguments: Sequence[str], federated: FederationFile) -> tuple[str, ...]:
    """Names of the parties that take part in a paper's command with these options.

    Raises:
        ArgumentError: nobody plays a role, or an option is invalid.
    """
    command = command_of(paper)
    roles = command.needs(_parser(paper, command).parse_args(list(arguments)))
    return tuple(sorted(federated.member_named(role).name for role in roles))


def settings_of(paper: str, arguments: Sequence[str]) -> dict[str, Any]:
    """All settings of a paper's command with these options.

    Raises:
        ArgumentError: an option is invalid, is each party's own, or makes several runs.
    """
    command = command_of(paper)
    parser = _parser(paper, command)
    if {"--help", "-h"} & set(arguments):
        parser.error("a run has no --help")
    options = parser.parse_args(list(arguments))
    plain = parser.parse_args([])
    for name in _EXCLUDED:
        if getattr(options, name, None) != getattr(plain, name, None):
            raise ArgumentError(f"--{name.replace('_', '-')} is each party's own, and not a part of what all agree on")
    own = own_of(command)
    for name in own:
        if hasattr(options, name):
            raise ArgumentError(
                f"{_flag(name, own[name])} is each party's own, which nobody says for another: leave it out here, and "
                f"say it at the party by `sectorch federation accept FILE {paper} --own {name}=...`"
            )
    if sweeps(options, type(command.federation), type(command.settings)):
        raise ArgumentError(f"{paper}: among parties one run at a time, and an option has several values")
    federation = chosen(options, command.federation)
    settings = chosen(options, command.base(federation))
    found = {**_flat("", settings.as_dict()), **_flat("", federation.as_dict())}
    return {name: value for name, value in found.items() if name not in own}


def own_of(command: Command) -> dict[str, Option]:
    """The settings of a paper that each party decides for itself."""
    return owned(type(command.federation), type(command.settings))


def own_words(paper: str, own: Mapping[str, Any], folder: Path) -> list[str]:
    """The arguments of a paper's command for the settings that one party decides.

    Args:
        own: values by the setting's name. folder: to which paths are relative.

    Raises:
        ArgumentError: it is no such setting, or its value is invalid.
    """
    command, words = command_of(paper), []
    known = own_of(command)
    for name, value in own.items():
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"{paper} has no setting {ascii(name)[:60]} of a party's own; {there}")
        words += [_flag(name, known[name]), str(folder / value) if known[name].own == "folder" else str(value)]
    try:
        chosen(_parser(paper, command).parse_args(words), command.settings)
    except (FederationError, TypeError) as error:
        raise ArgumentError(f"{paper}: {error}") from None
    return words


def _parser(paper: str, command: Command) -> Parser:
    """The command's parser, which raises errors in place of ending the process."""
    parser = command.parser()

    def refuse(message: str) -> NoReturn:
        raise ArgumentError(f"{paper}: {message}")

    parser.refuse = refuse
    return parser


def _flag(name: str, option: Option) -> str:
    return f"--{(option.flag or name).replace('_', '-')}"


def _flat(prefix: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, and those within them, by names with dots."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}{name}.", value)
        else:
            found[prefix + name] = value
    return found


def settings_digest(paper: str, settings: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """SHA-256 of a paper's settings, without those that a party bounds instead."""
    kept = {name: value for name, value in settings.items() if name not in without}
    return hashlib.sha256(json.dumps([paper, kept], sort_keys=True, default=str).encode()).hexdigest()
