"""Parity of engines: gaps of log-probs, the first module that differs, reports, options."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from mcore_rl.cli.main import main
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import Layout, LoRAConfig
from mcore_rl.jobs.parity import run
from mcore_rl.jobs.parity.run import (
    Pair,
    ParityReport,
    Scores,
    compare_log_probs,
    compare_traces,
    find_first_different,
    list_module_names,
)
from mcore_rl.jobs.parity.settings import CONTINUATION, ParitySettings, build_plan

SEQUENCES = [[5, 6, 7, 8], [9, 10, 11]]


def test_gap_counts_all_tokens_and_lists_the_worst():
    scores = Scores([[-1.0, -2.0, -3.0], [-4.0, -5.0]], [[1, 2, 3], [4, 5]])
    reference = Scores([[-1.0, -2.5, -3.0], [-4.0, -5.25]], [[1, 2, 0], [4, 5]])
    gap = compare_log_probs(SEQUENCES, scores, reference)
    assert (gap.num_tokens, gap.max_abs, gap.mean_abs) == (5, 0.5, 0.15)
    assert (gap.p50_abs, gap.p90_abs, gap.p99_abs) == (0.0, 0.5, 0.5)
    assert gap.argmax_agreement == 0.8
    first, second, *_ = gap.worst
    assert (first.prompt, first.position, first.token_id) == (0, 2, 7)
    assert (first.before_ids, first.log_prob, first.reference_log_prob) == ([5, 6], -2.0, -2.5)
    assert (second.prompt, second.position, second.token_id) == (1, 2, 11)


def test_gap_percentiles_equal_numpys():
    values = np.random.default_rng(0).normal(size=1000)
    zeros = [0] * 1000
    gap = compare_log_probs([[0] * 1001], Scores([values], [zeros]), Scores([zeros], [zeros]))
    for share, percentile in ((50, gap.p50_abs), (90, gap.p90_abs), (99, gap.p99_abs)):
        # the smallest difference that this share of the tokens does not exceed, or the next one
        below = (np.abs(values) <= percentile).mean()
        assert share / 100 <= below <= share / 100 + 0.002


def test_gap_compares_last_tokens_when_reference_is_shorter():
    scores = Scores([[-1.0, -2.0, -3.0], [-4.0, -5.0]], [[1, 2, 3], [4, 5]])
    reference = Scores([[-3.5], [-5.0]], [[3], [0]])
    gap = compare_log_probs(SEQUENCES, scores, reference)
    assert (gap.num_tokens, gap.max_abs, gap.argmax_agreement) == (2, 0.5, 0.5)
    assert (gap.worst[0].prompt, gap.worst[0].position) == (0, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gap_is_infinite_and_null_in_json_for_values_that_are_not_finite(value):
    gap = compare_log_probs([[1, 2]], Scores([[value]], [[0]]), Scores([[value]], [[0]]))
    assert gap.max_abs == gap.mean_abs == gap.p99_abs == math.inf
    parity_report = report(Pair(False, gap, "lm_head", {"lm_head": math.inf})).to_json()
    [pair] = json.loads(json.dumps(parity_report, allow_nan=False))["pairs"].values()
    assert pair["max_abs"] is None
    assert pair["first_differing_module"] == "lm_head"


def trace(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name.replace("__", "."): torch.tensor([row]) for name, row in values.items()}


def test_modules_are_compared_in_the_order_of_the_model():
    names = list_module_names(2)
    assert names[:3] == [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn",
    ]
    assert names[-3:] == ["model.layers.1.mlp", "model.norm", "lm_head"]
    scores = trace(lm_head=[1.0], model__norm=[3.0, 4.0], model__layers__1__mlp=[1.0])
    reference = trace(model__norm=[3.0, 4.1], lm_head=[2.0], model__embed_tokens=[1.0])
    differences = compare_traces(scores, reference, num_layers=2)
    assert list(differences) == ["model.norm", "lm_head"]
    assert differences["model.norm"] == pytest.approx(0.1 / math.hypot(3.0, 4.1), rel=1e-5)
    assert differences["lm_head"] == pytest.approx(0.5)


def test_the_first_module_over_the_threshold_of_the_dtype_is_named():
    differences = {"model.embed_tokens": 9e-5, "model.norm": 1e-3, "lm_head": 1.0}
    assert find_first_different(differences, "float32") == "model.norm"
    assert find_first_different(differences, "bfloat16") == "lm_head"
    assert find_first_different({"model.norm": 1e-7}, "float32") is None


@pytest.mark.parametrize("other", [[math.nan, 1.0], [1.0, 2.0, 3.0]])
def test_difference_is_infinite_for_another_shape_and_for_nan(other):
    differences = compare_traces(trace(lm_head=[1.0, 1.0]), trace(lm_head=other), num_layers=1)
    assert differences == {"lm_head": math.inf}


def report(pair: Pair, texts: dict[int, str] | None = None) -> ParityReport:
    return ParityReport(
        1e-4, None, Layout(tp=2), "float32", {"torch": "2"}, {"megatron~hf": pair}, texts or {}
    )


def printed(parity_report: ParityReport, width: int = 100) -> str:
    stream = io.StringIO()
    parity_report.print(Console(file=stream, width=width))
    return stream.getvalue()


def gap_of_one_token() -> Any:
    return compare_log_probs([[1, 2]], Scores([[-1.5]], [[2]]), Scores([[-1.0]], [[2]]))


def test_report_shows_worst_tokens_with_their_context():
    parity_report = report(Pair(True, gap_of_one_token()), {1: "[a]", 2: "b"})
    assert parity_report.passed
    text = printed(parity_report)
    assert "megatron~hf" in text
    assert "[a][b]" in text
    assert "-1.500000" in text
    [pair] = parity_report.to_json()["pairs"].values()
    assert pair["worst"][0]["text"] == "[a][b]"
    assert "first_differing_module" not in pair


def test_failed_pair_names_the_first_different_module_or_says_none():
    parts = {"model.norm": 0.25, "lm_head": 0.5}
    named = report(Pair(False, gap_of_one_token(), "model.norm", parts))
    assert not named.passed
    assert "megatron~hf: the first module that differs is model.norm (by 2.5e-01" in printed(named)
    none = report(Pair(False, gap_of_one_token(), None, {"model.norm": 1e-6}))
    assert "no module differs by more than 0.0001 of its output (the most is 1.0e-06)" in printed(
        none
    )
    assert none.to_json()["pairs"]["megatron~hf"]["first_differing_module"] is None


@pytest.mark.parametrize("width", [60, 80])
def test_report_keeps_its_words_whole_at(width):
    text = printed(report(Pair(True, gap_of_one_token()), {1: "a\n ", 2: "b"}), width)
    place = "prompt 0, position 1, token 2\n  Megatron -1.500000, other -1.000000"
    assert place in text and r"after: 'a\n [b]'" in text
    assert "passed" in text and "5.0e-01" in text and "…" not in text
    assert max(map(len, text.splitlines()[1:])) <= width


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkpoint with a tokenizer of three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=24, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def request(folder: Path, **options: Any) -> ParitySettings:
    return ParitySettings(
        **{"model": str(folder), "layout": Layout(), "against": ("hf",), **options}
    )


def test_sampled_prompts_are_deterministic_and_leave_room_for_a_continuation(model):
    drawn = build_plan(request(model)).prompts
    assert drawn == build_plan(request(model)).prompts
    assert len({len(ids) for ids in drawn}) == len(drawn) > 3
    assert max(map(len, drawn)) == 55
    plan = build_plan(request(model, against=("hf", "vllm")))
    assert max(map(len, plan.prompts)) == 64 - CONTINUATION - 1
    assert plan.server is not None
    assert plan.server.max_model_tokens == 64
    assert max(max(ids) for ids in drawn) < 40


def test_prompts_of_a_file_are_tokenised(model, tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("one two\n\ntwo two one\n")
    assert build_plan(request(model, prompts=str(text))).prompts == [[1, 2], [2, 2, 1]]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "two one", "answer": 3}\n{"prompt_ids": [39, 0]}\n')
    assert build_plan(request(model, prompts=str(lines))).prompts == [[2, 1], [39, 0]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, r"prompts.txt' does not exist"),
        ("\n \n", r"holds no prompt"),
        ('{"prompt_ids": [1, 2]}\nnot json', r"line 2 is not valid JSON"),
        ('{"prompt_ids": [1, 2]}\n[3]', r"line 2 needs an object with one of"),
        ('{"prompt": "one", "prompt_ids": [1]}', r"line 1 needs an object with one of"),
        ('{"prompt": 3}', r'line 1: "prompt" is 3; allowed: a text'),
        ('{"prompt_ids": [1, true]}', r'line 1: "prompt_ids" is no list of integers'),
        ('{"prompt_ids": []}', r"line 1: the prompt has no tokens"),
        ('\n{"prompt_ids": [1, 40]}', r"line 2: token id 40 .* allowed: 0 to 39"),
        ('{"prompt_ids": [1, -1]}', r"line 1: token id -1"),
        (json.dumps({"prompt_ids": [1] * 65}), r"has 65 tokens; allowed: up to 64"),
        ('{"prompt_ids": [1, 2]}\n{"prompt_ids": [1]}', r"prompt 1 has one token"),
    ],
)
def test_wrong_prompts_file_is_refused_with_its_line(model, tmp_path, lines, message):
    file = tmp_path / "prompts.txt"
    if lines is not None:
        file.write_text(lines)
    with pytest.raises(ConfigError, match=message):
        build_plan(request(model, prompts=str(file)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": ("sglang",)}, r"--against='sglang'; allowed: 'hf', 'vllm'"),
        ({"against": ()}, r"--against names no engine"),
        ({"dtype": "float16"}, r"--dtype='float16'; allowed"),
        ({"tolerance": -1.0}, r"--tolerance=-1.0; allowed"),
        ({"tolerance": math.nan}, r"--tolerance=nan; allowed"),
        ({"layout": Layout(tp=0)}, r"--layout.tp=0"),
        ({"layout": Layout(tp=4)}, r"--layout.tp=4 does not divide the model's 2 key/value heads"),
        ({"layout": Layout(pp=4)}, r"--layout"),
        ({"layout": Layout(tp=2, ep=2)}, r"--layout.ep=2: the model has no experts"),
        ({"model": "nowhere"}, r"--model='nowhere' does not exist"),
        ({"reference": "nowhere"}, r"--reference='nowhere' does not exist"),
        (
            {"against": ("vllm",), "vllm_tp": 3},
            r"--vllm-tp=3 does not divide",
        ),
        ({"against": ("vllm",), "vllm_tp": 0}, r"--vllm-tp=0"),
        ({"checkpoint": "nowhere"}, r"--checkpoint='nowhere' does not exist"),
        ({"prompts": "nowhere"}, r"--prompts='nowhere' does not exist"),
    ],
)
def test_a_wrong_option_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        build_plan(request(model, **options))


def test_a_reference_with_missing_tensors_is_refused(model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"--reference .*lacks tensor model.layers.2"):
        build_plan(request(model, reference=str(broken)))


def with_checkpoint_info(folder: Path, **facts: Any) -> str:
    (folder / "mcore_rl.json").write_text(json.dumps({"megatron_core": "0.16.1", **facts}))
    return str(folder)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"vocab_size": 41, "dtype": "float32"}, r"of another model: its vocab_size is 41"),
        ({"vocab_size": 40, "dtype": "bfloat16"}, r"--dtype=float32: .* written with 'bfloat16'"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(model, tmp_path, facts, message):
    with pytest.raises(ConfigError, match=message):
        build_plan(request(model, checkpoint=with_checkpoint_info(tmp_path, **facts)))


def test_a_checkpoint_brings_its_adapters(model, tmp_path):
    lora = {"rank": 4, "alpha": 8.0, "targets": ["linear_proj"]}
    path = with_checkpoint_info(tmp_path, vocab_size=40, dtype="float32", lora=lora)
    assert build_plan(request(model, checkpoint=path)).engine.engine.lora == LoRAConfig(**lora)


def test_bfloat16_has_tolerances_of_its_own(model):
    plan = build_plan(request(model, dtype="bfloat16"))
    assert (plan.tolerance, plan.mean_tolerance) == (2.0, 0.1)
    plan = build_plan(request(model))
    assert (plan.tolerance, plan.mean_tolerance) == (1e-4, None)
    assert build_plan(request(model, tolerance=0.0)).tolerance == 0.0


GOOD = ["--model", "here", "--layout", "tp=2,pp=2,last_stage_layers=1", "--against", "hf,vllm"]


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "verify", *arguments])
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: parity"),
        (["pairity"], "unknown command 'pairity'; did you mean parity?"),
        (["parity", "--layout", "tp=1", "--against", "hf"], "required: --model"),
        (["parity", *GOOD, "--tolerance", "small"], "invalid float value: 'small'"),
        (["parity", *GOOD, "--shards", "3"], "unknown option '--shards'; allowed: "),
        (["parity", *GOOD, "--layout", "tp=2,xp=3"], "--layout=tp=2,xp=3: 'xp' is unknown"),
        (["parity", *GOOD, "--layout", "tp=two"], "--layout=tp=two: 'tp=two'"),
        (["parity", *GOOD], "--model='here' does not exist"),
    ],
)
def test_a_wrong_option_ends_with_status_2_and_one_line(monkeypatch, capsys, arguments, message):
    assert status(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.startswith("mcore-rl verify: ")
    assert printed.err.count("\n") == 1


def test_the_help_tells_tolerances_and_exit_status(monkeypatch, capsys):
    assert status(monkeypatch, "parity", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "1e-4 in float32, 2.0 in bfloat16",
        "Exit status: 0",
        "--reference",
        "--checkpoint",
    ):
        assert part in text


@pytest.mark.parametrize(("passed", "expected"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_the_status_is_the_outcome_and_json_is_alone(
    monkeypatch, capsys, passed, expected, as_json
):
    received = []

    def fake(request: ParitySettings) -> ParityReport:
        received.append(request)
        gap = compare_log_probs([[1, 2]], Scores([[-1.5]], [[2]]), Scores([[-1.0]], [[2]]))
        pair = Pair(True, gap) if passed else Pair(False, gap, "lm_head", {"lm_head": 0.5})
        return ParityReport(1e-4, None, Layout(), "float32", {}, {"megatron~hf": pair}, {})

    monkeypatch.setattr(run, "run", fake)
    options = ["--json"] if as_json else []
    assert status(monkeypatch, "parity", *GOOD, "--tolerance", "0.5", *options) == expected
    assert received == [
        ParitySettings(
            "here", Layout(tp=2, pp=2, last_stage_layers=1), ("hf", "vllm"), tolerance=0.5
        )
    ]
    text = capsys.readouterr().out
    if as_json:
        assert json.loads(text)["passed"] is passed
    else:
        assert ("passed" if passed else "the first module that differs is lm_head") in text
