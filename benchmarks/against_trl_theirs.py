"""TRL's side of against_trl.py: its GRPOTrainer with the settings of our quickstart."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for our reward

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mcore_rl.rewards.text import SubstringSettings, substring

PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets")


class StepReporter(TrainerCallback):
    """Waits for permission before each generation; reports a step after its last optimizer step."""

    def __init__(self, optimizer_steps: int) -> None:
        self._optimizer_steps = optimizer_steps
        self._backward_end = 0.0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.rewards: list[float] = []
        self.lengths: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report_and_wait({"versions": {name: metadata.version(name) for name in PACKAGES}})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds["optimizer"] += time.perf_counter() - self._backward_end
        if state.global_step % self._optimizer_steps == 0:
            seconds = self.seconds
            phases = {
                "generate_s": seconds["generate"],
                "log_probs_s": seconds["log_probs"],
                "update_s": seconds["training_step"] - seconds["rollout"] + seconds["optimizer"],
                "optimizer_s": seconds["optimizer"],
            }
            means = {"reward": _mean(self.rewards), "response_tokens": _mean(self.lengths)}
            self._report_and_wait({n: round(value, 4) for n, value in (phases | means).items()})
            for record in (self.seconds, self.rewards, self.lengths):
                record.clear()

    def time_method(self, trainer: GRPOTrainer, name: str, phase: str) -> None:
        """Add the seconds of a method of the trainer to a phase."""
        method: Callable[..., Any] = getattr(trainer, name)

        @functools.wraps(method)
        def timed_method(*args: Any, **kwargs: Any) -> Any:
            if phase == "log_probs" and torch.is_grad_enabled():
                return method(*args, **kwargs)  # of the update
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._backward_end = time.perf_counter()
                self.seconds[phase] += self._backward_end - started

        setattr(trainer, name, timed_method)

    def _report_and_wait(self, report: dict[str, Any]) -> None:
        print(json.dumps(report), flush=True)
        sys.stdin.readline()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    reporter = StepReporter(settings["optimizer_steps"])
    samples = settings["prompts"] * settings["group_size"]
    columns = pq.read_table(settings["data"]).to_pydict()
    data = Dataset.from_dict({"prompt": columns["messages"], "answer": columns["answer"]})
    reward_settings = SubstringSettings(whole_words=False)

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        rewards = [
            substring(text, {"answer": right}, "length", reward_settings)["reward"]
            for text, right in zip(texts, answer, strict=True)
        ]
        reporter.rewards += rewards
        reporter.lengths += map(len, completion_ids)
        return rewards

    config = GRPOConfig(
        output_dir=settings["output"],
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples // settings["optimizer_steps"],
        steps_per_generation=settings["optimizer_steps"],
        num_generations=settings["group_size"],
        max_completion_length=settings["response_tokens"],
        temperature=1.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="bnpo",  # the mean over the tokens of a mini-batch
        max_steps=(settings["steps"] + 1) * settings["optimizer_steps"],
        seed=settings["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        settings["checkpoint"], reward, args=config, train_dataset=data, callbacks=[reporter]
    )
    phases = {
        "_generate": "generate",
        "_get_per_token_logps_and_entropies": "log_probs",
        "_generate_and_score_completions": "rollout",
        "training_step": "training_step",
    }
    for name, phase in phases.items():
        reporter.time_method(trainer, name, phase)
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
