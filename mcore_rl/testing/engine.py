"""The conformance suite of training engines: all that engine/base.py says, tried on a small model.

from mcore_rl.testing import check_engine

check_engine("path/to/file.py:BACKEND", "path/to/small_model", num_ranks=2)
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.inputs import Losses, LossInputs, Metric, get_needs, needs
from mcore_rl.checkpoint.files import check_checkpoint
from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.config.errors import ConfigError, StateError
from mcore_rl.config.schema import EngineConfig, Layout, ModelConfig, OptimizerConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import (
    BaseEngine,
    EngineSpec,
    check_engine_settings,
    create_engine,
    load_backend,
)
from mcore_rl.engine.steps import (
    build_loss_inputs,
    compute_learning_rate,
    count_trained_tokens,
    sum_losses,
)
from mcore_rl.jobs.placement import detect_device_type
from mcore_rl.jobs.ranks import ProcessFailed, run_on_ranks
from mcore_rl.models.base import HFConfig, use_family
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.reshard.rules import Shard, check_cover
from mcore_rl.weight_sync.spec import build_training_side

NATS = 1e-4  # largest difference of log-probs to transformers, in float32
_RELATIVE = 1e-3  # of losses and gradient norms
_TEMPERATURE = 0.5
_TOTAL_STEPS = 5
# Warm-up, so that a lost number of steps shows in the learning rate; a large epsilon, so that
# rounding of gradients near zero does not decide the sign of a step.
_OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=4, eps=1e-3, clip_grad=1.0)


def check_engine(
    backend: str,
    model_path: str | Path,
    *,
    layout: Layout | None = None,
    num_ranks: int | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Run an engine through the contract of BaseEngine, on ranks in processes of their own.

    Args:
        backend: Value of actor.backend: an import path, or a name.
        model_path: Folder of a small Hugging Face checkpoint of a language model that transformers
            has, too, in float32.
        layout: Layout of the ranks; by default data parallel over `num_ranks`.
        num_ranks: By default the ranks of the layout.
        timeout_s: Limit of the whole suite.

    Raises:
        AssertionError: The engine does not do what the contract says; one sentence of both.
        ConfigError: There is no such backend, or it refuses layout or model.
    """
    layout = layout or Layout(dp=num_ranks or 1)
    if num_ranks not in (None, layout.world_size):
        raise ConfigError(
            f"num_ranks={num_ranks}: the layout has {layout.world_size} ranks; allowed: as many"
        )
    spec = build_spec(backend, model_path, layout)
    check_engine_settings("engine", spec.engine, "language_model", detect_device_type())
    family = load_backend(spec.engine).family
    run_in_processes(backend, str(model_path), layout, family, timeout_s=timeout_s)


def run_in_processes(
    backend: str,
    model_path: str,
    layout: Layout,
    family: str = "",
    *,
    timeout_s: float,
    preload: Sequence[str] = (),
) -> None:
    """Run all checks on ranks in processes of their own.

    Args:
        preload: See `run_on_ranks`.

    Raises:
        AssertionError, ConfigError: Those of the first rank that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = partial(run_checks, backend, model_path, layout, folder, family)
        with unwrap_failures():
            run_on_ranks(job, layout.world_size, Path(folder), timeout_s, preload)


@contextlib.contextmanager
def unwrap_failures() -> Iterator[None]:
    """Raise the sentence of a check that failed in another process."""
    try:
        yield
    except ProcessFailed as error:
        reason = str(error).splitlines()[0].partition("AssertionError: ")[2]
        raise AssertionError(reason or str(error)) from error


def build_spec(
    backend: str, model_path: str | Path, layout: Layout, family: str = ""
) -> EngineSpec:
    """Return the inputs of the engines that the suite builds."""
    engine = EngineConfig(
        backend=backend, layout=layout, optimizer=_OPTIMIZER, max_tokens_per_micro_batch=64
    )
    model = ModelConfig(path=str(model_path), dtype="float32", family=family)
    return EngineSpec(model, engine, seed=1, total_steps=_TOTAL_STEPS, timeout_s=120.0)


def run_checks(
    backend: str, model_path: str, layout: Layout, folder: str, family: str = ""
) -> None:
    """Run all checks on a rank; ranks of the layout call this together.

    Args:
        folder: For checkpoints; the same on all ranks.
        family: Value of model.family.

    Raises:
        AssertionError: The first check that fails.
    """
    use_family(family)
    _EngineChecks(build_spec(backend, model_path, layout, family), Path(folder)).run()


def _require(is_met: object, sentence: str) -> None:
    if not is_met:
        raise AssertionError(sentence)


def _train_on_tokens(inputs: LossInputs) -> Losses:
    """Return the negative log-likelihood, and as a second loss a squared distance."""
    nll, distance = -inputs.log_probs, (inputs.log_probs - inputs.columns["targets"]).square()
    metrics: dict[str, Metric] = {"nll": nll, "distance": ("kl_weights", distance)}
    return {"loss_weights": nll, "kl_weights": distance}, metrics


@needs("entropy")
def _train_on_entropy(inputs: LossInputs) -> Losses:
    return inputs.entropy - inputs.old_log_probs, {"old": inputs.old_log_probs}


def _build_batch(num_rows: int, hf_config: HFConfig) -> Batch:
    """Build rows of uneven length, with weights that are 0 at some tokens.

    Without padding tokens, whose embedding gets no gradient in transformers.
    """
    rng = np.random.default_rng(0)
    ids = np.delete(np.arange(hf_config["vocab_size"]), hf_config.get("pad_token_id") or 0)
    prompts = [rng.choice(ids, rng.integers(1, 12)) for _ in range(num_rows)]
    responses = Jagged.pack(
        [rng.choice(ids, rng.integers(1, 14)) for _ in range(num_rows)], np.int64
    )
    num_tokens = len(responses.values)
    weights = rng.random(num_tokens) * (rng.random(num_tokens) < 0.8) / num_tokens
    columns = {
        "response_mask": weights > 0,
        "loss_weights": weights,
        "kl_weights": 0.1 * weights[::-1],
        "targets": rng.normal(-3, 1, num_tokens),
    }
    packed = {n: responses.with_values(v.astype(np.float32)) for n, v in columns.items()}
    return Batch(
        {"prompt_ids": Jagged.pack(prompts, np.int64), "response_ids": responses, **packed}
    )


class _Reference:
    """The model by transformers, in float32, one row at a time."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )

    def score(self, batch: Batch, temperature: float) -> dict[str, list[torch.Tensor]]:
        """Return log-probs and entropies of the response tokens of each row."""
        scores: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
        prompts, responses = batch.jagged("prompt_ids"), batch.jagged("response_ids")
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            log_probs = (logits / temperature).log_softmax(-1)
            targets = torch.from_numpy(response.copy())[:, None]
            scores["log_probs"].append(log_probs.gather(1, targets)[:, 0])
            scores["entropy"].append(-(log_probs.exp() * log_probs).sum(-1))
        return scores

    def train(self, batch: Batch, loss_function: Any, temperature: float) -> dict[str, float]:
        """Return what train_batch returns of a step on the whole batch, without taking it."""
        self._model.zero_grad()
        scores = {n: torch.cat(rows) for n, rows in self.score(batch, temperature).items()}
        if "entropy" not in get_needs(loss_function):
            del scores["entropy"]
        inputs = build_loss_inputs(scores, batch, torch.device("cpu"))
        loss, metrics = sum_losses(loss_function, inputs, count_trained_tokens(batch))
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), math.inf)
        return {**{n: float(v) for n, v in metrics.items()}, "grad_norm": float(norm)}


class _EngineChecks:
    """The checks on one rank, in their order."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.spec, self.layout, self.folder = spec, spec.engine.layout, folder
        self.reader = CheckpointReader(spec.model.path)
        self.reference = _Reference(spec.model.path)

    def run(self) -> None:
        """Run all checks; engines that only start are closed, as those of a run are."""
        engine = self.start()
        self.check_local_weights(engine, self.read_stored, "the checkpoint")
        self.check_export(engine)
        self.check_scores(engine)
        engine.close()
        engine = self.start()
        self.check_step(engine)
        engine.close()
        engine = self.start()
        self.check_bounds(engine)
        self.check_checkpoint(engine)
        engine.close()
        frozen = self.start(total_steps=0)
        self.compare_scores(frozen.infer_batch(self.share), 1.0)
        frozen.close()

    def start(self, total_steps: int = _TOTAL_STEPS) -> BaseEngine:
        """Start an engine, and choose this rank's rows: an uneven share of the batch."""
        engine = create_engine("language_model", replace(self.spec, total_steps=total_steps))
        engine.initialize()
        for name in ("device", "world_rank", "hf_config"):
            _require(hasattr(engine, name), f"initialize sets no {name}, which BaseEngine has")
        num_ranks = dist.get_world_size()
        _require(
            engine.world_rank == dist.get_rank() and num_ranks == self.layout.world_size,
            f"after initialize world_rank is {engine.world_rank} of {num_ranks}; the contract: the "
            f"rank of torch's default group, which has the {self.layout.world_size} of the layout",
        )
        coordinate = Mesh(self.layout).get_coordinate(engine.world_rank)
        self.is_last_stage = coordinate.pp_rank == self.layout.pp - 1
        self.batch = _build_batch(2 * self.layout.dp + 3, engine.hf_config)
        self.rows = range(coordinate.dp_rank, len(self.batch), self.layout.dp)
        self.share = self.batch.take(self.rows)
        return engine

    # Weights

    def read_stored(self, name: str) -> torch.Tensor:
        return self.reader.read_tensor(name).float()

    def check_export(self, engine: BaseEngine) -> None:
        """Check get_per_tensor_param of an engine that has just loaded."""
        exported = dict(engine.get_per_tensor_param())
        if not engine.is_main_rank:
            _require(
                not exported,
                "get_per_tensor_param yields tensors on another rank than the "
                "main one; the contract: on the main rank alone",
            )
            return
        names = self.reader.get_shapes().keys()
        for kind, wrong in (("lacks", names - exported.keys()), ("adds", exported.keys() - names)):
            _require(
                not wrong,
                f"get_per_tensor_param {kind} {', '.join(sorted(wrong)[:3])}; the "
                "contract: the tensors of the checkpoint",
            )
        for name, tensor in exported.items():
            stored = self.read_stored(name)
            _require(
                tensor.dtype == stored.dtype and torch.equal(tensor.cpu(), stored),
                f"get_per_tensor_param yields {name} as {_describe(tensor)} that is not bit for "
                f"bit the checkpoint's {_describe(stored)}; the contract: unchanged",
            )

    def check_local_weights(
        self, engine: BaseEngine, read: Callable[[str], torch.Tensor], source: str
    ) -> None:
        """Compare this rank's weights with whole tensors, box by box of the rules of servers."""
        sizes = self.layout, engine.num_mtp_layers, engine.shard_format
        ranks, rules = build_training_side(engine.hf_config, *sizes)
        check_cover(rules, 1)
        local = engine.get_local_weights()
        for weight in rules:
            holders = ranks.get_holders(weight)
            for index, members in enumerate(holders):
                if engine.world_rank not in members:
                    continue
                name, shard = ranks.get_local_name(weight), Shard(index, len(holders))
                _require(
                    name in local.stored or name in local.computed,
                    f"get_local_weights lacks {name}; the contract: "
                    f"all weights of the format {engine.shard_format!r}",
                )
                tensor = local.stored[name] if name in local.stored else local.computed[name]()
                shape = weight.rule.get_local_shape(shard)
                _require(
                    tuple(tensor.shape) == shape,
                    f"get_local_weights has {name} of shape {tuple(tensor.shape)}; the rules say "
                    f"{shape}",
                )
                for block in weight.rule.get_blocks(shard):
                    expected = read(block.tensor.name)[block.box.slices]
                    _require(
                        torch.equal(tensor[block.local_slices].float().cpu(), expected),
                        f"get_local_weights has other values of {name} than {source} of "
                        f"{block.tensor.name}; the contract: the weights as they are now",
                    )

    def share_export(self, engine: BaseEngine) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, on every rank."""
        exported = {n: t.clone().float().cpu() for n, t in engine.get_per_tensor_param()}
        shared: list[Any] = [exported]
        dist.broadcast_object_list(shared)
        tensors: dict[str, torch.Tensor] = shared[0]
        return tensors

    # Scores

    def check_scores(self, engine: BaseEngine) -> None:
        """Check infer_batch: rows alone, together, at another temperature, and none."""
        most = -(-len(self.batch) // self.layout.dp)
        rows = range(len(self.share))
        alone = [engine.infer_batch(self.share.take(rows[row : row + 1])) for row in range(most)]
        together = engine.infer_batch(self.share)
        if together is not None and self.is_last_stage:
            parts = [part for part in alone if part is not None and len(part)]
            for name in ("log_probs", "entropy") if len(parts) == len(self.share) else ():
                values = [part.jagged(name).values for part in parts if name in part]
                if name not in together or not values:
                    continue
                distance = np.abs(together.jagged(name).values - np.concatenate(values)).max()
                _require(
                    distance <= NATS,
                    f"infer_batch: {name} of a row among others are {distance:.2g} nats from those "
                    "of the row alone; the contract: the rows of the batch, in its order, each as "
                    "if it were alone",
                )
        self.compare_scores(together, 1.0)
        self.compare_scores(engine.infer_batch(self.share, temperature=_TEMPERATURE), _TEMPERATURE)
        is_empty = self.layout.dp > 1 and self.rows.start > 0
        scored = engine.infer_batch(self.share.take([]) if is_empty else self.share)
        if is_empty and self.is_last_stage:
            _require(
                scored is not None and not len(scored),
                "infer_batch of no rows returns some; the contract: a batch without rows",
            )

    def compare_scores(self, scored: Batch | None, temperature: float) -> None:
        """Compare the columns of a scored batch with transformers' scores."""
        if not self.is_last_stage:
            _require(
                scored is None,
                "infer_batch returns a batch on a pipeline stage before the "
                "last; the contract: None",
            )
            return
        _require(
            scored is not None,
            "infer_batch returns None; the contract: the batch with "
            "log_probs and entropy, on the last pipeline stage",
        )
        assert scored is not None
        lost = self.share.columns.keys() - scored.columns.keys()
        _require(not lost, f"infer_batch drops the columns {sorted(lost)}; the contract: it adds")
        with torch.no_grad():
            expected = self.reference.score(self.share, temperature)
            plain = self.reference.score(self.share, 1.0)
        for name in ("log_probs", "entropy"):
            _require(name in scored, f"infer_batch adds no {name}; the contract: one a token")
            column = scored[name]
            _require(
                isinstance(column, Jagged)
                and column.values.dtype == np.float32
                and np.array_equal(column.lengths, self.share.lengths("response_ids")),
                f"infer_batch adds {name} that are not one float32 per response token; the "
                "contract: a Jagged of float32 with the rows of response_ids",
            )
            values = torch.from_numpy(scored.jagged(name).values.copy())
            distance = float((values - torch.cat(expected[name])).abs().max())
            if distance <= NATS:
                continue
            is_plain = float((values - torch.cat(plain[name])).abs().max()) <= NATS
            _require(
                not is_plain,
                f"infer_batch at temperature {temperature} returns {name} of "
                "temperature 1; the contract: of softmax(logits / temperature)",
            )
            raise AssertionError(
                f"infer_batch at temperature {temperature}: {name} are {distance:.2g} nats from "
                f"those of transformers; the contract: within {NATS} in float32"
            )

    # Steps

    def compare_step(
        self, metrics: Mapping[str, float], expected: Mapping[str, float], step: int
    ) -> None:
        """Compare the metrics of a step with those of transformers on the whole batch."""
        lr = compute_learning_rate(_OPTIMIZER, step, _TOTAL_STEPS)
        checked = {**expected, "lr": lr} if self.is_last_stage else {"lr": lr}
        checked["grad_norm"] = expected["grad_norm"]
        for name, value in checked.items():
            _require(
                name in metrics,
                f"train_batch returns no {name}; the contract: loss, "
                "grad_norm, lr and the metrics of the loss function",
            )
            meaning = _MEANINGS.get(name, "a mean over the trained tokens of all ranks")
            _require(
                abs(metrics[name] - value) <= _RELATIVE * max(abs(value), 1e-2),
                f"train_batch returns {name}={metrics[name]:.6g}, and it is {value:.6g}; the "
                f"contract: {meaning}",
            )

    def check_step(self, engine: BaseEngine) -> None:
        """Check a first step, with two losses and at another temperature."""
        metrics = engine.train_batch(self.share, _train_on_tokens, temperature=_TEMPERATURE)
        expected = self.reference.train(self.batch, _train_on_tokens, _TEMPERATURE)
        self.compare_step(metrics, expected, 1)
        self.require_change(engine, "train_batch")
        exported = self.share_export(engine)
        self.check_local_weights(engine, exported.__getitem__, "get_per_tensor_param")

    def require_change(self, engine: BaseEngine, what: str) -> None:
        weights = self.share_export(engine)
        is_changed = any(not torch.equal(self.read_stored(n), t) for n, t in weights.items())
        _require(is_changed, f"{what} changes no weight; the contract: it takes a step")

    def check_bounds(self, engine: BaseEngine) -> None:
        """Check train_batch_with_scores: no step beyond the bounds, and a step within them."""
        gap, loss = 0.25, _train_on_entropy
        with torch.no_grad():
            scores = torch.cat(self.reference.score(self.share, 1.0)["log_probs"]).numpy()
        responses, mask = self.share.jagged("response_ids"), self.share.jagged("response_mask")
        served = scores + np.where(mask.values != 0, gap, 100.0)
        batch = self.share.with_columns(
            gap_mask=mask, rollout_log_probs=responses.with_values(served.astype(np.float32))
        )
        before = self.share_export(engine)
        bounds = {"max_logprob_gap": 2 * gap, "mean_logprob_gap": gap / 2}
        step = engine.train_batch_with_scores(batch, loss, bounds=bounds)
        for name in bounds:
            value = step.gaps.get(name, math.nan)
            _require(
                abs(value - gap) <= 2 * NATS,
                f"train_batch_with_scores gives {name}={value:.4g}, and it is {gap}; the contract: "
                "of log_probs and rollout_log_probs, at tokens of all ranks where gap_mask is not "
                "0",
            )
        after = self.share_export(engine)
        _require(
            not step.metrics and all(torch.equal(before[name], after[name]) for name in before),
            "train_batch_with_scores takes a step though mean_logprob_gap is beyond its bound; the "
            "contract: no step, and weights that stay bit for bit",
        )
        self.compare_step_scores(step.scores)
        bounds = dict.fromkeys(bounds, 2 * gap)
        step = engine.train_batch_with_scores(batch, loss, bounds=bounds)
        with torch.no_grad():
            rows = self.reference.score(self.batch, 1.0)["log_probs"]
        old = self.batch.jagged("response_ids").with_values(torch.cat(rows).numpy())
        expected = self.reference.train(self.batch.with_columns(log_probs=old), loss, 1.0)
        self.compare_step(step.metrics, expected, 1)
        self.require_change(engine, "train_batch_with_scores within the bounds")

    def compare_step_scores(self, scores: Batch | None) -> None:
        if not self.is_last_stage:
            _require(
                scores is None,
                "train_batch_with_scores returns scores on a pipeline stage "
                "before the last; the contract: None",
            )
            return
        _require(
            scores is not None,
            "train_batch_with_scores returns no scores; the contract: log_probs and entropy",
        )
        assert scores is not None
        self.compare_scores(self.share.with_columns(**scores.columns), 1.0)

    # Checkpoints, and memory

    def check_checkpoint(self, engine: BaseEngine) -> None:
        """Check that a fresh engine goes on from a checkpoint as the one that has written it."""
        path = self.folder / "checkpoint"
        engine.save_checkpoint(path)
        if engine.is_main_rank:
            try:
                check_checkpoint(path)
            except ConfigError as error:
                raise AssertionError(
                    f"save_checkpoint leaves no checkpoint: {error}; the contract: a folder with a "
                    "manifest (checkpoint.files.write_checkpoint_info)"
                ) from error
        try:
            engine.save_checkpoint(path)
        except ConfigError:
            pass
        else:
            raise AssertionError(
                "save_checkpoint writes over a folder; the contract: ConfigError if it exists"
            )
        saving = engine.begin_save(self.folder / "later")
        saving.finish(self.spec.timeout_s)
        _require(saving.is_written, "is_written is False after finish of begin_save")
        saved = self.share_export(engine)
        other = self.start()
        other.load_checkpoint(path)
        _require(
            _are_close(self.share_export(other), saved, 0.0),
            "load_checkpoint does not give back the weights that save_checkpoint has written",
        )
        self.compare_next_step(engine, other, 2, "after load_checkpoint on a fresh engine")
        self.check_offload(other)
        self.compare_next_step(engine, other, 3, "after to('host') and to('device')")
        other.close()

    def compare_next_step(
        self, engine: BaseEngine, other: BaseEngine, step: int, when: str
    ) -> None:
        """Take the same step with both engines; compare learning rates, norms and weights."""
        first, second = (e.train_batch(self.share, _train_on_tokens) for e in (engine, other))
        lr = compute_learning_rate(_OPTIMIZER, step, _TOTAL_STEPS)
        _require(
            math.isclose(second["lr"], lr),
            f"{when}, step {step} has lr={second['lr']:.6g} instead of {lr:.6g}; the contract: the "
            "number of steps goes on",
        )
        _require(
            math.isclose(first["grad_norm"], second["grad_norm"], rel_tol=1e-5),
            f"{when}, step {step} has grad_norm={second['grad_norm']:.6g} instead of "
            f"{first['grad_norm']:.6g}; the contract: weights go on, and gradients begin at zero",
        )
        _require(
            _are_close(self.share_export(engine), self.share_export(other), 1e-6),
            f"{when}, step {step} leads to other weights; the contract: the state of the optimizer "
            "goes on",
        )

    def check_offload(self, engine: BaseEngine) -> None:
        """Check `to`: calls that need what is away are refused, and all of it comes back."""
        before = self.share_export(engine)
        engine.to("host")
        calls: dict[str, Callable[[], object]] = {
            "infer_batch": lambda: engine.infer_batch(self.share),
            "get_local_weights": engine.get_local_weights,
            "train_batch": lambda: engine.train_batch(self.share, _train_on_tokens),
            "save_checkpoint": lambda: engine.save_checkpoint(self.folder / "away"),
        }
        for name, call in calls.items():
            try:
                call()
            except StateError:
                continue
            raise AssertionError(
                f"{name} works while the engine is on the host; the contract: StateError "
                "(BaseEngine.require)"
            )
        engine.to("device")
        _require(
            _are_close(self.share_export(engine), before, 0.0),
            "to('host') and to('device') change weights; the contract: bit for bit the same",
        )


_MEANINGS = {
    "loss": "the sum of weights * loss over the tokens of all ranks, at the temperature given",
    "policy_loss": "the sum of loss_weights * loss over the tokens of all ranks",
    "kl_loss": "the sum of kl_weights * loss over the tokens of all ranks",
    "grad_norm": "the norm before clipping of the sum of the gradients of all ranks",
    "lr": "the learning rate of this step, from warm-up on",
}


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _are_close(
    tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], distance: float
) -> bool:
    """Return whether all tensors are within a distance of each other."""
    return all(float((tensors[n] - expected[n]).abs().max()) <= distance for n in tensors)
