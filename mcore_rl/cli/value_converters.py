"""Values of settings of verl and TRL as ours: a function for each entry of other_names.py.

A function takes a `Case` and returns our settings by name, none of them where the value is what we
do anyway. It raises `Unconvertible` where somebody has to look.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

Settings = Mapping[str, Any]
CONVERTERS: dict[str, Callable[[Case], Settings]] = {}
# Defaults of verl 0.9.1 and TRL 1.16 that are not ours, and those that other values depend on.
DEFAULTS: Mapping[str, Settings] = {
    "verl": {
        "data.prompt_key": "prompt",
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.train_batch_size": 1024,
        "rollout.n": 1,
        "rollout.tensor_model_parallel_size": 2,
        "rollout.val_kwargs.do_sample": False,
        "trainer.n_gpus_per_node": 8,
        "actor.megatron.expert_tensor_parallel_size": None,
        "actor.megatron.use_distributed_optimizer": True,
        "model.enable_gradient_checkpointing": True,
        "actor.use_dynamic_bsz": False,
        "actor.ppo_max_token_len_per_gpu": 16384,
        "actor.optim.weight_decay": 0.01,
        "actor.optim.betas": [0.9, 0.999],
        "actor.ppo_mini_batch_size": 256,
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.2,
        "actor.clip_ratio_c": 3.0,
        "actor.kl_loss_coef": 0.001,
        "actor.kl_loss_type": "low_var_kl",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_penalty": "kl",
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "critic.optim.lr": 1e-5,
        "critic.optim.weight_decay": 0.01,
        "critic.optim.betas": [0.9, 0.999],
        "critic.cliprange_value": 0.5,
        "critic.model.enable_gradient_checkpointing": True,
        "critic.ppo_max_token_len_per_gpu": 32768,
        "trainer.resume_mode": "auto",
    },
    "trl": {
        "max_completion_length": 512,
        "num_generations": 8,
        "generation_batch_size": None,
        "steps_per_generation": None,
        "per_device_train_batch_size": 8,
        "gradient_checkpointing": True,
        "bf16": True,
        "adam_beta2": 0.999,
        "lr_scheduler_type": "linear",
        "epsilon": 0.2,
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_clip_max": 3.0,
        "save_steps": 500,
    },
}
_ADVANTAGES = (
    "gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
)  # fmt: skip
_VERL_LOSSES = {
    "vanilla": "ppo_clip", "gspo": "gspo_token", "geo_mean": "gmpo", "gpg": "gpg", "sapo": "sapo",
    "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "dro": "dro",
    "clip_cov": "clip_cov", "kl_cov": "kl_cov",
}  # fmt: skip
_TRL_LOSSES = {name: name for name in ("cispo", "sapo", "vespo", "luspo")} | {
    name: "ppo_clip" for name in ("grpo", "dapo", "bnpo", "dr_grpo")
}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_sum_fixed_length",
}
_TRL_AGGREGATIONS = {
    "grpo": "sequence_mean_token_mean",
    "sapo": "sequence_mean_token_mean",
    "luspo": "sequence_mean_token_mean",
    "dr_grpo": "sequence_sum_fixed_length",
}
# The names of the bounds of a loss where they are not clip_ratio_low and clip_ratio_high.
_BOUNDS = {
    "gmpo": "clip_log_ratio",
    "dppo_tv": "max_divergence",
    "dppo_kl": "max_divergence",
    **dict.fromkeys(("sapo", "gpg", "reinforce", "dro", "kl_cov", "vespo"), ""),
}
_KL_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "k1+": "k1+", "abs": "abs", "mse": "k2", "k2": "k2",
    "low_var_kl": "low_variance", "k3": "low_variance", "low_var_kl+": "low_variance+",
    "k3+": "low_variance+",
}  # fmt: skip
_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear",
    "cosine": "cosine", "WSD": "wsd",
}  # fmt: skip
_TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")


class Unconvertible(Exception):
    """A value that somebody has to look at; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """A setting to convert, and those around it."""

    framework: str  # "verl" or "trl"
    name: str
    value: Any
    ours: tuple[str, ...]
    given: Settings  # by the names of other_names.py
    remarks: list[str]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of another setting, or its default."""
        defaults = DEFAULTS[self.framework]
        return self.given.get(name, defaults.get(name, default))

    def set(self, value: Any) -> Settings:
        return {self.ours[0]: value}

    def choose(self, values: Mapping[Any, Any]) -> Settings:
        """Return our name of a value."""
        if self.value not in values:
            raise Unconvertible(f"known are {', '.join(map(str, values))}")
        return self.set(values[self.value])

    @property
    def is_megatron(self) -> bool:
        return bool(self.given.get("actor.strategy") == "megatron")

    @property
    def has_critic(self) -> bool:
        return self.framework == "verl" and self.get("algorithm.adv_estimator") == "gae"

    @property
    def loss(self) -> str:
        """Our name of the loss."""
        correction = "algorithm.rollout_correction"
        if self.get(f"{correction}.bypass_mode") and (
            self.get(f"{correction}.loss_type") == "reinforce"
        ):
            return "reinforce"
        if self.framework == "verl":
            return _VERL_LOSSES.get(self.get("actor.policy_loss.loss_mode", "vanilla"), "")
        name = _TRL_LOSSES.get(self.get("loss_type"), "")
        is_of_sequences = self.get("importance_sampling_level") == "sequence"
        return "gspo" if is_of_sequences and name == "ppo_clip" else name

    @property
    def longest(self) -> int:
        """The most tokens of a sample."""
        if self.framework == "trl":
            return int(self.get("max_prompt_length", 1024)) + self.get("max_completion_length")
        return int(self.get("data.max_prompt_length") + self.get("data.max_response_length"))

    @property
    def trl_batch(self) -> tuple[int, int]:
        """TRL's responses and optimizer steps of a generation, on one process."""
        samples = self.get("per_device_train_batch_size")
        accumulated = self.get("gradient_accumulation_steps", 1)
        size, steps = self.get("generation_batch_size"), self.get("steps_per_generation")
        if size is None:
            size = samples * (steps or accumulated)
        return size, max(1, (steps or size // samples) // accumulated)


def register_converter(function: Callable[[Case], Settings]) -> Callable[[Case], Settings]:
    """Register convert_NAME under NAME, its name in the table."""
    CONVERTERS[function.__name__.removeprefix("convert_")] = function
    return function


@register_converter
def convert_same(case: Case) -> Settings:
    return case.set(case.value)


@register_converter
def convert_size(case: Case) -> Settings:
    """Return a value that is left out where it is null."""
    return {} if case.value is None else case.set(case.value)


@register_converter
def convert_look(case: Case) -> Settings:
    raise Unconvertible(f"see {' and '.join(case.ours)}")


@register_converter
def convert_no_limit(case: Case) -> Settings:
    return case.set(max(0, case.value))


# Model and data


@register_converter
def convert_model_path(case: Case) -> Settings:
    """Name the hub where a path is ORG/NAME, which verl would download."""
    is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", case.value) and not Path(case.value).exists()
    return case.set(f"hf:{case.value}" if is_hub_name else case.value)


@register_converter
def convert_dtype(case: Case) -> Settings:
    if isinstance(case.value, bool):
        return case.set("bfloat16" if case.value else "float32")
    names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
    return case.choose(names)


@register_converter
def convert_train_files(case: Case) -> Settings:
    files = case.value if isinstance(case.value, list) else [case.value]
    return {"data.train_file": files[0]} if len(files) == 1 else {"data.train_files": files}


@register_converter
def convert_test_files(case: Case) -> Settings:
    files = case.value if isinstance(case.value, list) else [case.value]
    if len(files) == 1:
        return {"data.test_file": files[0]}
    paths = [PurePosixPath(file) for file in files]
    names = [path.stem for path in paths]
    if len({*names}) < len(names):  # gsm8k/test.parquet, math/test.parquet
        names = [path.parent.name for path in paths]
    return {"data.test_files": dict(zip(names, files, strict=True))}


@register_converter
def convert_images(case: Case) -> Settings:
    case.remarks.append("data.images_column: for models that take images")
    return case.set(case.value)


@register_converter
def convert_long_prompts(case: Case) -> Settings:
    return case.set("drop" if case.value else "refuse")


@register_converter
def convert_truncation(case: Case) -> Settings:
    if case.value != "error":
        raise Unconvertible("prompts are not cut; data.long_prompts=drop leaves long ones out")
    return {}


@register_converter
def convert_prompts(case: Case) -> Settings:
    if case.framework == "verl":
        return case.set(case.value)
    responses, group = case.trl_batch[0], case.get("num_generations")
    case.remarks.append(
        "trainer.prompts_per_step: of one process; multiply it by those of accelerate"
        if case.value is None
        else f"trainer.prompts_per_step: {responses} responses / {group} generations"
    )
    if responses % group:
        raise Unconvertible(f"{responses} responses are no whole groups of {group}")
    return case.set(responses // group)


# Generation


@register_converter
def convert_top_k(case: Case) -> Settings:
    return case.set(max(0, case.value or 0))


@register_converter
def convert_backend(case: Case) -> Settings:
    if isinstance(case.value, bool):
        return {}
    return case.choose({"vllm": "vllm", "sglang": "sglang"})


@register_converter
def convert_expert_parallel(case: Case) -> Settings:
    return case.set(case.value > 1)


@register_converter
def convert_quantization(case: Case) -> Settings:
    return case.choose({None: None, "fp8": "fp8_block"})


@register_converter
def convert_load_format(case: Case) -> Settings:
    names = {"safetensors": "checkpoint", "auto": "auto", "dummy": "dummy"}
    return case.choose(names | {"dummy_megatron": "dummy", "dummy_dtensor": "dummy"})


@register_converter
def convert_engine_flag(case: Case) -> Settings:
    name = case.name.rpartition(".")[2]
    is_default = case.value is (name == "enable_chunked_prefill")
    return {} if is_default else {f"rollout.engine.{name}": case.value}


@register_converter
def convert_engine(case: Case) -> Settings:
    case.remarks.append("rollout.engine: a dry run checks the fields of vLLM")
    return {f"rollout.engine.{case.name.removeprefix('rollout.engine_kwargs.vllm.')}": case.value}


@register_converter
def convert_shared(case: Case) -> Settings:
    if not case.value:
        raise Unconvertible("servers that keep their memory have devices of their own")
    return {}


@register_converter
def convert_trainer_mode(case: Case) -> Settings:
    if case.value not in ("sync", "colocate"):
        raise Unconvertible("see trainer.mode, placement.rollout and weight_sync.method")
    return {}


@register_converter
def convert_do_sample(case: Case) -> Settings:
    return {} if case.value else case.set(0.0)


@register_converter
def convert_router_replay(case: Case) -> Settings:
    return case.set("rollout" if case.value else "off")


# Training engine


@register_converter
def convert_strategy(case: Case) -> Settings:
    return case.choose({"megatron": "megatron", "fsdp": "fsdp", "fsdp2": "fsdp"})


@register_converter
def convert_distributed(case: Case) -> Settings:
    return case.set(case.value) if case.is_megatron else {}


@register_converter
def convert_etp(case: Case) -> Settings:
    if case.value is None and case.get("actor.megatron.expert_model_parallel_size", 1) == 1:
        return {}
    tp = case.get("actor.megatron.tensor_model_parallel_size", 1)
    return case.set(tp if case.value is None else case.value)


@register_converter
def convert_gpus(case: Case) -> Settings:
    """Return the layouts that use all GPUs, in turns, as in verl."""
    world = int(case.get("trainer.n_gpus_per_node")) * int(case.get("trainer.nnodes", 1))
    settings = {"actor.layout.dp": _count_dp(case, "actor", world)}
    if case.has_critic:
        settings |= _copy_layout(case, world)
    workers = int(case.get("rollout.tensor_model_parallel_size"))
    workers *= int(case.get("rollout.data_parallel_size", 1))
    settings["rollout.num_servers"] = _divide(world, workers, "workers of a server")
    per_node = int(case.get("trainer.n_gpus_per_node"))
    if workers > per_node:
        settings["rollout.nodes_per_server"] = _divide(workers, per_node, "GPUs of a node")
    return settings


def _divide(number: int, by: int, what: str) -> int:
    if number % by:
        raise Unconvertible(f"{number} GPUs or workers are no multiple of {by} {what}")
    return number // by


def _get_axis(case: Case, role: str, name: str) -> int:
    return int(case.get(f"{role}.megatron.{name}_parallel_size") or 1)


def _count_dp(case: Case, role: str, world: int) -> int:
    if not case.is_megatron:
        size = int(case.get(f"{role}.ulysses_sequence_parallel_size", 1))
        return _divide(world, size, "ranks of a sequence")
    axes = ("tensor_model", "pipeline_model", "context")
    tp, pp, cp = (_get_axis(case, role, axis) for axis in axes)
    return _divide(world, tp * pp * cp, "ranks of a replica (tp * pp * cp)")


def _copy_layout(case: Case, world: int) -> dict[str, Any]:
    """Return engine and layout of the critic, whose axes are 1 in verl unless they are set."""
    settings: dict[str, Any] = {"critic.layout.dp": _count_dp(case, "critic", world)}
    if not case.is_megatron:
        return settings | {"critic.backend": "fsdp"}
    axes = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    sizes = {axis: _get_axis(case, "critic", name) for axis, name in axes.items()}
    return settings | {f"critic.layout.{axis}": size for axis, size in sizes.items() if size > 1}


@register_converter
def convert_replicas(case: Case) -> Settings:
    if case.framework == "trl":
        raise Unconvertible("see actor.backend=fsdp or actor.layout")
    if case.value in (-1, None):
        return {}
    world = int(case.get("trainer.n_gpus_per_node")) * int(case.get("trainer.nnodes", 1))
    return case.set(_divide(world, case.value, "ranks of fsdp_size"))


@register_converter
def convert_checkpointing(case: Case) -> Settings:
    """In verl this is for FSDP; its Megatron trainer has fields of Megatron."""
    return case.set("full") if case.value and not case.is_megatron else {}


@register_converter
def convert_granularity(case: Case) -> Settings:
    return case.choose({None: "none", "full": "full", "selective": "selective"})


@register_converter
def convert_dispatcher(case: Case) -> Settings:
    return case.choose({name: name for name in ("alltoall", "allgather", "flex")})


@register_converter
def convert_deepep(case: Case) -> Settings:
    return case.set("flex") if case.value else {}


@register_converter
def convert_megatron(case: Case) -> Settings:
    case.remarks.append("actor.megatron: a dry run checks the fields of Megatron")
    return {f"actor.megatron.{case.name.rpartition('.')[2]}": case.value}


@register_converter
def convert_max_tokens(case: Case) -> Settings:
    return case.set(case.value) if case.get("actor.use_dynamic_bsz") else {}


@register_converter
def convert_micro_batch(case: Case) -> Settings:
    """Count the tokens of a micro-batch of samples, each of the longest."""
    if case.name == "actor.use_dynamic_bsz" or case.get("actor.use_dynamic_bsz"):
        return {}
    return case.set(case.value * case.longest)


@register_converter
def convert_in_mini_batches(case: Case) -> Settings:
    return {}  # steps_per_generation counts with it


@register_converter
def convert_warmup(case: Case) -> Settings:
    if isinstance(case.value, float) and 0 < case.value < 1:
        return convert_warmup_ratio(case)
    return case.set(max(0, int(case.value)))


@register_converter
def convert_warmup_ratio(case: Case) -> Settings:
    if not case.value:
        return {}
    name = "trainer.total_training_steps" if case.framework == "verl" else "max_steps"
    steps = case.get(name)
    if not steps or steps < 0:
        raise Unconvertible(f"a share of all steps, which {name} does not give")
    if case.framework == "verl":
        steps *= count_mini_batches(case)
    return case.set(round(case.value * steps))


@register_converter
def convert_schedule(case: Case) -> Settings:
    return case.choose(_SCHEDULES)


@register_converter
def convert_betas(case: Case) -> Settings:
    if not isinstance(case.value, list):
        return case.set(case.value)
    beta1, beta2 = case.value
    return {"actor.optimizer.beta1": beta1, "actor.optimizer.beta2": beta2}


@register_converter
def convert_optimizer(case: Case) -> Settings:
    if str(case.value).lower().startswith(("adam", "adamw")) and "bit" not in str(case.value):
        return {}
    return case.choose({"muon": "muon"})


@register_converter
def convert_cpu_offload(case: Case) -> Settings:
    return {case.ours[0]: True, "actor.optimizer.distributed": True} if case.value else {}


@register_converter
def convert_lora_targets(case: Case) -> Settings:
    if case.value == "all-linear":
        return {}
    raise Unconvertible("Megatron's names of linear layers, as in actor.lora.targets")


@register_converter
def convert_mtp(case: Case) -> Settings:
    return case.set(case.value) if case.get("model.mtp.enable_train") else {}


@register_converter
def convert_router_aux(case: Case) -> Settings:
    case.remarks.append("actor.moe.aux_loss_coef: for models with experts")
    return case.set(case.value)


@register_converter
def convert_critic(case: Case) -> Settings:
    return case.set(case.value) if case.has_critic else {}


@register_converter
def convert_critic_betas(case: Case) -> Settings:
    if not case.has_critic:
        return {}
    return {f"critic.optimizer.beta{i}": beta for i, beta in enumerate(case.value, 1)}


@register_converter
def convert_critic_path(case: Case) -> Settings:
    is_policys = case.value == case.get("model.path")
    return convert_model_path(case) if case.has_critic and not is_policys else {}


@register_converter
def convert_critic_checkpointing(case: Case) -> Settings:
    return case.set("full") if case.has_critic and case.value and not case.is_megatron else {}


@register_converter
def convert_critic_micro_batch(case: Case) -> Settings:
    is_used = case.has_critic and not case.get("actor.use_dynamic_bsz")
    return case.set(case.value * case.longest) if is_used else {}


# Algorithm


@register_converter
def convert_advantage(case: Case) -> Settings:
    return case.choose({name: name for name in _ADVANTAGES} | {"grpo_vectorized": "grpo"})


@register_converter
def convert_gae(case: Case) -> Settings:
    name, estimator = case.name.rpartition(".")[2], case.get("algorithm.adv_estimator")
    has_it = estimator == "gae" or (estimator == "reinforce_plus_plus" and name == "gamma")
    return {f"algorithm.advantage_settings.{name}": case.value} if has_it else {}


@register_converter
def convert_by_std(case: Case) -> Settings:
    if case.value == "batch":
        return {"algorithm.advantage": "lite_ppo"}
    if case.framework == "verl" and case.get("algorithm.adv_estimator") not in (
        "grpo",
        "grpo_passk",
    ):
        return {}
    return case.set(case.value in (True, "group"))


@register_converter
def convert_objectives(case: Case) -> Settings:
    if case.value != "sum_then_normalize":
        raise Unconvertible("algorithm.advantage=gdpo, whose `parts` name the rewards")
    return {}


def count_mini_batches(case: Case) -> int:
    """Return the optimizer steps of a step.

    Raises:
        Unconvertible: verl's mini-batches do not divide the batch.
    """
    if case.framework == "trl":
        return case.trl_batch[1]
    batch, part = case.get("data.train_batch_size"), case.get("actor.ppo_mini_batch_size")
    if batch % part and batch > part:
        raise Unconvertible(f"{part} prompts do not divide the {batch} of a step")
    return max(1, batch // part)


@register_converter
def convert_mini_batches(case: Case) -> Settings:
    return case.set(count_mini_batches(case))


@register_converter
def convert_epochs(case: Case) -> Settings:
    if case.value > 1:
        raise Unconvertible("samples are trained on once a step; see algorithm.filter.replay")
    return {}


@register_converter
def convert_loss(case: Case) -> Settings:
    if not case.loss:
        raise Unconvertible("see docs/algorithms.md for losses, or write your own")
    settings = {"algorithm.loss": case.loss}
    if case.framework == "trl":
        aggregation = _TRL_AGGREGATIONS.get(case.get("loss_type"), "token_mean")
        settings["algorithm.loss_aggregation"] = aggregation
    return settings


def _set_bound(case: Case, side: str, value: float) -> Settings:
    prefix = _BOUNDS.get(case.loss, "clip_ratio")
    return {f"algorithm.loss_settings.{prefix}_{side}": value} if prefix else {}


@register_converter
def convert_clip_low(case: Case) -> Settings:
    if case.framework == "verl":
        return _set_bound(case, "low", case.value)
    if case.loss == "cispo":  # which TRL bounds above alone
        return {}
    high = case.get("epsilon_high")
    both = {**_set_bound(case, "low", case.value)}
    return both if high is not None else both | {**_set_bound(case, "high", case.value)}


@register_converter
def convert_clip_high(case: Case) -> Settings:
    if case.value is None:
        return {}
    is_bound_of_ratio = case.framework == "trl" and case.loss == "cispo"
    return _set_bound(case, "high", case.value - 1 if is_bound_of_ratio else case.value)


@register_converter
def convert_dual_clip(case: Case) -> Settings:
    if case.value is None or case.loss != "ppo_clip":
        return {}
    if case.framework == "trl":
        raise Unconvertible("TRL bounds the ratio of all tokens, dual_clip where A < 0")
    return case.set(case.value)


@register_converter
def convert_sapo(case: Case) -> Settings:
    side = "negative" if case.name.endswith("neg") else "positive"
    is_used = case.loss == "sapo"
    return {f"algorithm.loss_settings.temperature_{side}": case.value} if is_used else {}


@register_converter
def convert_vespo(case: Case) -> Settings:
    _, name, side = case.name.split("_")
    whole = {"neg": "negative", "pos": "positive"}[side]
    is_used = case.loss == "vespo"
    return {f"algorithm.loss_settings.{name}_{whole}": case.value} if is_used else {}


@register_converter
def convert_aggregation(case: Case) -> Settings:
    return case.choose(_AGGREGATIONS)


@register_converter
def convert_scale_factor(case: Case) -> Settings:
    if case.value is None or case.get("actor.loss_agg_mode") != "seq-mean-token-sum-norm":
        return {}
    return {f"{case.ours[0]}.length": case.value}


@register_converter
def convert_entropy_target(case: Case) -> Settings:
    if not case.get("use_adaptive_entropy", False):
        return {}
    return case.set(case.get("entropy_target", 0.2))


@register_converter
def convert_kl_coef(case: Case) -> Settings:
    is_used = case.framework == "trl" or case.get("actor.use_kl_loss")
    return case.set(case.value) if is_used else {}


@register_converter
def convert_kl_reward_coef(case: Case) -> Settings:
    return case.set(case.value) if case.get("algorithm.use_kl_in_reward") else {}


@register_converter
def convert_kl_placement(case: Case) -> Settings:
    if not case.value:
        return {}
    if case.get("actor.use_kl_loss") and case.get("algorithm.use_kl_in_reward"):
        raise Unconvertible("there is one KL: in the loss or in the reward")
    return case.set("loss" if case.name == "actor.use_kl_loss" else "reward")


@register_converter
def convert_kl_estimator(case: Case) -> Settings:
    of = {"actor.kl_loss_type": "actor.use_kl_loss"}.get(case.name, "algorithm.use_kl_in_reward")
    return case.choose(_KL_ESTIMATORS) if case.get(of) else {}


@register_converter
def convert_kl_target(case: Case) -> Settings:
    is_used = case.get("algorithm.kl_ctrl.type") == "adaptive"
    return case.set(case.value) if is_used else {}


@register_converter
def convert_group_filter(case: Case) -> Settings:
    if not case.get("algorithm.filter_groups.enable"):
        return {}
    return case.set("drop_uniform")


@register_converter
def convert_rounds(case: Case) -> Settings:
    if not case.get("algorithm.filter_groups.enable"):
        return {}
    if case.value < 1:
        raise Unconvertible("0 is without limit in verl; set algorithm.filter.max_rounds")
    return case.set(case.value)


@register_converter
def convert_correction(case: Case) -> Settings:
    if case.framework == "verl":
        return {} if case.value is None else case.set(case.value)
    if not case.get("use_vllm") or not case.get("vllm_importance_sampling_correction"):
        return {}
    mode = case.get("vllm_importance_sampling_mode", "sequence_mask")
    level, _, method = mode.partition("_")
    if method not in ("mask", "truncate"):
        raise Unconvertible("see algorithm.correction")
    return {case.ours[0]: level, case.ours[1]: method}


@register_converter
def convert_weight_max(case: Case) -> Settings:
    if case.framework == "trl":
        is_used = case.get("use_vllm") and case.get("vllm_importance_sampling_correction")
        return case.set(case.value) if is_used and case.value is not None else {}
    if case.get("algorithm.rollout_correction.rollout_is") is None:
        return {}
    low, _, high = str(case.value).rpartition("_")
    if not low:
        return case.set(float(high))
    bounds = {"weight_min": float(low), "weight_max": float(high), "method": "mask"}
    return {f"algorithm.correction.{name}": value for name, value in bounds.items()}


@register_converter
def convert_reject(case: Case) -> Settings:
    if case.value is None:
        return {}
    if case.framework == "trl":
        return {f"{case.ours[0]}.negative_sequence_k1": case.value}
    raise Unconvertible("see algorithm.correction.reject; verl's bounds of k1 are of 1/ratio")


@register_converter
def convert_correction_loss(case: Case) -> Settings:
    if not case.get("algorithm.rollout_correction.bypass_mode") or case.value == "ppo_clip":
        return {}
    return case.choose({"reinforce": "reinforce"})


# Reward


@register_converter
def convert_custom_reward(case: Case) -> Settings:
    group = case.name.rpartition(".")[0]
    path, name = case.get(f"{group}.path"), case.get(f"{group}.name", "compute_score")
    if not path:
        return {}
    case.remarks.append("reward.name: the arguments of the function differ, see docs/rewards.md")
    return case.set(f"{path}:{name}")


@register_converter
def convert_reward_manager(case: Case) -> Settings:
    case.remarks.append("reward.name: choose the reward, verl's follows from data_source")
    return {}


@register_converter
def convert_overlong(case: Case) -> Settings:
    group = case.name.rpartition(".")[0]
    if not case.get(f"{group}.enable"):
        return {}
    case.remarks.append("reward.terms: choose the reward beside overlong, verl's is by data_source")
    term = {
        "weight": float(case.get(f"{group}.penalty_factor", 1.0)),
        "settings": {"buffer_tokens": int(case.get(f"{group}.len", 0))},
    }
    return {"reward.terms": {"math": {}, "overlong": term}}


@register_converter
def convert_reward_model(case: Case) -> Settings:
    if case.name == "reward_model.enable":
        return {}
    case.remarks.append("reward_model.model_path: a checkpoint with a score head, docs/rewards.md")
    return convert_model_path(case) if case.value else {}


# Run


@register_converter
def convert_num_steps(case: Case) -> Settings:
    if case.value is None or case.value < 0:
        return {}
    if case.framework == "verl":
        return case.set(case.value)
    return case.set(-(-case.value // count_mini_batches(case)))


@register_converter
def convert_epochs_of_data(case: Case) -> Settings:
    given = case.get("trainer.total_training_steps") or case.get("max_steps", -1)
    if given is not None and given > 0:
        return {}
    raise Unconvertible("set trainer.num_steps: epochs * prompts / trainer.prompts_per_step")


@register_converter
def convert_run_name(case: Case) -> Settings:
    has_folder = "trainer.default_local_dir" in case.given or "output_dir" in case.given
    return {} if has_folder else case.set(f"outputs/{case.value}")


@register_converter
def convert_trackers(case: Case) -> Settings:
    names = case.value if isinstance(case.value, list) else [case.value]
    names = [name for name in names if name not in ("console", "file", "none", None)]
    if other := [name for name in names if name not in _TRACKERS]:
        raise Unconvertible(f"{', '.join(other)}: a tracker of your own, docs/plugs.md")
    return case.set(names)


@register_converter
def convert_every(case: Case) -> Settings:
    if case.value is None or case.value <= 0:
        return case.set(0)
    if case.framework == "verl":
        return case.set(case.value)
    if case.value < 1:
        raise Unconvertible("a share of all steps")
    return case.set(max(1, int(case.value) // count_mini_batches(case)))


@register_converter
def convert_resume(case: Case) -> Settings:
    if case.name == "resume_from_checkpoint":
        return {} if case.value in (None, False) else case.set("auto")
    if case.name.endswith("from_path"):
        return convert_size(case)
    if case.value == "resume_path":
        return {}
    return case.choose({"auto": "auto", "disable": "never"})


@register_converter
def convert_samples(case: Case) -> Settings:
    return {}  # every step has its table already
