"""mcore-rl convert hf-to-mcore: a Hugging Face folder becomes a distributed checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rl.checkpoint.hf import CheckpointReader
from mcore_rl.checkpoint.hf_writer import copy_companions
from mcore_rl.checkpoint.stamp import write_stamp
from mcore_rl.checkpoint.stored import chunks
from mcore_rl.checkpoint.torch_dist_writer import Record, write_metadata
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.resolve_engine import resolve_layout, resolve_model_layout
from mcore_rl.config.schema import Layout
from mcore_rl.jobs.convert.dist_units import plan_units
from mcore_rl.jobs.convert.megatron_folder import COMPANIONS
from mcore_rl.jobs.convert.memory import WRITTEN_ENTRY_BYTES
from mcore_rl.jobs.convert.options import Resources
from mcore_rl.jobs.convert.plan import (
    Parameter,
    files_of,
    main_dtype,
    named_dtype,
    num_shards,
    short,
    versions,
)
from mcore_rl.jobs.convert.run import Conversion, run
from mcore_rl.models.base import model_sizes, padded_vocab_size
from mcore_rl.models.heads import model_config, model_weights
from mcore_rl.reshard.boxes import rows
from mcore_rl.reshard.rules import Weight, logical_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPARED_BYTES = 16 << 20  # of a tensor and its repeat, at a time
Dtypes = Mapping[str, torch.dtype]  # of the Hugging Face tensors, by name


def convert(
    model: Path, output: Path, layout: Layout, dtype: str | None, resources: Resources
) -> None:
    """Write the weights in `model` as a checkpoint that an engine of any layout loads.

    Raises:
        ConfigError, RunFailed: see plan and run.run.
    """
    run(plan(model, output, layout, dtype), resources)


def plan(model: Path, output: Path, layout: Layout, dtype: str | None) -> Conversion:
    """The conversion, after every check that can be made before weights are read.

    Raises:
        ConfigError: the folder is no checkpoint of a family, or the layout does not divide it.
    """
    resolve_layout("--layout", layout)
    reader = CheckpointReader(model)
    config = model_config(reader.config())
    resolve_model_layout("--layout", layout, model_sizes(config))
    padded = padded_vocab_size(config, layout.tp)
    weights = model_weights(config, padded)
    reader.check(logical_tensors(weights))
    shapes = reader.shapes()
    dtypes = {name: reader.dtype(name) for name in shapes}
    stored = {name: entry.dtype for name, _, entry in reader.stored()}
    most = main_dtype((dtypes[name], math.prod(shape)) for name, shape in shapes.items())
    target = _target(model, dtype, most)
    check_repeats(reader, weights)
    from mcore_rl.engine.megatron.blueprint import blueprint  # imports Megatron

    found = blueprint(config, padded)
    parameters = [
        Parameter(w, found.parameters[w.local_name()], torch.float32 if w.float32 else target)
        for w in weights
        if not w.replica
    ]
    num_chunks = sum(len(chunks(p.weight, num_shards(p.weight, layout))) for p in parameters)
    facts = {
        "layout": asdict(layout),
        "dtype": short(target),
        "vocab_size": config["vocab_size"],
        "optimizer": None,
        "lora": None,
        "hf_dtypes": _told(dtypes, most),
    }
    options = {"command": "hf-to-mcore", "--layout": asdict(layout), "--dtype": short(target)}
    return Conversion(
        output=output,
        fingerprint={**options, **versions(), **files_of("model", model)},
        units=tuple(plan_units(model, layout, parameters, found.objects, stored)),
        finish=partial(_finish, model=model, facts=facts),
        notes=_rounded(parameters, dtypes),
        finish_bytes=WRITTEN_ENTRY_BYTES * num_chunks,
        kept={"reader": reader},
    )


def _target(model: Path, asked: str | None, most: torch.dtype) -> torch.dtype:
    if asked is None and most not in DTYPES.values():
        raise ConfigError(
            f"the weights of {model} are in {short(most)}, which the engine does not compute in; "
            f"allowed: --dtype with {' or '.join(DTYPES)}"
        )
    return named_dtype("--dtype", DTYPES, asked or short(most))


def check_repeats(reader: CheckpointReader, weights: Sequence[Weight]) -> None:
    """Raise ConfigError for a copy of a tensor that differs from it: it would be lost."""
    for weight in weights:
        for tensor in weight.rule.tensors if not weight.replica else ():
            at_once = max(1, _COMPARED_BYTES // (4 * math.prod(tensor.shape[1:])))
            for copy in tensor.copies:
                for start in range(0, tensor.shape[0], at_once):
                    count = min(at_once, tensor.shape[0] - start)
                    a, b = (reader.read(rows(t, start, count, 0)) for t in (tensor, copy))
                    if a.dtype != b.dtype or not torch.equal(a, b):
                        raise ConfigError(
                            f"checkpoint {reader.path}: {copy.name} should repeat {tensor.name}, "
                            "and differs from it"
                        )


def _told(dtypes: Dtypes, most: torch.dtype) -> dict[str, Any]:
    """For the stamp: the dtype of most tensors, and of the others by name."""
    others = {name: short(dtype) for name, dtype in sorted(dtypes.items()) if dtype != most}
    return {"most": short(most), "others": others}


def _rounded(parameters: Sequence[Parameter], dtypes: Dtypes) -> tuple[str, ...]:
    """A line on tensors that are wider than what they become."""
    names = [
        tensor.name
        for parameter in parameters
        for tensor in parameter.weight.rule.tensors
        if torch.promote_types(dtypes[tensor.name], parameter.dtype) != parameter.dtype
    ]
    if not names:
        return ()
    return (f"{len(names)} tensors are rounded to a narrower dtype, {names[0]} the first",)


def _finish(folder: Path, results: list[Any], *, model: Path, facts: Mapping[str, Any]) -> None:
    write_metadata(folder, (Record(**values) for file in results for values in file))
    (folder / COMPANIONS).mkdir(exist_ok=True)
    copy_companions(model, folder / COMPANIONS, DTYPES[facts["dtype"]])
    write_stamp(folder, facts)
