"""The Megatron-core engine."""
