"""Writes the tables of docs/configuration.md from the settings themselves.

Names, defaults and the comments beside the fields come from mcore_rl/config/schema.py, the allowed
names from the registries and from mcore_rl/config/resolve.py. What stands outside of the two
markers of the page is written by hand and kept.

    python tests/write_configuration_doc.py
"""

import ast
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.aggregation import AGGREGATIONS
from mcore_rl.algorithms.kl import KL_ESTIMATORS
from mcore_rl.config import resolve, resolve_engine, schema
from mcore_rl.rewards import base as rewards

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- written by tests/write_configuration_doc.py: begin -->\n"
END = "<!-- written by tests/write_configuration_doc.py: end -->\n"

Comments = dict[tuple[str, str], str]  # (class, field) -> what the comment beside the field says


def comments_of(source: str) -> Comments:
    """Comments on the lines of each field, or on lines of their own directly above it."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    found: Comments = {}
    for part in ast.parse(source).body:
        if not isinstance(part, ast.ClassDef):
            continue
        for node in part.body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            first = node.lineno
            while (above := comments.get(first - 1)) and above.line.lstrip().startswith("#"):
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            texts = [comments[n].string.lstrip("# ") for n in lines if n in comments]
            found[part.name, node.target.id] = " ".join(texts)
    return found


def allowed_names() -> dict[str, list[str]]:
    """Values of the settings that choose something by name, by the last two parts of their keys."""
    rewards.get_reward("final_number")  # the built-in rewards register when one is asked for
    return {
        "algorithm.advantage": ADVANTAGES.names,
        "algorithm.kl_estimator": KL_ESTIMATORS.names,
        "algorithm.loss_aggregation": AGGREGATIONS.names,
        "model.dtype": ["auto", *resolve.DTYPES],
        "optimizer.schedule": list(resolve_engine.SCHEDULES),
        "reward.name": rewards._REWARDS.names,
        "task.name": [name for name in resolve.TASKS if name],
        "weight_sync.method": list(resolve.WEIGHT_SYNC_METHODS),
    }


def tables(
    part: Any, comments: Comments, names: dict[str, list[str]], key: str = ""
) -> Iterator[str]:
    """One section a group of settings: its docstring, then a row a setting, then its sub-groups."""
    kind = type(part)
    yield f"### {f'`{key}`' if key else 'Of the whole run'}\n\n"
    doc = kind.__dict__.get("__doc__") or ""
    if not doc.startswith(f"{kind.__name__}("):  # what dataclass writes where there is no docstring
        yield inspect.cleandoc(doc) + "\n\n"
    yield "| Setting | Default | Meaning |\n|---|---|---|\n"
    groups = []
    for entry in fields(part):
        value, name = getattr(part, entry.name), f"{key}.{entry.name}".lstrip(".")
        if is_dataclass(value):
            groups.append((name, value))
            continue
        meaning = comments[kind.__name__, entry.name]
        choice = names.get(".".join(name.split(".")[-2:]))
        if choice and not all(word in meaning for word in choice):
            listed = ", ".join(f"`{word}`" for word in choice)
            meaning = f"{meaning}; one of: {listed}" if meaning else f"one of: {listed}"
        meaning = meaning.replace("|", "\\|")
        yield f"| `{name}` | `{json.dumps(value)}` | {meaning} |\n"
    yield "\n"
    for name, group in groups:
        yield from tables(group, comments, names, name)


def page(current: str) -> str:
    """The page with its generated part made anew."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    comments = comments_of(inspect.getsource(schema))
    made = "".join(tables(schema.RLConfig(), comments, allowed_names()))
    return f"{before}{BEGIN}\n{made}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
