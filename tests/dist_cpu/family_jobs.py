"""What ranks run to compare a family's weights and rotary embeddings with other implementations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ranks
import torch
import transformers
from safetensors.torch import load_file

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch
from mcore_rl.engine.megatron import device
from mcore_rl.engine.megatron.engine import MegatronEngine
from mcore_rl.models.base import family_of, read_config


def parity(path: Path, layout: Layout, batch: Batch) -> ranks.Result:
    """Scores, export and training steps, and what only an engine that has just loaded can tell."""
    loaded = ranks.started(replace(ranks.engine_spec(path, layout), total_steps=0))
    fresh = {"mbridge": by_mbridge(loaded, path), "rotary": rotary(loaded.chunks[0])}
    return ranks.parity(path, layout, batch) | fresh


def by_mbridge(engine: MegatronEngine, path: Path) -> dict[str, list[torch.Tensor]]:
    """For each parameter of this rank: [ours, mbridge's from the same checkpoint].

    mbridge converts and splits with its own code.
    """
    from mbridge.core.parallel_states import ParallelStates

    from mcore_rl.engine.megatron.weights import local_tensors

    [model] = engine.chunks
    hf_config = transformers.AutoConfig.from_pretrained(path)
    if getattr(hf_config, "head_dim", None) is None:
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    bridge = mbridge_for(hf_config.model_type, hf_config, model.config)
    bridge.mpu = ParallelStates.get_parallel_state()
    bridge.vocab_size = hf_config.vocab_size
    bridge.make_vocab_size_divisible_by = engine.layout.tp
    bridge.padded_vocab_size = -(-hf_config.vocab_size // engine.layout.tp) * engine.layout.tp
    checkpoint = load_file(path / "model.safetensors")
    names = bridge._weight_name_mapping_mcore_local_to_global(model)
    found = {}
    for local, ours in local_tensors(model).items():
        sources = bridge._weight_name_mapping_mcore_to_hf(names[local])
        whole = bridge._weight_to_mcore_format(local, [checkpoint[name] for name in sources])
        expert = ".mlp.experts.linear_fc" in local
        size = bridge.mpu.etp_size if expert else bridge.mpu.tp_size
        rank = bridge.mpu.etp_rank if expert else bridge.mpu.tp_rank
        theirs = bridge._weight_split_across_tp(local, whole, ours, size)[rank]
        found[local] = [ours.detach().clone(), theirs.clone()]
    return found


def mbridge_for(model_type: str, hf_config: Any, config: Any) -> Any:
    """mbridge's converter, without its constructor.

    That builds a Megatron config from attributes that the configs of transformers 5 no longer have.
    """
    from mbridge.core.bridge import _MODEL_REGISTRY

    kind: Any = _MODEL_REGISTRY[model_type]
    bridge = kind.__new__(kind)
    bridge._DIRECT_MAPPING = dict(kind._DIRECT_MAPPING)  # a tied head would stay in the class
    bridge.hf_config, bridge.config, bridge.dtype = hf_config, config, torch.float32
    bridge._adjust_mapping_for_shared_weights()
    return bridge


def names_by_mbridge(path: Path) -> ranks.Result:
    """Each parameter of a model with a prediction layer: [our, mbridge's] checkpoint tensors.

    With 61 layers, the only number for which mbridge knows a prediction layer of DeepSeek-V3.
    """
    device.install(1)
    config = {**read_config(path), "num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    mcore = SimpleNamespace(num_layers=61, mtp_num_layers=1)
    bridge = mbridge_for(config["model_type"], SimpleNamespace(), mcore)
    weights = family_of(config).weights(config, config["vocab_size"])
    return {
        weight.local_name(): [
            [tensor.name for tensor in weight.rule.tensors],
            bridge._weight_name_mapping_mcore_to_hf(weight.local_name()),
        ]
        for weight in weights
        if not weight.replica
    }


def bfloat16(path: Path, layout: Layout) -> ranks.Result:
    """What a model in bfloat16 exports."""
    spec = replace(ranks.engine_spec(path, layout, "bfloat16"), total_steps=0)
    return dict(ranks.started(spec).get_per_tensor_param())


def rotary(model: Any) -> dict[str, Any]:
    """Angles a position by rotary frequency, and the factor on cosine and sine."""
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is None:  # latent attention has one in each layer
        embedding = model.decoder.layers[0].self_attention.rotary_pos_emb
    angles, factor = embedding.get_emb(2), 1.0
    if isinstance(angles, tuple):
        angles, factor = angles
    return {"angles": angles[1, 0, 0].chunk(2)[0].clone(), "factor": float(factor)}
