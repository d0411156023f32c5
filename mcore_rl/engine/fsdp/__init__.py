"""The FSDP2 engine: models of transformers, sharded by rows."""
