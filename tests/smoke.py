"""The tests of ranks, servers and jobs that the short lane has beside all unit tests.

One job of each trainer, on both engines; Megatron, FSDP2 and the engine in plain torch against
transformers, on at most two ranks; one vLLM server.
"""

from __future__ import annotations

# By file: tests with all of their cases that are not nightly, or single cases.
SMOKE: dict[str, tuple[str, ...]] = {
    "tests/dist_cpu/test_checkpoint_layouts.py": (
        "test_the_state_is_the_same_in_another_layout_and_so_are_the_steps_after_it[True-dp2-cp2]",
    ),
    "tests/dist_cpu/test_families.py": (
        "test_logits_equal_transformers[deepseek_v3-one rank]",
        "test_logits_equal_transformers[gpt_oss-parallel]",
        "test_three_steps_equal_plain_torch_on_transformers[qwen3_next-parallel]",
    ),
    "tests/dist_cpu/test_fsdp_engine.py": (
        "test_scores_and_three_steps_equal_plain_torch[deepseek_v3-ep2]",
        "test_scores_and_three_steps_equal_plain_torch[gemma2-cp2]",
    ),
    "tests/dist_cpu/test_hf_engine.py": (
        "test_scores_and_two_steps_equal_plain_torch[qwen3_moe-2]",
        "test_scores_and_two_steps_equal_the_megatron_engine[qwen3_moe-2]",
    ),
    "tests/dist_cpu/test_moe.py": (
        "test_loads_are_those_of_one_rank_and_of_transformers[deepseek/dp2 ep2]",
        "test_two_steps_equal_one_rank[moe/pp2 vpp2]",
    ),
    "tests/dist_cpu/test_parity.py": (
        "test_logits_log_probs_and_entropy_equal_transformers[qwen3-tp2]",
        "test_logits_log_probs_and_entropy_equal_transformers[qwen3_moe-ep2]",
        "test_export_gives_back_each_tensor_bit_for_bit[qwen3_moe-ep2]",
        "test_two_training_steps_equal_one_rank[qwen3_moe-ep2]",
        "test_the_loss_equals_a_plain_torch_step_on_transformers",
        "test_two_steps_after_a_resume_equal_those_without_a_stop",
    ),
    "tests/e2e/test_day_zero.py": (  # synchronous, on FSDP2, with shards for servers
        "test_a_model_without_rules_is_trained_and_served_shard_to_shard",
    ),
    "tests/e2e/test_fully_async.py": (
        "test_tokens_of_several_versions_are_trained_on_and_none_is_too_old",
    ),
    "tests/e2e/test_one_step_off.py": ("test_no_token_is_more_than_one_version_old",),
    "tests/e2e/test_rollout_server.py": (
        "test_log_probs_equal_the_reference_at_start",
        "test_log_probs_equal_the_reference_after_each_of_several_updates",
        "test_a_response_ends_with_the_end_token_or_at_the_length",
        "test_cached_prompts_are_forgotten_at_an_update",
        "test_a_loop_gives_samples_of_every_prompt_in_order",
    ),
    "tests/e2e/test_rollout_shards.py": (
        "test_a_server_generates_token_for_token_as_after_a_full_export",
    ),
    "tests/e2e/test_train_jobs.py": ("test_sft_learns_both_turns_in_an_epoch_and_says_so",),
}  # fmt: skip
