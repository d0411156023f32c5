"""Answers that hang or eat memory: each costs itself a reward, and none stops a run."""

import json
import time

import pytest

from mcore_rl.config.schema import RewardConfig
from mcore_rl.sandbox.sandbox import probe_tiers
from mcore_rl.sandbox.tiers import Tier
from tests.nightly import all_but
from tests.unit.rewards.judging import compute_rewards, response

TESTS = json.dumps({"asserts": ["assert f() == 1"]})
PROGRAMS = [
    "while True: pass",
    "import time\ntime.sleep(600)",
    "b = []\nwhile True: b.append(bytearray(1 << 20))",
    "b = bytearray(1 << 40)",
    "while True: print('x' * 10000)",
    "import os\nwhile True: os.fork()",
    "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()",
    "import os\nos.kill(os.getpid(), 9)",
    "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, lambda *_: 0)\nwhile True: pass",
    "import os\nos.kill(os.getppid(), 9)\nwhile True: pass",
    "def f(): return f()\nf()",
    "print(9 ** 9 ** 9)",
    "while True: open(str(id(object())), 'w').write('x' * 10**7)",
]
FORMULAS = [
    "9^{9^{9^9}}",
    "100000000!",
    "(" * 2000 + "1" + ")" * 2000,
    "2^{2^{40}}",
    r"\binom{10^8}{10^7}",
]


@pytest.mark.job
@pytest.mark.skipif(
    not isinstance(probe_tiers("auto"), Tier), reason=f"no sandbox: {probe_tiers('auto')}"
)
@pytest.mark.parametrize("number", all_but([12], [12, 24, 950]))
def test_programs(number):
    settings = {"cpu_s": 0.3, "wall_s": 5.0, "memory_mb": 128, "scratch_mb": 4, "processes": 8}
    config = RewardConfig("code", settings, num_processes=4)
    texts = [f"```python\n{PROGRAMS[row % len(PROGRAMS)]}\n```" for row in range(number)]
    texts.append("```python\ndef f(): return 1\n```")
    start = time.monotonic()
    samples = compute_rewards(config, texts, [response(TESTS) for _ in texts])
    assert [sample.reward for sample in samples] == [0.0] * number + [1.0]
    assert not any(sample.reward_error for sample in samples)
    assert time.monotonic() - start < 10 + 5 * number


@pytest.mark.job
@pytest.mark.parametrize("number", all_but([5], [5, 50]))
def test_formulas(number):
    config = RewardConfig("math", {"timeout_s": 2.0}, num_processes=2)
    texts = [rf"\boxed{{{FORMULAS[row % len(FORMULAS)]}}}" for row in range(number)]
    texts.append(r"\boxed{7}")
    samples = compute_rewards(config, texts, [response("7") for _ in texts])
    assert [sample.reward for sample in samples] == [0.0] * number + [1.0]
    assert not any(sample.reward_error for sample in samples)


def test_a_check_that_needs_more_memory_than_it_has_is_unchecked(tmp_path):
    source = """
from mcore_rl.rewards.registry import run_in_process

@run_in_process(unchecked={"reward": 0.0, "unchecked": 1.0}, memory_mb=512)
def size(text, fields, finish_reason):
    return {"reward": float(len(bytearray(int(text) << 20)) > 0), "unchecked": 0.0}
"""
    (tmp_path / "own.py").write_text(source)
    samples = compute_rewards(RewardConfig(f"{tmp_path}/own.py:size"), ["1", "4096", "2"])
    assert [sample.reward for sample in samples] == [1.0, 0.0, 1.0]
    assert [sample.reward_parts["unchecked"] for sample in samples] == [0.0, 1.0, 0.0]
