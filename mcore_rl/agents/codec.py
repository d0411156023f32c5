"""Deprecated import path of `mcore_rl.agents.chat_template.codec`; removed in the next release."""

import warnings

from mcore_rl.agents.chat_template.codec import (
    ChatMessage,
    ContextFullError,
    ParsedCall,
    ParsedTurn,
    ToolCall,
    ToolSpec,
)

__all__ = ["ChatMessage", "ContextFullError", "ParsedCall", "ParsedTurn", "ToolCall", "ToolSpec"]

warnings.warn(
    "mcore_rl.agents.codec is now mcore_rl.agents.chat_template.codec",
    FutureWarning,
    stacklevel=2,
)
