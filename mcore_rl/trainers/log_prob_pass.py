"""Whether a step needs the trainer's log-probs before its update, in a forward pass of their own.

With one optimizer step per trainer step the policy that is updated is the policy that the log-probs
are of: the forward pass of the update gives the same numbers, so that ratios are 1, as in TRL where
a batch is used once. Engine: BaseEngine.train_batch_with_scores.
"""

from __future__ import annotations

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.inputs import needs_of
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.algorithms.prepared import is_prepared
from mcore_rl.config.import_path import is_import_path
from mcore_rl.config.schema import RLConfig
from mcore_rl.trainers.policy_loss import reads_squares


def needs_pass(config: RLConfig) -> bool:
    """Return whether log-probs are computed, or taken from the servers, before the update."""
    return bool(find_reason_for_pass(config))


def find_reason_for_pass(config: RLConfig) -> str:
    """Return the first setting that needs log-probs or entropies before the update; "" for none.

    Samples of old versions need none by themselves: their weights are those of a correction, or of
    algorithm.loss="decoupled_ppo", whose proximal policy is the one that is updated.
    """
    algorithm, replay = config.algorithm, config.actor.moe.router_replay
    correction, samples = algorithm.correction, algorithm.filter
    advantage, loss = ADVANTAGES[algorithm.advantage], LOSSES[algorithm.loss]
    # Functions outside of the package may read any column.
    is_read_by_loss = is_import_path(algorithm.loss) or is_prepared(loss)
    is_read_by_advantage = is_import_path(algorithm.advantage) or reads_squares(algorithm)
    has_critic = "values" in needs_of(advantage)  # which learns before the actor is checked
    # Gaps and entropies are of responses, too, that no update has.
    has_more = bool(samples.keep_responses) and samples.advantages_of == "generated"
    entropy_target, share = algorithm.entropy_target, algorithm.top_entropy_share
    teacher_loss = algorithm.distillation.loss
    settings: list[tuple[str, object, bool]] = [
        ("algorithm.log_prob_pass", algorithm.log_prob_pass, algorithm.log_prob_pass == "always"),
        ("algorithm.num_mini_batches", algorithm.num_mini_batches, algorithm.num_mini_batches > 1),
        ("algorithm.correction.use_rollout_log_probs", True, correction.use_rollout_log_probs),
        ("algorithm.correction.level", correction.level, correction.has_weights),
        ("algorithm.correction.reject", correction.reject, bool(correction.reject)),
        ("algorithm.loss", algorithm.loss, is_read_by_loss),
        ("algorithm.advantage", algorithm.advantage, is_read_by_advantage or has_critic),
        ("algorithm.kl_placement", algorithm.kl_placement, algorithm.kl_placement == "reward"),
        ("algorithm.kl_target", algorithm.kl_target, algorithm.kl_target is not None),
        ("algorithm.entropy_target", entropy_target, entropy_target is not None),
        ("algorithm.top_entropy_share", share, share < 1),
        ("algorithm.distillation.loss", teacher_loss, teacher_loss != "off"),
        ("algorithm.filter.advantages_of", samples.advantages_of, has_more),
        ("actor.moe.router_replay", replay, replay == "record"),
    ]
    return next((f"{name}={value!r}" for name, value, is_needed in settings if is_needed), "")
