"""Differences between megatron-core versions: what is refused, and what each probe answers."""

from __future__ import annotations

from dataclasses import make_dataclass
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from megatron.core import package_info
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.optimizer import optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_rl.config.errors import ConfigError
from mcore_rl.engine.megatron import versions

DECODER_LAYER = "mtp.layers.1.transformer_layer.mlp.linear_fc1.weight"


class Experts:
    def __init__(self, num_experts, submodules):
        self.num_experts, self.submodules = num_experts, submodules


class Columns: ...


class Rows: ...


@pytest.fixture
def probed_again():
    """Lets the name of the prediction layer be asked for in another version, and then here."""
    versions.mtp_layer_name.cache_clear()
    yield
    versions.mtp_layer_name.cache_clear()


@pytest.mark.parametrize("found", ["0.16.0", "0.17.1", "0.19.0", "0.19.2rc1", "0.20.0"])
def test_another_version_is_refused_by_name(monkeypatch, found):
    monkeypatch.setattr(package_info, "__version__", found)
    with pytest.raises(ConfigError) as error:
        versions.check_megatron_version()
    assert str(error.value) == f"megatron-core {found} is installed; supported: 0.16.1, 0.19.2"


@pytest.mark.parametrize("found", versions.SUPPORTED_MEGATRON)
def test_a_supported_version_is_taken(monkeypatch, found):
    monkeypatch.setattr(package_info, "__version__", found)
    versions.check_megatron_version()


def test_the_installed_version_is_supported():
    assert version("megatron-core") in versions.SUPPORTED_MEGATRON
    versions.check_megatron_version()


def test_the_probes_answer_as_the_installed_version_has_it(probed_again):
    is_first = version("megatron-core") == "0.16.1"
    assert versions.mtp_layer_name() == ("transformer_layer" if is_first else "mtp_model_layer")
    spec = versions.experts_spec(Experts, Columns, Rows)
    assert isinstance(spec, tuple) == is_first
    plain = SimpleNamespace(multi_latent_attention=True, q_lora_rank=None)
    layers = latent_layers()
    versions.use_plain_query(plain, layers)
    kept = layers.layer_specs[0].submodules.self_attention.module is MLASelfAttention
    assert kept == is_first


def test_grouped_experts_are_a_class_and_submodules_where_a_legacy_kind_is_asked_for(monkeypatch):
    def grouped_mlp_modules(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm): ...

    monkeypatch.setattr(BackendSpecProvider, "grouped_mlp_modules", grouped_mlp_modules)
    module, submodules = versions.experts_spec(Experts, Columns, Rows)
    assert (module, submodules.linear_fc1, submodules.linear_fc2) == (Experts, Columns, Rows)


def test_grouped_experts_are_built_by_a_call_where_it_is_not(monkeypatch):
    def grouped_mlp_modules(self, moe_use_grouped_gemm): ...

    monkeypatch.setattr(BackendSpecProvider, "grouped_mlp_modules", grouped_mlp_modules)
    experts = versions.experts_spec(Experts, Columns, Rows)(8)
    assert (experts.num_experts, experts.submodules.linear_fc1) == (8, Columns)


@pytest.mark.parametrize("kind", [ModuleSpec, partial])
def test_the_submodules_of_an_mlp_are_found_in_a_spec_and_in_a_partial(kind):
    submodules = MLPSubmodules(linear_fc1=Columns, linear_fc2=Rows)
    layer = SimpleNamespace(submodules=SimpleNamespace(mlp=kind(Experts, submodules=submodules)))
    assert versions.mlp_submodules(layer) is submodules


def test_an_mlp_without_submodules_has_none():
    layer = SimpleNamespace(submodules=SimpleNamespace(mlp=Experts))
    assert versions.mlp_submodules(layer) is None


@pytest.mark.parametrize("field", ["transformer_layer", "mtp_model_layer"])
def test_the_prediction_layer_has_the_name_of_its_field(monkeypatch, probed_again, field):
    submodules = make_dataclass("Submodules", [(field, type)])
    monkeypatch.setattr(multi_token_prediction, "MultiTokenPredictionLayerSubmodules", submodules)
    assert versions.parameter_name(DECODER_LAYER) == DECODER_LAYER.replace(
        "transformer_layer", field
    )
    for name in ("mtp.layers.0.eh_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert versions.parameter_name(name) == name


def latent_layers() -> SimpleNamespace:
    attention = ModuleSpec(MLASelfAttention)
    layer = SimpleNamespace(submodules=SimpleNamespace(self_attention=attention))
    return SimpleNamespace(layer_specs=[layer])


def test_a_query_that_is_projected_in_one_step_has_the_projection_of_the_spec(monkeypatch):
    def resolve(self, submodules):
        return {"linear_q_proj": Rows, "linear_kv_up_proj": Rows}

    monkeypatch.setattr(MLASelfAttention, "_resolve_qk_norm_config", resolve, raising=False)
    layers = versions.use_plain_query(
        SimpleNamespace(multi_latent_attention=True, q_lora_rank=None), latent_layers()
    )
    module = layers.layer_specs[0].submodules.self_attention.module
    found = module._resolve_qk_norm_config(None, SimpleNamespace(linear_q_proj=Columns))
    assert issubclass(module, MLASelfAttention)
    assert found == {"linear_q_proj": Columns, "linear_kv_up_proj": Rows}


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(multi_latent_attention=True, q_lora_rank=32),
        SimpleNamespace(multi_latent_attention=False),
    ],
    ids=["latent query", "no latent attention"],
)
def test_other_attention_is_left_as_it_is(monkeypatch, config):
    monkeypatch.setattr(MLASelfAttention, "_resolve_qk_norm_config", None, raising=False)
    layers = versions.use_plain_query(config, latent_layers())
    assert layers.layer_specs[0].submodules.self_attention.module is MLASelfAttention


def group(**fields):
    kind = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return kind | fields


def test_groups_of_parameters_are_paired_whatever_their_learning_rates():
    saved = [
        group(params=[0], wd_mult=0.0, max_lr=1e-3),
        group(params=[1], max_lr=1e-3),
    ]
    wanted = [group(params=[5], max_lr=2e-3), group(params=[6], wd_mult=0.0, max_lr=2e-3)]
    keys = optimizer.param_group_identifier_keys
    with versions.groups_told_by_what_they_hold():
        paired = MegatronOptimizer._filter_and_reorder_param_groups(wanted, saved)
    assert [found["wd_mult"] for found in paired] == [1.0, 0.0]
    assert optimizer.param_group_identifier_keys is keys


def test_the_keys_of_groups_are_those_of_the_installed_version_again_after_an_error():
    keys = optimizer.param_group_identifier_keys
    with pytest.raises(RuntimeError), versions.groups_told_by_what_they_hold():
        raise RuntimeError
    assert optimizer.param_group_identifier_keys is keys


def test_a_part_of_the_optimizer_without_parameters_has_an_empty_state():
    loaded = {0: {"param_groups": [], "state": {0: 1}}, 1: {"optimizer": {"param_groups": []}}}
    assert versions.with_empty_states(loaded) == {
        0: {"param_groups": [], "state": {0: 1}},
        1: {"optimizer": {"param_groups": [], "state": {}}},
    }
