"""Values of the algorithm, of rewards and of the run of verl and TRL as ours."""

from __future__ import annotations

from mcore_rl.cli.value_converters import (
    Case,
    Settings,
    Unconvertible,
    convert_model_path,
    convert_size,
    register_converter,
)

_ADVANTAGES = (
    "gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "optimal_token_baseline",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo",
)  # fmt: skip
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
_TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")


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


@register_converter
def convert_mini_batches(case: Case) -> Settings:
    return case.set(case.count_mini_batches())


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
    side_name = {"neg": "negative", "pos": "positive"}[side]
    is_used = case.loss == "vespo"
    return {f"algorithm.loss_settings.{name}_{side_name}": case.value} if is_used else {}


@register_converter
def convert_aggregation(case: Case) -> Settings:
    return case.choose(_AGGREGATIONS)


@register_converter
def convert_scale_factor(case: Case) -> Settings:
    if case.value is None or case.get("actor.loss_agg_mode") != "seq-mean-token-sum-norm":
        return {}
    return {f"{case.our_names[0]}.length": case.value}


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
    return {case.our_names[0]: level, case.our_names[1]: method}


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
        return {f"{case.our_names[0]}.negative_sequence_k1": case.value}
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
    return case.set(-(-case.value // case.count_mini_batches()))


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
    return case.set(max(1, int(case.value) // case.count_mini_batches()))


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
