"""The page of all errors, docs/errors.md, made of their docstrings: when one comes, a text that it has, what to do.

A docstring has its words, then `Example:` and `What to do:`, each with indented lines. tests/test_refusals.py holds
every error to that, and each example to the code that raises it.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from sectorch import errors
from sectorch.testing import ModuleFault, ProtocolFault

GROUPS = {
    "sectorch.errors": "",
    "sectorch.estimators": "Estimators",
    "sectorch.tables": "Tables",
    "sectorch.protocols.capc": "CaPC",
    "sectorch.protocols.capride": "CaPriDe",
    "sectorch.protocols.perturbation": "Perturbed models",
    "sectorch.protocols.secsv": "SecSV",
    "sectorch.testing": "Tests of operations and protocols",
}
"""Modules in the order of the page, and their headings. Those of `sectorch/errors.py` are comments in that file."""

SECTION = re.compile(r"^(Example|What to do|Attributes):\n((?:(?:    .*)?\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """An error as its docstring has it.

    Attributes:
        kind: the class. when: paragraphs of when it comes. example: a text in one line, or none. todo: what to do.
    """

    kind: type[BaseException]
    when: str
    example: str
    todo: str

    @property
    def place(self) -> tuple[int, int]:
        """The position of its module in `GROUPS`, and of its class there."""
        module = f"{self.kind.__module__}."
        return next(i for i, prefix in enumerate(GROUPS) if module.startswith(f"{prefix}.")), self._line

    @property
    def _line(self) -> int:
        return inspect.getsourcelines(self.kind)[1]

    @property
    def group(self) -> str:
        """The heading under which it stands."""
        heading = [*GROUPS.values()][self.place[0]]
        if heading:
            return heading
        lines = Path(str(errors.__file__)).read_text(encoding="utf-8").split("\n")
        return re.findall(r"^\n# (.+)\.$", "\n".join(lines[: self._line]), re.MULTILINE)[-1]

    @property
    def named(self) -> str:
        """The dotted name by which it is imported."""
        package = re.sub(r"(?<!^sectorch)\.errors$|(?<=sectorch\.testing)\.\w+$", "", self.kind.__module__)
        return f"{package}.{self.kind.__name__}"


def kinds() -> list[type[BaseException]]:
    """Every error and warning that sectorch raises on purpose, parents first."""
    for module in GROUPS:
        importlib.import_module(module)
    found: list[type[BaseException]] = [errors.SectorchError, errors.LeakyProtocolWarning, errors.CaptureWarning]
    for kind in found:
        found.extend(one for one in kind.__subclasses__() if one.__module__.startswith("sectorch."))
    return [*dict.fromkeys(found), ModuleFault, ProtocolFault]


def entry(kind: type[BaseException]) -> Entry:
    """What an error's docstring says; parts that it lacks are empty."""
    text = inspect.cleandoc(kind.__doc__ or "") + "\n"
    parts = {name: " ".join(textwrap.dedent(body).split()) for name, body in SECTION.findall(text)}
    return Entry(kind, SECTION.sub("", text).strip(), parts.get("Example", ""), parts.get("What to do", ""))


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _linked(text: str) -> str:
    """docs/ops.md becomes a link under the page's title, as the page stands in that folder."""
    return re.sub(r"docs/([\w-]+\.md)", lambda found: f"[{_title(found[1])}]({found[1]})", text)


def _title(page: str) -> str:
    return Path(__file__).with_name(page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def _shown(one: Entry) -> str:
    bases = [base for base in one.kind.__bases__ if base not in (errors.SectorchError, Exception)]
    also = f", also {' and '.join(f'`{base.__name__}`' for base in bases)}" if bases else ""
    when = " ".join(_linked(one.when).split())
    lines = [f"`{one.named}`{also}. {when}"]
    lines.append(f"*Says, for example:* {_code(one.example)}<br>" if one.example else "")
    return f"### {one.kind.__name__}\n{lines[0]}<br>\n{lines[1]}*What to do:* {_linked(one.todo)}"


def listed() -> str:
    """The page's list."""
    entries = [entry(kind) for kind in kinds()]
    order = sorted(entries, key=lambda one: one.place)
    sections: dict[str, list[str]] = {}
    for one in order:
        sections.setdefault(one.group, []).append(_shown(one))
    return "\n\n".join(f"## {heading}\n\n" + "\n\n".join(shown) for heading, shown in sections.items())
