"""pytest's side of `sectorch.testing`: fixtures, a seed that a failure prints, and tests for long runs only.

A module of its own, beside the package: pytest loads it wherever sectorch is installed, and it imports neither torch
nor sectorch until a test asks for one of its fixtures.

    pytest --sectorch-long          # tests marked sectorch_long too, and 1000 examples of each hypothesis property
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
EXAMPLES = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sectorch")
    group.addoption("--sectorch-long", action="store_true", help="run tests marked sectorch_long, and more examples")
    group.addoption("--sectorch-seed", type=int, default=None, metavar="N", help="of what sectorch's fixtures draw")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{LONG}: for pytest --sectorch-long only")
    if config.getoption("--sectorch-long"):
        with contextlib.suppress(ImportError):  # properties take their number of examples where they are defined
            from hypothesis import settings

            settings.register_profile("sectorch-long", settings.default, max_examples=EXAMPLES)
            settings.load_profile("sectorch-long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sectorch-long"):
        return
    skipped = pytest.mark.skip(reason="takes long: pytest --sectorch-long runs it")
    for item in items:
        if item.get_closest_marker(LONG) is not None:
            item.add_marker(skipped)


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
