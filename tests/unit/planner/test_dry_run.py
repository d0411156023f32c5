"""Dry runs: what they print, from config.json alone if need be, and that they leave nothing."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import ray
import torch

from mcore_rl.checkpoint.peft import Factors, write_adapters
from mcore_rl.cli.main import main
from mcore_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    Layout,
    ModelConfig,
    RLConfig,
    RolloutConfig,
    WarmStartConfig,
)
from mcore_rl.data.chat_template import ChatTemplate
from mcore_rl.examples.tasks import last_digit
from mcore_rl.jobs.remote_paths import find_published
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.planner.report import format_ranks
from mcore_rl.planner.roles import RolePlan, plan_roles

SETTINGS = (
    "model.path=model", "data.train_file=train.parquet", "data.test_file=test.parquet",
    "data.max_prompt_tokens=64", "rollout.max_response_tokens=32", "trainer.prompts_per_step=20",
    "warm_start.num_steps=2", "warm_start.batch_size=20",
    "warm_start.train_file=warm_start.parquet", "actor.layout.tp=2",
    "actor.layout.ep=2", "algorithm.kl_coef=0.1", "output_dir=new/out",
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "task"
    last_digit.prepare(folder, seed=0, worked_share=0.35)
    for file in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(file).slice(0, 20), file)
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(good, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def list_files() -> set[Path]:
    """Return all files but the bytecode of a user's Python file, which Python writes beside it."""
    return {path for path in Path().rglob("*") if "__pycache__" not in path.parts}


def dry_run(monkeypatch, capfd, *settings: str, job: str = "rl") -> tuple[int, str, str]:
    """Return status and output; check that nothing was started or left."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr(sys, "argv", ["mcore-rl", job, *settings, "--dry-run"])
    before, children = list_files(), set(psutil.Process().children(recursive=True))
    capfd.readouterr()
    status = main()
    printed = capfd.readouterr()
    assert list_files() == before
    assert set(psutil.Process().children(recursive=True)) <= children
    return status, printed.out, printed.err


def test_dry_run_prints_roles_layouts_and_data(place, monkeypatch, capfd):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS)
    assert (status, err) == (0, "")
    for line in (
        "model: model\n",
        "data: 20 prompts to train, 20 held out, 20 examples for supervised training\n",
        "warm_start: 1 rank, tp=1 (supervised training)\n",
        "actor: 2 ranks, tp=2 ep=2 (log-probs, updates)\n",
        "reference: 2 ranks, tp=2 ep=2 (log-probs for the KL)\n",
        "rollout: 1 rank, tp=1 (generation: 1 vLLM server)\n",
        "cores: 2 for actor, reference, rollout, by turns\n",
        "a step: 20 prompts, 160 samples, 1 optimizer step; 100 steps\n",
        "0-1    embedding, layers 0-2,",
        "nothing was started\n",
    ):
        assert line in out, out


def test_a_users_engine_is_planned_for_without_sharding(place, monkeypatch, capfd):
    backend = f"{Path(__file__).parents[3]}/examples/hf_engine.py:BACKEND"
    settings = [word for word in SETTINGS if not word.startswith("actor.layout")]
    settings += [f"actor.backend={backend}", "actor.layout.dp=2"]
    status, out, err = dry_run(monkeypatch, capfd, *settings)
    assert (status, err) == (0, "")
    for line in (
        "actor: 2 ranks, dp=2 (log-probs, updates; sizes without sharding)\n",
        "reference: 2 ranks, dp=2 (log-probs for the KL; sizes without sharding)\n",
    ):
        assert line in out, out
    status, out, err = dry_run(monkeypatch, capfd, *settings, "actor.layout.tp=2")
    assert (status, out) == (2, "")
    assert "actor.layout.tp=2: " in err and "does not read it; allowed: 1\n" in err


SERVER = """
from mcore_rl.examples.hf_server import HFServer

class Cached(HFServer):
    {name}

    @classmethod
    def get_kv_cache_bytes(cls, settings):
        return settings.kv_cache_bytes
"""


@pytest.mark.parametrize("name", ["Cached", "Fast"])
def test_a_server_of_a_user_is_planned_for_by_what_it_says(place, monkeypatch, capfd, name):
    """Its name, and its KV cache, which has to hold a sequence."""
    line = "..." if name == "Cached" else f'display_name = "{name}"'
    Path("cached.py").write_text(SERVER.format(name=line))
    settings = *SETTINGS, "rollout.backend=cached.py:Cached", "rollout.kv_cache_bytes=3000000"
    status, out, err = dry_run(monkeypatch, capfd, *settings)
    assert (status, err) == (0, "")
    assert f"rollout: 1 rank, tp=1 (generation: 1 {name} server)\n" in out
    assert re.search(r"^rollout: +0 +0\.0\d+ +0\.003 +0\.\d+ *$", out, re.M), out
    status, _, err = dry_run(monkeypatch, capfd, *settings, "rollout.kv_cache_bytes=9")
    assert (status, "rollout.kv_cache_bytes=9: one sequence of data.max_" in err) == (2, True), err


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ((), "from the forward pass of the update (algorithm.log_prob_pass='auto')"),
        (
            ("algorithm.log_prob_pass=always",),
            "in a pass before the update (algorithm.log_prob_pass='always')",
        ),
        (
            ("algorithm.num_mini_batches=2",),
            "in a pass before the update (algorithm.num_mini_batches=2)",
        ),
        (
            ("algorithm.correction.use_rollout_log_probs=true",),
            "none, those of the servers stand for them",
        ),
    ],
)
def test_it_tells_when_the_log_probs_of_the_trainer_are_computed(
    place, monkeypatch, capfd, settings, line
):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *settings)
    assert (status, err) == (0, "")
    assert f"log-probs of the trainer: {line}\n" in out


def test_dry_run_reads_a_mixture_of_files_and_prints_dropped_rows(place, monkeypatch, capfd):
    rows = pq.read_table("train.parquet").to_pylist()
    chat = rows[0]["messages"]
    rows[3]["messages"] = [{**chat[0], "content": chat[0]["content"] * 5}]
    Path("more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.py").write_text(f"def rows(): return {rows[:2]!r} * 4")
    settings = [word for word in SETTINGS if not word.startswith("data.train_file")]
    settings += [
        "data.train_files=[train.parquet,more.jsonl,own.py:rows]", "data.long_prompts=drop"
    ]  # fmt: skip
    status, out, err = dry_run(monkeypatch, capfd, *settings, "data.train_weights=[2,1.5,1]")
    assert (status, err) == (0, "")
    assert "data.train_files[1]='more.jsonl': 1 of 20 rows left out: more than data.max_" in out
    assert "data: 47 prompts to train, 20 held out" in out
    status, out, err = dry_run(monkeypatch, capfd, *settings, "data.train_weights=[1,1,2]")
    assert status == 2
    assert "takes 10 of this file: data.train_files[2]='own.py:rows' has 8" in err


def test_a_cluster_is_shown_from_any_machine(place, monkeypatch, capfd):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, "--gpus-per-node=1")
    assert (status, err) == (0, "")
    for line in (
        "GB of a rank, moment by moment (docs/planning.md says what is counted):\n",
        "memory: fits, ",
        "nodes of 1 GPUs, filled in their order:\n",
        " node 0: actor 0; reference 0; rollout server 0\n",
        " node 1: actor 1; reference 1\n",
        "2 GPUs: 2 for actor, reference, rollout, by turns\n",
    ):
        assert line in out, out
    assert re.search(r"^weight sync +0-1 +0\.\d+ ", out, re.M), out
    moved = r"\(colocated\), each step: 0\.0 GB between GPUs, of them 0\.0 inside"
    assert re.search(moved, out), out
    message = "weight_sync.method=full_export", "--gpus-per-node=8"
    _, out, _ = dry_run(monkeypatch, capfd, *SETTINGS, *message)
    assert "(full_export), each step: 0.0 GB into output_dir, read by 1 server\n" in out


def test_dry_run_needs_config_json_only_and_names_skipped_checks(place, monkeypatch, capfd):
    for file in (place / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS)
    assert (status, err) == (0, "")
    assert "model: model; not checked: weights, since the folder holds none\n" in out
    assert "data: not checked but for the files: the model folder has no tokenizer\n" in out
    assert "actor: 2 ranks, tp=2 ep=2" in out


@pytest.mark.parametrize(
    ("published", "settings", "apart"),
    [
        ("", ("model.dtype=bfloat16",), "20 nats apart at most, 0.1 on average"),
        ("", (), "0.5 nats apart at most, 0.0001 on average"),
        ("Qwen3-30B-A3B", ("model.dtype=bfloat16",), "20 nats apart at most, 0.1 on average"),
        (
            "Qwen3-8B",
            ("model.dtype=bfloat16", "actor.layout.ep=1"),
            "2 nats apart at most, 0.1 on average",
        ),
    ],
)
def test_a_model_with_experts_has_a_wide_bound_at_a_token_in_bfloat16(
    place, monkeypatch, capfd, published, settings, apart
):
    if published:
        shutil.rmtree(place / "model")
        Path("model").mkdir()
        shutil.copy(find_published(published) / "config.json", "model")
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *settings)
    assert (status, err) == (0, "")
    assert f"log-probs of trainer and servers: {apart}\n" in out


@pytest.mark.job
def test_the_quickstarts_model_has_the_bound_before_it_is_made(place, monkeypatch, capfd):
    settings = "recipe=quickstart_one_gpu", "model.dtype=bfloat16", "output_dir=new"
    status, out, err = dry_run(monkeypatch, capfd, *settings)
    assert (status, err) == (0, "")
    assert "log-probs of trainer and servers: 20 nats apart at most, 0.1 on average\n" in out


def test_dry_run_renders_some_rows_of_a_task_and_counts_all(monkeypatch, capfd, tmp_path):
    rendered, write = list[object](), ChatTemplate.write

    def record(self, messages, *args, **options):
        rendered.append(messages)
        return write(self, messages, *args, **options)

    monkeypatch.setattr(ChatTemplate, "write", record)
    monkeypatch.chdir(tmp_path)
    settings = "recipe=quickstart", "output_dir=new"
    status, out, err = dry_run(monkeypatch, capfd, *settings)
    assert (status, err) == (0, "")
    train, test = last_digit.split_problems()
    rows = f"{len(train)} prompts to train, {len(test)} held out, {240 * 96} examples for"
    assert rows in out, out
    assert 0 < len(rendered) <= 1000
    for refused in ("data.max_prompt_tokens=8", "trainer.prompts_per_step=20000"):
        status, _, err = dry_run(monkeypatch, capfd, *settings, refused)
        assert (status, refused in err) == (2, True), err


USER = (
    "agent.loop=user", "agent.settings.prompt='You are {answer}.'", "models.user.path=model",
    "models.user.num_servers=2", "models.judge.kv_cache_bytes=3000000",
)  # fmt: skip


def test_frozen_models_are_shown_with_their_devices(place, monkeypatch, capfd):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *USER, "--gpus-per-node=2")
    assert (status, err) == (0, "")
    for line in (
        "models.user: 2 ranks, tp=1 (frozen: 2 vLLM servers)\n",
        "models.judge: 1 rank, tp=1 (frozen: 1 vLLM server)\n",
        " node 0: actor 0-1; reference 0-1; rollout server 0\n",
        " node 1: models.user servers 0-1\n",
        " node 2: models.judge server 0\n",
        "5 GPUs: 2 for actor, reference, rollout, by turns; 2 for models.user; 1 for models.judge",
    ):
        assert line in out, out
    assert re.search(r"^models.judge: +0 ", out, re.M), out


@pytest.mark.parametrize(
    ("num_nodes", "message"),
    [
        (3, ""),
        (5, "2 of the 5 nodes stay idle: to use them, raise actor.layout.dp or rollout.num_"),
    ],
)
def test_dry_run_prints_idle_nodes(place, monkeypatch, capfd, num_nodes, message):
    nodes = "--gpus-per-node=2", f"--num-nodes={num_nodes}"
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *USER, *nodes)
    assert (status, err) == (0, "")
    assert message in out and ("idle" in out) == bool(message)


def test_a_run_that_needs_more_nodes_is_refused_without_a_plan(place, monkeypatch, capfd):
    nodes = "--gpus-per-node=2", "--num-nodes=2"
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *USER, *nodes)
    assert (status, out) == (2, "")
    assert "--num-nodes=2: the run takes 3 nodes of 2 GPUs" in err


def test_a_run_that_does_not_fit_its_gpus_is_refused_unless_a_setting_allows_it(
    place, monkeypatch, capfd
):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, "--hardware=1.5")
    assert status == 2 and "the run does not fit GPU" in err and "--ignore-memory" in err
    assert out.startswith("memory: does not fit, ") and "actor: 2 ranks" not in out
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, "--hardware=1.5", "--ignore-memory")
    assert (status, err) == (0, "")
    assert out.startswith("memory: does not fit, ") and "actor: 2 ranks" in out
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, "--hardware=40")
    assert (status, out.startswith("memory: fits, ")) == (0, True), err
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, "--hardware=cpu")
    assert status == 0 and out.startswith("memory: fits, ") and "CUDA" not in out, err


def test_a_supervised_job_that_does_not_fit_is_refused_unless_a_setting_allows_it(
    place, monkeypatch, capfd
):
    chat = [{"role": "user", "content": "5 + 8"}, {"role": "assistant", "content": "3"}]
    Path("chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    settings = (
        "model.path=model", "data.train_file=chats.jsonl", "data.max_tokens=96",
        "trainer.batch_size=4", "engine.layout.dp=2", "output_dir=new/out",
    )  # fmt: skip
    status, out, err = dry_run(monkeypatch, capfd, *settings, "--hardware=1", job="sft")
    assert status == 2 and "the run does not fit GPU" in err and "--ignore-memory" in err
    assert out.startswith("memory: does not fit, ") and "model: 2 ranks" not in out
    goes_on = "--hardware=1", "--ignore-memory"
    status, out, err = dry_run(monkeypatch, capfd, *settings, *goes_on, job="sft")
    assert (status, err) == (0, "") and "model: 2 ranks, dp=2 (updates)\n" in out
    nodes = "--gpus-per-node=1", "--num-nodes=3"
    status, out, err = dry_run(monkeypatch, capfd, *settings, *nodes, job="sft")
    assert (status, err) == (0, "") and out.startswith("memory: fits, 1.9 of 85.0 GB of"), out
    assert "2 nodes of 1 GPUs\n1 of the 3 nodes stay idle: to use them, raise engine." in out
    status, out, err = dry_run(monkeypatch, capfd, *settings, job="sft")
    assert (status, err) == (0, "") and "memory: " not in out  # no GPU to fit


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("models.user.path=nowhere", "models.user.path='nowhere' does not exist"),
        ("models.user.tp=3", "models.user.tp=3 does not divide the model's 4 attention heads"),
        ("models.user.max_context=99999", "positions of the model"),
        ("models.user.kv_cache_bytes=9", "one conversation of max_context=96 tokens takes"),
        ("models.user.codec=renderers", "models.user.path='model': the tokenizer's chat template"),
        ("agent.settings.model=other", "agent.settings.model='other' is none of models; allowed:"),
        ("models.user.placement=shared", "models.user.placement='shared': servers that leave"),
        ("agent.loop=single_turn", "agent.loop='single_turn'"),
    ],
)
def test_frozen_models_are_checked_before_a_run(place, monkeypatch, capfd, setting, message):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *USER, setting)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert message in err


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 0),  # 128, which 64 and 32 fit into
        ({"rope_type": "dynamic", "factor": 2.0}, 64),  # it acts beyond
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 32),
    ],
)
def test_sequences_fit_into_the_positions_of_a_scaled_model(
    place, monkeypatch, capfd, scaling, positions
):
    path = place / "model" / "config.json"
    fields = json.loads(path.read_text()) | {"max_position_embeddings": 64}
    fields["rope_parameters"] |= scaling
    path.write_text(json.dumps(fields))
    status, _, err = dry_run(monkeypatch, capfd, *SETTINGS)
    assert (status == 0) == (not positions), err
    assert not positions or f"make 96; allowed: together up to the {positions} positions" in err


ADAPTER = (
    "agent.loop=user", "agent.settings.prompt='You are {answer}.'", "models.user.adapter=earlier",
    "warm_start.num_steps=0", "warm_start.train_file=''", "actor.lora.rank=4",
    "actor.lora.targets=[linear_qkv]", "rollout.lora=adapter",
)  # fmt: skip
SGLANG = "rollout.backend=sglang", "rollout.sglang.url=http://127.0.0.1:9"


def make_adapter(rank: int) -> None:
    config = json.loads(Path("model/config.json").read_text())
    out, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    name = "model.layers.0.self_attn.o_proj.weight"
    factors = Factors(name, torch.ones(rank, width), torch.ones(out, rank))
    write_adapters(Path("earlier"), lambda: iter([factors]), rank, 8.0, config)


def test_an_adapter_of_a_frozen_model_is_shown_on_the_policys_servers(place, monkeypatch, capfd):
    make_adapter(rank=6)
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *ADAPTER)
    assert (status, err) == (0, "")
    assert "rollout: 1 rank, tp=1 (generation, models.user: 1 vLLM server)\n" in out
    longer = "models.user.max_context=100", "rollout.kv_cache_bytes=9"
    status, _, err = dry_run(monkeypatch, capfd, *SETTINGS, *ADAPTER, *longer)
    assert (status, "one sequence of models.user.max_context = 100 tokens" in err) == (2, True), err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), "models.user.adapter: rank=600: servers of rollout.backend='vllm' take adapters"),
        (("models.user.adapter=other",), "models.user.adapter='other' does not exist"),
        (("actor.lora.rank=600",), "actor.lora.rank=600: servers of rollout.backend='vllm' take"),
        (
            ("rollout.backend=sglang", "rollout.sglang.url=http://127.0.0.1:9"),
            "rollout.lora='adapter': sglang takes no adapters; allowed",
        ),
        (("rollout.lora=merged",), "models.user.adapter='earlier' with rollout.lora='merged'"),
    ],
)
def test_an_adapter_that_servers_cannot_take_is_refused(
    place, monkeypatch, capfd, settings, message
):
    make_adapter(rank=600)
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, *ADAPTER, *settings)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_frozen_model_without_weights_or_tokenizer_is_refused(place, monkeypatch, capfd):
    shutil.copytree("model", "other")
    Path("other/model.safetensors").unlink()
    other = "models.user.path=other"
    status, _, err = dry_run(monkeypatch, capfd, *SETTINGS, *USER, other)
    assert (status, "models.user.path='other': there is no *.safetensors" in err) == (2, True), err
    shutil.copy("model/model.safetensors", "other")
    for file in Path("other").glob("*token*"):
        file.unlink()
    status, _, err = dry_run(monkeypatch, capfd, *SETTINGS, *USER, other)
    assert (status, "models.user.path='other' has no tokenizer" in err) == (2, True), err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor.layout.tp=4", "actor.layout.tp=4 does not divide the model's 2 key/value heads"),
        ("actor.layout.ep=4", "the smallest actor.layout.dp that fits: 2"),
        ("data.train_file=no.parquet", "data.train_file='no.parquet' does not exist"),
        ("trainer.prompts_per_step=21", "trainer.prompts_per_step=21: data.train_file='train.pa"),
        ("rollout.max_response_tokens=449", "64 and rollout.max_response_tokens=449 make 513; all"),
        ("warm_start.batch_size=21", "warm_start.batch_size=21: warm_start.train_file="),
        ("output_dir=train.parquet", "output_dir='train.parquet' cannot be made"),
    ],
)
def test_what_a_run_would_be_refused_for_a_dry_run_is(place, monkeypatch, capfd, setting, message):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, setting)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_lengths_and_rows_that_no_setting_decides_follow_model_and_data(place, monkeypatch, capfd):
    unset = [word for word in SETTINGS if "_tokens=" not in word]
    status, out, err = dry_run(monkeypatch, capfd, *unset, "trainer.eval_samples=21")
    assert status == 0 and " sequences of 512 tokens" in out, err
    assert err == (
        "data.max_prompt_tokens=256: the model has 512 positions\n"
        "rollout.max_response_tokens=256: the model has 512 positions\n"
        "mcore-rl: warning: trainer.eval_samples=21: data.test_file='test.parquet' has 20 rows, "
        "and all are taken\n"
    )


USED = [
    (["model"], "output_dir='model' is not empty; allowed: a new folder"),
    (["done", "config.json", "checkpoint/"], "output_dir='done' is not empty; allowed: a new fold"),
    (["saved", "config.json", "checkpoints/"], "or resume='auto' to go on with the run in it"),
    (["taken", ".lock.partial"], "output_dir='taken' is in use by process 7 on host n1"),
]


@pytest.mark.parametrize(("paths", "refusal"), USED, ids=[str(paths[0]) for paths, _ in USED])
def test_dry_run_reports_a_used_output_folder(place, monkeypatch, capfd, paths, refusal):
    folder, *inside = paths
    for name in inside:
        path = place / folder / name
        path.mkdir(parents=True) if name.endswith("/") else path.parent.mkdir(exist_ok=True)
        if not name.endswith("/"):
            path.write_text("process 7 on host n1" if "lock" in name else "{}")
    with (place / folder / ".lock.partial" if "taken" in folder else place / "train.parquet").open(
        "rb"
    ) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, f"output_dir={folder}")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1].startswith("the run will be refused: ") and refusal in out


def test_a_run_needs_no_held_out_set(place, monkeypatch, capfd):
    status, out, err = dry_run(monkeypatch, capfd, *SETTINGS, "data.test_file=''")
    assert (status, err) == (0, "")
    assert "data: 20 prompts to train, none held out, 20 examples" in out


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("reward_model.model_path", ()),
        ("critic.model_path", ("algorithm.advantage=gae",)),
        ("teacher.models.math.model_path", ("algorithm.distillation.loss=sampled_kl",)),
    ],
)
def test_a_path_that_does_not_exist_is_refused_by_its_own_key(
    place, monkeypatch, capfd, setting, more
):
    for path, message in (("nowhere", " does not exist"), (".", ": there is no config.json in")):
        status, _, err = dry_run(monkeypatch, capfd, *SETTINGS, *more, f"{setting}={path}")
        assert (status, err.partition(f"{setting}='{path}'")[2].startswith(message)) == (2, True), (
            err
        )


@pytest.mark.parametrize(
    ("left_out", "unset"),
    [
        (["data.train_file"], "data.train_file is"),
        (["data.train_file", "data.test_file"], "data.train_file is"),
        (["data.train_file", "warm_start.train_file"], "data.train_file and warm_start.train_f"),
    ],
)
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_plan_needs_no_data_and_names_what_is_not_set(
    place, monkeypatch, capfd, left_out, unset, is_complete
):
    """Check that existing weights and files are refused nevertheless."""
    if not is_complete:
        (place / "model" / "model.safetensors").unlink()
    settings = [word for word in SETTINGS if word.partition("=")[0] not in left_out]
    status, out, err = dry_run(monkeypatch, capfd, *settings)
    assert (status, err) == (0, "")
    assert f"data: not checked: {unset}" in out and "actor: 2 ranks" in out
    if "data.test_file" not in left_out:
        status, _, err = dry_run(monkeypatch, capfd, *settings, "data.test_file=no.parquet")
        assert (status, "data.test_file='no.parquet' does not exist" in err) == (2, True), err
    if is_complete:
        (place / "model" / "model.safetensors").write_bytes(b"no")
        status, _, err = dry_run(monkeypatch, capfd, *settings)
        assert (status, "model/model.safetensors" in err) == (2, True), err


def test_weights_that_are_there_are_checked(place, monkeypatch, capfd):
    (place / "model" / "model.safetensors").write_bytes(b"no")
    status, _, err = dry_run(monkeypatch, capfd, *SETTINGS)
    assert status == 2
    assert "model/model.safetensors" in err


def plan_model(model: str, **settings: object) -> dict[str, RolePlan]:
    config = RLConfig(model=ModelConfig(dtype="bfloat16"), **settings)  # type: ignore[arg-type]
    loaded = json.loads((find_published(model) / "config.json").read_text())
    return {role.name: role for role in plan_roles(plan_run(config), loaded)}


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # As their pages on the Hugging Face Hub count them; DeepSeek-V3 without its prediction
        # layer, as its report does (671B).
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("DeepSeek-V3", 671_026_419_200),
    ],
)
def test_one_rank_holds_as_many_parameters_as_a_published_model_has(model, parameters):
    role = plan_model(model)["actor"]
    [stage] = role.stages
    biases = 58 * 256 if model == "DeepSeek-V3" else 0  # of routers: float32, in no gradient
    assert stage.parameters == parameters
    assert stage.weight_bytes == 2 * stage.parameters + 2 * biases
    assert stage.gradient_bytes == 4 * (stage.parameters - biases)
    assert stage.optimizer_bytes == 12 * (stage.parameters - biases)


def test_stages_of_a_pipeline_hold_the_model_once_between_them():
    all_parameters = plan_model("Qwen3-30B-A3B")["actor"].stages[0].parameters
    role = plan_model("Qwen3-30B-A3B", actor=EngineConfig(layout=Layout(pp=4, dp=4, ep=4)))["actor"]
    assert [stage.ranks for stage in role.stages] == [tuple(range(n, n + 4)) for n in (0, 4, 8, 12)]
    experts = 48 * 128 * 3 * 2048 * 768
    assert sum(stage.parameters for stage in role.stages) == all_parameters - experts + experts // 4
    assert [stage.layers for stage in role.stages] == [
        "embedding, layers 0-11", "layers 12-23", "layers 24-35", "layers 36-47, head",
    ]  # fmt: skip


def test_roles_that_there_are_depend_on_the_settings():
    assert list(plan_model("Qwen3-30B-A3B")) == ["actor", "rollout"]
    settings = {
        "warm_start": WarmStartConfig(num_steps=1, layout=Layout(dp=4)),
        "algorithm": AlgorithmConfig(kl_coef=0.1),
        "rollout": RolloutConfig(num_servers=2, tp=4, ep=True),
    }
    all_roles = plan_model("Qwen3-30B-A3B", **settings)
    assert {name: role.num_ranks for name, role in all_roles.items()} == {
        "warm_start": 4, "actor": 1, "reference": 1, "rollout": 8,
    }  # fmt: skip
    assert all_roles["reference"].stages[0].gradient_bytes == 0
    [server] = all_roles["rollout"].stages
    # 32 groups of 8 on each server, of 2,048 tokens: 48 layers, a key and a value head of 128 on
    # each worker. And a block of 32 tokens that no sequence has.
    assert server.cache_bytes == (32 * 8 * 2048 + 32) * 48 * 2 * 128 * 2
    assert server.parameters > all_roles["actor"].stages[0].parameters / 4  # norms, routers whole


def test_format_ranks_joins_consecutive_ranks():
    assert [format_ranks(ranks) for ranks in ([], [3], [0, 1, 2, 5, 7, 8])] == [
        "",
        "3",
        "0-2, 5, 7-8",
    ]


FSDP = "actor.backend=fsdp", "actor.layout.tp=1", "actor.layout.dp=2", "actor.layout.ep=1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (FSDP, "experts.gate_up_proj stacks experts, which actor.backend='megatron' alone"),
        ((*FSDP, "weight_sync.method=full_export"), ""),
        (("actor.layout.dp=2", "actor.layout.etp=2"), "actor.layout.etp=2: the experts of the"),
        (("actor.lora.rank=4",), "actor.lora.targets names linear_fc1, linear_fc2, which this"),
    ],
)
def test_what_stacked_experts_with_biases_do_not_take_is_refused(
    place, monkeypatch, capfd, settings, message
):
    config = json.loads((find_published("gpt-oss-20b") / "config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/model.safetensors").unlink(missing_ok=True)
    files = [s for s in SETTINGS if not s.startswith("warm_start")]
    cache = "rollout.kv_cache_bytes=1073741824"
    status, _, err = dry_run(monkeypatch, capfd, *files, cache, *settings)
    assert (status, message in err) == (2 if message else 0, True), err
