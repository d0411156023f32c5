"""Settings of verl (its Megatron trainer) and of TRL's GRPOConfig, and ours in their places."""

from __future__ import annotations

from collections.abc import Collection

_VERL_GROUP = "actor_rollout_ref"  # the group that most of verl's settings are in
# As in docs/from_verl_and_trl.md, which says what differs: verl's, without that group; TRL's; ours.
TABLE = """
model.path |  | model.path
actor.megatron.dtype | bf16 | model.dtype
data.train_files |  | data.train_file, data.train_files
data.val_files |  | data.test_file, data.test_files
data.prompt_key |  | data.prompt_column
data.max_prompt_length |  | data.max_prompt_tokens
data.filter_overlong_prompts |  | data.long_prompts
data.seed | seed | seed
data.train_batch_size | generation_batch_size | trainer.prompts_per_step
data.gen_batch_size |  | algorithm.filter.prompts_per_round
data.custom_cls.path |  | data.train_file
data.max_response_length | max_completion_length | rollout.max_response_tokens
rollout.temperature | temperature | rollout.temperature
rollout.top_p | top_p | rollout.top_p
rollout.top_k | top_k | rollout.top_k
rollout.tensor_model_parallel_size | vllm_tensor_parallel_size | rollout.tp
rollout.data_parallel_size |  | rollout.dp
rollout.expert_parallel_size |  | rollout.ep
rollout.quantization |  | rollout.quantization
rollout.max_num_seqs |  | rollout.max_num_seqs
rollout.max_num_batched_tokens |  | rollout.max_num_batched_tokens
rollout.load_format |  | rollout.load_format
rollout.gpu_memory_utilization | vllm_gpu_memory_utilization | rollout.kv_cache_bytes
rollout.free_cache_engine | vllm_enable_sleep_mode | placement.rollout
trainer.v1.trainer_mode | vllm_mode | placement.rollout
rollout.val_kwargs.temperature |  | evaluation.temperature
rollout.val_kwargs.top_p |  | evaluation.top_p
rollout.val_kwargs.top_k |  | evaluation.top_k
rollout.agent.default_agent_loop |  | agent.loop
rollout.multi_turn.max_assistant_turns | max_tool_calling_iterations | agent.max_turns
data.tool_config_path |  | agent.tools
rollout.enable_rollout_routing_replay |  | actor.moe.router_replay
actor.strategy |  | actor.backend
actor.megatron.tensor_model_parallel_size |  | actor.layout.tp
actor.megatron.pipeline_model_parallel_size |  | actor.layout.pp
actor.megatron.virtual_pipeline_model_parallel_size |  | actor.layout.vpp
actor.megatron.context_parallel_size |  | actor.layout.cp
actor.megatron.expert_model_parallel_size |  | actor.layout.ep
actor.megatron.expert_tensor_parallel_size |  | actor.layout.etp
trainer.n_gpus_per_node |  | actor.layout.dp
actor.megatron.use_distributed_optimizer |  | actor.optimizer.distributed
actor.megatron.override_transformer_config.recompute_granularity | gradient_checkpointing | \
actor.recompute.granularity
actor.megatron.override_transformer_config.recompute_num_layers |  | actor.recompute.num_layers
actor.megatron.override_transformer_config |  | actor.megatron
actor.megatron.override_ddp_config |  | actor.megatron
rollout.engine_kwargs.vllm |  | rollout.engine
actor.ppo_max_token_len_per_gpu | per_device_train_batch_size | actor.max_tokens_per_micro_batch
actor.entropy_from_logits_chunk_size |  | actor.logprob_chunk_bytes
actor.optim.lr | learning_rate | actor.optimizer.lr
actor.optim.min_lr |  | actor.optimizer.min_lr
actor.optim.lr_warmup_steps | warmup_steps | actor.optimizer.warmup_steps
actor.optim.lr_decay_style | lr_scheduler_type | actor.optimizer.schedule
actor.optim.lr_wsd_decay_steps |  | actor.optimizer.wsd_decay_steps
actor.optim.weight_decay | weight_decay | actor.optimizer.weight_decay
actor.optim.clip_grad | max_grad_norm | actor.optimizer.clip_grad
 | adam_beta1 | actor.optimizer.beta1
 | adam_beta2 | actor.optimizer.beta2
 | adam_epsilon | actor.optimizer.eps
actor.optim.override_optimizer_config |  | actor.optimizer.cpu_offload
model.lora.rank |  | actor.lora.rank
model.lora.alpha |  | actor.lora.alpha
model.target_modules |  | actor.lora.targets
model.mtp.mtp_loss_scaling_factor |  | actor.mtp_loss_coef
 | router_aux_loss_coef | actor.moe.aux_loss_coef
critic.optim.lr |  | critic.optimizer.lr
critic.cliprange_value |  | critic.clip_range
trainer.critic_warmup |  | critic.warmup_steps
algorithm.adv_estimator |  | algorithm.advantage
algorithm.gamma, algorithm.lam |  | algorithm.advantage_settings
algorithm.norm_adv_by_std_in_grpo | scale_rewards | algorithm.advantage_settings.normalize_by_std
rollout.n | num_generations | algorithm.group_size
actor.ppo_mini_batch_size | steps_per_generation | algorithm.num_mini_batches
actor.policy_loss.loss_mode | loss_type, importance_sampling_level | algorithm.loss
actor.clip_ratio_low | epsilon | algorithm.loss_settings.clip_ratio_low
actor.clip_ratio_high | epsilon_high | algorithm.loss_settings.clip_ratio_high
actor.clip_ratio_c | delta | algorithm.loss_settings.dual_clip
actor.loss_agg_mode | loss_type | algorithm.loss_aggregation
actor.loss_scale_factor |  | algorithm.loss_aggregation_settings
actor.entropy_coeff | entropy_coef | algorithm.entropy_coef
 | entropy_target | algorithm.entropy_target
 | entropy_coef_delta | algorithm.entropy_coef_step
 | entropy_coef_max | algorithm.entropy_coef_max
 | top_entropy_quantile | algorithm.top_entropy_share
actor.kl_loss_coef | beta | algorithm.kl_coef
actor.use_kl_loss, algorithm.use_kl_in_reward |  | algorithm.kl_placement
actor.kl_loss_type, algorithm.kl_penalty |  | algorithm.kl_estimator
algorithm.kl_ctrl.target_kl |  | algorithm.kl_target
algorithm.kl_ctrl.horizon |  | algorithm.kl_horizon
algorithm.filter_groups.enable, algorithm.filter_groups.metric |  | algorithm.filter.group_filter
algorithm.filter_groups.max_num_gen_batches |  | algorithm.filter.max_rounds
 | mask_truncated_completions | algorithm.filter.mask_truncated
algorithm.rollout_correction.rollout_is | vllm_importance_sampling_mode | \
algorithm.correction.level, algorithm.correction.method
algorithm.rollout_correction.rollout_is_threshold | vllm_importance_sampling_clip_max | \
algorithm.correction.weight_max
 | vllm_importance_sampling_clip_min | algorithm.correction.weight_min
algorithm.rollout_correction.rollout_is_batch_normalize |  | algorithm.correction.normalize
algorithm.rollout_correction.rollout_rs, \
algorithm.rollout_correction.rollout_rs_threshold | off_policy_mask_threshold | \
algorithm.correction.reject
algorithm.rollout_correction.bypass_mode |  | algorithm.correction.use_rollout_log_probs
 | use_bias_correction_kl | algorithm.correction.unbiased_kl
actor.calculate_sum_pi_squared |  | algorithm.advantage
distillation.distillation_loss.loss_mode |  | algorithm.distillation.loss
distillation.distillation_loss.topk |  | algorithm.distillation.top_k
distillation.distillation_loss.distillation_loss_coef |  | algorithm.distillation.coef
distillation.distillation_loss.use_task_rewards |  | algorithm.distillation.use_reward
reward.custom_reward_function.path, reward.custom_reward_function.name |  | reward.name
 | reward_weights | reward.terms
reward.num_workers |  | reward.num_processes
reward.reward_model.model_path |  | reward_model.model_path
trainer.total_training_steps | max_steps | trainer.num_steps
trainer.default_local_dir | output_dir | output_dir
trainer.logger | report_to | trainer.trackers
trainer.project_name | project | trainer.tracker_project
trainer.test_freq | eval_steps | evaluation.every
trainer.val_before_train | eval_on_start | evaluation.before
data.val_max_samples |  | trainer.eval_samples
trainer.save_freq | save_steps | trainer.save_every
trainer.max_actor_ckpt_to_keep | save_total_limit | checkpoint.keep
 | metric_for_best_model | checkpoint.keep_best
trainer.resume_mode, trainer.resume_from_path | resume_from_checkpoint | resume
trainer.log_val_generations | num_completions_to_print | sample_log.num_shown
trainer.rollout_data_dir | log_completions | sample_log.every
"""
ROWS = [
    tuple([name for name in cell.strip().split(", ") if name] for cell in line.split("|"))
    for line in TABLE.strip().splitlines()
]


def find_our_settings(key: str, known: Collection[str]) -> tuple[str, list[str]]:
    """Return the framework that has a setting, or "", and our settings for it among `known`.

    verl's names may come without their first parts. Jobs that train a single model have the actor's
    engine settings in the group `engine`.

    >>> find_our_settings("rollout.n", ["algorithm.group_size"])
    ('verl', ['algorithm.group_size'])
    >>> find_our_settings("learning_rate", ["engine.optimizer.lr"])
    ('TRL', ['engine.optimizer.lr'])
    """
    name = key.removeprefix(f"{_VERL_GROUP}.")
    for verl_names, trl_names, our_names in ROWS:
        is_verls = any(n == name or ("." in name and n.endswith(f".{name}")) for n in verl_names)
        if is_verls or key in trl_names:
            actor_names = [our for our in our_names if our.startswith("actor.")]
            engine_names = [f"engine.{our.removeprefix('actor.')}" for our in actor_names]
            settings = [
                our
                for our in (*our_names, *engine_names)
                if our in known or our.rpartition(".")[0] in known
            ]
            return ("verl" if is_verls else "TRL"), settings
    return ("verl" if key.partition(".")[0] == _VERL_GROUP else ""), []
