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
from mcore_rl.examples.tasks import tiny_model
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
    program = "import mcore_rl, sys; mcore_rl.run; print('torch' in sys.modules)"
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


def test_metrics_are_a_plot_and_a_data_frame(tmp_path):
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "eval/test/reward": 1.0}]
    result = mcore_rl.RunResult(tmp_path, {}, rows, [])
    figure = result.plot("reward", "eval/test/reward")
    assert [(line.name, line.x, line.y) for line in figure.data] == [
        ("reward", (1, 2), (0.5, 0.75)), ("eval/test/reward", (2,), (1.0,))
    ]  # fmt: skip
    assert result.to_pandas()["reward"].to_dict() == {1: 0.5, 2: 0.75}
    with pytest.raises(mcore_rl.ConfigError, match=r"has no metric 'rewards'; it has: \['eval/te"):
        result.plot("rewards")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.save_checkpoint(folder, tiny_model.train_tokenizer(["user\n2 + 3?"] * 9), seed=0)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"trainer.num_step": 3}}, "unknown setting 'trainer.num_step'; did you mea"),
        ({"settings": {"trainer.num_steps": "three"}}, "trainer.num_steps='three'; allowed: a who"),
        ({"settings": {"rollout": {"tp": 2}}}, "rollout is a group of settings; set one of: "),
        ({"reward": 3}, "reward.name='3' is unknown; allowed: "),
        (
            {"reward": lambda completions, **columns: [1.0] * len(completions)},
            "reward.name='<python>:function' takes (completions, **columns), as rewards of TRL; "
            "allowed: lambda texts, fields, finish_reasons: reward(completions=texts) (docs/",
        ),
        (
            {"data": 3},
            "data.train_file is a int; allowed: a file or folder, an import path, a list",
        ),
        ({"data": []}, "data.train_file='<python>:train_file' has no rows"),
        ({"data": [{"text": "2 + 3?"}]}, "data.train_file='<python>:train_file': row 0 has no co"),
        (
            {"reward": lambda text: {}["x"]},
            "reward.name='<python>:function' raised KeyError: 'x' (te",
        ),
        ({"model": "no_such_folder"}, "model.path='no_such_folder' does not exist"),
    ],
)
def test_grpo_refuses_what_it_cannot_take(model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}]
    lengths = {"data.max_prompt_tokens": 64, "rollout.max_response_tokens": 64}
    settings = lengths | arguments.pop("settings", {})
    arguments = {"model": model, "reward": lambda text: 1.0, "data": rows} | arguments
    with pytest.raises(mcore_rl.ConfigError) as raised:
        mcore_rl.grpo(**arguments, settings=settings)
    assert str(raised.value).startswith(message)


def test_grpo_takes_the_name_of_a_model_on_the_hub(tmp_path, monkeypatch):
    names = []

    def download(name: str, **options: object) -> str:
        names.append(name)
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    rows = [{"prompt": "2 + 3?"}]
    with pytest.raises(mcore_rl.ConfigError, match=r"model.path='hf:Org/tiny' cannot be fetched"):
        mcore_rl.grpo("Org/tiny", lambda text: 1.0, rows)
    assert names == ["Org/tiny"]
