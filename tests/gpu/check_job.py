"""The quickstart on one GPU: `mcore-rl rl recipe=quickstart_one_gpu`, actor and server in turns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure


def check(arguments: argparse.Namespace) -> measure.Result:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        settings = [f"output_dir={output}", f"trainer.num_steps={2 if arguments.dry else 20}"]
        if arguments.dry:
            settings += ["warm_start.num_steps=20", "trainer.eval_samples=32"]
        command = "import sys; from mcore_rl.cli.main import main; sys.exit(main())"
        start = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-c", command, "rl", "recipe=quickstart_one_gpu", *settings],
            cwd=measure.ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        print(run.stdout[-4000:], run.stderr[-4000:], sep="\n", file=sys.stderr)
        if run.returncode:
            for name in ("error.txt", "logs/actor-0.log", "logs/rollout-0.log"):
                if (output / name).exists():
                    print(name, (output / name).read_text()[-4000:], sep="\n", file=sys.stderr)
            raise SystemExit(f"the job ended with status {run.returncode}")
        lines = (output / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        summary = json.loads((output / "summary.json").read_text())
        return {"job_s": seconds, "summary": summary, "first": steps[0], "last": steps[-1]}


if __name__ == "__main__":
    measure.report(check)
