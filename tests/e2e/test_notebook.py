"""A first run on own data in a notebook, executed in a kernel of Jupyter."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.test_page_jobs import write_tutorial

pytestmark = pytest.mark.job
CELLS = (
    'result = mcore_rl.load_run("runs/first")',
    'result.plot("reward", "response_tokens")',
    'result.to_pandas()[["reward", "response_tokens"]]',
)


def test_notebook_runs_a_list_and_a_function_and_shows_plot_and_table(tmp_path, user_task_settings):
    """A cell has the first script of a tutorial."""
    first = write_tutorial(tmp_path / "saved", user_task_settings)["first.py"]
    cells = [nbformat.v4.new_code_cell(source) for source in (first, *CELLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    training, _, plot, table = notebook.cells
    printed = "".join(o.data["text/plain"] for o in training.outputs if "data" in o)
    assert "training 2/2" in printed
    figure = plot.outputs[0].data["application/vnd.plotly.v1+json"]
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [
        ("reward", [1, 2]), ("response_tokens", [1, 2])
    ]  # fmt: skip
    assert table.outputs[0].data["text/html"].count("<tr>") == 3
