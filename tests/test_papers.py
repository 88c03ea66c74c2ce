"""The list of the papers' claims, figures and tables: all are in it once, and what it names is there."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from papers import CLAIMS, ITEMS, KINDS, LABELS, NUMBERS, VERDICTS  # noqa: E402  from the documents' folder


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_figure_and_table_is_listed_once(paper):
    listed = [number for item in ITEMS if item.paper == paper for number in item.numbers]
    protocols = [label for label in LABELS[paper] if label.startswith("Figure ")]
    assert sorted(listed + protocols) == sorted(NUMBERS[paper])


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.paper} {item.numbers[0]}")
def test_code_and_command_are_there(item):
    assert item.kind in KINDS and item.found and item.code
    assert all((ROOT / path).exists() for path in item.code), item.code
    if item.kind in ("reproduced", "refuted", "open", "measured"):
        assert item.command, "what is said of it has a command"
    if item.command:
        words = item.command.removeprefix("python ").split()
        script = ROOT / (words[0] if "/" in words[0] else f"benchmarks/{words[0]}")
        parts = [script, *script.parent.glob(f"{script.stem}_*.py")]  # a benchmark of several files
        text = "".join(part.read_text() for part in parts)
        known = [f'"{w}"' in text or f"def {w}(" in text for w in words[1:] if w.isalnum()]
        assert all(known), "a name it does not know"


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_claim_is_listed_once(paper):
    listed = [label for claim in CLAIMS if claim.paper == paper for label in claim.labels]
    assert sorted(listed) == sorted(LABELS[paper])
    assert {claim.paper for claim in CLAIMS} == set(NUMBERS)


@functools.cache
def defined(path: str) -> set[str]:
    """The functions and classes of a file, and their methods as `Class.method`."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, definitions):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else ()
            found |= {f"{node.name}.{method.name}" for method in inner if isinstance(method, definitions)}
    return found


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.paper} {claim.labels[0]}")
def test_code_and_tests_of_a_claim_are_there(claim):
    assert claim.verdict in VERDICTS and claim.says
    for place in (*claim.code, *claim.tests):
        path, name = place.split("::")
        assert name in defined(path), f"{place} is not there"
    assert bool(claim.code) == (claim.verdict != "not built"), "what is built has code"
    assert all(place.split("::")[0].startswith("tests/") for place in claim.tests)
    assert claim.tests or claim.verdict == "not built", "a claim has a test"
    assert claim.found or claim.verdict in ("built", "holds"), "what is wrong or missing is said"
