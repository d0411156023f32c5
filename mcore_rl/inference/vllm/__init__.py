"""vLLM as a rollout backend: the server, its workers, new weights, patches."""
