"""Images of requests, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mcore_rl.config.errors import StateError
from mcore_rl.data.image_files import decode_image
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.models.base import get_frozen_prefixes, read_config

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput


class RequestImages:
    """The images that requests of a server name.

    Args:
        model_path: Checkpoint, which has the image processor if the model takes images.
        folder: Folder of the ImageStore; "": there is none.
    """

    def __init__(self, model_path: str, folder: str) -> None:
        self._tokens = ImageTokens.load(model_path)
        self._has_tower = bool(get_frozen_prefixes(read_config(model_path)))
        self._store = ImageStore.open(folder) if folder else None

    @property
    def token_ids(self) -> frozenset[int]:
        """Tokens that stand for images and videos; none if the model takes no images."""
        return frozenset() if self._tokens is None else self._tokens.special_ids

    def build_arguments(self, max_images: int) -> dict[str, Any]:
        """Return vLLM's engine arguments; a tower that is not trained is not loaded either."""
        if self._tokens is None:
            return {"language_model_only": True} if self._has_tower else {}
        return {"limit_mm_per_prompt": {"image": max_images, "video": 0}}

    def add(self, prompt: TokensInput, images: Sequence[str]) -> Any:
        """Return a prompt with its images, and one token for each, which vLLM repeats.

        Raises:
            StateError: the server takes no images.
        """
        if not images:
            return prompt
        if self._store is None or self._tokens is None:
            raise StateError(
                "the server takes no images: it was started without images_folder, or its model "
                "takes none"
            )
        return {
            "prompt_token_ids": self._tokens.collapse(prompt["prompt_token_ids"]),
            "multi_modal_data": {"image": [decode_image(self._store.read(i)) for i in images]},
            "cache_salt": prompt.get("cache_salt"),
        }

    def get_finish_reason(self, output: Any) -> Any:
        """Return why one of vLLM's CompletionOutputs ended: "length" at a token for an image."""
        return "length" if output.stop_reason in self.token_ids else output.finish_reason


def check_prompt(output: Any, prompt_ids: list[int]) -> None:
    """Raise RuntimeError if vLLM has made other tokens of the images of a prompt."""
    if list(output.prompt_token_ids) != prompt_ids:
        raise RuntimeError(
            f"vLLM makes other tokens of a prompt with images, {len(output.prompt_token_ids)}, "
            f"than the image processor, {len(prompt_ids)}: they do not have the same processor"
        )
