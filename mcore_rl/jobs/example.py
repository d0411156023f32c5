"""What transformers makes of the export of a run."""

from __future__ import annotations

from mcore_rl.jobs.output import CHECKPOINT, RunOutput
from mcore_rl.jobs.preflight import Inputs


def record_example(inputs: Inputs, output: RunOutput) -> None:
    """Load the export with transformers and let it answer the first held-out prompt."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(output.folder / CHECKPOINT, local_files_only=True)
    first = next(iter(inputs.tests.values()))[0]
    prompt_ids = torch.tensor([first.prompt_ids])
    ids = model.generate(prompt_ids, do_sample=False, max_new_tokens=64)[0].tolist()
    output.record_result(
        "example",
        {
            "prompt": inputs.tokenizer.decode(first.prompt_ids),
            "response": inputs.tokenizer.decode(ids[prompt_ids.shape[1] :]),
            "answer": first.fields["answer"],
        },
    )
