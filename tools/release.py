"""The checks before a release, one after the other; nothing is uploaded, tagged or changed outside dist/.

    python tools/release.py                 # all of them; prints what was done and what a person does next
    python tools/release.py --list
    python tools/release.py --only version --only tree

No network is needed: the wheel is installed into a fresh environment, which borrows the packages that sectorch depends
on from the one that runs this. The last line is for a person to do, since it cannot be taken back.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Failed(Exception):
    """A check that was not passed; says what to do."""


def said(*command: object, folder: Path, **more: str) -> str:
    """Standard output of a command.

    Raises:
        Failed: with the last lines of its standard error.
    """
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, capture_output=True, text=True, env={**os.environ, **more}
    )
    if done.returncode:
        last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise Failed(f"{' '.join(map(str, command))[:100]} failed: {last}")
    return done.stdout


def found(path: Path, pattern: str) -> str:
    """What a pattern's group finds first in a file."""
    hit = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if hit is None:
        raise Failed(f"{path.name} has no line like {pattern}")
    return hit[1]


def version_of(root: Path) -> str:
    """The version in pyproject.toml."""
    return found(root / "pyproject.toml", r'^version = "(.+)"$')


def version(root: Path) -> str:
    """One version in pyproject.toml, the package, CITATION.cff and the top of CHANGELOG.md."""
    wanted = version_of(root)
    for place, pattern in (
        ("sectorch/__init__.py", r'^__version__ = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("CHANGELOG.md", r"^## (.+)$"),
    ):
        there = found(root / place, pattern)
        if there != wanted:
            raise Failed(f"{place} says {there!r} and pyproject.toml {wanted!r}; make them one")
    if re.search(rf"^## {re.escape(wanted)}\n+##? ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE):
        raise Failed(f"CHANGELOG.md says nothing about {wanted}")
    return f"{wanted} in pyproject.toml, sectorch/__init__.py, CITATION.cff and at the top of CHANGELOG.md"


def tree(root: Path) -> str:
    """Nothing that is not committed."""
    changed = said("git", "status", "--porcelain", folder=root).splitlines()
    if changed:
        raise Failed(f"{len(changed)} files are not committed, as {changed[0][3:]}; commit or remove them")
    return f"clean at {said('git', 'rev-parse', '--short', 'HEAD', folder=root).strip()}"


def tag(root: Path) -> str:
    """The version's tag is free, here; where it is pushed to is for a person to look at."""
    name = f"v{version_of(root)}"
    if said("git", "tag", "--list", name, folder=root).strip():
        raise Failed(f"the tag {name} is there already; raise the version (a tag that was pushed is never moved)")
    return f"{name} is free in this repository"


def docs(root: Path) -> str:
    """Generated tables and figures are those of the code."""
    said(sys.executable, "docs/generate.py", "--check", folder=root, PYTHONPATH=str(root))
    return "generated tables and figures equal the code"


def site(root: Path) -> str:
    """The site builds, with warnings as errors."""
    with tempfile.TemporaryDirectory() as made:
        said(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", made, folder=root,
             NO_MKDOCS_2_WARNING="1", PYTHONPATH=str(root))  # fmt: skip
        pages = len(list(Path(made).rglob("*.html")))
    return f"{pages} pages without a warning"


def build(root: Path) -> str:
    """Wheel and source distribution of what is committed, in dist/; the wheel from either is the same files."""
    out = root / "dist"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source, again = Path(folder, "source"), Path(folder, "again")
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
        _unpack(io.BytesIO(archive), source)
        make = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
        wheel, sdist = (
            out / said(sys.executable, "-c", make, kind, out, folder=source).split()[-1] for kind in ("wheel", "sdist")
        )
        _unpack(io.BytesIO(sdist.read_bytes()), again)
        inside = again / sdist.name.removesuffix(".tar.gz")
        other = said(sys.executable, "-c", make, "wheel", again, folder=inside).split()[-1]
        if _names(wheel) != _names(again / other):
            lost = sorted(_names(wheel) ^ _names(again / other))
            raise Failed(f"a wheel of the source distribution differs in {len(lost)} files, as {lost[0]}")
    digests = (f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:16]})" for path in (wheel, sdist))
    return f"dist/ has {' and '.join(digests)}"


def install(root: Path) -> str:
    """The wheel in a fresh environment: import, command, and the quickstart's code in an empty folder."""
    wanted = version_of(root)
    wheels = list((root / "dist").glob(f"sectorch-{wanted}-*.whl"))
    if len(wheels) != 1:
        raise Failed(f"dist/ has {len(wheels)} wheels of {wanted}; the check 'build' makes one")
    with tempfile.TemporaryDirectory() as folder:
        home, empty = Path(folder, "fresh"), Path(folder, "empty")
        empty.mkdir()
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        packages = Path(
            said(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=empty).strip()
        )
        said(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheels[0], folder=empty)
        # A plain path: the .pth files there, of editable installs, are not followed.
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        clean = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        where = said(
            python, "-c", "import sectorch; print(sectorch.__version__, sectorch.__file__)", folder=empty, **clean
        )
        if where.split()[0] != wanted or not where.split()[1].startswith(str(home)):
            raise Failed(f"the fresh environment imports {where.strip()}")
        named = said(home / "bin" / "sectorch", "--version", folder=empty, **clean).strip()
        if named != f"sectorch {wanted}":
            raise Failed(f"sectorch --version says {named!r}")
        text = (root / "docs/quickstart.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (empty / "quickstart.py").write_text("\n".join(blocks), encoding="utf-8")
        said(python, "quickstart.py", folder=empty, **clean)
    return f"{wheels[0].name} alone: import, command and {len(blocks)} blocks of the quickstart"


def _unpack(archive: io.BytesIO, folder: Path) -> None:
    with tarfile.open(fileobj=archive) as held:
        if hasattr(tarfile, "data_filter"):
            held.extractall(folder, filter="data")
        else:
            held.extractall(folder)


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as held:
        return {name for name in held.namelist() if ".dist-info/" not in name}


CHECKS: dict[str, Callable[[Path], str]] = {
    check.__name__: check for check in (version, tree, tag, docs, site, build, install)
}

NEXT = """next, by a person:
  1. make test and make test-long, on a quiet machine
  2. read CHANGELOG.md and docs/migrating.md once more, as somebody who uses {before}
  3. git tag -s v{version} -m "sectorch {version}", and push the tag
  4. give dist/sectorch-{version}* to those who install it, with their SHA-256; on a package index only once the name
     is ours there (README.md, docs/quickstart.md and tests/test_docs.py say that it is on none)"""


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The exit status: 0 if all checks that were asked for are passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what is checked")
    parser.add_argument("--only", action="append", choices=CHECKS, metavar="NAME", help="this one; may be repeated")
    options = parser.parse_args(arguments)
    if options.list:
        for name, check in CHECKS.items():
            print(f"{name:9}{(check.__doc__ or '').strip().splitlines()[0]}")
        return 0
    failed = 0
    for name in options.only or CHECKS:
        try:
            print(f"ok      {name:9}{CHECKS[name](root)}", flush=True)
        except Failed as problem:
            failed += 1
            print(f"FAILED  {name:9}{problem}", flush=True)
    if failed:
        print(f"{failed} of {len(options.only or CHECKS)} checks failed: nothing is ready")
        return 1
    if not options.only:
        earlier = re.findall(r"^## (\d\S*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
        print(NEXT.format(version=version_of(root), before=earlier[1] if len(earlier) > 1 else "nothing yet"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
