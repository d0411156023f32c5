"""The tables of failures quote what the program says, and a test makes each of them."""

from __future__ import annotations

import re

import pytest

from tests.pages import FENCE, ROOT

# For each message of a table: what the program says of it, and the test that makes it.
TROUBLES = {
    "troubleshooting.md": {
        "no Python that is allowed": "unit/repo/test_setup.py",
        "there is no C++ compiler": "",
        "failed; the whole log is in": "unit/repo/test_setup.py",
        "is neither where pip is configured to look": "",
        "left; needed are": "unit/jobs/test_disk_space.py",
        "the run does not fit": "unit/planner/test_dry_run.py",
        "no group has passed": "unit/trainers/test_sync.py",
        "are empty": "unit/trainers/test_training_batch.py",
        "of trainer and roll": "unit/trainers/test_sync.py",
        "the norm of the gradients is": "",
        "unknown setting": "unit/cli/test_compose.py",
        "is not empty": "unit/jobs/test_output.py",
        "is in use by": "e2e/test_bad_input.py",
        "is of another run": "unit/jobs/test_resume.py",
        "with other rows in": "unit/jobs/test_resume.py",
        "has a newer one": "unit/jobs/test_resume.py",
        "has left no training checkpoints": "unit/jobs/test_resume.py",
        "is left out: ": "unit/checkpoint/test_run_checkpoints.py",
        "no checkpoint: ": "e2e/test_resume.py",
        "has not answered in": "e2e/test_kill.py",
        "died": "e2e/test_slurm.py",
        "killed or has crashed": "unit/controller/test_process_cleanup.py",
        "died, and the run with": "unit/controller/test_process_cleanup.py",
        "has too little of what": "e2e/test_ends.py",
        "where no Ray cluster answers": "e2e/test_bad_input.py",
        "devices of one node": "unit/controller/test_worker_group.py",
    },
    "tutorial_images.md": {
        "takes no": "unit/engine/test_backends.py",
        "takes no images": "unit/models/test_wrapper.py",
        "its image processor does not load": "",
        "has an image in a ": "unit/data/test_images.py",
        "than places in its messages": "",
        "which cannot be read": "unit/data/test_images.py",
        "is an image of": "",
        "the prompt of row": "unit/data/test_datasets.py",
        "vLLM makes other tokens of a prompt": "",
    },
    "cluster.md": {
        "this is a job of SLURM's": "unit/repo/test_launch.py",
        " is not there": "e2e/test_slurm.py",
        "there is neither pyxis in srun nor apptainer": "unit/repo/test_launch.py",
        "the nodes are not fit for a run": "e2e/test_slurm.py",
        "cannot be had": "e2e/test_slurm.py",
        "no node runs Ray: what was to start it has ended": "unit/repo/test_launch_ends.py",
        "did not join": "e2e/test_slurm.py",
        "does not see": "unit/controller/test_node.py",
        "has no IPv4 address": "e2e/test_slurm.py",
        "has another token": "e2e/test_launch.py",
        "ended twice": "e2e/test_slurm.py",
    },
}  # fmt: skip
SCRIPTS = "".join(path.read_text() for path in (ROOT / "launch").glob("*.sh"))
MODULES = "".join(path.read_text() for path in (ROOT / "mcore_rl").rglob("*.py"))


@pytest.mark.parametrize("page", TROUBLES)
def test_a_test_makes_each_failure_of_the_table(page):
    text = (ROOT / "docs" / page).read_text()
    if page == "cluster.md":
        text = text.partition("\n## Troubleshooting\n")[2]
    tables = re.findall(r"^\| (?:Symptom|Message|What you see).*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    rows = [line for line in "".join(tables).splitlines() if re.match(r"\| `(?![\w/]+`)", line)]
    assert len(rows) == len(TROUBLES[page])
    for row, (words, test) in zip(rows, TROUBLES[page].items(), strict=True):
        assert words in row.split(" | ")[0] and words in SCRIPTS + MODULES, row
        assert not test or words in (ROOT / "tests" / test).read_text(), (row, test)


def test_the_page_names_metrics_and_variables_that_there_are():
    text = FENCE.sub("", (ROOT / "docs" / "troubleshooting.md").read_text())
    names = re.findall(r"`((?:time|memory|actor)/[a-z]\w+|[A-Z][A-Z_]+[A-Z])(?:=.*)?`", text)
    assert len(names) > 5
    assert [name for name in names if name not in SCRIPTS + MODULES] == []
