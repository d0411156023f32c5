"""Engines with one fault each, made from that of examples/hf_engine.py: FAULTS of a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.config.import_path import load_object
from mcore_rl.data.batch import Batch
from mcore_rl.engine.base import Backend, ScoredStep
from mcore_rl.reshard.executor import LocalWeights

EXAMPLE = Path(__file__).parents[2] / "examples/hf_engine.py"
HFEngine: Any = load_object("backend", f"{EXAMPLE}:HFEngine")
FAULTS: dict[str, str] = {}  # a part of the sentence by the name of its backend


def plant(sentence: str) -> Any:
    def register(engine: Any) -> Any:
        FAULTS[engine.__name__] = sentence
        globals()[f"{engine.__name__}_BACKEND"] = Backend({"language_model": engine})
        return engine

    return register


@plant("the contract: the rows of the batch, in its order")
class ReversesRows(HFEngine):
    def infer_batch(self, batch: Batch, **options: Any) -> Batch:
        rows = range(len(batch) - 1, -1, -1)
        scored = super().infer_batch(batch.take(rows), **options)
        lengths = batch.jagged("response_ids")
        columns = {
            n: lengths.with_values(scored.jagged(n).values) for n in ("log_probs", "entropy")
        }
        return batch.with_columns(**columns)


@plant("at temperature 0.5 returns log_probs of temperature 1")
class IgnoresTemperature(HFEngine):
    def infer_batch(self, batch: Batch, **options: Any) -> Batch:
        scored: Batch = super().infer_batch(batch, **options | {"temperature": 1.0})
        return scored


@plant("adds log_probs that are not one float32 per response token")
class ReturnsFloat64(HFEngine):
    def infer_batch(self, batch: Batch, **options: Any) -> Batch:
        scored = super().infer_batch(batch, **options)
        values = scored.jagged("log_probs")
        return scored.with_columns(log_probs=values.with_values(values.values.astype(np.float64)))


@plant("infer_batch drops the columns ['kl_weights', 'loss_weights', 'prompt_ids'")
class DropsColumns(HFEngine):
    def infer_batch(self, batch: Batch, **options: Any) -> Batch:
        return super().infer_batch(batch, **options).select("log_probs", "entropy")


@plant("infer_batch adds no entropy")
class AddsNoEntropy(HFEngine):
    def infer_batch(self, batch: Batch, **options: Any) -> Batch:
        return super().infer_batch(batch, **options).drop_columns("entropy")


@plant("takes a step though mean_logprob_gap is beyond its bound")
class IgnoresBounds(HFEngine):
    def train_batch_with_scores(
        self, batch: Batch, loss: Any, *, bounds: Mapping[str, float], **options: Any
    ) -> ScoredStep:
        bounds = dict.fromkeys(bounds, 1e9)
        return super().train_batch_with_scores(batch, loss, bounds=bounds, **options)


@plant("at tokens of all ranks where gap_mask is not 0")
class IgnoresGapMask(HFEngine):
    def train_batch_with_scores(self, batch: Batch, loss: Any, **options: Any) -> ScoredStep:
        mask = batch.jagged("gap_mask")
        batch = batch.with_columns(gap_mask=mask.with_values(np.ones_like(mask.values)))
        return super().train_batch_with_scores(batch, loss, **options)


@plant("the contract: the sum of loss_weights * loss over the tokens of all ranks")
class IgnoresWeights(HFEngine):
    def train_batch(self, batch: Batch, loss: Any, **options: Any) -> Any:
        weights = batch.jagged("loss_weights")
        mean = np.where(weights.values != 0, np.float32(1 / len(weights.values)), 0)
        return super().train_batch(
            batch.with_columns(loss_weights=weights.with_values(mean)), loss, **options
        )


@plant("the norm before clipping of the sum of the gradients of all ranks")
class AveragesGradients(HFEngine):
    def _step(self) -> Any:
        for parameter in self.parameters:
            parameter.grad.div_(2)  # as of two ranks
        return super()._step()


@plant("the contract: weights go on, and gradients begin at zero")
class KeepsGradients(HFEngine):
    def initialize(self) -> None:
        super().initialize()
        self.optimizer.zero_grad = lambda: None


@plant("train_batch changes no weight")
class SendsOldWeights(HFEngine):
    def initialize(self) -> None:
        super().initialize()
        self.first = {n: t.clone() for n, t in super().get_local_weights().stored.items()}

    def get_local_weights(self) -> LocalWeights:
        self.require("parameters")
        return LocalWeights(self.first)


@plant("get_local_weights lacks model.norm.weight")
class ForgetsTensor(HFEngine):
    def get_local_weights(self) -> LocalWeights:
        weights = super().get_local_weights()
        del weights.stored["model.norm.weight"]
        return weights


@plant("than the checkpoint of model.embed_tokens.weight")
class RoundsWeights(HFEngine):
    def get_local_weights(self) -> LocalWeights:
        stored = super().get_local_weights().stored
        return LocalWeights({n: t.bfloat16().float() for n, t in stored.items()})


@plant("get_per_tensor_param lacks model.norm.weight")
class ExportsLess(HFEngine):
    def get_per_tensor_param(self) -> Any:
        return ((n, t) for n, t in super().get_per_tensor_param() if n != "model.norm.weight")


@plant("step 2 leads to other weights; the contract: the state of the optimizer goes on")
class LosesOptimizerState(HFEngine):
    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.optimizer.state.clear()


@plant("step 2 has lr=0.0025 instead of 0.005; the contract: the number of steps goes on")
class LosesStepCount(HFEngine):
    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.num_steps = 0


@plant("load_checkpoint does not give back the weights")
class LosesWeights(HFEngine):
    def load_checkpoint(self, path: Path) -> None:
        before = {n: t.clone() for n, t in self.model.state_dict().items()}
        super().load_checkpoint(path)
        self.model.load_state_dict(before)


@plant("save_checkpoint leaves no checkpoint: ")
class WritesNoManifest(HFEngine):
    def _write(self, path: Path) -> None:
        super()._write(path)
        (path / "mcore_rl.json").unlink()


@plant("after to('host') and to('device'), step 3 leads to other weights")
class LosesStateOnTheHost(HFEngine):
    def move(self, place: Any, parts: frozenset[str]) -> None:
        super().move(place, parts)
        if place == "host":
            self.optimizer.state.clear()


@plant("infer_batch works while the engine is on the host; the contract: StateError")
class WorksOffloaded(HFEngine):
    def require(self, *parts: str) -> None: ...


@plant("initialize sets no hf_config, which BaseEngine has")
class SetsNoConfig(HFEngine):
    def initialize(self) -> None:
        super().initialize()
        del self.hf_config
