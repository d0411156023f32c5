"""The tasks that make their own tokenizer, model and data, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mcore_rl.data.prepared_task import PreparedTask
from mcore_rl.examples.tasks import conversations, last_digit, pictures
from mcore_rl.examples.tasks.calculator import CalculatorTask
from mcore_rl.examples.tasks.code import CodeTask
from mcore_rl.examples.tasks.countdown import CountdownTask

# Each takes a folder, a seed and the share of warm-start examples that are worked.
TASKS: dict[str, Callable[[Path, int, float], PreparedTask]] = {
    "last_digit": last_digit.prepare,
    "calculator": partial(conversations.prepare, CalculatorTask()),
    "code": partial(conversations.prepare, CodeTask()),
    "countdown": partial(conversations.prepare, CountdownTask()),
    "pictures": pictures.prepare,
}
