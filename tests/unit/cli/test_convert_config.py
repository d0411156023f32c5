"""Settings of verl and TRL as recipes: five scripts of verl's examples, with values worked by hand.

The five are in verl_runs.yaml as verl's hydra gets them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.cli.compose import compose_config
from mcore_rl.cli.convert_config import convert_config
from mcore_rl.cli.launch_scripts import read_script
from mcore_rl.cli.main import run_command
from mcore_rl.cli.other_names import ROWS, find_row
from mcore_rl.cli.value_converters import CONVERTERS, DEFAULTS
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.schema import RLConfig
from tests.pages import FENCE, ROOT, select_commands

RUNS = yaml.safe_load((Path(__file__).parent / "verl_runs.yaml").read_text())
QWEN3_MOE, DEEPSEEK, PPO, IMAGES, GMPO = RUNS
# Our settings, worked out by hand from those of the scripts.
EXPECTED = {
    QWEN3_MOE: {  # 8 GPUs with tp * pp * cp = 1; servers of 4; 512 / 128 prompts
        "model.path": "hf:Qwen/Qwen3-30B-A3B-Base",
        "actor.backend": "megatron",
        "actor.layout.dp": 8,
        "actor.layout.ep": 8,
        "actor.max_tokens_per_micro_batch": 2048 + 8192,
        "actor.moe.dispatcher": "flex",
        "actor.optimizer.cpu_offload": True,
        "actor.optimizer.beta2": 0.999,
        "rollout.num_servers": 2,
        "rollout.top_k": 0,
        "algorithm.num_mini_batches": 4,
        "algorithm.kl_coef": 0.0,
        "algorithm.loss_settings": {
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "dual_clip": 10.0,
        },
        "reward.terms.overlong": {"weight": 1.0, "settings": {"buffer_tokens": 4096}},
        "evaluation.top_p": 0.7,
        "trainer.prompts_per_step": 512,
        "trainer.trackers": ["wandb"],
    },
    DEEPSEEK: {  # 12 nodes of 8, with tp 8 and pp 12; servers of 32 on 4 nodes; 96 / 32
        "actor.layout.dp": 1,
        "actor.layout.last_stage_layers": 6,
        "actor.recompute.granularity": "full",
        "rollout.num_servers": 3,
        "rollout.nodes_per_server": 4,
        "rollout.max_response_tokens": 1204 * 8,  # 1204 in the script
        "algorithm.num_mini_batches": 3,
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_placement": "loss",
        "algorithm.kl_estimator": "low_variance",
    },
    PPO: {  # a critic with FSDP on all 8; 4096 / 512
        "actor.backend": "fsdp",
        "actor.recompute.granularity": "full",
        "actor.optimizer.distributed": False,
        "data.test_files": {
            "gsm8k": "/home/me/data/gsm8k/test.parquet",
            "math": "/home/me/data/math/test.parquet",
        },
        "data.long_prompts": "drop",
        "algorithm.advantage": "gae",
        "algorithm.advantage_settings": {"gamma": 1.0, "lam": 1.0},
        "algorithm.group_size": 1,
        "algorithm.num_mini_batches": 8,
        "critic.backend": "fsdp",
        "critic.layout.dp": 8,
        "critic.model_path": "",  # the policy's
        "critic.clip_range": 0.5,
        "critic.optimizer.lr": 1e-5,
        "critic.optimizer.beta2": 0.999,
        "critic.max_tokens_per_micro_batch": 98304,
        "evaluation.temperature": 0.0,
        "rollout.num_servers": 4,
    },
    IMAGES: {  # micro-batches of 10 samples of up to 1024 + 2048 tokens; 512 / 128
        "data.images_column": "images",
        "actor.max_tokens_per_micro_batch": 30720,
        "algorithm.group_size": 5,
        "algorithm.num_mini_batches": 4,
        "algorithm.kl_coef": 0.01,
        "algorithm.loss_settings": {"dual_clip": 3.0},  # verl's default
        "rollout.engine": {"enable_chunked_prefill": False},
        "evaluation.every": 5,
        "trainer.save_every": 20,
    },
    GMPO: {  # 64 GPUs, 4 for a sequence, in two replicas of 32; 512 / 32
        "actor.layout.cp": 4,
        "actor.layout.dp": 16,
        "actor.fsdp.num_replicas": 2,
        "algorithm.loss": "gmpo",
        "algorithm.loss_settings": {"clip_log_ratio_low": 0.4, "clip_log_ratio_high": 0.4},
        "algorithm.num_mini_batches": 16,
        "trainer.num_steps": 300,
        "rollout.num_servers": 16,
    },
}


def get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def compose(recipe: str, folder: Path) -> RLConfig:
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    return compose_config(RLConfig, [f"recipe={path}"])


@pytest.mark.parametrize("run", RUNS)
def test_recipe_of_a_real_script_composes_to_values_worked_by_hand(run, tmp_path):
    config = compose(convert_config("verl", RUNS[run]), tmp_path)
    validate_rl(config, needs_data=False)
    assert {key: get(config, key) for key in EXPECTED[run]} == EXPECTED[run]


def test_every_setting_of_a_real_script_has_a_line():
    words = [word.lstrip("+").partition("=")[0] for run in RUNS.values() for word in run]
    names = [word.removeprefix("actor_rollout_ref.") for word in words if "." in word]
    assert len(names) > 350
    assert [name for name in names if find_row("verl", name) is None] == []


def test_comments_have_what_is_dropped_and_what_needs_a_look():
    recipe = " ".join(convert_config("verl", RUNS[QWEN3_MOE]).replace("#", "").split())
    for words in (
        "data.truncation=left: prompts are not cut",
        "trainer.total_epochs=10: set trainer.num_steps",
        "rollout.gpu_memory_utilization=0.7: bytes of the cache",
        "actor.megatron.use_mbridge=True, actor.megatron.use_dist_checkpointing=False: Hugging",
    ):
        assert words in recipe


SCRIPT = """
set -x
# a comment with 'a quote
NODES=${NODES:-2}   # of 8
project="a b"; seeds="data.seed=3 x.y=4"; length=$((1024 * (2 + 1)))
data="['$HOME/a.parquet', '${NO_SUCH}/b.parquet']"
DATA=(
    data.train_files="$data"
    data.max_prompt_length=${length}
)
DATA+=( data.max_response_length=$(( length*2 )) )
if [ "$NODES" = 2 ]; then
    NODES=7
fi
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \\
    "${DATA[@]}" trainer.nnodes="${NODES}" \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name="${project}" trainer.experiment_name=$(date) ${1:-x=1} $seeds $@
echo done
"""


def test_script_is_read_and_not_run(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    script = read_script(SCRIPT, "run.sh")
    assert script.arguments == [
        "--config-name=ppo_megatron_trainer",
        "data.train_files=['/home/me/a.parquet', '$NO_SUCH/b.parquet']",
        "data.max_prompt_length=3072",
        "data.max_response_length=6144",
        "trainer.nnodes=2",
        'trainer.logger=["console","wandb"]',
        "trainer.project_name=a b",
        "trainer.experiment_name=COMMAND(date)",
        "x=1",
        "data.seed=3",
        "x.y=4",
    ]
    assert script.remarks == [
        "the script does not set $NO_SUCH",
        "the script's if is not followed",
        "the script's command 'date' is not run",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "run.sh starts no program of verl; allowed: a script with a line such as"),
        ('A="x\npython3 -m verl.trainer.main_ppo a=1', 'run.sh: a " is not closed'),
        ("A=(x\n", r"run.sh: an array has no '\)'"),
        ("echo ${A", "run.sh: a } is missing"),
    ],
)
def test_text_that_is_no_launch_script_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read_script(text, "run.sh")


def test_key_value_behind_a_file_overrides_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "actor_rollout_ref: {rollout: {n: 4, tensor_model_parallel_size: 1}}\n"
        "critic: {optim: {lr: 3e-6}}\n"
    )
    words = [str(file), "++actor_rollout_ref.rollout.n=6", "actor_rollout_ref.model.path=/m"]
    config = compose(convert_config("verl", words), tmp_path)
    assert (config.algorithm.group_size, config.rollout.num_servers) == (6, 8)
    assert config.critic.optimizer.lr == 3e-6


TRL = """
from trl import GRPOConfig
size = 8
config = GRPOConfig(
    "outputs/run", learning_rate=2e-6, per_device_train_batch_size=16, num_generations=8,
    gradient_accumulation_steps=4, steps_per_generation=8, max_steps=400, use_vllm=True,
    epsilon_high=0.28, loss_type="dr_grpo", scale_rewards=False, report_to="wandb",
    save_steps=100, top_k=size,
)
"""


@pytest.mark.parametrize("suffix", [".py", ".json"])
def test_grpo_config_of_trl_is_converted(suffix, tmp_path):
    """16 * 8 responses are 16 prompts, for two optimizer steps of 4 * 16; 400 make 200 steps."""
    file = tmp_path / f"train{suffix}"
    fields = dict(re.findall(r"(\w+)=([^,\s]+)", TRL.partition("config =")[2]))
    values = {k: ast.literal_eval(v) for k, v in fields.items() if k != "top_k"}
    file.write_text(TRL if suffix == ".py" else json.dumps(values))
    recipe = convert_config("trl", [str(file)])
    config = compose(recipe, tmp_path)
    assert config.trainer.prompts_per_step == 16 and config.algorithm.num_mini_batches == 2
    assert (config.trainer.num_steps, config.trainer.save_every) == (200, 50)
    assert config.algorithm.loss_aggregation == "sequence_sum_fixed_length"
    assert config.algorithm.advantage_settings == {"normalize_by_std": False}
    assert config.algorithm.loss_settings == {"clip_ratio_high": 0.28}  # 0.2 is the default
    assert config.algorithm.correction.weight_max == 3.0  # TRL's default, with vLLM
    assert config.rollout.max_response_tokens == 512 and config.actor.optimizer.beta2 == 0.999
    assert ("top_k=size is computed; set it yourself" in recipe) == (suffix == ".py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verl", "no_such.sh"], "'no_such.sh' cannot be read: No such file"),
        (["verl", "a=1"], "'a=1' has not one setting; allowed: a setting of verl"),
        (["trl", "{file}"], "calls no GRPOConfig; allowed: a file that does"),
        (["slime", "x"], "unknown framework 'slime'; allowed: verl, trl"),
    ],
)
def test_wrong_input_is_named(words, message, tmp_path, capsys):
    (tmp_path / "empty.py").write_text("x = 1\n")
    words = [word.format(file=tmp_path / "empty.py") for word in words]
    assert run_command("convert-config", words) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("command", select_commands("convert config"), ids=str)
def test_worked_script_of_the_page_is_its_recipe(command, tmp_path, monkeypatch, capsys):
    page = (ROOT / command.page).read_text()
    blocks = {language: block for language, block in FENCE.findall(page) if language != "yaml"}
    recipes = [block for language, block in FENCE.findall(page) if language == "yaml"]
    (tmp_path / "run.sh").write_text(blocks["sh"])
    (tmp_path / "train.py").write_text(blocks["python"])
    monkeypatch.chdir(tmp_path)
    assert run_command("convert-config", command.text.split()[2:]) == 0
    expected = recipes["verl" not in command.text]
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(expected)


def test_each_line_of_the_table_has_a_converter_or_a_reason():
    assert {row.converter for row in ROWS} <= {*CONVERTERS, "dropped"}
    assert {*CONVERTERS} == {row.converter for row in ROWS} - {"dropped"}
    assert [row for row in ROWS if not row.our_names and not row.note] == []
    defaults = [(framework, name) for framework in DEFAULTS for name in DEFAULTS[framework]]
    assert [pair for pair in defaults if find_row(*pair) is None] == []
