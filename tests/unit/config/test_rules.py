"""A setting that cannot work is refused by name, with its value and what is allowed.

Long because: tables of settings.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from mcore_rl.config.allowed import MAX_SEED
from mcore_rl.config.describe import list_setting_groups
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import resolve_for_device_type, validate_rl
from mcore_rl.config.rules_engine import ModelSizes
from mcore_rl.config.schema import (
    AlgorithmConfig,
    AsynchronousConfig,
    CorrectionConfig,
    FilterConfig,
    Layout,
    LoRAConfig,
    OptimizerConfig,
    PlacementConfig,
    ProfileConfig,
    RewardConfig,
    RLConfig,
    TrainerConfig,
)


def config(**changes):
    made = RLConfig()
    made.task.name = "last_digit"
    for key, value in changes.items():
        *path, leaf = key.split("__")
        target = made
        for name in path:
            target = getattr(target, name)
        assert leaf in {entry.name for entry in fields(target)}
        setattr(target, leaf, value)
    return made


def test_the_defaults_with_a_task_are_valid():
    validate_rl(config())


@pytest.mark.parametrize(
    ("device", "setting", "replay", "has_experts", "dtype", "gaps"),
    [
        ("cpu", "auto", "off", False, "float32", (0.5, 1e-4)),
        ("cuda", "auto", "off", False, "bfloat16", (2.0, 0.1)),
        ("cuda", "float32", "off", False, "float32", (0.5, 1e-4)),
        ("cpu", "bfloat16", "off", False, "bfloat16", (2.0, 0.1)),
        # Two engines that route each by themselves differ by nats where rounding tips a router.
        ("cuda", "auto", "off", True, "bfloat16", (20.0, 0.1)),
        ("cpu", "bfloat16", "record", True, "bfloat16", (20.0, 0.1)),
        ("cuda", "auto", "rollout", True, "bfloat16", (2.0, 0.1)),
        ("cuda", "float32", "off", True, "float32", (0.5, 1e-4)),
    ],
)
def test_dtype_and_experts_decide_the_gaps(device, setting, replay, has_experts, dtype, gaps):
    method = {"weight_sync__method": "disaggregated", "actor__moe__router_replay": replay}
    given = config(model__dtype=setting, **method)
    resolved = resolve_for_device_type(given, device, has_experts=has_experts)
    bounds = resolved.trainer.max_logprob_gap, resolved.trainer.mean_logprob_gap
    assert (resolved.model.dtype, bounds) == (dtype, gaps)
    given.trainer.mean_logprob_gap = 0.5
    expected = replace(resolved.trainer, mean_logprob_gap=0.5)
    assert resolve_for_device_type(given, device, has_experts=has_experts).trainer == expected


ROLES = ("actor", "critic", "reward_model", "teacher")


@pytest.mark.parametrize("role", ROLES)
def test_exchanges_are_overlapped_in_bfloat16_alone(role):
    given = config(**{f"{role}__moe__overlap": True})
    with pytest.raises(ConfigError, match=rf"^{role}.moe.overlap=true with model.dtype='float32'"):
        resolve_for_device_type(given, "cpu")
    resolve_for_device_type(given, "cuda")


@pytest.mark.parametrize("role", ROLES)
def test_products_are_in_float8_with_weights_in_bfloat16_alone(role):
    given = config(**{f"{role}__fp8__recipe": "blockwise"})
    with pytest.raises(ConfigError, match=rf"^{role}.fp8.recipe='blockwise' with model.dtype='fl"):
        resolve_for_device_type(given, "cpu")
    resolve_for_device_type(given, "cuda")


def test_an_actor_in_float8_has_the_gaps_and_the_correction_of_servers_in_float8():
    plain, trained, served = (
        resolve_for_device_type(config(model__dtype="bfloat16", **settings), "cuda")
        for settings in (
            {}, {"actor__fp8__recipe": "blockwise"}, {"rollout__quantization": "fp8_block"}
        )
    )  # fmt: skip
    assert trained.trainer == served.trainer != plain.trainer
    assert (trained.trainer.max_logprob_gap, trained.trainer.mean_logprob_gap) == (20.0, 0.5)
    assert trained.algorithm.correction == served.algorithm.correction
    assert trained.algorithm.correction.level == "token" != plain.algorithm.correction.level


@pytest.mark.parametrize(
    ("profile", "lane", "message"),
    [
        ({"steps": [101]}, "cuda", r"profile.steps=\[101\]; allowed: the run's steps 1 to 100"),
        ({"steps": [2, 2]}, "cuda", r"profile.steps=\[2, 2\]: a number is there twice"),
        ({"steps": [2], "ranks": [0, 2]}, "cuda", r"profile.ranks\[1\]=2; allowed: 0 to 1"),
        ({"steps": [2], "ranks": []}, "cuda", r"profile.ranks=\[\] profiles nothing"),
        ({"steps": [*range(1, 40)], "ranks": [0, 1]}, "cuda", "make 78 traces of each model"),
        ({"steps": [2], "memory": True}, "cpu", "profile.memory=true: torch records the memory of"),
        ({"memory": True}, "cuda", "profile.memory=true without profile.steps"),
    ],
)
def test_profile_that_cannot_be_is_named(profile, lane, message):
    made = config()
    made.actor.layout.dp, made.profile = 2, ProfileConfig(**profile)
    with pytest.raises(ConfigError, match=message):
        resolve_for_device_type(made, lane)


def test_on_gpus_servers_are_colocated_only_with_trainers_of_the_same_pool():
    apart = config(placement__rollout="own")
    with pytest.raises(
        ConfigError, match=r"colocated': .*\(placement.actor='shared', placement.ro"
    ):
        resolve_for_device_type(apart, "cuda")
    resolve_for_device_type(apart, "cpu")
    resolve_for_device_type(config(), "cuda")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rollout.max_num_batched_tokens=100: vLLM on a CPU runs each prompt in one batch; "
         "allowed: at least 1536, its longest sequence"),
        ({"evaluation__max_response_tokens": 2000}, "allowed: at least 2512"),
    ],
)  # fmt: skip
def test_batches_smaller_than_a_prompt_are_refused_where_prompts_are_not_chunked(settings, message):
    few = {"rollout__max_num_batched_tokens": 100, "data__max_prompt_tokens": 512}
    given = config(**few, rollout__max_response_tokens=1024, **settings)
    validate_rl(given)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_for_device_type(given, "cpu")
    resolve_for_device_type(given, "cuda")


@pytest.mark.parametrize(
    ("method", "pool"),
    [("colocated", "shared"), ("full_export", "shared"), ("disaggregated", "own")],
)
def test_where_the_servers_are_follows_from_how_they_get_weights(method, pool):
    given = config(weight_sync__method=method)
    validate_rl(given)
    assert resolve_for_device_type(given, "cpu").placement == PlacementConfig(rollout=pool)


WSD = OptimizerConfig(schedule="wsd", warmup_steps=3, wsd_decay_steps=4)
BAD = [
    (
        {"actor__optimizer": WSD, "trainer__num_steps": 3, "algorithm__num_mini_batches": 2},
        "actor.optimizer.wsd_decay_steps=4: 6 steps, of which actor.optimizer.warmup_steps=3",
    ),
    (
        {"warm_start__optimizer": WSD, "warm_start__num_steps": 5, "warm_start__train_file": ""},
        "warm_start.optimizer.wsd_decay_steps=4: 5 steps, of which",
    ),
    ({"model__path": "/m"}, "model.path='/m': task.name='last_digit' makes its own"),
    ({"task__name": ""}, "model.path='' names nothing"),
    (
        {"rollout__num_servers": 3},
        "weight_sync.method='colocated': rollout.num_servers * rollout.dp * rollout.tp = 3 workers",
    ),
    ({"weight_sync__bind_address": "0.0.0.0"}, "weight_sync.bind_address='0.0.0.0': servers conn"),
    (
        {"reward__terms": {"math": {}}, "reward__name": "choice"},
        "reward.name='choice' has no part in reward.terms=math; allowed: one of the two",
    ),
    (
        {"data__train_files": ["a"]},
        "data.train_file='a': task.name='last_digit' makes its own; allowed: ''",
    ),
    (
        {"data__train_file": "a", "data__train_files": ["b"]},
        "data.train_file='a' and data.train_files=['b']; allowed: one of the two",
    ),
    (
        {"data__train_files": ["a", "b"], "data__train_weights": [1.0]},
        "data.train_weights=[1.0]: 2 files in data.train_files; allowed: a weight for each",
    ),
    (
        {"data__train_weights": [1.0]},
        "data.train_weights=[1.0]: 0 files in data.train_files; allowed: a weight for each",
    ),
    (
        {"placement__rollout": "shared", "weight_sync__method": "disaggregated"},
        "placement.rollout='shared': the servers are on the actor's devices",
    ),
    (
        {"rollout__cores": "0|1"},
        "rollout.cores='0|1' must list the cores of each of a node's 1 workers of a server",
    ),
    (
        {"rollout__load_format": "dummy", "weight_sync__method": "full_export"},
        "rollout.load_format='dummy': vLLM's own loader, which reads what weight_sync.method='full",
    ),
    (
        {"rollout__max_num_seqs": 64, "rollout__max_num_batched_tokens": 63},
        "rollout.max_num_batched_tokens=63; allowed: at least rollout.max_num_seqs=64",
    ),
    (
        {"rollout__speculative__num_tokens": 2, "rollout__dp": 2, "rollout__ep": True},
        "rollout.speculative.num_tokens=2 with rollout.dp=2: drafts of data-parallel ranks",
    ),
    (
        {"rollout__speculative__num_tokens": 2},
        "rollout.speculative.num_tokens=2 with actor.mtp_loss_coef=0.0: the actor has no",
    ),
    ({"rollout__cores": "a"}, "rollout.cores='a'; allowed: numbers and ranges"),
    ({"rollout__top_p": 0.9}, "rollout.top_p=0.9: servers sample from a part of the distribution"),
    ({"rollout__top_k": 5}, "rollout.top_k=5: servers sample from a part of the distribution"),
    (
        {"evaluation__max_response_tokens": 2048, "agent__loop": "environment"},
        "agent.loop='environment' have one context, in training and evaluation",
    ),
    (
        {"evaluation__stop": ["."], "agent__loop": "environment"},
        "evaluation.stop=['.']: turns of agent.loop='environment' end with a token",
    ),
    ({"evaluation__temperature": 0.0, "evaluation__num_samples": 2}, "evaluation.num_samples=2: "),
    (
        {"data__test_file": "", "evaluation__every": 5, "task__name": ""},
        "evaluation.every=5 needs data.test_file or data.test_files",
    ),
    (
        {"data__test_file": "", "checkpoint__keep_best": "eval/test/reward", "task__name": ""},
        "checkpoint.keep_best='eval/test/reward' needs data.test_file or data.test_files",
    ),
    (
        {
            "checkpoint__keep_best": "eval/test/reward",
            "trainer__save_every": 3,
            "evaluation__every": 2,
        },
        "checkpoint.keep_best='eval/test/reward': trainer.save_every=3",
    ),
    (
        {"rollout__tp": 4, "rollout__nodes_per_server": 3},
        "rollout.nodes_per_server=3; allowed: divisors of rollout.tp=4, since each node has as",
    ),
    (
        {"rollout__dp": 4, "rollout__ep": True, "rollout__tp": 3, "rollout__nodes_per_server": 3},
        "rollout.nodes_per_server=3; allowed: divisors of rollout.dp=4, since each node has as",
    ),
    (
        {"rollout__dp": 2},
        "rollout.dp=2 with rollout.ep=false: data-parallel ranks exchange tokens with whole",
    ),
    ({"algorithm__group_size": 1}, "algorithm.group_size=1; allowed: at least 2"),
    ({"critic__layout": Layout(dp=3)}, "critic.layout.dp=3 does not divide the"),
    ({"critic__lora": LoRAConfig(rank=4)}, "critic.lora and critic.moe.router_replay: allowed"),
    (
        {"algorithm__kl_placement": "reward"},
        "algorithm.kl_coef=0: there is no KL for algorithm.kl_placement; allowed: above 0",
    ),
    (
        {"algorithm__kl_target": 0.1},
        "algorithm.kl_coef=0: there is no KL for algorithm.kl_target; allowed: above 0",
    ),
    (
        {"algorithm__correction__unbiased_kl": True},
        "algorithm.kl_coef=0: there is no KL for algorithm.correction.unbiased_kl",
    ),
    (
        {
            "algorithm__correction__unbiased_kl": True,
            "algorithm__kl_coef": 0.1,
            "algorithm__kl_placement": "reward",
        },
        "algorithm.correction.unbiased_kl=true corrects a gradient",
    ),
    (
        {"algorithm__correction__weight_min": 0.5},
        "weight_min=0.5; allowed: 0, or up to weight_max=2.0 with algorithm.correction.method=",
    ),
    (
        {"algorithm__correction__weight_min": 3.0, "algorithm__correction__method": "mask"},
        "weight_min=3.0; allowed: 0, or up to weight_max=2.0",
    ),
    (
        {
            "algorithm__correction__level": "token",
            "algorithm__correction__use_rollout_log_probs": True,
        },
        "algorithm.correction.use_rollout_log_probs=true computes no log-probs that",
    ),
    (
        {
            "algorithm__correction__reject": {"token_k3": 0.1},
            "algorithm__correction__use_rollout_log_probs": True,
        },
        "algorithm.correction.use_rollout_log_probs=true computes no log-probs that",
    ),
    (
        {"algorithm__entropy_target": 0.2, "algorithm__entropy_coef": 2.0},
        "algorithm.entropy_coef=2.0; allowed: 0 to 1.0",
    ),
    (
        {"algorithm__top_entropy_share": 0.2, "algorithm__correction__use_rollout_log_probs": True},
        "algorithm.top_entropy_share=0.2 reads the entropy that comes with the trainer's",
    ),
    (
        {"algorithm__entropy_target": 0.2, "algorithm__correction__use_rollout_log_probs": True},
        "algorithm.entropy_target=0.2 reads the entropy that comes with the trainer's",
    ),
    (
        {
            "actor__moe__router_replay": "record",
            "algorithm__correction__use_rollout_log_probs": True,
        },
        "actor.moe.router_replay='record' records while log-probs are computed",
    ),
    (
        {
            "actor__moe__router_replay": "rollout",
            "algorithm__filter__replay__share": 0.5,
            "algorithm__correction__level": "token",
        },
        "algorithm.filter.replay.share=0.5 with actor.moe.router_replay='rollout'",
    ),
    ({"algorithm__num_mini_batches": 3}, "algorithm.num_mini_batches=3 does not divide"),
    (
        {"trainer__prompts_per_step": 1, "actor__layout": Layout(dp=3)},
        "actor.layout.dp=3 does not divide the 8 samples of a mini-batch",
    ),
    (
        {
            "warm_start__num_steps": 1,
            "warm_start__batch_size": 9,
            "warm_start__layout": Layout(dp=2),
        },
        "warm_start.layout.dp=2 does not divide warm_start.batch_size=9",
    ),
    (
        {"warm_start__num_steps": 1, "warm_start__layout": Layout(tp=2, ep=3)},
        "warm_start.layout: etp * ep * pp = 1 * 3 * 1 = 3 must divide",
    ),
    ({"algorithm__filter__max_rounds": 3}, "max_rounds=3 has no part without a filter"),
    ({"algorithm__filter__if_short": "stop"}, "if_short='stop' has no part without a filter"),
    ({"algorithm__filter__keep_responses": 1}, "algorithm.filter.keep_responses=1"),
    ({"algorithm__filter__keep_responses": 9}, "algorithm.filter.keep_responses=9"),
    ({"algorithm__filter__replay__share": 0.5}, "share=0.5: old samples would count"),
    (
        {
            "task__name": "",
            "data__curriculum__name": "window",
            "data__train_files": ["a"],
            "data__train_weights": [1.0],
        },
        "both say how often a prompt is drawn; allowed: one of the two",
    ),
]


def test_the_fixed_length_of_a_loss_is_that_of_the_longest_response():
    made = config(rollout__max_response_tokens=77)
    made.algorithm.loss_aggregation = "sequence_sum_fixed_length"
    settings = resolve_for_device_type(made, "cpu").algorithm.loss_aggregation_settings
    assert settings == {"length": 77}
    made.algorithm.loss_aggregation_settings = {"length": 5}
    assert resolve_for_device_type(made, "cpu").algorithm.loss_aggregation_settings == {"length": 5}
    assert made.algorithm.loss_aggregation_settings == {"length": 5}


def test_servers_have_room_for_the_longest_response_of_training_or_evaluation():
    made = config(data__max_prompt_tokens=10, rollout__max_response_tokens=77)
    assert made.max_sequence_tokens == 87
    made.evaluation.max_response_tokens = 50
    assert made.max_sequence_tokens == 87
    made.evaluation.max_response_tokens = 200
    assert made.max_sequence_tokens == 210


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_setting_is_named(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_rl(config(**changes))


SETTINGS = [setting for group in list_setting_groups(RLConfig()) for setting in group.settings]
NUMBERS = [s.key for s in SETTINGS if "float" in s.kind and "loss_settings" not in s.key]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_named(value):
    assert {"actor.optimizer.lr", "trainer.max_logprob_gap", "data.train_weights"} <= {*NUMBERS}
    for key in NUMBERS:
        is_list = key == "data.train_weights"
        made = config(**{key.replace(".", "__"): [value] if is_list else value})
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}(\[0\])?={value}; allowed: "):
            validate_rl(made)


def test_the_largest_seed_is_taken_by_all_that_draw_from_it():
    validate_rl(config(seed=MAX_SEED))
    state = np.random.get_state(), torch.random.get_rng_state()
    try:
        np.random.seed(MAX_SEED)  # vLLM's utils/torch_utils.py:549
        torch.manual_seed(MAX_SEED + 2718 + 1024)  # Megatron's tensor_parallel/random.py:480
    finally:
        np.random.set_state(state[0])
        torch.random.set_rng_state(state[1])
    np.random.default_rng([MAX_SEED, 0])


DENSE = ModelSizes(
    num_attention_heads=12,
    num_query_groups=4,
    ffn_sizes=(30,),
    num_experts=0,
    expert_ffn_size=0,
    num_layers=12,
)


def test_every_setting_has_a_default():
    def walk(part):
        for entry in fields(part):
            value = getattr(part, entry.name)
            if is_dataclass(value):
                walk(value)
            assert value is not None or "None" in entry.type

    walk(RLConfig())


@pytest.mark.parametrize(
    "setting",
    [
        {"algorithm__correction__level": "token"},
        {"algorithm__correction__use_rollout_log_probs": True},
        {"algorithm__loss": "decoupled_ppo"},
    ],
)
def test_replay_needs_the_probabilities_of_old_samples(setting):
    validate_rl(config(algorithm__filter__replay__share=0.5, **setting))


HUGE = 10**23
CANNOT_BE = {
    "trainer__num_steps": (HUGE, f"trainer.num_steps={HUGE}; allowed: -2**53 to 2**53"),
    "rollout__max_num_seqs": (HUGE, f"rollout.max_num_seqs={HUGE}; allowed: -2**53 to 2**53"),
    "seed": (-HUGE, f"seed=-{HUGE}; allowed: -2**53 to 2**53"),
    "algorithm__loss_settings": ({"a": HUGE}, f"algorithm.loss_settings.a={HUGE}; allowed: -2**53"),
    "output_dir": ("a" * 300, "aaaa' is too long: 300 bytes, 300 in one name; allowed: up to 4095"),
    "model__path": ("/a" * 2100, "/a/a' is too long: 4200 bytes, 1 in one name"),
    "data__train_files": (["x", "é" * 128], "éé' is too long: 256 bytes, 256 in one name"),
    "data__test_files": ({"mine": "a" * 256}, "aaaa' is too long: 256 bytes"),
    "teacher__models": (
        {"a": {"path": "b" * 258}},
        "bbbb' is too long: 258 bytes, 258 in",
    ),
    "resume": ("\ud800", r"resume='\ud800'; allowed: text that UTF-8 can write"),
    "data__prompt_column": ("a\0b", r"='a\x00b'; allowed: text without NUL characters"),
    "agent__settings": ({"command": "a\0"}, r"agent.settings.command='a\x00'; allowed: text"),
}


@pytest.mark.parametrize("key", CANNOT_BE)
def test_what_no_setting_can_be_is_refused_by_name_in_one_short_line(key):
    value, words = CANNOT_BE[key]
    with pytest.raises(ConfigError) as raised:
        validate_rl(config(**{key: value}))
    line = str(raised.value)
    assert line.startswith(key.replace("__", ".")) and words in line
    assert len(line) < 250 and "\n" not in line


def test_a_path_may_be_as_long_as_linux_takes_one():
    validate_rl(config(output_dir="/".join(["a" * 255] * 15)))


def resolved(
    mode="fully_async", staleness=2, asynchronous=None, replay="off", **algorithm
) -> RLConfig:
    config = RLConfig(
        trainer=TrainerConfig(
            mode=mode, staleness=staleness, asynchronous=AsynchronousConfig(**asynchronous or {})
        ),
        reward=RewardConfig(shuffle=algorithm.pop("shuffle", False)),
        algorithm=AlgorithmConfig(**algorithm),
    )
    config.actor.moe.router_replay = replay
    config.model.path = config.data.train_file = config.data.test_file = "given"
    validate_rl(config)
    return resolve_for_device_type(config, "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(staleness=-1), "trainer.staleness=-1; allowed: at least 0"),
        (dict(asynchronous={"oversampling": 2}), "oversampling=2; allowed: 0 to 1"),
        (
            dict(staleness=0, asynchronous={"oversampling": 0.5}),
            "oversampling=0.5 with .*staleness=0",
        ),
        (dict(asynchronous={"max_groups": -1}), "max_groups=-1; allowed: at least 0"),
        (dict(asynchronous={"max_waiting_samples": 511}), "samples=511; allowed: at least 512"),
        (dict(mode="sync", staleness=0, asynchronous={"max_groups": 1}), "has no part in .*'sync'"),
        (dict(correction=CorrectionConfig(level="off")), "trainer.staleness=2: old samples would"),
        (dict(loss="decoupled_ppo"), "algorithm.loss='decoupled_ppo' with .* and no weight_cap"),
        (
            dict(filter=FilterConfig(group_filter="drop_uniform"), shuffle=True),
            "reward.shuffle=true with .*: groups are filtered as they come",
        ),
        (
            dict(filter=FilterConfig(group_filter="drop_uniform", prompts_per_round=8)),
            "prompts_per_round=8: .* in no rounds",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolved(**settings)


def test_a_cap_on_the_weights_makes_decoupled_ppo_an_answer_to_old_samples():
    resolved(loss="decoupled_ppo", loss_settings={"weight_cap": 5.0})


@pytest.mark.parametrize(
    ("mode", "staleness", "level"),
    [("sync", 0, "off"), ("one_step_off", 1, "token"), ("fully_async", 2, "token")],
)
def test_what_nobody_has_set(mode, staleness, level):
    config = resolved(mode, None)
    assert config.trainer.staleness == staleness
    correction = config.algorithm.correction
    assert (correction.level, correction.method, correction.weight_max) == (level, "truncate", 2.0)
    assert config.placement.rollout == ("shared" if mode == "sync" else "own")
