"""Which tensors of an update are compared, bit for bit, with the trainer's. Pure."""

from __future__ import annotations

import zlib

SAMPLE_OF = 16  # versions after which every parameter has been compared


def is_checked(verify: str, name: str, version: int) -> bool:
    """Whether a parameter of a server is compared in this version; the same on both sides.

    `sampled` takes one in sixteen by a hash of the name, others in each version.

    >>> [version for version in range(32) if is_checked("sampled", "lm_head.weight", version)]
    [14, 30]
    """
    if verify == "sampled":
        return (zlib.crc32(name.encode()) + version) % SAMPLE_OF == 0
    return verify == "full"
