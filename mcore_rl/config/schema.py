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
    """The parallel layout of a model, on tp * pp * cp * dp ranks: docs/engine.md."""

    tp: int = 1  # tensor parallel, with sequence parallel
    pp: int = 1  # pipeline parallel
    cp: int = 1  # context parallel
    dp: int = 1  # data parallel
    ep: int = 1  # expert parallel
    etp: int = 1  # tensor parallel inside an expert
    vpp: int = 1  # interleaved chunks per pipeline rank; needs pp above 1
    # decoder layers of the first chunk; null: as the others; 0: the embedding only
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None  # of the last; 0: the output head only

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass
class ModelConfig:
    # folder of a Hugging Face checkpoint with its tokenizer; hf:ORG/NAME or a URL: docs/data.md
    path: str = ""
    # of parameters and activations: float32, bfloat16, auto (bfloat16 on GPUs, else float32)
    dtype: str = "auto"
    # YYYY-MM-DD, for chat templates that write today's date, such as Llama-3's
    chat_date: str = "2024-07-26"
    # Import path of a Family (docs/plugs.md). transformers: any architecture of transformers, the
    # default of backend=fsdp. Empty: those of this package.
    family: str = ""


@dataclass
class OptimizerConfig:
    name: str = "adam"  # adam, or muon for weight matrices (docs/passthrough.md)
    lr: float = 1e-6  # learning rate after warm-up
    min_lr: float = 0.0  # final learning rate of a decaying schedule
    schedule: str = "constant"  # after warm-up: constant, linear, cosine or wsd
    warmup_steps: int = 0  # optimizer steps, linear
    wsd_decay_steps: int = 0  # last steps of schedule=wsd: linear decay to min_lr
    beta1: float = 0.9  # of Adam
    beta2: float = 0.95  # of Adam
    eps: float = 1e-8  # of Adam
    weight_decay: float = 0.0  # decoupled, as in AdamW
    clip_grad: float = 1.0  # maximum global gradient norm
    max_skipped_steps: int = 0  # updates in a row to skip if gradients are not finite
    distributed: bool = False  # shard its state over data-parallel ranks
    overlap: bool = False  # overlap gradient reduction and weight gathering with computation
    cpu_offload: bool = False  # Adam on the host; GPU lane, needs distributed


@dataclass
class MoEConfig:
    """Routers and experts of MoE models."""

    dispatcher: str = "alltoall"  # alltoall, allgather, or flex (DeepEP; GPU lane)
    # exchange the tokens of a micro-batch during the computation of another; bfloat16, GPU lane
    overlap: bool = False
    # balance load over a micro-batch (aux_loss) or the mini-batch so far (global_aux_loss)
    aux_loss: str = "aux_loss"
    aux_loss_coef: float = 0.0  # weight of the load-balancing loss
    bias_update_rate: float = 0.0  # of the router's selection bias; 0 freezes it
    # experts of the update: off (the router's), record (of the log-prob pass), rollout (of the
    # servers; actor only)
    router_replay: str = "off"


@dataclass
class RecomputeConfig:
    """Activations recomputed in the backward pass."""

    granularity: str = "none"  # none, selective (modules) or full (whole layers)
    modules: list[str] = field(default_factory=lambda: ["core_attn"])  # for selective recompute
    num_layers: int = 1  # layers per unit of full recompute


@dataclass
class LoRAConfig:
    """Low-rank adapters on linear layers; the base weights stay frozen."""

    rank: int = 0  # 0: no adapters, all weights are trained
    alpha: float = 32.0  # scale: alpha / rank
    targets: list[str] = field(  # Megatron's names of linear layers
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )


@dataclass
class Float8Config:
    """Products of linear layers in float8: docs/passthrough.md. Weights stay in model.dtype."""

    # off, blockwise (Hopper), mxfp8 (Blackwell), or tensorwise, from scales of the same step
    recipe: str = "off"
    format: str = "e4m3"  # or hybrid: gradients in e5m2
    bf16_layers_at_start: int = 0  # first decoder layers that stay in bfloat16
    bf16_layers_at_end: int = 0  # last decoder layers that stay in bfloat16


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

    # megatron; fsdp, for models of transformers; or the import path of a Backend
    # (docs/plugs.md).
    backend: str = "megatron"
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = 8192  # per rank; prompts and responses, packed
    # logits and probabilities in memory at once; 0: 512 MiB on a GPU, 32 MiB on a CPU
    logprob_chunk_bytes: int = 0
    moe: MoEConfig = field(default_factory=MoEConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    fp8: Float8Config = field(default_factory=Float8Config)
    mtp_loss_coef: float = 0.0  # weight of the multi-token prediction loss
    # weight of the loss of sparse attention's indexers; 0 freezes them
    indexer_loss_coef: float = 0.0
    # keys of sparse attention in the update: off (the indexers'), record (of the log-prob pass)
    indexer_replay: str = "off"
    threads_per_rank: int = 1  # CPU threads per rank
    modules: str = "auto"  # te (Transformer Engine, GPU), torch, or auto (te if installed)
    # fields of Megatron's TransformerConfig, DDP and optimizer, by name: docs/passthrough.md
    megatron: dict[str, Any] = field(default_factory=dict)


@dataclass
class CriticConfig(EngineConfig):
    """The value model, if algorithm.advantage needs values, as gae does."""

    model_path: str = ""  # a value or language model; empty: the actor's first weights
    warmup_steps: int = 0  # first steps, with updates of the critic only
    clip_range: float = 0.2  # largest change of a value in an update
    loss_aggregation: str = "token_mean"  # how token losses are averaged


@dataclass
class RewardModelConfig(EngineConfig):
    """A frozen reward model, whose score is added to the reward."""

    model_path: str = ""  # a checkpoint of mcore-rl rm; empty: no reward model
    weight: float = 1.0  # weight of the score


@dataclass
class TeacherConfig(EngineConfig):
    """Frozen models that algorithm.distillation learns from."""

    # {NAME: {model_path: ..., weight: 1.0, layout: {tp: 2}}}; no path: the actor's first weights
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    column: str = ""  # data column with the teacher's name; empty: all teach


@dataclass
class SGLangConfig:
    """The server of rollout.backend=sglang: docs/rollout.md."""

    url: str = ""  # of a server that runs, as http://127.0.0.1:30000; empty: the run starts servers
    api_key_env: str = ""  # environment variable with the key of the server at url; empty: none
    python: str = ""  # interpreter of an environment with sglang; empty: that of the run
    # of `sglang.launch_server`, by name, with "_"; false: --no-NAME
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class SpeculativeConfig:
    """Speculative decoding with the model's own prediction layers: docs/rollout.md."""

    num_tokens: int = 0  # tokens that the prediction layer drafts per step of a response; 0: none


@dataclass
class RolloutConfig:
    """The generation servers."""

    backend: str = "vllm"  # vllm, sglang, or the import path of a GenerationServer (docs/plugs.md)
    num_servers: int = 1  # each with a full copy of the model
    tp: int = 1  # tensor parallel inside a server
    # data-parallel attention ranks of a server, of tp ranks each; with ep: docs/rollout.md
    dp: int = 1
    nodes_per_server: int = 1  # nodes that a server spans, with equal shares of its dp * tp ranks
    ep: bool = False  # expert parallel over the dp * tp ranks
    temperature: float = 1.0  # sampling temperature; above 0
    # sample from the likeliest tokens of this total probability; below 1: docs/rollout.md
    top_p: float = 1.0
    top_k: int = 0  # sample from this many likeliest tokens; 0: all
    stop: list[str] = field(default_factory=list)  # texts that end a response
    max_response_tokens: int = 1024  # longer responses are truncated
    # concurrent sequences of a server; null: as `vllm serve` (docs/rollout.md)
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None  # tokens of a forward pass; null: likewise
    kv_cache_bytes: int = 4 << 30  # KV cache of each worker of a server
    # first weights: checkpoint, dummy (sent by the trainer), auto (dummy after a resume or restart)
    load_format: str = "auto"
    # weights of servers: null (in model.dtype), or fp8_block (DeepSeek-V3's float8: docs/float8.md)
    quantization: str | None = None
    # Weights of a LoRA actor on the servers: merged, or adapter (only adapters are sent, which vLLM
    # adds to the model that it has loaded).
    lora: str = "merged"
    max_images: int = 8  # images of a prompt and its response, for models that take them
    max_restarts: int = 3  # maximum restarts per server
    cores: str = ""  # CPU lane: cores of each worker, as "0|1"; empty: docs/rollout.md
    # arguments of vLLM's engine (EngineArgs), by name: docs/passthrough.md
    engine: dict[str, Any] = field(default_factory=dict)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @property
    def num_workers(self) -> int:
        """Workers of a server, each on a device of its own."""
        return self.dp * self.tp

    @property
    def workers_per_node(self) -> int:
        """Workers of a server on each of its nodes."""
        return self.num_workers // self.nodes_per_server


@dataclass
class AgentConfig:
    # single_turn, tools, environment, user, program, verifiers, or an import path: docs/agents.md
    loop: str = "single_turn"
    settings: dict[str, Any] = field(default_factory=dict)  # of the loop
    # calculator, python, search, import paths of functions or classes with @tool, or a file.yaml
    tools: list[str] = field(default_factory=list)
    search_file: str = ""  # JSONL with a column `text`
    mcp_servers: list[str] = field(default_factory=list)  # URLs or commands of MCP servers
    sandbox: dict[str, Any] = field(default_factory=dict)  # of the tool python: docs/sandbox.md
    # of loop=environment: code, countdown, guessing, openenv, or an import path
    environment: str = ""
    environment_settings: dict[str, Any] = field(default_factory=dict)  # of the environment
    codec: str = "auto"  # tokens of turns: renderers, template, or auto
    max_turns: int = 8  # turns of the policy in a trajectory
    max_turn_tokens: int = 0  # tokens of a turn; 0: the rest of rollout.max_response_tokens
    timeout_s: float = 600.0  # limit on a trajectory, which is then cut off
    tool_timeout_s: float = 30.0  # limit on a tool call


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
    max_rows: int = 0  # responses in a table, whole trajectories; 0: all
    # tokens in a table, likewise, about 9 bytes each on disk; 0: all
    max_tokens: int = 4_000_000
    tokens: bool = True  # columns of each token; false: texts only
    num_shown: int = 1  # shortened responses on the screen each step


@dataclass
class CurriculumConfig:
    """Prompts drawn by the success rate p of their earlier responses."""

    # learnability, window or an import path (docs/sample_policies.md); empty: each prompt once an
    # epoch
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # of that function
    success: str = "reward"  # the score that decides: reward, or a part of it
    min_reward: float = 1.0  # a response succeeds from this score on
    decay: float = 0.5  # weight of earlier responses when a prompt is drawn again
    min_weight: float = 0.05  # smallest weight of a prompt


@dataclass
class DataConfig:
    train_file: str = ""  # parquet, JSONL, a folder, or an import path: docs/data.md
    train_files: list[str] = field(default_factory=list)  # several, instead of train_file
    # relative frequency of each of train_files; empty: each prompt of all once an epoch
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # held-out set `test`
    # several, by names in metrics: {math: math.parquet, code: code.parquet}
    test_files: dict[str, str] = field(default_factory=dict)
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, passed to the reward
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    images_column: str = ""  # images of a row, for models that take them; empty: none
    max_image_pixels: int = 1 << 24  # larger images are refused
    images_dir: str = ""  # folder of images that rows name by path; empty: that of the data file
    max_prompt_tokens: int = 1024  # with the chat template applied, and all tokens of images
    long_prompts: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class RewardConfig:
    name: str = "final_number"  # a name in the reward registry, or an import path
    settings: dict[str, Any] = field(default_factory=dict)  # of that reward
    # instead of reward.name a weighted sum, by names in metrics:
    # {math: {weight: 1.0}, brief: {name: overlong, settings: {buffer_tokens: 512}}}
    terms: dict[str, dict[str, Any]] = field(default_factory=dict)
    text: str = "answer"  # that rewards read: answer (what follows thoughts), or response (all)
    on_error: str = "stop"  # stop (the run), drop (the response) or zero (its reward)
    timeout_s: float = 60.0  # limit on a call, unless the reward has its own
    num_processes: int = 2  # per server and reward: math, and functions that are not async
    shuffle: bool = False  # control experiment: permute rewards at random


@dataclass(frozen=True)
class GRPOSettings:
    """Settings of `algorithm.advantage=grpo`."""

    normalize_by_std: bool = True  # divide by the standard deviation of the group


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

    # importance weights: off, token, sequence, geometric; null: token for older samples and
    # rollout.quantization without another correction, else off
    level: str | None = None
    method: str = "truncate"  # weights out of bounds: truncate (to weight_max), or mask (to 0)
    weight_min: float = 0.0  # of method=mask
    weight_max: float = 2.0  # largest weight
    normalize: bool = False  # divide weights by their mean over the batch
    # rules that reject tokens and sequences: {sequence_mean_k3: 0.01, veto: [1.0e-4, 1.0e4]}
    reject: dict[str, Any] = field(default_factory=dict)
    unbiased_kl: bool = False  # multiply the KL loss by the ratio
    use_rollout_log_probs: bool = False  # in place of the trainer's, unchecked

    @property
    def has_weights(self) -> bool:
        return self.level not in (None, "off")


@dataclass
class ReplayConfig:
    """Groups of earlier steps, trained on again in place of new ones."""

    share: float = 0.0  # of a step's groups
    max_age: int = 4  # steps since a group was generated
    priority: str = "spread"  # spread, rare_success, uniform, or an import path
    priority_settings: dict[str, Any] = field(default_factory=dict)  # of that function


@dataclass
class FilterConfig:
    """Selection of the generated samples that a step trains on: docs/sample_policies.md."""

    group_filter: str = ""  # drop_uniform, or an import path; empty: keep all
    group_filter_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    max_rounds: int = 1  # rounds of generation until trainer.prompts_per_step groups pass
    prompts_per_round: int = 0  # 0: the new groups of a step
    if_short: str = "train"  # too few groups: train, or stop
    keep_responses: int = 0  # responses of a group; 0: all
    keep_by: str = "max_variance"  # best, best_and_worst, max_variance, random or an import path
    keep_by_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    advantages_of: str = "kept"  # responses that advantages compare: kept or generated
    mask_truncated: bool = False  # no loss on truncated trajectories
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class DistillationConfig:
    """Distillation from the models of `teacher`, on responses of the policy itself."""

    loss: str = "off"  # off, sampled_kl, reverse_kl or forward_kl: docs/algorithms.md
    coef: float = 1.0  # its weight
    top_k: int = 32  # tokens that reverse_kl and forward_kl compare
    use_reward: bool = False  # train on rewards too; false: only metrics


@dataclass
class AlgorithmConfig:
    """Functions are built in, or your own: docs/algorithms.md."""

    advantage: str = "grpo"  # advantages from rewards
    advantage_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    group_size: int = 8  # responses per prompt
    filter: FilterConfig = field(default_factory=FilterConfig)
    num_mini_batches: int = 1  # optimizer steps per trainer step
    loss: str = "ppo_clip"  # loss of each token, without KL and entropy
    loss_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    loss_aggregation: str = "token_mean"  # how token losses are averaged
    # of that function
    loss_aggregation_settings: dict[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # nats per token, to which the weight of the bonus adapts; null: a fixed weight
    entropy_target: float | None = None
    entropy_coef_step: float = 0.005  # its change per step
    entropy_coef_max: float = 1.0  # its maximum
    top_entropy_share: float = 1.0  # share of tokens to train on, of highest entropy
    cross_entropy_coef: float = 0.0  # weight of the loss of tokens not sampled
    kl_coef: float = 0.0  # weight of the KL to the reference; 0 loads none
    kl_placement: str = "loss"  # loss or reward
    kl_target: float | None = None  # nats per token, to which the weight of the KL adapts
    kl_horizon: int = 10000  # samples in which it changes by a fifth at most
    kl_estimator: str = "k3"  # of the KL from one sample
    kl_estimator_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    log_prob_pass: str = "auto"  # before the update: always, or auto (if needed)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass
class WeightSyncConfig:
    # colocated, disaggregated (servers on own devices), full_export (a checkpoint): docs/weights.md
    method: str = "colocated"
    # of disaggregated: process_group (gloo or NCCL), nixl, or an import path (docs/plugs.md)
    transport: str = "process_group"
    verify: str = "sampled"  # tensors compared bit for bit: off, sampled (1 in 16) or full
    bucket_bytes: int = 64 << 20  # of a message; a rank stages twice as much
    bind_address: str = "auto"  # where the trainer's rank 0 listens; auto: its Ray node's address
    timeout_s: float = 600.0  # limit on an update, and on the first rendezvous


@dataclass
class TimeoutsConfig:
    """Limits on a call of all ranks of a model, or of all servers."""

    start_s: float = 600.0  # start and load; unless set, 5 s more per GB of model.path
    call_s: float = 1800.0  # any other call


@dataclass
class AsynchronousConfig:
    """Settings of trainer.mode=fully_async: docs/async_training.md."""

    max_groups: int = 0  # groups generated at once; 0: what staleness allows
    oversampling: float = 0.0  # extra groups, as a share of trainer.prompts_per_step
    max_waiting_samples: int = 0  # generated for later steps; 0: what staleness allows
    recompute_cache: bool = False  # of unfinished responses, with new weights


@dataclass
class TrainerConfig:
    # sync, one_step_off or fully_async (docs/async_training.md), or an import path (docs/plugs.md)
    mode: str = "sync"
    # versions by which a token may be older than the policy; null: 0 with sync, 1 with
    # one_step_off (the most there), 2 with fully_async
    staleness: int | None = None
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    num_steps: int = 100  # trainer steps
    prompts_per_step: int = 64  # a step has algorithm.group_size samples of each
    # stop if trainer and servers differ by more nats at a token; null: docs/rollout.md
    max_logprob_gap: float | None = None
    mean_logprob_gap: float | None = None  # likewise on average
    eval_samples: int = 0  # prompts of each held-out set per evaluation; 0: all
    save_every: int = 0  # steps between training checkpoints; 0: none
    # tensorboard, wandb, mlflow, swanlab, or import paths: docs/watching.md
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project or experiment

    @property
    def gap_bounds(self) -> dict[str, float]:
        """The largest gaps of log-probs that a step may have, by name, as `resolve` fills them."""
        return {name: getattr(self, name) for name in ("max_logprob_gap", "mean_logprob_gap")}


@dataclass
class CheckpointConfig:
    """Training checkpoints, output_dir/checkpoints/step_NNNNNN, to resume from."""

    keep: int = 2  # newest checkpoints to keep
    # metric of a checkpoint to keep: eval/test/reward for its highest, -eval/test/loss for its
    # lowest value
    keep_best: str = ""
    hf_every: int = 0  # steps between exports to output_dir/hf/step_NNNNNN; 0: none
    # URL of fsspec, such as s3://bucket/name, that output_dir/checkpoint is copied to at the end
    export_to: str = ""
    async_save: bool = False  # train while it is written, from a second copy on the host


@dataclass
class ProfileConfig:
    """Traces of training ranks by torch.profiler: docs/report.md."""

    steps: list[int] = field(default_factory=list)  # trainer steps to trace; empty: none
    ranks: list[int] = field(default_factory=lambda: [0])  # of each model of the run
    max_trace_bytes: int = 1 << 30  # largest trace, before compression; a larger one is dropped
    # also a snapshot of the allocator's memory, for https://pytorch.org/memory_viz; GPU lane
    memory: bool = False


@dataclass
class WarmStartConfig:
    """Supervised training before reinforcement learning."""

    num_steps: int = 0  # optimizer steps; 0: none
    batch_size: int = 96  # samples per optimizer step
    train_file: str = ""  # as data.train_file, with the response column
    # target text; empty: the prompt column has conversations, and the assistant's messages are
    # trained on
    response_column: str = "response"
    moe_aux_loss_coef: float = 0.0  # weight of the load-balancing loss
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class PlacementConfig:
    """Pools of devices, by any name: docs/controller.md. own: a pool without other roles."""

    actor: str = "shared"  # shared, own or a name
    reference: str = "shared"  # model of the KL; shared, own or a name
    critic: str = "shared"  # shared, own or a name
    reward_model: str = "shared"  # shared, own or a name
    teacher: str = "shared"  # each of them; shared, own or a name
    # auto: shared with trainer.mode=sync unless weight_sync.method=disaggregated, else own
    rollout: str = "auto"


@dataclass
class TaskConfig:
    """A synthetic task with a tokenizer, model and data of its own."""

    name: str = ""  # last_digit, calculator, code, countdown, pictures
    worked_share: float = 0.35  # share of warm-start examples that show their work


@dataclass
class RLConfig:
    seed: int = 0  # of data order, sampling, initial weights; up to 4294967295
    output_dir: str = "outputs/rl"  # folder of all outputs; new or empty, unless resumed
    resume: str = "never"  # never, auto (from output_dir, else a new run), or a checkpoint's folder
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    # of Ray, for batches; 0: as the settings need, at least 512 MiB, at most 80 % of free /dev/shm
    # and cgroup memory
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
    # frozen models of agents: {NAME: {path: ..., num_servers: 1, tp: 1}}, or {NAME: {adapter: ...}}
    # for one on the policy's servers (docs/agents.md)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sample_log: SampleLogConfig = field(default_factory=SampleLogConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

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

    train_file: str = ""  # parquet, JSONL, a folder, or an import path: docs/data.md
    train_files: list[str] = field(default_factory=list)  # several, instead of train_file
    # relative frequency of each of train_files; empty: each row of all once an epoch
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # held-out set `test`
    # several, by names in metrics: {chat: chat.jsonl, code: code.jsonl}
    test_files: dict[str, str] = field(default_factory=dict)
    # chat messages; trained on: those of the assistant, or as a field `train` says
    messages_column: str = "messages"
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    images_column: str = ""  # images of a row, for models that take them; empty: none
    max_image_pixels: int = 1 << 24  # larger images are refused
    images_dir: str = ""  # folder of images that rows name by path; empty: that of the data file
    train_on_prompt: bool = False  # train on all tokens
    max_tokens: int = 4096  # most tokens of a conversation
    long_rows: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)


@dataclass
class PairsConfig:
    """Preference pairs, in the same kinds of files."""

    train_file: str = ""  # rows with the prompt, chosen and rejected columns
    train_files: list[str] = field(default_factory=list)  # several, instead of train_file
    # relative frequency of each of train_files; empty: each row of all once an epoch
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # held-out set `test`
    # several, by names in metrics: {chat: chat.jsonl, code: code.jsonl}
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
    num_epochs: float = 1.0  # passes over all rows; with data.train_weights as many rows
    num_steps: int = 0  # optimizer steps; 0: as num_epochs says
    batch_size: int = 64  # conversations or pairs of an optimizer step
    eval_samples: int = 0  # rows of each held-out set per evaluation; 0: all
    save_every: int = 0  # steps between training checkpoints; 0: none
    # tensorboard, wandb, mlflow, swanlab, or import paths: docs/watching.md
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project or experiment


@dataclass
class HeldOutConfig:
    """Evaluation on held-out rows; there is always one after training."""

    before: bool = True  # evaluate before training
    every: int = 0  # steps between evaluations during training; 0: none


@dataclass
class ReferenceConfig:
    """The frozen model of a loss: the weights of model.path, or with LoRA the base weights."""

    placement: str = "shared"  # devices: shared (of the trained model) or own (as many)


@dataclass
class TrainConfig:
    """Settings of all jobs that train on examples."""

    seed: int = 0  # data order and adapters; up to 4294967295
    output_dir: str = "outputs/train"  # folder of all outputs; new or empty, unless resumed
    resume: str = "never"  # never, auto (from output_dir, else a new run), or a checkpoint's folder
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: StepsConfig = field(default_factory=StepsConfig)
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

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
    loss_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


@dataclass
class RMConfig(TrainConfig):
    """A reward model, trained on preference pairs."""

    output_dir: str = "outputs/rm"  # folder of all outputs; new or empty, unless resumed
    data: PairsConfig = field(default_factory=PairsConfig)


# Settings of the commands that train.
JOB_SCHEMAS = {"rl": RLConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig}


@dataclass
class EvaluatedModelConfig(ModelConfig):
    path: str = ""  # a Hugging Face checkpoint, or the output_dir of a run
    chat_date: str = ""  # as of the run; empty: that of the run, else 2024-07-26


@dataclass
class SetsConfig:
    # files (docs/data.md) by names of your choice, as data.sets.math=math.parquet
    sets: dict[str, str] = field(default_factory=dict)
    num_prompts: int = 0  # first prompts of each set; 0: all
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, passed to the reward
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    images_column: str = ""  # images of a row, for models that take them; empty: none
    max_image_pixels: int = 1 << 24  # larger images are refused
    images_dir: str = ""  # folder of images that rows name by path; empty: that of the data file
    max_prompt_tokens: int = 1024  # with the chat template applied, and all tokens of images
    long_prompts: str = "refuse"  # longer ones: refuse (the file) or drop (the rows)


@dataclass
class SamplingConfig(RolloutConfig):
    """The servers that generate, and how they sample."""

    n: int = 1  # responses per prompt, 1 to 1000
    temperature: float = 1.0  # sampling temperature; 0 is greedy
    top_p: float = 1.0  # total probability of the tokens to sample from


@dataclass
class ScoringConfig:
    # of pass@k and majority@k, up to rollout.n; empty: 1, 2, 4, ... and rollout.n
    ks: list[int] = field(default_factory=list)
    term: str = ""  # term of reward.terms that decides correctness; empty: the sum
    correct_from: float = 1.0  # a response is correct from this reward on


@dataclass
class EvalConfig:
    seed: int = 0  # sampling; up to 4294967295
    output_dir: str = "outputs/eval"  # folder of all outputs; new or empty, unless resumed
    resume: str = "never"  # never, or auto: continue with the incomplete sets of output_dir
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
