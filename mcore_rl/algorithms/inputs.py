"""The inputs of losses, of what prepares them, and of advantages: one object of named arrays each.

None uses process groups. Reading an input that a run does not have is a ConfigError that names
it and the setting that provides it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mcore_rl.algorithms.reductions import ChosenTokens, totals
from mcore_rl.config.errors import ConfigError
from mcore_rl.data.batch import Batch, Jagged

Tensors = Mapping[str, Tensor]
# The loss of each token, and metrics of each token; without a mask, weights or means.
LossResult = tuple[Tensor, Tensors]
# What an engine takes: the same, or several losses, each by the column of its weights. A mean of a
# metric is over the tokens with a loss weight or, of a pair, with one in the column that it names.
Metric = Tensor | tuple[str, Tensor]
Losses = tuple[Tensor | Tensors, Mapping[str, Metric]]
WEIGHTS = "_weights"  # how the names of such columns end
LOSS_WEIGHTS = "loss_weights"  # those of the loss that algorithm.loss names

G = TypeVar("G", bound=Callable[..., Any])
# What not every run has, and what gives it.
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


def stream_name(column: str) -> str:
    """What the sum of weights * loss is called: kl_loss with kl_weights."""
    return "policy_loss" if column == LOSS_WEIGHTS else column.removesuffix(WEIGHTS) + "_loss"


def needs(*names: str) -> Callable[[G], G]:
    """Decorator of a loss or an advantage function that reads one of `OPTIONAL`.

    A run without it is refused before it starts. The entropy is computed for no other loss.
    """
    if unknown := [name for name in names if name not in OPTIONAL]:
        raise ConfigError(f"@needs of {', '.join(unknown)}; allowed: {', '.join(OPTIONAL)}")

    def mark(function: G) -> G:
        function.needs = frozenset(names)  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> frozenset[str]:
    """The inputs that a function or callable object declared with `needs`."""
    return frozenset(getattr(function, "needs", ()))


def check_needs(needed: Collection[str], given: Collection[str], who: str) -> None:
    """Raises ConfigError if a needed input is not available."""
    for name in sorted(needed):
        if name not in given:
            missing(name, who)


def missing(name: str, who: str) -> NoReturn:
    """Raises the ConfigError for an input that `who` asks for and a run lacks."""
    why = _WHY_MISSING.get(name, "the batch has no such column")
    raise ConfigError(f"{who} asks for {name}, which this run does not have: {why}")


def _same(totals: Tensor) -> Tensor:
    return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Tensors of one micro-batch, each [tokens]: the response tokens that this rank has scored.

    Under context parallelism the tokens of a sequence are on several ranks, and several sequences
    are in one micro-batch; a sequence is never in two. `sequence_sum` and `sequence_mean` are
    right in all of that, and so are their gradients. Every rank must make the same calls, so never
    under an `if` on the values of tensors.
    """

    scores: Tensors  # of the model in training, with gradients: log_probs and entropy, or values
    columns: Tensors  # of the batch, without: all that run along the response tokens
    sequence_ids: Tensor  # which sequence each token is of: int64, from 0 to num_sequences - 1
    num_sequences: int  # of the micro-batch, the same on all ranks that share them
    # Adds [num_sequences, ...] up over the ranks that share the sequences, and their gradients.
    sum_over_ranks: Callable[[Tensor], Tensor] = _same

    @property
    def log_probs(self) -> Tensor:
        """Of the policy in training, in nats, with gradient."""
        return self._score("log_probs")

    @property
    def entropy(self) -> Tensor:
        """Of the policy's distribution at each token, in nats, with gradient; @needs("entropy")."""
        return self._score("entropy")

    @property
    def values(self) -> Tensor:
        """Of a value model in training, with gradient."""
        return self._score("values")

    @property
    def old_log_probs(self) -> Tensor:
        """Of the policy that generated, computed by the trainer before the first update."""
        return self._column("log_probs", "old_log_probs")

    @property
    def rollout_log_probs(self) -> Tensor:
        """The same, computed by the server that generated."""
        return self._column("rollout_log_probs")

    @property
    def reference_log_probs(self) -> Tensor:
        """Of the frozen reference model."""
        return self._column("reference_log_probs")

    @property
    def old_values(self) -> Tensor:
        """Of the value model before the first update."""
        return self._column("values", "old_values")

    @property
    def returns(self) -> Tensor:
        """The targets of a value model."""
        return self._column("returns")

    @property
    def advantages(self) -> Tensor:
        return self._column("advantages")

    @property
    def response_mask(self) -> Tensor:
        """True at tokens to train on: those that the policy chose."""
        return self._column("response_mask") != 0

    @property
    def loss_weights(self) -> Tensor:
        """The weight of each token's loss: see aggregation.py."""
        return self._column("loss_weights")

    def prepared(self, name: str) -> Tensor:
        """A column of the function that the loss is marked with: see prepared_by."""
        return self._column(name)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[tokens] to [tokens]: at each token the sum over all tokens to train on of its sequence.

        Values that are not finite at other tokens have no effect.
        """
        return self._totals(self._masked(values)[:, None])[self.sequence_ids, 0]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[tokens] to [tokens]: the same, divided by their number; 0 where it is 0."""
        parts = [self._masked(values), self.response_mask.to(values.dtype)]
        total, count = self._totals(torch.stack(parts, -1)).unbind(-1)
        return (total / count.detach().clamp(min=1))[self.sequence_ids]

    def _masked(self, values: Tensor) -> Tensor:
        return torch.where(self.response_mask, values, 0)

    def _totals(self, values: Tensor) -> Tensor:
        """[tokens, n] to [num_sequences, n]."""
        zeros = values.new_zeros(self.num_sequences, values.shape[1])
        return self.sum_over_ranks(zeros.index_add(0, self.sequence_ids, values))

    def _score(self, name: str) -> Tensor:
        if name not in self.scores:
            missing(name, "algorithm.loss")
        return self.scores[name]

    def _column(self, name: str, called: str = "") -> Tensor:
        if name not in self.columns:
            missing(called or name, "algorithm.loss")
        return self.columns[name]


def reward_part(batch: Batch, name: str) -> npt.NDArray[np.float64] | None:
    """[samples]: what the reward function returned under this name, and 0 where it failed.

    None if it returns nothing of that name. Where it failed for all, no part is known.
    """
    if (column := f"reward/{name}") in batch:
        return np.nan_to_num(batch.array(column).astype(np.float64))
    if "reward_errors" in batch and (batch.array("reward_errors") != "").all():
        return np.zeros(len(batch))
    return None


def reward_parts(batch: Batch) -> list[str]:
    """The names of what the reward function returned."""
    return [c.removeprefix("reward/") for c in batch.columns if c.startswith("reward/")]


class Estimates(NamedTuple):
    """What an advantage function may return for a run with a value model."""

    advantages: npt.NDArray[np.floating] | Jagged  # [samples] or [response tokens]
    returns: Jagged  # [response tokens]: the targets of the value model


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Columns of all samples of a step, of all data-parallel ranks.

    Samples of a group may be anywhere, and groups may differ in size.
    """

    batch: Batch

    @property
    def rewards(self) -> npt.NDArray[np.floating]:
        """[samples]: all that a response has earned, without a KL penalty."""
        return self.batch.array("rewards")

    def reward_part(self, name: str) -> npt.NDArray[np.float64]:
        """[samples]: what the reward function returned under this name; 0 where it failed.

        Raises:
            ConfigError: it returned none.
        """
        if (found := reward_part(self.batch, name)) is None:
            raise ConfigError(
                f"algorithm.advantage asks for the part {name!r} of the reward; reward.name gives "
                f"{', '.join(sorted(reward_parts(self.batch))) or 'none'}"
            )
        return found

    @property
    def token_rewards(self) -> Jagged:
        """[response tokens]: of each token, such as a process reward, less a KL penalty.

        A run that makes no such rewards has the reward of a response at the last token that the
        policy chose. Rewards of tokens that it did not choose are not used.
        """
        if "token_rewards" in self.batch:
            return self._column("token_rewards")
        tokens = ChosenTokens(self.response_mask)
        rewards = np.zeros(len(tokens.at))
        rewards[tokens.last] = self.rewards[tokens.counts > 0]
        return tokens.spread(rewards)

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """[samples]: what a response has earned; the sum of token_rewards if a run makes them.

        A response without a chosen token has no token to hold its reward, so its score is the
        reward itself.
        """
        if "token_rewards" not in self.batch:
            return self.rewards.astype(np.float64)
        tokens = ChosenTokens(self.response_mask)
        sums = totals(tokens.sample, tokens.of(self.token_rewards), len(self.batch))
        return np.where(tokens.counts > 0, sums, self.rewards)

    @property
    def baseline_rewards(self) -> npt.NDArray[np.floating]:
        """[samples]: of the greedy response to the same prompt; @needs("baseline_rewards")."""
        return self._array("baseline_rewards")

    @property
    def group_ids(self) -> npt.NDArray[np.integer]:
        """[samples]: the same for responses to one prompt, in one role."""
        return self.batch.array("group_ids")

    @property
    def response_lengths(self) -> npt.NDArray[np.int64]:
        """[samples]: tokens of each response."""
        return self.batch.jagged("response_ids").lengths

    @property
    def response_mask(self) -> Jagged:
        """[response tokens]: 1 at those that the policy chose, else 0."""
        return self._column("response_mask")

    @property
    def state_ids(self) -> Jagged:
        """[response tokens]: integers, the state of the environment that a token was chosen in.

        The same for equal states within a group, and for the tokens of a turn; @needs("state_ids").
        -1 at tokens that the policy did not choose.
        """
        found = self._column("state_ids")
        if (found.values[self.response_mask.values != 0] < 0).any():
            missing("state_ids", "algorithm.advantage")
        return found

    @property
    def log_probs(self) -> Jagged:
        """[response tokens] of the policy that generated, by the trainer, in nats."""
        return self._column("log_probs")

    @property
    def sum_pi_squared(self) -> Jagged:
        """[response tokens]: the sum over the vocabulary of the squared probabilities.

        Of the same policy and temperature as log_probs; @needs("sum_pi_squared").
        """
        return self._column("sum_pi_squared")

    @property
    def reference_log_probs(self) -> Jagged:
        """[response tokens] of the frozen reference model, in nats."""
        return self._column("reference_log_probs")

    @property
    def values(self) -> Jagged:
        """[response tokens]: the value of the state before each; @needs("values")."""
        return self._column("values")

    def _column(self, name: str) -> Jagged:
        if name not in self.batch:
            missing(name, "algorithm.advantage")
        return self.batch.jagged(name)

    def _array(self, name: str) -> npt.NDArray[np.floating]:
        if name not in self.batch:
            missing(name, "algorithm.advantage")
        return self.batch.array(name)
