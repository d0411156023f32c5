"""The table of docs/from_verl_and_trl.md has our settings, and all of the frameworks that are here.

That the page has the table is tested with the other written pages (test_docs.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from mcore_rl.cli.other_names import ROWS
from mcore_rl.config.describe import list_setting_groups
from mcore_rl.config.schema import RLConfig
from tests.pages import ROOT

# Fields of TRL's GRPOConfig beside those that it inherits; TRL is not installed.
GRPO_FIELDS = [
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout",
    "cast_lm_head_to_fp32", "num_generations", "num_generations_eval",
    "max_completion_length", "ds3_gather_for_generation", "shuffle_dataset",
    "pad_to_multiple_of", "generation_batch_size", "steps_per_generation", "temperature",
    "top_p", "top_k", "min_p", "generation_kwargs", "chat_template_kwargs",
    "repetition_penalty", "cache_implementation", "use_vllm", "vllm_mode", "vllm_model_impl",
    "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_base_url",
    "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
    "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
    "beta", "num_iterations", "epsilon", "delta", "epsilon_high", "sapo_temperature_neg",
    "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "importance_sampling_level", "reward_weights",
    "multi_objective_aggregation", "scale_rewards", "loss_type", "mask_truncated_completions",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "top_entropy_quantile",
    "entropy_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
    "entropy_coef_delta", "entropy_target", "max_tool_calling_iterations",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
    "off_policy_mask_threshold", "use_bias_correction_kl", "log_completions",
    "log_multimodal", "num_completions_to_print", "log_unique_prompts",
    "log_completions_hub_repo", "use_transformers_continuous_batching",
    "transformers_continuous_batching_config", "use_transformers_paged",
    "vllm_importance_sampling_cap",
]  # fmt: skip
# Settings of scripts that verl takes with a "+", or took before 0.9.
_ADDED = (
    "override_transformer_config.", "override_optimizer_config.", "override_config",
    "reward_kwargs.", "reward_model.use_reward_loop", "engine_kwargs.vllm.",
    "actor.megatron.grad_offload", "critic.model.fsdp_config",
)  # fmt: skip


def leaves(tree: Any, key: str = "") -> set[str]:
    """Dotted names of all groups and settings."""
    keys = {key}
    for name, inside in tree.items() if isinstance(tree, dict) else ():
        keys |= leaves(inside, f"{key}.{name}" if key else name)
    return keys


def test_each_setting_of_ours_exists_and_each_of_theirs_has_one_line():
    known = {setting.key for group in list_setting_groups(RLConfig()) for setting in group.settings}
    assert {name for row in ROWS for name in row.our_names} <= known
    for framework in ("verl", "trl"):
        names = [name for row in ROWS for name in row.get_names(framework)]
        assert len(names) > 140 and len(names) == len(set(names))


def test_each_setting_of_verl_exists():
    if (spec := find_spec("verl")) is None:
        pytest.skip("verl is not installed")
    folder, known = Path(spec.origin or "").parent / "trainer" / "config", set()
    for name in ("_generated_ppo_megatron_trainer.yaml", "_generated_ppo_trainer.yaml"):
        known |= leaves(yaml.safe_load((folder / name).read_text()))
    known = {name.removeprefix("actor_rollout_ref.") for name in known}
    names = {name for row in ROWS for name in row.verl if not any(a in name for a in _ADDED)}
    assert names <= known, names - known


def test_each_field_of_grpo_config_has_a_line():
    fields = {*GRPO_FIELDS, *TrainingArguments.__dataclass_fields__}
    names = {name for row in ROWS for name in row.trl}
    assert (fields - names, names - fields) == (set(), set())


def test_the_page_says_none_with_a_reason():
    page = (ROOT / "docs" / "from_verl_and_trl.md").read_text()
    assert "| none | code of a checkpoint never runs |" in page
    assert "| none | |" not in page and "| none |  |" not in page
