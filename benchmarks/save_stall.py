"""Time that training waits for a checkpoint: written at once, and in the background.

    python benchmarks/save_stall.py [--hidden 1024] [--layers 12]

One rank on the CPU saves weights and Adam's moments of a dense model, each way by turns, and takes
a training step after each. `copy_s` and `finish_s` are what training waits for an asynchronous
save: the last line is their share of a synchronous one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from mcore_rl.algorithms.losses import negative_log_likelihood
from mcore_rl.config.schema import EngineConfig, ModelConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import EngineSpec, PendingSave, create_engine
from mcore_rl.parallel.rendezvous import RendezvousServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to save; default: the temporary folder")
    options = parser.parse_args()
    rendezvous = RendezvousServer("127.0.0.1")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= rendezvous.endpoint.to_environment()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = measure(Path(folder), options.hidden, options.layers, options.rounds)
    rendezvous.close()
    print(json.dumps(report, indent=1))


def measure(folder: Path, hidden: int, layers: int, rounds: int) -> dict[str, float]:
    spec = EngineSpec(
        model=ModelConfig(path=str(_make_model(folder / "model", hidden, layers)), dtype="float32"),
        engine=EngineConfig(),
        seed=0,
        total_steps=1000,
    )
    engine = create_engine("language_model", spec)
    engine.initialize()
    batch = _make_batch()
    engine.train_batch(batch, negative_log_likelihood)
    times: dict[str, list[float]] = {
        name: []
        for name in ("synchronous_s", "copy_s", "finish_s", "step_s", "step_while_saving_s")
    }

    def time_call(name: str, call: Callable[..., object], *args: object) -> None:
        start = time.perf_counter()
        call(*args)
        times[name].append(time.perf_counter() - start)

    saving: list[PendingSave] = []

    def begin_save(path: Path) -> None:
        saving.append(engine.begin_save(path))

    for number in range(rounds):
        time_call("synchronous_s", engine.save_checkpoint, folder / f"now_{number}")
        time_call("step_s", engine.train_batch, batch, negative_log_likelihood)
        time_call("copy_s", begin_save, folder / f"later_{number}")
        time_call("step_while_saving_s", engine.train_batch, batch, negative_log_likelihood)
        while not saving[-1].is_written:
            time.sleep(0.01)
        time_call("finish_s", saving[-1].finish)
    size = sum(file.stat().st_size for file in (folder / "now_0").iterdir())
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    share = (medians["copy_s"] + medians["finish_s"]) / medians["synchronous_s"]
    return {"checkpoint_mb": size / 1e6, **medians, "wait_over_synchronous": round(share, 3)}


def _make_model(path: Path, hidden: int, layers: int) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=hidden // 8, intermediate_size=3 * hidden,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.float().save_pretrained(path)
    return path


def _make_batch() -> Batch:
    ids = Jagged.pack([list(range(1, 33))] * 4, np.int64)
    return Batch(
        {
            "prompt_ids": ids,
            "response_ids": ids,
            "response_mask": ids.with_values(np.ones(len(ids.values), np.int8)),
            "loss_weights": ids.with_values(np.full(len(ids.values), 1e-3, np.float32)),
        }
    )


if __name__ == "__main__":
    main()
