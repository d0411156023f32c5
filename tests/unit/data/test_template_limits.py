"""Chat templates that do not end, call themselves or write no end: one clear refusal, soon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
from jinja2 import TemplateError
from transformers import tokenization_utils_base

from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig
from mcore_rl.data import template_limits
from mcore_rl.data.datasets import load_prompts
from mcore_rl.data.template_limits import LimitedRender
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.examples.tasks import tiny_model

CHAT = [{"role": "user", "content": "Add 1 and 2."}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "recursive macro": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "macros that call each other": (
        "{% macro a(b) %}{{ b(a) }}{% endmacro %}{% macro c(d) %}{{ d(c) }}{% endmacro %}{{ a(c) }}"
    ),
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "loops in loops": LOOPS * 3,
    "loop over its own text": (
        "{% set n = namespace(x='ab') %}{% for i in range(20) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{% for a in n.x %}{% for b in n.x %}{% endfor %}{% endfor %}"
    ),
    "loop for a long chat only": "{% if messages|length %}" + LOOPS + "{% endif %}hi",
    "doubled text": (
        "{% set n = namespace(x='abcd') %}{% for i in range(22) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x }}"
    ),
    "range without end": "{% for i in range(10 ** 12) %}a{% endfor %}",
    "nested source": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "division by zero": "{{ 1 // 0 }}",
}
ALLOWED = "calls itself without end|has not ended after|writes 1?[0-9]{7} char|OverflowErr|ZeroDiv"


@pytest.fixture
def short(monkeypatch):
    """A tenth of a second in place of seconds."""
    monkeypatch.setattr(template_limits, "_LOOK_S", 0.02)
    template_limits.limit_chat_templates()
    limited = LimitedRender(tokenization_utils_base.render_jinja_template.render, cpu_s=0.1)
    monkeypatch.setattr(tokenization_utils_base, "render_jinja_template", limited)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model.train_tokenizer(["user\nAdd 1 and 2.", "assistant\n#### 3"] * 20).save_pretrained(
        path
    )
    return path


@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
def test_a_template_without_end_refuses_the_first_row_soon(short, folder, tmp_path, template):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT, "answer": "3"}))
    start = time.thread_time()
    with pytest.raises(ConfigError) as raised:
        load_prompts(str(tmp_path / "rows.jsonl"), DataConfig(), tokenizer)
    assert "row 0 does not fit the model's chat template: " in str(raised.value)
    raised.match(ALLOWED)
    assert len(str(raised.value)) < 500 + len(str(tmp_path))
    assert time.thread_time() - start < 3


def test_a_template_without_end_is_refused_by_each_codec_in_seconds(short, folder):
    """Though it is tried on many conversations."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = LOOPS * 3
    start = time.thread_time()
    with pytest.raises(ConfigError, match="has not ended after"):
        select_codec(tokenizer, "auto")
    assert time.thread_time() - start < 10


def test_threads_have_their_own_time_and_what_ends_in_time_is_left_alone(short, folder):
    late, good = load_tokenizer(folder), load_tokenizer(folder)
    late.chat_template, expected = LOOPS * 3, good.apply_chat_template(CHAT, tokenize=False)
    ended: list[str] = []

    def render() -> None:
        try:
            late.apply_chat_template(CHAT, tokenize=False)
        except TemplateError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=render) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert good.apply_chat_template(CHAT, tokenize=False) == expected
    assert len(ended) == 3 and all("has not ended after" in text for text in ended)
    assert late.decode(late.encode(expected)) == expected  # nothing is raised here afterwards


def test_a_long_chat_may_be_written_several_times(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content ~ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "ab" * 400_000}]
    assert len(tokenizer.apply_chat_template(chat, tokenize=False)) == 1_600_000


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", DEEP),
        ("tokenizer.json", '{"a":' * 100_000 + "1" + "}" * 100_000),
        ("tokenizer.json", "[1, 2]"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {}}}'),
        ("tokenizer_config.json", DEEP),
        ("tokenizer_config.json", "3"),
    ],
    ids=["lists", "objects", "a list", "cut", "config", "a number"],
)
def test_a_file_that_is_no_tokenizers_is_one_line(folder, tmp_path, name, text):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(tmp_path)
    message = str(raised.value)
    assert message.startswith(f"model.path={str(tmp_path)!r} has a tokenizer that does not load: ")
    assert message.endswith("; allowed: the files of a Hugging Face tokenizer")
    assert "\n" not in message and len(message) < 800


TRACED_AFTERWARDS = """
import sys
from jinja2.exceptions import TemplateRuntimeError
from mcore_rl.data.template_limits import LimitedRender

def render(conversations, **options):
    while True:
        pass

try:
    LimitedRender(render, cpu_s=0.05)([[]], chat_template="endless")
except TemplateRuntimeError as error:
    print(error)

def trace(frame, event, _):
    frame.f_trace_opcodes = True
    return trace

def work():
    for _ in range(100):
        pass

sys.settrace(trace)
work()
sys.settrace(None)
print("ended")
"""


def test_a_thread_whose_render_was_ended_can_be_traced_afterwards():
    # As debuggers and coverage do; an exception that is taken back makes them wait for ever.
    command = [sys.executable, "-c", TRACED_AFTERWARDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "it has not ended after 0.05 s of CPU time\nended\n"
