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
    vpp: int = 1  # model chunks per pipeline rank (interleaved schedule); above 1 needs pp above 1
    # Decoder layers of the first of the pp * vpp chunks, if different from the others. 0 leaves the
    # embedding alone on its chunk.
    first_stage_layers: int | None = None
    # Decoder layers of the last of those chunks. 0 leaves the output head alone on it.
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass
class ModelConfig:
    path: str = ""  # folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer
    # Dtype of parameters and activations: float32, bfloat16 or auto (float32 on the CPU lane,
    # bfloat16 on the GPU lane).
    dtype: str = "auto"
    # Date, YYYY-MM-DD, that chat templates write as that of today (Llama-3's, for one). The same in
    # each prompt of a run: of rows, of agents and of frozen models.
    chat_date: str = "2024-07-26"


@dataclass
class OptimizerConfig:
    lr: float = 1e-6  # learning rate after warm-up
    min_lr: float = 0.0  # final learning rate of a decaying schedule
    schedule: str = "constant"  # after warm-up: constant, linear, cosine or wsd
    warmup_steps: int = 0  # optimizer steps over which the learning rate rises linearly to lr
    wsd_decay_steps: int = 0  # last steps, in which schedule wsd decays linearly to min_lr
    beta1: float = 0.9  # Adam's beta1
    beta2: float = 0.95  # Adam's beta2
    eps: float = 1e-8  # Adam's epsilon
    weight_decay: float = 0.0  # decoupled, as in AdamW
    clip_grad: float = 1.0  # maximum global gradient norm
    max_skipped_steps: int = 0  # in a row, whose gradients are not finite; one more ends the run
    distributed: bool = False  # shard the optimizer state over data-parallel ranks
    overlap: bool = False  # overlap gradient reduction (and weight gathering) with computation
    cpu_offload: bool = False  # Adam and its state on the host; GPU lane, needs distributed


@dataclass
class MoEConfig:
    """Routers and experts of MoE models."""

    dispatcher: str = "alltoall"  # how tokens are sent to their experts: alltoall or allgather
    # Load balance is computed per micro-batch (aux_loss), or over all ranks and the micro-batches
    # of the mini-batch so far (global_aux_loss).
    aux_loss: str = "aux_loss"
    aux_loss_coef: float = 0.0  # weight of the load-balancing loss; 0 disables it
    bias_update_rate: float = 0.0  # update rate of the router's selection bias; 0 freezes it
    # Experts that the trainer uses: off (the router chooses), record (in the update those of the
    # log-prob pass) or rollout (in both those that the servers have used; of the actor of rl only).
    router_replay: str = "off"


@dataclass
class RecomputeConfig:
    """Activations that the backward pass recomputes instead of keeping them."""

    granularity: str = "none"  # none, selective (the modules below) or full (whole layers)
    modules: list[str] = field(default_factory=lambda: ["core_attn"])  # for selective recompute
    num_layers: int = 1  # layers per unit of full recompute: only the input of a unit is kept


@dataclass
class LoRAConfig:
    """Low-rank adapters on linear layers; the base weights stay frozen."""

    rank: int = 0  # rank of the adapters; 0 trains all weights, without adapters
    alpha: float = 32.0  # adapters are scaled by alpha / rank
    targets: list[str] = field(  # Megatron's names of the linear layers that get adapters
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )


@dataclass
class EngineConfig:
    """A training engine: its layout, optimizer and memory."""

    backend: str = "megatron"  # training engine; allowed: megatron
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = 8192  # packed tokens, prompt and response
    # Limit on logits and probabilities in memory at a time; 0: 512 MiB on a GPU, 32 MiB on a CPU.
    logprob_chunk_bytes: int = 0
    moe: MoEConfig = field(default_factory=MoEConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    mtp_loss_coef: float = 0.0  # weight of the multi-token prediction loss; 0 disables it
    threads_per_rank: int = 1  # CPU threads per rank
    # Implementation of the layers: te (Transformer Engine, on a GPU), torch (plain torch, on both
    # lanes) or auto (te if it is installed).
    modules: str = "auto"


@dataclass
class CriticConfig(EngineConfig):
    """The value model's engine; there is one if algorithm.advantage needs values, as gae does."""

    model_path: str = ""  # of a value model or a language model; empty: what the actor begins with
    warmup_steps: int = 0  # first steps, in which only the critic is updated
    clip_range: float = 0.2  # of the move of a value from what it was, in the unit of the returns
    loss_aggregation: str = "token_mean"  # how token losses are averaged


@dataclass
class RewardModelConfig(EngineConfig):
    """A reward model that is not trained: its score of a response is added to the reward."""

    model_path: str = ""  # of a checkpoint of mcore-rl rm; empty: there is none
    weight: float = 1.0  # of its score


@dataclass
class TeacherConfig(EngineConfig):
    """Models that are not trained and that algorithm.distillation learns from."""

    # By name: {math: {model_path: ..., weight: 1.0, layout: {tp: 2}}}; no path: the actor's first.
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    column: str = ""  # of data.train_file, with the name of a prompt's teacher; empty: all teach


@dataclass
class RolloutConfig:
    """The servers that generate."""

    backend: str = "vllm"  # vllm, or the import path of a GenerationServer (docs/plugs.md)
    num_servers: int = 1  # each has a full copy of the model
    tp: int = 1  # tensor parallel inside a server
    nodes_per_server: int = 1  # nodes that a server spans; each has as many of its tp workers
    ep: bool = False  # expert parallel over the tp ranks of a server
    temperature: float = 1.0  # sampling temperature; above 0
    # Sample from the likeliest tokens that have this probability together. Below 1, log-probs of
    # servers and trainer differ: training then needs algorithm.correction.level and bounds on the
    # gaps (docs/rollout.md). evaluation.top_p does not.
    top_p: float = 1.0
    top_k: int = 0  # sample from so many likeliest tokens, as with top_p below 1; 0: from all
    # A response ends where one of these is in its text. The tokens up to the one that completes it
    # are the response.
    stop: list[str] = field(default_factory=list)
    max_response_tokens: int = 1024  # longer responses are truncated
    max_num_seqs: int = 256  # sequences that a server runs at the same time
    kv_cache_bytes: int = 4 << 30  # key/value cache of each worker of a server
    max_restarts: int = 3  # maximum restarts per server
    # CPU lane: cores of each worker, such as "0|1", one thread per core. If empty, the cores are
    # split among the workers, and the worker of tp=1 gets one thread.
    cores: str = ""


@dataclass
class AgentConfig:
    # single_turn: one response to a prompt; tools: turns with calls of `tools`, until one has none;
    # environment: turns with `environment`; user: a conversation with a user whom one of `models`
    # plays; program: what a client of OpenAI's API asks (docs/endpoint.md); verifiers: rollouts of
    # an environment of that package; or the import path of a class (docs/agents.md).
    loop: str = "single_turn"
    settings: dict[str, Any] = field(default_factory=dict)  # of that loop
    # Tools by name (calculator, python, search), as the import path of a function or class with
    # @tool, or as a file.yaml of function schemas.
    tools: list[str] = field(default_factory=list)
    search_file: str = ""  # JSONL with a column text, for the tool search
    # Servers whose tools are offered, too: URLs, or commands, started once by each worker.
    mcp_servers: list[str] = field(default_factory=list)
    sandbox: dict[str, Any] = field(default_factory=dict)  # of the tool python: docs/sandbox.md
    # Of loop=environment: code, countdown, guessing, openenv, or the import path of a class.
    environment: str = ""
    environment_settings: dict[str, Any] = field(default_factory=dict)  # of that environment
    codec: str = "auto"  # what writes turns as tokens: renderers, template, or auto
    max_turns: int = 8  # of the policy in a trajectory
    max_turn_tokens: int = 0  # that a turn may have; 0: all that is left of max_response_tokens
    timeout_s: float = 600.0  # of a trajectory; one that takes longer ends as it is
    tool_timeout_s: float = 30.0  # of a call of a tool without a limit of its own


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
    """Evaluation on held-out prompts."""

    before: bool = True  # evaluate before training; there is always an evaluation after it
    every: int = 0  # steps from one evaluation to the next while training goes on; 0: none
    num_samples: int = 1  # responses per prompt
    temperature: float | None = None  # 0 is greedy; null: rollout.temperature
    top_p: float | None = None  # null: rollout.top_p
    top_k: int | None = None  # null: rollout.top_k
    stop: list[str] | None = None  # null: rollout.stop
    max_response_tokens: int | None = None  # null: rollout.max_response_tokens


@dataclass
class SampleLogConfig:
    """Tables of the responses of a step, and responses on the screen."""

    every: int = 1  # steps from one table samples/step_NNNNNN.parquet to the next; 0 writes none
    max_rows: int = 0  # responses in such a table, of whole trajectories; 0: all of the step
    # Tokens of prompts and responses in such a table, of whole trajectories, of one at least: about
    # 9 bytes each on disk. 0: all of the step.
    max_tokens: int = 4_000_000
    tokens: bool = True  # what `mcore-rl samples` shows of each token; false: texts alone
    num_shown: int = 1  # responses that are shown on the screen each step, in short


@dataclass
class CurriculumConfig:
    """Prompts drawn by the success rate p of their earlier responses."""

    # The weight of a prompt of rate p among all: learnability (4 p (1 - p)), window (1 from low to
    # high), or an import path. Empty: prompts come in random order, each once an epoch.
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    success: str = "reward"  # what says that a response has succeeded: reward, or a part of it
    min_reward: float = 1.0  # a response with at least this much of it has
    decay: float = 0.5  # what earlier responses still count when a prompt is drawn again
    min_weight: float = 0.05  # the smallest weight of a prompt


@dataclass
class DataConfig:
    # Rows with the prompt column and the answer column: a parquet file, a file.jsonl, a folder of
    # save_to_disk of Hugging Face's datasets, or the import path of a function that returns rows.
    train_file: str = ""
    train_files: list[str] = field(default_factory=list)  # several of them, in its place
    # How often a prompt is drawn from each of train_files, in relation to the others. Empty: each
    # prompt of all files comes once an epoch.
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # as train_file, for evaluation; the set is called test; empty: none
    # Several sets for evaluation, by their names in metrics, in its place:
    # {math: math.parquet, code: code.parquet}.
    test_files: dict[str, str] = field(default_factory=dict)
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, passed to the reward
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    max_prompt_tokens: int = 1024  # with the chat template applied
    long_prompts: str = "refuse"  # those with more tokens: refuse the file, or drop the rows
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass
class RewardConfig:
    name: str = "final_number"  # a name in the reward registry, or an import path
    settings: dict[str, Any] = field(default_factory=dict)  # settings of that reward
    # A weighted sum of several rewards in place of reward.name, by their names in metrics:
    # {math: {weight: 1.0}, brief: {name: overlong, settings: {buffer_tokens: 512}}}
    terms: dict[str, dict[str, Any]] = field(default_factory=dict)
    # If a reward raises, returns no valid result or takes too long: stop (the run ends), drop (the
    # response is left out of the step) or zero (its reward is 0).
    on_error: str = "stop"
    # Limit on one call of a reward, unless that has a setting timeout_s of its own.
    timeout_s: float = 60.0
    # Processes for each reward that is called in processes of its own, as math is, and functions of
    # yours that are not async; for each server.
    num_processes: int = 2
    shuffle: bool = False  # control experiment: permute the rewards of a batch at random


@dataclass(frozen=True)
class GRPOSettings:
    """Settings of `algorithm.advantage=grpo`."""

    normalize_by_std: bool = True  # divide group advantages by their standard deviation


@dataclass(frozen=True)
class PPOClipSettings:
    """Settings of `algorithm.loss=ppo_clip`."""

    clip_ratio_low: float = 0.2  # ratios are clipped at 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # and at 1 + clip_ratio_high
    dual_clip: float | None = None  # most that a ratio counts with a negative advantage; null: none

    def __post_init__(self) -> None:
        check_between("clip_ratio_low", self.clip_ratio_low, 0, 1)
        check_at_least("clip_ratio_high", self.clip_ratio_high, 0)
        if self.dual_clip is not None:
            check_at_least("dual_clip", self.dual_clip, 1)


@dataclass
class CorrectionConfig:
    """Correction of differences between the probabilities of servers and trainer.

    The ratio is the trainer's probability divided by the server's.
    """

    # Importance weights from ratios of what: off, token, sequence, geometric. Default: token where
    # samples are older than the policy (trainer.staleness) and nothing else corrects that, else
    # off.
    level: str | None = None
    # Weights beyond the bounds: truncate (those above weight_max become weight_max) or mask (those
    # outside of weight_min to weight_max become 0).
    method: str = "truncate"
    weight_min: float = 0.0  # smallest importance weight, with method mask
    weight_max: float = 2.0  # largest importance weight
    normalize: bool = False  # divide the weights by their mean over the batch
    # Rules by which tokens and sequences are left out of the loss, each with its bound or its two
    # bounds, such as {sequence_mean_k3: 0.01, veto: [1.0e-4, 1.0e4]}.
    reject: dict[str, Any] = field(default_factory=dict)
    unbiased_kl: bool = False  # multiply the KL in the loss by the ratio of policy and server
    # Take the servers' log-probs for the trainer's, which are not computed: nothing is checked.
    use_rollout_log_probs: bool = False

    @property
    def has_weights(self) -> bool:
        return self.level not in (None, "off")


@dataclass
class ReplayConfig:
    """Groups of earlier steps, trained on again in place of new ones."""

    share: float = 0.0  # of the groups of a step; 0: none
    max_age: int = 4  # most steps since a group was generated
    # The weight of a group among those that may be drawn: spread (of its rewards), rare_success,
    # uniform, or an import path.
    priority: str = "spread"
    priority_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function


@dataclass
class FilterConfig:
    """Selection of the generated samples that a step trains on: docs/sample_policies.md."""

    # Which groups a step keeps: drop_uniform (those whose rewards are not all the same), or an
    # import path. Empty: all.
    group_filter: str = ""
    group_filter_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    # Most rounds of generation in a step, until it has trainer.prompts_per_step groups that pass.
    max_rounds: int = 1
    prompts_per_round: int = 0  # 0: as many as the step has groups
    if_short: str = "train"  # with fewer groups after the last round: train on them, or stop
    keep_responses: int = 0  # responses of a group that are trained on; 0: all
    keep_by: str = "max_variance"  # best, best_and_worst, max_variance, random or an import path
    keep_by_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    advantages_of: str = "kept"  # responses that advantages compare: kept, or all generated
    mask_truncated: bool = False  # no loss for trajectories whose last turn is cut off
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class DistillationConfig:
    """Distillation from the models of `teacher`, on responses of the policy itself."""

    # off, sampled_kl (the KL to the teacher, estimated at each token that was sampled, is taken off
    # its advantage), or a loss: reverse_kl, forward_kl, over the teacher's likeliest tokens.
    loss: str = "off"
    coef: float = 1.0  # its weight
    top_k: int = 32  # tokens of the teacher that reverse_kl and forward_kl compare
    use_reward: bool = False  # train on the rewards, too; false: they are metrics only


@dataclass
class AlgorithmConfig:
    """Functions are built-in names, or import paths of your own: see docs/algorithms.md."""

    advantage: str = "grpo"  # function that computes advantages from rewards
    advantage_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    group_size: int = 8  # responses per prompt
    filter: FilterConfig = field(default_factory=FilterConfig)
    num_mini_batches: int = 1  # optimizer steps per trainer step
    loss: str = "ppo_clip"  # loss of each token, without KL and entropy
    loss_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    loss_aggregation: str = "token_mean"  # how token losses are averaged
    # Settings of that function.
    loss_aggregation_settings: dict[str, Any] = field(default_factory=dict)
    entropy_coef: float = 0.0  # weight of the entropy bonus; 0 disables it
    # Change the weight by entropy_coef_step each step, up where the entropy is below this many nats
    # a token; there is no bonus above it. null: the weight is fixed.
    entropy_target: float | None = None
    entropy_coef_step: float = 0.005  # that change
    entropy_coef_max: float = 1.0  # the largest weight that comes of it
    top_entropy_share: float = 1.0  # share of the batch's tokens, of highest entropy, to train on
    cross_entropy_coef: float = 0.0  # weight of the cross entropy of tokens not by the policy
    kl_coef: float = 0.0  # weight of the KL to the reference model; 0 loads no reference
    kl_placement: str = "loss"  # where the KL counts: loss, or reward (taken off it at each token)
    kl_target: float | None = None  # change the weight until the KL is this many nats a token
    kl_horizon: int = 10000  # samples in which kl_target changes the weight by up to a fifth
    kl_estimator: str = "k3"  # estimator of the KL from one sample
    kl_estimator_settings: dict[str, Any] = field(default_factory=dict)  # settings of that function
    # The pass that computes the trainer's log-probs before the update: always, or auto (none where
    # a trainer step has one optimizer step, whose forward pass gives the same numbers, and no
    # setting needs them earlier: docs/algorithms.md).
    log_prob_pass: str = "auto"
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass
class WeightSyncConfig:
    # "colocated" and "disaggregated" send each worker of a server the shards that it needs: from
    # a training rank on the same device, or from ranks on other devices. "full_export" writes a
    # checkpoint under output_dir that every server loads.
    method: str = "colocated"
    # Transport of "disaggregated". "process_group": gloo, or NCCL with GPUs. "nixl": NVIDIA's NIXL,
    # if it is installed. Or the import path of a WeightTransport (docs/plugs.md).
    transport: str = "process_group"
    verify: str = "sampled"  # tensors compared bit for bit: "off", "sampled" (1 in 16) or "full"
    bucket_bytes: int = 64 << 20  # size of a message bucket; a rank stages twice as much
    # Address on which rank 0 of the trainer listens for servers. "auto": that of its Ray node.
    bind_address: str = "auto"
    timeout_s: float = 600.0  # for a push to all servers, and for the rendezvous before the first


@dataclass
class TimeoutsConfig:
    """Time limits for all ranks of a model, or all servers; beyond them the run ends with an error.

    The error says which rank did not answer, and what it was doing.
    """

    # To start processes, load the model and join the process groups; unless it is set, 5 more for
    # each GB of the files of model.path.
    start_s: float = 600.0
    call_s: float = 1800.0  # for any other call: generate, log-probs, updates of a step, export


@dataclass
class AsynchronousConfig:
    """Generation beside training, with trainer.mode=fully_async."""

    max_groups: int = 0  # groups that are generated at once; 0: as many as staleness lets in
    # Groups begun beyond those, as a share of trainer.prompts_per_step, rounded up: a step takes
    # the first that are complete. Those that are too old then are begun again, which favours short
    # responses.
    oversampling: float = 0.0
    # Samples that may be held or generated for later steps: with more no group is begun but those
    # that the next step lacks. It bounds the memory of samples. 0: as many as staleness lets in.
    max_waiting_samples: int = 0
    # Compute the KV cache of unfinished responses anew with each version of the weights. Otherwise
    # it stays that of the versions it was computed with, and only new tokens are of the new one.
    recompute_cache: bool = False


@dataclass
class TrainerConfig:
    # sync: a step generates, then trains, then pushes the weights. one_step_off: the next samples
    # are generated while these are trained on; the servers have devices of their own. fully_async:
    # servers generate all the time, and take new weights in the middle of responses.
    mode: str = "sync"
    # The most versions by which a token may be older than the policy that is trained on it. 0 with
    # sync; 0 or 1 with one_step_off, where 0 waits for the push as sync does; any with fully_async.
    # Default: 1 with one_step_off, 2 with fully_async.
    staleness: int | None = None
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    num_steps: int = 100  # each: generate, compute log-probs, update, push the weights
    prompts_per_step: int = 64  # a step has this times algorithm.group_size samples
    # Stop if log-probs of trainer and rollout differ by more than this at a token, in nats.
    # Rounding gives 1e-4 in float32 and about 1 in bfloat16, and more if a router near a tie
    # chooses another expert. Default: 0.5 in float32, 2 in bfloat16, and 20 in bfloat16 for a
    # model with experts unless actor.moe.router_replay=rollout.
    max_logprob_gap: float | None = None
    # Stop if they differ by more than this on average, which is the more sensitive test. Rounding
    # gives 1e-6 in float32 and 0.02 in bfloat16. Default: 1e-4 in float32, 0.1 in bfloat16.
    mean_logprob_gap: float | None = None
    eval_samples: int = 0  # prompts of each held-out set per evaluation; 0 uses all
    # Steps from one training checkpoint to the next, and one after the last step; 0 writes none.
    save_every: int = 0
    # Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, swanlab. The last three
    # have to be installed, and are configured by their own environment variables.
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project, or experiment, of the last three


@dataclass
class CheckpointConfig:
    """Training checkpoints, output_dir/checkpoints/step_NNNNNN, from which a run can be resumed."""

    keep: int = 2  # the last ones; older ones are removed
    # Metric of metrics.jsonl, such as "eval/test/reward" of rl or "eval/test/accuracy" of dpo: the
    # checkpoint with the highest is kept as well. "-NAME", as "-eval/test/loss" of sft: the lowest.
    # Empty: none.
    keep_best: str = ""
    hf_every: int = 0  # steps between exports to output_dir/hf/step_NNNNNN, all kept; 0 writes none
    # Train while a checkpoint is written: a step waits until it has been copied to the host,
    # which then has it twice.
    async_save: bool = False


@dataclass
class WarmStartConfig:
    """Supervised training before reinforcement learning; disabled if num_steps is 0."""

    num_steps: int = 0  # optimizer steps
    batch_size: int = 96  # samples per optimizer step
    train_file: str = ""  # as data.train_file, with the prompt column and the response column
    # Target text. Empty: the prompt column has whole conversations, with those tool schemas that
    # data.tools_column has, and what the assistant says in them is trained on.
    response_column: str = "response"
    moe_aux_loss_coef: float = 0.0  # load-balancing loss of the router
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class PlacementConfig:
    """The pool of devices of each role; "own" is a pool that no other role uses.

    Roles on the same pool take turns on its devices: sleeping servers and an offloaded trainer free
    their memory there.
    """

    actor: str = "shared"  # the trainer
    reference: str = "shared"  # the frozen model of the KL, if there is one
    critic: str = "shared"  # the value model, if there is one
    reward_model: str = "shared"  # the reward model, if there is one
    teacher: str = "shared"  # each of the teachers, if there are any
    # The generation servers. "auto": "own" with weight_sync.method="disaggregated" or
    # trainer.mode="one_step_off" or "fully_async", else "shared".
    rollout: str = "auto"


@dataclass
class TaskConfig:
    """A synthetic task that creates its own tokenizer, model and data; off if the name is empty."""

    name: str = ""  # last_digit; or, of several turns: calculator, code, countdown
    worked_share: float = 0.35  # of warm-start examples that show their work, or go about it well


@dataclass
class RLConfig:
    seed: int = 0  # of data order, initial weights of a task's model, sampling; up to 4294967295
    output_dir: str = "outputs/rl"  # folder of all outputs; new or empty, unless resumed
    # never, auto (the newest complete training checkpoint in output_dir; a new run if there is
    # none), or the folder of a training checkpoint, in this or in another output_dir.
    resume: str = "never"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    # Shared memory of a private Ray, where the columns of batches lie. 0: room for the samples of
    # two steps with all their rounds, with trainer.mode=fully_async of trainer.staleness more and
    # what is oversampled, with replay of algorithm.filter.replay.max_age more; at least 512 MiB,
    # at most 80% of what is free in /dev/shm and in the memory of the job's cgroup.
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
    # Frozen models that loops talk to, by name, each with servers on devices of its own:
    # {user: {path: ..., num_servers: 1, tp: 1}}; no path: what the actor begins with. What one may
    # have is in docs/agents.md.
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
    """A file is parquet, a file.jsonl, a folder of save_to_disk of Hugging Face's datasets, or the
    import path of a function that returns rows.
    """

    train_file: str = ""  # rows with the messages column
    train_files: list[str] = field(default_factory=list)  # several of them, in its place
    # How often a row is drawn from each of train_files, in relation to the others. Empty: each row
    # of all files comes once an epoch.
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # the same, for evaluation; the set is called test; empty: none
    # Several sets for evaluation, by their names in metrics, in its place:
    # {chat: chat.jsonl, code: code.jsonl}.
    test_files: dict[str, str] = field(default_factory=dict)
    # Chat messages: list of {role, content}. Those of the assistant are trained on; a message may
    # say otherwise with a field `train`, true or false.
    messages_column: str = "messages"
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    train_on_prompt: bool = False  # train on all tokens
    max_tokens: int = 4096  # of a conversation
    long_rows: str = "refuse"  # those with more tokens: refuse the file, or drop the rows


@dataclass
class PairsConfig:
    """Preference pairs, in the same kinds of files."""

    train_file: str = ""  # rows with the prompt, chosen and rejected columns
    train_files: list[str] = field(default_factory=list)  # several of them, in its place
    # How often a row is drawn from each of train_files, in relation to the others. Empty: each row
    # of all files comes once an epoch.
    train_weights: list[float] = field(default_factory=list)
    test_file: str = ""  # the same, for evaluation; the set is called test; empty: none
    # Several sets for evaluation, by their names in metrics, in its place:
    # {chat: chat.jsonl, code: code.jsonl}.
    test_files: dict[str, str] = field(default_factory=dict)
    prompt_column: str = "prompt"  # chat messages
    chosen_column: str = "chosen"  # chat messages that follow the prompt: the preferred answer
    rejected_column: str = "rejected"  # the other one
    margin_column: str = ""  # by how much the score of the preferred one is to be larger, for rm
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    max_tokens: int = 4096  # of a prompt with one answer
    long_rows: str = "refuse"  # those with more tokens: refuse the file, or drop the rows


AnyData = DataConfig | ConversationsConfig | PairsConfig


@dataclass
class StepsConfig:
    # Where num_steps is 0: passes over the rows of all files, or with data.train_weights as many
    # rows.
    num_epochs: float = 1.0
    num_steps: int = 0  # optimizer steps; 0: as many as num_epochs needs
    batch_size: int = 64  # conversations, or pairs, of an optimizer step
    eval_samples: int = 0  # rows of each held-out set per evaluation; 0 uses all
    # Steps from one training checkpoint to the next, and one after the last step; 0 writes none.
    save_every: int = 0
    # Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, swanlab. The last three
    # have to be installed, and are configured by their own environment variables.
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project, or experiment, of the last three


@dataclass
class HeldOutConfig:
    """Evaluation on held-out rows."""

    before: bool = True  # evaluate before training; there is always an evaluation after it
    every: int = 0  # steps from one evaluation to the next while training goes on; 0: none


@dataclass
class ReferenceConfig:
    """The frozen model of a loss that has one: model.path as it was before training."""

    # Its devices: shared (those of the trained model) or own (as many). With adapters there is no
    # other model: the trained one without them.
    placement: str = "shared"


@dataclass
class TrainConfig:
    """Settings of all jobs that train on examples."""

    seed: int = 0  # of data order and adapters; up to 4294967295
    output_dir: str = "outputs/train"  # folder of all outputs; new or empty, unless resumed
    # never, auto (the newest complete training checkpoint in output_dir; a new run if there is
    # none), or the folder of a training checkpoint, in this or in another output_dir.
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
    # Folder of a Hugging Face checkpoint, or the output_dir of a run: its checkpoint/, or else the
    # last of its hf/step_NNNNNN.
    path: str = ""
    # Date, YYYY-MM-DD, that chat templates write as that of today. Empty: that of the run, or of
    # another checkpoint 2024-07-26.
    chat_date: str = ""


@dataclass
class SetsConfig:
    # Data sets by names of your choice, as in data.sets.math=math.parquet: each a parquet file, a
    # file.jsonl, a folder of save_to_disk of Hugging Face's datasets, or the import path of a
    # function that returns rows.
    sets: dict[str, str] = field(default_factory=dict)
    num_prompts: int = 0  # the first ones of each set; 0 uses all
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, passed to the reward
    tools_column: str = ""  # tool schemas for the chat template; empty: none
    max_prompt_tokens: int = 1024  # with the chat template applied
    long_prompts: str = "refuse"  # those with more tokens: refuse the file, or drop the rows


@dataclass
class SamplingConfig(RolloutConfig):
    """The servers that generate, and how they sample."""

    n: int = 1  # responses per prompt, 1 to 1000
    temperature: float = 1.0  # sampling temperature; 0 takes the most likely token
    top_p: float = 1.0  # sample from the most likely tokens that have this probability together


@dataclass
class ScoringConfig:
    # The k of pass@k and majority@k, each up to rollout.n. Empty: 1, 2, 4, ... and rollout.n.
    ks: list[int] = field(default_factory=list)
    term: str = ""  # the term of reward.terms that says what is correct; empty: the whole reward
    correct_from: float = 1.0  # a response is correct if its reward is this or more


@dataclass
class EvalConfig:
    seed: int = 0  # of sampling; up to 4294967295
    output_dir: str = "outputs/eval"  # folder of all outputs; new or empty, unless resumed
    # never, or auto: go on in output_dir, with the sets of which not all samples are there; a new
    # evaluation if there is none.
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
