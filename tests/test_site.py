"""The documentation site: no warning, pages as on a code host, nothing from elsewhere, an API that is whole.

What needs the built site (some 15 s) is for long runs; `make docs` builds it, too, with warnings as errors.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browser import browser, measured
from markdown_it import MarkdownIt
from torch import nn

import sectorch
from sectorch import errors
from sectorch.choreography import PROTOCOLS, Phase

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
OUTSIDE = sorted(path for path in ROOT.glob("*.md"))
LISTED = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
API = sorted(DOCS.glob("api/*.md"))
PACKAGES = [
    "sectorch",
    *(
        f"sectorch.{name}"
        for name in (
            "nn",
            "nn.models",
            "ckks",
            "garbled",
            "network",
            "estimators",
            "dp",
            "data",
            "testing",
            "federated",
            "choreography",
            "errors",
            "protocols",
            "fitted_models",
            "tables",
        )
    ),
    *(f"sectorch.protocols.{name}" for name in ("privhfl", "capc", "capride", "perturbation", "secsv")),
]
PHASES = {"once": Phase.SETUP, "ahead": Phase.OFFLINE, "online": Phase.ONLINE}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built once with warnings as errors."""
    pytest.importorskip("mkdocs", reason="the site needs the docs extra: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def html_of(site: Path, page: Path) -> str:
    name = page.relative_to(DOCS).with_suffix("") if page.is_relative_to(DOCS) else Path(page.stem.lower())
    parts = name.parts[:-1] if name.name == "index" else name.parts
    return site.joinpath(*parts, "index.html").read_text(encoding="utf-8")


def article(html: str) -> str:
    return html[html.index("<article") : html.index("</article>")]


@pytest.mark.sectorch_long
def test_pages_are_the_same_as_on_a_code_host(site: Path):
    """Two Markdown dialects, one page: as many headings, tables and rows, lists, blocks of code and pictures."""
    tags = re.compile(r"<(h[1-6]|table|tr|ul|ol|li|pre|img|a (?=href))\b")

    formula = re.compile(r'<pre><code class="language-math">.*?</pre>', re.DOTALL)  # set on both, as no code

    def counted(html: str) -> Counter:
        return Counter(
            tag.strip() for tag in tags.findall(re.sub(r'<a class="headerlink"[^>]*>', "", formula.sub("", html)))
        )

    differ = []
    for page in (*PAGES, *OUTSIDE):
        host = counted(MarkdownIt("commonmark").enable("table").render(page.read_text(encoding="utf-8")))
        here = counted(article(html_of(site, page)))
        if here != host:
            differ.append(f"{page.name}: {dict(here - host)} more here, {dict(host - here)} more there")
    assert not differ, "\n".join(differ)


@pytest.mark.sectorch_long
def test_no_bar_in_code_keeps_its_backslash(site: Path):
    """`\\|` in a table's code is a bar on a code host, and stands here as it is written."""
    cells = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
    kept = re.compile(r"<code>[^<]*\\\|[^<]*</code>")
    assert not [
        f"{page.name}: {bar}"
        for page in (*PAGES, *OUTSIDE)
        for cell in cells.findall(article(html_of(site, page)))
        for bar in kept.findall(cell)
    ]


@pytest.mark.sectorch_long
def test_nothing_is_loaded_from_elsewhere(site: Path):
    """A reader's browser asks nobody else: no script, style, font or picture of another host."""
    elsewhere = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//', re.IGNORECASE)
    found = [page for page in site.rglob("*.html") if elsewhere.search(page.read_text(encoding="utf-8"))]
    styles = [page for page in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", page.read_text("utf-8"))]
    assert len(list(site.rglob("*.html"))) > 30 and not found and not styles


@pytest.mark.sectorch_long
@pytest.mark.parametrize(("width", "scheme"), [(390, "default"), (390, "slate"), (1280, "default"), (1280, "slate")])
def test_every_page_can_be_read_in_a_browser(site: Path, tmp_path: Path, width: int, scheme: str):
    """On a phone and on a desk, by day and by night: what a reader would stumble over.

    Nothing wider than the screen; one title; contrast of WCAG AA (4.5, 3 for large letters); pictures that are there
    and have words; each formula set; no code that scrolls.
    """
    if browser() is None:
        pytest.skip("needs Chromium: apt-get install chromium, or any other that is on the path")
    pages = sorted(
        f"/{page.parent.relative_to(site).as_posix()}/".replace("/./", "/") for page in site.rglob("index.html")
    )
    found = measured(site, pages, width, scheme, tmp_path)
    wrong = []
    for page in found:
        faults = {name: page[name] for name in ("wrong", "pictures", "unnamed", "faint") if page[name]}
        if page["width"] > width:
            faults["wide"] = page["width"]
        if page["headings"] != 1 or not page["title"]:
            faults["title"] = f"{page['headings']} headings, '{page['title']}'"
        if page["set"] != page["formulas"]:
            faults["formulas"] = f"{page['set']} of {page['formulas']} are set"
        if page["scrolled"]:
            faults["code"] = page["scrolled"]
        wrong += [f"{page['page']}: {faults}"] if faults else []
    assert len(found) == len(pages) > 45 and sum(page["formulas"] for page in found) > 100
    assert not wrong, "\n".join(wrong)


def listed() -> list[str]:
    return [path for page in API for path in LISTED.findall(page.read_text(encoding="utf-8"))]


def found(path: str) -> object:
    """The object of a dotted path: the attributes of the longest module."""
    parts, value = path.split("."), sectorch
    for i, part in enumerate(parts[1:], 2):
        if hasattr(value, part) and not (inspect.ismodule(value) and inspect.ismodule(getattr(value, part))):
            value = getattr(value, part)
        else:
            value = importlib.import_module(".".join(parts[:i]))
    return value


def exported(package: str) -> list[str]:
    """What a package's __init__.py gives under a name: `from .x import y as y`, but no modules."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    if not path.exists():  # a module of one file, whose names are its own
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    flat = [inner for step in tree.body for inner in (step.body if isinstance(step, ast.With) else (step,))]
    steps = [step for step in flat if isinstance(step, ast.ImportFrom) and step.module and step.level == 1]
    return [alias.asname for step in steps for alias in step.names if alias.asname]


INTERNAL = {
    "sectorch.choreography": {"PROTOCOLS", "Runtime", "Sent"},
    "sectorch.garbled": {"label_of_shares", "one_hot_of_classes", "onehot_of_shares"},
}
"""Names that only the package itself takes from there."""


@pytest.mark.parametrize("package", PACKAGES)
def test_all_of_a_package_is_its_reference(package: str):
    """`__all__` has what docs/api lists, and nothing else; modules are listed by the index."""
    module, shown = importlib.import_module(package), [found(path) for path in listed()]
    names = module.__all__
    assert len(set(names)) == len(names)
    public, packages = set(names), {name for name in names if f"{package}.{name}" in PACKAGES}
    if package in ("sectorch", "sectorch.protocols"):
        assert packages == {path.split(".")[-1] for path in PACKAGES if path.rpartition(".")[0] == package}
    index = (DOCS / "api/index.md").read_text(encoding="utf-8")
    for name in names:
        value = found(f"{package}.{name}")
        assert (f"[{package}.{name}" in index) if name in packages else any(value is one for one in shown), name
    prefix = f"{package}."
    of_docs = {path.removeprefix(prefix) for path in listed() if path.startswith(prefix)}
    assert {name for name in of_docs if "." not in name} <= public
    assert set(exported(package)) - public == INTERNAL.get(package, set())


OPEN = {
    "Call", "Inputs", "SecureModule.forward", "SecureModule.in_shares", "RemoteModel.check",  # a user's function
    "Square",  # of nn.Module
    "Options.but", "note", "Net.playing", "Store.shelves", "Table.with_columns",  # names of a user's own
    "federation", "collaboration",  # fields of a paper's federation
}  # fmt: skip
"""Public functions with keyword arguments that nobody knows beforehand."""


@pytest.mark.parametrize("package", PACKAGES)
def test_public_signatures_name_their_arguments(package: str):
    module, found = importlib.import_module(package), set()
    for name in set(module.__all__) & set(vars(module)):
        value = getattr(module, name)
        parts = vars(value).items() if inspect.isclass(value) else ()
        public = [
            (f"{name}.{key}", part) for key, part in parts if not key.startswith("_") and inspect.isfunction(part)
        ]
        for path, f in ((name, value), *public):
            try:
                signature = inspect.signature(f)
            except (TypeError, ValueError):  # a constant, a class without a signature of its own
                continue
            found |= {path} if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()) else set()
    assert found <= OPEN


@pytest.mark.sectorch_long
def test_every_listed_name_is_shown(site: Path):
    assert len(listed()) == len(set(listed())) > 100
    for page in API:
        html = html_of(site, page)
        for path in LISTED.findall(page.read_text(encoding="utf-8")):
            assert f'id="{path}"' in html, path


def documented(kind: str, docstring: str) -> list[str]:
    """The names of a section of a docstring; "a, b: text" names two."""
    section = re.search(rf"^{kind}:\n((?:[ ]+.*\n|\n)+)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^    (\S.*)$", section[1], re.MULTILINE) if section else []
    return [name for entry in entries for name in entry.split(": ")[0].removesuffix(":").split(", ")]


def test_docstrings_name_what_is_there():
    """Args: are parameters; Raises: are exceptions, each with its reason, or the reference would drop the line."""
    paths = sorted((ROOT / "sectorch").rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}: {said}" for path in paths for said in named_in_vain(path)]
    assert len(paths) > 150 and not found, "\n".join(found)


def named_in_vain(path: Path) -> Iterator[str]:
    """What the docstrings of a file name and what is not there."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    known = {**vars(builtins), **vars(errors), **vars(module)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        docstring = inspect.cleandoc(ast.get_docstring(node) or "")
        inits = [node, *(part for part in getattr(node, "body", []) if getattr(part, "name", "") == "__init__")]
        names = {
            argument.arg
            for part in inits
            if isinstance(part, ast.FunctionDef)
            for argument in (
                *part.args.posonlyargs,
                *part.args.args,
                *part.args.kwonlyargs,
                part.args.vararg,
                part.args.kwarg,
            )
            if argument
        }
        names |= {
            part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and hasattr(part.target, "id")
        }
        for name in documented("Args", docstring):
            if name.lstrip("*") not in names:
                yield f"{node.name}: {name}"
        for name in documented("Raises", docstring):
            error = known.get(name) or _by_name(name)
            if not (inspect.isclass(error) and issubclass(error, BaseException)):
                yield f"{node.name}: {name}"


def _by_name(name: str) -> type | None:
    """An error class of a package of its own; each class name stands for one class."""
    kinds = [errors.SectorchError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    return next((kind for kind in kinds if kind.__name__ == name), None)


def figures():
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


def test_figures_say_when_a_message_is_sent():
    """The dashes of the figures against the phases of a run of a linear layer, ReLU and the result."""
    secured = sectorch.secure(nn.Sequential(nn.Linear(8, 64), nn.ReLU()).eval(), session=sectorch.Session())
    sent: dict[tuple[str, str], set[Phase]] = {}
    with sectorch.profile() as profile:
        secured(torch.randn(64, 8))
    for line in profile.ledger:
        sent.setdefault((line.protocol, line.label), set()).add(line.phase)
    module = figures()
    shown = [step for name in ("share", "linear", "relu") for step in module.FIGURES[name].steps]
    for arrow in (step for step in shown if isinstance(step, module.Arrow)):
        assert sent[arrow.protocol, arrow.label] == {PHASES[arrow.when]}, arrow


def test_figures_refuse_what_is_not_declared():
    """A message that the code does not declare, or one left out, is an error and no picture."""
    module = figures()
    share = module.FIGURES["share"]
    assert PROTOCOLS["share"].messages
    for steps in ((), (*share.steps, module.Arrow("linear", "m", "not of this protocol"))):
        with pytest.raises(ValueError, match="declares"):
            module.drawn(module.Figure(share.title, share.protocols, steps))


def test_who_holds_what_is_what_messages_declare():
    """A box that says less than a message shows, or more, is an error and no picture."""
    figures()
    sys.path.insert(0, str(DOCS))
    try:
        holders = importlib.import_module("holders")
        importlib.import_module("generate").protocols()
    finally:
        sys.path.remove(str(DOCS))
    assert holders.holders().count("<rect") > 21
    for kind, messages in (
        ("masked", (("aggregate", "sum"),)),
        ("learns", (("share", "x_S"),)),
        ("own", (("share", "y"),)),
    ):
        with pytest.raises(ValueError, match="shows"):
            holders.check(holders.Box("S", kind, ("all",), messages))


def test_plots_show_all_of_their_curves():
    """Every point and bar of a plot lies in its picture, and a plot has curves or bars."""
    figures()
    sys.path.insert(0, str(DOCS))
    try:
        plots = importlib.import_module("plots").PLOTS
    finally:
        sys.path.remove(str(DOCS))
    for name, made in plots.items():
        picture = made()
        width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', picture)[0])
        lines = re.findall(r'<path d="M([\d.,L -]+)" fill="none"', picture)
        points = [tuple(map(float, point.split())) for line in lines for point in line.split("L")]
        points += [
            (float(x) + float(w), float(y))
            for x, y, w in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)"', picture)
        ]
        assert len(points) > 10 and all(0 <= x <= width and 0 <= y <= height for x, y in points), name


def test_citation_is_whole():
    """What CFF 1.2.0 asks for, the package's version and licence, and five papers with authors."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the docs extra")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["message"] and cited["title"] and cited["authors"]
    assert str(cited["version"]) == sectorch.__version__ and cited["license"] == "Apache-2.0"
    assert len(cited["references"]) == 5
    assert all(paper["type"] and paper["title"] and paper["authors"] for paper in cited["references"])
