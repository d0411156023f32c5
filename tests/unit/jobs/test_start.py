"""Start of a job: imports that it does not wait for, ranks that it reuses."""

import subprocess
import sys

import pytest

from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.jobs.rl import _has_same_ranks
from mcore_rl.jobs.run_plan import plan_run

_SLOW = {"matplotlib", "megatron.core", "vllm"}  # for the picture at the end, for ranks and servers
_COMPILER = {"torch._dynamo", "torch.distributed.tensor", "sympy"}
_CLIENTS = {"pydantic", "httpx", "websockets", "fastapi", "uvicorn", "openai"}
_UNUSED_AT_START = _SLOW | _COMPILER | _CLIENTS | {"transformers"}


# Modules that need no Ray come first: one process imports all, one after the other.
_UNUSED_BY_MODULE = {
    "cli.convert": _UNUSED_AT_START | {"ray"},
    "jobs.convert.to_megatron": _UNUSED_AT_START | {"ray"},
    "jobs.convert.to_hf": _UNUSED_AT_START | {"ray"},
    "jobs.rl": _UNUSED_AT_START,
    "jobs.evaluate": _UNUSED_AT_START,
    "rollout.worker": _UNUSED_AT_START,
    # By each rank: transformers takes a third of its imports.
    "engine.megatron.lora": {"matplotlib", "vllm", "transformers"},
}
_IMPORTS = """
import importlib, sys
for module, unused in {modules}.items():
    importlib.import_module(f"mcore_rl.{{module}}")
    print(module, *sorted(unused & set(sys.modules)))
"""


@pytest.mark.job
def test_modules_import_no_package_that_they_have_no_use_for() -> None:
    program = _IMPORTS.format(modules=_UNUSED_BY_MODULE)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout.splitlines(), result.returncode) == ([*_UNUSED_BY_MODULE], 0), (
        result.stderr
    )


# Of what a driver needs for tokens and agents: servers of HTTP, torch's compiler, generation.
_UNUSED = {
    "fastapi", "uvicorn", "torch._dynamo", "torch.distributed.tensor",
    "transformers.generation.utils", "transformers.modeling_utils",
}  # fmt: skip
_RECIPES = ["quickstart", "toy_countdown", "toy_calculator"]
_DRY_RUN = """
import sys
from mcore_rl.cli.main import main
from mcore_rl.examples.tasks import conversations, last_digit
last_digit.NUM_WARM_START = conversations.NUM_WARM_START = 480  # rows, which take time to check
for recipe in {recipes}:
    sys.argv = ["mcore-rl", "rl", f"recipe={{recipe}}", "--dry-run", sys.argv[-1]]
    assert main() == 0
    print("unused", recipe, *sorted({unused} & set(sys.modules)))
"""


@pytest.mark.job
def test_a_driver_that_makes_a_model_and_reads_its_tokenizer_imports_no_models(tmp_path):
    program = _DRY_RUN.format(unused=_SLOW | _UNUSED, recipes=_RECIPES)
    command = [sys.executable, "-c", program, f"output_dir={tmp_path / 'out'}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("unused")]
    assert lines == [f"unused {recipe}" for recipe in _RECIPES]


def test_the_actor_takes_over_the_ranks_of_a_warm_start_that_are_as_many() -> None:
    """See test_building.py for how a group is rebuilt."""
    config = RLConfig()
    config.actor.layout, config.warm_start.num_steps = Layout(tp=2, ep=2), 1
    for layout, is_same in ((Layout(dp=2), True), (Layout(), False)):
        config.warm_start.layout = layout
        plan = plan_run(config)
        assert _has_same_ranks(plan["warm_start"], plan["actor"]) == is_same
