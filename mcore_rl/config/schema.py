"""Every setting of a run, with its default, in typed dataclasses.

YAML files hold differences from these defaults. `resolve.py` holds the rules between fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.checks import at_least, between


@dataclass
class Layout:
    """How one model is laid over ranks. World size is tp * pp * cp * dp.

    The expert weights of the same ranks are laid out as etp * ep * edp * pp, where edp follows.
    """

    tp: int = 1  # tensor parallel (sequence parallel comes with it)
    pp: int = 1  # pipeline parallel
    cp: int = 1  # context parallel
    dp: int = 1  # data parallel
    ep: int = 1  # expert parallel
    etp: int = 1  # tensor parallel inside an expert
    vpp: int = 1  # model chunks a pipeline rank (interleaved schedule); above 1 needs pp above 1
    # Decoder layers of the first and of the last of the pp * vpp chunks, where they should not have
    # as many as the others; 0 leaves the embedding, or the output head, alone on its chunk.
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None  # see first_stage_layers

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass
class ModelConfig:
    path: str = ""  # folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer
    # Of parameters and activations: float32, bfloat16 or auto (float32 on the CPU lane, bfloat16 on
    # the GPU lane).
    dtype: str = "auto"


@dataclass
class OptimizerConfig:
    lr: float = 1e-6  # learning rate after warm-up
    min_lr: float = 0.0  # the floor of a decaying schedule
    schedule: str = "constant"  # after warm-up: constant, linear, cosine or wsd
    warmup_steps: int = 0  # optimizer steps over which the learning rate rises linearly to lr
    wsd_decay_steps: int = 0  # last steps, in which the schedule wsd decays linearly to min_lr
    beta1: float = 0.9  # of Adam
    beta2: float = 0.95  # of Adam
    eps: float = 1e-8  # of Adam
    weight_decay: float = 0.0  # decoupled from the gradient, as in AdamW
    clip_grad: float = 1.0  # maximum global gradient norm
    distributed: bool = False  # shard the optimizer state over data-parallel ranks
    overlap: bool = False  # reduce gradients (and, if distributed, gather weights) while computing
    cpu_offload: bool = False  # Adam and its state on the host; GPU lane, with distributed


@dataclass
class MoEConfig:
    """Routers and experts, for models that have them."""

    dispatcher: str = "alltoall"  # how tokens get to their experts: alltoall or allgather
    # Over what the load is balanced: aux_loss (a micro-batch) or global_aux_loss (all ranks and the
    # micro-batches of the mini-batch so far).
    aux_loss: str = "aux_loss"
    aux_loss_coef: float = 0.0  # weight of the load-balancing loss; 0 computes none
    bias_update_rate: float = 0.0  # of the selection bias of routers that have one; 0 freezes it
    # Experts of the update: off (the router chooses again), record (those of the log-prob pass) or
    # rollout (those that the batch brings along, in both passes).
    router_replay: str = "off"


@dataclass
class RecomputeConfig:
    """What is computed again in the backward pass instead of being kept."""

    granularity: str = "none"  # none, selective (the modules below) or full (whole layers)
    modules: list[str] = field(default_factory=lambda: ["core_attn"])  # of selective recompute
    num_layers: int = 1  # layers of a unit of full recompute: only its input is kept


@dataclass
class LoRAConfig:
    """Low-rank adapters on linear layers; the weights themselves stay frozen."""

    rank: int = 0  # 0 trains the weights themselves
    alpha: float = 32.0  # an adapter's product is scaled by alpha / rank
    targets: list[str] = field(  # Megatron's names of the linear layers that get adapters
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )


@dataclass
class EngineConfig:
    """A training engine: where it runs and how it steps."""

    backend: str = "megatron"  # which engine: the one there is
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = 8192  # packed tokens, prompt and response
    logprob_chunk_bytes: int = 32 << 20  # logits and probabilities alive at once in the head
    moe: MoEConfig = field(default_factory=MoEConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    mtp_loss_coef: float = 0.0  # multi-token prediction as an auxiliary loss; 0 leaves it out
    threads_per_rank: int = 1  # CPU threads a rank may use
    # Whose modules the layers are made of: te (Transformer Engine's, on a GPU), torch (plain
    # torch's, on either lane) or auto (te where it is installed).
    modules: str = "auto"


@dataclass
class RolloutConfig:
    """The vLLM servers that generate."""

    num_servers: int = 1  # each with a whole copy of the model
    tp: int = 1  # tensor parallel inside a server
    ep: bool = False  # expert parallel over the tp ranks of a server
    temperature: float = 1.0  # of sampling, in training and in evaluation; above 0
    top_p: float = 1.0  # allowed: 1
    max_response_tokens: int = 1024  # a response that gets there is cut off
    max_num_seqs: int = 256  # sequences a server runs at once
    kv_cache_bytes: int = 4 << 30  # key/value cache of each worker of a server
    # CPU lane: cores of each worker, as in "0|1", a thread on each. Empty shares them out, and
    # gives the worker of tp=1 a single thread.
    cores: str = ""


@dataclass
class DataConfig:
    train_file: str = ""  # parquet with the prompt column and the answer column
    test_file: str = ""  # the same, held out: asked before and after training
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, handed to the reward
    max_prompt_tokens: int = 1024  # after the chat template; a longer prompt is refused


@dataclass
class RewardConfig:
    name: str = "final_number"  # a name in the reward registry, or an import path
    settings: dict[str, Any] = field(default_factory=dict)  # of that reward
    shuffle: bool = (
        False  # control experiment: permute the rewards of a batch, so that they teach nothing
    )


@dataclass(frozen=True)
class GRPOSettings:
    """Of `algorithm.advantage=grpo`."""

    normalize_by_std: bool = True  # divide group advantages by their standard deviation


@dataclass(frozen=True)
class PPOClipSettings:
    """Of `algorithm.loss=ppo_clip`."""

    clip_ratio_low: float = 0.2  # ratios are clipped at 1 - clip_ratio_low
    clip_ratio_high: float = 0.2  # and at 1 + clip_ratio_high

    def __post_init__(self) -> None:
        between("clip_ratio_low", self.clip_ratio_low, 0, 1)
        at_least("clip_ratio_high", self.clip_ratio_high, 0)


@dataclass
class AlgorithmConfig:
    """Functions are named by a name, or by the import path of one outside the package.

    An import path is `module:function` or `path/to/file.py:function`; a function's own settings
    stand beside its name. docs/algorithms.md has how they are written.
    """

    advantage: str = "grpo"  # how rewards become advantages
    advantage_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    group_size: int = 8  # responses a prompt
    drop_uniform_groups: bool = False  # leave groups whose rewards are all equal out of the update
    num_mini_batches: int = 1  # optimizer steps a trainer step
    loss: str = "ppo_clip"  # of each token, before KL and entropy
    loss_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    loss_aggregation: str = "token_mean"  # how token losses become one loss
    loss_aggregation_settings: dict[str, Any] = field(default_factory=dict)  # of that function
    entropy_coef: float = 0.0  # weight of the entropy, which is then kept up; 0 leaves it out
    kl_coef: float = 0.0  # weight of the KL to the reference model; 0 loads no reference
    kl_estimator: str = "k3"  # how the KL is estimated from one sample
    kl_estimator_settings: dict[str, Any] = field(default_factory=dict)  # of that function


@dataclass
class WeightSyncConfig:
    # "colocated" and "disaggregated" move to each worker of a server the shards that it needs: from
    # a training rank on the same device, or from ranks elsewhere. "full_export" writes a checkpoint
    # under output_dir that every server loads.
    method: str = "colocated"
    # Of "disaggregated". "process_group": gloo, or NCCL with GPUs. "nixl": NVIDIA's NIXL, where it
    # is installed.
    transport: str = "process_group"
    verify: str = "sampled"  # tensors compared bit for bit: "off", "sampled" (1 in 16) or "full"
    bucket_bytes: int = 64 << 20  # a rank stages twice as much of weights on their way
    # Where rank 0 of the trainer listens, where it does. "auto": the address of its Ray node.
    bind_address: str = "auto"
    timeout_s: float = 600.0  # of a push to all servers, and of joining both sides before the first


@dataclass
class TimeoutsConfig:
    """How long all ranks of a model, or all servers, may take before the run ends with an error.

    It tells which rank did not answer, and what that was doing.
    """

    start_s: float = 600.0  # to start processes, load the model and join the process groups
    call_s: float = 1800.0  # for any other call: generate, log-probs, update, evaluate, export


@dataclass
class TrainerConfig:
    num_steps: int = 100  # each: generate, score, update, push the weights
    prompts_per_step: int = 64  # times algorithm.group_size: samples of a step
    # Stop when log-probs of trainer and rollout differ by more, in nats, at a token or on average.
    # Rounding gives 1e-4 and 1e-6 in float32, about 1 and 0.02 in bfloat16; where it tips a router
    # from one expert to another a token may differ by more, so the mean is the sharper test.
    # None: 0.5 and 1e-4 in float32, 2 and 0.1 in bfloat16.
    max_logprob_gap: float | None = None
    mean_logprob_gap: float | None = None  # the bound on the average
    eval_samples: int = 0  # held-out prompts of an evaluation; 0 takes all
    # Steps from one training checkpoint to the next, and one after the last step; 0 writes none.
    save_every: int = 0


@dataclass
class CheckpointConfig:
    """Training checkpoints, output_dir/checkpoints/step_NNNNNN, which a run goes on from."""

    keep: int = 2  # the last ones; older ones are removed
    # Metric of metrics.jsonl, such as "reward": the checkpoint with the highest is kept as well.
    # "-NAME": the lowest. Empty keeps none for that.
    keep_best: str = ""
    hf_every: int = 0  # steps between exports to output_dir/hf/step_NNNNNN, all kept; 0 writes none
    # Train on while a checkpoint is written: a step waits until it has been copied to the host,
    # which then holds it twice.
    async_save: bool = False


@dataclass
class WarmStartConfig:
    """Supervised training before reinforcement learning; off when num_steps is 0."""

    num_steps: int = 0  # optimizer steps
    batch_size: int = 96  # samples an optimizer step
    train_file: str = ""  # parquet with the prompt column and the response column
    response_column: str = "response"  # text to imitate
    moe_aux_loss_coef: float = 0.0  # load-balancing loss of the router
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class PlacementConfig:
    """On which pool of devices each role runs: "own" is one that no other role uses.

    Roles on a pool of one name take turns on its devices. Servers that sleep and a trainer that is
    away free what they have there.
    """

    actor: str = "shared"  # the trainer
    reference: str = "shared"  # the frozen model of the KL, where there is one
    # The generation servers. "auto": "own" with weight_sync.method="disaggregated", else "shared".
    rollout: str = "auto"


@dataclass
class TaskConfig:
    """A synthetic task that makes its own tokenizer, model and data; off when the name is empty."""

    name: str = ""  # "" or "last_digit"
    worked_share: float = 0.35  # warm-start answers that show their work


@dataclass
class RLConfig:
    seed: int = 0  # of data order, initial weights of a task's model, sampling; up to 4294967295
    output_dir: str = "outputs/rl"  # new or empty unless resumed; everything that a run leaves
    # never, auto (the newest whole training checkpoint in output_dir; without one it starts anew),
    # or the folder of a training checkpoint, in this or in another output_dir.
    resume: str = "never"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    actor: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def inner_timeout_s(self) -> float:
        """Of every wait inside a rank or a server: it outlasts those of the driver.

        So the driver, which sees all ranks, is the one that tells who is stuck.
        """
        driver = self.timeouts.start_s, self.timeouts.call_s, self.weight_sync.timeout_s
        return max(driver) + 60.0
