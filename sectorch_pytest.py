"""pytest's side of `sectorch.testing`: fixtures, a seed that a failure prints, and tests for long runs only.

A module of its own, beside the package: pytest loads it wherever sectorch is installed, and it imports neither torch
nor sectorch until a test asks for one of its fixtures.

    pytest --sectorch-long          # tests marked sectorch_long too, and 1000 examples of each hypothesis property
    pytest -m sectorch_long         # these tests and properties alone
    pytest --sectorch-seed 1234     # the draws of a run that failed with this seed
"""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    import sectorch

LONG = "sectorch_long"
SEED = pytest.StashKey[int]()
LEFT = pytest.StashKey[int]()
EXAMPLES = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sectorch")
    group.addoption(
        "--sectorch-long", action="store_true", help="run tests marked sectorch_long too, and more examples"
    )
    group.addoption("--sectorch-seed", type=int, default=None, metavar="N", help="of what sectorch's fixtures draw")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{LONG}: for pytest --sectorch-long, or -m {LONG}, only")
    if _asked(config):
        with contextlib.suppress(ImportError):  # properties take their number of examples where they are defined
            from hypothesis import settings

            settings.register_profile("sectorch-long", settings.default, max_examples=EXAMPLES, derandomize=False)
            settings.load_profile("sectorch-long")


def _asked(config: pytest.Config) -> bool:
    return config.getoption("--sectorch-long") or config.getoption("markexpr", "") == LONG


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _asked(config):
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(LONG)
        return
    long = [item for item in items if item.get_closest_marker(LONG) is not None]
    if long:
        config.stash[LEFT] = len(long)
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item.get_closest_marker(LONG) is None]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    left = config.stash.get(LEFT, 0)
    return [f"sectorch: {left} long tests are run by --sectorch-long"] if left else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    seed = item.stash.get(SEED, None)
    if seed is not None and report.failed:
        report.sections.append(("sectorch", f"the same draws again: pytest --sectorch-seed {seed}"))
    return report


@pytest.fixture
def sectorch_seed(request: pytest.FixtureRequest) -> int:
    """A number for this test: of the run's seed and the test's name. A failure prints the run's seed."""
    given = request.config.getoption("--sectorch-seed")
    if given is None:
        stash = request.config.stash
        given = stash.setdefault(SEED, int.from_bytes(os.urandom(4), "little"))
    request.node.stash[SEED] = given
    return zlib.crc32(f"{given} {request.node.nodeid}".encode())


@pytest.fixture
def sectorch_draws(sectorch_seed: int) -> torch.Generator:
    """A torch.Generator of that number: `torch.randn(3, generator=sectorch_draws)`."""
    import torch

    return torch.Generator().manual_seed(sectorch_seed)


@pytest.fixture
def sectorch_session() -> sectorch.Session:
    """A session of its own, with all parties in this process."""
    import sectorch

    return sectorch.Session()


@pytest.fixture
def sectorch_reference() -> sectorch.Session:
    """A session that computes the public fixed-point functions, without parties."""
    import sectorch

    return sectorch.Session(reference=True)
