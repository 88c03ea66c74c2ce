"""The house rules that a parser can check: who imports whom, who asks who is here, where randomness comes from."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sectorch

ROOT = Path(sectorch.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LEVELS = (
    "errors",
    "files",
    "ring",
    "scheme",
    "limbs",
    "products",
    "bitplanes",
    "randomness",
    "located",
    "roles",
    "declaration",
    "steps",
    "choreography",
    "runtime",
    "mpc",
    "garbled",
    "session",
    "tensor",
    "aggregation",
    "table",
    "magnitudes",
    "private",
    "dispatch",
    "ops",
    "registry",
    "ckks",
    "nn",
    "testing",
    "data",
    "privacy",
    "command",
    "protocols",
    "network",
    "cli",
)
"""A module may import from its own level and from those above it in this list."""

NO_OTHER_RANDOMNESS = LEVELS[: LEVELS.index("ops") + 1]


def name_of(path: Path) -> str:
    """sectorch/mpc/relu.py -> mpc.relu; sectorch/mpc/__init__.py -> mpc; sectorch/__init__.py -> the empty name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text(), str(path)) for path in FILES}
PACKAGES = {name_of(path) for path in FILES if path.name == "__init__.py"}
MODULES = [name for name in TREES if name]


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "sectorch"]
            found |= {name.removeprefix("sectorch").removeprefix(".") for name in names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parts = module.split(".") if module else []
                # One dot is the package itself for a package, and its parent for a module.
                base = parts[: len(parts) - node.level + (module in PACKAGES)]
            elif (node.module or "").split(".")[0] == "sectorch":
                base = []
            else:
                continue
            inside = (node.module or "").removeprefix("sectorch" if not node.level else "").strip(".")
            prefix = ".".join([*base, *([inside] if inside else [])])
            for alias in node.names:
                full = f"{prefix}.{alias.name}".strip(".")
                found.add(full if full in TREES else prefix)
    return found - {module}


def level(module: str) -> int:
    top = module.split(".")[0]
    assert top in LEVELS, f"sectorch/{top} has no place in the import chain; give it one in LEVELS"
    return LEVELS.index(top)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_upward(module: str):
    for imported in sorted(imports(module)):
        assert imported, f"{module} imports the package itself; import the module that is meant"
        assert level(imported) <= level(module), f"{module} imports {imported}, which is further down the chain"


def test_the_chain_is_read_right():
    """The test above finds what it should, in the forms that imports take."""
    assert "choreography" in imports("mpc.relu")
    assert {"mpc.mask", "mpc.shares"} <= imports("mpc.relu")
    assert "runtime.ledger" in imports("runtime.local")
    assert "products" in imports("ops.linear"), "from .. import products"
    assert imports("errors") == set()


def test_no_import_cycles():
    # Importing a module imports its packages first, but for those that it is in.
    TopologicalSorter({module: imports(module) - {""} for module in MODULES}).prepare()


def test_every_level_that_exists_is_used():
    assert {module.split(".")[0] for module in MODULES} <= set(LEVELS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short_and_say_what_they_are(path: Path):
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(TREES[name_of(path)])


@pytest.mark.parametrize("module", MODULES)
def test_no_assert_statements(module: str):
    found = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Assert)]
    assert found == [], "input is checked by raising a typed error"


@pytest.mark.parametrize("module", MODULES)
def test_only_runtimes_ask_who_is_here(module: str):
    if module.split(".")[0] in ("runtime", "session", "steps", "choreography"):
        return
    found = [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute) and node.attr == "here"]
    assert found == [], "protocol code never asks which party it is"


def dotted(node: ast.AST) -> str:
    """a.b.c of an attribute chain, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


SAMPLERS = re.compile(
    r"rand\w*|manual_seed|bernoulli_?|multinomial|normal_?|(uniform|exponential|cauchy|geometric)_|random_"
)
LOADERS = re.compile(
    r"((np|numpy)\.random|random|pickle|secrets)(\..*)?|torch\.(load|Generator|default_generator|\w+_rng_state)"
)


def forbidden(name: str) -> bool:
    """Whether a dotted name draws random numbers, or reads what could hold a secret's seed."""
    return bool(LOADERS.fullmatch(name) or ("." in name and SAMPLERS.fullmatch(name.rsplit(".", 1)[1])))


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in NO_OTHER_RANDOMNESS])
def test_secrets_have_one_source_of_randomness(module: str):
    tree = TREES[module]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            # Calls only: a dispatch table may name torch.bernoulli in order to refuse it.
            names.add(dotted(node.func))
    assert {name for name in names if forbidden(name)} == set()


@pytest.mark.parametrize(
    "name",
    [
        *("torch.rand", "torch.randn_like", "torch.randint", "torch.manual_seed", "np.random.normal", "numpy.random"),
        *("random", "random.random", "pickle", "pickle.loads", "torch.load", "torch.Generator", "x.uniform_"),
    ],
)
def test_the_rule_on_randomness_finds(name: str):
    assert forbidden(name)


@pytest.mark.parametrize("name", ["random_bits", "net.common", "os.urandom", "self._draws", "json.load"])
def test_the_rule_on_randomness_allows(name: str):
    assert not forbidden(name)
