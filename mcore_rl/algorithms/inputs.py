"""Inputs of losses and advantages: named arrays of a micro-batch, a mini-batch or a trainer step.

None uses process groups. Reading an input that a run does not have is a ConfigError that names
it and the setting that provides it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mcore_rl.algorithms.reductions import ChosenTokens, sum_by_index
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged

Tensors = Mapping[str, Tensor]
# The loss and the metrics of each token, before any mask, weight or mean.
LossResult = tuple[Tensor, Tensors]
# Result of an engine's loss function: as above, or several losses by the column of their weights.
# A metric is averaged over the tokens with a loss weight; a pair names another weight column.
Metric = Tensor | tuple[str, Tensor]
Losses = tuple[Tensor | Tensors, Mapping[str, Metric]]
WEIGHTS = "_weights"  # suffix of weight columns
LOSS_WEIGHTS = "loss_weights"  # weights of the loss that algorithm.loss names

G = TypeVar("G", bound=Callable[..., Any])
# Inputs that only some runs have.
OPTIONAL = (
    "entropy",
    "reference_log_probs",
    "values",
    "old_values",
    "returns",
    "baseline_rewards",
    "state_ids",
    "sum_pi_squared",
)
_CRITIC = "a value model gives it, and this run has none"
_WHY_MISSING = {
    "log_probs": "a language model gives it, and this is a value model",
    "entropy": "it is computed for a loss with @needs('entropy') only",
    "reference_log_probs": "algorithm.kl_coef=0 loads no reference model; allowed: above 0",
    "values": _CRITIC,
    "old_values": _CRITIC,
    "returns": _CRITIC,
    "state_ids": "agent.loop=environment gives it, or a loop of your own that names a state with "
    "each turn",
    "sum_pi_squared": "the trainer computes it with its log-probs, and algorithm.correction."
    "use_rollout_log_probs=true leaves these out",
}


def get_loss_name(column: str) -> str:
    """Return the metric name of the sum of weights * loss: kl_loss for kl_weights."""
    return "policy_loss" if column == LOSS_WEIGHTS else column.removesuffix(WEIGHTS) + "_loss"


def needs(*names: str) -> Callable[[G], G]:
    """Declare, as a decorator, which of `OPTIONAL` a loss or an advantage function reads.

    A run without them is refused before it starts. The entropy is computed for no other loss.
    """
    if unknown := [name for name in names if name not in OPTIONAL]:
        raise ConfigError(f"@needs of {', '.join(unknown)}; allowed: {', '.join(OPTIONAL)}")

    def mark(function: G) -> G:
        function.needs = frozenset(names)  # type: ignore[attr-defined]
        return function

    return mark


def get_needs(function: Callable[..., Any]) -> frozenset[str]:
    """Return the inputs that a function or callable object declared with `needs`."""
    return frozenset(getattr(function, "needs", ()))


def check_needs(needed: Collection[str], available: Collection[str], reader: str) -> None:
    """Raise ConfigError if a needed input is not available."""
    for name in sorted(needed):
        if name not in available:
            raise_missing(name, reader)


def raise_missing(name: str, reader: str) -> NoReturn:
    """Raise the ConfigError for an input that `reader` (a setting) asks for and a run lacks."""
    why = _WHY_MISSING.get(name, "the batch has no such column")
    raise ConfigError(f"{reader} asks for {name}, which this run does not have: {why}")


def prepared_by(prepare: Callable[..., Mapping[str, Jagged]]) -> Callable[[G], G]:
    """Declare, as a decorator, the function that computes a loss's columns of a whole mini-batch.

    `prepare(inputs: MiniBatchInputs)`, or `prepare(inputs, settings)` with the settings of the
    loss, runs on rank 0 of the actor before the update. It returns columns by name, one number per
    response token, which the loss reads with `LossInputs.prepared`. They do not depend on how the
    mini-batch is split over micro-batches and ranks.
    """
    parameters = tuple(inspect.signature(prepare).parameters)
    if parameters not in (("inputs",), ("inputs", "settings")):
        raise ConfigError(
            f"@prepared_by of {getattr(prepare, '__name__', prepare)}{inspect.signature(prepare)}; "
            "allowed: (inputs), or (inputs, settings)"
        )

    def mark(function: G) -> G:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


def is_prepared(loss: Callable[..., Any]) -> bool:
    """Return whether a loss was declared with `prepared_by`."""
    return hasattr(loss, "prepare")


def prepare_columns(
    loss: Callable[..., Any], settings: object | None, inputs: MiniBatchInputs, reader: str
) -> dict[str, Jagged]:
    """Compute the columns of a `prepared_by` loss.

    Raises:
        ConfigError: a column exists already, or has not one finite number per response token.
    """
    prepare = loss.prepare  # type: ignore[attr-defined]
    takes_settings = "settings" in inspect.signature(prepare).parameters
    columns = prepare(inputs, settings) if takes_settings else prepare(inputs)
    lengths = inputs.batch.jagged("response_ids").lengths
    for name, column in columns.items():
        if name in inputs.batch:
            raise ConfigError(f"{reader} prepares {name}, which is a column of the batch already")
        if not isinstance(column, Jagged) or not np.array_equal(column.lengths, lengths):
            raise ConfigError(
                f"{reader} prepares {name}; allowed: a Jagged with the responses' rows"
            )
        if column.values.ndim != 1 or not np.isfinite(column.values).all():
            raise ConfigError(f"{reader} prepares {name}; allowed: a finite number for each token")
    return dict(columns)


def _keep_local(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Tensors of one micro-batch, each [tokens]: the response tokens on this rank.

    A micro-batch packs several sequences, and under context parallelism the tokens of a sequence
    are on several ranks; a sequence is never in two micro-batches. `sequence_sum` and
    `sequence_mean` and their gradients account for that. Every rank must make the same calls, so
    never call them under an `if` on the values of tensors.
    """

    scores: Tensors  # model outputs, with gradients: log_probs and entropy, or values
    columns: Tensors  # per-token columns of the batch, without gradients
    sequence_ids: Tensor  # sequence of each token: int64, from 0 to num_sequences - 1
    num_sequences: int  # of the micro-batch, the same on all ranks that share them
    # Sums [num_sequences, ...] and its gradients over the ranks that share the sequences.
    sum_over_ranks: Callable[[Tensor], Tensor] = _keep_local

    @property
    def log_probs(self) -> Tensor:
        """Log-probs of the policy in training, in nats, with gradient."""
        return self._score("log_probs")

    @property
    def entropy(self) -> Tensor:
        """Entropy of the policy at each token, in nats, with gradient; @needs("entropy")."""
        return self._score("entropy")

    @property
    def values(self) -> Tensor:
        """Values of the value model in training, with gradient."""
        return self._score("values")

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probs of the rollout policy, computed by the trainer before the first update."""
        return self._column("log_probs", "old_log_probs")

    @property
    def rollout_log_probs(self) -> Tensor:
        """Log-probs of the rollout policy, computed by the server that generated."""
        return self._column("rollout_log_probs")

    @property
    def reference_log_probs(self) -> Tensor:
        """Log-probs of the frozen reference model."""
        return self._column("reference_log_probs")

    @property
    def old_values(self) -> Tensor:
        """Values of the value model before the first update."""
        return self._column("values", "old_values")

    @property
    def returns(self) -> Tensor:
        """Targets of the value model."""
        return self._column("returns")

    @property
    def advantages(self) -> Tensor:
        return self._column("advantages")

    @property
    def response_mask(self) -> Tensor:
        """True at the tokens that the policy chose: those to train on."""
        return self._column("response_mask") != 0

    @property
    def loss_weights(self) -> Tensor:
        """Weight of each token's loss: see aggregation.py."""
        return self._column("loss_weights")

    def prepared(self, name: str) -> Tensor:
        """Return a column computed by the function given to `prepared_by`."""
        return self._column(name)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum over the tokens to train on of each token's sequence: [tokens] to [tokens].

        Values at other tokens have no effect, even if they are not finite.
        """
        masked = torch.where(self.response_mask, values, 0)
        return self._sum_sequences(masked[:, None])[self.sequence_ids, 0]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average over the tokens to train on of each token's sequence; 0 if it has none."""
        masked = torch.where(self.response_mask, values, 0)
        sums = self._sum_sequences(torch.stack([masked, self.response_mask.to(values.dtype)], -1))
        total, count = sums.unbind(-1)
        return (total / count.detach().clamp(min=1))[self.sequence_ids]

    def _sum_sequences(self, values: Tensor) -> Tensor:
        """Sum [tokens, n] to [num_sequences, n]."""
        zeros = values.new_zeros(self.num_sequences, values.shape[1])
        return self.sum_over_ranks(zeros.index_add(0, self.sequence_ids, values))

    def _score(self, name: str) -> Tensor:
        if name not in self.scores:
            raise_missing(name, "algorithm.loss")
        return self.scores[name]

    def _column(self, name: str, public_name: str = "") -> Tensor:
        if name not in self.columns:
            raise_missing(public_name or name, "algorithm.loss")
        return self.columns[name]


def get_reward_part(batch: Batch, name: str) -> npt.NDArray[np.float64] | None:
    """Return the part of the reward with this name, [samples]; 0 where the reward failed.

    None if the reward has no such part. If it failed for all samples, any part is 0: which parts it
    has is not known.
    """
    if (column := f"reward/{name}") in batch:
        return np.nan_to_num(batch.array(column).astype(np.float64))
    if "reward_errors" in batch and (batch.array("reward_errors") != "").all():
        return np.zeros(len(batch))
    return None


def list_reward_parts(batch: Batch) -> list[str]:
    """Return the names of the parts of the reward."""
    return [c.removeprefix("reward/") for c in batch.columns if c.startswith("reward/")]


class Estimates(NamedTuple):
    """Advantages and returns, the result of an advantage function in a run with a value model."""

    advantages: npt.NDArray[np.floating] | Jagged  # [samples] or [response tokens]
    returns: Jagged  # [response tokens]: the targets of the value model


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Columns of all samples of a batch, of all data-parallel ranks, by name."""

    batch: Batch
    reader: ClassVar[str]  # setting that names the function which reads them

    @property
    def rewards(self) -> npt.NDArray[np.floating]:
        """Reward of each response, without a KL penalty: [samples]."""
        return self.batch.array("rewards")

    @property
    def response_mask(self) -> Jagged:
        """1 at the tokens that the policy chose, else 0: [response tokens]."""
        return self._column("response_mask")

    def _column(self, name: str, public_name: str = "") -> Jagged:
        if name not in self.batch:
            raise_missing(public_name or name, self.reader)
        return self.batch.jagged(name)


@dataclass(frozen=True, slots=True)
class MiniBatchInputs(BatchInputs):
    """Columns of a whole mini-batch before its update: see prepared_by."""

    reader: ClassVar[str] = "algorithm.loss"
    seed: Sequence[int]  # of this mini-batch; the same if the run is resumed

    @property
    def log_probs(self) -> Jagged:
        """Log-probs of the policy before the update, in nats: [response tokens]."""
        return self._column("current_log_probs")

    @property
    def entropy(self) -> Jagged:
        """Entropy of the policy before the update, in nats: [response tokens]."""
        return self._column("entropy")

    @property
    def old_log_probs(self) -> Jagged:
        """Log-probs of the rollout policy by the trainer, in nats: [response tokens]."""
        return self._column("log_probs", "old_log_probs")

    @property
    def rollout_log_probs(self) -> Jagged:
        """Log-probs of the rollout policy by the server, in nats: [response tokens]."""
        return self._column("rollout_log_probs")

    @property
    def advantages(self) -> Jagged:
        """Advantage of each of [response tokens]."""
        return self._column("advantages")

    @property
    def loss_weights(self) -> Jagged:
        """Loss weight of each of [response tokens]; 0 at those not trained on, as rejected ones."""
        return self._column("loss_weights")


@dataclass(frozen=True, slots=True)
class AdvantageInputs(BatchInputs):
    """Columns of all samples of a step.

    Samples of a group may be anywhere, and groups may differ in size.
    """

    reader: ClassVar[str] = "algorithm.advantage"

    def reward_part(self, name: str) -> npt.NDArray[np.float64]:
        """Return the part of the reward with this name, [samples]; 0 where the reward failed.

        Raises:
            ConfigError: the reward has no such part.
        """
        if (part := get_reward_part(self.batch, name)) is None:
            raise ConfigError(
                f"algorithm.advantage asks for the part {name!r} of the reward; reward.name gives "
                f"{', '.join(sorted(list_reward_parts(self.batch))) or 'none'}"
            )
        return part

    @property
    def token_rewards(self) -> Jagged:
        """Reward of each token, such as a process reward, minus a KL penalty: [response tokens].

        Without token rewards, the reward of the response is at the last token that the policy
        chose. Rewards of tokens that it did not choose are not used.
        """
        if "token_rewards" in self.batch:
            return self._column("token_rewards")
        tokens = ChosenTokens(self.response_mask)
        rewards = np.zeros(len(tokens.positions))
        rewards[tokens.last] = self.rewards[tokens.counts > 0]
        return tokens.scatter(rewards)

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """Reward of each response, [samples]; the sum of token_rewards in a run that has them.

        A response without a chosen token has no token to hold its reward, so its score is the
        reward itself.
        """
        if "token_rewards" not in self.batch:
            return self.rewards.astype(np.float64)
        tokens = ChosenTokens(self.response_mask)
        sums = sum_by_index(tokens.rows, tokens.select(self.token_rewards), len(self.batch))
        return np.where(tokens.counts > 0, sums, self.rewards)

    @property
    def baseline_rewards(self) -> npt.NDArray[np.floating]:
        """Reward of the greedy response to the prompt, [samples]; @needs("baseline_rewards")."""
        if "baseline_rewards" not in self.batch:
            raise_missing("baseline_rewards", self.reader)
        return self.batch.array("baseline_rewards")

    @property
    def group_ids(self) -> npt.NDArray[np.integer]:
        """Group of each sample, [samples]: the responses of one role to one prompt."""
        return self.batch.array("group_ids")

    @property
    def response_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each response: [samples]."""
        return self.batch.jagged("response_ids").lengths

    @property
    def state_ids(self) -> Jagged:
        """State of the environment in which each of [response tokens] was chosen: an integer.

        Equal for equal states within a group, and for the tokens of a turn; -1 at tokens that the
        policy did not choose; @needs("state_ids").
        """
        state_ids = self._column("state_ids")
        if (state_ids.values[self.response_mask.values != 0] < 0).any():
            raise_missing("state_ids", self.reader)
        return state_ids

    @property
    def log_probs(self) -> Jagged:
        """Log-probs of the rollout policy by the trainer, in nats: [response tokens]."""
        return self._column("log_probs")

    @property
    def sum_pi_squared(self) -> Jagged:
        """Sum over the vocabulary of the squared probabilities at each of [response tokens].

        At the policy and temperature of log_probs; @needs("sum_pi_squared").
        """
        return self._column("sum_pi_squared")

    @property
    def reference_log_probs(self) -> Jagged:
        """Log-probs of the frozen reference model, in nats: [response tokens]."""
        return self._column("reference_log_probs")

    @property
    def values(self) -> Jagged:
        """Value of the state before each of [response tokens]; @needs("values")."""
        return self._column("values")
