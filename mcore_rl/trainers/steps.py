"""The steps of reinforcement-learning loops: functions of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mcore_rl.algorithms.advantages import token_advantages
from mcore_rl.algorithms.aggregation import loss_weights, top_entropy_mask
from mcore_rl.algorithms.correction import corrected
from mcore_rl.algorithms.distillation import sampled_kl
from mcore_rl.algorithms.sample_choice import CHOICE_STREAM, kept_responses
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_algorithm import TOP_TOKEN_LOSSES
from mcore_rl.config.schema import AlgorithmConfig, FilterConfig
from mcore_rl.controller.batch_ops import B, kept, per_sample
from mcore_rl.controller.dispatch import Group
from mcore_rl.data.batch import NOT_SAID, Batch, Jagged, Samples
from mcore_rl.data.trajectories import Trajectories
from mcore_rl.trainers.update_metrics import TokenCounts, token_counts

T = TypeVar("T")

TRAJECTORY = "group_ids", "trajectories", "segments"  # say which samples are of one


def with_baseline_rewards(batch: B, greedy: Samples) -> B:
    """Adds baseline_rewards: of the one greedy response to the same prompt, in the same role.

    Without the samples of prompts whose greedy response got no reward, which says nothing of what
    the policy earns there.

    Raises:
        ConfigError: none of the greedy responses got one.
    """
    has_reward = greedy.array("reward_errors") == ""
    found_for = zip(_asked_of(greedy), greedy.array("rewards"), has_reward, strict=True)
    rewards = {asked: reward for asked, reward, is_found in found_for if is_found}
    groups = _asked_of(batch)
    rows = [row for row, group in enumerate(groups) if group in rewards]
    if not rows:
        first = greedy.array("reward_errors")[0]
        raise ConfigError(f"none of {len(greedy)} greedy responses got a reward; first: {first}")
    found = np.array([rewards[groups[row]] for row in rows], np.float32)
    return batch.take(rows).with_columns(baseline_rewards=found)


def _asked_of(batch: Samples) -> list[tuple[int, str]]:
    """The group id and the role of each sample."""
    groups = batch.array("group_ids").tolist()
    roles = batch.array("roles").tolist() if "roles" in batch else [""] * len(groups)
    return list(zip(groups, roles, strict=True))


def judged(batch: B, on_error: str) -> tuple[B, dict[str, float]]:
    """The batch, with reward.on_error=drop without the samples that got no reward; and metrics.

    Groups may then differ in size, and a group may be gone.

    Raises:
        ConfigError: none is left.
    """
    if on_error == "stop":  # the servers have raised
        return batch, {}
    errors = batch.array("reward_errors")
    left = np.flatnonzero(errors == "").tolist()
    metrics = {"reward_errors": failed_share(batch)}
    if on_error != "drop":
        return batch, metrics
    if not left:
        raise ConfigError(
            f"reward.on_error='drop': none of the {len(batch)} responses of a step got a reward; "
            f"the first: {errors[0]}"
        )
    return batch.take(left), metrics | {"dropped": float(len(batch) - len(left))}


def failed_share(batch: Samples) -> float:
    """Of the samples, those that got no reward."""
    return float((batch.array("reward_errors") != "").mean())


def with_reference_log_probs(batch: B, score: Callable[..., B], temperature: float) -> B:
    """`score`: the method of a group that gives log_probs of the reference model."""
    asked = batch.select("prompt_ids", "response_ids")
    scored = score(asked, temperature=temperature).select("log_probs")
    return batch.union(scored.renamed(log_probs="reference_log_probs"))


def with_log_probs(batch: B, actor: Group, algorithm: AlgorithmConfig, temperature: float) -> B:
    """Adds log_probs of the actor or, if so configured, those of the servers in their place."""
    if algorithm.correction.use_rollout_log_probs:
        served = batch.select("rollout_log_probs")
        return batch.union(served.renamed(rollout_log_probs="log_probs"))
    scored: B = actor.compute_log_probs(batch, temperature=temperature)
    return scored


def shuffled_rewards(batch: B, seed: Sequence[int]) -> B:
    """The same rewards, permuted over the samples, and none of tokens: no signal is left."""
    rewards = np.random.default_rng(seed).permutation(batch.array("rewards"))
    return batch.without("process_rewards").with_columns(rewards=rewards)


def with_advantages(batch: Batch, algorithm: AlgorithmConfig) -> Batch:
    """Adds the columns advantages and, for a value model, returns.

    With teachers those of rewards only if distillation.use_reward; less the sampled KL, with that.
    """
    distillation, responses = algorithm.distillation, batch.jagged("response_ids")
    if distillation.loss == "off" or distillation.use_reward:
        found = token_advantages(batch, algorithm.advantage, algorithm.advantage_settings)
    else:
        found = {"advantages": responses.with_values(np.zeros(len(responses.values), np.float32))}
    if distillation.loss == "sampled_kl":
        kl = np.float32(distillation.coef) * sampled_kl(batch).values
        found["advantages"] = responses.with_values(found["advantages"].values - kl)
    return batch.with_columns(**found)


def without_truncated(batch: Batch, samples: FilterConfig) -> Batch:
    """Mask all tokens of truncated trajectories from every loss (mask_truncated).

    A trajectory is truncated if its last turn is: all of its samples are masked then, and none
    for an earlier turn that was cut off. DAPO's overlong filtering (arXiv:2503.14476, section 3.4).
    Truncated trajectories still count in the advantages of their group.
    """
    if not samples.mask_truncated:
        return batch
    mask, last_rows = batch.jagged("response_mask"), Trajectories(batch).last_rows
    is_whole = batch.array("finish_reasons")[last_rows] != "length"
    columns = {"response_mask": mask, "cross_entropy_mask": _cross_entropy_mask(batch)}
    of_tokens = np.repeat(is_whole, mask.lengths)
    masked = {name: c.with_values(c.values * of_tokens) for name, c in columns.items()}
    return batch.with_columns(**masked)


def _cross_entropy_mask(batch: Batch) -> Jagged:
    """What samples say or, where they do not, the tokens that the policy did not choose."""
    response_mask = batch.jagged("response_mask")
    others = response_mask.values == 0
    if "cross_entropy_mask" not in batch:
        return response_mask.with_values(others)
    said = batch.jagged("cross_entropy_mask")
    return said.with_values(np.where(said.values == NOT_SAID, others, said.values))


def chosen_responses(batch: B, samples: FilterConfig, seed: Sequence[int]) -> B:
    """Those of algorithm.filter.keep_responses, where advantages compare all that there were."""
    is_later = samples.advantages_of == "generated"
    return kept(kept_responses, batch, samples, [*seed, CHOICE_STREAM]) if is_later else batch


def mini_batches(batch: Samples, num: int, seed: Sequence[int]) -> list[list[int]]:
    """Rows of full groups, distributed at random over at most `num` mini-batches; none is empty."""
    group_ids = batch.array("group_ids")
    groups = np.random.default_rng(seed).permutation(np.unique(group_ids))
    parts = [part for part in np.array_split(groups, num) if len(part)]
    return [np.flatnonzero(np.isin(group_ids, part)).tolist() for part in parts]


def with_each(
    batch: Batch,
    num: int,
    seed: Sequence[int],
    function: Callable[..., tuple[Batch, T]],
    *args: object,
) -> tuple[Batch, list[T]]:
    """Adds the columns that a function adds to each mini-batch; with its value of each."""
    parts = mini_batches(batch, num, seed)
    found = [function(batch.take(rows), *args) for rows in parts]
    order = np.argsort(np.concatenate(parts)).tolist()
    joined = Batch.concat([part for part, _ in found]).take(order)
    added = {name: joined[name] for name in joined.names if name not in batch}
    return batch.with_columns(**added), [value for _, value in found]


def with_correction(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Batch, dict[str, float]]:
    """Adds what algorithm.correction and top_entropy_share leave to train on, and its metrics."""
    batch, metrics = corrected(batch, algorithm.correction)
    if algorithm.top_entropy_share < 1:
        entropy, mask = batch.jagged("entropy"), batch.jagged("response_mask")
        highest = top_entropy_mask(entropy, mask, algorithm.top_entropy_share)
        batch = batch.with_columns(top_entropy_mask=highest)
    return batch, metrics


def with_loss_weights(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Batch, TokenCounts]:
    """Adds the weights of each loss, of a whole mini-batch; and how many of each are not 0.

    algorithm.loss_aggregation normalises each over its own tokens, with all samples of a trajectory
    as one sequence; then comes its coefficient.

    loss_weights: over policy_mask or, without one, response_mask; 0 where correction_weights or
    top_entropy_mask are. kl_weights, entropy_weights, distillation_weights: over response_mask.
    cross_entropy_weights: over cross_entropy_mask or, where a sample has none, where response_mask
    is 0. A loss without a coefficient has no column; one without a token has zeros.
    """
    response_mask = batch.jagged("response_mask")
    policy_mask = batch.jagged("policy_mask") if "policy_mask" in batch else response_mask
    trajectories = Trajectories(batch)
    policy = _weights(policy_mask, 1.0, algorithm, trajectories)
    for name in ("correction_weights", "top_entropy_mask"):
        if name in batch:
            policy = policy.with_values(np.where(batch.jagged(name).values, policy.values, 0))
    columns, distillation = {"loss_weights": policy}, algorithm.distillation
    if distillation.loss in TOP_TOKEN_LOSSES:
        if not distillation.use_reward:
            columns["loss_weights"] = policy.with_values(np.zeros_like(policy.values))
        coef = distillation.coef
        columns["distillation_weights"] = _weights(response_mask, coef, algorithm, trajectories)
    if algorithm.kl_coef and algorithm.kl_placement == "loss":
        coef = algorithm.kl_coef
        columns["kl_weights"] = _weights(response_mask, coef, algorithm, trajectories)
    if algorithm.entropy_coef:
        coef = algorithm.entropy_coef
        columns["entropy_weights"] = _weights(response_mask, coef, algorithm, trajectories)
    if algorithm.cross_entropy_coef:
        mask, coef = _cross_entropy_mask(batch), algorithm.cross_entropy_coef
        columns["cross_entropy_weights"] = _weights(mask, coef, algorithm, trajectories)
    return batch.with_columns(**columns), token_counts(Batch({**columns}))


def _weights(
    mask: Jagged, coef: float, algorithm: AlgorithmConfig, trajectories: Trajectories
) -> Jagged:
    if not mask.values.any():
        return mask.with_values(np.zeros(len(mask.values), np.float32))
    mode, settings = algorithm.loss_aggregation, algorithm.loss_aggregation_settings
    weights = loss_weights(mask, mode, settings, trajectories.numbers)
    return weights.with_values(weights.values * np.float32(coef))


def with_values(batch: B, critic: Group) -> B:
    """Adds values, of the critic before its update."""
    scored = critic.compute_values(batch.select("prompt_ids", "response_ids"))
    return batch.union(scored.select("values"))


def compute_policy_entropy(batch: Batch) -> dict[str, float]:
    """Return the metric actor/entropy: the mean over tokens that the policy chose, in nats.

    A batch with the servers' log-probs has none, and gets it in the update.
    """
    chosen = batch.jagged("response_mask").values != 0
    if "entropy" not in batch or not chosen.any():
        return {}
    return {"actor/entropy": float(batch.jagged("entropy").values[chosen].mean(dtype=np.float64))}


def doubts(batch: Batch) -> dict[str, str]:
    """Say why a batch with advantages teaches nothing, or little: kinds of StepWarnings."""
    found = {}
    ended = batch.array("finish_reasons") == "stop"  # with a token that says so
    num_empty = int((batch.jagged("response_ids").lengths <= ended).sum())
    if 2 * num_empty >= len(batch):
        text = f"{num_empty} of {len(batch)} responses are empty"
        found["half of the responses or more were empty"] = text
    if not (batch.jagged("advantages").values * batch.jagged("response_mask").values).any():
        rewards = batch.array("rewards")
        found["all advantages were 0"] = (
            f"all advantages are 0, with rewards from {rewards.min():g} to {rewards.max():g}: the "
            "batch teaches nothing"
        )
    return found


def describe(batch: Samples) -> dict[str, float]:
    """Metrics of what was generated, over trajectories."""
    num_samples, num_turns = len(batch), batch.array("turns").sum() if "turns" in batch else 0
    batch = Trajectories(per_sample(batch)).joined()
    lengths = batch.array("response_tokens")
    metrics: dict[str, Any] = {
        "reward": batch.array("rewards").mean(),
        "response_tokens": lengths.mean(),
        "response_tokens_max": lengths.max(),
        "truncated": (batch.array("finish_reasons") == "length").mean(),
    }
    if num_turns > len(batch):
        metrics["turns"] = num_turns / len(batch)
    if num_samples > len(batch):
        metrics["samples_per_trajectory"] = num_samples / len(batch)
    if "roles" in batch:
        roles = batch.array("roles")
        for role in np.unique(roles[roles != ""]):
            metrics[f"role/{role}/reward"] = batch.array("rewards")[roles == role].mean()
    parts = [name for name in batch.columns if name.startswith("reward/")]
    return {k: float(v) for k, v in metrics.items()} | {
        name: float(np.nanmean(batch.array(name))) for name in parts
    }
