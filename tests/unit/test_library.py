"""The public interface of the package, for scripts and notebooks."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import mcore_rl
from mcore_rl import testing
from mcore_rl.agents.runner import try_out
from mcore_rl.config.event_loop import run_coroutine
from mcore_rl.config.schema import AgentConfig
from tests.notebook import run_in_cell

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_every_public_name_can_be_imported():
    assert {name for name in mcore_rl.__all__ if getattr(mcore_rl, name) is not None} == {
        *mcore_rl.__all__
    }
    assert all(callable(getattr(testing, name)) for name in testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'check_everything'"):
        _ = testing.check_everything  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = mcore_rl.Trainer  # type: ignore[attr-defined]


def test_every_public_name_is_documented():
    text = PAGE.read_text()
    names = (*mcore_rl.__all__, *testing.__all__)
    assert [name for name in names if f"`{name}" not in text] == []


def test_importing_the_package_needs_no_torch():
    program = "import mcore_rl, sys; mcore_rl.RLConfig; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def test_a_recipe_has_its_settings_and_overrides():
    config = mcore_rl.load_recipe("quickstart", "seed=7", "output_dir=x")
    assert (config.seed, config.output_dir, config.task.name) == (7, "x", "last_digit")
    assert mcore_rl.load_recipe() == mcore_rl.RLConfig()
    with pytest.raises(mcore_rl.ConfigError, match="unknown setting 'sed'"):
        mcore_rl.load_recipe("quickstart", "sed=7")


@pytest.mark.parametrize(
    "config",
    [
        AgentConfig("tools", tools=["calculator"]),
        AgentConfig("environment", environment="countdown"),
    ],
    ids=lambda config: config.loop,
)
def test_a_loop_of_agents_is_tried_out_in_a_notebook(config):
    run_in_cell(lambda: try_out(config, {}))


def test_a_coroutine_runs_in_a_notebook_and_its_error_is_raised():
    async def divide(number: int) -> float:
        await asyncio.sleep(0)
        return 1 / number

    assert run_in_cell(lambda: run_coroutine(divide(2))) == run_coroutine(divide(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        run_in_cell(lambda: run_coroutine(divide(0)))


def test_a_folder_without_a_run_that_has_ended_is_refused(tmp_path):
    with pytest.raises(mcore_rl.ConfigError, match=r"no run has ended here: .*summary\.json"):
        mcore_rl.load_run(tmp_path)


def test_a_run_that_has_ended_is_read_by_phase(tmp_path):
    (tmp_path / "summary.json").write_text('{"wall_s": 3.0}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"phase": "warm_start", "step": 1}\n{"phase": "training", "step": 1, "reward": 0.5}\n'
    )
    result = mcore_rl.load_run(tmp_path)
    assert (result.summary["wall_s"], [row["reward"] for row in result.metrics]) == (3.0, [0.5])
    assert len(result.warm_start) == 1 and result.checkpoint == tmp_path / "checkpoint"
