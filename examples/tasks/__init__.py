"""Toy tasks: each makes a tokenizer, a small model and data, for recipes that learn in minutes."""
