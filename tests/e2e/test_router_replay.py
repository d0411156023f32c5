"""Experts on their way from a server to the trainer: the quickstart's MoE over two pipeline stages.

In bfloat16, where a server's routers and a trainer's often choose differently.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.checkpoint.run_checkpoints import RunCheckpoints, read_checkpoint
from mcore_rl.config.rules import resolve_for_device_type
from mcore_rl.config.schema import Layout, ReplayConfig, RLConfig
from mcore_rl.controller.batch_ops import fetch_batch, select_small_columns, select_token_columns
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import WorkerError, gather_results
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.datasets import PromptDataset
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.routed_experts import EXPERTS, list_expert_columns
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engine.base import load_backend
from mcore_rl.engine.worker import ModelWorker, apply_on_rank_zero
from mcore_rl.examples.tasks import last_digit
from mcore_rl.jobs import rl
from mcore_rl.jobs.placement import Pools, get_device_resource, list_replayed_experts
from mcore_rl.jobs.preflight import load_prompt_files
from mcore_rl.jobs.run_plan import plan_run
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.rollout.weight_updater import WeightSync, connect
from mcore_rl.trainers.async_rollout import AsyncRollout, RolloutPrefetcher
from mcore_rl.trainers.checkpointing import Stateful
from mcore_rl.trainers.policy_checks import compute_logprob_gaps
from mcore_rl.trainers.replay_buffer import ReplayBuffer
from mcore_rl.trainers.step_samples import StepSampler
from mcore_rl.trainers.training_batch import add_loss_weights

pytestmark = pytest.mark.job

STAGES, NUM_EXPERTS, TOPK = [(0,), (1, 2)], 8, 2
NAMES = [f"{EXPERTS}/0", f"{EXPERTS}/1,2"]


class Watched(ModelWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def used(self, batch: Batch) -> dict[int, np.ndarray]:
        """Return by layer of this rank the experts that its routers used: [tokens, experts]."""
        from mcore_rl.engine.megatron.moe import iter_routers

        engine = self._engine
        read = batch.select("prompt_ids", "response_ids")
        micros = engine._build_micro_batches(read, is_training=False)
        seen: dict[int, list[torch.Tensor]] = {}
        handles = [
            router.register_forward_hook(
                lambda _, __, output, layer=layer: seen.setdefault(layer, []).append(output[1])
            )
            for chunk in engine.chunks
            for layer, router in iter_routers(chunk)
        ]
        self.compute_log_probs(batch, temperature=1.0)
        for handle in handles:
            handle.remove()
        experts = {}
        for layer, maps in seen.items():
            experts[layer] = np.zeros((int(batch.num_tokens.sum()), NUM_EXPERTS), bool)
            for micro, used in zip(micros, maps, strict=True):
                is_token = micro.token_indices >= 0
                experts[layer][micro.token_indices[is_token].numpy()] = used[is_token].numpy()
        return experts


@dataclass(frozen=True)
class Run:
    actor: WorkerGroup
    generated: RemoteBatch  # by a server
    batch: Batch  # the same, here
    config: RLConfig
    rollout: RolloutPool
    prompts: PromptDataset
    weight_sync: WeightSync

    def sampler(self, mode: str) -> StepSampler:
        """Return the sampler of a run of two steps, the second of which is generated ahead."""
        config = copy.deepcopy(self.config)
        config.trainer.mode, config.trainer.staleness, config.trainer.num_steps = mode, 1, 2
        config.trainer.prompts_per_step, config.algorithm.group_size = 4, 4
        config.algorithm.filter.group_filter = ""
        prompts = PromptBatches(self.prompts, 4, seed=0)
        return StepSampler(config, self.rollout, prompts, ReplayBuffer(ReplayConfig(), 0, 60.0))

    def scored(self, batch: Samples, **options: bool) -> Any:
        return self.actor.call(ModelWorker.compute_log_probs, batch, temperature=1.0, **options)


def config_of(folder: Path) -> RLConfig:
    task = last_digit.prepare(folder / "task", 0, worked_share=0.35)
    config = RLConfig(output_dir=str(folder))
    config.model.path, config.model.dtype = str(task.model_dir), "bfloat16"
    config.data.train_file, config.data.max_prompt_tokens = str(task.train_file), 64
    config.actor.layout = Layout(pp=2, first_stage_layers=1)
    config.actor.moe.router_replay = "rollout"
    config.actor.max_tokens_per_micro_batch = 400
    config.rollout.max_response_tokens = 32
    config.rollout.kv_cache_bytes = 64 << 20
    return resolve_for_device_type(config, "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = config_of(tmp_path_factory.mktemp("replay"))
    prompts = load_prompt_files(
        {"data.train_file": config.data.train_file}, config, load_tokenizer(config.model.path)
    )
    plan = plan_run(config)
    with (
        clean_up_on_exit() as scratch,
        rl.open_session(config, plan.num_devices, scratch),
        Pools(plan, get_device_resource(), config.timeouts, Path(config.output_dir)) as pools,
        contextlib.ExitStack() as stack,
    ):
        servers = stack.enter_context(rl.build_server_pool(config, plan, pools))
        arguments = plan["actor"].build_worker_arguments()
        layout, env = config.actor.layout, load_backend(config.actor).rank_environment
        actor = pools.group(
            "actor", Watched, arguments, layout, name="actor", env=env(layout, "cpu")
        )
        stack.enter_context(actor)
        actor.call(ModelWorker.initialize)
        gather_results(servers.submit_start())
        servers.mark_started()
        rollout = RolloutPool(servers, config.rollout, seed=0, records_experts=True)
        generated = rollout.generate(next(PromptBatches(prompts, 8, seed=0)), n=4)
        assert isinstance(generated, RemoteBatch)
        batch = fetch_batch(generated, "a test needs the samples", config.timeouts.call_s)
        weight_sync = connect(config, actor, servers, 1 << 30)
        yield Run(actor, generated, batch, config, rollout, prompts, weight_sync)


def test_the_driver_has_references_and_a_stage_its_own_layers_at_a_byte_an_id(run):
    assert list_expert_columns(run.generated) == NAMES
    assert {*NAMES} <= {*run.generated.remote}
    for name, layers in zip(NAMES, STAGES, strict=True):
        values = run.batch.jagged(name).values
        assert values.dtype == np.uint8
        assert values.shape == (run.batch.num_tokens.sum(), len(layers), TOPK)
    for batch in (run.batch, run.generated):
        assert {*run.scored(batch).names} == {*batch.names, "log_probs", "entropy"}


def test_the_trainer_uses_the_experts_of_the_rollout(run):
    # In all layers at all tokens but the last of each sample, which the server never ran.
    by_rank = run.actor.call(Watched.used, run.batch)
    assert [sorted(layers) for layers in by_rank] == [[0], [1, 2]]
    ends = np.cumsum(run.batch.num_tokens)
    for rank, layers in enumerate(by_rank):
        recorded = run.batch.jagged(NAMES[rank]).values
        for place, layer in enumerate(STAGES[rank]):
            expected = np.zeros_like(layers[layer])
            np.put_along_axis(expected, recorded[:, place].astype(np.int64), True, axis=1)
            same = (layers[layer] == expected).all(axis=1)
            assert np.delete(same, ends - 1).all()


def test_log_probs_are_nearer_to_the_servers_with_replay(run):
    gaps = {
        name: compute_logprob_gaps(run.scored(run.batch, replay=name == "with"))
        for name in ("with", "without")
    }
    print(gaps)
    for name in ("max_logprob_gap", "mean_logprob_gap"):
        assert gaps["with"][name] < gaps["without"][name]


def test_a_resumed_run_updates_with_the_experts_that_were_saved_with_samples_ahead(run, tmp_path):
    with ThreadPoolExecutor(1) as thread:
        first, again = (
            RolloutPrefetcher(
                run.sampler("one_step_off"), thread, list_replayed_experts(run.config)
            )
            for _ in range(2)
        )
        first.begin(1, version=run.rollout.servers.version)
        save_and_restore({"ahead": first}, {"ahead": again}, tmp_path)
        expected, actual = (prefetcher.take(1, version=0)[0] for prefetcher in (first, again))
    assert_same_update(run, actual, expected, tmp_path)


def test_a_resumed_fully_async_run_updates_with_the_experts_of_the_run_that_goes_on(run, tmp_path):
    # A checkpoint has the prompts of these groups. The weights of version 1 are those of 0, so that
    # both runs choose the same tokens.
    first, again = (run.sampler("fully_async") for _ in range(2))
    going, resumed = AsyncRollout(first), AsyncRollout(again)
    going.start()
    going.take(1)
    run.weight_sync.push(1)
    going.begin_version(1)
    parts = {"ahead": resumed, "prompts": again.prompts}
    saved = save_and_restore({"ahead": going, "prompts": first.prompts}, parts, tmp_path)
    expected = going.take(2)[0]
    resumed.start()
    actual = resumed.take(2)[0]
    assert set(saved["ahead"]["queue"]["group_ids"]) == set(expected.array("group_ids"))
    assert_same_update(run, actual, expected, tmp_path)


def save_and_restore(
    saved: dict[str, Stateful], restored: dict[str, Stateful], folder: Path
) -> dict[str, Any]:
    """Write the states to a checkpoint's files, restore them; return them as read."""
    checkpoints = RunCheckpoints(folder)
    checkpoints.begin(1)
    state = {name: part.state_dict() for name, part in saved.items()}
    path = checkpoints.publish(1, {"parts": state})
    parts = read_checkpoint(path).state["parts"]
    for name, part in restored.items():
        part.load_state_dict(parts[name])
    return parts


def assert_same_update(run: Run, actual: Samples, expected: Samples, folder: Path) -> None:
    """Compare experts and tokens, log-probs, and the metrics of updates from the same weights."""
    batches = [sort_samples(run, samples) for samples in (actual, expected)]
    assert list_expert_columns(batches[0]) == NAMES
    for name in ("response_ids", *NAMES):
        values, expected_values = (batch.jagged(name).values for batch in batches)
        np.testing.assert_array_equal(values, expected_values, err_msg=name)
    assert len(np.unique(expected_values.reshape(len(expected_values), -1), axis=0)) > 10
    scored = [run.scored(batch) for batch in batches]
    log_probs, expected_log_probs = (batch.jagged("log_probs").values for batch in scored)
    np.testing.assert_array_equal(log_probs, expected_log_probs)
    run.actor.call(ModelWorker.save_checkpoint, str(folder / "actor"))
    metrics = []
    for batch in scored:
        run.actor.call(ModelWorker.load_checkpoint, str(folder / "actor"))
        training = select_token_columns(with_loss_weights(run, batch))
        [[updated]] = run.actor.call(ModelWorker.update, training, temperature=1.0)
        metrics.append(updated)
    run.actor.call(ModelWorker.load_checkpoint, str(folder / "actor"))
    assert metrics[0] == metrics[1] and metrics[0]["grad_norm"] > 0


def sort_samples(run: Run, samples: Samples) -> Batch:
    batch = fetch_batch(samples, "a test needs the samples", run.config.timeouts.call_s)
    return batch.take(np.argsort(batch.array("group_ids"), kind="stable").tolist())


def test_an_update_takes_them_too_and_a_dropped_layer_ends_the_run(run):
    batch = with_loss_weights(run, run.scored(run.generated))
    [[metrics]] = run.actor.call(ModelWorker.update, select_token_columns(batch), temperature=1.0)
    assert metrics["grad_norm"] > 0
    dropped = batch.rename_columns(**{NAMES[1]: f"{EXPERTS}/1"})
    with pytest.raises(
        WorkerError, match=rf"rank 1 raised .*no column '{EXPERTS}/1,2', the experts of the decoder"
    ):
        run.actor.call(ModelWorker.update, select_token_columns(dropped), temperature=1.0)


def with_loss_weights(run: Run, scored: Any) -> Any:
    batch = scored.union(
        apply_on_rank_zero(run.actor, add_equal_advantages, select_small_columns(scored))
    )
    weights, _ = apply_on_rank_zero(
        run.actor, add_loss_weights, select_small_columns(batch), run.config.algorithm
    )
    return batch.union(weights)


def add_equal_advantages(batch: Batch) -> Batch:
    ids = batch.jagged("response_ids")
    equal = ids.with_values(np.ones(len(ids.values), np.float32))
    return batch.with_columns(advantages=equal)
