"""What ranks run to test multi-token prediction, and transformers' account of the same loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ranks
import tiny_families
import tiny_models
import torch

from mcore_rl.config.schema import Layout
from mcore_rl.data.batch import Batch

COEF = 0.3


def train(
    path: Path, layout: Layout, batch: Batch, coef: float, granularity: str = "none"
) -> ranks.Result:
    """Log-probs, the export, and two optimizer steps with the loss of the prediction layer."""
    spec = ranks.engine_spec(path, layout)
    spec.engine.mtp_loss_coef = coef
    spec.engine.recompute.granularity = granularity
    engine = ranks.started(spec)
    rows = ranks.share_of(engine, batch)
    mine = batch.take(rows)
    scored = engine.infer_batch(mine)
    found: ranks.Result = {"exported": dict(engine.get_per_tensor_param())}
    if scored is not None:
        columns = scored.jagged("log_probs")
        found["log_probs"] = {row: columns[place].tolist() for place, row in enumerate(rows)}
    found["steps"] = [engine.train_batch(mine, ranks.LOSS) for _ in range(2)]
    found["trained"] = dict(engine.get_per_tensor_param())
    return found


def reference_step(path: Path, batch: Batch) -> tuple[float, float]:
    """Loss of the prediction layer and gradient norm of the step, by autograd of transformers."""
    predictor = tiny_families.with_prediction_layer(path).float()
    main = predictor_main(predictor, path)
    mtp_loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        prompt, response = (batch.jagged(name)[row] for name in ("prompt_ids", "response_ids"))
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        weights = torch.from_numpy(batch.jagged("loss_weights")[row].copy()).double()
        log_probs = _predicted(main, predictor, ids)  # of tokens 2, 3, ...
        first = max(len(prompt), 2)  # the first response token that has a prediction
        mtp_loss = mtp_loss - (log_probs[first - 2 :] * weights[first - len(prompt) :]).sum()
    (COEF * mtp_loss).backward()
    tiny_models.reference_step(main, batch)  # adds the gradients of the policy's loss
    tensors = {id(p): p for model in (main, predictor) for p in model.parameters()}
    squares = sum(
        float(p.grad.double().square().sum())
        for p in tensors.values()
        if p.requires_grad and p.grad is not None
    )
    return mtp_loss.item(), squares**0.5


def predictor_main(predictor: Any, path: Path) -> Any:
    """The main model that shares embedding and head with the predictor."""
    import transformers

    main = transformers.AutoModelForCausalLM.from_pretrained(path).float()
    predictor.tie_with_main_model(main)
    return main


def _predicted(main: Any, predictor: Any, ids: torch.Tensor) -> torch.Tensor:
    """[length - 2] log-probs of tokens 2 and on, each by the state two places before it."""
    if ids.shape[1] < 3:
        return torch.zeros(0, dtype=torch.float64)
    states = main.get_decoder()(ids)[0]
    embedded = predictor.embed_tokens(ids[:, 1:])
    positions = torch.arange(embedded.shape[1])[None]
    [layer] = predictor.layers
    out = layer(
        embedded,
        states[:, :-1],
        position_embeddings=predictor.rotary_emb(embedded, position_ids=positions),
        attention_mask=None,
        position_ids=positions,
        past_key_values=None,
    )
    scores = predictor.shared_head(out)[0, :-1].double().log_softmax(-1)
    return scores.gather(1, ids[0, 2:, None])[:, 0]
