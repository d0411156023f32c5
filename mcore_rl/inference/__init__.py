"""Generation servers behind `GenerationServer`: vLLM, SGLang."""
