"""One rank of the FSDP2 engine against transformers and torch alone, family by family.

Scores, three AdamW steps, of which the last is after a stay on the host, a save and a load. The
reference runs on the CPU in float32, one sample at a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure
import ranks
import test_fsdp_engine as cases
import test_fsdp_images as images
import tiny_models
import torch
import torch_reference
import transformers

from mcore_rl.config.schema import FSDPConfig, Layout, RecomputeConfig
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.engine.base import create_engine
from tests import tiny_vision

CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3, recomputed": {"recompute": RecomputeConfig(granularity="full")},
    "qwen3, on the host": {"fsdp": FSDPConfig(cpu_offload=True)},
    "qwen3_moe": {},
    "deepseek_v3": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "cohere2": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
}
# Limits on mean gaps of log-probs, and on relative differences of gradient norms.
LIMITS = {"float32": (2e-5, 1e-3), "bfloat16": (0.1, 0.2)}


def save_model(kind: str, path: Path) -> None:
    if kind in tiny_vision.KINDS:
        tiny_vision.save(path, kind)
        return
    config = transformers.AutoConfig.for_model(kind, **(cases._SHAPE | cases.FAMILIES[kind]))
    tiny_models.build_from(config).save_pretrained(path)


def start(path: Path, folder: str, changes: dict[str, Any], dtype: str) -> Any:
    spec = replace(cases.build_spec(path, Layout(), changes, dtype), images_folder=folder)
    engine = create_engine("language_model", spec)
    engine.initialize()
    return engine


def compare(kind: str, changes: dict[str, Any], dtype: str, folder: Path) -> measure.Result:
    began = time.perf_counter()
    path = folder / "model"
    save_model(kind, path)
    batch, store, pixels = tiny_models.make_batch(), "", None
    if tokens := ImageTokens.load(path):
        opened = ImageStore.open(folder / "images")
        for image in images.IMAGES.values():
            opened.add(image)
        batch, store = images.make_batch(tokens), str(opened.folder)
        pixels = {i.digest: tokens.compute_pixels(i.content) for i in images.IMAGES.values()}
    engine = start(path, store, changes, dtype)
    assert engine.device.type == measure.device().type, engine.device
    scores = torch.from_numpy(engine.infer_batch(batch).jagged("log_probs").values.copy())
    norms = [engine.train_batch(batch, ranks.LOSS)["grad_norm"] for _ in range(2)]
    engine.to("host")
    if measure.has_gpu():
        tensors = engine.list_tensors("parameters") + engine.list_tensors("optimizer state")
        on_device = sum(t.untyped_storage().nbytes() for t in tensors if t.is_cuda)
        assert not on_device, f"{kind}: {on_device} bytes are on the device"
    engine.to("device")
    engine.save_checkpoint(folder / "saved")
    norms.append(engine.train_batch(batch, ranks.LOSS)["grad_norm"])
    weights = {name: tensor.cpu().float() for name, tensor in engine.get_per_tensor_param()}
    settings = engine.spec.engine.optimizer
    engine.close()
    resumed = start(path, store, changes, dtype)
    resumed.load_checkpoint(folder / "saved")
    again = resumed.train_batch(batch, ranks.LOSS)["grad_norm"]
    resumed.close()

    model = torch_reference.load(path)
    with torch.no_grad():
        reference = torch_reference.score(model, batch, 1.0, pixels)["log_probs"]
    expected, trained = torch_reference.train(path, batch, settings, 3, pixels)
    gaps = (scores - torch.cat(reference)).abs()
    weight_gaps = torch.cat([(t - trained[n].float()).abs().flatten() for n, t in weights.items()])
    result = {
        "log_prob_gap": float(gaps.max()),
        "log_prob_gap_mean": float(gaps.mean()),
        "norms": norms,
        "expected_norms": expected,
        "weight_gap": float(weight_gaps.max()),
        "weight_gap_mean": float(weight_gaps.mean()),
        "resume_difference": abs(again - norms[2]) / norms[2],
        "seconds": round(time.perf_counter() - began, 1),
    }
    limit, norm_limit = LIMITS[dtype]
    result["is_within"] = (
        result["log_prob_gap_mean"] < limit
        and all(abs(a - b) < norm_limit * b for a, b in zip(norms, expected, strict=True))
        and result["resume_difference"] < norm_limit
        and (dtype != "float32" or result["weight_gap"] < settings.lr)
    )
    return result


def check(arguments: argparse.Namespace) -> measure.Result:
    measure.join_alone()
    results: measure.Result = {}
    names = ("qwen3_moe", "qwen3_vl") if arguments.dry else tuple(CHANGES)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                kind = name.split(",")[0]
                results[name] = compare(kind, CHANGES[name], arguments.case, Path(folder))
            except (
                ArithmeticError,
                AssertionError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ):
                results[name] = {"is_within": False, "error": traceback.format_exc()[-1500:]}
        print(name, results[name], flush=True)
    bad = [name for name, result in results.items() if not result["is_within"]]
    if bad:
        raise SystemExit(f"beyond the limits: {', '.join(bad)}: {json.dumps(results)}")
    return results


if __name__ == "__main__":
    measure.report(check, "float32", "bfloat16")
