"""The documents: every Python block runs, generated tables are fresh, links and paths exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import sys
import warnings
from pathlib import Path

import pytest
from cases import long, some
from commands import run_command

from sectorch.choreography import PROTOCOLS
from sectorch.errors import LeakyProtocolWarning
from sectorch.ops.registry import REGISTERED
from sectorch.tensor.table import SHARES

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^(?P<before>[^\n]*)\n```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = "<!-- not run -->"
EXCERPT = re.compile(r"<!-- from ([\w/.]+) -->")
PATHS = re.compile(r"`((?:sectorch|examples|benchmarks|docs|tests|tools)/[\w/.-]*\w/?)`")


OUTPUT = re.compile(r"```\n\n<!-- output -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""What a block prints, shown under it."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks that are to be run, each with its first line's number."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start("code")) + 1, found["code"])
        for found in FENCE.finditer(text)
        if found["before"].strip() != NOT_RUN and not EXCERPT.fullmatch(found["before"].strip())
    ]


def outputs(page: Path) -> dict[int, str]:
    """What the pages say that a block prints, by the number of the block's last line."""
    text = page.read_text(encoding="utf-8")
    return {text.count("\n", 0, found.start()) + 1: found[1] for found in OUTPUT.finditer(text)}


def excerpts(page: Path) -> list[tuple[str, str]]:
    """The Python blocks that are shown from a file: its path, and the lines."""
    found = ((EXCERPT.fullmatch(block["before"].strip()), block) for block in FENCE.finditer(page.read_text("utf-8")))
    return [(marked[1], block["code"]) for marked, block in found if marked]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run(*arguments: str, folder: Path = ROOT) -> None:
    """A Python program in a process of its own, with one thread: more would only get in the way of other tests."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_command([sys.executable, *arguments], cwd=folder, env=one_thread, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def protocols_as_before():
    """A page may declare protocols of its own; other tests read the registry of those that ship."""
    before, registered = dict(PROTOCOLS), set(REGISTERED)
    yield
    PROTOCOLS.clear()
    PROTOCOLS.update(before)
    for func in set(REGISTERED) - registered:
        SHARES._release(func)
        del REGISTERED[func]


RUN_ELSEWHERE = ("docs/privhfl.md", "docs/capc.md", "docs/testing.md")
"""Pages whose blocks take seconds, and do what examples and the tests of the kit do in every run."""


@pytest.mark.parametrize("page", some(filter(blocks, PAGES), lambda page: name(page) not in RUN_ELSEWHERE), ids=name)
def test_python_blocks_run(page: Path, protocols_as_before, monkeypatch, tmp_path, capsys):
    """All blocks of a page run in order in one namespace, and print what stands under them as their output.

    Only the page on the leaky mode may warn, and it must.
    """
    shown = outputs(page)
    namespace = {"__name__": "__main__"}
    monkeypatch.chdir(tmp_path)  # for what a block writes
    with warnings.catch_warnings(record=True) as leaks:
        warnings.simplefilter("error")
        warnings.simplefilter("always", LeakyProtocolWarning)
        for line, code in blocks(page):
            capsys.readouterr()
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
            said = shown.pop(line + code.count("\n"), None)
            assert said is None or capsys.readouterr().out == said
    assert not shown, f"{name(page)} has an output that is of no block that runs"
    assert bool(leaks) == (page.name == "paper-mode.md")


@pytest.mark.parametrize("page", [page for page in PAGES if excerpts(page)], ids=name)
def test_excerpts_are_in_the_code(page: Path):
    """As in the file they are said to be from, but for spaces: lines of another indentation break elsewhere."""
    for path, code in excerpts(page):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert "".join(code.split()) in "".join(source.split()), f"{name(page)}: {code}"


BESIDE = re.compile(r"<!-- the lines of (\S+) -->\n\n\|[^\n]*\n\|[^\n]*\n((?:\|.*\n)+)")
"""A table of a paper's lines and a function's."""


def test_the_papers_lines_stand_beside_the_whole_code():
    """The code cells of a table, one after the other, are the body of the function that it names."""
    pages = {"how-it-works.md": 7, "secsv.md": 4, "privhfl.md": 5, "capc.md": 2}
    of_pages = [BESIDE.findall((ROOT / "docs" / page).read_text(encoding="utf-8")) for page in pages]
    assert [len(found) for found in of_pages] == list(pages.values())
    found = [table for tables in of_pages for table in tables]
    for path, rows in found:
        module, function = path.rsplit(".", 1)
        source = ast.parse(inspect.getsource(importlib.import_module(module)))
        (body,) = (f.body for f in source.body if isinstance(f, ast.FunctionDef) and f.name == function)
        cells = [row.split(" | ", 1)[1].rstrip().removesuffix("|").strip().strip("`") for row in rows.splitlines()]
        cells = [cell.replace("\\|", "|") for cell in cells]
        lines = inspect.getsource(sys.modules[module]).splitlines()[body[1].lineno - 1 : body[-1].end_lineno]
        assert "".join("".join(cells).split()) == "".join("".join(lines).split()), path


def test_blocks_are_found():
    """The search for blocks sees every fence of the pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```python") == len(FENCE.findall(text)), name(page)


SMALLER = {"privhfl": ["--samples", "20", "--local-epochs", "1", "--retraining-epochs", "1", "--architectures", "mlp"]}
"""With which a command of the quickstart takes seconds."""


@pytest.mark.parametrize("smaller", [SMALLER, *long({})], ids=["small", "whole"])
def test_quickstart_commands_run(smaller: dict[str, list[str]], tmp_path: Path):
    """Each line of its shell blocks, in an empty folder: as it stands in long runs, and on less data in others."""
    text = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    assert lines
    for line in lines:
        command, *arguments = shlex.split(line)
        assert command == "sectorch"
        line_of_it = [*arguments, *smaller.get(arguments[0], [])]
        run("-c", "from sectorch.cli.main import main; main()", *line_of_it, folder=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_extras_are_installed_from_a_clone(page: Path):
    """The package is not on PyPI, where its name is anybody's; errors name it where it is installed already."""
    said = page.read_text(encoding="utf-8")
    assert "sectorch[" not in (said.replace("pip install 'sectorch[", "") if page.name == "errors.md" else said)


def test_generated_tables_are_fresh():
    run("docs/generate.py", "--check")


def test_worked_example_is_the_example():
    """The page has its first half, up to the protocol that is refused."""
    example = (ROOT / "examples/new_protocol.py").read_text(encoding="utf-8")
    example = example[: example.index('\n\n\n@protocol("careless"')]
    assert f"```python\n{example}\n```\n" in (ROOT / "docs/writing-a-protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path):
    """Links to files and headings of the repository; others are not followed."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_paths_exist(page: Path):
    for path in PATHS.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{name(page)} names {path}"


def test_links_and_sections_have_words():
    """A link of the site reads as what is behind it, not as a file; a kind of operations has a title."""
    links = re.compile(r"\[([\w-]+\.md)\]\(")
    files = [
        f"{name(page)}: {text}" for page in ROOT.glob("docs/*.md") for text in links.findall(page.read_text("utf-8"))
    ]
    titles = re.findall(r"^### (.*)$", (ROOT / "docs/ops.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert not files and len(titles) > 17 and not [title for title in titles if title[0].islower()]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, name(page)
    for page in ROOT.glob("docs/api/*.md"):
        listed = (page.parent / "index.md").read_text(encoding="utf-8")
        assert page.name == "index.md" or f"({page.name})" in listed, name(page)
