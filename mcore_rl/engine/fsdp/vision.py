"""Images of a micro-batch as inputs of transformers' models: pixel values, and positions of tokens.

Multimodal rotary positions (arXiv:2409.12191, section 2.1) are those of transformers'
`get_rope_index` for each sequence alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mcore_rl.data.batch import IMAGES, Batch
from mcore_rl.data.images import ImageStore, ImageTokens
from mcore_rl.engine.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE_BYTES = 256 << 20  # pixel values on the host: samples of a group have the same images

Pixels = tuple[torch.Tensor, torch.Tensor]  # values [patches, values], grid [3]


class VisionInputs:
    """Adds pixel values and positions to micro-batches.

    Args:
        model: Model of transformers with `get_rope_index` and `get_image_features`.
        store: Images that batches name in the column `images`; None: there are none.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: ImageTokens, store: ImageStore | None
    ) -> None:
        self._get_rope_index = model.base_model.get_rope_index
        self._tokens, self._store = tokens, store
        self._cache: OrderedDict[str, Pixels] = OrderedDict()  # least recently used first

    def add(self, batch: Batch, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch of the batch with the model's inputs for its images.

        The last token of a sample is read by nothing: one that stands for an image becomes padding.

        Raises:
            ValueError: a sample has other image tokens than those of its images.
        """
        device, ids = micro.input_ids.device, micro.input_ids[0].cpu().clone()
        names = batch.array(IMAGES).tolist() if IMAGES in batch else [""] * len(batch)
        num_tokens, start = batch.num_tokens.tolist(), 0
        positions, pixels = list[torch.Tensor](), list[Pixels]()
        for index, length in enumerate(micro.lengths):
            sequence = ids[start : start + length]
            start += length
            row = micro.rows[index] if index < len(micro.rows) else None
            images = [] if row is None else [self._read(name) for name in names[row].split()]
            if row is not None and int(sequence[num_tokens[row] - 1]) in self._tokens.special_ids:
                sequence[num_tokens[row] - 1] = 0
            is_image = (sequence == self._tokens.token_id).int()
            if self._store is None:  # tokens for images are text, as servers read them then
                is_image.zero_()
            grids = [grid for _, grid in images]
            expected = sum(map(self._tokens.count_in_grid, grids))
            if int(is_image.sum()) != expected:
                raise ValueError(
                    f"a sample has {int(is_image.sum())} image tokens, and its {len(images)} "
                    f"images are {expected}"
                )
            positions.append(
                self._get_rope_index(
                    sequence[None],
                    mm_token_type_ids=is_image[None],
                    image_grid_thw=torch.stack(grids) if grids else None,
                )[0]
            )
            pixels += images
        places = torch.cat([micro.position_ids.cpu()[None], torch.cat(positions, 2)])
        inputs = {"position_ids": places.to(device)}
        if pixels:
            inputs["pixel_values"] = torch.cat([values for values, _ in pixels]).to(device)
            inputs["image_grid_thw"] = torch.stack([grid for _, grid in pixels]).to(device)
        return replace(micro, input_ids=ids[None].to(device), model_inputs=inputs)

    def _read(self, digest: str) -> Pixels:
        """Return the pixel values of an image, computed once while they fit in the cache."""
        pixels = self._cache.pop(digest, None)
        if pixels is None:
            if self._store is None:
                raise ValueError(f"the batch has the image {digest}, and the engine no images")
            pixels = self._tokens.compute_pixels(self._store.read(digest))
        self._cache[digest] = pixels
        num_bytes = sum(values.nbytes for values, _ in self._cache.values())
        while len(self._cache) > 1 and num_bytes > _CACHE_BYTES:
            num_bytes -= self._cache.popitem(last=False)[1][0].nbytes
        return pixels


def run_unused_tower(model: PreTrainedModel) -> torch.Tensor:
    """Return a zero that depends on all parameters for images."""
    vision = model.config.vision_config
    size = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    device = model.get_input_embeddings().weight.device
    pixels = torch.zeros(size * size, values, device=device)
    grid = torch.tensor([[1, size, size]], device=device)
    output = model.base_model.get_image_features(pixel_values=pixels, image_grid_thw=grid)
    layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return 0 * torch.stack([part.float().sum() for layer in layers for part in layer]).sum()
