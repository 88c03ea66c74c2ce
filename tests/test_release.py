"""The checks before a release find what they are for, in a small repository of their own."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

import sectorch

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("release", ROOT / "tools/release.py")
assert _spec is not None and _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)


def git(folder: Path, *words: str) -> None:
    me = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    subprocess.run(["git", *me, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Version 1.2 of a package of two files, committed."""
    for name, text in {
        "pyproject.toml": (
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n\n[project]\n'
            'name = "sectorch"\nversion = "1.2"\n\n[tool.setuptools]\npackages = ["sectorch"]\n'
        ),
        "sectorch/__init__.py": '__version__ = "1.2"\n',
        "CITATION.cff": "title: a\nversion: 1.2\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2\n\n- All.\n\n## 1.1\n\n- Less.\n",
        ".gitignore": "dist/\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    return tmp_path


def test_each_check_is_listed_with_a_line(capsys):
    assert release.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(release.CHECKS) and all(line.endswith(".") for line in lines)


def test_the_cheap_checks_pass_and_say_what_they_saw(small: Path, capsys):
    assert release.main(["--only", "version", "--only", "tree", "--only", "tag"], small) == 0
    out = capsys.readouterr().out
    assert out.count("ok  ") == 3 and "1.2 in pyproject.toml" in out and "v1.2 is free" in out


@pytest.mark.parametrize(
    "name, old, new, said",
    [
        ("sectorch/__init__.py", "1.2", "1.3", "sectorch/__init__.py says '1.3' and pyproject.toml '1.2'"),
        ("CITATION.cff", "version: 1.2", "version: 1.1", "CITATION.cff says '1.1'"),
        ("CHANGELOG.md", "## 1.2", "## Unreleased", "CHANGELOG.md says 'Unreleased'"),
        ("CHANGELOG.md", "- All.\n\n", "", "says nothing about 1.2"),
        ("pyproject.toml", 'version = "1.2"', "", "pyproject.toml has no line"),
    ],
)
def test_versions_that_differ_are_named(small: Path, capsys, name: str, old: str, new: str, said: str):
    path = small / name
    path.write_text(path.read_text().replace(old, new, 1))
    assert release.main(["--only", "version"], small) == 1
    assert said in capsys.readouterr().out


def test_what_is_not_committed_and_a_tag_that_is_taken_are_named(small: Path, capsys):
    (small / "new.py").write_text("")
    git(small, "tag", "v1.2")
    assert release.main(["--only", "tree", "--only", "tag"], small) == 1
    out = capsys.readouterr().out
    assert "1 files are not committed, as new.py" in out and "v1.2 is there already" in out and "2 of 2" in out


def test_wheel_and_source_distribution_are_of_what_is_committed(small: Path, capsys):
    (small / "sectorch/forgotten.py").write_text("")
    assert release.main(["--only", "build"], small) == 0, capsys.readouterr().out
    assert {path.suffix for path in (small / "dist").iterdir()} == {".whl", ".gz"}
    (wheel,) = (small / "dist").glob("*.whl")
    assert release._names(wheel) == {"sectorch/__init__.py"}


def test_every_name_in_the_migration_page_is_there():
    """What stands in the middle column as a dotted name of sectorch's."""
    rows = re.findall(r"^\| .*? \| (.*?) \|", (ROOT / "docs/migrating.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"\bsectorch(?:\.\w+)+", row)}
    assert len(names) > 8
    for name in sorted(names):
        value = sectorch
        for part in name.split(".")[1:]:
            value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")
