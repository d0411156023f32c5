"""Chat templates over several turns: codecs between messages and tokens, and their validation."""
