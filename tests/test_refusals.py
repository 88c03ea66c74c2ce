"""Errors: each says when it comes, has a text that the code raises, and says what to do."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import sectorch
from sectorch import errors

ROOT = Path(__file__).parent.parent
NEVER_RAISED = {"SectorchError", "PerturbationError", "ModuleFault", "ProtocolFault"}
"""Roots, and two whose text is a report."""
LEAST = 10
"""Letters that a text must have of its own, so that a template of placeholders alone matches nothing."""


def refusals():
    """The program that makes the page."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("refusals")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@cache
def entries() -> list:
    return [refusals().entry(kind) for kind in refusals().kinds()]


@cache
def constants() -> dict[str, str]:
    """The texts that modules of the package give a name in capital letters."""
    found = {}
    for path in sorted((ROOT / "sectorch").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
                found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return {name: text for name, text in found.items() if name.isupper()}


def pattern(node: ast.expr) -> str:
    """A regular expression of the texts that an expression gives."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return pattern(node.left) + pattern(node.right)
    if isinstance(node, ast.Name):
        return re.escape(constants()[node.id]) if node.id in constants() else ".*"
    return ".+"


@cache
def raised() -> dict[str, list[str]]:
    """Patterns of the texts of each class, as calls of it and of `warnings.warn` give them; "" has all f-strings."""
    found = defaultdict(list)
    for path in sorted((ROOT / "sectorch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found[""].append(pattern(node))
            elif isinstance(node, ast.Call) and node.args:
                names = [part.id for part in (node.func, *node.args) if isinstance(part, ast.Name)]
                for name in (name for name in names if name.endswith(("Error", "Warning"))):
                    found[name].append(pattern(node.args[0]))
    return {
        name: [one for one in every if len(re.sub(r"\.[+*]|\W", "", one)) >= LEAST] for name, every in found.items()
    }


def test_every_error_says_what_to_do():
    lacking = [
        f"{one.kind.__name__}: {part}" for one in entries() for part in ("when", "todo") if not getattr(one, part)
    ]
    assert len(entries()) > 70 and not lacking, "\n".join(lacking)
    for one in entries():
        assert one.when.endswith((".", "...")) and one.todo.endswith("."), one.kind


def test_every_example_is_a_text_of_the_code():
    """As the class raises it somewhere; where another function makes the text, as that one does."""
    wrong = []
    for one in entries():
        name = one.kind.__name__
        if name in NEVER_RAISED:
            continue
        made = raised().get(name) or raised()[""]
        if name in ("UnsupportedOpError", "EstimatorMissingError"):  # `unsupported` and `needed` make them, of tables
            made = raised()[""]
        if not one.example or not any(re.fullmatch(text, one.example) for text in made):
            wrong.append(f"{name}: {one.example or 'no example'}")
    assert not wrong, "\n".join(wrong)


def test_every_exported_error_is_on_the_page():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for module in [errors, *(m for name, m in sorted(sys.modules.items()) if name.startswith("sectorch."))]:
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, errors.SectorchError) and not name.startswith("_"):
                assert f"\n### {value.__name__}\n" in page, f"{module.__name__}.{name}"
    for one in entries():
        assert f"`{one.named}`" in page
        package, _, name = one.named.rpartition(".")
        assert getattr(importlib.import_module(package), name) is one.kind


def test_the_help_of_an_error_says_what_to_do():
    """`help(sectorch.errors.QuotaError)`, where there is no page."""
    assert "What to do:" in (inspect.getdoc(sectorch.errors.QuotaError) or "")
