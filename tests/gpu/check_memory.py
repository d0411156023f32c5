"""A small use of every kernel of csrc, for compute-sanitizer to look at.

Odd sizes and addresses; each result is compared with the same call on the CPU.
"""

from __future__ import annotations

import argparse

import measure
import torch

from mcore_rl.reshard.ops import (
    BoxQuantize,
    Quantized,
    allocate_quantized,
    compute_checksums,
    copy_boxes,
)

DTYPES = [
    (torch.uint8, torch.uint8),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]
CHECKSUMS = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), *DTYPES[1:]]


def check(arguments: argparse.Namespace) -> measure.Result:
    device = measure.device()
    num_boxes = 0
    for source_dtype, target_dtype in DTYPES:
        shapes = [(1, 1), (3, 5), (7, 16), (33, 130), (2, 9001), (5, 4099)]
        for shape, gap in zip(shapes, (0, 3, 0, 1, 8, 1), strict=True):  # the last: ends are peeled
            rows, columns = shape
            source = torch.arange(rows * (columns + gap)).remainder(251).to(source_dtype)
            results = []
            for place in (torch.device("cpu"), device):
                box = source.to(place).view(rows, columns + gap)[:, gap:]
                target = torch.zeros(rows, columns + 1, dtype=target_dtype, device=place)[:, 1:]
                copy_boxes([(box, target)])
                results.append(target.cpu())
            assert torch.equal(*results), (source_dtype, target_dtype, shape, gap)
            num_boxes += 1
    for shape in [(1, 1), (129, 127), (200, 300)]:
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        results = []
        for place in (torch.device("cpu"), device):
            into: Quantized = allocate_quantized(moved := weight.to(place))
            BoxQuantize([(moved, into)]).run()
            results.append(into.values.cpu().view(torch.uint8))
        assert torch.equal(*results), shape
        num_boxes += 1
    for source_dtype, dtype in CHECKSUMS:
        weight = torch.arange(33 * 9001).remainder(251).to(source_dtype).view(33, 9001)
        results = []
        for place in (torch.device("cpu"), device):
            moved = weight.to(place)
            views = (moved[0, 0], moved[:7, 1:6], moved[:, :4096], moved[1:3, 1:], moved.t()[:5])
            results.append(compute_checksums((view, dtype) for view in views).cpu())
        assert torch.equal(*results), (source_dtype, dtype)
        num_boxes += len(views)
    measure.synchronize()
    return {"boxes": num_boxes}


if __name__ == "__main__":
    measure.report(check)
