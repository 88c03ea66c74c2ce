"""House rules on names and files: one concept, one file; names are the field's; what a text names exists.

Each list of exceptions may only shrink: an entry that is not needed any more fails as one that is missing does.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from test_imports import MODULES, PACKAGES, PATHS, imports, nobody, tree

ROOT = Path(__file__).parent.parent

PAPERS = ("protocols", "federated")
"""Packages that follow the words of their papers: the rules on names leave them out."""

SINGLE_IMPORTERS = {
    "cli.main": "the entry point of the command; `python -m sectorch` is the other one",
    "mpc.leaky": "hazardous: its path says so, and a reader sees it in each import",
    "mpc.plain": "the second backend, the functions that the protocols must equal",
    "mpc.star.linear": "Pi_Matmul, Figure 3: a protocol of the paper is one file",
    "mpc.star.maximum": "max-pooling, 3.3 (iii): a protocol of the paper is one file",
    "mpc.star.square_sum": "sums of squares in Z_2^128: a protocol is one file",
    "network.federation.sealed_channel": "the encryption between parties through a server, to be reviewed alone",
    "nn.passes": "graph passes, a term of compilers",
    "ring.fieldloops": "compiled loops, loaded by name at their first use",
}
"""Modules with a single importer, and why each stands alone."""

WORDS = frozenset(re.findall(r"\w+", """
    told owed settled said joined taken whole others apart among everywhere kept asked made held shown known again
    brought given drawn found seen sent done gone meant both all any such rows fewer more most same other own itself
    them it him those these this that before after ahead beside within under together alone left put of_two
"""))  # fmt: skip
"""Participles, pronouns and other words that name nothing when they stand alone."""

FIELD_WORDS = frozenset({"embed", "feed", "garbled", "need", "seed", "speed"})
"""Words in -ed that the field uses, or that are no participles."""

NAMES = {
    "choreography.located.Located": "a located value is the word of choreographic programming",
    "choreography.located.py": "as above",
    "choreography.net.Sent": "exported; a message as it was sent",
    "mpc.star.masking.Masked": "a masked value",
    "ring.jit.compiled": "a decorator",
    "sealed.py": "sealed storage is the field's term",
    "tensor.holders.announced": "to be renamed",
    "tensor.shared.py": "the file of `SharedTensor`",
    "testing.protocol_runs.Given": "exported; an input that a user gives to `check_protocol`",
    "tables.table.owned": "exported: `sectorch.owned(frame)`",
    "training.tensor.shared": "exported: `sectorch.shared(model)`",
}
"""Public names and file names that are such a word, and why each stays."""

TORCH_NAMES = frozenset({"put", "searchsorted", "where"})
"""Handlers are called as torch's function is."""

PROTOCOL_CLASSES = {
    "backend.Backend": "the protocols, and the plain functions",
    "backend.Value": "shares, and plain numbers",
    "choreography.net.Runtime": "all parties here, none, or one",
    "choreography.run.party.MessageChannel": "a link's channel, a pipe, a test's queue",
    "mpc.star.dealing_proofs.ClaimSums": "sums of one claim, or of several",
    "network.observe.MonitoredParty": "a server, an answering party, a federation's party",
    "network.parties.remote_model.QueryConnection": "a connection, or a federation's party",
}
"""Subclasses of `typing.Protocol`, and what each stands for."""


def importers() -> dict[str, set[str]]:
    """For each module, the modules of the package that import it, wherever in the file."""
    found = defaultdict(set)
    for module in PATHS:
        for name in imports(module):
            found[name].add(module)
    return found


def single_importers() -> set[str]:
    """Modules that one other module imports and no package's `__init__`, outside the papers.

    A package's `__init__` imports a module to export it or to register its handlers: the module is then a part of the
    package. A module without an importer is entered by its name (a command, compiled loops, a check for tests).
    """
    found = importers()
    alone = {name for name in MODULES if name not in PACKAGES and len(found[name]) == 1 and not found[name] & PACKAGES}
    return {name for name in alone if name.split(".")[0] not in PAPERS}


def test_a_module_with_one_importer_says_why_it_stands_alone():
    """The first line of its docstring does, or the list above."""
    said = {name for name in single_importers() if "own file" in (ast.get_docstring(tree(name)) or "").split("\n")[0]}
    exactly("join it with its importer, or say why it stands alone", single_importers() - said, SINGLE_IMPORTERS)


def exactly(rule: str, found: set[str], listed: dict[str, str]) -> None:
    """Fail with what a list of exceptions lacks, and with what it need not hold any more."""
    assert all(listed.values())
    nobody(rule, [("not in the list", found - set(listed)), ("to be taken off the list", set(listed) - found)])


def public(module: str) -> list[ast.ClassDef | ast.FunctionDef]:
    """Classes and functions of a module without a leading underscore."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in tree(module).body if isinstance(node, kinds) and not node.name.startswith("_")]


def says_nothing(name: str) -> bool:
    """Whether a name is a single word that is a participle, a pronoun or the like."""
    word = name.lower()
    participle = re.fullmatch(r"[A-Z]?[a-z]+ed", name) and word not in FIELD_WORDS
    return word in WORDS or bool(participle)


def test_names_are_nouns_and_verbs():
    found = set()
    for module in MODULES:
        if module.split(".")[0] not in PAPERS:
            last = module.rsplit(".", 1)[-1]
            found |= {f"{module}.py"} if says_nothing(last) else set()
            wrong = (node.name for node in public(module) if says_nothing(node.name))
            found |= {f"{module}.{name}" for name in wrong if not (module.startswith("ops.") and name in TORCH_NAMES)}
    exactly("a name says what the thing is, or what the function does", found, NAMES)


def test_the_rule_on_names_finds():
    assert all(map(says_nothing, ("told", "Told", "owed", "settled", "itself", "rerouted", "Given", "of_two")))
    assert not any(map(says_nothing, ("seed", "share_input", "SharedTensor", "PlantedFault", "find_shared", "Masking")))


def test_no_class_name_stands_twice():
    places = defaultdict(list)
    for module in MODULES:
        if module.split(".")[0] != "protocols":
            for node in public(module):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(module)
    nobody("one word, one thing", ((name, where if len(where) > 1 else ()) for name, where in places.items()))


def test_protocol_classes_are_borders():
    """`typing.Protocol` is for a border that several classes, or a user's own, stand behind."""
    found = {
        f"{module}.{node.name}"
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] == "Protocol" for base in node.bases)
        and module.split(".")[0] not in PAPERS
    }
    exactly("use the class itself", found, PROTOCOL_CLASSES)


def module_givers(module: str) -> dict[str, set[str]]:
    """Functions of a module that give modules, as compiled loops are loaded, and which modules they can give."""
    kinds = (node for node in ast.walk(tree(module)) if isinstance(node, ast.FunctionDef) and node.returns)
    functions = [node for node in kinds if "ModuleType" in ast.unparse(node.returns)]
    found: dict[str, set[str]] = {}
    for _ in range(2):  # of one that asks another too
        for node in functions:
            inside = [*ast.walk(node)]
            names = {str(n.value).removeprefix("sectorch.") for n in inside if isinstance(n, ast.Constant) and n.value}
            asked = {n.func.id for n in inside if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            modules = (names | imported_within(module, node)) & set(MODULES)
            modules |= set().union(*(found[name] for name in asked if name in found))
            if modules:
                found[node.name] = modules
    return found


def imported_within(module: str, node: ast.AST) -> set[str]:
    """Modules that `from . import x` within a node names."""
    package = module.rsplit(".", 1)[0]
    froms = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom) and n.level == 1 and n.module is None]
    return {f"{package}.{alias.name}" for n in froms for alias in n.names}


def test_modules_that_a_function_gives_have_what_is_asked_of_them():
    """No type checker sees it: compiled loops are loaded late, and a matrix unit's only where there is one."""
    givers = {module: found for module in MODULES if (found := module_givers(module))}
    assert {"ring.bitplanes", "mpc.series"} <= set(givers)
    missing, asked = [], 0
    for module in MODULES:
        known = {name: of for where in imports(module) & set(givers) for name, of in givers[where].items()}
        known |= givers.get(module, {})
        if not known:
            continue
        bound: dict[str, set[str]] = {}
        for node in ast.walk(tree(module)):
            value = getattr(node, "value", None)
            targets = [getattr(node, "target", None), *getattr(node, "targets", [])]
            if isinstance(value, ast.Call) and (name := ast.unparse(value.func).rsplit(".", 1)[-1]) in known:
                bound |= {t.id: known[name] for t in targets if isinstance(t, ast.Name)}
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Call)):
                call = isinstance(node.value, ast.Call)
                name = ast.unparse(node.value.func).rsplit(".", 1)[-1] if call else node.value.id
                for of in (known if call else bound).get(name, ()):
                    asked += 1
                    if not hasattr(importlib.import_module(f"sectorch.{of}"), node.attr):
                        missing.append((module, [f"{of}.{node.attr}"]))
    assert asked > 40
    nobody("a module that is loaded late lacks what is asked of it", missing)


# What a text names exists.

FOLDERS = ("sectorch", "tests", "docs", "benchmarks", "examples", "tools", "deploy")
FILES = {
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    if path.suffix in (".py", ".md")
}
CODE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.py)`")
"""A file of Python in backquotes; `model.py:function` and the like are a user's own."""

USERS = {"mine.py", "generated.py"}
"""Names that stand for a user's file, or for text that is no file."""


def texts(path: str) -> Iterator[str]:
    """A page, or the docstrings and comments of a file of Python."""
    source = (ROOT / path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        yield source
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string[:5]):
            yield token.string


def test_files_that_texts_name_exist():
    ends = {"/".join(f.split("/")[i:]) for f in FILES if f.endswith(".py") for i in range(f.count("/") + 1)} | USERS
    read = [f for f in sorted(FILES) if f.endswith((".py", ".md")) and f != "CHANGELOG.md"]
    # Text is looked for where the whole file has such a name, in text or in code.
    read = [f for f in read if set(CODE.findall((ROOT / f).read_text(encoding="utf-8"))) - ends]
    missing = ((f, {name for text in texts(f) for name in CODE.findall(text)} - ends) for f in read)
    nobody("a text names a file that does not exist", missing)


def test_a_file_name_stands_once_among_the_tests():
    places = defaultdict(list)
    for f in sorted(FILES):
        if re.fullmatch(r"tests/.*\.py", f) and not f.endswith(("__init__.py", "__main__.py", "conftest.py")):
            places[Path(f).name].append(f)
    assert len(places) > 200
    nobody("a test file's name stands once", ((n, w if len(w) > 1 else ()) for n, w in places.items()))


TERM = re.compile(r"^\| ([^|]+) \| ([^|]+) \| `([^`|]+)` \| `([^`|]+)` \|$", re.MULTILINE)
"""A row of the glossary: a word, its meaning, its identifier, and the file where that is."""


def test_the_glossary_is_of_the_code():
    rows = TERM.findall((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))
    assert len(rows) > 40
    gone = [(f, () if (ROOT / f).is_file() else ("no such file",)) for _, _, _, f in rows]
    nobody("the glossary names files", gone)
    texts_of = {f: (ROOT / f).read_text(encoding="utf-8") for _, _, _, f in rows}
    absent = ((word, () if re.search(rf"\b{name}\b", texts_of[f]) else (name, f)) for word, _, name, f in rows)
    nobody("a word of the glossary is in its file", absent)
    assert len({word for word, *_ in rows}) == len(rows)
    # A meaning is a sentence or two, or three short ones.
    assert all(meaning.endswith(".") and meaning.count(". ") < 3 for _, meaning, _, _ in rows)
