"""Programs of a model, contained."""
