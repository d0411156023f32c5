"""Print the logs of a run as it writes them, later files and later attempts included.

    python3 launch/follow.py outputs/run_tiny-7

The run need not have begun, and any Python will do. Of logs that are long already the end is shown.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

_LOOK_S = 1.0
_END_BYTES = 4096


def follow(run: Path) -> None:
    """Print new lines of all logs, without an end."""
    logs, places, shown, is_first = run / "logs" / "latest", dict[Path, int](), "", True
    while True:
        for file in sorted(logs.resolve().glob("*.log")):
            text, places[file] = new_lines(file, places.get(file), is_first=is_first)
            if text:
                header = f"\n==> {file.parent.name}/{file.name} <==\n"
                print(text if header == shown else header + text, end="", flush=True)
                shown = header
        if is_first and not places:
            print(f"waiting for {logs}", file=sys.stderr)
        is_first = False
        time.sleep(_LOOK_S)


def new_lines(file: Path, place: int | None, *, is_first: bool) -> tuple[str, int]:
    """Return the complete lines from `place` on, and where the next begin; None: a new file."""
    size = file.stat().st_size
    is_cut = place is None and is_first and size > _END_BYTES
    if is_cut:
        place = size - _END_BYTES
    if place is None or place > size:  # new, or begun anew
        place = 0
    if place == size:
        return "", place
    with file.open("rb") as opened:
        opened.seek(place)
        data = opened.read(size - place)
    data = data[: data.rfind(b"\n") + 1]
    shown = data.partition(b"\n")[2] if is_cut else data
    return shown.decode(errors="replace"), place + len(data)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python3 {sys.argv[0]} OUTPUT_DIR")
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    follow(Path(sys.argv[1]))
