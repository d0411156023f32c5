"""Calls of a transport on a torch process group: NCCL's arguments, on gloo's binding."""

import pytest
import torch
import torch.distributed as dist

from mcore_rl.reshard.executor import GroupTransport, ReshardError, Transfer

CPU = torch.device("cpu")


class NamedNCCL(dist.ProcessGroupGloo):
    """A bare group that answers as NCCL's does; its operations are bound by torch as NCCL's are."""

    def name(self) -> str:
        return "nccl"


def message() -> Transfer:
    return Transfer(peer=0, data=torch.zeros(8, dtype=torch.uint8), bucket=3, is_send=True)


def test_messages_of_a_bare_group_are_put_together_by_its_own_operations():
    transport = GroupTransport(NamedNCCL(dist.HashStore(), 0, 1), timeout_s=5, device=CPU)
    # Gloo knows the operation, and cannot do it.
    with pytest.raises(ReshardError, match=r"bucket 3, 8 bytes: .* not implement startCoalescing"):
        transport.start([message()])


def test_messages_of_a_process_group_are_put_together_by_the_backend_of_their_device(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        monkeypatch.setattr(type(group), "name", lambda _: "nccl")
        with pytest.raises(ReshardError, match="not implement startCoalescing"):
            GroupTransport(group, timeout_s=5, device=CPU).start([message()])
    finally:
        dist.destroy_process_group()


def test_nccl_gets_the_device_of_the_rank_and_does_not_block_the_host():
    calls = []

    class Work:
        def wait(self, *timeout) -> None:
            calls.append(("wait", *timeout))

    class Recorded(NamedNCCL):
        def barrier(self, options=None):
            calls.append(("barrier", *options.device_ids))
            return Work()

    group = Recorded(dist.HashStore(), 0, 1)
    transport = GroupTransport(group, timeout_s=5, device=torch.device("cuda", 3))
    transport.wait(message(), Work())
    assert calls == [("barrier", 3), ("wait",), ("wait",)]
