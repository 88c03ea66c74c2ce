"""The notebooks run from top to bottom, in a kernel of their own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from cases import LONG
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory):
    """Jupyter's files, and those of a kernel, are in a folder of the test's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("jupyter")
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(folder / name))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")  # more would only get in the way of other tests
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def case(path: Path):
    """One, which shows a model's cost; what the others do, examples and pages of the documents do as well."""
    return pytest.param(path, id=path.stem, marks=[] if path.stem == "where_the_cost_goes" else LONG)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count == i + 1 for i, cell in enumerate(stored)), "run it from top to bottom, and save"


@pytest.mark.parametrize("path", [case(path) for path in NOTEBOOKS])
def test_a_notebook_runs_and_shows_what_is_stored(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    stored = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [len(cell.outputs) for cell in stored]
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    assert [bool(len(cell.outputs)) for cell in stored] == [bool(count) for count in shown]


def test_they_lead_to_pages_that_are_there():
    assert len(NOTEBOOKS) == 6
    for path in NOTEBOOKS:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), (path.name, link)
