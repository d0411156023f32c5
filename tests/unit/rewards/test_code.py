"""Programs of responses against tests: what passes is written by hand here."""

import json
import time

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import RewardConfig
from mcore_rl.rewards.code import find_last_program
from mcore_rl.rewards.registry import RewardError
from mcore_rl.sandbox.sandbox import probe_tiers
from mcore_rl.sandbox.tiers import Tier
from tests.unit.rewards.judging import compute_rewards, response

PAIRS = json.dumps(
    {"inputs": ["3 4\n", "1 1\n", "0 5\n", "2 9\n"], "outputs": ["7", "2", "5", "11"]}
)
ASSERTS = {"asserts": ["assert add(3, 4) == 7", "assert add(1, 1) == 2", "assert add(0, 0) == 0"]}
ADD = "def add(a, b):\n    return a + b\n"
READ = "a, b = map(int, input().split())\n"

pytestmark = pytest.mark.skipif(
    not isinstance(probe_tiers("auto"), Tier),
    reason=f"there is no sandbox here: {probe_tiers('auto')}",
)


def fenced(program: str) -> str:
    return f"This is it:\n```python\n{program}```\nDone."


def compute(answer: object, texts: list[str], **settings: object) -> list[dict[str, float]]:
    samples = compute_rewards(
        RewardConfig("code", settings), texts, [response(answer) for _ in texts]
    )
    return [{"reward": sample.reward, **sample.reward_parts} for sample in samples]


def parts(reward: float, passed: float, answered: float = 1.0) -> dict[str, float]:
    return {"reward": reward, "passed": passed, "answered": answered, "unchecked": 0.0}


def test_outputs():
    texts = [
        fenced(f"{READ}print(a + b)\n"),
        fenced(f"{READ}print(a + b, end='  \\n\\n')\n"),
        fenced(f"{READ}print(a * 2 - a + b if a < 2 else 0)\n"),
        fenced(f"{READ}print(a + b)\nraise SystemExit(3)\n"),
        fenced(f"{READ}print('the sum is', a + b)\n"),
        fenced("not Python\n"),
        "print(7)",
    ]
    assert compute(PAIRS, texts) == [
        parts(1, 1),
        parts(1, 1),
        parts(0.5, 0.5),
        parts(0, 0),
        parts(0, 0),
        parts(0, 0),
        parts(0, 0, answered=0),
    ]


def test_asserts():
    texts = [
        fenced(ADD),
        fenced("def add(a, b):\n    return a * b\n"),  # 0 + 0 = 0 * 0
        fenced(ADD + "import sys\nsys.exit(0)\n"),
        fenced(ADD + "print('passed')\nimport os\nos._exit(0)\n"),
        fenced("def add(a, b):\n    if a == 1:\n        raise ValueError\n    return a + b\n"),
    ]
    rewards = [item["reward"] for item in compute(ASSERTS, texts)]
    assert rewards == [1, pytest.approx(1 / 3), 0, 0, pytest.approx(2 / 3)]


def test_a_program_is_a_module_that_libraries_find():
    # By dataclasses, typing, pickle and inspect.
    program = """\
from __future__ import annotations
import dataclasses, pickle, sys, typing

@dataclasses.dataclass
class Point:
    x: int
    _: dataclasses.KW_ONLY
    next: Point | None = None
"""
    tests = [
        "assert Point(3, next=Point(4)).next.x == 4",
        "assert typing.get_type_hints(Point)['x'] is int",
        "assert pickle.loads(pickle.dumps(Point(3))) == Point(3)",
        "assert vars(sys.modules[Point.__module__])['Point'] is Point",
        "assert __name__ != '__main__'",
    ]
    assert compute({"asserts": tests}, [fenced(program)]) == [parts(1, 1)]


def test_tests_of_a_column_of_structs_have_nulls():
    tests = {**ASSERTS, "inputs": None, "outputs": None}
    assert compute(tests, [fenced(ADD)]) == [parts(1, 1)]


def test_all_or_nothing():
    texts = [fenced(ADD), fenced("def add(a, b):\n    return a * b\n")]
    assert compute(ASSERTS, texts, all_or_nothing=True) == [
        parts(1, 1),
        parts(0, pytest.approx(1 / 3)),
    ]


def test_a_test_that_reaches_a_limit_fails_those_after_it():
    texts = [fenced(f"{READ}while a == 1: pass\nprint(a + b)\n")]
    assert compute(PAIRS, texts, cpu_s=0.3) == [parts(0.25, 0.25)]
    texts = [fenced("def add(a, b):\n    while a == 1: pass\n    return a + b\n")]
    assert compute(ASSERTS, texts, cpu_s=0.3) == [parts(pytest.approx(1 / 3), pytest.approx(1 / 3))]


def test_a_response_that_takes_too_long_is_unchecked():
    texts = [fenced("import time\ntime.sleep(60)\n")]
    expected = {"reward": 0.0, "passed": 0.0, "answered": 1.0, "unchecked": 1.0}
    assert compute(PAIRS, texts, timeout_s=1.0) == [expected]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n``` and ```python\nb", "a\n"),
        ("```json\n{}\n```", None),
        ("```bash\npip install x\n```\nThen\n```python\na\n```", "a\n"),
        ("```python\na\n```\nprints\n```\n7\n```\nas\n```json\n7\n```", "a\n"),
        ("```bash\nls\n```\nNo program here.", None),
        ("```\na\n```\n```text\n7\n```", "a\n"),
        ("```Python3.11 title=x\na\n```", "a\n"),
        ("```{python}\na\n```", "a\n"),
        ("```python-repl\n>>> a\n```", None),
        ("```python\r\nif a:\r\n  b\r\n```\r\n", "if a:\n  b\n"),
        ("1. So:\n   ```python\n   if a:\n\n     b\n   ```\n", "if a:\n\n  b\n"),
        ("- So:\n\t```py\n\ta\n\t```\n", "a\n"),
        ("```python\n    if a:\n      b\n```", "if a:\n  b\n"),
        ("   ```python\na\n   ```", "a\n"),
        ("~~~python\na = '''\n```\n'''\n~~~", "a = '''\n```\n'''\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        (
            '```python\n"""\n    ```python\n    x\n    ```\n"""\n```',
            '"""\n    ```python\n    x\n    ```\n"""\n',
        ),
        ("```markdown\n```python\na\n```\n```", "a\n"),
        ("```python\na\n```python\nb\n```", "b\n"),
        ("```python``` is\n```python\na\n```", "a\n"),
        ("```python\na", None),
        ("", None),
    ],
)
def test_the_last_complete_block_counts(text, program):
    assert find_last_program(text) == program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Here it is: ```python\na\n```", "a\n"),
        ("Here it is: ```\na\n```", "a\n"),
        ("Code:```python\nif a:\n  b\n```", "if a:\n  b\n"),
        ("```python\na```", "a\n"),
        ("```python\nif a:\n  b ```", "if a:\n  b\n"),
        ("```python\na```</answer>", "a\n"),
        ("```python\na```.\nThen.", "a\n"),
        ("```python a```", "a\n"),
        ("```python a ```", "a\n"),
        ("So ```python a ``` is it", "a\n"),
        ("```py a; b```", "a; b\n"),
        ("<answer>```python\na\n```</answer>", "a\n"),
        ("<answer> ```python\na\n``` </answer>", "a\n"),
        ("<answer>```python a```</answer>", "a\n"),
        ("<answer>\n```python\na\n```\n</answer>", "a\n"),
        ("```python\na\n```</answer>\n```\n7\n```", "a\n"),
        ("```python\na\n```.\n```python\nb\n```", "b\n"),
        ("- ```python\n  a\n    b\n  ```", "a\n  b\n"),
        ("- ```python\n  if a:\n    b\n  ```", "if a:\n  b\n"),
        ("* ```python\nif a:\n  b\n```", "if a:\n  b\n"),
        ("1. ```python\n   if a:\n     b\n   ```", "if a:\n  b\n"),
        ("10) ```python\n    if a:\n      b\n    ```", "if a:\n  b\n"),
        ("> ```python\n> if a:\n>   b\n> ```", "if a:\n  b\n"),
        ("> So:\n> ```python\n> a\n> ```\nDone", "a\n"),
        ("> - ```python\n>   if a:\n>     b\n>   ```", "if a:\n  b\n"),
        ("> > ```python\n> > a\n> > ```", "a\n"),
        ("> ```python\n> if a > b:\n>   c\n> ```", "if a > b:\n  c\n"),
        ("```python def f():\n    return 1\n```", "def f():\n    return 1\n"),
        ("```python import os\nprint(1)```", "import os\nprint(1)\n"),
        ("```python x = 1\nprint(x)\n```", "x = 1\nprint(x)\n"),
        ("```python title=x\na\n```", "a\n"),
        ("```python from.py\na\n```", "a\n"),
        ("```python\na\n``` and ```python\nb\n```", "b\n"),
        ('```python\na = "```"\nb\n```', 'a = "```"\nb\n'),
        ("```python\nprint('```')\nb\n```", "print('```')\nb\n"),
        ("```python\na # ```python\nb\n```", "a # ```python\nb\n"),
        ("use ```x``` and ```python\na\n```", "a\n"),
        ("use ```x``` here\n```python\na\n```", "a\n"),
        ("use ``` here", None),
        ("```python", None),
        ("```python ```", None),
        ("text ```python", None),
        ("```python\na\n", None),
        ("python\na\n```", None),
        ("```js\nx``` \n```python\na\n```", "a\n"),
        ("Sure:```python\na\n```\nOutput:```\n7\n```", "a\n"),
        ("\t- ```python\n\t  a\n\t  ```", "a\n"),
        ("**Solution:** ```python\na\n```", "a\n"),
        ("### ```python\na\n```", "a\n"),
        ("~~~python\na~~~", "a\n"),
    ],
)
def test_a_block_may_be_written_as_models_write_it(text, program):
    assert find_last_program(text) == program


@pytest.mark.parametrize(
    "text",
    [
        "`" * 10**5,
        "- " * 10**5,
        "```python" + " x" * 10**5,
        "x" * 10**5 + " " * 10**5,
        "`x" * 10**5,
    ],
    ids=lambda text: text[:12],
)
def test_a_long_line_keeps_no_event_loop_waiting(text):
    started = time.monotonic()
    assert find_last_program(text) is None
    assert time.monotonic() - started < 5


@pytest.mark.job
def test_names_of_typing_need_no_import():
    # As in LeetCode, where problems give such headers.
    solution = "class Solution:\n    def add(self, n: List[int]) -> Optional[int]:\n        "
    shadowing = "List = list\nprint(List((3,)))\n"
    future = '"""A sum."""\nfrom __future__ import annotations\n'
    texts = [
        fenced(f"{solution}return sum(n)\n{READ}print(Solution().add([a, b]))\n"),
        fenced(f"{future}{solution}return sum(n)\n{READ}print(Solution().add([a, b]))\n"),
        fenced(f"{solution}return sum(m)\n{READ}print(Solution().add([a, b]))\n"),
    ]
    assert [item["reward"] for item in compute(PAIRS, texts)] == [1.0, 1.0, 0.0]
    assert compute({"inputs": [""], "outputs": ["[3]"]}, [fenced(shadowing)]) == [parts(1, 1)]
    tests = {"asserts": ["assert Solution().add([3, 4]) == 7"]}
    assert compute(tests, [fenced(f"{solution}return sum(n)\n")]) == [parts(1, 1)]


def test_a_test_may_exit_and_a_program_may_not_exit_from_it():
    tests = {
        "asserts": [
            "assert add(3, 4) == 7\nexit()",
            "import sys\nassert add(1, 1) == 2\nsys.exit(0)",
            "assert add(0, 0) == 0",
            "assert add(2, 2) == 4\nquit(0)",
        ]
    }
    texts = [
        fenced(ADD),
        fenced("def add(a, b):\n    return 7\n"),
        fenced("def add(a, b):\n    exit()\n"),
        fenced("def add(a, b):\n    raise SystemExit(0)\n"),
        fenced("def add(a, b):\n    if a == 1:\n        exit()\n    return a + b\n"),
    ]
    rewards = [item["reward"] for item in compute(tests, texts)]
    assert rewards == [1.0, 0.25, 0.0, 0.0, 0.75]
    fails = {"asserts": ["assert add(3, 4) == 7\nexit(1)", "exit('no')", "exit()"]}
    assert compute(fails, [fenced(ADD)]) == [parts(pytest.approx(1 / 3), pytest.approx(1 / 3))]


@pytest.mark.parametrize(
    "answer",
    [
        "7",
        "{",
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"asserts": []},
        {"asserts": [1]},
    ],
)
def test_tests_that_cannot_be_read(answer):
    with pytest.raises(RewardError, match=r"needs an object \{.inputs"):
        compute(answer, [fenced(ADD)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tier": "docker"}, r"reward.settings.tier='docker'; allowed: 'auto', 'bwrap'"),
        ({"memory_mb": 1}, r"reward.settings.memory_mb=1; allowed: at least 64"),
        ({"wall_s": 0.0}, r"reward.settings.wall_s=0.0; allowed: above 0"),
        ({"tiers": "auto"}, r"reward.settings.tiers is no setting"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        compute(PAIRS, [fenced(ADD)], **settings)
