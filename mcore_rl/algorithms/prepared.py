"""Old import path of `prepared_by` and `MiniBatchInputs`, for one release."""

import warnings

from mcore_rl.algorithms.inputs import MiniBatchInputs, prepared_by

__all__ = ["MiniBatchInputs", "prepared_by"]

warnings.warn(
    "mcore_rl.algorithms.prepared is deprecated; import from mcore_rl.algorithms.inputs",
    DeprecationWarning,
    stacklevel=2,
)
