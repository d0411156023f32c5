"""Settings of the jobs that train on examples: `mcore-rl sft`, `dpo` and `rm`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rl.config.schema import CheckpointConfig, EngineConfig, ModelConfig, TimeoutsConfig


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
    """When held-out rows are scored."""

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
    """What the three jobs have in common."""

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
