"""The meaning of "cuda" on CPUs, in a process of its own, which stays on the CPU.

And what a GPU that is not here would be given.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import package_info

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron import device, step
from mcore_rl.engine.megatron.model import fuse_weight_gradients
from tests.nightly import nightly

_PROGRAM = """
import torch
from mcore_rl.engine.megatron import device, step

device.install(1, on_cpu=True)
assert device.get_device_type() == "cpu"
for made in (
    torch.tensor([1.0], device="cuda"),
    torch.zeros(2, device=torch.device("cuda", 0)),
    torch.empty(2, device=torch.cuda.current_device(), pin_memory=True),
    torch.ones(2).cuda(),
):
    assert made.device.type == "cpu"
    assert made.type() == "torch.cuda.FloatTensor"
assert torch.ones(2).type(torch.float64).dtype == torch.float64
with device.use_meta_device():
    assert torch.arange(3, device="cuda").device.type == "meta"
    assert torch.arange(3).device.type == "cpu"
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
try:
    torch.rand(2, device="cuda:7")
except (AssertionError, RuntimeError) as error:
    print(error)
"""


@pytest.mark.job
def test_cuda_means_the_cpu_and_what_is_not_replaced_is_an_error_of_torch():
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "CUDA" in ended.stdout or "NVIDIA" in ended.stdout  # of a build without or with CUDA


@pytest.mark.job
@pytest.mark.parametrize(
    ("model", "printed"),
    [
        nightly(("qwen3", "layers 18")),
        nightly(("qwen3_moe", "experts 32")),
        ("gpt_oss", "experts 64"),  # with biases, which the others lack
    ],
)
def test_a_model_on_a_gpu_needs_neither_transformer_engine_nor_the_cpu(model, printed):
    program = Path(__file__).parent / "gpu_modules.py"
    command = [sys.executable, str(program), model]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == printed


@pytest.fixture
def set_device(monkeypatch):
    def use(name: str, *, has_te: bool = False, capability: int = 9) -> None:
        monkeypatch.setattr(device, "get_device_type", lambda: name)
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: has_te or None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    return use


@pytest.mark.parametrize(
    ("name", "has_te", "setting", "chosen"),
    [
        ("cuda", True, "auto", "te"),
        ("cuda", True, "te", "te"),
        ("cuda", True, "torch", "torch"),
        ("cuda", False, "auto", "torch"),
        ("cpu", True, "auto", "torch"),
        ("cpu", False, "torch", "torch"),
    ],
)
def test_transformer_engine_is_taken_where_it_is_installed_beside_a_gpu(
    set_device, name, has_te, setting, chosen
):
    set_device(name, has_te=has_te)
    assert device.choose_modules(setting) == chosen


@pytest.mark.parametrize(
    ("name", "missing"),
    [("cpu", "a GPU"), ("cuda", r"transformer-engine\[pytorch\], which is not")],
)
def test_transformer_engine_that_cannot_be_had_is_refused_by_name(set_device, name, missing):
    set_device(name, has_te=name == "cpu")
    with pytest.raises(ConfigError, match=f"^actor.modules='te' needs {missing}"):
        device.choose_modules("te")


def test_half_of_transformer_engine_is_none(set_device, monkeypatch):
    """Its torch part, which is built from source, is missing."""
    set_device("cuda")
    specs = {"transformer_engine": True}
    monkeypatch.setattr(device.importlib.util, "find_spec", specs.get)
    assert device.choose_modules("auto") == "torch"
    with pytest.raises(ConfigError, match=r"which is not installed"):
        device.choose_modules("te")


def test_transformer_engine_from_wheels_is_taken_though_its_torch_part_has_no_module_to_import(
    set_device, monkeypatch, tmp_path
):
    """The wheel of 2.20 has its library in transformer_engine/wheel_lib."""
    (tmp_path / "transformer_engine/wheel_lib").mkdir(parents=True)
    (tmp_path / "transformer_engine/__init__.py").touch()
    metadata = tmp_path / "transformer_engine_torch-2.20.2.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: 2.20.2\n")
    find_spec = importlib.util.find_spec
    set_device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert device.choose_modules("auto") == "torch"
    monkeypatch.syspath_prepend(tmp_path)
    assert device.choose_modules("auto") == device.choose_modules("te") == "te"


def test_transformer_engine_that_does_not_import_is_refused_before_megatron_goes_on_without(
    set_device, monkeypatch
):
    set_device("cuda", has_te=True)
    monkeypatch.setattr(device, "_cuda", None)
    monkeypatch.setattr(device, "_modules", "torch")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # an import of it fails
    with pytest.raises(ConfigError, match=r"installed and does not import .*actor.modules='torch'"):
        device.install(1)


@pytest.mark.parametrize("modules", ["te", "torch"])
def test_fused_kernels_of_transformer_engine_come_with_its_modules_only(
    set_device, monkeypatch, modules
):
    set_device("cuda")
    monkeypatch.setattr(device, "_modules", modules)
    flags = device.build_config_flags()
    assert flags["masked_softmax_fusion"]  # Megatron's own
    assert [flags[f"{name}_fusion"] for name in ("apply_rope", "moe_permute")] == (
        [modules == "te"] * 2
    )
    # Told which micro-batch is the first, Transformer Engine overwrites the sum of earlier calls.
    assert flags["disable_parameter_transpose_cache"] == (modules == "te")


def test_weight_gradients_are_added_in_place_where_a_module_can():
    linears = [torch.nn.Linear(2, 2) for _ in range(3)]
    for linear in linears[:2]:  # as Transformer Engine's
        linear.fuse_wgrad_accumulation = False
    fuse_weight_gradients(torch.nn.Sequential(linears[0], torch.nn.Sequential(*linears[1:])))
    fused = [getattr(linear, "fuse_wgrad_accumulation", None) for linear in linears]
    assert fused == [True, True, None]


ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.mark.parametrize(
    ("layout", "of_ranks", "of_driver", "capability", "environment"),
    [
        (Layout(tp=2), "cuda", "cuda", 9, ONE_QUEUE),
        (Layout(cp=2), "cuda", "cuda", 9, ONE_QUEUE),
        (Layout(dp=2, ep=2), "cuda", "cuda", 9, {}),
        (Layout(tp=2), "cuda", "cuda", 10, {}),
        (Layout(tp=2), "cpu", "cpu", 9, {}),
        # A driver on a node of another kind: the ranks' counts.
        (Layout(tp=2), "cuda", "cpu", 0, ONE_QUEUE),
        (Layout(tp=2), "cpu", "cuda", 9, {}),
    ],
)
def test_ranks_that_send_while_they_compute_have_one_queue_before_blackwell(
    set_device, monkeypatch, layout, of_ranks, of_driver, capability, environment
):
    set_device(of_driver, capability=capability)
    assert device.build_rank_environment(layout, of_ranks) == environment
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert device.build_rank_environment(layout, of_ranks) == {}


def test_a_driver_without_a_gpu_leaves_transformer_engine_to_nodes_with_one(set_device):
    set_device("cpu")
    assert device.choose_modules("te", "cuda") == "te"
    set_device("cuda", has_te=True)
    with pytest.raises(ConfigError, match=r"^actor.modules='te' needs a GPU"):
        device.choose_modules("te", "cpu")


def test_another_megatron_is_refused_by_name(monkeypatch):
    device._check_megatron()
    monkeypatch.setattr(package_info, "__version__", "0.16.1")
    with pytest.raises(
        ConfigError, match=r"^megatron-core 0.16.1 is installed; supported: 0.19.2$"
    ):
        device._check_megatron()


@pytest.mark.parametrize(("num_mtp", "expected"), [(None, 4.0), (1, 3.0), (3, 2.0)])
def test_loss_of_indexers_is_a_mean_over_decoder_and_prediction_layers(
    monkeypatch, num_mtp, expected
):
    """Each of three decoder layers, and of prediction layers, adds its tokens times coefficient."""
    helper = SimpleNamespace(tracker={"sum": 0.5 * 10 * 12.0})
    monkeypatch.setattr(step, "DSAIndexerLossLoggingHelper", helper)
    monkeypatch.setattr(step.dist, "all_reduce", lambda tensor, group: None)
    stages = "get_pipeline_model_parallel_group"
    monkeypatch.setattr(step.parallel_state, stages, lambda: None)
    config = SimpleNamespace(num_layers=3, mtp_num_layers=num_mtp, dsa_indexer_loss_coeff=0.5)
    assert step.pop_indexer_loss(config, 10, torch.device("cpu")).item() == expected
    assert step.pop_indexer_loss(config, 10, torch.device("cpu")).item() == 0.0  # it is taken
