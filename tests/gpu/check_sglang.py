"""Servers of SGLang keep the contract of rollout backends: `mcore_rl.testing.check_server`.

Two layers of Qwen3-8B with random weights in bfloat16. SGLANG_PYTHON names the interpreter of an
environment with sglang, if this one has none. A dry run takes a stand-in for SGLang.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import measure

from mcore_rl.config.schema import RolloutConfig, SGLangConfig
from mcore_rl.inference.sglang.server import SGLangServer
from mcore_rl.testing import check_server

TOLERANCE = 0.15  # nats, of log-probs in bfloat16 from those in float32


def check(arguments: argparse.Namespace) -> measure.Result:
    with tempfile.TemporaryDirectory() as folder:
        path = measure.make_checkpoint(measure.qwen3_8b(2, arguments.dry), Path(folder, "model"))
        python, names = os.environ.get("SGLANG_PYTHON", ""), []
        if arguments.dry:
            from tests.sglang_server import write_python

            python, names = str(write_python(Path(folder, "python"))), ["responses", "close"]
        settings = RolloutConfig(
            max_num_seqs=64, kv_cache_bytes=1 << 30, sglang=SGLangConfig(python=python)
        )
        if not arguments.dry:
            SGLangServer.check_device(settings, "rollout", "cuda")
        start = time.perf_counter()
        names = check_server(
            SGLangServer, path, dtype="float32" if arguments.dry else "bfloat16",
            tolerance=TOLERANCE, settings=settings, timeout_s=540.0, only=names,
        )  # fmt: skip
    return {"checks": names, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    measure.report(check)
