"""The conformance suite of engines: ours and the example pass, and each planted fault is named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import ranks
import tiny_models
from faulty_engines import EXAMPLE, FAULTS

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.testing import check_engine
from mcore_rl.testing.engine import run_checks
from tests.nightly import all_but

FAULTY = Path(__file__).with_name("faulty_engines.py")
HF = f"{EXAMPLE}:BACKEND"
LAYOUTS = {
    "one rank": Layout(), "tp2 ep2": Layout(tp=2, ep=2), "pp2": Layout(pp=2), "cp2": Layout(cp=2),
    "dp2": Layout(dp=2),
}  # fmt: skip
FSDP_LAYOUTS = {"dp2 ep2": Layout(dp=2, ep=2), "cp2": Layout(cp=2), "dp2": Layout(dp=2)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_models.save(name, folder) for name in ("qwen3", "qwen3_moe")}


@ranks.spawn_on_ranks()
def conform(backend: str, path: Path, layout: Layout, folder: Path) -> ranks.Result:
    run_checks(backend, str(path), layout, str(folder))
    return {}


@ranks.spawn_on_ranks(1)
def find_fault(name: str, path: Path) -> ranks.Result:
    """Return the sentence of the suite on a faulty engine."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_checks(f"{FAULTY}:{name}_BACKEND", str(path), Layout(), folder)
        except AssertionError as error:
            return {"sentence": str(error)}
    return {"sentence": "none"}


@pytest.mark.parametrize("name", all_but(("one rank", "tp2 ep2"), LAYOUTS))
def test_the_megatron_engine_does_what_the_contract_says(models, name, tmp_path):
    conform("megatron", models["qwen3_moe"], LAYOUTS[name], tmp_path)


@pytest.mark.parametrize("name", all_but(("dp2 ep2",), FSDP_LAYOUTS))
def test_the_fsdp_engine_does_what_the_contract_says(models, name, tmp_path):
    conform("fsdp", models["qwen3_moe"], FSDP_LAYOUTS[name], tmp_path)


def test_the_example_does_what_the_contract_says(models, tmp_path):
    conform(HF, models["qwen3_moe"], Layout(dp=2), tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_engine_is_named(models, fault):
    [result] = find_fault(fault, models["qwen3"])
    assert FAULTS[fault] in result["sentence"]


def test_one_call_runs_the_suite_in_processes_of_its_own(models):
    check_engine(HF, models["qwen3"])
    with pytest.raises(AssertionError, match=r"^infer_batch adds no entropy; the contract: "):
        check_engine(f"{FAULTY}:AddsNoEntropy_BACKEND", models["qwen3"])


def test_bad_inputs_of_the_suite_are_refused_before_a_process_starts(models):
    with pytest.raises(ConfigError, match="num_ranks=2: the layout has 1 ranks; allowed: as many"):
        check_engine(HF, models["qwen3"], layout=Layout(), num_ranks=2)
    with pytest.raises(ConfigError, match=r"engine.layout.tp=2: .* does not read it; allowed: 1$"):
        check_engine(HF, models["qwen3"], layout=Layout(tp=2))
    with pytest.raises(ConfigError, match=r"engine.backend='mine'; allowed: 'megatron'"):
        check_engine("mine", models["qwen3"])
