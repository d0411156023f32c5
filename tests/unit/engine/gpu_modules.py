"""A model on a GPU without Transformer Engine, where there is neither: what test_device.py runs.

torch's meta device stands for the GPU: a tensor of the host among its tensors is an error there.
Nothing of CPUs is installed. A model with experts is only built: its dispatcher reads on
the host how many tokens each gets. Argument: a name of tiny_models.configs().
"""

import contextlib
import os
import sys
from pathlib import Path

import torch

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would be for a GPU
GPU = torch.device("meta")
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda _: None
torch.cuda.current_device = lambda: GPU
torch.cuda.manual_seed = lambda _: None
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to(GPU)

from mcore_rl.engine.megatron import device  # noqa: E402

factory = torch.empty
device.install(1)
assert device.get_device_type() == "cuda" and torch.empty is factory

from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402

from mcore_rl.engine.megatron import layers  # noqa: E402
from mcore_rl.engine.megatron.conversion import build_single_rank_model  # noqa: E402
from mcore_rl.engine.megatron.packing import PackedSequences  # noqa: E402
from mcore_rl.models.heads import get_model_config  # noqa: E402
from mcore_rl.parallel.groups import use_single_rank_groups  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "dist_cpu"))
import tiny_models  # noqa: E402


def main(name: str) -> None:
    assert gpt_layer_specs.TESpecProvider is layers.TorchSpecProvider
    torch.cuda.Stream = type("Stream", (), {})
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # no generator is there
    of_transformers = tiny_models.configs()[name]
    config = of_transformers.to_dict()
    architecture = type(of_transformers).__name__.replace("Config", "ForCausalLM")
    config["architectures"] = [architecture]
    starts = torch.tensor([0, 5, 9, 21], dtype=torch.int32, device=GPU)
    packed = PackedSequences(
        "thd", starts, starts, max_seqlen_q=12, max_seqlen_kv=12, lengths=(5, 4, 12)
    )
    with use_single_rank_groups():
        model = build_single_rank_model(get_model_config(config), config["vocab_size"]).train()
        assert not device.build_config_flags()["apply_rope_fusion"]
        experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
        if experts:
            assert {parameter.device for parameter in model.parameters()} == {GPU}
            print("experts", len(experts))
            return
        ids = torch.zeros(1, 21, dtype=torch.long, device=GPU)
        states = model(ids, ids, attention_mask=None, packed_seq_params=packed)
        assert states.shape == (21, 1, config["hidden_size"]) and states.dtype == torch.bfloat16
        states.float().sum().backward()
    devices = {parameter.device for parameter in model.parameters()}
    devices |= {p.grad.device for p in model.parameters() if p.grad is not None}
    assert devices == {GPU}
    print("layers", sum(p.grad is not None for p in model.parameters()))


main(sys.argv[1])
