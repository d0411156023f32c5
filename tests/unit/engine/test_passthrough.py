"""Fields that settings pass to Megatron's classes: known, unknown, of another type, refused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer import TransformerConfig

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.passthrough import find_rule
from mcore_rl.config.rules_engine import validate_engine
from mcore_rl.config.schema import (
    EngineConfig,
    Float8Config,
    Layout,
    MoEConfig,
    OptimizerConfig,
    RecomputeConfig,
)
from mcore_rl.engine.base import check_engine_settings, load_backend
from mcore_rl.engine.megatron import device, passthrough
from mcore_rl.engine.megatron.passthrough import DENIED, OWNED
from mcore_rl.models.base import get_family
from mcore_rl.parallel.mesh import split_into_chunks
from tests.nightly import all_but
from tests.unit.models.test_families import (
    DEEPSEEK_V3,
    PUBLISHED,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
)

NVIDIA = "megatron-core 0.19.2"
BLOCKWISE = Float8Config("blockwise")


def check(megatron: dict[str, Any], device_type: str = "cuda", **settings: Any) -> None:
    """Check settings as before a run, of ranks on other nodes unless `device_type` is "cpu"."""
    config = EngineConfig(megatron=megatron, **settings)
    validate_engine("actor", config)
    check_engine_settings("actor", config, "language_model", device_type)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"deallocate_pipeline_outputs": True}, {"deallocate_pipeline_outputs": True}),
        ({"bucket_size": 1 << 20}, {"bucket_size": 1 << 20}),
        ({"bucket_size": None}, {"bucket_size": None}),
        ({"activation_offload_fraction": 1}, {"activation_offload_fraction": 1}),
        ({"offload_modules": ["moe_act"]}, {"offload_modules": ["moe_act"]}),
        ({"cp_comm_type": "all_gather"}, {"cp_comm_type": "all_gather"}),
        ({"cp_comm_type": ["p2p", "a2a"]}, {"cp_comm_type": ["p2p", "a2a"]}),
        ({"exp_avg_dtype": "bfloat16"}, {"exp_avg_dtype": torch.bfloat16}),
        ({"muon_momentum": 0.9}, {"muon_momentum": 0.9}),
        (
            {"param_name_patterns_for_fp32_local_accumulation": ["*router*"]},
            {"param_name_patterns_for_fp32_local_accumulation": ("*router*",)},
        ),
    ],
)
def test_a_field_reaches_each_class_that_has_it_with_a_value_of_its_type(fields, expected):
    passed = passthrough.read_fields("actor.megatron", fields)
    merged = dict(passed.model) | dict(passed.ddp) | dict(passed.optimizer)
    assert merged == expected and {*map(type, merged.values())} == {*map(type, expected.values())}


def test_an_enumeration_is_given_by_the_name_of_its_member():
    from megatron.core.transformer.enums import AttnBackend

    passed = passthrough.read_fields("actor.megatron", {"attention_backend": "flash"})
    assert passed.model["attention_backend"] is AttnBackend.flash


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        # unknown
        (
            "moe_shared_expert_overlp", True,
            rf"{NVIDIA} has no such field; allowed: fields of MLATransformerConfig or .*; "
            "did you mean moe_shared_expert_overlap",
        ),
        ("block_size", 16, rf"{NVIDIA} has no such field; allowed: .*Config; did you mean buck"),
        ("zzz", 1, rf"{NVIDIA} has no such field; allowed: fields of [A-Za-z]* or [A-Za-z ]*$"),
        # of another type
        ("bucket_size", "large", r"='large'; allowed: a whole number or null$"),
        ("bucket_size", True, r"=True; allowed: a whole number or null$"),
        ("align_param_gather", 1, r"=1; allowed: true or false$"),
        ("activation_offload_fraction", "half", r"='half'; allowed: a number$"),
        ("offload_modules", "moe_act", r"='moe_act'; allowed: a list of text or null$"),
        ("offload_modules", ["moe_act", 1], r"\[1\]=1; allowed: text$"),
        ("moe_permute_fusion", "no", r"='no'; allowed: true or false$"),
        ("attention_backend", "fast", r"='fast'; allowed: 'flash', 'fused', 'unfused', "),
        ("exp_avg_dtype", "half16", r"='half16'; allowed: a dtype of torch, such as 'bfloat16'$"),
        # decided by other settings
        ("tensor_model_parallel_size", 2, r"=2: actor.layout.tp decides this.*; allowed: actor.l"),
        ("bf16", True, r"=True: model.dtype decides this field; allowed: model.dtype$"),
        ("moe_token_dispatcher_type", "flex", r": actor.moe.dispatcher decides"),
        ("recompute_modules", ["moe_act"], r": actor.recompute.modules decides"),
        ("overlap_param_gather", True, r": actor.optimizer.overlap decides"),
        ("adam_beta2", 0.99, r": actor.optimizer.beta2 decides"),
        ("optimizer", "muon", r": actor.optimizer.name decides"),
        ("moe_router_topk", 4, r": config.json of the model decides"),
        ("v_head_dim", 64, r": config.json of the model decides"),
        ("use_megatron_fsdp", True, r": actor.backend=fsdp decides"),
        # wrong here
        ("hidden_dropout", 0.1, r"=0.1: two passes over a token would give other|different"),
        ("moe_expert_capacity_factor", 1.5, r": tokens would get other experts than on the serv"),
        ("enable_cuda_graph", True, r": it needs micro-batches of one length, and packs differ"),
        ("cuda_graph_impl", "local", r": it needs micro-batches of one length"),
        ("fp8_param", True, r": weights stay in model.dtype"),
        ("fp8", "e4m3", r": actor.fp8.recipe decides this field"),
        ("fp8_recipe", "delayed", r": actor.fp8.recipe decides this field"),
        ("num_layers_at_end_in_bf16", 2, r": actor.fp8.bf16_layers_at_end decides"),
        ("fp8_wgrad", False, r": Megatron reads it with delayed scales alone"),
        ("fp8_dot_product_attention", True, r": Transformer Engine has no float8 att"),
        ("fp8_amax_history_len", 16, r": it is of delayed scales, state that checkpoints do not"),
        (
            "moe_flex_dispatcher_backend", "ncclep",
            r": others take packs of one length alone; allowed: 'deepep', 'hybridep'$",
        ),
        ("cross_entropy_loss_fusion", True, r": the engine computes the output head"),
        ("gradient_accumulation_fusion", True, r": the engine always fuses it"),
        ("mtp_detach_heads", True, r": actor.mtp_loss_coef is of a .*; allowed: not to set it$"),
        ("overlap_moe_expert_parallel_comm", True, r": actor.moe.overlap decides"),
        ("delay_wgrad_compute", True, r": delayed weight gradients have not been checked"),
        ("_cpu_offloading_context", None, r": Megatron sets it itself"),
    ],
)  # fmt: skip
def test_a_field_is_refused_before_a_run_with_the_reason(field, value, message):
    with pytest.raises(ConfigError, match=rf"^actor\.megatron\.{field}.*{message}"):
        check({field: value})


@pytest.mark.parametrize(
    ("megatron", "settings", "device_type", "message"),
    [
        ({}, {"fp8": BLOCKWISE}, "cpu", r"^actor.fp8.recipe='blockwise' needs Transformer .*'cpu'"),
        ({}, {"fp8": BLOCKWISE, "modules": "torch"}, "cuda", r"needs Transf.*modules='torch' has"),
        ({"moe_permute_fusion": True}, {"modules": "torch"}, "cuda", r"actor.modules='torch' has"),
        (
            {"fine_grained_activation_offloading": True}, {}, "cpu",
            r"fine_grained_activation_offloading=True needs GPUs; allowed: not to set it on a CPU",
        ),
        ({"muon_num_ns_steps": 3}, {}, "cuda", r"muon_num_ns_steps=3 needs actor.optimizer.name='"),
        ({"moe_flex_dispatcher_num_sms": 8}, {}, "cuda", r"needs actor.moe.dispatcher='flex'; "),
        ({}, {"moe": MoEConfig("flex")}, "cpu", r"^actor.moe.dispatcher='flex' needs GPUs; all"),
        ({}, {"moe": MoEConfig("flex")}, "cuda", r"^actor.moe.dispatcher='flex' with .*ep=1"),
        (
            {}, {"optimizer": OptimizerConfig(name="muon", distributed=True)}, "cuda",
            r"^actor.optimizer.name='muon' with actor.optimizer.distributed=true: .*: false$",
        ),
    ],
)  # fmt: skip
def test_what_a_field_needs_is_checked_before_a_run(
    megatron, settings, device_type, message, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check(megatron, device_type, **settings)


@pytest.mark.parametrize(
    ("megatron", "settings", "device_type"),
    [
        ({"moe_permute_fusion": False}, {}, "cpu"),
        ({"bucket_size": 1000, "deallocate_pipeline_outputs": True}, {}, "cpu"),
        ({}, {"fp8": BLOCKWISE}, "cuda"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, {}, "cuda"),
        (
            {"moe_flex_dispatcher_backend": "hybridep"},
            {"moe": MoEConfig("flex"), "layout": Layout(dp=2, ep=2)}, "cuda",
        ),
        ({"muon_num_ns_steps": 3}, {"optimizer": OptimizerConfig(name="muon")}, "cuda"),
    ],
)  # fmt: skip
def test_fields_pass_where_the_ranks_have_what_they_need(megatron, settings, device_type):
    check(megatron, device_type, **settings)


@pytest.mark.parametrize("field", ["", "exp_avg_dtype", "exp_avg_sq_dtype"])
@pytest.mark.parametrize("is_aware", [None, True, False])
@pytest.mark.parametrize(
    ("distributed", "cpu_offload"), [(False, False), (True, False), (True, True)]
)
def test_dtypes_of_the_optimizer_are_refused_where_megatron_refuses_them(
    field, is_aware, distributed, cpu_offload
):
    aware = {} if is_aware is None else {"use_precision_aware_optimizer": is_aware}
    precision = {"use_precision_aware_optimizer": cpu_offload} | aware
    try:
        MegatronOptimizerConfig(
            optimizer="adam",
            use_distributed_optimizer=distributed,
            # Else it looks for the Adam of Transformer Engine, which CPUs lack.
            optimizer_cpu_offload=True,
            **precision,
            **({field: torch.bfloat16} if field else {}),
        )
        outcome = contextlib.nullcontext()
    except AssertionError:
        outcome = pytest.raises(ConfigError, match=r"actor\.megatron\.")
    optimizer = OptimizerConfig(distributed=distributed, cpu_offload=cpu_offload)
    with outcome:
        check(aware | ({field: "bfloat16"} if field else {}), optimizer=optimizer)


@pytest.mark.parametrize("backend", [None, "deepep", "hybridep"])
def test_the_package_of_the_flex_dispatcher_is_that_of_its_backend(backend, monkeypatch):
    default = TransformerConfig.moe_flex_dispatcher_backend
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(passthrough.device, "get_device_type", lambda: "cuda")
    fields = {} if backend is None else {"moe_flex_dispatcher_backend": backend}
    with pytest.raises(ConfigError, match=f"with the backend '{backend or default}' needs the pac"):
        check(fields, moe=MoEConfig("flex"), layout=Layout(dp=2, ep=2))


def build_config(engine: EngineConfig) -> Any:
    """Build Megatron's config of Qwen3-30B-A3B in bfloat16."""
    from mcore_rl.engine.megatron import model

    stages = split_into_chunks(Layout(), QWEN3_30B_A3B["num_hidden_layers"])
    family = get_family(QWEN3_30B_A3B)
    return model.build_transformer_config(family, QWEN3_30B_A3B, engine, torch.bfloat16, stages)[0]


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_megatron_gets_a_recipe_of_float8_with_weights_in_bfloat16(recipe, monkeypatch):
    # Megatron asks for the version of Transformer Engine, which CPUs do not have.
    monkeypatch.setattr(
        "megatron.core.transformer.transformer_config.is_te_min_version", lambda *_, **__: True
    )
    config = build_config(EngineConfig(fp8=Float8Config(recipe, "hybrid", 1, 2)))
    assert (config.fp8, config.fp8_recipe) == ("hybrid", recipe) and config.first_last_layers_bf16
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (1, 2)
    assert config.params_dtype == torch.bfloat16 and not config.fp8_param
    assert config.moe_router_padding_for_quantization is False
    passed = passthrough.read_engine_fields(EngineConfig(fp8=Float8Config(recipe)))
    assert passed.optimizer == {"fp8_recipe": recipe} and not passed.ddp


def test_megatron_gets_no_float8_by_default():
    config = build_config(EngineConfig())
    assert config.fp8 is None and not config.first_last_layers_bf16


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "message"),
    [
        ("mxfp8", (9, 0), "13.0", "needs a GPU of compute capability 10.0 and below 12.0; this one "
         "has 9.0; allowed: 'off', 'tensorwise', 'blockwise'$"),
        ("blockwise", (8, 9), "13.0", "needs a GPU .* 9.0; .*8.9; allowed: 'off', 'tensorwise'$"),
        ("tensorwise", (8, 0), "13.0", "needs a GPU .* 8.9; .* has 8.0; allowed: 'off'$"),
        ("blockwise", (9, 0), "12.8", "needs CUDA 12.9; torch .* has 12.8; allowed: 'off'"),
        ("blockwise", (9, 0), "12.9", ""),
        ("tensorwise", (8, 9), "12.6", ""),
        ("mxfp8", (12, 0), "13.0", "needs .* below 12.0; .*12.0; allowed: .*wise', 'blockwise'$"),
        ("mxfp8", (10, 0), "12.8", ""),
    ],
)  # fmt: skip
def test_a_recipe_of_float8_is_refused_on_gpus_that_do_not_have_it(
    recipe, capability, cuda, message, monkeypatch
):
    monkeypatch.setattr(device, "get_device_type", lambda: "cuda")
    monkeypatch.setattr(device, "choose_modules", lambda *_: "te")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = EngineConfig(fp8=Float8Config(recipe))
    if not message:
        passthrough.check_fields("actor", config, "cuda")
        return
    with pytest.raises(ConfigError, match=rf"^actor.fp8.recipe='{recipe}' {message}"):
        passthrough.check_fields("actor", config, "cuda")


# mxfp8 takes multiples of 32, the others of 16.
@pytest.mark.parametrize("recipe", all_but(["mxfp8"], ["blockwise", "mxfp8", "tensorwise"]))
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_layer_of_published_models_fits_each_recipe_of_float8(name, recipe):
    check_model("actor", PUBLISHED[name][0], {"fp8": Float8Config(recipe)})


_DENSE = {**QWEN3_30B_A3B, "intermediate_size": 6176, "mlp_only_layers": [0]}
_DELTA_NET = {**QWEN3_NEXT_80B_A3B, "linear_num_key_heads": 4, "linear_num_value_heads": 4}
_ODD_HEADS, _ODD_LATENTS = {"head_dim": 36}, {"q_lora_rank": 1000}


@pytest.mark.parametrize(
    ("hf_config", "settings", "message"),
    [
        (
            {**QWEN3_30B_A3B, **_ODD_HEADS},
            {"fp8": BLOCKWISE, "layout": Layout(tp=4)},
            r"'blockwise' with k.layout.tp=4: .* multiples of 16, and a rank's decoder.layers.0."
            r"self_attention.linear_qkv.weight has 360 x 2048; allowed: 'off', or another k.layou",
        ),
        (
            _DELTA_NET,
            {"fp8": Float8Config("tensorwise")},
            "'tensorwise' with .* 16, and a rank's .*self_attention.in_proj.weight has 2056 x 2048",
        ),
        (
            {**DEEPSEEK_V3, **_ODD_LATENTS},
            {"fp8": BLOCKWISE},
            "'blockwise': .*linear_q_down_proj.weight has 1000 x 7168; allowed: 'off'$",
        ),
        (
            _DENSE,
            {"fp8": Float8Config("mxfp8"), "layout": Layout(tp=2)},
            "'mxfp8' with k.layout.tp=2: .* 32, and a rank's .*mlp.linear_fc2.weight has 2048 x 30",
        ),
        (
            _DENSE | {"mlp_only_layers": [46]},
            {"fp8": Float8Config("mxfp8", "e4m3", 2, 1), "layout": Layout(tp=2)},
            "'mxfp8' with k.layout.tp=2: .* 32, and a rank's .*46.mlp.linear_fc2.weight has 2048 x",
        ),
        (
            QWEN3_30B_A3B,
            {"fp8": Float8Config("mxfp8"), "layout": Layout(dp=16, etp=16)},
            "'mxfp8' with k.layout.etp=16: .*mlp.experts.linear_fc2.weight0 has 2048 x 48; allowed",
        ),
        (
            {**DEEPSEEK_V3, "hidden_size": 7184},
            {"fp8": BLOCKWISE, "layout": Layout(tp=2), "mtp_loss_coef": 0.1},
            "'blockwise' with k.layout.tp=2: .*mtp.layers.0.eh_proj.weight has 3592 x 14368; allo",
        ),
    ],
)
def test_a_layer_that_float8_products_do_not_take_is_refused_before_a_run(
    hf_config, settings, message
):
    with pytest.raises(ConfigError, match=rf"^k.fp8.recipe={message}"):
        check_model("k", hf_config, settings)


@pytest.mark.parametrize(
    ("hf_config", "settings"),
    [
        ({**QWEN3_30B_A3B, **_ODD_HEADS}, {"fp8": Float8Config("off"), "layout": Layout(tp=4)}),
        ({**QWEN3_30B_A3B, **_ODD_HEADS}, {"fp8": BLOCKWISE, "layout": Layout(tp=2)}),
        (
            _DENSE,
            {"fp8": Float8Config("mxfp8", bf16_layers_at_start=1), "layout": Layout(tp=2)},
        ),
        (
            _DENSE | {"mlp_only_layers": [47]},
            {"fp8": Float8Config("mxfp8", bf16_layers_at_end=1), "layout": Layout(tp=2)},
        ),
        ({**DEEPSEEK_V3, "hidden_size": 7184}, {"fp8": BLOCKWISE, "layout": Layout(tp=2)}),
    ],
)
def test_sizes_of_layers_that_are_not_in_float8_or_not_built_do_not_matter(hf_config, settings):
    check_model("k", hf_config, settings)


def check_model(key: str, hf_config: dict[str, Any], settings: dict[str, Any]) -> None:
    engine = EngineConfig(**settings)
    load_backend(engine, key).check_model(key, engine, hf_config)


@pytest.mark.parametrize("key", ["critic", "reward_model", "teacher.models.math"])
def test_the_setting_of_another_role_is_named(key):
    config = EngineConfig(megatron={"context_parallel_size": 2})
    with pytest.raises(ConfigError, match=rf"^{key}.megatron.context.*allowed: {key}.layout.cp$"):
        check_engine_settings(
            key, config, "value_model" if key == "critic" else "reward_model", "cpu"
        )


def test_fsdp_refuses_fields_of_megatron_by_name():
    config = EngineConfig(backend="fsdp", megatron={"bucket_size": 9})
    with pytest.raises(
        ConfigError, match=r"^actor.megatron=.*9}: fsdp does not read it; allowed: {}"
    ):
        check_engine_settings("actor", config, "language_model", "cpu")


def list_fields() -> set[str]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    classes = MLATransformerConfig, DistributedDataParallelConfig, MegatronOptimizerConfig
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("table", ["OWNED", "DENIED", "NEEDS", "VALUES"])
def test_each_rule_is_of_a_field_that_the_installed_megatron_has(table):
    rules = getattr(passthrough, table)
    unused = [name for name in rules if not any(find_rule({name: "x"}, f) for f in list_fields())]
    assert not unused


@pytest.mark.parametrize(("hf_config", "_"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_field_that_the_engine_sets_is_refused_unless_it_chooses_kernels(
    hf_config, _, monkeypatch
):
    """Otherwise two values would meet in one call of Megatron's class."""
    from mcore_rl.engine.megatron import model

    names: set[str] = set()

    class Recorder(model.MLATransformerConfig):  # type: ignore[misc, name-defined]
        def __init__(self, **fields: Any) -> None:
            names.update(fields)

    monkeypatch.setattr(model, "MLATransformerConfig", Recorder)
    monkeypatch.setattr(model, "TransformerConfig", Recorder)
    recompute = RecomputeConfig("full"), RecomputeConfig("selective")
    for engine in (EngineConfig(recompute=part, layout=Layout(pp=2)) for part in recompute):
        stages = split_into_chunks(Layout(), hf_config["num_hidden_layers"])
        model.build_transformer_config(
            get_family(hf_config), hf_config, engine, torch.float32, stages
        )
    assert len(names) > 40
    open_fields = {name for name in names if not find_rule({**OWNED, **DENIED}, name)}
    # cp_comm_type: of sparse attention, which refuses another value by name.
    assert open_fields <= device.build_config_flags().keys() | {"cp_comm_type"}


def test_what_megatron_refuses_of_a_combination_names_the_setting():
    from mcore_rl.engine.megatron import model

    engine = EngineConfig(megatron={"fine_grained_activation_offloading": True})
    stages = split_into_chunks(Layout(), QWEN3_30B_A3B["num_hidden_layers"])
    arguments = get_family(QWEN3_30B_A3B), QWEN3_30B_A3B, engine, torch.float32, stages
    with pytest.raises(
        ConfigError,
        match=r"^megatron.fine_grained_activation_offloading=True.*: Megatron refuses it with",
    ):
        model.build_transformer_config(*arguments)


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("num_experts must divide expert_model_parallel_size", "layout.ep=4"),
        ("moe_token_dispatcher_type and tensor_model_parallel_size", "layout.tp=2, moe.disp"),
        ("a rule that names no field", "layout.cp=1, layout.dp="),
    ],
)
def test_what_megatron_refuses_without_fields_of_it_names_the_settings_it_is_about(
    reason, settings
):
    engine = EngineConfig(layout=Layout(tp=2, ep=4))
    assert passthrough.describe_settings(engine, reason).startswith(settings)
