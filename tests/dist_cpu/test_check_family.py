"""The conformance suite of families: the example passes, and each planted fault is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ranks
import tiny_models
import torch
import transformers
from faulty_families import ENGINE_FAULTS, EXAMPLE, RULE_FAULTS

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.models.base import get_user_family, use_family
from mcore_rl.testing import check_family
from mcore_rl.testing.engine import run_checks
from mcore_rl.testing.family import check_conversion, check_rules, save_random_checkpoint

FAMILY, FAULTY = f"{EXAMPLE}:FAMILY", Path(__file__).with_name("faulty_families.py")
CONFIG = transformers.MistralConfig(
    vocab_size=tiny_models.VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=24, intermediate_size=96, max_position_embeddings=256,
    sliding_window=None, bos_token_id=None, eos_token_id=1, pad_token_id=0, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral") / "model"
    save_random_checkpoint(CONFIG, folder)
    return folder


@pytest.fixture(autouse=True)
def no_family():
    yield
    use_family("")


@ranks.spawn_on_ranks()
def run_on_layout(path: Path, layout: Layout, family: str, folder: Path) -> ranks.Result:
    """Return the sentence of the engine suite, with the Megatron engine; "" where all is well."""
    try:
        run_checks("megatron", str(path), layout, str(folder), family)
    except (AssertionError, RuntimeError) as error:
        return {"sentence": str(error)}
    finally:
        use_family("")
    return {"sentence": ""}


@ranks.spawn_on_ranks(1)
def score(path: Path, batch: Batch) -> ranks.Result:
    spec = ranks.build_engine_spec(path, Layout())
    spec.model.family = FAMILY
    use_family(FAMILY)
    engine = ranks.start_engine(spec)
    scored = engine.infer_batch(batch)
    use_family("")
    return {"log_probs": torch.from_numpy(scored.jagged("log_probs").values.copy())}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_the_megatron_engine_trains_the_example_as_transformers_does(path, layout, tmp_path):
    results = run_on_layout(path, layout, FAMILY, tmp_path)
    assert [result["sentence"] for result in results] == [""] * layout.world_size


def test_log_probs_of_the_example_equal_transformers(path):
    batch = tiny_models.make_batch()
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    [result] = score(path, batch)
    expected = torch.from_numpy(tiny_models.reference_scores(model, batch)[1])
    torch.testing.assert_close(result["log_probs"].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fault", RULE_FAULTS)
def test_rules_that_are_not_those_of_the_checkpoint_are_named(path, fault):
    use_family(f"{FAULTY}:{fault}")
    with pytest.raises(AssertionError, match=re.escape(RULE_FAULTS[fault])):
        check_rules(path)


@pytest.mark.parametrize("fault", ENGINE_FAULTS)
def test_a_fault_that_rules_do_not_show_is_named_by_the_engine(path, fault, tmp_path):
    [result] = run_on_layout(path, Layout(), f"{FAULTY}:{fault}", tmp_path)
    assert ENGINE_FAULTS[fault] in result["sentence"]


def test_rules_of_the_example_and_its_conversion_are_right(path, tmp_path):
    use_family(f"{FAULTY}:NO_SERVERS")
    check_rules(path)  # servers may be left out
    use_family(FAMILY)
    check_rules(path)
    check_conversion(FAMILY, str(path), str(tmp_path))


def test_one_call_checks_a_family_and_leaves_no_other_one(tmp_path):
    check_family(FAMILY, CONFIG, layouts=[Layout()])
    assert get_user_family() == ""
    with pytest.raises(AssertionError, match=r"lack model.norm.weight; the contract"):
        check_family(f"{FAULTY}:SERVES_LESS", CONFIG)
    with pytest.raises(ConfigError, match=r"\['MistralForCausalLM'\] is not supported"):
        check_family(f"{FAULTY}:OTHER", CONFIG)
    with pytest.raises(ConfigError, match=r"layout.tp=3 does not divide the model's 4 attention"):
        check_family(FAMILY, CONFIG, layouts=[Layout(tp=3)])
