"""The house rules that a parser can check: who imports whom, who asks who is here, where randomness comes from."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sectorch

ROOT = Path(sectorch.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LEVELS = (
    "signal_handling",
    "errors",
    "deprecation",
    "optional_deps",
    "files",
    "display",
    "ring",
    "config",
    "choreography",
    "sealed",
    "backend",
    "mpc",
    "garbled",
    "transcript",
    "audits",
    "decoys",
    "session",
    "secure_sum",
    "tensor",
    "ops",
    "ckks",
    "fitted_models",
    "nn",
    "serving",
    "training",
    "estimators",
    "testing",
    "data",
    "dp",
    "tables",
    "cli.command",
    "federated",
    "protocols",
    "network",
    "testing.local_network",
    "testing.relay",
    "cli",
    "__main__",
)
"""A module may import from its own level and from those above it in this list."""

NO_OTHER_RANDOMNESS = LEVELS[: LEVELS.index("ops") + 1]

WATCHING = "choreography.program.rng_guard"
"""Looks whether generators were drawn from, and draws nothing."""


def name_of(path: Path) -> str:
    """sectorch/mpc/star/relu.py -> mpc.star.relu; mpc/__init__.py -> mpc; sectorch/__init__.py -> no name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in FILES}
PACKAGES = {name_of(path) for path in FILES if path.name == "__init__.py"}
MODULES = [name for name in PATHS if name]


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(PATHS[module].read_text(), str(PATHS[module]))


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(tree(module)):
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
                found.add(full if full in PATHS else prefix)
    return found - {module}


def level(module: str) -> int:
    top = module if module in LEVELS else module.split(".")[0]
    assert top in LEVELS, f"sectorch/{top} has no place in the import chain; give it one in LEVELS"
    return LEVELS.index(top)


def nobody(rule: str, offences: Iterable[tuple[str, Iterable]]) -> None:
    """Fail with every file that breaks a rule, and where."""
    found = {name: sorted(places) for name, places in offences}
    said = "\n".join(f"{name}: {', '.join(map(str, places))}" for name, places in found.items() if places)
    assert not said, f"{rule}\n{said}"


def test_imports_point_upward():
    assert len(MODULES) > 150
    whole = "import the module that is meant, not the package itself"
    nobody(whole, ((module, {"sectorch"} if "" in imports(module) else ()) for module in MODULES))
    nobody(
        "what is imported is further down the chain",
        ((m, [i for i in imports(m) if i and level(i) > level(m)]) for m in MODULES),
    )


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] in ("tensor", "ops")])
def test_operations_know_a_backend_and_no_protocol(module: str):
    assert [name for name in imports(module) if name.split(".")[0] == "mpc"] == []
    found = [n.lineno for n in ast.walk(tree(module)) if isinstance(n, ast.Attribute) and n.attr in ("A", "S", "D")]
    assert found == [], "who computes is the backend's to know"


def test_the_chain_is_read_right():
    """The test above finds what it should, in the forms that imports take."""
    assert "choreography" in imports("mpc.star.relu")
    assert {"mpc.star.masking", "mpc.star.shares"} <= imports("mpc.star.relu")
    assert "choreography.ledger" in imports("choreography.run.local")
    assert "ring.products" in imports("ops.linear"), "from ..ring import products"
    assert imports("errors") == set()


def test_no_import_cycles():
    # Importing a module imports its packages first, but for those that it is in.
    TopologicalSorter({module: imports(module) - {""} for module in MODULES}).prepare()


ROLES_OF_ITS_OWN = """
import sys, types
package = types.ModuleType("sectorch")
package.__path__ = [sys.argv[1]]
sys.modules["sectorch"] = package  # without sectorch/__init__.py, which imports everything
import torch
from sectorch.choreography import Message, Net, Party, Phase, Roles, protocol
from sectorch.choreography.roles import Cast
from sectorch.choreography.run.local import LocalRuntime

roles = Roles("Left Right", "Left-Right")

class Calls(list): pass

@protocol("masked_sum", "here", [Message("masked", "Left", "Right", "r of the pair")], roles)
def masked_sum(net, x, y):
    net.state(Calls).append("masked_sum")
    r = net.common(net.Left, net.Right, x.shape, "r")
    return (x + r).send(net.Left, net.Right, "masked") - r + y

cast = Cast(roles, {name: Party(name, name) for name in roles.names})
net = Net(LocalRuntime(frozenset(cast.parties.values())), 0, cast, Phase.OFFLINE)
net.install(net.Left, net.Right, net.fresh(net.Left, lambda: torch.arange(32, dtype=torch.uint8)))
x, y = (net.own(party, torch.arange(3) + i) for i, party in enumerate((net.Left, net.Right)))
assert net.read(masked_sum(net, x, y), net.Right).tolist() == [1, 3, 5]
assert net.state(Calls) == ["masked_sum"] and Net(net.runtime, 1, cast, Phase.OFFLINE).state(Calls) == []
print(*(name for name in sys.modules if name.startswith("sectorch.")))
"""


def test_a_choreography_with_roles_of_its_own_runs_without_a_protocol_of_the_package():
    command = [sys.executable, "-W", "ignore", "-c", ROLES_OF_ITS_OWN, str(ROOT)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert {name.split(".")[1] for name in found.stdout.split()} == {
        "choreography",
        "deprecation",
        "display",
        "errors",
        "optional_deps",
    }


def test_the_net_names_nothing_of_a_set_of_protocols():
    protocols = [module for module in MODULES if module.split(".")[0] in ("mpc", "garbled", "backend")]
    classes = {node.name for module in protocols for node in tree(module).body if isinstance(node, ast.ClassDef)}
    words = set(re.findall(r"\w+", PATHS["choreography.net"].read_text()))
    assert not words & {*classes, "mpc", "star", "garbled", "backend", "dealer", "STAR"}


def test_every_level_that_exists_is_used():
    assert {module.split(".")[0] for module in MODULES} <= set(LEVELS)


def lines_of(module: str, wanted: Callable[[ast.AST], bool]) -> list[int]:
    return [node.lineno for node in ast.walk(tree(module)) if wanted(node)]


def test_files_say_what_they_are():
    nobody("a file says what it is for", ((name, [] if ast.get_docstring(tree(name)) else [1]) for name in PATHS))


def test_no_assert_statements():
    offences = ((module, lines_of(module, lambda node: isinstance(node, ast.Assert))) for module in MODULES)
    nobody("input is checked by raising a typed error", offences)


def test_only_runtimes_ask_who_is_here():
    asks = lambda node: isinstance(node, ast.Attribute) and node.attr == "here"
    asked = [module for module in MODULES if module.split(".")[0] not in ("session", "choreography")]
    nobody("protocol code never asks which party it is", ((module, lines_of(module, asks)) for module in asked))


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


def test_secrets_have_one_source_of_randomness():
    secret = [module for module in MODULES if module.split(".")[0] in NO_OTHER_RANDOMNESS and module != WATCHING]
    nobody(
        "randomness for secrets comes from the streams of a session",
        ((module, filter(forbidden, used_names(module))) for module in secret),
    )


def used_names(module: str) -> set[str]:
    """What a module imports and calls, as dotted names."""
    names = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            # Calls only: a dispatch table may name torch.bernoulli in order to refuse it.
            names.add(dotted(node.func))
    return names


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
