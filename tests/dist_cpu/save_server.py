"""Starts runs that do nothing but train and save, for test_save_kill.py.

It has imported all that they need, so that starting one takes no time. A line on stdin is a JSON
list: model folder, checkpoint folder, number of ranks, whether to save in the background. When the
ranks have loaded the newest checkpoint, a line on stdout has the id of their session, the step that
they go on from, and their process ids. A run whose weights or moments are not those that were saved
ends with a line of "null".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import optimizer_jobs as jobs
import ranks
import tiny_models

from mcore_rl.checkpoint.run_checkpoints import ACTOR, RunCheckpoints, find_newest_checkpoint
from mcore_rl.config.schema import Layout
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.parallel.rendezvous import RendezvousServer


def digests(engine: MegatronEngine) -> list[int]:
    """Return checksums of weights and optimizer state, by rank."""
    crc32 = 0
    for adam in (part.optimizer for part in engine.optimizer.chained_optimizers):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            states = adam.state[parameter]
            for tensor in (parameter, *(states[name] for name in sorted(states))):
                crc32 = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), crc32)
    crc32_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(crc32_by_rank, crc32)
    return crc32_by_rank


def save_for_ever(model: Path, folder: Path, in_background: bool, report_fd: int) -> None:
    layout = Layout(dp=int(os.environ["WORLD_SIZE"]))
    engine = jobs.engine_of(model, layout, distributed=layout.dp > 1)
    share = jobs.take_share(engine, tiny_models.make_batch())
    is_first, checkpoints = dist.get_rank() == 0, RunCheckpoints(folder)
    newest = find_newest_checkpoint(folder, lambda warning: None)
    step = 0
    if newest is not None:
        engine.load_checkpoint(newest.path / ACTOR)
        step = newest.step
        assert digests(engine) == newest.state["digests"]
    os.write(report_fd, f"{step} {os.getpid()}\n".encode())
    while True:
        step += 1
        engine.train_batch(share, ranks.LOSS)
        state = {"digests": digests(engine)}
        if is_first:
            checkpoints.begin(step)
        dist.barrier()
        path = folder / f".step_{step:06d}.partial" / ACTOR
        if in_background:
            saving = engine.begin_save(path)
            engine.train_batch(share, ranks.LOSS)  # the copy does not change with it
            saving.finish(60)
        else:
            engine.save_checkpoint(path)
        if is_first:
            checkpoints.publish(step, state)
            checkpoints.prune(step, 2)
        dist.barrier()


def start(model: Path, folder: Path, num_ranks: int, in_background: bool) -> list[int] | None:
    """Session, step, and process ids of the ranks."""
    read, write = os.pipe()
    leader = os.fork()
    if not leader:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        endpoint = RendezvousServer("127.0.0.1").endpoint
        for rank in range(num_ranks):
            if not os.fork():
                ranks._set_environment(rank, (num_ranks, endpoint))
                try:
                    save_for_ever(model, folder, in_background, write)
                except BaseException:  # noqa: BLE001 - it ends here, whatever it is
                    traceback.print_exc()
                finally:
                    os._exit(1)
        os.close(write)
        for _ in range(num_ranks):
            os.wait()
        os._exit(1)
    os.close(write)
    with os.fdopen(read) as lines:
        words = [next(lines, "").split() for _ in range(num_ranks)]
    return None if [] in words else [leader, int(words[0][0]), *(int(w[1]) for w in words)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks._import_engine()
    print("ready", flush=True)
    for line in sys.stdin:
        model, folder, num_ranks, in_background = json.loads(line)
        print(json.dumps(start(Path(model), Path(folder), num_ranks, in_background)), flush=True)
