"""Each kind of bad layout or engine setting has a message of its own, before anything starts."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules_engine import (
    ModelSizes,
    validate_engine,
    validate_fsdp,
    validate_layout,
    validate_megatron,
    validate_model_engine,
    validate_model_layout,
)
from mcore_rl.config.schema import EngineConfig, Layout

RECORD = {"indexer_replay": "record"}
DENSE = ModelSizes(
    num_attention_heads=12,
    num_query_groups=4,
    ffn_sizes=(30,),
    num_experts=0,
    expert_ffn_size=0,
    num_layers=12,
)
MOE = replace(DENSE, num_experts=8, expert_ffn_size=20)
SPARSE = replace(MOE, has_indexer=True)

BAD_LAYOUTS = [
    (Layout(tp=0), "k.tp=0; allowed: at least 1"),
    (Layout(vpp=2), "k.vpp=2 needs k.pp above 1; k.pp=1"),
    (Layout(first_stage_layers=3), "k.first_stage_layers=3 needs k.pp above 1; k.pp=1"),
    (Layout(last_stage_layers=0), "k.last_stage_layers=0 needs k.pp above 1; k.pp=1"),
    (Layout(tp=2, ep=4), "1 * 4 * 1 = 4 must divide the world size tp * pp * cp * dp = 2"),
    (Layout(dp=3, ep=2), "1 * 2 * 1 = 2 must divide the world size tp * pp * cp * dp = 3"),
    (Layout(tp=2, dp=3, etp=4), "4 * 1 * 1 = 4 must divide the world size tp * pp * cp * dp = 6"),
    (Layout(pp=2, dp=3, ep=2), "1 * 2 * 2 = 4 must divide the world size tp * pp * cp * dp = 6"),
]

BAD_FOR_THE_MODEL = [
    (Layout(tp=5), MOE, "k.tp=5 does not divide the model's 12 attention heads"),
    (Layout(tp=3), MOE, "k.tp=3 does not divide the model's 4 key/value heads"),
    (Layout(tp=4), MOE, "k.tp=4 does not divide the model's 30 MLP columns"),
    (Layout(ep=3), MOE, "k.ep=3 does not divide the model's 8 experts"),
    (Layout(etp=3), MOE, "k.etp=3 does not divide the model's 20 columns of an expert"),
    (Layout(etp=2), replace(MOE, has_expert_biases=True), "unsplit experts only; allowed: 1"),
    (Layout(ep=2), DENSE, "k.ep=2: the model has no experts; allowed: 1"),
    (Layout(etp=2), DENSE, "k.etp=2: the model has no experts; allowed: 1"),
    (Layout(pp=5), DENSE, "leave 12 of the model's 12 layers for 5 equal chunks"),
    (Layout(pp=4, vpp=2), DENSE, "k: pp * vpp = 4 * 2 chunks with"),
    (Layout(pp=3, first_stage_layers=3), DENSE, "leave 9 of the model's 12 layers for 2 equal"),
    (Layout(pp=2, first_stage_layers=12), DENSE, "leave 0 of the model's 12 layers for 1 equal"),
    (Layout(pp=3, last_stage_layers=13), DENSE, "leave -1 of the model's 12 layers for 2 equal"),
    (
        Layout(pp=2, first_stage_layers=5, last_stage_layers=6),
        DENSE,
        "leave 1 of the model's 12 layers for 0 equal chunks",
    ),
]

BAD_SETTINGS = [
    ({"optimizer.min_lr": 1.0}, "k.optimizer.min_lr=1.0; allowed: 0 to"),
    ({"optimizer.schedule": "wsd"}, "k.optimizer.wsd_decay_steps=0 with k.optimizer.schedule="),
    ({"optimizer.wsd_decay_steps": 5}, "k.optimizer.wsd_decay_steps=5 with k.optimizer.schedule="),
]

SELECTIVE = {"recompute.granularity": "selective"}
OVERLAP = {"moe.overlap": True, "layout.ep": 2, "layout.dp": 2}
BAD_MEGATRON_SETTINGS = [
    ({"moe.dispatcher": "allgather", "layout.pp": 2}, "k.moe.dispatcher='allgather' with k.layout"),
    (OVERLAP | {"layout.ep": 1}, "k.moe.overlap=true with k.layout.ep=1; allowed: above 1"),
    (
        OVERLAP | {"layout.pp": 2},
        "k.moe.overlap=true with k.layout.vpp=1; allowed: above 1 with pp",
    ),
    (OVERLAP | {"moe.dispatcher": "allgather"}, "k.moe.overlap=true with k.moe.dispatcher='allga"),
    (
        OVERLAP | {"moe.router_replay": "record"},
        "with k.moe.router_replay='record'; allowed: 'off'",
    ),
    (
        OVERLAP | {"recompute.granularity": "full"},
        "with k.recompute.granularity='full'; allowed: '",
    ),
    (
        OVERLAP | SELECTIVE | {"recompute.modules": ["moe"]},
        "with k.recompute.modules=['moe']; allowed: modules other than 'moe'",
    ),
    (OVERLAP | {"mtp_loss_coef": 0.1}, "k.moe.overlap=true with k.mtp_loss_coef=0.1; allowed: 0"),
    (OVERLAP | {"lora.rank": 4}, "k.moe.overlap=true with k.lora.rank=4; allowed: 0"),
    ({"optimizer.cpu_offload": True}, "k.optimizer.cpu_offload=true needs k.optimizer.distributed"),
    ({"lora.rank": 4, "lora.targets": []}, "k.lora.targets=[] with k.lora.rank=4 adapts nothing"),
    ({"fp8.bf16_layers_at_end": 1}, "k.fp8.bf16_layers_at_end=1 with k.fp8.recipe='off'; all"),
    ({"fp8.format": "hybrid"}, "k.fp8.format='hybrid' with k.fp8.recipe='off'; allowed: 'e4m3'"),
    ({"fp8.recipe": "mxfp8", "lora.rank": 4}, "k.fp8.recipe='mxfp8' with k.lora.rank=4: prod"),
    ({"mtp_loss_coef": 0.1, "lora.rank": 4}, "k.mtp_loss_coef=0.1 with k.lora.rank=4"),
    ({"mtp_loss_coef": 0.1, "moe.router_replay": "record"}, "k.moe.router_replay='record' with k"),
    (
        {"mtp_loss_coef": 0.1, "layout.pp": 2, "layout.last_stage_layers": 0},
        "k.layout.last_stage_layers=0 with k.mtp_loss_coef=0.1",
    ),
    (
        {"mtp_loss_coef": 0.1, "recompute.granularity": "full"},
        "k.recompute.granularity='full' with k.mtp_loss_coef=0.1",
    ),
]
BAD_SETTINGS_FOR_THE_MODEL = [
    ({"moe.aux_loss_coef": 0.1}, DENSE, "k.moe.aux_loss_coef=0.1: the model has no experts"),
    ({"moe.router_replay": "record"}, DENSE, "k.moe.router_replay='record': the model has no"),
    ({"moe.overlap": True}, DENSE, "k.moe.overlap=True: the model has no experts; allowed: False"),
    ({"moe.bias_update_rate": 0.1}, MOE, "k.moe.bias_update_rate=0.1: the routers of the model"),
    ({"mtp_loss_coef": 0.1}, MOE, "k.mtp_loss_coef=0.1: the model has no layers for multi-token"),
    ({"indexer_loss_coef": 0.1}, MOE, "k.indexer_loss_coef=0.1: the model has no indexer of"),
    ({"lora.rank": 4}, replace(MOE, has_indexer=True), "k.lora.rank=4: sparse attention reads"),
    ({"indexer_replay": "record"}, MOE, "k.indexer_replay='record': the model has no indexer of"),
    (RECORD | {"layout.cp": 2}, SPARSE, "k.indexer_replay='record' with k.layout.cp=2: ranks of"),
    (RECORD | {"moe.overlap": True}, SPARSE, "with k.moe.overlap=True: layers run beside those"),
    (
        RECORD | {"mtp_loss_coef": 0.1},
        replace(SPARSE, num_mtp_layers=1),
        "with k.mtp_loss_coef=0.1: no keys are recorded",
    ),
    (
        RECORD | {"megatron": {"dsa_kernel_backend": "tilelang"}},
        SPARSE,
        "with k.megatron.dsa_kernel_backend='tilelang': a fused kernel picks keys itself; allowed",
    ),
    (
        {"fp8.recipe": "blockwise", "fp8.bf16_layers_at_start": 49},
        MOE,
        "k.fp8.bf16_layers_at_start=49; allowed: 0 to",
    ),
    (
        {
            "fp8.recipe": "blockwise",
            "fp8.bf16_layers_at_start": 6,
            "fp8.bf16_layers_at_end": 6,
        },
        MOE,
        "k.fp8.bf16_layers_at_start=6 and bf16_layers_at_end=6: none of the 12 layers is left",
    ),
    (
        {"mtp_loss_coef": 0.1, "layout.pp": 2},
        replace(MOE, num_mtp_layers=1, is_tied=True),
        "k.mtp_loss_coef=0.1 with k.layout.pp=2: not supported for a model with tied embeddings",
    ),
    (
        SELECTIVE | {"recompute.modules": ["mla_up_proj"]},
        MOE,
        "k.recompute.modules names 'mla_up_proj': the model has no latent attention",
    ),
    (
        SELECTIVE | {"recompute.modules": ["core_attn", "moe"]},
        DENSE,
        "k.recompute.modules names 'moe': the model has no experts",
    ),
]


def engine(changes):
    made = EngineConfig()
    for key, value in changes.items():
        *path, leaf = key.split(".")
        target = made
        for name in path:
            target = getattr(target, name)
        assert leaf in {entry.name for entry in fields(target)}
        setattr(target, leaf, value)
    return made


def test_the_defaults_are_valid():
    for validate in (validate_engine, validate_megatron, validate_fsdp):
        validate("k", EngineConfig())
    validate_model_engine("k", EngineConfig(), DENSE)


@pytest.mark.parametrize(("layout", "message"), BAD_LAYOUTS, ids=[m for _, m in BAD_LAYOUTS])
def test_a_bad_layout_is_named(layout, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_layout("k", layout)


@pytest.mark.parametrize(
    ("layout", "sizes", "message"), BAD_FOR_THE_MODEL, ids=[m for *_, m in BAD_FOR_THE_MODEL]
)
def test_a_layout_that_does_not_divide_the_model_is_named(layout, sizes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_model_layout("k", layout, sizes)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, ep=4, etp=2),
        Layout(pp=4),
        Layout(pp=3, vpp=2),
        Layout(pp=3, first_stage_layers=2, last_stage_layers=4),
        Layout(pp=4, first_stage_layers=0, last_stage_layers=0),
        Layout(pp=2, first_stage_layers=5, last_stage_layers=7),
    ],
)
def test_a_layout_that_divides_is_accepted(layout):
    validate_model_layout("k", layout, MOE)


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS, ids=[m for _, m in BAD_SETTINGS])
def test_a_bad_engine_setting_is_named(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_engine("k", engine(changes))


@pytest.mark.parametrize(
    ("changes", "message"), BAD_MEGATRON_SETTINGS, ids=[m for _, m in BAD_MEGATRON_SETTINGS]
)
def test_a_bad_setting_of_megatron_is_named(changes, message):
    validate_engine("k", engine(changes))  # other engines may read it in their own way
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_megatron("k", engine(changes))


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    BAD_SETTINGS_FOR_THE_MODEL,
    ids=[m for *_, m in BAD_SETTINGS_FOR_THE_MODEL],
)
def test_a_setting_that_the_model_cannot_follow_is_named(changes, sizes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate_model_engine("k", engine(changes), sizes)
