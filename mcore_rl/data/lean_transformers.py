"""transformers without what only its models need."""

from __future__ import annotations

import sys
from typing import Any

from mcore_rl.observability.process import exempt_imports_from_gc

_AUTO = "transformers.models.auto.auto_factory"


def import_transformers() -> Any:
    """Import transformers for tokenizers and configs; return the package.

    Either reaches auto_factory.py, which imports all of generation, and with it torch's compiler
    and its distributed tensors, for a mixin of models whose code comes with a checkpoint
    (auto_factory.py:41 of transformers 5.19). That is 1.5 of 3.5 CPU seconds. The mixin is imported
    when it is used.
    """
    with exempt_imports_from_gc():  # slow to import
        import transformers

        if _AUTO not in sys.modules:
            _import_without_generation()
    return transformers


def _import_without_generation() -> None:
    from transformers import generation

    generation.GenerationMixin = type("GenerationMixin", (), {})
    try:
        from transformers.models.auto import auto_factory
    finally:
        del generation.GenerationMixin  # what imports it next gets the real one
    upstream = auto_factory.add_generation_mixin_to_remote_model

    def add_generation_mixin_to_remote_model(model_class: Any) -> Any:
        auto_factory.GenerationMixin = generation.GenerationMixin
        return upstream(model_class)

    auto_factory.add_generation_mixin_to_remote_model = add_generation_mixin_to_remote_model
