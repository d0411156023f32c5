"""What "cuda" means in a process of the CPU lane; in one of its own, which stays in that lane."""

import subprocess
import sys

_PROGRAM = """
import torch
from mcore_rl.engine.megatron import device

device.install(1, on_cpu=True)
assert device.device_name() == "cpu"
for made in (
    torch.tensor([1.0], device="cuda"),
    torch.zeros(2, device=torch.device("cuda", 0)),
    torch.empty(2, device=torch.cuda.current_device(), pin_memory=True),
    torch.ones(2).cuda(),
):
    assert made.device.type == "cpu"
    assert made.type() == "torch.cuda.FloatTensor"
assert torch.ones(2).type(torch.float64).dtype == torch.float64
with device.without_memory():
    assert torch.arange(3, device="cuda").device.type == "meta"
    assert torch.arange(3).device.type == "cpu"
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
try:
    torch.rand(2, device="cuda:7")
except (AssertionError, RuntimeError) as error:
    print(error)
"""


def test_cuda_means_the_cpu_and_what_is_not_replaced_is_an_error_of_torch():
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "CUDA" in ended.stdout
