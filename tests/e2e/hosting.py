"""How a process that outlives its vLLM servers has them: one after the other, at less expense."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_IMPORTED = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "mcore_rl.rollout.vllm_worker"]


@contextmanager
def hosting() -> Iterator[None]:
    """What a server changes in its process is undone; its engine, of one worker, is forked.

    vLLM spawns an engine for each server, and importing vLLM is most of what a small one does. Here
    one process imports it and engines are forked from that, with the environment of the first.
    Jobs, and servers in processes of their own, start engines as users do.
    """
    with mock.patch.dict(os.environ):
        from vllm import envs

        multiprocessing.set_forkserver_preload(_IMPORTED)
        method = {"VLLM_WORKER_MULTIPROC_METHOD": lambda: "forkserver"}
        with mock.patch.dict(envs.environment_variables, method):
            yield
