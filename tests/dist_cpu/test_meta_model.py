"""Meta models are what engines save, and engines load what others saved."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meta_model_jobs
import pytest
import ranks
import tiny_families
import tiny_models
import torch
from safetensors.torch import load_file

import mcore_rl.models  # noqa: F401
from mcore_rl.checkpoint.storage_location import compute_chunks
from mcore_rl.checkpoint.torch_dist_metadata import COMMON_KEY
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron.conversion import MetaModel, build_meta_model
from mcore_rl.models.base import pad_vocab_size, read_config
from mcore_rl.models.heads import map_model_weights
from tests.nightly import all_but

# The models have three layers; qwen3 is tied.
TP2_EP2, TP2_ETP2 = Layout(tp=2, ep=2), Layout(tp=2, etp=2)
PP2, PP2_VPP2 = Layout(pp=2, first_stage_layers=1), Layout(pp=2, vpp=2, first_stage_layers=0)
LAYOUTS = {
    "qwen3": {"tp2": Layout(tp=2), "pp2 vpp2": PP2_VPP2},
    "qwen3_moe": {"tp2 ep2": TP2_EP2, "tp2 etp2": TP2_ETP2, "pp2": PP2},
    "qwen3_next": {"tp2 etp2": TP2_ETP2, "pp2": PP2},
    "deepseek_v3-mtp": {
        "tp2": Layout(tp=2),
        "tp2 ep2": TP2_EP2,
        "tp2 etp2": TP2_ETP2,
        "pp2": PP2,
        "pp2 vpp2": PP2_VPP2,
        "tp2 pp2 ep2": Layout(tp=2, pp=2, ep=2, last_stage_layers=1),
    },
}
SAVED = [
    *(
        f"{model}/one"
        for model in (*tiny_families.cases(), "deepseek_v3-mtp", "glm4_moe-mtp", "qwen3_next-mtp")
    ),
    *(f"{model}/{name}" for model, layouts in LAYOUTS.items() for name in layouts),
]
MORE = (
    "qwen3_moe/tp2 etp2", "qwen3_moe/pp2", "deepseek_v3-mtp/tp2", "deepseek_v3-mtp/pp2",
    "deepseek_v3-mtp/pp2 vpp2", "deepseek_v3_plain/one", "glm4_moe_air/one", "llama_scaled/one",
)  # fmt: skip
FOREIGN = ["qwen3 stacked", "qwen3 apart", "qwen3_moe stacked", "qwen3_moe apart"]


@dataclass
class Saved:
    path: Path  # of the model
    layout: Layout
    folder: Path  # of the checkpoint

    @property
    def has_mtp(self) -> bool:
        return self.path.name.endswith("-mtp")

    @property
    def metadata(self) -> Any:
        return pickle.loads((self.folder / ".metadata").read_bytes())

    def object(self, key: str) -> bytes:
        [place] = [p for index, p in self.metadata.storage_data.items() if index.fqn == key]
        data = (self.folder / place.relative_path).read_bytes()
        return data[place.offset : place.offset + place.length]


class Runs:
    def __init__(self, folder: Path) -> None:
        self.batch = tiny_models.make_batch()
        self.paths = {
            name: tiny_families.save(tiny_models.build_from(case.config), folder / name)
            for name, case in tiny_families.cases().items()
        }
        for name in ("deepseek_v3", "glm4_moe", "qwen3_next"):
            self.paths[f"{name}-mtp"] = tiny_families.save_with_mtp(name, folder)
        config = tiny_families.cases()["qwen3"].config
        config.vocab_size = meta_model_jobs.FOREIGN_ROWS + 1
        self.paths["large"] = tiny_families.save(tiny_models.build_from(config), folder / "large")
        self._saved: dict[str, Saved] = {}
        jobs: dict[int, dict[str, Any]] = {1: {}, 2: {}, 4: {}}
        for case in SAVED:
            model, layout_name = case.split("/")
            layout = LAYOUTS.get(model, {}).get(layout_name, Layout())
            saved = Saved(self.paths[model], layout, folder / case.replace("/", " "))
            coef = meta_model_jobs.MTP_COEF if saved.has_mtp else 0.0
            job = ranks.make_job(meta_model_jobs.save, saved.path, layout, saved.folder, coef)
            jobs[layout.world_size][case] = job
            self._saved[case] = saved
        self._foreign = {case: folder / f"foreign {case}" for case in FOREIGN}
        for case, to in self._foreign.items():
            model, form = case.split()
            save = meta_model_jobs.megatron_saves
            jobs[1][case] = ranks.make_job(save, self.paths[model], to, form == "stacked")
        self._needs: dict[str, str] = {}
        self._add_loads(jobs)
        self.results = ranks.Results(jobs, self._needs)

    def saved(self, case: str) -> Saved:
        assert self.results[case]
        return self._saved[case]

    def foreign(self, case: str) -> Path:
        """The checkpoint that Megatron has saved."""
        assert self.results[case]
        return self._foreign[case]

    def _add_loads(self, jobs: dict[int, dict[str, Any]]) -> None:
        folders = {case: saved.folder for case, saved in self._saved.items()} | self._foreign

        def add(name: str, model: str, layout: Layout, source: str, coef: float = 0.0) -> None:
            arguments = (self.paths[model], layout, folders[source], coef)
            jobs[layout.world_size][name] = ranks.make_job(meta_model_jobs.load, *arguments)
            self._needs[name] = source

        one_rank, coef = Layout(), meta_model_jobs.MTP_COEF
        for case in FOREIGN:
            add(f"tp2 of {case}", case.split()[0], Layout(tp=2), case)
            add(f"pp2 of {case}", case.split()[0], PP2, case)
        add("another model", "qwen3", one_rank, "qwen3_moe stacked")
        add("a larger vocabulary", "large", one_rank, "qwen3 stacked")
        add("more rows", "qwen3_moe", Layout(tp=2), "qwen3_moe/one")
        add("mtp unread", "deepseek_v3-mtp", one_rank, "deepseek_v3-mtp/tp2 ep2")
        add("mtp read", "deepseek_v3-mtp", one_rank, "deepseek_v3-mtp/tp2 ep2", coef)
        add("mtp missing", "deepseek_v3-mtp", one_rank, "deepseek_v3/one", coef)
        add("plain", "deepseek_v3", one_rank, "deepseek_v3/one")
        refused = (self.paths["qwen3"], folders["qwen3 stacked"])
        jobs[1]["training"] = ranks.make_job(meta_model_jobs.refused_training, *refused)
        self._needs["training"] = "qwen3 stacked"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("meta_model"))


@pytest.fixture(scope="module")
def meta_model_of(runs):
    """The meta model of a checkpoint's model, made once."""
    made: dict[tuple[str, int], MetaModel] = {}

    def make(saved: Saved) -> MetaModel:
        config = read_config(saved.path)
        rows = pad_vocab_size(config, saved.layout.tp)
        if (saved.path.name, rows) not in made:
            made[saved.path.name, rows] = build_meta_model(config, rows)
        return made[saved.path.name, rows]

    return make


def same_weights(weights, path):
    expected = load_file(path / "model.safetensors")
    assert weights.keys() == expected.keys()
    return all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", all_but([case for case in SAVED if case not in MORE], SAVED))
def test_the_blueprint_has_the_tensors_chunks_and_objects_that_engines_save(
    runs, meta_model_of, case
):
    saved = runs.saved(case)
    print_ = meta_model_of(saved)
    config = read_config(saved.path)
    rows = pad_vocab_size(config, saved.layout.tp)
    shapes, boxes = {}, set()
    for weight in map_model_weights(config, rows):
        if weight.replica:
            continue
        location = print_.parameters[weight.get_local_name()]
        shapes |= location.list_tensors()
        for part in compute_chunks(weight, getattr(saved.layout, weight.axis or "pp")):
            [piece] = location.locate(part)
            boxes.add((piece.key, piece.box.offsets, piece.box.sizes))
    entries = saved.metadata.state_dict_metadata
    tensors = {key: entry for key, entry in entries.items() if hasattr(entry, "chunks")}
    assert {key: tuple(entry.size) for key, entry in tensors.items()} == shapes
    chunks = [
        (key, tuple(chunk.offsets), tuple(chunk.sizes))
        for key, entry in tensors.items()
        for chunk in entry.chunks
    ]
    assert len(chunks) == len(set(chunks))
    assert set(chunks) == boxes
    assert entries.keys() - tensors.keys() == {COMMON_KEY, *print_.objects}
    assert all(saved.object(key) == data for key, data in print_.objects.items())


@pytest.mark.parametrize(
    ("layout", "case"),
    all_but(
        [("tp2", "qwen3 apart"), ("pp2", "qwen3 stacked"), ("tp2", "qwen3_moe stacked")],
        [(layout, case) for layout in ("tp2", "pp2") for case in FOREIGN],
    ),
)
def test_an_engine_loads_the_weights_of_a_checkpoint_of_megatron(runs, case, layout):
    results = runs.results[f"{layout} of {case}"]
    assert all(result["is_finite"] for result in results)
    assert same_weights(results[0]["weights"], runs.paths[case.split()[0]])


@pytest.mark.parametrize("case", FOREIGN)
def test_a_blueprint_finds_the_parameters_of_a_checkpoint_of_megatron(runs, meta_model_of, case):
    model, form = case.split()
    folder = runs.foreign(case)
    keys = Saved(runs.paths[model], Layout(), folder).metadata.state_dict_metadata
    assert any(key.startswith("decoder.layers.self_attention.") for key in keys) == (
        form == "stacked"
    )
    blueprint = meta_model_of(runs.saved(f"{model}/one"))
    located = blueprint.locate_parameters(keys)
    assert located.keys() == blueprint.parameters.keys()
    assert len({(location.key, location.index) for location in located.values()}) == len(located)
    for location in located.values():
        size = tuple(keys[location.key].size)
        if location.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert size == (meta_model_jobs.FOREIGN_ROWS, *location.shape[1:])
        else:
            assert size == location.shape
    gone = {key for key in keys if "linear_fc2" not in key}
    with pytest.raises(ConfigError, match=r"has no decoder\.layers\..*linear_fc2\.weight"):
        blueprint.locate_parameters(gone)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("another model", "is a checkpoint of another model: it has no decoder.layers.mlp."),
        (
            "a larger vocabulary",
            "is a checkpoint of another model: embedding.word_embeddings.weight has 256 rows, this "
            "model's vocabulary 257",
        ),
        ("training", "is not a complete checkpoint: it has no mcore_rl.json"),
    ],
)
def test_a_checkpoint_of_megatron_is_refused_where_it_does_not_fit(runs, case, message):
    [result] = runs.results[case]
    assert message in result["refusal"]


def test_rows_of_padding_that_a_checkpoint_does_not_have_hold_numbers(runs):
    results = runs.results["more rows"]
    assert all(result["is_finite"] for result in results)
    assert same_weights(results[0]["weights"], runs.paths["qwen3_moe"])


def test_prediction_layers_of_a_checkpoint_may_stay_unread_but_not_be_missing(runs):
    assert same_weights(runs.results["mtp read"][0]["weights"], runs.paths["deepseek_v3-mtp"])
    assert same_weights(runs.results["mtp unread"][0]["weights"], runs.paths["deepseek_v3-mtp"])
    assert "it has no mtp.layers.0." in runs.results["mtp missing"][0]["refusal"]
    assert same_weights(runs.results["plain"][0]["weights"], runs.paths["deepseek_v3"])


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "sharded"])
def test_a_run_goes_on_without_the_prediction_layers_that_it_trained(runs, tmp_path, distributed):
    path, to = runs.paths["deepseek_v3-mtp"], tmp_path / "checkpoint"
    job = ranks.make_job
    jobs = meta_model_jobs
    results = ranks.spawn(
        1,
        {
            "trained": job(jobs.train_and_save, path, runs.batch, to, distributed),
            "with": job(jobs.moments, path, runs.batch, to, distributed),
            "without": job(jobs.resume, path, runs.batch, to, distributed),
        },
    )
    trained, resumed = results["trained"][0], results["without"][0]
    predicted = {n for n in trained["weights"] if n.startswith("model.layers.3.")}
    for name in trained["weights"].keys() - predicted:
        assert torch.equal(resumed["weights"][name], trained["weights"][name]), name
    expected = results["with"][0]["moments"]
    assert len(resumed["moments"]) > 60
    for name, moment in resumed["moments"].items():
        assert torch.equal(moment, expected[name]), name
