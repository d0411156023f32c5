"""Hugging Face, Megatron and PEFT checkpoints on disk, and the training checkpoints of a run."""
