"""TRL's side of against_trl.py: its GRPOTrainer with the settings of our quickstart."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for our reward, which needs nothing of ours else

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mcore_rl.rewards.math import final_number

VERSIONS = ("trl", "transformers", "torch", "accelerate", "datasets")


class Turns(TrainerCallback):
    """Waits for a turn before each generation; tells of the step after its last optimizer step."""

    def __init__(self, optimizer_steps: int) -> None:
        self._optimizer_steps = optimizer_steps
        self.seconds: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.lengths: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell({"versions": {name: metadata.version(name) for name in VERSIONS}})

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._optimizer_steps == 0:
            spent = {f"{name}_s": round(value, 3) for name, value in self.seconds.items()}
            means = {"reward": _mean(self.rewards), "response_tokens": _mean(self.lengths)}
            self._tell(spent | means)
            for record in (self.seconds, self.rewards, self.lengths):
                record.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return run

    def _tell(self, what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)
        sys.stdin.readline()


def _mean(values: list[Any]) -> float:
    return round(sum(values) / len(values), 4)


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    turns = Turns(settings["optimizer_steps"])
    samples = settings["prompts"] * settings["group_size"]
    columns = pq.read_table(settings["data"]).to_pydict()
    data = Dataset.from_dict({"prompt": columns["messages"], "answer": columns["answer"]})

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        found = []
        for messages, ids, right in zip(completions, completion_ids, answer, strict=True):
            ended = "stop" if ids[-1] == trainer.processing_class.eos_token_id else "length"
            text = messages[0]["content"]
            found.append(final_number(text, {"answer": right}, ended)["reward"])
        turns.rewards += found
        turns.lengths += map(len, completion_ids)
        return found

    config = GRPOConfig(
        output_dir=settings["output"],
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples // settings["optimizer_steps"],
        steps_per_generation=settings["optimizer_steps"],
        num_generations=settings["group_size"],
        max_completion_length=32,
        temperature=1.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="bnpo",  # the mean over the tokens of a mini-batch
        max_steps=settings["steps"] * settings["optimizer_steps"],
        seed=settings["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        settings["checkpoint"], reward, args=config, train_dataset=data, callbacks=[turns]
    )
    parts = {
        "generate": "_generate",
        "log_probs": "_get_per_token_logps_and_entropies",
        "generate_score": "_generate_and_score_completions",
        "training_step": "training_step",
    }
    for name, method in parts.items():
        setattr(trainer, method, turns.timed(name, getattr(trainer, method)))
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
