"""Optimizer steps of the actor and the critic: one for each mini-batch, all of them in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rl.algorithms.aggregation import compute_loss_weights
from mcore_rl.algorithms.inputs import LOSS_WEIGHTS, MiniBatchInputs, is_prepared, prepare_columns
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.config.schema import AlgorithmConfig, RLConfig
from mcore_rl.controller.batch_ops import along_tokens, with_near
from mcore_rl.controller.dispatch import Group
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.trajectories import Trajectories
from mcore_rl.trainers.policy_loss import read_by_loss
from mcore_rl.trainers.steps import TRAJECTORY, mini_batches, with_each
from mcore_rl.trainers.update_metrics import StepMetrics, TokenCounts, of_update, token_counts


def update(
    actor: Group,
    batch: Samples,
    counts: Sequence[TokenCounts],
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    seed: Sequence[int],
) -> dict[str, float]:
    """One optimizer step per mini-batch with a token to train on; none if no group is left.

    The batch has the weights of its losses; `counts` is what with_loss_weights tells of each
    mini-batch.
    """
    parts = mini_batches(batch, algorithm.num_mini_batches, seed)
    numbers = [number for number, trained in enumerate(counts) if any(trained.values())]
    if not numbers:
        return {}
    if is_prepared(LOSSES[algorithm.loss]):
        metrics = [
            _prepared_update(actor, batch.take(parts[n]), n, algorithm, temperature, seed)
            for n in numbers
        ]
    else:
        read = read_by_loss(along_tokens(batch), algorithm.loss)
        metrics = _in_one_call(actor, read, [parts[n] for n in numbers], temperature=temperature)
    of_each = [(found, counts[n], parts[n]) for found, n in zip(metrics, numbers, strict=True)]
    return {f"actor/{name}": v for name, v in _of_steps(batch, of_each).items()}


def update_with_scores(
    actor: Group,
    batch: Samples,
    counts: TokenCounts,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    bounds: Mapping[str, float],
) -> tuple[Samples, dict[str, float], dict[str, float]]:
    """Take the one optimizer step of a batch that has no log-probs yet (log_prob_pass.py).

    Returns its log_probs and entropy, the gaps of trainer and servers, and the metrics, as
    `update`. No step was taken where a gap is beyond its bound; the caller has to check.
    """
    read = read_by_loss(along_tokens(batch), algorithm.loss)
    scores, gaps, step_metrics = actor.update_with_scores(
        read, temperature=temperature, bounds=bounds
    )
    metrics = _of_steps(batch, [(step_metrics, counts, [*range(len(batch))])])
    return scores, gaps, {f"actor/{name}": value for name, value in metrics.items()}


def _prepared_update(
    actor: Group,
    part: Samples,
    number: int,
    algorithm: AlgorithmConfig,
    temperature: float,
    seed: Sequence[int],
) -> dict[str, float]:
    """The step of a mini-batch for a loss that is prepared (algorithms/inputs.py).

    The columns that the loss reads are made of the mini-batch and the policy as it is then.
    """
    # Before the first one it is still the policy that has scored the batch.
    is_scored = not number and not algorithm.correction.use_rollout_log_probs
    scored = part if is_scored else actor.compute_log_probs(part, temperature=temperature)
    current = scored.select("log_probs", "entropy")
    part = part.union(current.rename_columns(log_probs="current_log_probs"))
    its_seed = [*seed, 1 + number]
    part, _ = with_near(actor, with_prepared_columns, part, algorithm, its_seed)
    read = read_by_loss(along_tokens(part), algorithm.loss)
    found: dict[str, float] = actor.update(read, temperature=temperature)[0][0]
    return found


def with_prepared_columns(
    batch: Batch, algorithm: AlgorithmConfig, seed: Sequence[int]
) -> tuple[Batch, None]:
    """Adds what the loss reads of a whole mini-batch.

    It has current_log_probs and entropy of the policy as it is before the update.
    """
    columns = prepare_columns(
        LOSSES[algorithm.loss],
        LOSSES.build_settings(algorithm.loss, algorithm.loss_settings),
        MiniBatchInputs(batch, seed),
        f"{LOSSES.setting}={algorithm.loss!r}",
    )
    return batch.with_columns(**columns), None


def update_critic(
    critic: Group, batch: Samples, config: RLConfig, *, seed: Sequence[int]
) -> dict[str, float]:
    """One optimizer step per mini-batch, towards the column returns."""
    columns = "prompt_ids", "response_ids", "response_mask", "values", "returns"
    num, aggregation = config.algorithm.num_mini_batches, config.critic.loss_aggregation
    read = batch.select(*columns, *(name for name in TRAJECTORY if name in batch))
    given = with_each, read, num, seed, _with_critic_weights, aggregation
    weighted, counts = with_near(critic, *given, reads=(*TRAJECTORY, "response_mask"))
    parts = mini_batches(weighted, num, seed)
    metrics = _in_one_call(critic, along_tokens(weighted), parts)
    found = _of_steps(weighted, [*zip(metrics, counts, parts, strict=True)])
    return {f"critic/{name}": value for name, value in found.items()}


def _with_critic_weights(batch: Batch, aggregation: str) -> tuple[Batch, TokenCounts]:
    sequences = Trajectories(batch).numbers
    weights = compute_loss_weights(batch.jagged("response_mask"), aggregation, sequences=sequences)
    return batch.with_columns(loss_weights=weights), token_counts(Batch({LOSS_WEIGHTS: weights}))


def _in_one_call(
    model: Group, batch: Samples, parts: Sequence[Sequence[int]], **settings: float
) -> list[dict[str, float]]:
    """An optimizer step on each of these rows; the metrics of each."""
    in_order, sizes = batch.take([row for part in parts for row in part]), [*map(len, parts)]
    # Every data-parallel rank reports what is true of all of them.
    found: list[dict[str, float]] = model.update(in_order, sizes=sizes, **settings)[0]
    return found


def _of_steps(
    batch: Samples, steps: Sequence[tuple[Mapping[str, float], TokenCounts, Sequence[int]]]
) -> dict[str, float]:
    """Of each optimizer step its metrics, the tokens that it has trained, and its rows."""
    num_tokens = batch.num_tokens
    found = [
        StepMetrics(metrics, trained, int(num_tokens[rows].sum()))
        for metrics, trained, rows in steps
    ]
    return of_update(found)
