"""Settings of `mcore-rl eval`, and the rules between them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from mcore_rl.config.checks import at_least, between, check_values, iso_date, one_of, positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve import (
    DTYPE_OF_LANE,
    DTYPES,
    LONG_PROMPTS,
    MAX_SEED,
    OWN_POOL,
    resolve_reward,
    reward_terms,
)
from mcore_rl.config.resolve_evaluation import check_stop
from mcore_rl.config.resolve_servers import check_batch_of_lane, resolve_servers
from mcore_rl.config.schema import (
    DataConfig,
    ModelConfig,
    PlacementConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    TimeoutsConfig,
)

MAX_N = 1000  # beyond it numbers of subsets are no float64


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
    """The vLLM servers that generate, and how they sample."""

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
        """Those of pass@k and majority@k, in order.

        >>> EvalConfig(rollout=SamplingConfig(n=6)).ks
        [1, 2, 4, 6]
        """
        n = self.rollout.n
        return sorted(set(self.scoring.ks or [*(2**i for i in range(n.bit_length())), n]))


def resolve_eval(config: EvalConfig) -> None:
    """Check every setting that needs no file."""
    check_values(config)
    one_of("model.dtype", config.model.dtype, (*DTYPES, "auto"))
    if config.model.chat_date:
        iso_date("model.chat_date", config.model.chat_date)
    one_of("resume", config.resume, ("never", "auto"))
    between("seed", config.seed, 0, MAX_SEED)
    for key, value in (("model.path", config.model.path), ("output_dir", config.output_dir)):
        if not value:
            raise ConfigError(f"{key}='' names no folder")
    if not config.data.sets:
        raise ConfigError("data.sets is empty; allowed: one or more, as data.sets.NAME=FILE")
    for name in config.data.sets:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(
                f"data.sets.{name}: its name is that of a file; allowed: letters, digits, '_', '-'"
            )
    at_least("data.num_prompts", config.data.num_prompts, 0)
    at_least("data.max_prompt_tokens", config.data.max_prompt_tokens, 1)
    one_of("data.long_prompts", config.data.long_prompts, LONG_PROMPTS)
    positive("timeouts.start_s", config.timeouts.start_s)
    positive("timeouts.call_s", config.timeouts.call_s)
    _resolve_sampling(config.rollout)
    resolve_reward(config.reward)
    _resolve_metrics(config)


def _resolve_sampling(config: SamplingConfig) -> None:
    check_stop("rollout.stop", config.stop)
    resolve_servers(config)
    if config.load_format == "dummy":
        raise ConfigError(
            "rollout.load_format='dummy': an evaluation has no trainer that sends weights; "
            "allowed: 'auto', 'checkpoint'"
        )
    between("rollout.n", config.n, 1, MAX_N)
    at_least("rollout.temperature", config.temperature, 0)
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"rollout.top_p={config.top_p}; allowed: above 0, up to 1")
    if not config.temperature and config.n > 1:
        raise ConfigError(
            f"rollout.n={config.n}: with rollout.temperature=0 all responses to a prompt are the "
            "same; allowed: 1"
        )


def _resolve_metrics(config: EvalConfig) -> None:
    for k in config.ks:
        if not 1 <= k <= config.rollout.n:
            raise ConfigError(f"scoring.ks: {k}; allowed: 1 to rollout.n={config.rollout.n}")
    at_least("scoring.correct_from", config.scoring.correct_from, -float("1e6"))
    if config.scoring.term and config.scoring.term not in config.reward.terms:
        raise ConfigError(
            f"scoring.term={config.scoring.term!r}; allowed: '', or one of reward.terms: "
            f"{', '.join(reward_terms(config.reward)) or 'there is none'}"
        )
    if config.reward.on_error == "drop" or config.reward.shuffle:
        raise ConfigError(
            "reward.on_error='drop' and reward.shuffle=true are for training; allowed: 'stop' or "
            "'zero' (a response without a reward is wrong), and false"
        )


def as_run(config: EvalConfig, device: str, path: str, chat_date: str) -> RLConfig:
    """What starts servers as those of a run: the model of the folder `path`, on own devices.

    `device` is "cpu" or "cuda". `chat_date` is that of prompts.
    """
    data = config.data
    dtype = config.model.dtype if config.model.dtype != "auto" else DTYPE_OF_LANE[device]
    run = RLConfig(
        seed=config.seed,
        output_dir=config.output_dir,
        placement=replace(PlacementConfig(), rollout=OWN_POOL),
        model=ModelConfig(path, dtype, chat_date),
        data=DataConfig(
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
            tools_column=data.tools_column,
            max_prompt_tokens=data.max_prompt_tokens,
            long_prompts=data.long_prompts,
        ),
        rollout=config.rollout,
        reward=config.reward,
        timeouts=config.timeouts,
    )
    check_batch_of_lane("rollout", run.rollout, run.max_sequence_tokens, device)
    return run
