"""A profile of a training step: its trace has the kernels of the GPU, its snapshot the memory."""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from pathlib import Path

import measure
import tiny_models
from check_engine import LOSS, started_engine

from mcore_rl.engine.profiling import StepProfiler


def check(arguments: argparse.Namespace) -> measure.Result:
    batch = tiny_models.make_batch()
    measure.join_alone()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_models.save("qwen3_moe", Path(folder))
        engine = started_engine(path, "bfloat16", "auto")
        engine.train_batch(batch, LOSS)
        output = Path(folder, "profile", "actor-0")
        profiler = StepProfiler(output, 2, 2**30, memory=measure.has_gpu()).start()
        engine.train_batch(batch, LOSS)
        start = time.perf_counter()
        problems = profiler.stop()
        seconds = time.perf_counter() - start
        engine.close()
        assert not problems, problems
        traces = list(output.parent.glob("*.gz"))
        assert len(traces) == 1, traces
        with gzip.open(traces[0], "rt") as trace:
            events = json.load(trace)["traceEvents"]
        sizes = {path.name: path.stat().st_size for path in output.parent.iterdir()}
    kernels = sum(event.get("cat") == "kernel" for event in events)
    result = {"write_s": seconds, "bytes": sizes, "events": len(events), "kernels": kernels}
    if measure.has_gpu():
        assert kernels > 100 and len(sizes) == 2, result
    return result


if __name__ == "__main__":
    measure.report(check)
