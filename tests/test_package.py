"""The wheel installs alone: the package and nothing else, asking for what it imports, no more and no less."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import sectorch

ROOT = Path(__file__).parent.parent
SOURCES = sorted(ROOT.glob("sectorch/**/*.py"))
FROM = {
    "nacl": "pynacl", "sklearn": "scikit-learn", "opentelemetry": "opentelemetry-sdk",
    "PIL": "torchvision", "llvmlite": "numba",
}  # fmt: skip
"""Packages that come from a distribution of another name; the last two with one that needs them."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, with setuptools as it is here: a build leaves files in its folder."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "sectorch", folder / "sectorch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "sectorch_pytest.py"):
        shutil.copy(ROOT / name, folder)
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(folder / done.stdout.split()[-1])


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    others = {"sectorch/py.typed", "sectorch_pytest.py", "sectorch/network/audit.html"}
    assert names == {str(path.relative_to(ROOT)) for path in SOURCES} | others
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    said = wheel.read(points).decode()
    assert "sectorch = sectorch.cli.main:main" in said and "[pytest11]\nsectorch = sectorch_pytest" in said
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


@pytest.mark.sectorch_long
@pytest.mark.parametrize(
    ("right", "broken", "said"),
    [
        ("", "", "2 passed"),
        ("torch.log(x)", "torch.log2(x)", "and 1e-05 is stated"),
        ('x.shape, "r")', 'x.shape, "r") & ((1 << 40) - 1)', "S tells x = "),
    ],
    ids=["sound", "a wrong operation", "a mask that is too short"],
)
def test_a_users_file_from_the_wheel(wheel, tmp_path: Path, right: str, broken: str, said: str):
    """The file of docs/testing.md, in an empty folder: sound, and with a fault that is found."""
    (text,) = re.findall(
        r"<!-- test_mine.py -->\n```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL
    )
    home, folder = tmp_path / "home", tmp_path / "mine"
    wheel.extractall(home)
    folder.mkdir()
    (folder / "test_mine.py").write_text(text.replace(right, broken))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=clean | {"PYTHONPATH": str(home)}, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert said in done.stdout and (done.returncode == 0) == (not broken), done.stdout + done.stderr


def described(wheel: zipfile.ZipFile) -> str:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    return wheel.read(name).decode()


def required(wheel: zipfile.ZipFile) -> tuple[set[str], set[str]]:
    """Distributions that the wheel asks for: always, and in some extra."""
    lines = re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", described(wheel), re.MULTILINE)
    always = {normal(name) for name, rest in lines if "extra ==" not in rest}
    return always, {normal(name) for name, rest in lines if "extra ==" in rest}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_wheel_says_what_it_is(wheel: zipfile.ZipFile):
    text = described(wheel)
    assert f"\nVersion: {sectorch.__version__}\n" in text and "\nRequires-Python: >=3.10\n" in text
    assert "\nClassifier: Typing :: Typed\n" in text and "\n# sectorch\n" in text
    assert all(
        re.search(r">=\d", rest) for rest in re.findall(r"^Requires-Dist: (?!sectorch)(.*)$", text, re.MULTILINE)
    )


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Other packages that a file imports, and whether the import is at its top, so that nothing works without."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        else:
            continue
        for name in names:
            package = name.split(".")[0]
            if package not in sys.stdlib_module_names:
                yield package, node in tree.body


def test_dependencies_are_what_is_imported(wheel: zipfile.ZipFile):
    """An import at the top is a dependency; one inside a function, of an optional package, at least in an extra."""
    always, extra = required(wheel)
    used: set[str] = set()
    for path in SOURCES:
        for package, top in imported(path):
            home = normal(FROM.get(package, package))
            used.add(home)
            assert home in always or (not top and home in extra), f"{path.relative_to(ROOT)} imports {package}"
    assert always == used & always, f"asked for, and not used: {sorted(always - used)}"
