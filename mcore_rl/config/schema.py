"""Every setting of a run, with its default, in typed dataclasses.

YAML files contain differences from these defaults. The type of a field says what it allows
(`limits.py`); rules between fields are in `rules.py` and the files beside it.

Long because: the settings of a run are one list, with a sentence each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mcore_rl.config.allowed import (
    BACKENDS,
    CODECS,
    DISPATCHERS,
    DISTILLATION_LOSSES,
    DTYPES,
    FLOAT8_RECIPES,
    LAYER_MODULES,
    MAX_DRAFT,
    MAX_N,
    MAX_SEED,
    MAX_WEIGHT,
    MIN_CURRICULUM_WEIGHT,
    MODES,
    QUANTIZATIONS,
    RECOMPUTE_MODULES,
    SERVER_BACKENDS,
    TASKS,
    TRACKERS,
    TRANSPORTS,
)
from mcore_rl.config.limits import (
    AtLeast,
    Between,
    Date,
    FieldsOf,
    Finite,
    Fraction,
    Importable,
    Matches,
    MegatronName,
    MultipleOf,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    OneOf,
    PlainName,
    PoolName,
    PositiveFloat,
    PositiveInt,
    RowsOf,
    check_limits,
)

# Types of several settings, with their limits.
Seed = Annotated[int, Between(0, MAX_SEED)]
OutputFolder = Annotated[str, NotEmpty("a folder")]
Resume = Annotated[str, NotEmpty("'never', 'auto', or the folder of a checkpoint")]
Url = Annotated[str, Matches("|[a-z][a-z0-9+.-]*://.*", "a URL, such as s3://bucket/name")]
Pool = Annotated[str, PoolName("shared", "own")]
ServerBackend = Annotated[str, OneOf(*SERVER_BACKENDS, contract="GenerationServer")]
FunctionName = Annotated[str, Importable()]
Rows = Annotated[str, RowsOf()]
Codec = Annotated[str, OneOf(*CODECS)]
LongRows = Annotated[str, OneOf("refuse", "drop")]
StopTexts = list[Annotated[str, NotEmpty()]]
TopP = Annotated[float, Between(0, 1, includes_least=False)]
Decay = Annotated[float, Between(0, 1, includes_most=False)]
Weight = Annotated[float, Between(-MAX_WEIGHT, MAX_WEIGHT)]
Tracker = Annotated[str, OneOf(*TRACKERS, contract="Tracker")]
# Megatron's seq_aux_loss takes a whole pack for a sequence, which is aux_loss again.
AuxLoss = Annotated[str, OneOf("aux_loss", "global_aux_loss")]
SandboxMemory = Annotated[int, AtLeast(64)]  # MiB; less does not start Python
# Lengths that are not set, of a model with as many positions (jobs/lengths.py).
PROMPT_TOKENS, RESPONSE_TOKENS, EXAMPLE_TOKENS = 1024, 1024, 4096


@dataclass
class Layout:
    """The parallel layout of a model, on tp * pp * cp * dp ranks: docs/engine.md."""

    tp: PositiveInt = 1  # tensor parallel, with sequence parallel
    pp: PositiveInt = 1  # pipeline parallel
    cp: PositiveInt = 1  # context parallel
    dp: PositiveInt = 1  # data parallel
    ep: PositiveInt = 1  # expert parallel
    etp: PositiveInt = 1  # tensor parallel inside an expert
    vpp: PositiveInt = 1  # interleaved chunks per pipeline rank; needs pp above 1
    # decoder layers of the first pipeline chunk; null: as the others; 0: the embedding only
    first_stage_layers: NonNegativeInt | None = None
    # decoder layers of the last pipeline chunk; null: as the others; 0: the output head only
    last_stage_layers: NonNegativeInt | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass
class ModelConfig:
    # folder of a Hugging Face checkpoint with its tokenizer; hf:ORG/NAME or a URL: docs/data.md
    path: str = ""
    # dtype of parameters and activations: float32, bfloat16, auto (bfloat16 on GPUs, else float32)
    dtype: Annotated[str, OneOf(*DTYPES, "auto")] = "auto"
    # date (YYYY-MM-DD) for chat templates that write today's, such as Llama-3's
    chat_date: Annotated[str, Date()] = "2024-07-26"
    # Import path of a Family (docs/plugs.md). transformers: any architecture of transformers, the
    # default of backend=fsdp. Empty: those of this package.
    family: str = ""


@dataclass
class OptimizerConfig:
    # optimizer: adam, or muon for weight matrices (docs/passthrough.md)
    name: Annotated[str, OneOf("adam", "muon")] = "adam"
    lr: PositiveFloat = 1e-6  # learning rate after warm-up
    min_lr: NonNegativeFloat = 0.0  # final learning rate of a decaying schedule
    # learning rate after warm-up: constant, linear, cosine or wsd
    schedule: Annotated[str, OneOf("constant", "linear", "cosine", "wsd")] = "constant"
    warmup_steps: NonNegativeInt = 0  # optimizer steps of linear warm-up
    wsd_decay_steps: NonNegativeInt = 0  # last steps of schedule=wsd: linear decay to min_lr
    beta1: Decay = 0.9  # Adam's decay of the first moment
    beta2: Decay = 0.95  # Adam's decay of the second moment
    eps: PositiveFloat = 1e-8  # Adam's epsilon
    weight_decay: NonNegativeFloat = 0.0  # decoupled, as in AdamW
    clip_grad: NonNegativeFloat = 1.0  # maximum global gradient norm
    max_skipped_steps: NonNegativeInt = 0  # updates in a row to skip if gradients are not finite
    distributed: bool = False  # shard the optimizer's state over data-parallel ranks
    overlap: bool = False  # overlap gradient reduction and weight gathering with computation
    cpu_offload: bool = False  # run Adam on the host; on GPUs, needs distributed


@dataclass
class MoEConfig:
    """Routers and experts of MoE models."""

    # exchange of tokens: alltoall, allgather, flex (DeepEP; GPUs)
    dispatcher: Annotated[str, MegatronName(*DISPATCHERS)] = "alltoall"
    # exchange the tokens of a micro-batch during the computation of another; bfloat16 on GPUs
    overlap: bool = False
    # balance load over a micro-batch (aux_loss) or the mini-batch so far (global_aux_loss)
    aux_loss: AuxLoss = "aux_loss"
    aux_loss_coef: NonNegativeFloat = 0.0  # weight of the load-balancing loss
    # step size of the router's selection bias; 0 freezes it
    bias_update_rate: NonNegativeFloat = 0.0
    # experts that the update uses: off (the router's), record (those of the log-prob pass), rollout
    # (those of the servers; actor only)
    router_replay: Annotated[str, OneOf("off", "record", "rollout")] = "off"


@dataclass
class RecomputeConfig:
    """Activations recomputed in the backward pass."""

    # what is recomputed: none, selective (modules) or full (whole layers)
    granularity: Annotated[str, OneOf("none", "selective", "full")] = "none"
    # modules of selective recompute
    modules: list[Annotated[str, MegatronName(*RECOMPUTE_MODULES)]] = field(
        default_factory=lambda: ["core_attn"]
    )
    num_layers: PositiveInt = 1  # layers per unit of full recompute


@dataclass
class LoRAConfig:
    """Low-rank adapters on linear layers; the base weights stay frozen."""

    rank: NonNegativeInt = 0  # 0: no adapters, all weights are trained
    alpha: PositiveFloat = 32.0  # adapters are scaled by alpha / rank
    targets: list[str] = field(  # Megatron's names of linear layers
        default_factory=lambda: ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    )


@dataclass
class Float8Config:
    """Products of linear layers in float8: docs/passthrough.md. Weights stay in model.dtype."""

    # scaling of float8: off, blockwise (Hopper), mxfp8 (Blackwell), or tensorwise, from scales of
    # the same step
    recipe: Annotated[str, OneOf(*FLOAT8_RECIPES)] = "off"
    # float8 format: e4m3, or hybrid (gradients in e5m2)
    format: Annotated[str, OneOf("e4m3", "hybrid")] = "e4m3"
    bf16_layers_at_start: NonNegativeInt = 0  # first decoder layers that stay in bfloat16
    bf16_layers_at_end: NonNegativeInt = 0  # last decoder layers that stay in bfloat16


@dataclass
class FSDPConfig:
    """Settings of backend=fsdp."""

    num_replicas: PositiveInt = 1  # copies of the model, each sharded over its share of the ranks
    # Parameters, gradients and optimizer state in host memory; a layer is on the device for its
    # passes.
    cpu_offload: bool = False
    # Pack the sequences of a micro-batch in one row, without padding. false: run each alone, for
    # families whose layers mix them.
    packing: bool = True


@dataclass
class EngineConfig:
    """A training engine."""

    # training engine: megatron; fsdp, for models of transformers; or the import path of a Backend
    # (docs/plugs.md)
    backend: Annotated[str, OneOf(*BACKENDS, contract="Backend")] = "megatron"
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: PositiveInt = 8192  # packed prompt and response tokens per rank
    # bytes of logits and probabilities in memory at once; 0: 512 MiB on a GPU, 32 MiB on a CPU
    logprob_chunk_bytes: NonNegativeInt = 0
    moe: MoEConfig = field(default_factory=MoEConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    fp8: Float8Config = field(default_factory=Float8Config)
    mtp_loss_coef: NonNegativeFloat = 0.0  # weight of the multi-token prediction loss
    # weight of the loss of sparse attention's indexers; 0 freezes them
    indexer_loss_coef: NonNegativeFloat = 0.0
    # keys that sparse attention uses in the update: off (the indexers'), record (of the log-prob
    # pass)
    indexer_replay: Annotated[str, OneOf("off", "record")] = "off"
    threads_per_rank: PositiveInt = 1  # CPU threads per rank
    # layer implementation: te (Transformer Engine, GPU), torch, or auto (te if installed)
    modules: Annotated[str, MegatronName(*LAYER_MODULES)] = "auto"
    # fields of Megatron's TransformerConfig, DDP and optimizer, by name: docs/passthrough.md
    megatron: dict[str, Annotated[Any, Finite()]] = field(default_factory=dict)


@dataclass
class CriticConfig(EngineConfig):
    """The value model, if algorithm.advantage needs values, as gae does."""

    # checkpoint of a value or language model; empty: the actor's first weights
    model_path: str = ""
    warmup_steps: NonNegativeInt = 0  # first trainer steps, which update the critic only
    clip_range: PositiveFloat = 0.2  # maximum change of a value in an update
    loss_aggregation: FunctionName = "token_mean"  # how token losses are averaged


@dataclass
class RewardModelConfig(EngineConfig):
    """A frozen reward model, whose score is added to the reward."""

    model_path: str = ""  # checkpoint of mcore-rl rm; empty: no reward model
    weight: Weight = 1.0  # weight of the score in the reward


@dataclass
class TeacherModelConfig:
    """A model of `teacher.models`."""

    model_path: str = ""  # checkpoint; empty: the actor's first weights
    weight: PositiveFloat = 1.0  # weight of the loss towards it
    # axes that differ from teacher.layout
    layout: Annotated[dict[str, Any], FieldsOf(Layout)] = field(default_factory=dict)


@dataclass
class TeacherConfig(EngineConfig):
    """Frozen models that algorithm.distillation learns from."""

    # teachers by name: {NAME: {model_path: ..., weight: 1.0, layout: {tp: 2}}}; no path: the
    # actor's first weights
    models: dict[PlainName, Annotated[dict[str, Any], FieldsOf(TeacherModelConfig)]] = field(
        default_factory=dict
    )
    column: str = ""  # data column with the teacher's name; empty: all teach


@dataclass
class SGLangConfig:
    """The server of rollout.backend=sglang: docs/rollout.md."""

    # URL of a running server, such as http://127.0.0.1:30000; empty: the run starts servers
    url: str = ""
    api_key_env: str = ""  # environment variable with the key of the server at url; empty: none
    python: str = ""  # interpreter of an environment with sglang; empty: that of the run
    # arguments of `sglang.launch_server`, by name, with "_"; false: --no-NAME
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class SpeculativeConfig:
    """Speculative decoding with the model's own prediction layers: docs/rollout.md."""

    # tokens that the prediction layer drafts per decoding step; 0: none
    num_tokens: Annotated[int, Between(0, MAX_DRAFT)] = 0


@dataclass
class RolloutConfig:
    """The generation servers."""

    # server: vllm, sglang, or the import path of a GenerationServer (docs/plugs.md)
    backend: ServerBackend = "vllm"
    num_servers: PositiveInt = 1  # servers, each with a full copy of the model
    tp: PositiveInt = 1  # tensor parallel inside a server
    # data-parallel attention ranks of a server, of tp ranks each; with ep: docs/rollout.md
    dp: PositiveInt = 1
    # nodes that a server spans, with equal shares of its dp * tp ranks
    nodes_per_server: PositiveInt = 1
    ep: bool = False  # expert parallel over the dp * tp ranks
    temperature: PositiveFloat = 1.0  # sampling temperature
    # sample from the likeliest tokens of this total probability; below 1: docs/rollout.md
    top_p: TopP = 1.0
    top_k: NonNegativeInt = 0  # sample from this many likeliest tokens; 0: all
    stop: StopTexts = field(default_factory=list)  # texts that end a response
    # longer responses are truncated; null: 1024, or fewer as the positions of the model allow
    max_response_tokens: PositiveInt | None = None
    # maximum concurrent sequences of a server; null: as `vllm serve` (docs/rollout.md)
    max_num_seqs: PositiveInt | None = None
    # maximum tokens of a server's forward pass; null: as `vllm serve`
    max_num_batched_tokens: PositiveInt | None = None
    # KV cache of each worker of a server; null: what the sequences of the run need, as far as there
    # is room (docs/rollout.md)
    kv_cache_bytes: PositiveInt | None = None
    # first weights of servers: checkpoint, dummy (sent by the trainer), auto (dummy after a resume
    # or restart)
    load_format: Annotated[str, OneOf("auto", "checkpoint", "dummy")] = "auto"
    # quantization of servers' weights: null (model.dtype), or fp8_block (DeepSeek-V3's float8:
    # docs/float8.md)
    quantization: Annotated[str, OneOf(*QUANTIZATIONS)] | None = None
    # weights of a LoRA actor on the servers: merged, or adapter (only adapters are sent, which vLLM
    # adds to the model that it has loaded)
    lora: Annotated[str, OneOf("merged", "adapter")] = "merged"
    max_images: PositiveInt = 8  # images of a prompt and its response, for models that take them
    max_restarts: NonNegativeInt = 3  # maximum restarts per server
    cores: str = ""  # CPU cores of each worker without GPUs, as "0|1"; empty: docs/rollout.md
    # arguments of vLLM's engine (EngineArgs), by name: docs/passthrough.md
    engine: dict[str, Any] = field(default_factory=dict)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @property
    def response_limit(self) -> int:
        """Most tokens of a response."""
        return self.max_response_tokens or RESPONSE_TOKENS

    @property
    def num_workers(self) -> int:
        """Workers of a server, each on a device of its own."""
        return self.dp * self.tp

    @property
    def workers_per_node(self) -> int:
        """Workers of a server on each of its nodes."""
        return self.num_workers // self.nodes_per_server


@dataclass
class ServedModelConfig:
    """A frozen model of `models`, with servers of its own or as an adapter on the policy's."""

    path: str = ""  # Hugging Face checkpoint; empty: the actor's first weights
    adapter: str = ""  # folder of an adapter, which the policy's servers serve
    backend: ServerBackend = "vllm"  # as rollout.backend
    num_servers: PositiveInt = 1  # servers, each with a full copy of the model
    tp: PositiveInt = 1  # tensor parallel inside a server
    dp: PositiveInt = 1  # data-parallel attention ranks of a server; with ep
    ep: bool = False  # expert parallel over the dp * tp ranks
    temperature: NonNegativeFloat = 1.0  # sampling temperature; 0 is greedy
    top_p: TopP = 1.0  # total probability of the tokens to sample from
    top_k: NonNegativeInt = 0  # sample from this many likeliest tokens; 0: all
    max_tokens: PositiveInt = 1024  # maximum tokens of an answer
    # maximum tokens of a conversation; null: those of the policy, or the positions of a model that
    # has fewer
    max_context: Annotated[int, AtLeast(2)] | None = None
    max_num_seqs: PositiveInt | None = None  # as rollout.max_num_seqs
    max_num_batched_tokens: PositiveInt | None = None  # as rollout.max_num_batched_tokens
    kv_cache_bytes: PositiveInt | None = None  # as rollout.kv_cache_bytes
    cores: str = ""  # as rollout.cores
    engine: dict[str, Any] = field(default_factory=dict)  # arguments of vLLM's engine
    # as rollout.sglang
    sglang: Annotated[dict[str, Any], FieldsOf(SGLangConfig)] = field(default_factory=dict)
    codec: Codec = "auto"  # tokenization of turns
    timeout_s: PositiveFloat = 300.0  # maximum seconds of an answer
    placement: str = "own"


@dataclass
class AgentConfig:
    # agent loop: single_turn, tools, environment, user, program, verifiers, or an import path
    # (docs/agents.md)
    loop: FunctionName = "single_turn"
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the loop
    # tools of the policy: calculator, python, search, import paths of functions or classes with
    # @tool, or a file.yaml
    tools: list[FunctionName] = field(default_factory=list)
    search_file: str = ""  # JSONL with a column `text`, which the tool search reads
    mcp_servers: list[str] = field(default_factory=list)  # URLs or commands of MCP servers
    # sandbox of the tool python: docs/sandbox.md
    sandbox: Annotated[dict[str, Any], FieldsOf(SandboxSettings)] = field(default_factory=dict)
    # environment of loop=environment: code, countdown, guessing, openenv, or an import path
    environment: FunctionName = ""
    # settings of the environment
    environment_settings: dict[str, Any] = field(default_factory=dict)
    # tokenization of turns: renderers, template, or auto
    codec: Codec = "auto"
    max_turns: PositiveInt = 8  # maximum turns of the policy in a trajectory
    # maximum tokens of a turn; 0: the rest of rollout.max_response_tokens
    max_turn_tokens: NonNegativeInt = 0
    timeout_s: PositiveFloat = 600.0  # maximum seconds of a trajectory, which is then cut off
    tool_timeout_s: PositiveFloat = 30.0  # maximum seconds of a tool call


@dataclass(frozen=True)
class SandboxSettings:
    """Containment of programs, and limits of one call."""

    # containment; auto: the best available; unsafe: no containment, only limits
    tier: Annotated[str, OneOf("auto", "bwrap", "landlock", "unsafe")] = "auto"
    cpu_s: PositiveFloat = 10.0  # CPU seconds of all processes of a call
    wall_s: PositiveFloat = 20.0  # seconds after which a call is ended
    memory_mb: SandboxMemory = 1024  # memory of each process and of all together; MiB
    output_kb: PositiveInt = 256  # output on stdout and stderr together; KiB
    processes: PositiveInt = 32  # processes and threads at once; landlock has threads only
    scratch_mb: PositiveInt = 64  # files in the working folder; MiB

    def __post_init__(self) -> None:
        check_limits("", self)


@dataclass
class EvaluationConfig:
    """Evaluation on held-out prompts; there is always one after training."""

    before: bool = True  # evaluate before training
    every: NonNegativeInt = 0  # steps between evaluations during training; 0: none
    num_samples: PositiveInt = 1  # responses per prompt
    # sampling temperature; 0 is greedy; null: rollout.temperature
    temperature: NonNegativeFloat | None = None
    top_p: TopP | None = None  # total probability of sampled tokens; null: rollout.top_p
    top_k: NonNegativeInt | None = None  # number of sampled tokens; null: rollout.top_k
    stop: StopTexts | None = None  # texts that end a response; null: rollout.stop
    # maximum tokens of a response; null: rollout.max_response_tokens
    max_response_tokens: PositiveInt | None = None


@dataclass
class SampleLogConfig:
    """Tables of responses, samples/step_NNNNNN.parquet, and responses on the screen."""

    every: NonNegativeInt = 1  # steps between tables; 0: none
    max_rows: NonNegativeInt = 0  # maximum responses in a table, in whole trajectories; 0: all
    # maximum tokens in a table, in whole trajectories, about 9 bytes each on disk; 0: all
    max_tokens: NonNegativeInt = 4_000_000
    tokens: bool = True  # write a table's columns of each token; false: texts only
    num_shown: NonNegativeInt = 1  # shortened responses on the screen each step


@dataclass
class CurriculumConfig:
    """Prompts drawn by the success rate p of their earlier responses."""

    # policy that draws prompts: learnability, window or an import path (docs/sample_policies.md);
    # empty: each prompt once an epoch
    name: FunctionName = ""
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the policy
    success: str = "reward"  # score that decides on success: reward, or a part of it
    min_reward: Weight = 1.0  # minimum score of a response that succeeds
    decay: Fraction = 0.5  # weight of earlier responses when a prompt is drawn again
    # minimum weight of a prompt
    min_weight: Annotated[float, Between(MIN_CURRICULUM_WEIGHT, 1)] = 0.05


@dataclass
class DataConfig:
    # training rows: parquet, JSONL, a folder, or an import path (docs/data.md)
    train_file: Rows = ""
    train_files: list[Rows] = field(default_factory=list)  # several sources, instead of train_file
    # relative frequency of each of train_files; empty: each prompt of all once an epoch
    train_weights: list[PositiveFloat] = field(default_factory=list)
    test_file: Rows = ""  # held-out set `test`
    # held-out sets, by their names in metrics: {math: math.parquet, code: code.parquet}
    test_files: dict[PlainName, Rows] = field(default_factory=dict)
    # column of prompts: chats, lists of {role, content}, or texts; null: the first that the file
    # has of messages, prompt, question, problem
    prompt_column: str | None = None
    # column of the ground truth, passed to the reward; null: the first that the file has of answer,
    # solution, ground_truth, label
    answer_column: str | None = None
    tools_column: str = ""  # column of tool schemas for the chat template; empty: none
    images_column: str = ""  # column of images, for models that take them; empty: none
    max_image_pixels: PositiveInt = 1 << 24  # maximum pixels of an image; larger ones are refused
    images_dir: str = ""  # folder of images that rows name by path; empty: that of the data file
    # maximum tokens of a prompt with the chat template applied, and all tokens of images; null:
    # 1024, or fewer as the positions of the model allow
    max_prompt_tokens: PositiveInt | None = None
    # longer prompts: refuse (the file) or drop (the rows)
    long_prompts: LongRows = "refuse"
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt."""
        return self.max_prompt_tokens or PROMPT_TOKENS


@dataclass(frozen=True)
class RewardTerm:
    """A reward in a weighted sum."""

    name: FunctionName = (
        ""  # in the reward registry, or an import path; empty: the key in reward.terms
    )
    weight: Weight = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    name: FunctionName = "final_number"  # name in the reward registry, or an import path
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the reward
    # weighted sum of rewards instead of reward.name, by their names in metrics:
    # {math: {weight: 1.0}, brief: {name: overlong, settings: {buffer_tokens: 512}}}
    terms: dict[PlainName, Annotated[dict[str, Any], FieldsOf(RewardTerm)]] = field(
        default_factory=dict
    )
    # text that rewards read: answer (what follows thoughts), or response (all)
    text: Annotated[str, OneOf("answer", "response")] = "answer"
    # if a reward fails: stop (the run), drop (the response) or zero (its reward)
    on_error: Annotated[str, OneOf("stop", "drop", "zero")] = "stop"
    # maximum seconds of a call, unless the reward has its own limit
    timeout_s: PositiveFloat = 60.0
    # processes per server and reward, for math and functions that are not async
    num_processes: PositiveInt = 2
    shuffle: bool = False  # control experiment: permute rewards at random


@dataclass(frozen=True)
class GRPOSettings:
    """Settings of `algorithm.advantage=grpo`."""

    normalize_by_std: bool = True  # divide by the standard deviation of the group


@dataclass(frozen=True)
class PPOClipSettings:
    """Settings of `algorithm.loss=ppo_clip`."""

    clip_ratio_low: Fraction = 0.2  # clip ratios below 1 - clip_ratio_low
    clip_ratio_high: NonNegativeFloat = 0.2  # clip ratios above 1 + clip_ratio_high
    # maximum ratio with a negative advantage; null: none
    dual_clip: Annotated[float, AtLeast(1)] | None = None

    def __post_init__(self) -> None:
        check_limits("", self)


@dataclass
class CorrectionConfig:
    """Correction by the ratio of the trainer's probability to the server's."""

    # level of importance weights: off, token, sequence, geometric; null: token for older samples
    # and rollout.quantization without another correction, else off
    level: Annotated[str, OneOf("off", "token", "sequence", "geometric")] | None = None
    # weights out of bounds: truncate (to weight_max), or mask (to 0)
    method: Annotated[str, OneOf("truncate", "mask")] = "truncate"
    weight_min: NonNegativeFloat = 0.0  # minimum weight, with method=mask
    weight_max: PositiveFloat = 2.0  # maximum weight
    normalize: bool = False  # divide weights by their mean over the batch
    # rules that reject tokens and sequences: {sequence_mean_k3: 0.01, veto: [1.0e-4, 1.0e4]}
    reject: dict[str, Any] = field(default_factory=dict)
    unbiased_kl: bool = False  # multiply the KL loss by the ratio
    # take the servers' log-probs in place of the trainer's, unchecked
    use_rollout_log_probs: bool = False

    @property
    def has_weights(self) -> bool:
        return self.level not in (None, "off")


@dataclass
class ReplayConfig:
    """Groups of earlier steps, trained on again in place of new ones."""

    share: Fraction = 0.0  # fraction of each step's groups that is taken from replay
    max_age: PositiveInt = 4  # maximum trainer steps since a group was generated
    priority: FunctionName = (
        "spread"  # order of replay: spread, rare_success, uniform, or an import path
    )
    # settings of `priority`
    priority_settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class FilterConfig:
    """Selection of the generated samples that a step trains on: docs/sample_policies.md."""

    # filter of groups: drop_uniform, or an import path; empty: keep all
    group_filter: FunctionName = ""
    # settings of `group_filter`
    group_filter_settings: dict[str, Any] = field(default_factory=dict)
    # maximum rounds of generation until trainer.prompts_per_step groups pass
    max_rounds: PositiveInt = 1
    # prompts of a round of generation; 0: the new groups of a step
    prompts_per_round: NonNegativeInt = 0
    # if too few groups pass: train, or stop
    if_short: Annotated[str, OneOf("train", "stop")] = "train"
    keep_responses: NonNegativeInt = 0  # responses of a group to train on; 0: all
    # choice of these: best, best_and_worst, max_variance, random or an import path
    keep_by: FunctionName = "max_variance"
    # settings of `keep_by`
    keep_by_settings: dict[str, Any] = field(default_factory=dict)
    # responses that advantages compare: kept or generated
    advantages_of: Annotated[str, OneOf("kept", "generated")] = "kept"
    mask_truncated: bool = False  # take truncated trajectories out of the loss
    replay: ReplayConfig = field(default_factory=ReplayConfig)


@dataclass
class DistillationConfig:
    """Distillation from the models of `teacher`, on responses of the policy itself."""

    # loss towards the teacher: off, sampled_kl, reverse_kl or forward_kl (docs/algorithms.md)
    loss: Annotated[str, OneOf(*DISTILLATION_LOSSES)] = "off"
    coef: PositiveFloat = 1.0  # weight of the loss
    top_k: PositiveInt = 32  # likeliest tokens that reverse_kl and forward_kl compare
    use_reward: bool = False  # train on rewards too; false: only metrics


@dataclass
class AlgorithmConfig:
    """Functions are built in, or your own: docs/algorithms.md."""

    advantage: FunctionName = "grpo"  # function that computes advantages from rewards
    # settings of `advantage`
    advantage_settings: dict[str, Any] = field(default_factory=dict)
    group_size: PositiveInt = 8  # responses per prompt
    filter: FilterConfig = field(default_factory=FilterConfig)
    num_mini_batches: PositiveInt = 1  # optimizer steps per trainer step
    loss: FunctionName = "ppo_clip"  # loss of each token, without KL and entropy
    loss_settings: dict[str, Any] = field(default_factory=dict)  # settings of `loss`
    loss_aggregation: FunctionName = "token_mean"  # how token losses are averaged
    # settings of `loss_aggregation`
    loss_aggregation_settings: dict[str, Any] = field(default_factory=dict)
    entropy_coef: NonNegativeFloat = 0.0  # weight of the entropy bonus
    # entropy in nats per token that the bonus's weight adapts to; null: a fixed weight
    entropy_target: PositiveFloat | None = None
    entropy_coef_step: PositiveFloat = 0.005  # change of the bonus's weight per trainer step
    entropy_coef_max: PositiveFloat = 1.0  # maximum weight of the bonus
    # fraction of tokens to train on, those of highest entropy
    top_entropy_share: Annotated[float, Between(0, 1, includes_least=False)] = 1.0
    cross_entropy_coef: NonNegativeFloat = 0.0  # weight of the loss of tokens not sampled
    kl_coef: NonNegativeFloat = 0.0  # weight of the KL to the reference; 0 loads no reference
    # where the KL is added: loss or reward
    kl_placement: Annotated[str, OneOf("loss", "reward")] = "loss"
    # KL in nats per token that its weight adapts to; null: fixed
    kl_target: PositiveFloat | None = None
    # samples in which the weight of the KL changes by a fifth at most
    kl_horizon: PositiveInt = 10000
    kl_estimator: FunctionName = "k3"  # estimator of the KL from one sample
    # settings of `kl_estimator`
    kl_estimator_settings: dict[str, Any] = field(default_factory=dict)
    # pass of log-probs before the update: always, or auto (if needed)
    log_prob_pass: Annotated[str, OneOf("auto", "always")] = "auto"
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


@dataclass
class WeightSyncConfig:
    # way to send weights: colocated, disaggregated (servers on own devices), full_export (a
    # checkpoint); docs/weights.md
    method: Annotated[str, OneOf("colocated", "disaggregated", "full_export")] = "colocated"
    # transport of disaggregated: process_group (gloo or NCCL), nixl, or an import path
    # (docs/plugs.md)
    transport: Annotated[str, OneOf(*TRANSPORTS, contract="WeightTransport")] = "process_group"
    # tensors compared bit for bit: off, sampled (1 in 16) or full
    verify: Annotated[str, OneOf("off", "sampled", "full")] = "sampled"
    # maximum bytes of a message; a rank stages twice as much
    bucket_bytes: Annotated[int, MultipleOf(32)] = 64 << 20
    bind_address: str = "auto"  # where the trainer's rank 0 listens; auto: its Ray node's address
    timeout_s: PositiveFloat = 600.0  # maximum seconds of an update, and of the first rendezvous


@dataclass
class TimeoutsConfig:
    """Limits on a call of all ranks of a model, or of all servers."""

    # maximum seconds to start and load; unless set, 5 s more per GB of model.path
    start_s: PositiveFloat = 600.0
    call_s: PositiveFloat = 1800.0  # maximum seconds of any other call


@dataclass
class AsynchronousConfig:
    """Settings of trainer.mode=fully_async: docs/async_training.md."""

    max_groups: NonNegativeInt = 0  # maximum groups generated at once; 0: what staleness allows
    oversampling: Fraction = 0.0  # extra groups, as a share of trainer.prompts_per_step
    # maximum samples that wait for later steps; 0: what staleness allows
    max_waiting_samples: NonNegativeInt = 0
    # recompute the KV cache of unfinished responses with new weights
    recompute_cache: bool = False


@dataclass
class TrainerConfig:
    # training loop: sync, one_step_off or fully_async (docs/async_training.md), or an import path
    # (docs/plugs.md)
    mode: Annotated[str, OneOf(*MODES, contract="RLTrainer")] = "sync"
    # maximum versions by which a token may be older than the policy; null: 0 with sync, 1 with
    # one_step_off (the most there), 2 with fully_async
    staleness: NonNegativeInt | None = None
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)
    num_steps: PositiveInt = 100  # trainer steps
    prompts_per_step: PositiveInt = 64  # prompts of a step, with algorithm.group_size samples each
    # maximum gap of trainer's and servers' log-probs at a token, in nats, beyond which the run
    # stops; null: docs/rollout.md
    max_logprob_gap: PositiveFloat | None = None
    mean_logprob_gap: PositiveFloat | None = None  # maximum mean gap; null: docs/rollout.md
    # maximum prompts of each held-out set per evaluation; 0: all
    eval_samples: NonNegativeInt = 0
    save_every: NonNegativeInt = 0  # steps between training checkpoints; 0: none
    # trackers of metrics: tensorboard, wandb, mlflow, swanlab, or import paths (docs/watching.md)
    trackers: list[Tracker] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project or experiment of the trackers

    @property
    def gap_bounds(self) -> dict[str, float]:
        """Largest gaps of log-probs of a step by name, after `resolve_for_device_type`."""
        return {name: getattr(self, name) for name in ("max_logprob_gap", "mean_logprob_gap")}


@dataclass
class CheckpointConfig:
    """Training checkpoints, output_dir/checkpoints/step_NNNNNN, to resume from."""

    keep: PositiveInt = 2  # number of newest checkpoints to keep
    # metric of a checkpoint to keep: eval/test/reward for its highest, -eval/test/loss for its
    # lowest value
    keep_best: str = ""
    hf_every: NonNegativeInt = 0  # steps between exports to output_dir/hf/step_NNNNNN; 0: none
    # fsspec URL, such as s3://bucket/name, that output_dir/checkpoint is copied to at the end
    export_to: Url = ""
    # train while a checkpoint is written from a second copy on the host
    async_save: bool = False


@dataclass
class ProfileConfig:
    """Traces of training ranks by torch.profiler: docs/report.md."""

    steps: list[PositiveInt] = field(default_factory=list)  # trainer steps to trace; empty: none
    # ranks to trace of each model of the run
    ranks: list[NonNegativeInt] = field(default_factory=lambda: [0])
    # maximum bytes of a trace before compression; a larger one is dropped
    max_trace_bytes: PositiveInt = 1 << 30
    # write a snapshot of the allocator's memory, for https://pytorch.org/memory_viz; on GPUs
    memory: bool = False


@dataclass
class WarmStartConfig:
    """Supervised training before reinforcement learning."""

    num_steps: NonNegativeInt = 0  # optimizer steps; 0: none
    batch_size: PositiveInt = 96  # samples per optimizer step
    train_file: Rows = ""  # rows as of data.train_file, with the response column
    # column of the target text; empty: the prompt column has conversations, and the assistant's
    # messages are trained on
    response_column: str = "response"
    moe_aux_loss_coef: NonNegativeFloat = 0.0  # weight of the load-balancing loss
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class PlacementConfig:
    """Pools of devices, by any name: docs/controller.md. own: a pool without other roles."""

    actor: Pool = "shared"  # pool of the actor: shared, own or a name
    reference: Pool = "shared"  # pool of the KL's reference: shared, own or a name
    critic: Pool = "shared"  # pool of the critic: shared, own or a name
    reward_model: Pool = "shared"  # pool of the reward model: shared, own or a name
    teacher: Pool = "shared"  # pool of each teacher: shared, own or a name
    # pool of the servers; auto: shared with trainer.mode=sync unless
    # weight_sync.method=disaggregated, else own
    rollout: Annotated[str, PoolName("auto", "shared", "own")] = "auto"


@dataclass
class TaskConfig:
    """A synthetic task with a tokenizer, model and data of its own."""

    # built-in task: last_digit, calculator, code, countdown, pictures; empty: none
    name: Annotated[str, OneOf("", *TASKS)] = ""
    worked_share: Fraction = 0.35  # fraction of warm-start examples that show their work


@dataclass
class RLConfig:
    seed: Seed = 0  # seed of data order, sampling and initial weights
    output_dir: OutputFolder = "outputs/rl"  # folder of all outputs; new or empty, unless resumed
    # where to resume: never, auto (from output_dir, else a new run), or a checkpoint's folder
    resume: Resume = "never"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    # bytes of Ray's object store, for batches; 0: as the settings need, at least 512 MiB, at most
    # 80 % of free /dev/shm and cgroup memory
    object_store_bytes: NonNegativeInt = 0
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
    models: dict[PlainName, Annotated[dict[str, Any], FieldsOf(ServedModelConfig)]] = field(
        default_factory=dict
    )
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
        responses = self.rollout.response_limit, self.evaluation.max_response_tokens or 0
        return self.data.prompt_limit + max(responses)

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

    # training rows: parquet, JSONL, a folder, or an import path (docs/data.md)
    train_file: Rows = ""
    train_files: list[Rows] = field(default_factory=list)  # several sources, instead of train_file
    # relative frequency of each of train_files; empty: each row of all once an epoch
    train_weights: list[PositiveFloat] = field(default_factory=list)
    test_file: Rows = ""  # held-out set `test`
    # held-out sets, by their names in metrics: {chat: chat.jsonl, code: code.jsonl}
    test_files: dict[PlainName, Rows] = field(default_factory=dict)
    # column of chat messages; trained on: those of the assistant, or as a field `train` says
    messages_column: str = "messages"
    tools_column: str = ""  # column of tool schemas for the chat template; empty: none
    images_column: str = ""  # column of images, for models that take them; empty: none
    max_image_pixels: PositiveInt = 1 << 24  # maximum pixels of an image; larger ones are refused
    images_dir: str = ""  # folder of images that rows name by path; empty: that of the data file
    train_on_prompt: bool = False  # train on all tokens
    # maximum tokens of a conversation; null: 4096, or the positions of a model that has fewer
    max_tokens: Annotated[int, AtLeast(2)] | None = None
    # longer rows: refuse (the file) or drop (the rows)
    long_rows: LongRows = "refuse"

    @property
    def token_limit(self) -> int:
        """Most tokens of a conversation."""
        return self.max_tokens or EXAMPLE_TOKENS


@dataclass
class PairsConfig:
    """Preference pairs, in the same kinds of files."""

    train_file: Rows = ""  # training rows with the prompt, chosen and rejected columns
    train_files: list[Rows] = field(default_factory=list)  # several sources, instead of train_file
    # relative frequency of each of train_files; empty: each row of all once an epoch
    train_weights: list[PositiveFloat] = field(default_factory=list)
    test_file: Rows = ""  # held-out set `test`
    # held-out sets, by their names in metrics: {chat: chat.jsonl, code: code.jsonl}
    test_files: dict[PlainName, Rows] = field(default_factory=dict)
    prompt_column: str = "prompt"  # column of chat messages
    chosen_column: str = "chosen"  # column of the preferred answer: messages after the prompt
    rejected_column: str = "rejected"  # column of the other answer: messages after the prompt
    margin_column: str = ""  # column of the wanted difference of scores, for rm; empty: none
    tools_column: str = ""  # column of tool schemas for the chat template; empty: none
    # maximum tokens of a prompt with one answer; null: 4096, or the positions of a model that has
    # fewer
    max_tokens: Annotated[int, AtLeast(2)] | None = None
    # longer rows: refuse (the file) or drop (the rows)
    long_rows: LongRows = "refuse"

    @property
    def token_limit(self) -> int:
        """Most tokens of a prompt with one answer."""
        return self.max_tokens or EXAMPLE_TOKENS


AnyData = DataConfig | ConversationsConfig | PairsConfig


@dataclass
class StepsConfig:
    num_epochs: PositiveFloat = 1.0  # passes over all rows; with data.train_weights as many rows
    num_steps: NonNegativeInt = 0  # optimizer steps; 0: by num_epochs
    batch_size: PositiveInt = 64  # conversations or pairs per optimizer step
    # maximum rows of each held-out set per evaluation; 0: all
    eval_samples: NonNegativeInt = 0
    save_every: NonNegativeInt = 0  # steps between training checkpoints; 0: none
    # trackers of metrics: tensorboard, wandb, mlflow, swanlab, or import paths (docs/watching.md)
    trackers: list[Tracker] = field(default_factory=lambda: ["tensorboard"])
    tracker_project: str = "mcore_rl"  # project or experiment of the trackers


@dataclass
class HeldOutConfig:
    """Evaluation on held-out rows; there is always one after training."""

    before: bool = True  # evaluate before training
    every: NonNegativeInt = 0  # steps between evaluations during training; 0: none


@dataclass
class ReferenceConfig:
    """The frozen model of a loss: the weights of model.path, or with LoRA the base weights."""

    # devices: shared (those of the trained model) or own (as many)
    placement: Annotated[str, OneOf("shared", "own")] = "shared"


@dataclass
class TrainConfig:
    """Settings of all jobs that train on examples."""

    seed: Seed = 0  # seed of data order and adapters
    # folder of all outputs; new or empty, unless resumed
    output_dir: OutputFolder = "outputs/train"
    # where to resume: never, auto (from output_dir, else a new run), or a checkpoint's folder
    resume: Resume = "never"
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

    output_dir: OutputFolder = "outputs/sft"  # folder of all outputs; new or empty, unless resumed
    data: ConversationsConfig = field(default_factory=ConversationsConfig)
    loss_aggregation: FunctionName = "token_mean"  # how token losses are averaged


@dataclass
class DPOConfig(TrainConfig):
    """Training on preference pairs, without a reward model."""

    output_dir: OutputFolder = "outputs/dpo"  # folder of all outputs; new or empty, unless resumed
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: FunctionName = "dpo"  # loss of a pair: a name, or the import path of a function
    loss_settings: dict[str, Any] = field(default_factory=dict)  # settings of `loss`
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


@dataclass
class RMConfig(TrainConfig):
    """A reward model, trained on preference pairs."""

    output_dir: OutputFolder = "outputs/rm"  # folder of all outputs; new or empty, unless resumed
    data: PairsConfig = field(default_factory=PairsConfig)


# Settings of the commands that train.
JOB_SCHEMAS = {"rl": RLConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig}


@dataclass
class EvaluatedModelConfig(ModelConfig):
    # Hugging Face checkpoint, or the output_dir of a run
    path: Annotated[str, NotEmpty("a Hugging Face checkpoint, or the output_dir of a run")] = ""
    # date for chat templates; empty: that of the run, else 2024-07-26
    chat_date: Annotated[str, Date(may_be_empty=True)] = ""


@dataclass
class SetsConfig:
    # files (docs/data.md) by names of your choice, as data.sets.math=math.parquet
    sets: dict[PlainName, str] = field(default_factory=dict)
    num_prompts: NonNegativeInt = 0  # number of first prompts of each set; 0: all
    # column of prompts: chats, lists of {role, content}, or texts; null: the first that the file
    # has of messages, prompt, question, problem
    prompt_column: str | None = None
    # column of the ground truth, passed to the reward; null: the first that the file has of answer,
    # solution, ground_truth, label
    answer_column: str | None = None
    tools_column: str = ""  # column of tool schemas for the chat template; empty: none
    images_column: str = ""  # column of images, for models that take them; empty: none
    max_image_pixels: PositiveInt = 1 << 24  # maximum pixels of an image; larger ones are refused
    images_dir: str = ""  # folder of images that rows name by path; empty: that of the data file
    # maximum tokens of a prompt with the chat template applied, and all tokens of images; null:
    # 1024, or fewer as the positions of the model allow
    max_prompt_tokens: PositiveInt | None = None
    # longer prompts: refuse (the file) or drop (the rows)
    long_prompts: LongRows = "refuse"


@dataclass
class SamplingConfig(RolloutConfig):
    """The servers that generate, and how they sample."""

    n: Annotated[int, Between(1, MAX_N)] = 1  # responses per prompt
    temperature: NonNegativeFloat = 1.0  # sampling temperature; 0 is greedy
    top_p: TopP = 1.0  # total probability of the tokens to sample from


@dataclass
class ScoringConfig:
    # k of pass@k and majority@k, up to rollout.n; empty: 1, 2, 4, ... and rollout.n
    ks: list[PositiveInt] = field(default_factory=list)
    term: str = ""  # term of reward.terms that decides correctness; empty: the sum
    # minimum reward of a correct response
    correct_from: Annotated[float, AtLeast(-MAX_WEIGHT)] = 1.0


@dataclass
class EvalConfig:
    seed: Seed = 0  # seed of sampling
    output_dir: OutputFolder = "outputs/eval"  # folder of all outputs; new or empty, unless resumed
    # what to resume: never, or auto: continue with the incomplete sets of output_dir
    resume: Annotated[str, OneOf("never", "auto")] = "never"
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
