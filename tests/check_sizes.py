"""Refuses a Python file over 700 lines or a function over 80 whose docstring gives no reason.

The reason is a line of the docstring that starts with `Long because:`.

    python tests/check_sizes.py FOLDER
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 80
REASON = "Long because:"


def list_python_files(root: Path) -> Iterator[Path]:
    """Each file once: links are not followed, nor are hidden folders and builds."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "build")
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def has_reason(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    lines = (ast.get_docstring(node) or "").splitlines()
    return any(line.strip().startswith(REASON) and line.strip() != REASON for line in lines)


def list_complaints(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, filename=str(path))
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES and not has_reason(tree):
        yield f"{path}: {num_lines} lines; allowed: {MAX_FILE_LINES}, or '{REASON} ...'"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or has_reason(node):
            continue
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield (
                f"{path}:{node.lineno}: {node.name} has {num_lines} lines; "
                f"allowed: {MAX_FUNCTION_LINES}, or '{REASON} ...' in its docstring"
            )


def main(root: Path) -> int:
    messages = [
        complaint for path in list_python_files(root) for complaint in list_complaints(path)
    ]
    print("\n".join(messages))
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
