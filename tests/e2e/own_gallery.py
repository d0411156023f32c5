"""An environment of a user's own that answers with pictures."""

from __future__ import annotations

import io

from PIL import Image

from mcore_rl.agents.chat_template.codec import ChatMessage
from mcore_rl.agents.environments.base import EnvironmentStep


class Gallery:
    """Answers each turn with another picture; a turn earns its share of letters that are red's."""

    tools = ()

    def __init__(self, fields) -> None:
        self._num_turns = 0

    async def reset(self):
        return []

    async def step(self, turn):
        self._num_turns += 1
        picture = io.BytesIO()
        Image.new("RGB", (32, 32), ("red", "blue")[self._num_turns % 2]).save(picture, "PNG")
        message = ChatMessage("user", "And <image>?", images=(picture.getvalue(),))
        reward = float("R" in turn.content)
        return EnvironmentStep((message,), reward=reward, is_done=self._num_turns == 3)

    async def close(self) -> None: ...
