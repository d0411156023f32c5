"""Settings of every test run, made before torch, Ray or vLLM is imported."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, without its warning
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# The same examples in every run; no deadline, since the machine may be shared.
settings.register_profile("mcore_rl", derandomize=True, deadline=None)
settings.load_profile("mcore_rl")

TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one worker takes all tests of a folder whose tests share processes."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in ("dist_cpu", "e2e"):
            item.add_marker(pytest.mark.xdist_group(folder))
