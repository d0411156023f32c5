"""Long because: its models and ranks serve all of them.

KL-Cov, GAE, and GSPO and an advantage of a user's files against plain torch on whole sequences;
and updates of every algorithm by FSDP2 against those by Megatron.

GSPO has a ratio of sequences, whose tokens lie on two ranks under context parallelism and beside
those of others in a pack. GAE has advantages of tokens, from the values of a value model; the
user's file, from rewards of tokens. KL-Cov selects tokens of the whole mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import tiny_models
import torch
import transformers
from safetensors.torch import load_file

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.controllers import Coefficients
from mcore_rl.algorithms.inputs import is_prepared
from mcore_rl.algorithms.losses import LOSSES, ValueClipSettings, value_clip
from mcore_rl.config.schema import AlgorithmConfig, DistillationConfig, Layout, RLConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.engine.base import create_engine
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import ValueEngine
from mcore_rl.observability.warnings import StepWarnings
from mcore_rl.parallel.groups import initialize_groups
from mcore_rl.parallel.mesh import Mesh
from mcore_rl.trainers.device_sharing import ExclusiveDevices
from mcore_rl.trainers.policy_loss import PolicyLoss
from mcore_rl.trainers.roles import Actor, TrainingBatch
from mcore_rl.trainers.training_batch import (
    add_advantages,
    add_loss_weights,
    add_prepared_columns,
    map_mini_batches,
)
from tests.fakes import LocalWorkers
from tests.nightly import all_but, nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
GSPO = AlgorithmConfig(
    loss=f"{EXAMPLES}/gspo.py:gspo",
    loss_settings={"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    loss_aggregation="sequence_mean_token_mean",
)
KL_COV = AlgorithmConfig(
    loss="kl_cov", loss_settings={"fraction": 0.3, "kl_coef": 0.5}, num_mini_batches=2
)
GAE = AlgorithmConfig(
    advantage="gae", advantage_settings={"gamma": 0.9, "lam": 0.8, "whiten": False}
)
OWN_ADVANTAGE = """
from dataclasses import dataclass

import numpy as np

from mcore_rl.algorithms.inputs import AdvantageInputs
from mcore_rl.data.batch import Jagged


@dataclass(frozen=True)
class Settings:
    gamma: float


def reward_to_go(inputs: AdvantageInputs, settings: Settings) -> Jagged:
    rows = []
    for rewards, mask in zip(inputs.token_rewards, inputs.response_mask, strict=True):
        row, total = np.zeros(len(mask)), 0.0
        for t in np.flatnonzero(mask)[::-1]:
            row[t] = total = rewards[t] + settings.gamma * total
        rows.append(row)
    return Jagged.pack(rows, np.float64)
"""
ONE_PACK, PACKS, ALONE = 10_000, 132, 16  # budgets in tokens; the last is below most samples
LAYOUTS = {
    "tp1": Layout(),
    "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2),
    "cp2dp2": Layout(cp=2, dp=2),
    "tp2cp2": Layout(tp=2, cp=2),
}
BUDGETS = (ONE_PACK, PACKS, ALONE)
CASES = all_but(
    [
        ("tp1", PACKS),
        ("cp2", ONE_PACK),
        ("cp2", PACKS),
        ("cp2", ALONE),
        ("dp2", ALONE),
        ("pp2", PACKS),
    ],
    [(layout, budget) for layout in LAYOUTS for budget in BUDGETS],
)
PARALLEL = all_but(["cp2", "dp2"], [layout for layout in LAYOUTS if layout != "tp1"])


@ranks.spawn_on_ranks()
def trained(
    path: Path, layout: Layout, batch: Batch, algorithm: AlgorithmConfig, budget: int
) -> ranks.Result:
    """Metrics and whole gradients of a pass; then metrics of two steps, and the weights."""
    spec = ranks.build_engine_spec(path, layout)
    spec.engine.max_tokens_per_micro_batch = budget
    spec.engine.optimizer.eps = 1e-5  # or Adam makes a whole step of a gradient's rounding
    engine, loss = ranks.start_engine(spec), PolicyLoss(algorithm)
    share = batch.take(ranks.list_rows(engine, batch))
    engine.optimizer_zero_grad()
    results = engine.forward_backward_batch(share, loss, forward_only=False)
    result: ranks.Result = {
        "metrics": engine._reduce_metrics(results),
        "gradients": ranks.read_gradients(engine),
    }
    result["steps"] = [engine.train_batch(share, loss) for _ in range(2)]
    return result | {"trained": dict(engine.get_per_tensor_param())}


@ranks.spawn_on_ranks()
def updated(path: Path, layout: Layout, batch: Batch, algorithm: AlgorithmConfig) -> ranks.Result:
    """Return the model after an update of two mini-batches, and its weights before each."""
    engine, loss = ranks.start_engine(ranks.build_engine_spec(path, layout)), PolicyLoss(algorithm)
    mini_batches: list[ranks.Result] = []

    class Workers(LocalWorkers):
        """A worker group of this rank."""

        def compute_log_probs(self, batch: Batch, *, temperature: float) -> Batch:
            return engine.infer_batch(batch, temperature=temperature)

        def update(self, batch: Batch, *, temperature: float) -> list[list[Any]]:
            names = ("group_ids", "log_probs", "current_log_probs", "selected")
            values = {n: getattr(batch[n], "values", batch[n]) for n in names}
            tensors = {n: torch.from_numpy(value.copy()) for n, value in values.items()}
            weights = {n: w.clone() for n, w in engine.get_per_tensor_param()}
            mini_batches.append({"columns": tensors, "weights": weights})
            return [[engine.train_batch(batch, loss, temperature=temperature)]]

    workers: Any = Workers()
    scored = workers.compute_log_probs(batch, temperature=1.0)
    num, step, config = algorithm.num_mini_batches, 1, RLConfig(seed=0, algorithm=algorithm)
    weighted, counts = map_mini_batches(scored, num, [0, step], add_loss_weights, algorithm)
    devices: Any = ExclusiveDevices(workers)
    actor = Actor(workers, devices, config, Coefficients(algorithm), StepWarnings())
    training = TrainingBatch(weighted, weighted, counts, algorithm)
    return {"mini_batches": mini_batches, "metrics": actor.update(training, step)[1]}


@ranks.spawn_on_ranks()
def update_by_all(
    path: Path, value_path: Path, layout: Layout, backend: str, batches: dict[str, Batch]
) -> ranks.Result:
    """Score a batch and take a step of each algorithm in turn, then one of a critic."""
    spec = ranks.build_engine_spec(path, layout)
    # A large epsilon: else the rounding of gradients near 0 decides the sign of Adam's step. Small
    # steps: else the last algorithms clip all tokens.
    optimizer = replace(spec.engine.optimizer, eps=1e-3, lr=2e-5)
    engine_config = replace(spec.engine, backend=backend, optimizer=optimizer)
    family = "transformers" if backend == "fsdp" else ""
    spec = replace(
        spec, engine=engine_config, model=replace(spec.model, family=family),
        with_sum_pi_squared=True,
    )  # fmt: skip
    value_spec = replace(spec, model=replace(spec.model, path=str(value_path)))
    actor = ranks.start_engine(spec, partial(create_engine, "language_model"))
    critic = ranks.start_engine(value_spec, partial(create_engine, "value_model"))
    actor.mesh = Mesh(layout)
    rows = ranks.list_rows(actor, rewarded_batch())
    scored = actor.infer_batch(batches["loss ppo_clip"].take(rows))
    names = ("log_probs", "entropy", "sum_pi_squared")
    steps = {
        name: actor.train_batch(batch.take(rows), PolicyLoss(ALGORITHMS[name]))
        for name, batch in batches.items()
    }
    loss = partial(value_clip, settings=ValueClipSettings(clip_range=0.2))
    steps["critic"] = critic.train_batch(batches["advantage gae"].take(rows), loss)
    return {
        "scores": {name: torch.from_numpy(scored.jagged(name).values.copy()) for name in names},
        "steps": steps,
        "trained": dict(actor.get_per_tensor_param()),
    }


@ranks.spawn_on_ranks()
def values_of(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """By row of the batch; empty where there is no head."""
    engine = ranks.start_engine(ranks.build_engine_spec(path, layout), ValueEngine)
    rows = ranks.list_rows(engine, batch)
    scored = engine.infer_batch(batch.take(rows).select("prompt_ids", "response_ids"))
    if scored is None:
        return {}
    column = scored.jagged("values")
    return {row: torch.from_numpy(column[place].copy()) for place, row in enumerate(rows)}


@ranks.spawn_on_ranks()
def sequence_sums(layout: Layout, batch: Batch) -> ranks.Result:
    """Sums and means of numbers in packs of the batch, and the gradient of a loss of both."""
    device.install(1)
    from megatron.core import parallel_state

    from mcore_rl.engine.megatron.packing import read_pack_split
    from mcore_rl.engine.megatron.step import get_context_group
    from mcore_rl.engine.packing import pack_samples
    from mcore_rl.engine.steps import build_pack_inputs

    initialize_groups(layout, "gloo", seed=0)
    split, packs = read_pack_split(), []
    for micro in pack_samples(
        batch, [[4, 0, 7], [], [2], list(range(8, len(batch)))], split, torch.device("cpu")
    ):
        numbers = micro.columns["numbers"].double().requires_grad_()
        inputs = build_pack_inputs({"log_probs": numbers}, micro, get_context_group())
        loss = _compute_sequence_loss(
            inputs.sequence_sum(numbers), inputs.sequence_mean(numbers), numbers
        )
        loss.sum().backward()
        column = {"sum": inputs.sequence_sum(numbers), "mean": inputs.sequence_mean(numbers)}
        values = {name: value.detach() for name, value in column.items()}
        packs.append(
            {
                "rows": micro.rows,
                "indices": micro.response_indices,
                "gradient": numbers.grad,
                **values,
            }
        )
    return {"packs": packs, "cp_rank": parallel_state.get_context_parallel_rank()}


def _compute_sequence_loss(
    total: torch.Tensor, mean: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    return mean.exp() * numbers.nan_to_num(0.3) + total.square() / 7


# Settings without a default, and fractions of tokens that a small batch has.
SETTINGS: dict[str, dict[str, Any]] = {
    "dro": {"beta": 0.5}, "kimi": {"tau": 0.5}, "gdpo": {"parts": "format"},
    "kl_cov": {"fraction": 0.3}, "positive_nll": {"min_reward": 0.0},
    "clip_cov": {"fraction": 0.3, "covariance_low": 0.0},
}  # fmt: skip
DISTILLATIONS = ("sampled_kl", "reverse_kl", "forward_kl")
ALGORITHMS = {
    **{
        f"loss {name}": AlgorithmConfig(loss=name, loss_settings=SETTINGS.get(name, {}))
        for name in LOSSES.names
    },
    **{
        f"advantage {name}": AlgorithmConfig(
            advantage=name, advantage_settings=SETTINGS.get(name, {})
        )
        for name in ADVANTAGES.names
    },
    **{
        f"distillation {name}": AlgorithmConfig(distillation=DistillationConfig(loss=name))
        for name in DISTILLATIONS
    },
    "KL and entropy in the loss": AlgorithmConfig(kl_coef=0.1, entropy_coef=0.3),
}


@dataclass
class Reference:
    loss: float
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


@dataclass
class Runs:
    path: Path
    value_path: Path
    folder: Path

    def gspo(self, layout: str, budget: int = PACKS) -> list[ranks.Result]:
        return trained(self.path, LAYOUTS[layout], gspo_batch(), GSPO, budget)

    def kl_cov(self, layout: str, budget: int = PACKS) -> list[ranks.Result]:
        return trained(self.path, LAYOUTS[layout], kl_cov_batch(), KL_COV, budget)

    def gae(self, layout: str, budget: int = PACKS) -> list[ranks.Result]:
        by_rank = values_of(self.value_path, LAYOUTS[layout], rewarded_batch())
        by_row = {row: values for result in by_rank for row, values in result.items()}
        values = Jagged.pack([by_row[row].numpy() for row in sorted(by_row)], np.float32)
        batch = add_advantages(rewarded_batch().with_columns(values=values), GAE)
        return trained(self.path, LAYOUTS[layout], batch, GAE, budget)

    def train_custom_advantage(self, layout: str, budget: int = PACKS) -> list[ranks.Result]:
        file = self.folder / "own_advantage.py"
        file.write_text(OWN_ADVANTAGE)
        algorithm = AlgorithmConfig(
            advantage=f"{file}:reward_to_go", advantage_settings={"gamma": 0.9}
        )
        batch = add_advantages(token_rewarded_batch(), algorithm)
        return trained(self.path, LAYOUTS[layout], batch, algorithm, budget)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("algorithms")
    value_model().save_pretrained(folder / "value")
    return Runs(tiny_models.save("qwen3", folder), folder / "value", folder)


def value_model() -> Any:
    config = tiny_models.configs()["qwen3"]
    config.num_labels = 1
    torch.manual_seed(1)
    model = transformers.AutoModelForTokenClassification.from_config(config).float().eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.1)
    return model


def sampled_batch() -> Batch:
    """Old log-probs near those of the model, some sequences far enough for a clip."""
    batch = tiny_models.make_batch()
    batch = batch.select(*batch.columns.keys() - {"kl_weights"})
    _, log_probs, _ = tiny_models.reference_scores(tiny_models.build("qwen3"), batch)
    rng, responses = np.random.default_rng(7), batch.jagged("response_ids")
    away = np.repeat(rng.normal(0, 0.2, len(batch)), responses.lengths)
    old = log_probs + away + rng.normal(0, 0.3, len(log_probs))
    return batch.with_columns(log_probs=responses.with_values(old.astype(np.float32)))


def gspo_batch() -> Batch:
    return add_loss_weights(sampled_batch(), GSPO)[0]


def kl_cov_batch() -> Batch:
    batch = sampled_batch()
    _, log_probs, entropy = tiny_models.reference_scores(tiny_models.build("qwen3"), batch)
    columns = {"current_log_probs": log_probs, "entropy": entropy}
    responses = batch.jagged("response_ids")
    scored = {n: responses.with_values(c.astype(np.float32)) for n, c in columns.items()}
    weighted = add_loss_weights(batch, KL_COV)[0].with_columns(**scored)
    return add_prepared_columns(weighted, KL_COV, [0])


def rewarded_batch() -> Batch:
    batch = sampled_batch()
    rewards = np.random.default_rng(3).normal(size=len(batch)).astype(np.float32)
    groups = np.arange(len(batch)) // 2
    return add_loss_weights(batch, GAE)[0].with_columns(rewards=rewards, group_ids=groups)


def token_rewarded_batch() -> Batch:
    """Each token has a reward of its own, also those that the policy did not choose."""
    batch = rewarded_batch()
    responses = batch.jagged("response_ids")
    rewards = np.random.default_rng(4).normal(size=len(responses.values)).astype(np.float32)
    return batch.with_columns(token_rewards=responses.with_values(rewards))


def build_batches() -> dict[str, Batch]:
    """Return the inputs of an update by each algorithm: mini-batches of the same samples."""
    batch, rng = rewarded_batch(), np.random.default_rng(11)
    responses = batch.jagged("response_ids")
    num_tokens, k = len(responses.values), 5

    def draw(*shape: int) -> Jagged:
        return responses.with_values(rng.normal(-5, 0.5, (num_tokens, *shape)).astype(np.float32))

    values = draw()
    _, log_probs, entropy = tiny_models.reference_scores(tiny_models.build("qwen3"), batch)
    batch = batch.with_columns(
        rewards=np.abs(batch.array("rewards")),  # maxrl takes no negative ones
        current_log_probs=responses.with_values(log_probs.astype(np.float32)),
        entropy=responses.with_values(entropy.astype(np.float32)),
        rollout_log_probs=draw(),
        reference_log_probs=draw(),
        sum_pi_squared=responses.with_values(rng.uniform(0, 1, num_tokens).astype(np.float32)),
        values=responses.with_values(values.values + 5),
        state_ids=responses.with_values(rng.integers(0, 2, num_tokens)),
        baseline_rewards=rng.normal(size=len(batch)).astype(np.float32),
        teacher_log_probs=draw(2),
        teacher_top_log_probs=draw(2, k),
        teacher_ids=responses.with_values(rng.integers(2, 90, (num_tokens, 2, k))),
        teacher_shares=responses.with_values(rng.uniform(0, 1, (num_tokens, 2)).astype(np.float32)),
        **{"reward/format": rng.normal(size=len(batch)).astype(np.float32)},
    )
    batches = {}
    for name, algorithm in ALGORITHMS.items():
        weighted = add_loss_weights(add_advantages(batch, algorithm), algorithm)[0]
        if is_prepared(LOSSES[algorithm.loss]):
            weighted = add_prepared_columns(weighted, algorithm, [0])
        if algorithm.distillation.loss == "off":
            teachers = [column for column in weighted.names if column.startswith("teacher_")]
            weighted = weighted.drop_columns(*teachers)
        batches[name] = weighted
    return batches


def rows_of(model: Any, batch: Batch) -> list[dict[str, torch.Tensor]]:
    """The columns of each sample in float64, and `new`: its log-probs by transformers."""
    rows = []
    for row in range(len(batch)):
        columns = {n: batch.jagged(n)[row].copy() for n in batch.columns if n in JAGGED}
        ids = torch.from_numpy(np.concatenate([columns["prompt_ids"], columns["response_ids"]]))
        table = model(ids[None]).logits[0, len(columns["prompt_ids"]) - 1 : -1].double()
        targets = torch.from_numpy(columns["response_ids"])[:, None]
        tensors = {name: torch.from_numpy(column).double() for name, column in columns.items()}
        new = table.log_softmax(-1).gather(1, targets)[:, 0]
        rows.append(tensors | {"new": new, "mask": tensors["response_mask"] != 0})
    return rows


JAGGED = ("prompt_ids", "response_ids", "response_mask", "log_probs", "advantages")


def gradients_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """By the names of a checkpoint: transformers writes them as if they were the weights."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    free, held = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.min(free, held), (held < free).double()


@pytest.fixture(scope="module")
def gspo_reference(runs) -> Reference:
    """Each sequence by itself: equations 5 and 7 of arXiv:2507.18071."""
    model = tiny_models.build("qwen3")
    losses, ratios, clipped, counts = [], [], [], []
    for row in rows_of(model, gspo_batch()):
        ratio = (row["new"] - row["log_probs"])[row["mask"]].mean().exp()
        loss, is_clipped = clipped_surrogate(ratio, row["advantages"][0], 0.1, 0.2)
        losses.append(loss)
        ratios.append(ratio.item())
        clipped.append(is_clipped.item())
        counts.append(row["mask"].sum().item())
    loss = torch.stack(losses).mean()
    loss.backward()
    metrics = {"ratio": ratios, "clipped": clipped}
    means = {name: float(np.average(values, weights=counts)) for name, values in metrics.items()}
    assert 0.2 < np.mean(clipped) < 0.8  # guards the comparisons: both sides of the clip are there
    return Reference(loss.item(), means, gradients_of(model, runs.folder / "gspo"))


@pytest.fixture(scope="module")
def kl_cov_reference(runs) -> Reference:
    """All tokens in a row: section 4 of arXiv:2505.22617."""
    model = tiny_models.build("qwen3")
    rows = rows_of(model, sampled_batch())
    new, old, advantages = (
        torch.cat([row[name][row["mask"]] for row in rows])
        for name in ("new", "log_probs", "advantages")
    )
    covariances = (new - new.mean()) * (advantages - advantages.mean())
    highest = covariances.detach().sort(descending=True).indices[: int(0.3 * len(new))]
    selected = torch.zeros(len(new), dtype=torch.float64)
    selected[highest] = 1
    ratio = (new - old).exp()
    loss = (-ratio * advantages + 0.5 * selected * ratio.log().abs()).mean()
    loss.backward()
    metrics = {"selected": selected.mean().item(), "ratio": ratio.mean().item()}
    return Reference(loss.item(), metrics, gradients_of(model, runs.folder / "kl_cov"))


@pytest.fixture(scope="module")
def gae_reference(runs) -> Reference:
    """Values by transformers, advantages by their definition, PPO's surrogate token by token."""
    model, critic, advantages = tiny_models.build("qwen3"), value_model(), []
    batch = rewarded_batch()
    rows = rows_of(model, batch)
    for row, reward in zip(rows, batch.array("rewards"), strict=True):
        prompt, response = row["prompt_ids"].long(), row["response_ids"].long()
        with torch.no_grad():
            states = critic(torch.cat([prompt, response])[None]).logits[0, :, 0].double()
        values = states[len(prompt) - 1 : -1][row["mask"]]
        advantages.append(summed_deltas(values, float(reward), 0.9, 0.8))
    return ppo_reference(model, rows, advantages, runs.folder / "gae")


@pytest.fixture(scope="module")
def own_reference(runs) -> Reference:
    """The user's sum term by term: A_t = sum over k of gamma^k * r_(t+k) of the chosen tokens."""
    model, batch, advantages = tiny_models.build("qwen3"), token_rewarded_batch(), []
    rows = rows_of(model, batch)
    for row, rewards in zip(rows, batch.jagged("token_rewards"), strict=True):
        earned, n = torch.from_numpy(rewards.copy()).double()[row["mask"]], int(row["mask"].sum())
        powers = [[0.9 ** (s - t) if s >= t else 0.0 for s in range(n)] for t in range(n)]
        advantages.append(torch.tensor(powers, dtype=torch.float64).view(n, n) @ earned)
    return ppo_reference(model, rows, advantages, runs.folder / "own")


def ppo_reference(
    model: Any,
    rows: list[dict[str, torch.Tensor]],
    advantages: list[torch.Tensor],
    folder: Path,
) -> Reference:
    """PPO's surrogate token by token, its mean over all chosen ones; `advantages` are theirs."""
    total, count, sums = torch.zeros((), dtype=torch.float64), 0, np.zeros(2)
    for row, advantage in zip(rows, advantages, strict=True):
        ratio = (row["new"] - row["log_probs"])[row["mask"]].exp()
        loss, clipped = clipped_surrogate(ratio, advantage, 0.2, 0.2)
        total, count = total + loss.sum(), count + len(advantage)
        sums += [ratio.sum().item(), clipped.sum().item()]
    (total / count).backward()
    metrics = dict(zip(("ratio", "clipped"), (sums / count).tolist(), strict=True))
    return Reference(total.item() / count, metrics, gradients_of(model, folder))


def summed_deltas(values: torch.Tensor, reward: float, gamma: float, lam: float) -> torch.Tensor:
    """Equation 16 of arXiv:1506.02438, sum by sum; the episode ends with the last value."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    deltas = gamma * following - values
    deltas[-1] += reward
    n = range(len(values))
    return torch.stack([sum((gamma * lam) ** (s - t) * deltas[s] for s in n if s >= t) for t in n])


def assert_equals(by_rank: list[ranks.Result], expected: Reference) -> None:
    reported = [result["metrics"] for result in by_rank if result["metrics"]]
    assert reported
    for metrics in reported:
        assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-5)
        for name, value in expected.metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5), name
    gradients = by_rank[0]["gradients"]
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def assert_same_steps(by_rank: list[ranks.Result], reference: ranks.Result) -> None:
    assert any("loss" in result["steps"][0] for result in by_rank)
    for result in by_rank:
        for step, expected in zip(result["steps"], reference["steps"], strict=True):
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            if "loss" in step:
                for name in ("loss", "ratio", "clipped"):
                    assert step[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    for name, tensor in reference["trained"].items():
        torch.testing.assert_close(by_rank[0]["trained"][name], tensor, rtol=0, atol=5e-6, msg=name)


@pytest.mark.parametrize(("layout", "budget"), CASES)
def test_gspo_equals_plain_torch_on_whole_sequences(runs, gspo_reference, layout, budget):
    assert_equals(runs.gspo(layout, budget), gspo_reference)


@pytest.mark.parametrize(("layout", "budget"), all_but(
    [("cp2", PACKS), ("dp2", ALONE)],
    [(layout, budget) for layout in LAYOUTS for budget in BUDGETS],
))  # fmt: skip
def test_kl_cov_equals_plain_torch_on_the_whole_mini_batch(runs, kl_cov_reference, layout, budget):
    assert_equals(runs.kl_cov(layout, budget), kl_cov_reference)


def test_tokens_are_selected_by_the_policy_before_each_mini_batch(runs):
    batch = sampled_batch()
    batch = batch.with_columns(group_ids=np.arange(len(batch)) // 2)
    [result] = updated(runs.path, Layout(), batch, KL_COV)
    first, second = result["mini_batches"]
    assert result["metrics"]["actor/loss"] != 0
    assert torch.equal(first["columns"]["current_log_probs"], first["columns"]["log_probs"])
    for part in (first, second):
        columns, model = part["columns"], tiny_models.build("qwen3")
        model.load_state_dict(part["weights"], strict=False)
        rows = [batch.array("group_ids").tolist().index(g) for g in columns["group_ids"].tolist()]
        rows = [row + rows[:place].count(row) for place, row in enumerate(rows)]
        mini_batch = batch.take(rows)
        log_probs = tiny_models.reference_scores(model, mini_batch)[1]
        np.testing.assert_allclose(columns["current_log_probs"], log_probs, atol=1e-5)
        trained = mini_batch.jagged("response_mask").values != 0
        advantages = mini_batch.jagged("advantages").values.astype(np.float64)
        covariances = (log_probs - log_probs[trained].mean()) * (
            advantages - advantages[trained].mean()
        )
        highest = np.sort(covariances[trained])[::-1][: int(0.3 * trained.sum())]
        np.testing.assert_array_equal(
            columns["selected"] != 0, trained & (covariances >= highest[-1])
        )
    moved = second["columns"]["current_log_probs"] - second["columns"]["log_probs"]
    assert moved.abs().max() > 1e-3  # the first mini-batch has changed the policy


@pytest.mark.parametrize("layout", ["cp2", nightly("dp2"), nightly("tp1")])
def test_updates_of_every_algorithm_by_fsdp_equal_those_by_megatron(runs, layout):
    batches, paths = build_batches(), (runs.path, runs.value_path)
    [expected] = update_by_all(*paths, Layout(), "megatron", batches)
    results = update_by_all(*paths, LAYOUTS[layout], "fsdp", batches)
    if layout != "dp2":
        for name, scores in expected["scores"].items():
            torch.testing.assert_close(results[0]["scores"][name], scores, rtol=0, atol=1e-5)
    gaps = {}
    assert len(expected["steps"]) == len(ALGORITHMS) + 1
    for name, step in expected["steps"].items():
        assert step["grad_norm"] > 0, name
        for metric, value in step.items():
            values = [result["steps"][name][metric] for result in results]
            gaps[name, metric] = max(abs(v - value) for v in values) / max(1, abs(value))
    largest = sorted(gaps.items(), key=lambda item: -item[1])[:5]
    print(f"{len(ALGORITHMS)} algorithms, {len(gaps)} numbers; largest differences: {largest}")
    assert largest[0][1] < 1e-5
    before = load_file(runs.path / "model.safetensors")
    moved = [(tensor - before[name]).abs().max() for name, tensor in expected["trained"].items()]
    assert max(moved) > 1e-4
    for name, tensor in expected["trained"].items():
        torch.testing.assert_close(results[0]["trained"][name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", PARALLEL)
def test_two_steps_of_gspo_equal_one_rank(runs, layout):
    assert_same_steps(runs.gspo(layout), runs.gspo("tp1")[0])


@pytest.mark.parametrize(("layout", "budget"), all_but(
    [("tp1", PACKS), ("cp2", PACKS), ("dp2", ALONE)],
    [(layout, budget) for layout in LAYOUTS for budget in BUDGETS],
))  # fmt: skip
def test_ppo_with_gae_equals_plain_torch(runs, gae_reference, layout, budget):
    assert_equals(runs.gae(layout, budget), gae_reference)


@pytest.mark.parametrize(("layout", "budget"), all_but(
    [("cp2", PACKS)], [(layout, budget) for layout in LAYOUTS for budget in BUDGETS]
))  # fmt: skip
def test_an_advantage_of_tokens_from_a_users_file_equals_plain_torch(
    runs, own_reference, layout, budget
):
    assert_equals(runs.train_custom_advantage(layout, budget), own_reference)


@pytest.mark.parametrize("layout", all_but(["cp2"], [n for n in LAYOUTS if n != "tp1"]))
def test_two_steps_with_gae_equal_one_rank(runs, layout):
    assert_same_steps(runs.gae(layout), runs.gae("tp1")[0])


def test_a_step_does_move_the_ratio(runs):
    """Guards the comparisons of two steps."""
    first, second = runs.gspo("tp1")[0]["steps"]
    assert abs(first["ratio"] - second["ratio"]) > 1e-3


@pytest.mark.parametrize("cp", [1, 2, nightly(4)])
def test_sums_over_sequences_and_their_gradients_are_those_of_each_sequence_alone(cp):
    """In float64, with not a number where nothing is trained on; also sequences of one token."""
    batch = tiny_models.make_batch(16, seed=8).select("prompt_ids", "response_ids", "loss_weights")
    chosen = tiny_models.make_batch(16, seed=8).jagged("response_mask").values.copy()
    chosen[-5:] = 0
    mask = batch.jagged("response_ids").with_values(chosen)
    assert 1 in mask.lengths and not mask[15].any()
    numbers = np.random.default_rng(2).normal(size=len(chosen))
    numbers[chosen == 0] = np.nan
    batch = batch.with_columns(response_mask=mask, numbers=mask.with_values(numbers))
    results = sequence_sums(Layout(cp=cp), batch)
    seen = 0
    for packs in zip(*(result["packs"] for result in results), strict=True):
        rows = packs[0]["rows"]
        indices = torch.cat([pack["indices"] for pack in packs])
        assert sorted(indices.tolist()) == list(range(sum(mask.lengths[rows])))
        order, start = indices.argsort(), 0
        joined = {n: torch.cat([p[n] for p in packs])[order] for n in ("sum", "mean", "gradient")}
        for row in rows:
            alone = torch.from_numpy(batch.jagged("numbers")[row].copy()).requires_grad_()
            chosen = alone[torch.from_numpy(mask[row].copy()) != 0]
            total = chosen.sum().expand(len(alone))
            mean = total / max(len(chosen), 1)
            (expected,) = torch.autograd.grad(
                _compute_sequence_loss(total, mean, alone).sum(), alone
            )
            for name, value in {"sum": total, "mean": mean, "gradient": expected}.items():
                actual = joined[name][start : start + len(alone)]
                torch.testing.assert_close(actual, value.detach(), msg=f"{name} of row {row}")
            start, seen = start + len(alone), seen + 1
    assert seen >= 7
