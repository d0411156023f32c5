"""Every setting of a run, with its default, in typed dataclasses.

YAML files contain differences from these defaults. `resolve.py` has the rules between fields.

Long because: the settings of a run are one list, with a sentence each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.checks import check_at_least, check_between, check_choice, check_positive


@dataclass
class Layout:
    """The parallel layout of one model. World size is tp * pp * cp * dp.

    Expert weights on the same ranks use etp * ep * edp * pp, where edp is computed from the others.
    """

    tp: int = 1  # tensor parallel, with sequence parallel
    pp: int = 1  # pipeline parallel
    cp: int = 1  # context parallel
    dp: int = 1  # data parallel
    ep: int = 1  # expert parallel
    etp: int = 1  # tensor parallel inside an expert
    vpp: int = 1  # model chunks per pipeline rank (interleaved schedule); needs pp above 1
    # Decoder layers of the first pp * vpp chunk, if different. 0: the embedding only.
    first_stage_layers: int | None = None
    # Decoder layers of the last pp * vpp chunk, if different. 0: the output head only.
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass
class ModelConfig:
    path: str = ""  # folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer
    # Parameters and activations: float32, bfloat16 or auto (float32 on the CPU lane, bfloat16 on
    # the GPU lane).
    dtype: str = "auto"
    # Date, YYYY-MM-DD, that chat templates such as Llama-3's write as today's, in every prompt of
    # a run.
    chat_date: str = "2024-07-26"
    # Import path of a Family (docs/plugs.md), for an architecture that this package does not have,
    # or in place of one that it has. transformers: any architecture of transformers, the default of
    # backend=fsdp. Empty: the families of this package.
    family: str = ""


@dataclass
class OptimizerConfig:
    lr: float = 1e-6  # learning rate after warm-up
    min_lr: float = 0.0  # final learning rate of a decaying schedule
    schedule: str = "constant"  # after warm-up: constant, linear, cosine or wsd
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    wsd_decay_steps: int = 0  # last steps, of linear decay to min_lr, with schedule=wsd
    beta1: float = 0.9  # Adam's beta1
    beta2: float = 0.95  # Adam's beta2
    eps: float = 1e-8  # Adam's epsilon
    weight_decay: float = 0.0  # decoupled, as in AdamW
    clip_grad: float = 1.0  # maximum global gradient norm
    # Steps in a row with gradients that are not finite; one more ends the run.
    max_skipped_steps: int = 0
    distributed: bool = False  # shard the optimizer state over data-parallel ranks
    overlap: bool = False  # overlap gradient reduction (and weight gathering) with computation
    cpu_offload: bool = False  # Adam and its state on the host; GPU lane only, needs distributed


@dataclass
class MoEConfig:
    """Routers and experts of MoE models."""

    dispatcher: str = "alltoall"  # of tokens to experts: alltoall or allgather
    # Load balance of a micro-batch (aux_loss), or of all ranks and the mini-batch so far
    # (global_aux_loss).
    aux_loss: str = "aux_loss"
    aux_loss_coef: float = 0.0  # weight of the load-balancing loss; 0 disables it
    bias_update_rate: float = 0.0  # update rate of the router's selection bias; 0 freezes it
    # off: the router chooses experts; record: the update uses those of the log-prob pass; rollout:
    # both use those of the servers (actor of rl only).
    router_replay: str = "off"


@dataclass
class RecomputeConfig:
    """Activations recomputed in the backward pass."""

    granularity: str = "none"  # none, selective (modules) or full (whole layers)
    modules: list[str] = field(default_factory=lambda: ["core_attn"])  # for selective recompute
    num_layers: int = 1  # layers per unit of full recompute; only its input is stored


@dataclass
class LoRAConfig:
    """Low-rank adapters on linear layers; the base weights stay frozen."""

    rank: int = 0  # rank of the adapters; 0 trains all weights, without adapters
    alpha: float = 32.0  # adapters are scaled by alpha / rank
    targets: list[str] = field(  # Megatron's names of linear layers
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )


@dataclass
class FSDPConfig:
    """Settings of backend=fsdp."""

    num_replicas: int = 1  # copies of the model, each sharded over its share of the ranks
    # Parameters, gradients and optimizer state in host memory; a layer is on the device for its
    # passes.
    cpu_offload: bool = False
    # Sequences of a micro-batch in one row, without padding. false: each alone, for families whose
    # layers mix them.
    packing: bool = True


@dataclass
class EngineConfig:
    """A training engine."""

    # megatron; fsdp, for any model of transformers; or the import path of a Backend
    # (docs/plugs.md).
    backend: str = "megatron"
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = 8192  # packed tokens, prompt and response
    # Most logits and probabilities in memory at once; 0: 512 MiB on a GPU, 32 MiB on a CPU.
    logprob_chunk_bytes: int = 0
    moe: MoEConfig = field(default_factory=MoEConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    mtp_loss_coef: float = 0.0  # weight of the multi-token prediction loss; 0 disables it
    threads_per_rank: int = 1  # CPU threads per rank
    # Layers: te (Transformer Engine, GPU), torch (plain torch, both lanes) or auto (te if
    # installed).
    modules: str = "auto"


@dataclass
class CriticConfig(EngineConfig):
    """The value model, if algorithm.advantage needs values, as gae does."""

    model_path: str = ""  # a value model or a language model; empty: the actor's first weights
    warmup_steps: int = 0  # first steps, which update the critic only
    clip_range: float = 0.2  # most that an update moves a value, in the unit of the returns
    loss_aggregation: str = "token_mean"  # how token losses are averaged


@dataclass
class RewardModelConfig(EngineConfig):
    """A frozen reward model, whose score is added to the reward."""

    model_path: str = ""  # a checkpoint of mcore-rl rm; empty: no reward model
    weight: float = 1.0  # weight of the score


@dataclass
class TeacherConfig(EngineConfig):
    """Frozen models that algorithm.distillation learns from."""

    # By name: {math: {model_path: ..., weight: 1.0, layout: {tp: 2}}}. Without model_path: the
    # actor's first weights.
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    column: str = ""  # column of data.train_file with the teacher's name; empty: all teach


@dataclass
class RolloutConfig:
    """The generation servers."""

    backend: str = "vllm"  # vllm, or the import path of a GenerationServer (docs/plugs.md)
    num_servers: int = 1  # servers, each with a full copy of the model
    tp: int = 1  # tensor parallel inside a server
    nodes_per_server: int = 1  # nodes of a server, with equal shares of its tp workers
    ep: bool = False  # expert parallel over the tp ranks of a server
    temperature: float = 1.0  # sampling temperature; above 0
    # Sample from the likeliest tokens of this total probability. Training below 1 needs
    # algorithm.correction.level and bounds on the gaps (docs/rollout.md); evaluation.top_p does
    # not.
    top_p: float = 1.0
    top_k: int = 0  # sample from this many likeliest tokens, with the rules of top_p; 0: all
    # Texts that end a response, which includes the token that completes one.
    stop: list[str] = field(default_factory=list)
    max_response_tokens: int = 1024  # longer responses are truncated
    # Concurrent sequences of a server. null: as `vllm serve` on that GPU, 1024 on an H100, 256 on
    # smaller ones; 256 on the CPU lane.
    max_num_seqs: int | None = None
    # Tokens of a forward pass of a server. null: as `vllm serve` on that GPU, 8192 on an H100; on
    # the CPU lane 8192, or the longest sequence if that is longer.
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int = 4 << 30  # KV cache of each worker of a server
    # Weights that servers start with: checkpoint; dummy (none until the trainer sends them); auto
    # (dummy in a run that resumes and for a restarted server).
    load_format: str = "auto"
    max_restarts: int = 3  # maximum restarts per server
    # CPU lane: cores of each worker, such as "0|1", one thread per core. Empty: split evenly, and
    # one thread for the worker of tp=1.
    cores: str = ""


@dataclass
class AgentConfig:
    # single_turn, tools, environment, user, program (an OpenAI client: docs/endpoint.md), verifiers
    # (an environment of that package), or the import path of a class: docs/agents.md.
    loop: str = "single_turn"
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the loop
    # Names (calculator, python, search), import paths of functions or classes with @tool, or a
    # file.yaml of function schemas.
    tools: list[str] = field(default_factory=list)
    search_file: str = ""  # JSONL with a column `text`, for the tool search
    # MCP servers: URLs, or commands, started once by each worker.
    mcp_servers: list[str] = field(default_factory=list)
    sandbox: dict[str, Any] = field(default_factory=dict)  # of the tool python: docs/sandbox.md
    # With loop=environment: code, countdown, guessing, openenv, or the import path of a class.
    environment: str = ""
    environment_settings: dict[str, Any] = field(default_factory=dict)  # of the environment
    codec: str = "auto"  # tokens of turns: renderers, template, or auto
    max_turns: int = 8  # most turns of the policy in a trajectory
    max_turn_tokens: int = 0  # most tokens of a turn; 0: the rest of rollout.max_response_tokens
    timeout_s: float = 600.0  # limit on a trajectory; a longer one ends as it is
    tool_timeout_s: float = 30.0  # limit on a tool call, unless the tool has its own


TIERS = ("auto", "bwrap", "landlock", "unsafe")  # of the sandbox


@dataclass(frozen=True)
class SandboxSettings:
    """Containment of programs, and limits of one call."""

    tier: str = "auto"  # auto: the best there is; unsafe: no containment, only limits
    cpu_s: float = 10.0  # CPU seconds of all processes of a call
    wall_s: float = 20.0  # seconds until a call is ended
    memory_mb: int = 1024  # of each process and of all together; MiB
    output_kb: int = 256  # stdout and stderr together; KiB
    processes: int = 32  # processes and threads at once; landlock has threads only
    scratch_mb: int = 64  # in its folder; MiB

    def __post_init__(self) -> None:
        check_choice("tier", self.tier, TIERS)
        for name in ("cpu_s", "wall_s"):
            check_positive(name, getattr(self, name))
        check_at_least("memory_mb", self.memory_mb, 64)  # less does not start Python
        for name in ("output_kb", "processes", "scratch_mb"):
            check_at_least(name, getattr(self, name), 1)


@dataclass
class EvaluationConfig:
    """Evaluation on held-out prompts; there is always one after training."""

    before: bool = True  # evaluate before training
    every: int = 0  # steps between evaluations during training; 0: none
    num_samples: int = 1  # responses per prompt
    temperature: float | None = None  # 0 is greedy; null: rollout.temperature
    top_p: float | None = None  # null: rollout.top_p
    top_k: int | None = None  # null: rollout.top_k
    stop: list[str] | None = None  # null: rollout.stop
    max_response_tokens: int | None = None  # null: rollout.max_response_tokens


@dataclass
class SampleLogConfig:
    """Tables of responses, samples/step_NNNNNN.parquet, and responses on the screen."""

    every: int = 1  # steps between tables; 0: none
    max_rows: int = 0  # responses in a table, whole trajectories; 0: all of the step
    # Tokens in a table, whole trajectories and at least one; about 9 bytes each on disk. 0: all.
    max_tokens: int = 4_000_000
    tokens: bool = True  # columns of each token, which `mcore-rl samples` shows; false: texts only
    num_shown: int = 1  # responses shown on the screen each step, shortened


@dataclass
class CurriculumConfig:
    """Prompts drawn by the success rate p of their earlier responses."""

    # Weight of a prompt: learnability (4 p (1 - p)), window (1 from low to high) or an import path.
    # Empty: random order, each prompt once an epoch.
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    success: str = "reward"  # the score that decides success: reward, or a part of it
    min_reward: float = 1.0  # a response succeeds from this score on
    decay: float = 0.5  # weight of earlier responses when a prompt is drawn again
    min_weight: float = 0.05  # the smallest weight of a prompt


@dataclass
class DataConfig:
    # Parquet, JSONL, a folder of Hugging Face datasets (save_to_disk), or the import path of a
    # function that returns rows: docs/data.md.
    train_file: str = ""
    train_files: list[str] = field(default_factory=list)  # several, instead of train_file
    # Relative frequency of each of train_files. Empty: each prompt of all files once an epoch.
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # for evaluation, as the set `test`; empty: none
    # Several sets, by names in metrics: {math: math.parquet, code: code.parquet}.
    test_files: dict[str, str] = field(default_factory=dict)
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, passed to the reward
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    max_prompt_tokens: int = 1024  # with the chat template applied
    long_prompts: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class RewardConfig:
    name: str = "final_number"  # a name in the reward registry, or an import path
    settings: dict[str, Any] = field(default_factory=dict)  # settings of that reward
    # A weighted sum instead of reward.name, by names in metrics:
    # {math: {weight: 1.0}, brief: {name: overlong, settings: {buffer_tokens: 512}}}
    terms: dict[str, dict[str, Any]] = field(default_factory=dict)
    # On an exception, an invalid result or a time-out: stop (the run), drop (the response) or zero
    # (its reward is 0).
    on_error: str = "stop"
    timeout_s: float = 60.0  # limit on a call, unless the reward has its own setting timeout_s
    # Processes per server for each reward that runs in processes of its own: math, and functions
    # of yours that are not async.
    num_processes: int = 2
    shuffle: bool = False  # control experiment: permute the rewards of a batch at random


@dataclass(frozen=True)
class GRPOSettings:
    """Settings of `algorithm.advantage=grpo`."""

    normalize_by_std: bool = True  # divide group advantages by their standard deviation


@dataclass(frozen=True)
class PPOClipSettings:
    """Settings of `algorithm.loss=ppo_clip`."""

    clip_ratio_low: float = 0.2  # clip ratios below 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # clip ratios above 1 + clip_ratio_high
    dual_clip: float | None = None  # largest ratio with a negative advantage; null: none

    def __post_init__(self) -> None:
        check_between("clip_ratio_low", self.clip_ratio_low, 0, 1)
        check_at_least("clip_ratio_high", self.clip_ratio_high, 0)
        if self.dual_clip is not None:
            check_at_least("dual_clip", self.dual_clip, 1)


@dataclass
class CorrectionConfig:
    """Correction by the ratio of the trainer's probability to the server's."""

    # Importance weights of: off, token, sequence, geometric. null: token if samples are older than
    # the policy (trainer.staleness) and nothing else corrects that, else off.
    level: str | None = None
    # truncate: weights above weight_max become weight_max; mask: weights outside of weight_min to
    # weight_max become 0.
    method: str = "truncate"
    weight_min: float = 0.0  # smallest weight, with method=mask
    weight_max: float = 2.0  # largest weight
    normalize: bool = False  # divide the weights by their mean over the batch
    # Rules that leave tokens and sequences out of the loss, with bounds:
    # {sequence_mean_k3: 0.01, veto: [1.0e-4, 1.0e4]}.
    reject: dict[str, Any] = field(default_factory=dict)
    unbiased_kl: bool = False  # multiply the KL in the loss by the ratio
    # Use the servers' log-probs as the trainer's, without computing and checking those.
    use_rollout_log_probs: bool = False

    @property
    def has_weights(self) -> bool:
        return self.level not in (None, "off")


@dataclass
class ReplayConfig:
    """Groups of earlier steps, trained on again in place of new ones."""

    share: float = 0.0  # share of a step's groups; 0: none
    max_age: int = 4  # most steps since a group was generated
    # Weight of a group in the draw: spread (of its rewards), rare_success, uniform, or an import
    # path.
    priority: str = "spread"
    priority_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function


@dataclass
class FilterConfig:
    """Selection of the generated samples that a step trains on: docs/sample_policies.md."""

    # drop_uniform (groups whose rewards are all equal), or an import path. Empty: keep all.
    group_filter: str = ""
    group_filter_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    max_rounds: int = 1  # rounds of generation until trainer.prompts_per_step groups pass
    prompts_per_round: int = 0  # 0: the new groups of a step
    if_short: str = "train"  # too few groups after the last round: train, or stop
    keep_responses: int = 0  # responses of a group to train on; 0: all
    keep_by: str = "max_variance"  # best, best_and_worst, max_variance, random or an import path
    keep_by_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    advantages_of: str = "kept"  # responses that advantages compare: kept, or all
    mask_truncated: bool = False  # no loss on trajectories whose last turn is truncated
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class DistillationConfig:
    """Distillation from the models of `teacher`, on responses of the policy itself."""

    # off, sampled_kl (subtract the KL at each sampled token from its advantage), reverse_kl or
    # forward_kl (a loss over the teacher's likeliest tokens).
    loss: str = "off"
    coef: float = 1.0  # weight of the distillation
    top_k: int = 32  # tokens of the teacher that reverse_kl and forward_kl compare
    use_reward: bool = False  # train on the rewards too; false: rewards are metrics only


@dataclass
class AlgorithmConfig:
    """Functions are names, or import paths of your own: docs/algorithms.md."""

    advantage: str = "grpo"  # advantages from rewards
    advantage_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    group_size: int = 8  # responses per prompt
    filter: FilterConfig = field(default_factory=FilterConfig)
    num_mini_batches: int = 1  # optimizer steps per trainer step
    loss: str = "ppo_clip"  # loss of each token, without KL and entropy
    loss_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    loss_aggregation: str = "token_mean"  # how token losses are averaged
    # settings of that function
    loss_aggregation_settings: dict[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0  # weight of the entropy bonus; 0 disables it
    # Raise the weight by entropy_coef_step each step while the entropy is below this many nats per
    # token, else lower it; no bonus above the target. null: a fixed weight.
    entropy_target: float | None = None
    entropy_coef_step: float = 0.005  # change of the weight per step
    entropy_coef_max: float = 1.0  # largest weight with entropy_target
    top_entropy_share: float = 1.0  # train on this share of tokens, those of highest entropy
    cross_entropy_coef: float = 0.0  # weight of the cross entropy of tokens not sampled
    kl_coef: float = 0.0  # weight of the KL to the reference model; 0 loads no reference
    kl_placement: str = "loss"  # loss, or reward (subtracted at each token)
    kl_target: float | None = None  # adapt the weight to this KL, in nats per token
    kl_horizon: int = 10000  # samples over which kl_target changes the weight by at most a fifth
    kl_estimator: str = "k3"  # estimator of the KL from one sample
    kl_estimator_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    # Compute the trainer's log-probs before the update: always, or auto (not if a trainer step has
    # one optimizer step and no setting needs them: docs/algorithms.md).
    log_prob_pass: str = "auto"
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass
class WeightSyncConfig:
    # colocated: shards from training ranks on the same device; disaggregated: from ranks on other
    # devices; full_export: servers load a checkpoint under output_dir.
    method: str = "colocated"
    # Of disaggregated: process_group (gloo, or NCCL with GPUs), nixl (NVIDIA's NIXL, if installed),
    # or the import path of a WeightTransport (docs/plugs.md).
    transport: str = "process_group"
    verify: str = "sampled"  # tensors compared bit for bit: off, sampled (1 in 16) or full
    bucket_bytes: int = 64 << 20  # size of a message bucket; a rank stages twice as much
    # Address on which rank 0 of the trainer listens; auto: that of its Ray node.
    bind_address: str = "auto"
    timeout_s: float = 600.0  # limit on an update of all servers, and on the first rendezvous


@dataclass
class TimeoutsConfig:
    """Limits on a call of all ranks of a model, or of all servers. The error names the rank."""

    # Start processes, load the model, join process groups. Unless set, 5 s more per GB of
    # model.path.
    start_s: float = 600.0
    call_s: float = 1800.0  # any other call: generate, log-probs, updates of a step, export


@dataclass
class AsynchronousConfig:
    """Settings of trainer.mode=fully_async: docs/async_training.md."""

    max_groups: int = 0  # groups generated at once; 0: as many as staleness allows
    # Extra groups, as a share of trainer.prompts_per_step: a step takes the first to complete, and
    # groups that are then too old start again. Favours short responses.
    oversampling: float = 0.0
    # Most samples held or generated for later steps, which bounds their memory. 0: as many as
    # staleness allows.
    max_waiting_samples: int = 0
    # Recompute the KV cache of unfinished responses with each new version of the weights; false:
    # the cache keeps what older versions computed.
    recompute_cache: bool = False


@dataclass
class TrainerConfig:
    # sync, one_step_off (generate the next samples while training; own devices for servers),
    # fully_async (generate all the time, weights change in the middle of responses), or the import
    # path of an RLTrainer (docs/plugs.md).
    mode: str = "sync"
    # Most versions by which a token may be older than the policy: 0 with sync; 0 or 1 with
    # one_step_off; any with fully_async. null: 0, 1, 2.
    staleness: int | None = None
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    num_steps: int = 100  # trainer steps
    prompts_per_step: int = 64  # a step has algorithm.group_size samples of each
    # Stop if log-probs of trainer and servers differ by more at a token, in nats: docs/rollout.md.
    # null: 0.5 in float32; in bfloat16 2, or 20 with experts unless
    # actor.moe.router_replay=rollout.
    max_logprob_gap: float | None = None
    # The same on average, a more sensitive test. null: 1e-4 in float32, 0.1 in bfloat16.
    mean_logprob_gap: float | None = None
    eval_samples: int = 0  # prompts of each held-out set per evaluation; 0: all
    # Steps between training checkpoints, with one after the last step; 0: none.
    save_every: int = 0
    # Besides metrics.jsonl: tensorboard, wandb, mlflow, swanlab, or import paths of Trackers
    # (docs/plugs.md). Install wandb, mlflow and swanlab yourself; their own environment variables
    # configure them.
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project or experiment of trackers

    @property
    def gap_bounds(self) -> dict[str, float]:
        """The largest gaps of log-probs that a step may have, by name, as `resolve` fills them."""
        return {name: getattr(self, name) for name in ("max_logprob_gap", "mean_logprob_gap")}


@dataclass
class CheckpointConfig:
    """Training checkpoints, output_dir/checkpoints/step_NNNNNN, to resume from."""

    keep: int = 2  # newest checkpoints to keep
    # Also keep the checkpoint with the highest value of this metric, such as eval/test/reward;
    # -NAME: the lowest, as -eval/test/loss of sft. Empty: none.
    keep_best: str = ""
    hf_every: int = 0  # steps between exports to output_dir/hf/step_NNNNNN; 0: none
    # Train while a checkpoint is written: a step waits for the copy to the host, which then holds
    # it twice.
    async_save: bool = False


@dataclass
class WarmStartConfig:
    """Supervised training before reinforcement learning; disabled if num_steps is 0."""

    num_steps: int = 0  # optimizer steps
    batch_size: int = 96  # samples per optimizer step
    train_file: str = ""  # as data.train_file, with the response column
    # Target text. Empty: the prompt column has whole conversations (with data.tools_column); train
    # on the assistant's messages.
    response_column: str = "response"
    moe_aux_loss_coef: float = 0.0  # load-balancing loss of the router
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class PlacementConfig:
    """Pools of devices: roles of one pool take turns; own has no other role; any name is a pool."""

    actor: str = "shared"  # the trainer
    reference: str = "shared"  # the frozen model of the KL
    critic: str = "shared"  # the value model
    reward_model: str = "shared"  # the reward model
    teacher: str = "shared"  # each of the teachers
    # The servers; auto: own with weight_sync.method=disaggregated or trainer.mode=one_step_off or
    # fully_async, else shared.
    rollout: str = "auto"


@dataclass
class TaskConfig:
    """A synthetic task with a tokenizer, model and data of its own."""

    name: str = ""  # last_digit, calculator, code, countdown; empty: none
    worked_share: float = 0.35  # share of warm-start examples that show their work


@dataclass
class RLConfig:
    seed: int = 0  # data order, sampling, initial weights of a task; up to 4294967295
    output_dir: str = "outputs/rl"  # folder of all outputs; new or empty, unless resumed
    # never, auto (the newest complete checkpoint in output_dir, else a new run), or the folder of a
    # training checkpoint.
    resume: str = "never"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    # Ray's object store, which holds batches. 0: the samples of two steps with all rounds, of
    # trainer.staleness more with fully_async, of algorithm.filter.replay.max_age more with replay;
    # at least 512 MiB, at most 80 % of the free memory of /dev/shm and the cgroup.
    object_store_bytes: int = 0
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    actor: EngineConfig = field(default_factory=EngineConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    # Frozen models for agents, by name, each with servers and devices of its own:
    # {user: {path: ..., num_servers: 1, tp: 1}}; no path: the actor's first weights
    # (docs/agents.md).
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sample_log: SampleLogConfig = field(default_factory=SampleLogConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of a prompt and its response, in training or evaluation."""
        responses = self.rollout.max_response_tokens, self.evaluation.max_response_tokens or 0
        return self.data.max_prompt_tokens + max(responses)

    @property
    def inner_timeout_s(self) -> float:
        """Time-out of waits inside ranks and servers, longer than those of the driver.

        So the driver, which sees all ranks, times out first and can say which rank is stuck.
        """
        driver = self.timeouts.start_s, self.timeouts.call_s, self.weight_sync.timeout_s
        return max(driver) + 60.0


@dataclass
class ConversationsConfig:
    """Conversations to train on."""

    # Parquet, JSONL, a folder of Hugging Face datasets (save_to_disk), or the import path of a
    # function that returns rows: docs/data.md.
    train_file: str = ""
    train_files: list[str] = field(default_factory=list)  # several, instead of train_file
    # Relative frequency of each of train_files. Empty: each row of all files once an epoch.
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # for evaluation, as the set `test`; empty: none
    # Several sets, by names in metrics: {chat: chat.jsonl, code: code.jsonl}.
    test_files: dict[str, str] = field(default_factory=dict)
    # Chat messages: list of {role, content}. Train on those of the assistant, or as a field `train`
    # of a message says: true or false.
    messages_column: str = "messages"
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    train_on_prompt: bool = False  # train on all tokens
    max_tokens: int = 4096  # most tokens of a conversation
    long_rows: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)


@dataclass
class PairsConfig:
    """Preference pairs, in the same kinds of files."""

    train_file: str = ""  # rows with the prompt, chosen and rejected columns
    train_files: list[str] = field(default_factory=list)  # several, instead of train_file
    # Relative frequency of each of train_files. Empty: each row of all files once an epoch.
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # for evaluation, as the set `test`; empty: none
    # Several sets, by names in metrics: {chat: chat.jsonl, code: code.jsonl}.
    test_files: dict[str, str] = field(default_factory=dict)
    prompt_column: str = "prompt"  # chat messages
    chosen_column: str = "chosen"  # chat messages that follow the prompt: the preferred answer
    rejected_column: str = "rejected"  # chat messages that follow the prompt: the other answer
    margin_column: str = ""  # wanted difference of the scores, for rm
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    max_tokens: int = 4096  # most tokens of a prompt with one answer
    long_rows: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)


AnyData = DataConfig | ConversationsConfig | PairsConfig


@dataclass
class StepsConfig:
    # Passes over the rows of all files; with data.train_weights as many rows.
    num_epochs: float = 1.0
    num_steps: int = 0  # optimizer steps; 0: as num_epochs says
    batch_size: int = 64  # conversations or pairs of an optimizer step
    eval_samples: int = 0  # rows of each held-out set per evaluation; 0: all
    # Steps between training checkpoints, with one after the last step; 0: none.
    save_every: int = 0
    # Besides metrics.jsonl: tensorboard, wandb, mlflow, swanlab, or import paths of Trackers
    # (docs/plugs.md). Install wandb, mlflow and swanlab yourself; their own environment variables
    # configure them.
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project or experiment of trackers


@dataclass
class HeldOutConfig:
    """Evaluation on held-out rows; there is always one after training."""

    before: bool = True  # evaluate before training
    every: int = 0  # steps between evaluations during training; 0: none


@dataclass
class ReferenceConfig:
    """The frozen model of a loss: the weights of model.path, or with LoRA the base weights."""

    # Devices: shared (those of the trained model) or own (as many).
    placement: str = "shared"


@dataclass
class TrainConfig:
    """Settings of all jobs that train on examples."""

    seed: int = 0  # data order and adapters; up to 4294967295
    output_dir: str = "outputs/train"  # folder of all outputs; new or empty, unless resumed
    # never, auto (the newest complete checkpoint in output_dir, else a new run), or the folder of a
    # training checkpoint.
    resume: str = "never"
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: StepsConfig = field(default_factory=StepsConfig)
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def inner_timeout_s(self) -> float:
        """Time-out of waits inside ranks, longer than those of the driver."""
        return max(self.timeouts.start_s, self.timeouts.call_s) + 60.0


@dataclass
class SFTConfig(TrainConfig):
    """Supervised training on conversations."""

    output_dir: str = "outputs/sft"  # folder of all outputs; new or empty, unless resumed
    data: ConversationsConfig = field(default_factory=ConversationsConfig)
    loss_aggregation: str = "token_mean"  # how token losses are averaged


@dataclass
class DPOConfig(TrainConfig):
    """Training on preference pairs, without a reward model."""

    output_dir: str = "outputs/dpo"  # folder of all outputs; new or empty, unless resumed
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: str = "dpo"  # loss of a pair: a name, or the import path of a function
    loss_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


@dataclass
class RMConfig(TrainConfig):
    """A reward model, trained on preference pairs."""

    output_dir: str = "outputs/rm"  # folder of all outputs; new or empty, unless resumed
    data: PairsConfig = field(default_factory=PairsConfig)


@dataclass
class EvaluatedModelConfig(ModelConfig):
    # A Hugging Face checkpoint, or the output_dir of a run: checkpoint/, else the last
    # hf/step_NNNNNN.
    path: str = ""
    # Date, YYYY-MM-DD, that chat templates write as today's. Empty: that of the run, else
    # 2024-07-26.
    chat_date: str = ""


@dataclass
class SetsConfig:
    # By names of your choice, as data.sets.math=math.parquet: files as of data.train_file
    # (docs/data.md).
    sets: dict[str, str] = field(default_factory=dict)
    num_prompts: int = 0  # first prompts of each set; 0: all
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, passed to the reward
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    max_prompt_tokens: int = 1024  # with the chat template applied
    long_prompts: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)


@dataclass
class SamplingConfig(RolloutConfig):
    """The servers that generate, and how they sample."""

    n: int = 1  # responses per prompt, 1 to 1000
    temperature: float = 1.0  # sampling temperature; 0 takes the most likely token
    top_p: float = 1.0  # sample from the likeliest tokens of this total probability


@dataclass
class ScoringConfig:
    # The k of pass@k and majority@k, each up to rollout.n. Empty: 1, 2, 4, ... and rollout.n.
    ks: list[int] = field(default_factory=list)
    term: str = ""  # term of reward.terms that decides correctness; empty: the sum
    correct_from: float = 1.0  # a response is correct from this reward on


@dataclass
class EvalConfig:
    seed: int = 0  # sampling; up to 4294967295
    output_dir: str = "outputs/eval"  # folder of all outputs; new or empty, unless resumed
    # never, or auto: continue in output_dir with the incomplete sets; a new evaluation if there is
    # none.
    resume: str = "never"
    model: EvaluatedModelConfig = field(default_factory=EvaluatedModelConfig)
    data: SetsConfig = field(default_factory=SetsConfig)
    rollout: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)

    @property
    def ks(self) -> list[int]:
        """The k of pass@k and majority@k, in order.

        >>> EvalConfig(rollout=SamplingConfig(n=6)).ks
        [1, 2, 4, 6]
        """
        n = self.rollout.n
        return sorted(set(self.scoring.ks or [*(2**i for i in range(n.bit_length())), n]))
