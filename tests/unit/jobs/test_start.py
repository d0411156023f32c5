"""What a job need not wait for before it starts."""

import subprocess
import sys

_SLOW = {"matplotlib", "megatron.core", "vllm"}  # for the picture at the end, for ranks and servers


def test_a_job_starts_without_what_its_driver_has_no_use_for() -> None:
    program = f"import sys, mcore_rl.jobs.rl; print(sorted({_SLOW} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("[]\n", 0), found.stderr
