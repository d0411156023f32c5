"""Start of a job: imports that it does not wait for, ranks that it reuses."""

import subprocess
import sys

import pytest

from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.jobs.rl import _has_same_ranks

_SLOW = {"matplotlib", "megatron.core", "vllm"}  # for the picture at the end, for ranks and servers


def test_a_job_starts_without_what_its_driver_has_no_use_for() -> None:
    program = f"import sys, mcore_rl.jobs.rl; print(sorted({_SLOW} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


# Of what a driver needs for tokens and agents: servers of HTTP, torch's compiler, generation.
_UNUSED = {
    "fastapi", "uvicorn", "torch._dynamo", "torch.distributed.tensor",
    "transformers.generation.utils", "transformers.modeling_utils",
}  # fmt: skip
_DRY_RUN = """
import sys
from mcore_rl.cli.main import main
sys.argv = ["mcore-rl", "rl", *sys.argv[1:], "--dry-run"]
assert main() == 0
print(sorted({unused} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "settings", [["recipe=quickstart"], ["recipe=toy_countdown"], ["recipe=toy_calculator"]]
)
def test_a_driver_that_makes_a_model_and_reads_its_tokenizer_imports_no_models(tmp_path, settings):
    program = _DRY_RUN.format(unused=_SLOW | _UNUSED)
    command = [sys.executable, "-c", program, *settings, f"output_dir={tmp_path / 'out'}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_actor_takes_over_the_ranks_of_a_warm_start_that_are_as_many() -> None:
    """See test_building.py for how a group is rebuilt."""
    single, two, actor = (
        EngineConfig(layout=layout) for layout in (Layout(), Layout(dp=2), Layout(tp=2, ep=2))
    )
    assert _has_same_ranks(two, actor)
    assert not _has_same_ranks(single, actor)
