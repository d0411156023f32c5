"""The rule algebra of shards: which rank holds which bytes, and plans that move them."""
