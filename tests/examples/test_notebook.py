"""The notebook runs from its first cell to its last, and ends with the report that it promises."""

import re
from pathlib import Path

import pytest


nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_run.ipynb"
P_BAD = re.compile(r"^\| P\(.*?\) \| ([^ |]+)", re.MULTILINE)


def test_the_notebook_is_short_and_without_output():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 12
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)


@pytest.mark.thorough
@pytest.mark.trainer
def test_the_notebook_runs(tmp_path, monkeypatch):
    """In a kernel of its own, with the package that is tested here."""
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in cells]
    before, after = (float(P_BAD.search(printed[number])[1]) for number in (1, 4))
    assert 0 <= after < before / 2
    assert any("image/png" in out.get("data", {}) for out in cells[3].outputs)
    assert printed[5].count("worst completions") == 2
    assert list(tmp_path.glob("first-run/*/policy/model.safetensors"))
