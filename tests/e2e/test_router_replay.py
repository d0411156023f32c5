"""Experts on their way from a server to the trainer: the quickstart's MoE over two pipeline stages.

In bfloat16, where a server's routers and a trainer's often choose differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.resolve import resolve_for_lane
from mcore_rl.config.schema import Layout, RLConfig
from mcore_rl.controller.batch_ops import fetch_batch, select_small_columns, select_token_columns
from mcore_rl.controller.dispatch import Dispatch, register
from mcore_rl.controller.pending_call import WorkerError, gather_results
from mcore_rl.controller.process_cleanup import clean_up_on_exit
from mcore_rl.controller.remote_batch import RemoteBatch
from mcore_rl.controller.worker_group import WorkerGroup
from mcore_rl.data.batch import Batch, Samples
from mcore_rl.data.prompt_batches import PromptBatches
from mcore_rl.data.routed_experts import EXPERTS, list_expert_columns
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engine.worker import ModelWorker
from mcore_rl.examples.tasks import last_digit
from mcore_rl.jobs import rl
from mcore_rl.jobs.placement import Pools, get_device_resource
from mcore_rl.jobs.preflight import load_prompt_files
from mcore_rl.planner.pools import build_pool_plans, count_devices
from mcore_rl.rollout.manager import RolloutPool
from mcore_rl.trainers.policy_checks import compute_logprob_gaps
from mcore_rl.trainers.policy_loss import PolicyLoss
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

    def scored(self, batch: Samples, **options: bool) -> Any:
        return self.actor.compute_log_probs(batch, temperature=1.0, **options)


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
    return resolve_for_lane(config, "cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = config_of(tmp_path_factory.mktemp("replay"))
    prompts = load_prompt_files(
        {"data.train_file": config.data.train_file}, config, load_tokenizer(config.model.path)
    )
    with (
        clean_up_on_exit() as scratch,
        rl.open_session(config, count_devices(build_pool_plans(config)), scratch),
        Pools(config, get_device_resource(), Path(config.output_dir)) as pools,
        contextlib.ExitStack() as stack,
    ):
        servers = stack.enter_context(rl.build_server_pool(config, pools))
        spec = rl._build_engine_spec(config, config.actor, 1)
        arguments = spec, PolicyLoss(config.algorithm), "language_model"
        layout, env = config.actor.layout, rl.load_backend(config.actor).rank_environment
        actor = pools.group(
            "actor", Watched, arguments, layout, name="actor", env=env(layout, "cpu")
        )
        stack.enter_context(actor)
        actor.initialize()
        gather_results(servers.submit("start"))
        servers.mark_started()
        rollout = RolloutPool(servers, config.rollout, seed=0, records_experts=True)
        generated = rollout.generate(next(PromptBatches(prompts, 8, seed=0)), n=4)
        assert isinstance(generated, RemoteBatch)
        batch = fetch_batch(generated, "a test needs the samples", config.timeouts.call_s)
        yield Run(actor, generated, batch, config)


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
    by_rank = run.actor.used(run.batch)
    assert [sorted(layers) for layers in by_rank] == [[0], [1, 2]]
    ends = np.cumsum(run.batch.num_tokens)
    for rank, layers in enumerate(by_rank):
        recorded = run.batch.jagged(NAMES[rank]).values
        for place, layer in enumerate(STAGES[rank]):
            wanted = np.zeros_like(layers[layer])
            np.put_along_axis(wanted, recorded[:, place].astype(np.int64), True, axis=1)
            same = (layers[layer] == wanted).all(axis=1)
            assert np.delete(same, ends - 1).all()


def test_log_probs_are_nearer_to_the_servers_with_replay(run):
    gaps = {
        name: compute_logprob_gaps(run.scored(run.batch, replay=name == "with"))
        for name in ("with", "without")
    }
    print(gaps)
    for name in ("max_logprob_gap", "mean_logprob_gap"):
        assert gaps["with"][name] < gaps["without"][name]


def test_an_update_takes_them_too_and_a_dropped_layer_ends_the_run(run):
    scored = run.scored(run.generated)
    batch = scored.union(run.actor.apply(add_equal_advantages, select_small_columns(scored)))
    weights, _ = run.actor.apply(
        add_loss_weights, select_small_columns(batch), run.config.algorithm
    )
    batch = batch.union(weights)
    [[metrics]] = run.actor.update(select_token_columns(batch), temperature=1.0)
    assert metrics["grad_norm"] > 0
    dropped = batch.rename_columns(**{NAMES[1]: f"{EXPERTS}/1"})
    with pytest.raises(
        WorkerError, match=rf"rank 1 raised .*no column '{EXPERTS}/1,2', the experts of the decoder"
    ):
        run.actor.update(select_token_columns(dropped), temperature=1.0)


def add_equal_advantages(batch: Batch) -> Batch:
    ids = batch.jagged("response_ids")
    equal = ids.with_values(np.ones(len(ids.values), np.float32))
    return batch.with_columns(advantages=equal)
