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
_VERL_LOSSES = {
    "vanilla": "ppo_clip", "gspo": "gspo_token", "geo_mean": "gmpo", "gpg": "gpg", "sapo": "sapo",
    "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "dro": "dro",
    "clip_cov": "clip_cov", "kl_cov": "kl_cov",
}  # fmt: skip
_TRL_LOSSES = {name: name for name in ("cispo", "sapo", "vespo", "luspo")} | {
    name: "ppo_clip" for name in ("grpo", "dapo", "bnpo", "dr_grpo")
}
_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear",
    "cosine": "cosine", "WSD": "wsd",
}  # fmt: skip


class Unconvertible(Exception):
    """A value that somebody has to look at; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """A setting to convert, and those around it."""

    framework: str  # "verl" or "trl"
    name: str
    value: Any
    our_names: tuple[str, ...]
    given: Settings  # by the names of other_names.py
    remarks: list[str]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of another setting, or its default."""
        defaults = DEFAULTS[self.framework]
        return self.given.get(name, defaults.get(name, default))

    def set(self, value: Any) -> Settings:
        return {self.our_names[0]: value}

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
            return int(self.get("max_prompt_length", 1024) + self.get("max_completion_length"))
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

    def count_mini_batches(self) -> int:
        """Return the optimizer steps of a step.

        Raises:
            Unconvertible: verl's mini-batches do not divide the batch.
        """
        if self.framework == "trl":
            return self.trl_batch[1]
        batch, part = self.get("data.train_batch_size"), self.get("actor.ppo_mini_batch_size")
        if batch % part and batch > part:
            raise Unconvertible(f"{part} prompts do not divide the {batch} of a step")
        return int(max(1, batch // part))


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
    raise Unconvertible(f"see {' and '.join(case.our_names)}")


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
    """Recompute whole layers with FSDP; verl's Megatron trainer reads fields of Megatron."""
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
        steps *= case.count_mini_batches()
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
    return {case.our_names[0]: True, "actor.optimizer.distributed": True} if case.value else {}


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
