"""An agent that knows OpenAI's package and nothing of ours; a job names it by import path."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

RECORDS = "OPENAI_AGENT_RECORDS"  # the variable with the folder of what it got, a file each time


async def asks_twice(task: Any, base_url: str, api_key: str) -> None:
    """Ask again after the first answer; rewards are lengths, so that they differ."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as ai:
        messages: list[Any] = [{"role": m.role, "content": m.content} for m in task.messages]
        seen = []
        for _ in range(2):
            answer = await ai.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=12,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            [choice] = answer.choices
            messages += [choice.message, {"role": "user", "content": "1+1?"}]
            seen.append(
                {
                    "prompt": answer.model_extra["prompt_token_ids"],
                    "new": choice.model_extra["token_ids"],
                    "log_probs": [token.logprob for token in choice.logprobs.content],
                }
            )
        reply = choice.message.content or ""
        reward = len(reply) % 5 + (str(task.fields["answer"]) in reply)
        await ai.post("/sessions/reward", body={"reward": reward}, cast_to=object)
    record = {"reward": reward, "turns": seen}
    Path(os.environ[RECORDS], f"{uuid.uuid4()}.json").write_text(json.dumps(record))
