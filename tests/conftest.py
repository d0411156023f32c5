"""Settings of every test run, made before torch, Ray or vLLM is imported."""

import gc
import os
import signal

from hypothesis import settings

from mcore_rl.observability.garbage import leave_garbage_at_exit

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

leave_garbage_at_exit()
gc.disable()  # until everything is imported

# A shell's background job ignores it, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; no deadline, since the machine may be shared.
settings.register_profile("mcore_rl", derandomize=True, deadline=None)
settings.load_profile("mcore_rl")


def pytest_collection_finish() -> None:
    """Hide what has been imported from the garbage collector, which would look at it for ever."""
    gc.freeze()
    gc.enable()
