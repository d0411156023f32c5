"""Settings of verl (its Megatron trainer) and of TRL's GRPOConfig, and ours in their places.

The one table of docs/from_verl_and_trl.md, of errors that name a setting of theirs, and of
`mcore-rl convert-config`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

VERL_GROUP = "actor_rollout_ref"  # the group that most of verl's settings are in
_INSIDE = ("actor.", "rollout.", "model.", "ref.", "nccl_timeout")  # names that stand in it
# A line has verl's settings, without that group; TRL's; ours, or none; the function of
# value_converters.py, by default `same`; and what differs, or why there is none.
TABLE = """
# Model and data
model.path |  | model.path | model_path | TRL: the argument `model` of the trainer
actor.megatron.dtype, actor.fsdp_config.dtype | bf16 | model.dtype | dtype |
| fp16, bf16_full_eval, fp16_full_eval, tf32 |  |  | float32 or bfloat16, in training and \
evaluation
model.trust_remote_code, data.trust_remote_code | trust_remote_code |  |  | code of a \
checkpoint never runs
model.override_config | model_init_kwargs |  |  | `config.json` of the checkpoint decides
model.use_remove_padding | pad_to_multiple_of |  |  | sequences are always packed
| disable_dropout |  |  | dropout is always off
| cast_lm_head_to_fp32, use_cache |  |  | log-probs are always float32
| neftune_noise_alpha, label_smoothing_factor |  |  | not of this training
data.train_files |  | data.train_file, data.train_files | train_files | TRL: the argument \
`train_dataset`
data.val_files |  | data.test_file, data.test_files | test_files | TRL: `eval_dataset`
data.prompt_key |  | data.prompt_column |  | found without it; a text is a message of the user
data.image_key |  | data.images_column | images | without effect on text models in verl
data.max_prompt_length |  | data.max_prompt_tokens |  |
data.filter_overlong_prompts |  | data.long_prompts | long_prompts |
data.truncation |  |  | truncation | prompts are never cut: `data.long_prompts` refuses or \
drops them
data.return_raw_chat, data.reward_fn_key |  |  |  | rows keep their chats; `data.answer_column` \
has the answer
data.shuffle, data.dataloader_num_workers | shuffle_dataset, dataloader_drop_last, \
dataloader_num_workers, dataloader_pin_memory, dataloader_persistent_workers, \
dataloader_prefetch_factor, dataloader_multiprocessing_context, dataloader_in_order, \
train_sampling_strategy, length_column_name, ignore_data_skip, accelerator_config |  |  | \
prompts are always drawn at random, each once an epoch, without workers
| remove_unused_columns, label_names |  |  | rewards get every column
data.seed | seed | seed | size |
| data_seed, full_determinism |  |  | `seed` decides all
data.train_batch_size | generation_batch_size | trainer.prompts_per_step | prompts | in prompts \
here and in verl, in responses in TRL
data.gen_batch_size |  | algorithm.filter.prompts_per_round |  |
data.custom_cls.path |  | data.train_file | look | a source of your own by its import path
| chat_template_kwargs |  |  | the checkpoint's chat template, with `model.chat_date`
# Generation
data.max_response_length | max_completion_length | rollout.max_response_tokens |  |
rollout.temperature | temperature | rollout.temperature |  |
rollout.top_p | top_p | rollout.top_p |  |
rollout.top_k | top_k | rollout.top_k | top_k | no limit is -1 in verl, 0 here
| min_p, repetition_penalty, generation_kwargs |  |  | the trainer's log-probs know \
temperature, top_p and top_k alone
| cache_implementation, use_transformers_continuous_batching, \
transformers_continuous_batching_config, use_transformers_paged, ds3_gather_for_generation |  | \
 | servers generate, not transformers
rollout.name | use_vllm | rollout.backend | backend | always a server here
rollout.mode, rollout.calculate_log_probs |  |  |  | servers are always asynchronous and return \
log-probs
| vllm_model_impl |  |  | weights are sent to vLLM's own modules
| vllm_structured_outputs_regex |  |  | responses are free text
| vllm_server_base_url, vllm_server_host, vllm_server_port, vllm_server_timeout, \
vllm_group_port |  |  | a run starts its servers
| vllm_max_model_length |  |  | prompt and response limits decide
rollout.tensor_model_parallel_size | vllm_tensor_parallel_size | rollout.tp |  |
rollout.data_parallel_size |  | rollout.dp |  |
rollout.expert_parallel_size |  | rollout.ep | expert_parallel | true or false here
rollout.quantization |  | rollout.quantization | quantization | `fp8_block` here
rollout.max_num_seqs |  | rollout.max_num_seqs |  |
rollout.max_num_batched_tokens |  | rollout.max_num_batched_tokens |  |
rollout.enable_chunked_prefill |  | rollout.engine | engine_flag | `enable_chunked_prefill`; \
true is vLLM's default
rollout.enforce_eager |  | rollout.engine | engine_flag | `enforce_eager`; false captures CUDA \
graphs
rollout.load_format |  | rollout.load_format | load_format | `safetensors` is `checkpoint` here
rollout.gpu_memory_utilization | vllm_gpu_memory_utilization | rollout.kv_cache_bytes | dropped \
| bytes of the cache in place of a share of the GPU; not converted
rollout.free_cache_engine | vllm_enable_sleep_mode | placement.rollout | shared | servers on \
shared devices sleep
trainer.v1.trainer_mode | vllm_mode | placement.rollout | trainer_mode | shared or separate \
devices
rollout.val_kwargs.temperature |  | evaluation.temperature |  |
rollout.val_kwargs.do_sample |  | evaluation.temperature | do_sample | false is temperature 0
rollout.val_kwargs.top_p |  | evaluation.top_p |  |
rollout.val_kwargs.top_k |  | evaluation.top_k | top_k |
rollout.val_kwargs.n | num_generations_eval | evaluation.num_samples |  |
rollout.agent.default_agent_loop |  | agent.loop | look |
rollout.multi_turn.max_assistant_turns | max_tool_calling_iterations | agent.max_turns |  |
rollout.multi_turn.format |  | agent.codec | dropped | the chat template decides
data.tool_config_path |  | agent.tools | look | TRL: the argument `tools`
rollout.enable_rollout_routing_replay |  | actor.moe.router_replay | router_replay |
rollout.engine_kwargs.vllm |  | rollout.engine | engine | some fields are \
[refused](passthrough.md#refused-fields-of-vllm)
rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache |  |  |  | servers cache images as \
vLLM does by default
# Training engine
actor.strategy |  | actor.backend | strategy | `fsdp2` is `fsdp` here
actor.megatron.tensor_model_parallel_size |  | actor.layout.tp |  |
actor.megatron.pipeline_model_parallel_size |  | actor.layout.pp |  |
actor.megatron.virtual_pipeline_model_parallel_size |  | actor.layout.vpp | size |
actor.megatron.context_parallel_size, actor.ulysses_sequence_parallel_size | parallelism_config \
| actor.layout.cp | size | FSDP2 has [no cp with images](images.md)
actor.megatron.expert_model_parallel_size |  | actor.layout.ep |  |
actor.megatron.expert_tensor_parallel_size |  | actor.layout.etp | etp | null is tp in verl
trainer.n_gpus_per_node, trainer.nnodes |  | actor.layout.dp, rollout.num_servers | gpus | \
given here; follow from the GPUs in verl
actor.fsdp_config.fsdp_size | fsdp, fsdp_config, deepspeed | actor.fsdp.num_replicas | replicas \
| ranks over ranks of a replica
actor.fsdp_config.param_offload, actor.fsdp_config.optimizer_offload |  | \
actor.fsdp.cpu_offload | dropped | models on shared devices are moved to the host between their \
turns
actor.megatron.param_offload, actor.megatron.grad_offload, actor.megatron.optimizer_offload |  \
|  |  | models on shared devices are always moved to the host between their turns
actor.megatron.use_distributed_optimizer |  | actor.optimizer.distributed | distributed |
actor.megatron.use_mbridge, actor.megatron.use_dist_checkpointing |  |  |  | Hugging Face's \
files are read and written as they are
actor.checkpoint.save_contents | save_only_model, enable_jit_checkpoint, save_on_each_node |  | \
 | a checkpoint has all that a resume needs; `checkpoint.hf_every` exports
ref.megatron, ref.fsdp_config, ref.strategy, ref.ulysses_sequence_parallel_size |  |  |  | the \
reference has the actor's engine and layout
ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_max_token_len_per_gpu, \
ref.log_prob_use_dynamic_bsz |  |  |  | micro-batches of log-probs are the actor's
rollout.log_prob_micro_batch_size_per_gpu, rollout.log_prob_max_token_len_per_gpu, \
rollout.log_prob_use_dynamic_bsz |  |  |  | micro-batches of log-probs are the actor's
nccl_timeout | ddp_timeout | timeouts.call_s | dropped | seconds of a call of all ranks; not \
converted
| ddp_find_unused_parameters, ddp_bucket_cap_mb, ddp_broadcast_buffers, ddp_static_graph, \
ddp_backend, local_rank, use_cpu, average_tokens_across_devices |  |  | the engine decides
model.enable_gradient_checkpointing | gradient_checkpointing | actor.recompute.granularity | \
checkpointing | true is `full`
| gradient_checkpointing_kwargs, torch_empty_cache_steps, auto_find_batch_size, \
skip_memory_metrics, debug |  |  | [planned](planning.md) instead
actor.megatron.override_transformer_config.recompute_granularity |  | \
actor.recompute.granularity | granularity |
actor.megatron.override_transformer_config.recompute_num_layers |  | actor.recompute.num_layers \
| size |
actor.megatron.override_transformer_config.recompute_modules |  | actor.recompute.modules |  |
actor.megatron.override_transformer_config.recompute_method |  |  |  | units of \
`actor.recompute.num_layers` layers, as `uniform`
actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage |  | \
actor.layout.first_stage_layers |  |
actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage |  | \
actor.layout.last_stage_layers |  |
actor.megatron.override_transformer_config.account_for_embedding_in_pipeline_split, \
actor.megatron.override_transformer_config.account_for_loss_in_pipeline_split |  |  |  | \
`first_stage_layers` and `last_stage_layers` decide
actor.megatron.override_transformer_config.moe_token_dispatcher_type |  | actor.moe.dispatcher \
| dispatcher | `flex` needs DeepEP
actor.megatron.override_transformer_config.moe_enable_deepep |  | actor.moe.dispatcher | deepep |
actor.megatron.override_transformer_config.moe_router_dtype |  |  |  | always float32
actor.megatron.override_transformer_config.moe_grouped_gemm, \
actor.megatron.override_transformer_config.apply_rope_fusion, \
actor.megatron.override_transformer_config.gradient_accumulation_fusion |  |  |  | the engine \
decides
actor.megatron.override_transformer_config |  | actor.megatron | megatron | \
[checked](passthrough.md) against Megatron's classes; some fields are refused
actor.megatron.override_ddp_config |  | actor.megatron | megatron |
actor.ppo_max_token_len_per_gpu |  | actor.max_tokens_per_micro_batch | max_tokens | always by \
tokens here
actor.use_dynamic_bsz, actor.ppo_micro_batch_size_per_gpu | per_device_train_batch_size | \
actor.max_tokens_per_micro_batch | micro_batch | samples times the longest; by tokens with \
`use_dynamic_bsz`
| gradient_accumulation_steps | algorithm.num_mini_batches | in_mini_batches |
actor.entropy_from_logits_chunk_size |  | actor.logprob_chunk_bytes | dropped | bytes; the \
default suits
model.use_fused_kernels, model.use_liger, actor.use_torch_compile | use_liger_kernel, \
liger_kernel_config, torch_compile, torch_compile_backend, torch_compile_mode |  |  | \
`actor.modules` chooses; log-probs are always computed in tiles
actor.optim.lr | learning_rate | actor.optimizer.lr |  |
actor.optim.min_lr |  | actor.optimizer.min_lr |  |
actor.optim.lr_warmup_steps | warmup_steps | actor.optimizer.warmup_steps | warmup | optimizer \
steps
actor.optim.lr_warmup_steps_ratio |  | actor.optimizer.warmup_steps | warmup_ratio | a share of \
all steps in verl
actor.optim.lr_decay_style | lr_scheduler_type | actor.optimizer.schedule | schedule |
| lr_scheduler_kwargs | actor.optimizer.min_lr | look |
actor.optim.lr_wsd_decay_steps |  | actor.optimizer.wsd_decay_steps | size |
actor.optim.weight_decay | weight_decay | actor.optimizer.weight_decay |  |
actor.optim.clip_grad, actor.grad_clip | max_grad_norm | actor.optimizer.clip_grad |  |
actor.optim.betas | adam_beta1 | actor.optimizer.beta1 | betas |
| adam_beta2 | actor.optimizer.beta2 |  |
| adam_epsilon | actor.optimizer.eps |  |
actor.optim.optimizer | optim | actor.optimizer.name | optimizer |
| optim_args, optim_target_modules |  |  | `actor.megatron` has other fields of the optimizer
actor.optim.override_optimizer_config.optimizer_cpu_offload |  | actor.optimizer.cpu_offload | \
cpu_offload | Adam on the host
actor.optim.override_optimizer_config.optimizer_offload_fraction |  |  |  | all of Adam or nothing
actor.optim.override_optimizer_config |  | actor.megatron | megatron | other fields, such as \
`use_precision_aware_optimizer`
model.lora.rank, model.lora_rank |  | actor.lora.rank |  | TRL: the argument `peft_config`
model.lora.alpha, model.lora_alpha |  | actor.lora.alpha |  |
model.target_modules |  | actor.lora.targets | lora_targets | Megatron's names
model.mtp.mtp_loss_scaling_factor |  | actor.mtp_loss_coef | mtp |
| router_aux_loss_coef | actor.moe.aux_loss_coef | router_aux | of models with experts
critic.optim.lr |  | critic.optimizer.lr | critic |
critic.optim.weight_decay |  | critic.optimizer.weight_decay | critic |
critic.optim.betas |  | critic.optimizer.beta1 | critic_betas |
critic.optim.lr_warmup_steps_ratio |  | critic.optimizer.warmup_steps | dropped |
critic.model.path |  | critic.model_path | critic_path | empty: the actor's first weights
critic.model.enable_gradient_checkpointing |  | critic.recompute.granularity | \
critic_checkpointing |
critic.ppo_max_token_len_per_gpu |  | critic.max_tokens_per_micro_batch | critic |
critic.ppo_micro_batch_size_per_gpu |  | critic.max_tokens_per_micro_batch | critic_micro_batch \
| samples times the longest
critic.model.use_remove_padding, critic.model.fsdp_config |  |  |  | as of the actor
critic.cliprange_value |  | critic.clip_range | critic |
trainer.critic_warmup |  | critic.warmup_steps | critic |
# Algorithm
algorithm.adv_estimator |  | algorithm.advantage | advantage | TRL: the class of the trainer
algorithm.gamma, algorithm.lam |  | algorithm.advantage_settings | gae | `gamma`, `lam`
algorithm.norm_adv_by_std_in_grpo | scale_rewards | \
algorithm.advantage_settings.normalize_by_std | by_std | TRL's `batch` is `lite_ppo`
| multi_objective_aggregation | algorithm.advantage | objectives | `normalize_then_sum` is `gdpo`
rollout.n | num_generations | algorithm.group_size |  |
actor.ppo_mini_batch_size | steps_per_generation | algorithm.num_mini_batches | mini_batches | \
the number of mini-batches, not their size
actor.ppo_epochs | num_iterations | algorithm.filter.replay.share | epochs | samples are \
trained on once a step; `replay` in later ones
actor.policy_loss.loss_mode | loss_type, importance_sampling_level | algorithm.loss | loss |
actor.clip_ratio_low | epsilon | algorithm.loss_settings.clip_ratio_low | clip_low |
actor.clip_ratio_high | epsilon_high | algorithm.loss_settings.clip_ratio_high | clip_high |
actor.clip_ratio |  |  |  | without effect in verl beside `clip_ratio_low` and `clip_ratio_high`
actor.clip_ratio_c | delta | algorithm.loss_settings.dual_clip | dual_clip | verl's is for \
negative advantages as ours; TRL's bounds the ratio of all
| sapo_temperature_neg, sapo_temperature_pos | algorithm.loss_settings | sapo | \
`temperature_negative`, `temperature_positive`
| vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg | algorithm.loss_settings | \
vespo | `k_positive`, `lambda_positive`, ...
actor.loss_agg_mode |  | algorithm.loss_aggregation | aggregation | TRL: by `loss_type`
actor.loss_scale_factor |  | algorithm.loss_aggregation_settings | scale_factor | `length`
actor.entropy_coeff | entropy_coef | algorithm.entropy_coef |  |
| entropy_target, use_adaptive_entropy | algorithm.entropy_target | entropy_target |
| entropy_coef_delta | algorithm.entropy_coef_step |  |
| entropy_coef_max | algorithm.entropy_coef_max |  |
| entropy_coef_min |  |  | the weight adapts down to 0
| top_entropy_quantile | algorithm.top_entropy_share |  |
actor.kl_loss_coef | beta | algorithm.kl_coef | kl_coef |
algorithm.kl_ctrl.kl_coef |  | algorithm.kl_coef | kl_reward_coef | with `use_kl_in_reward`
actor.use_kl_loss, algorithm.use_kl_in_reward |  | algorithm.kl_placement | kl_placement | \
`loss` or `reward`
actor.kl_loss_type, algorithm.kl_penalty |  | algorithm.kl_estimator | kl_estimator |
algorithm.kl_ctrl.target_kl |  | algorithm.kl_target | kl_target |
algorithm.kl_ctrl.horizon |  | algorithm.kl_horizon |  |
| sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps |  |  | the reference is the \
first model
algorithm.filter_groups.enable, algorithm.filter_groups.metric |  | \
algorithm.filter.group_filter | group_filter | `drop_uniform`
algorithm.filter_groups.max_num_gen_batches |  | algorithm.filter.max_rounds | rounds | verl \
ends the run when a step stays short, ours by `if_short`
| mask_truncated_completions | algorithm.filter.mask_truncated |  |
algorithm.rollout_correction.rollout_is | vllm_importance_sampling_mode, \
vllm_importance_sampling_correction | algorithm.correction.level, algorithm.correction.method | \
correction |
algorithm.rollout_correction.rollout_is_threshold | vllm_importance_sampling_clip_max, \
vllm_importance_sampling_cap | algorithm.correction.weight_max | weight_max |
| vllm_importance_sampling_clip_min | algorithm.correction.weight_min |  |
algorithm.rollout_correction.rollout_is_batch_normalize |  | algorithm.correction.normalize |  |
algorithm.rollout_correction.rollout_rs, algorithm.rollout_correction.rollout_rs_threshold | \
off_policy_mask_threshold | algorithm.correction.reject | reject |
algorithm.rollout_correction.bypass_mode |  | algorithm.correction.use_rollout_log_probs |  |
algorithm.rollout_correction.loss_type |  | algorithm.loss | correction_loss | with `bypass_mode`
| use_bias_correction_kl | algorithm.correction.unbiased_kl |  |
actor.calculate_sum_pi_squared |  | algorithm.advantage | dropped | computed where the \
advantage needs it
distillation.distillation_loss.loss_mode |  | algorithm.distillation.loss | look |
distillation.distillation_loss.topk |  | algorithm.distillation.top_k |  |
distillation.distillation_loss.distillation_loss_coef |  | algorithm.distillation.coef |  |
distillation.distillation_loss.use_task_rewards |  | algorithm.distillation.use_reward |  |
# Reward
reward.custom_reward_function.path, reward.custom_reward_function.name |  | reward.name | \
custom_reward | an import path; TRL: the argument `reward_funcs`
custom_reward_function.path, custom_reward_function.name |  | reward.name | custom_reward | \
verl's older names of the same
reward_model.reward_manager, reward.reward_manager.name |  | reward.name | reward_manager | \
verl chooses a function by `data_source`
reward_model.reward_kwargs.overlong_buffer_cfg.enable, \
reward_model.reward_kwargs.overlong_buffer_cfg.len, \
reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor |  | reward.terms | overlong | \
`overlong` with `buffer_tokens`; the factor is its weight
reward_model.reward_kwargs.overlong_buffer_cfg.log |  |  |  | terms are always metrics
reward_model.reward_kwargs.max_resp_len |  |  |  | `rollout.max_response_tokens` decides
| reward_weights | reward.terms | look |
reward.num_workers, reward_model.num_workers |  | reward.num_processes | dropped | of each \
server here
reward.reward_model.model_path, reward_model.model.path, reward_model.enable |  | \
reward_model.model_path | reward_model | a checkpoint of `mcore-rl rm`
reward_model.rollout, reward_model.use_reward_loop |  |  |  | the training engine scores, with \
`reward_model.layout`
# Run
trainer.total_training_steps | max_steps | trainer.num_steps | num_steps | steps of generation \
here and in verl, of the optimizer in TRL
trainer.total_epochs | num_train_epochs | trainer.num_steps | epochs_of_data | epochs * prompts \
/ `prompts_per_step`
trainer.default_local_dir | output_dir | output_dir |  |
trainer.experiment_name | run_name | output_dir | run_name | its last folder names the run
trainer.logger | report_to | trainer.trackers | trackers |
trainer.project_name | project | trainer.tracker_project |  |
| trackio_space_id, trackio_bucket_id, trackio_static_space_id |  |  | a \
[tracker](plugs.md#a-tracker) of your own
| logging_strategy, logging_steps, logging_first_step, log_on_each_node, \
logging_nan_inf_filter, log_level, log_level_replica, disable_tqdm, \
include_num_input_tokens_seen |  |  | each step is logged
trainer.test_freq | eval_steps | evaluation.every | every | steps of generation here and in \
verl, of the optimizer in TRL
| eval_strategy, do_eval, do_train, do_predict, eval_delay, eval_accumulation_steps, \
eval_do_concat_batches, eval_use_gather_object, per_device_eval_batch_size, \
prediction_loss_only, include_for_metrics, batch_eval_metrics |  |  | `evaluation.every`; \
servers batch by themselves
trainer.val_before_train | eval_on_start | evaluation.before |  |
data.val_max_samples |  | trainer.eval_samples | no_limit |
trainer.save_freq | save_steps | trainer.save_every | every | steps of generation here and in \
verl, of the optimizer in TRL
| save_strategy |  |  | `trainer.save_every`
trainer.max_actor_ckpt_to_keep | save_total_limit | checkpoint.keep | size |
| metric_for_best_model | checkpoint.keep_best | look |
| load_best_model_at_end, greater_is_better |  |  | `checkpoint.keep_best`, with a minus for \
the lowest value
trainer.resume_mode, trainer.resume_from_path | resume_from_checkpoint | resume | resume |
| restore_callback_states_from_checkpoint |  |  | a resume restores all
| push_to_hub, hub_token, hub_private_repo, hub_model_id, hub_strategy, hub_always_push, \
hub_revision |  |  | `checkpoint.export_to`, or the hub's own command
trainer.log_val_generations | num_completions_to_print | sample_log.num_shown |  |
trainer.rollout_data_dir | log_completions | sample_log.every | samples |
| log_multimodal, log_unique_prompts, log_completions_hub_repo |  |  | `sample_log` has every \
response; [viewer](watching.md)
"""


@dataclass(frozen=True, slots=True)
class SettingNames:
    """Settings that mean the same."""

    section: str
    verl: tuple[str, ...]
    trl: tuple[str, ...]
    our_names: tuple[str, ...]
    converter: str
    note: str  # what differs; without a setting of ours: why there is none

    def get_names(self, framework: str) -> tuple[str, ...]:
        return self.verl if framework == "verl" else self.trl


def _read_table() -> Iterator[SettingNames]:
    section = ""
    for line in TABLE.strip().splitlines():
        if line.startswith("# "):
            section = line[2:]
            continue
        cells = [cell.strip() for cell in line.split("|")]
        verl, trl, our_names = (tuple(filter(None, cell.split(", "))) for cell in cells[:3])
        yield SettingNames(section, verl, trl, our_names, cells[3] or "same", cells[4])


ROWS = list(_read_table())


def get_full_name(name: str) -> str:
    """Return the name of a setting of the table as verl's scripts have it.

    >>> get_full_name("rollout.n")
    'actor_rollout_ref.rollout.n'
    """
    return f"{VERL_GROUP}.{name}" if name.startswith(_INSIDE) else name


def find_row(framework: str, name: str) -> SettingNames | None:
    """Return the row of a setting, or of the mapping that it is in; None where none has it.

    >>> find_row("verl", "actor.megatron.override_transformer_config.bias_dropout_fusion").our_names
    ('actor.megatron',)
    """
    while name:
        for row in ROWS:
            if name in row.get_names(framework):
                return row
        name = name.rpartition(".")[0]
    return None


def find_our_settings(key: str, known: Collection[str]) -> tuple[str, list[str]]:
    """Return the framework that has a setting, or "", and our settings for it among `known`.

    verl's names may come without their first parts. Jobs that train a single model have the actor's
    engine settings in the group `engine`.

    >>> find_our_settings("rollout.n", ["algorithm.group_size"])
    ('verl', ['algorithm.group_size'])
    >>> find_our_settings("learning_rate", ["engine.optimizer.lr"])
    ('TRL', ['engine.optimizer.lr'])
    """
    name = key.removeprefix(f"{VERL_GROUP}.")
    for row in ROWS:
        is_verls = any(n == name or ("." in name and n.endswith(f".{name}")) for n in row.verl)
        if is_verls or key in row.trl:
            actor_names = [our for our in row.our_names if our.startswith("actor.")]
            engine_names = [f"engine.{our.removeprefix('actor.')}" for our in actor_names]
            settings = [
                our
                for our in (*row.our_names, *engine_names)
                if our in known or our.rpartition(".")[0] in known
            ]
            return ("verl" if is_verls else "TRL"), settings
    return ("verl" if key.partition(".")[0] == VERL_GROUP else ""), []
