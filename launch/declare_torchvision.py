"""Lets `import torchvision` work beside a CPU torch where its wheel was made for CUDA.

    .venv/bin/python launch/declare_torchvision.py

The compiled part of such a wheel does not load, and the import fails where torchvision registers
meta functions of operators that this part defines. This script declares these operators in
torchvision/extension.py, only where the import fails for that reason. Processors of images call
none of them.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

_SYMPTOM = "operator torchvision::nms does not exist"
_DECLARATION = """

if not _has_ops():  # declared by mcore_rl: the compiled part is of another torch
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def import_torchvision() -> str:
    """Import torchvision in a new process; return the errors, "" if it succeeds."""
    command = [sys.executable, "-c", "import torchvision"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def main() -> None:
    errors = import_torchvision()
    if _SYMPTOM in errors:
        spec = importlib.util.find_spec("torchvision")
        assert spec is not None and spec.origin is not None
        file = Path(spec.origin).parent / "extension.py"
        file.write_text(file.read_text() + _DECLARATION)
        print(f"declared the operators of torchvision in {file}")
        errors = import_torchvision()
    if errors:
        sys.exit(f"import torchvision fails:\n{errors}")


if __name__ == "__main__":
    main()
