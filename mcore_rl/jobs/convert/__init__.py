"""`mcore-rl convert`: checkpoints between Hugging Face's format and Megatron's."""
