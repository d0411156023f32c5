"""Every setting of a run, with its default, in typed dataclasses.

YAML files hold differences from these defaults. `resolve.py` holds the rules between fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass
class ModelConfig:
    path: str = ""  # folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer
    dtype: str = "float32"  # float32 or bfloat16: parameters and activations


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0  # the floor of a decaying schedule
    schedule: str = "constant"  # constant, linear or cosine
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # maximum global gradient norm
    distributed: bool = False  # shard the optimizer state over data-parallel ranks


@dataclass
class EngineConfig:
    """A training engine: where it runs and how it steps."""

    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = 8192  # packed tokens, prompt and response
    logprob_chunk_tokens: int = 1024  # rows of logits alive at once in the log-prob head
    moe_aux_loss_coef: float = 0.0  # load-balancing loss of the router
    threads_per_rank: int = 1  # CPU threads a rank may use


@dataclass
class RolloutConfig:
    """The vLLM servers that generate."""

    num_servers: int = 1
    tp: int = 1  # tensor parallel inside a server
    ep: bool = False  # expert parallel over the tp ranks of a server
    temperature: float = 1.0
    top_p: float = 1.0
    max_response_tokens: int = 1024
    max_num_seqs: int = 256  # sequences a server runs at once
    kv_cache_bytes: int = 4 << 30
    start_timeout_s: float = 600.0
    cores: str = ""  # CPU lane: cores of each worker, as in "0|1"; empty leaves the choice to vLLM


@dataclass
class DataConfig:
    train_file: str = ""  # parquet
    test_file: str = ""  # parquet
    prompt_column: str = "messages"  # chat messages: list of {role, content}
    answer_column: str = "answer"  # ground truth, handed to the reward
    max_prompt_tokens: int = 1024


@dataclass
class RewardConfig:
    name: str = "final_number"  # a name in the reward registry
    shuffle: bool = (
        False  # control experiment: permute the rewards of a batch, so that they teach nothing
    )


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"
    group_size: int = 8  # responses a prompt
    normalize_by_std: bool = True  # divide group advantages by their standard deviation
    drop_uniform_groups: bool = False  # leave groups whose rewards are all equal out of the update
    num_mini_batches: int = 1  # optimizer steps a trainer step
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    loss_aggregation: str = "token_mean"
    kl_coef: float = 0.0  # weight of the KL to the reference model; 0 loads no reference
    kl_estimator: str = "k3"


@dataclass
class WeightSyncConfig:
    method: str = "full_export"  # stream every tensor in Hugging Face form to every server
    bind_address: str = "127.0.0.1"  # where the sender listens
    timeout_s: float = 600.0


@dataclass
class TrainerConfig:
    num_steps: int = 100
    prompts_per_step: int = 64
    # Stop when log-probs of trainer and rollout differ by more, in nats, at any token or on average.
    # Rounding gives 1e-4 and 1e-6 in float32, about 1 and 0.02 in bfloat16; where it tips a router
    # from one expert to another a single token may differ by more, so the mean is the sharper test.
    max_logprob_gap: float = 2.0
    mean_logprob_gap: float = 0.1
    eval_samples: int = 0  # held-out prompts of an evaluation; 0 takes all


@dataclass
class WarmStartConfig:
    """Supervised training before reinforcement learning; off when num_steps is 0."""

    num_steps: int = 0
    batch_size: int = 96
    train_file: str = ""  # parquet with the prompt column and the response column
    response_column: str = "response"
    moe_aux_loss_coef: float = 0.0
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class TaskConfig:
    """A synthetic task that makes its own tokenizer, model and data; off when the name is empty."""

    name: str = ""  # "" or "last_digit"
    worked_share: float = 0.35  # warm-start answers that show their work


@dataclass
class RLConfig:
    seed: int = 0
    output_dir: str = "outputs/rl"
    task: TaskConfig = field(default_factory=TaskConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    actor: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
