"""Updates of a worker on plain modules in vLLM's reload, and loaders of a server's first weights.

A module counts as complete when vLLM processes it, which a quantisation method sees.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import LoadConfig, WeightTransferConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from mcore_rl.config.errors import ConfigError, PeerError
from mcore_rl.config.schema import Layout, WeightSyncConfig
from mcore_rl.inference.vllm import weights as vllm_weights
from mcore_rl.inference.vllm.weights import ShardTransferEngine, ShardWriter, load_by_rules
from mcore_rl.reshard import ops
from mcore_rl.reshard.executor import ReceivedSlice
from mcore_rl.reshard.layout import GenerationLayout
from mcore_rl.weight_sync.spec import (
    ListedParameter,
    TransferSpec,
    build_generation_side,
    build_training_side,
    compute_expected_layout,
)
from mcore_rl.weight_sync.transport import StreamError

NAN = float("nan")
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128,
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "head_dim": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 6, "decoder_sparse_step": 1,
    "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip


def build_model(parameters: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> Any:
    """Return nested modules with parameters of NaN, as a worker that has loaded once."""
    model: Any = torch.nn.Module()
    model.config = SimpleNamespace(tie_word_embeddings=False)
    for name, (shape, dtype) in parameters.items():
        *path, last = name.split(".")
        module = model
        for child in path:
            if not hasattr(module, child):
                module.add_module(child, torch.nn.Module())
            module = getattr(module, child)
        module.register_parameter(last, parameter(torch.full(shape, NAN, dtype=dtype)))
    record_metadata_for_reloading(model)
    return model


def parameter(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)


def piece(target: str, values: torch.Tensor, *offset: int, **fields: Any) -> ReceivedSlice:
    return ReceivedSlice(target, offset or (0,) * values.dim(), values, 0, **fields)


def begin(model: Any) -> ShardWriter:
    initialize_layerwise_reload(model)
    return ShardWriter(model, 0)


class Recorder(QuantizeMethodBase):
    """Records which modules have memory when vLLM processes one."""

    def __init__(self, model: Any) -> None:
        self.model, self.complete = model, list[tuple[str, set[str]]]()
        for layer in model.children():
            layer.quant_method = self

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> None: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        names = {module: name for name, module in self.model.named_children()}
        begun = {n for m, n in names.items() if not m.weight.is_meta and m.weight[0] == 1}
        self.complete.append((names[layer], begun - {name for name, _ in self.complete}))


def test_a_bucket_ends_the_module_begun_before_it_and_begins_the_longest_at_the_end():
    """Buckets of 4 rows: the first has 1 of `b`; the second 3 of `b`, 2 of `a`, 4 of `c`."""
    model = build_model({f"{name}.weight": ((4,), torch.float32) for name in "abc"})
    recorder, writer = Recorder(model), begin(model)
    rows = torch.ones(4)
    writer.write([piece("b.weight", rows[:1], 0)])
    writer.write(
        [piece("a.weight", rows[:2], 0), piece("c.weight", rows), piece("b.weight", rows[:3], 1)]
    )
    assert recorder.complete == [("b", {"b"}), ("c", {"c"})]
    writer.write([piece("a.weight", rows[:2], 2)])
    writer.finish()
    assert [name for name, _ in recorder.complete] == ["b", "c", "a"]
    assert all(getattr(model, name).weight.sum() == 4 for name in "abc")


def test_checksums_are_those_of_parameters_before_vllm_changes_them():
    class Negated(Recorder):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight.data.neg_()

    values = torch.arange(4.0)
    checksum = int(ops.compute_checksums([(values, values.dtype)])[0])
    model = build_model({"a.weight": ((4,), torch.float32)})
    Negated(model)
    begin(model).write([piece("a.weight", values, checksum=checksum)])
    assert model.a.weight.tolist() == [0, -1, -2, -3]


def test_slices_are_written_where_they_belong_and_in_rows_of_a_stack():
    model = build_model(
        {"experts.w2_weight": ((2, 3, 2), torch.float32), "norm.weight": ((4,), torch.bfloat16)}
    )
    writer = begin(model)
    rows = torch.arange(12.0).view(2, 3, 2)
    writer.write(
        [
            piece("experts.w2_weight[1]", rows[1, 2:], 2, 0),
            piece("experts.w2_weight[0]", rows[0]),
            piece("experts.w2_weight[1]", rows[1, :2]),
            piece("norm.weight", torch.ones(4, dtype=torch.bfloat16)),
        ]
    )
    writer.finish()
    assert torch.equal(model.experts.w2_weight, rows)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece("other.weight", torch.ones(4))], "other.weight: vLLM has no such module"),
        ([piece("a.weight", torch.ones(4).half())], "a.weight: torch.float16 .* of torch.float32"),
        ([piece("a.weight", torch.ones(3), 2)], r"a.weight: .*\(3,\) does not fit at \(2,\)"),
        ([piece("a.weight", torch.ones(4))] * 2, "received more elements than its module has"),
        ([piece("a.weight", torch.ones(4), checksum=1)], "a.weight.*training rank 0: the checksum"),
        (
            [piece("a.weight", torch.ones(3))],
            r"3 modules did not get all .*: \['a', 'b', 'b\.",
        ),
        (
            [piece(f"{name}.weight", torch.ones(4)) for name in "ab"]
            + [piece("b.e_score_correction_bias", torch.ones(2))],
            r"1 modules did not get all weights: \['b.e_score_correction_bias'\]",
        ),
    ],
)
def test_weights_that_are_wrong_or_missing_are_named(pieces, message):
    model = build_model({f"{name}.weight": ((4,), torch.float32) for name in "ab"})
    model.b.e_score_correction_bias = parameter(torch.zeros(3))
    writer = begin(model)
    with pytest.raises(ValueError, match=message):
        writer.write(pieces)
        writer.finish()


def test_a_routers_bias_under_two_names_is_written_once_for_both():
    model = build_model({"gate.weight": ((2,), torch.float32), "experts.w": ((2,), torch.float32)})
    model.gate.e_score_correction_bias = bias = parameter(torch.zeros(3))
    model.experts.e_score_correction_bias = bias
    writer = begin(model)
    writer.write([piece(f"{n}", torch.ones(2)) for n in ("gate.weight", "experts.w")])
    writer.write([piece("gate.e_score_correction_bias", torch.ones(3))])
    writer.finish()
    assert bias.tolist() == [1, 1, 1]
    listed = vllm_weights.read_worker_layout(model).parameters
    assert [name for name in listed if "bias" in name] == ["gate.e_score_correction_bias"]


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Let torch fill what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_biases_of_down_projections_are_those_of_the_first_rank(nan_memory, tp_rank):
    """The outputs of ranks are summed, so a second bias would count twice."""
    names = {"experts.w2_weight": (2, 3), "experts.w2_bias": (2, 3)}
    model = build_model({name: (shape, torch.float32) for name, shape in names.items()})
    parallel = SimpleNamespace(tp_rank=tp_rank)
    model.experts.moe_config = SimpleNamespace(moe_parallel_config=parallel)
    writer = begin(model)
    writer.write([piece("experts.w2_weight", torch.ones(2, 3))])
    if tp_rank == 0:
        with pytest.raises(ValueError, match=r"did not get all weights: \['experts'\]"):
            writer.finish()
        writer.write([piece("experts.w2_bias", torch.ones(2, 3))])
    writer.finish()
    assert torch.equal(model.experts.w2_bias, torch.full((2, 3), 1.0 - tp_rank))


def test_the_layout_of_a_worker_has_parameters_before_packing_and_the_expert_of_each_row():
    """The worker has 2, 1 and 4 of the global experts 0 to 4, in its rows 0, 1 and 2."""
    model = build_model({"experts.w13_weight": ((3, 4, 2), torch.bfloat16)})
    model.norm = torch.nn.Module()
    model.norm.weight = parameter(torch.ones(2, dtype=torch.float32))
    model.norm.k_scale = KVCacheScaleParameter()
    model.norm.bias = parameter(torch.ones(2))
    record_metadata_for_reloading(model)
    model.experts._expert_map = torch.tensor([-1, 1, 0, -1, 2])
    model.experts.w13_weight = parameter(torch.ones(7))  # as packed
    layout = vllm_weights.read_worker_layout(model)
    assert layout.parameters == {
        "experts.w13_weight": ((3, 4, 2), "bfloat16"),
        "norm.weight": ((2,), "float32"),
        "norm.bias": ((2,), "float32"),
    }
    assert layout.experts == {"experts.w13_weight": (2, 1, 4)}


def test_a_module_of_a_failed_update_is_filled_again_and_partial_loaders_have_names():
    model = build_model({"a.weight": ((4,), torch.float32)})
    begin(model).write([piece("a.weight", torch.ones(2))])

    def load(scale: float, target: torch.Tensor, values: torch.Tensor) -> None: ...

    vllm_weights.make_reloadable(model)
    model.a.weight.weight_loader = functools.partial(load, 2.0)
    model.a.quant_method = SimpleNamespace(moe_kernel="packed")
    vllm_weights.make_reloadable(model)
    assert model.a.quant_method.moe_kernel is None
    assert model.a.weight.weight_loader.__name__ == "load"
    assert model.a.weight.isnan().all()  # those of before the update
    writer = begin(model)
    writer.write([piece("a.weight", torch.arange(4.0))])
    writer.finish()
    assert model.a.weight.tolist() == [0, 1, 2, 3]


def save_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save random tensors of the whole checkpoint, one server's."""
    _, (_, weights) = build_generation_side(config, GenerationLayout(), "huggingface")
    tensors = {t.name: torch.randn(t.shape) for weight in weights for t in weight.rule.tensors}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(("ep", "dp", "rank"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (4, 2, 0)])
def test_rules_load_a_ranks_part_of_a_checkpoint_as_torch_chunks_it(
    monkeypatch, tmp_path, ep, dp, rank
):
    """Split columns over tp=2; experts 0 and 1 are on rank 0 of 2, expert 2 on rank 2 of 4."""
    tensors = save_checkpoint(tmp_path, MOE)
    layout = GenerationLayout(tp=2, dp=dp, ep=ep)
    ranks, (_, weights) = build_generation_side(MOE, layout)
    dp_rank = dp - 1
    world_rank = 2 * dp_rank + rank
    expected, _ = compute_expected_layout(ranks, weights, world_rank, "bfloat16")
    model = build_model({n: (shape, getattr(torch, kind)) for n, (shape, kind) in expected.items()})
    parallel = SimpleNamespace(
        tensor_parallel_size=2, data_parallel_size=dp, enable_expert_parallel=ep > 1,
        data_parallel_index=dp_rank,
    )  # fmt: skip
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    group = SimpleNamespace(rank_in_group=rank)
    monkeypatch.setattr(vllm_weights, "get_tp_group", lambda: group)
    load_by_rules(model, config, str(tmp_path))
    loaded = dict(model.named_parameters())
    layer = "model.layers.0"
    qkv = [tensors[f"{layer}.self_attn.{n}_proj.weight"].chunk(2)[rank] for n in "qkv"]
    o = tensors[f"{layer}.self_attn.o_proj.weight"].chunk(2, 1)[rank]
    wide = {
        f"{layer}.self_attn.qkv_proj.weight": torch.cat(qkv),
        f"{layer}.self_attn.o_proj.weight": o,
        "model.norm.weight": tensors["model.norm.weight"],
        "model.embed_tokens.weight": tensors["model.embed_tokens.weight"].chunk(2)[rank],
    }
    gate, up = (
        torch.stack([tensors[f"{layer}.mlp.experts.{n}.{kind}_proj.weight"] for n in range(3)])
        for kind in ("gate", "up")
    )
    if ep == 1:
        w13 = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
    else:
        w13 = torch.cat([gate, up], 1).tensor_split(ep)[world_rank]
    if len(w13):
        wide[f"{layer}.mlp.experts.routed_experts.w13_weight"] = w13
    for name, values in wide.items():
        assert torch.equal(loaded[name], values.bfloat16()), name
    assert not any(value.isnan().any() for value in loaded.values())


class RecordedAttention(Attention):
    """Attention without parameters, which vLLM processes when an update ends."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.dtypes: list[torch.dtype] = []

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.dtypes.append(act_dtype)


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 64, "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 12, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "rope_interleave": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("drafts", [False, True])
def test_rules_load_a_draft_model_and_keep_a_routers_bias_in_float32(monkeypatch, tmp_path, drafts):
    _, weights = build_training_side(DEEPSEEK, Layout(), 1)
    tensors = {t.name: torch.randn(t.shape) for weight in weights for t in weight.rule.tensors}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    ranks, (_, rules) = build_generation_side(DEEPSEEK, GenerationLayout(), drafts=drafts)
    expected, _ = compute_expected_layout(ranks, rules, 0, "bfloat16")
    model = build_model({n: (shape, getattr(torch, kind)) for n, (shape, kind) in expected.items()})
    model.attention = RecordedAttention()
    parallel = SimpleNamespace(
        tensor_parallel_size=1, data_parallel_size=1, enable_expert_parallel=False,
        data_parallel_index=0,
    )  # fmt: skip
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(vllm_weights, "get_tp_group", lambda: group)
    load_by_rules(model, config, str(tmp_path), drafts=drafts)
    loaded = dict(model.named_parameters())
    assert any(".layers.1." in name for name in loaded) == drafts
    assert not any(value.isnan().any() for value in loaded.values())
    biases = [n for n in tensors if n.endswith("bias") and (drafts or ".layers.0." in n)]
    stored = sorted(tensors[n].tolist() for n in biases)
    assert stored == sorted(v.tolist() for n, v in loaded.items() if n.endswith("bias"))
    assert model.attention.dtypes == [torch.bfloat16]
    model.extra = torch.nn.Linear(2, 2)
    record_metadata_for_reloading(model.extra)
    with pytest.raises(ValueError, match=r"did not get all weights: \['extra'\]"):
        load_by_rules(model, config, str(tmp_path), drafts=drafts)
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(ConfigError):
        load_by_rules(model, config, str(tmp_path), drafts=drafts)


class Transport:
    """A connection that yields one bucket, or fails."""

    def __init__(self, buckets: list[list[ReceivedSlice]], error: Exception | None = None) -> None:
        self.buckets, self.error, self.is_open = buckets, error, True
        self.updates: list[Any] = []

    def receive(self, update: Any) -> Any:
        self.updates.append(update)
        if self.error is not None:
            raise self.error
        yield from self.buckets

    def close(self) -> None:
        self.is_open = False


def build_engine(model: Any, path: str = "", **parallel: int) -> ShardTransferEngine:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**{"data_parallel_index": 0, "world_size": 1} | parallel),
        model_config=SimpleNamespace(model=path, dtype=torch.float32),
    )
    transfer = WeightTransferConfig(backend="nccl")
    return ShardTransferEngine(transfer, config, torch.device("cpu"), model)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Transport]]:
    """Ranks that connect, and their transports; the worker is the second of its group."""
    made: list[tuple[int, Transport]] = []

    def connect(spec: Any, endpoint: Any, config: Any, rank: int, device: Any) -> Transport:
        made.append((rank, Transport([[piece("norm.weight", torch.ones(8))]])))
        return made[-1][1]

    group = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr(vllm_weights, "connect", connect)
    monkeypatch.setattr(vllm_weights, "get_tp_group", lambda: group)
    return made


ENDPOINT = {"host": "127.0.0.1", "port": 9, "token": "secret"}


def build_info(spec: TransferSpec, first_rank: int) -> vllm_weights.ConnectInfo:
    return vllm_weights.ConnectInfo(ENDPOINT, spec.to_dict(), first_rank)


def test_a_worker_joins_as_the_rank_after_training_servers_and_engines(connections, tmp_path):
    """3 training ranks; generation rank 4, in the second engine of 2 workers: 3+4+2+1."""
    save_checkpoint(tmp_path, DENSE)
    layout = GenerationLayout(tp=2, dp=4)
    spec = TransferSpec(Layout(dp=3), 0, layout, "bfloat16", WeightSyncConfig())
    ranks, (_, weights) = build_generation_side(DENSE, layout)
    expected, _ = compute_expected_layout(ranks, weights, 7, "bfloat16")
    parameters = {n: (shape, getattr(torch, kind)) for n, (shape, kind) in expected.items()}
    engine = build_engine(
        build_model(parameters), str(tmp_path), data_parallel_index=1, world_size=2
    )
    engine.init_transfer_engine(build_info(spec, 4))
    engine.init_transfer_engine(build_info(spec, 4))  # when others have joined
    assert [(rank, transport.is_open) for rank, transport in connections] == [
        (10, False), (10, True),
    ]  # fmt: skip
    wide = {name: (shape, torch.float32) for name, (shape, _) in parameters.items()}
    other = build_engine(build_model(wide), str(tmp_path), data_parallel_index=1, world_size=2)
    with pytest.raises(ConfigError, match=r"vLLM worker 7: shape and dtype of .*float32"):
        other.init_transfer_engine(build_info(spec, 4))
    assert len(connections) == 2


def test_a_worker_compares_its_list_with_that_of_the_same_worker_of_the_first_server(
    connections, tmp_path
):
    """Generation rank 3 is the second worker of the second server of two workers each."""
    save_checkpoint(tmp_path, DENSE)
    lists = [[ListedParameter(f"p{rank}", "float32", (2,), ()).to_list()] for rank in range(2)]
    spec = TransferSpec(
        Layout(), 0, GenerationLayout(tp=2, dp=2), "float32", WeightSyncConfig(),
        worker_lists=lists,
    )  # fmt: skip
    model = build_model({})
    engine = build_engine(model, str(tmp_path), world_size=2)
    model.mcore_rl_parameters = [ListedParameter("p1", "float32", (2,), ())]
    engine.init_transfer_engine(build_info(spec, 2))
    assert [rank for rank, _ in connections] == [1 + 3]
    model.mcore_rl_parameters = [ListedParameter("p0", "float32", (2,), ())]
    with pytest.raises(ConfigError, match="generation rank 3: vLLM's loader puts weights in other"):
        engine.init_transfer_engine(build_info(spec, 2))
    model.mcore_rl_trace_error = "a reason"
    with pytest.raises(ConfigError, match="family 'qwen3': a reason; allowed:"):
        engine.init_transfer_engine(build_info(spec, 2))


def test_an_update_is_received_of_its_version_and_a_lost_peer_ends_the_connection():
    model = build_model({"norm.weight": ((8,), torch.float32)})
    model.attention = RecordedAttention()
    engine = build_engine(model)
    with pytest.raises(StreamError, match="no trainer has been joined"):
        engine.update_weights({"version": 1})
    transport = Transport([[piece("norm.weight", torch.ones(8))]])
    engine._transport = transport  # type: ignore[assignment]
    for version in (1, 2):
        engine.start_weight_update()
        engine.update_weights({"version": version})
        engine.finish_weight_update()
        assert model.norm.weight.sum() == 8 and transport.is_open
    assert [(update.version, update.format) for update in transport.updates] == [
        (1, "dense"), (2, "dense"),
    ]  # fmt: skip
    assert model.attention.dtypes == [torch.float32] * 2
    half = [piece("norm.weight", torch.zeros(4))]
    for buckets, message in (
        ([half], r"did not get all weights: \['norm'\]"),
        ([[piece("norm.weight", torch.ones(8).half())]], "does not fit"),
    ):
        engine.start_weight_update()
        transport.buckets = buckets
        with pytest.raises(ValueError, match=message):
            engine.update_weights({"version": 3})
        assert transport.is_open
    engine.start_weight_update()
    transport.buckets = [half, [piece("norm.weight", torch.ones(4), 4)]]
    engine.update_weights({"version": 3})
    engine.finish_weight_update()
    assert model.norm.weight.tolist() == [0] * 4 + [1] * 4
    engine.start_weight_update()
    transport.error = PeerError("gone")
    with pytest.raises(PeerError, match="gone"):
        engine.update_weights({"version": 4})
    assert not transport.is_open
    with pytest.raises(StreamError):
        engine.update_weights({"version": 5})


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (DENSE, {}, {}),
        (DENSE, {"reads_weights": False}, {"load_format": "mcore_rl_no_weights"}),
        (DENSE | {"architectures": ["Toy"]}, {}, {"load_format": "mcore_rl_traced"}),
        (DENSE | {"quantization_config": {"quant_method": "awq"}}, {}, {}),
        (
            DENSE | {"quantization_config": FP8},
            {"ep": True},
            {
                "load_format": "mcore_rl", "hf_overrides": {"quantization_config": None},
                "enable_ep_weight_filter": True,
            },
        ),
        (
            DENSE | {"quantization_config": FP8, "text_config": {"quantization_config": FP8}},
            {},
            {
                "load_format": "mcore_rl", "enable_ep_weight_filter": False,
                "hf_overrides": {
                    "quantization_config": None, "text_config": {"quantization_config": None}
                },
            },
        ),
    ],
)  # fmt: skip
def test_the_loader_of_a_server_follows_from_the_checkpoint(tmp_path, config, options, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"ep": False} | options
    assert vllm_weights.build_loading_arguments(str(tmp_path), **options) == expected


def test_vllm_loads_a_plain_checkpoint_itself(tmp_path):
    save_checkpoint(tmp_path, DENSE)
    assert vllm_weights.build_loading_arguments(str(tmp_path), ep=True) == {}


def test_a_server_in_float8_blocks_does_not_round_its_scales(monkeypatch, tmp_path):
    monkeypatch.setattr("os.environ", dict(os.environ))
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    for reads, name in ((True, "mcore_rl_quantized"), (False, "mcore_rl_no_weights")):
        arguments = vllm_weights.build_loading_arguments(
            str(tmp_path), ep=True, reads_weights=reads, quantization="fp8_block"
        )
        assert arguments["load_format"] == name and arguments["enable_ep_weight_filter"]
        quantization = arguments["hf_overrides"]["quantization_config"]
        assert quantization["weight_block_size"] == [128, 128]
    assert os.environ["VLLM_USE_DEEP_GEMM"] == os.environ["VLLM_MOE_USE_DEEP_GEMM"] == "0"


def get_loader(name: str) -> Any:
    vllm_weights.register_loaders()
    return get_model_loader(LoadConfig(load_format=name))


def test_a_quantising_loader_has_codes_and_scales_of_local_weights(tmp_path):
    """Take x / s, s = amax / 448 of a block of 128 x 128, in the dtype of the server.

    In bfloat16 449.3 is 450, so blocks of 449.3 and of 1 have the scales 450 / 448 and 1 / 448.
    """
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight"
    weight = torch.full((128, 256), 449.3)
    weight[:, 128:] = 1.0
    tensors = {expert.format(n): weight.clone() for n in range(2)}
    tensors["model.norm.weight"] = torch.ones(256)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    config: Any = SimpleNamespace(model=str(tmp_path), dtype=torch.bfloat16)
    for name in ("mcore_rl_quantized", "mcore_rl"):
        loader = get_loader(name)
        loader.local_expert_ids = {1}
        loaded = dict(loader.get_all_weights(config, None))
        is_quantized = name == "mcore_rl_quantized"
        scales = expert.format(1) + "_scale_inv"
        assert loaded.keys() == {
            expert.format(1), "model.norm.weight", *([scales] if is_quantized else [])
        }  # fmt: skip
        assert torch.equal(loaded["model.norm.weight"], torch.ones(256))
        if not is_quantized:
            assert torch.equal(loaded[expert.format(1)], weight)
            continue
        codes = loaded[expert.format(1)]
        assert codes.dtype == torch.float8_e4m3fn and (codes.float() == 448).all()
        torch.testing.assert_close(loaded[scales], torch.tensor([[450 / 448, 1 / 448]]))


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, 16), (torch.float32, 18)])
def test_a_quantising_loader_rounds_float32_weights_to_the_dtype_of_the_server(
    tmp_path, dtype, code
):
    """A block with an amax of 448 has the scale 1, and around 17 float8 has 16 and 18.

    In bfloat16 17.01 is 17 (steps of 1/8), half way, and goes to the even code; in float32 it is
    nearer to 18.
    """
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = torch.full((128, 128), 17.01)
    weight[0, 0] = 448.0
    save_file({name: weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    config: Any = SimpleNamespace(model=str(tmp_path), dtype=dtype)
    loaded = dict(get_loader("mcore_rl_quantized").get_all_weights(config, None))
    assert loaded[name + "_scale_inv"].tolist() == [[1.0]]
    assert loaded[name].float().unique().tolist() == [code, 448]


def test_a_dequantising_loader_has_experts_as_they_stand_in_the_file(tmp_path):
    """vLLM transposes those of Qwen3-VL itself: [experts, hidden, 2 * intermediate]."""
    config = {"architectures": ["Toy"], "model_type": "qwen3_vl_moe", "hidden_size": 4}
    name, stored = "model.layers.0.mlp.experts.gate_up_proj", torch.randn(2, 4, 6)
    save_file({name: stored}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_config: Any = SimpleNamespace(model=str(tmp_path))
    [(loaded_name, loaded)] = get_loader("mcore_rl").get_all_weights(model_config, None)
    assert loaded_name == name and torch.equal(loaded, stored)


def test_a_server_without_weights_has_small_ones_and_its_buffers_and_cache_scales(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    model = build_model({"norm.weight": ((8,), torch.float32)})
    model.norm.k_scale = KVCacheScaleParameter()
    scale = model.norm.k_scale.clone()
    model.norm.register_buffer("rope", torch.arange(4.0))
    get_loader("mcore_rl_no_weights").load_weights(model, SimpleNamespace(model=str(tmp_path)))
    assert vllm_weights.list_traced_parameters(model) == ([], "")  # the family has the rules
    assert 0 < model.norm.weight.abs().max() < 0.01
    assert torch.equal(model.norm.k_scale, scale) and model.norm.rope.tolist() == [0, 1, 2, 3]
