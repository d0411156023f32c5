"""A first run on own data in a notebook, executed in a kernel of Jupyter."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.job
CELLS = (
    """
import mcore_rl
rows = [{"prompt": f"Start with {n}.", "answer": str(n)}
        for n in range(8)]
""",
    """
def brief(text, fields):
    return float(fields["answer"] in text) - len(text) / 100
""",
    """
result = mcore_rl.grpo(MODEL, brief, rows, output_dir=FOLDER, settings={
    "trainer.num_steps": 2, "trainer.prompts_per_step": 4, "algorithm.group_size": 2,
    "rollout.max_response_tokens": 12, "data.max_prompt_tokens": 64,
    "rollout.max_num_seqs": 8, "rollout.kv_cache_bytes": 64 << 20})
""",
    'result.plot("reward", "response_tokens")',
    'result.to_pandas()[["reward", "response_tokens"]]',
)


def test_notebook_runs_a_list_and_a_function_and_shows_plot_and_table(tmp_path, user_task_settings):
    model = next(s for s in user_task_settings if s.startswith("model.path=")).partition("=")[2]
    paths = f"MODEL, FOLDER = {model!r}, {str(tmp_path / 'run')!r}"
    cells = [nbformat.v4.new_code_cell(source) for source in (paths, *CELLS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources=resources).execute()
    *_, training, plot, table = notebook.cells
    printed = "".join(o.data["text/plain"] for o in training.outputs if "data" in o)
    assert "training 2/2" in printed
    figure = plot.outputs[0].data["application/vnd.plotly.v1+json"]
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [
        ("reward", [1, 2]), ("response_tokens", [1, 2])
    ]  # fmt: skip
    assert table.outputs[0].data["text/html"].count("<tr>") == 3
