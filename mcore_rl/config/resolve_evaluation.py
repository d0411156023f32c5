"""The rules of sampling, of evaluation and of trackers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mcore_rl.config.checks import at_least, one_of
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RLConfig
from mcore_rl.config.sources import test_files
from mcore_rl.config.train_schema import TrainConfig

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")


def resolve_evaluation(config: RLConfig) -> None:
    evaluation, samples = config.evaluation, config.samples
    at_least("evaluation.every", evaluation.every, 0)
    at_least("evaluation.num_samples", evaluation.num_samples, 1)
    if evaluation.temperature is not None:
        at_least("evaluation.temperature", evaluation.temperature, 0)
    for part, name in ((config.rollout, "rollout"), (evaluation, "evaluation")):
        if part.top_p is not None and not 0 < part.top_p <= 1:
            raise ConfigError(f"{name}.top_p={part.top_p}; allowed: above 0, up to 1")
        if part.top_k is not None:
            at_least(f"{name}.top_k", part.top_k, 0)
        check_stop(f"{name}.stop", part.stop or [])
    for setting, value in asdict(samples).items():
        at_least(f"samples.{setting}", value, 0)
    if evaluation.temperature == 0 and evaluation.num_samples > 1:
        raise ConfigError(
            f"evaluation.num_samples={evaluation.num_samples}: with evaluation.temperature=0 all "
            "are the same; allowed: 1"
        )
    _resolve_own_length(config)
    resolve_held_out(config, has_sets=bool(test_files(config.data) or config.task.name))


def check_stop(setting: str, stop: Sequence[str]) -> None:
    if "" in stop:
        raise ConfigError(f"{setting}={list(stop)}; allowed: texts that are not empty")


def _resolve_own_length(config: RLConfig) -> None:
    own, of_training = config.evaluation.max_response_tokens, config.rollout.max_response_tokens
    if own is None:
        return
    at_least("evaluation.max_response_tokens", own, 1)
    if config.agent.loop != "single_turn" and own > of_training:
        raise ConfigError(
            f"evaluation.max_response_tokens={own}: conversations of "
            f"agent.loop={config.agent.loop!r} have one context, in training and evaluation; "
            f"allowed: up to rollout.max_response_tokens={of_training}"
        )


def resolve_held_out(config: RLConfig | TrainConfig, *, has_sets: bool) -> None:
    """Refuse settings of evaluations without a held-out set, or at other steps.

    A checkpoint can be the best by an evaluation if there is one at its step.
    """
    reads_sets = {
        f"evaluation.every={config.evaluation.every}": config.evaluation.every > 0,
        f"checkpoint.keep_best={config.checkpoint.keep_best!r}": (
            config.checkpoint.keep_best.removeprefix("-").startswith("eval/")
        ),
    }
    for setting, reads in reads_sets.items():
        if reads and not has_sets:
            raise ConfigError(f"{setting} needs data.test_file or data.test_files")
    best, every, save = (
        config.checkpoint.keep_best,
        config.evaluation.every,
        (config.trainer.save_every),
    )
    if best.removeprefix("-").startswith("eval/") and save and (not every or save % every):
        raise ConfigError(
            f"checkpoint.keep_best={best!r}: trainer.save_every={save} saves steps without an "
            f"evaluation (evaluation.every={every}); allowed: evaluation.every above 0 that "
            "divides trainer.save_every"
        )


def resolve_truncation(config: RLConfig) -> None:
    """Training on samples of a truncated distribution, only where the settings say how.

    The server's probability of a token is larger there than the trainer's, by the mass of what was
    cut off. An importance weight corrects that for the tokens that can be sampled; the bounds on
    the gaps, which are for rounding, have to leave room for it.
    """
    rollout, trainer = config.rollout, config.trainer
    cut = [f"rollout.top_p={rollout.top_p}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k else []
    is_bounded = None not in (trainer.max_logprob_gap, trainer.mean_logprob_gap)
    if cut and (not config.algorithm.correction.has_weights or not is_bounded):
        raise ConfigError(
            f"{' and '.join(cut)}: servers sample from a part of the distribution that is trained. "
            "Allowed: rollout.top_p=1 and rollout.top_k=0, or to say how training allows for it: "
            "algorithm.correction.level, trainer.max_logprob_gap and trainer.mean_logprob_gap; "
            "evaluation.top_p and evaluation.top_k need nothing"
        )


def resolve_trackers(trackers: Sequence[str]) -> None:
    for index, name in enumerate(trackers):
        one_of(f"trainer.trackers[{index}]", name, TRACKERS)
    if len(set(trackers)) < len(trackers):
        raise ConfigError(f"trainer.trackers={list(trackers)}; allowed: each once")
