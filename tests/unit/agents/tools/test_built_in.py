"""The calculator, python, search and files of schemas; expected values are worked by hand."""

import asyncio
import json
import math
import time
from collections import Counter

import numpy as np
import pytest
import yaml

from mcore_rl.agents.tools.base import ToolAnswer, ToolError, ToolSet
from mcore_rl.agents.tools.built_in import PythonTool, SearchTool, calculator
from mcore_rl.agents.tools.sources import load_tool_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox.sandbox import Sandbox, probe_tiers
from mcore_rl.sandbox.tiers import Tier


def call_tool(source: object, name: str, **arguments: object) -> ToolAnswer:
    async def run() -> ToolAnswer:
        async with ToolSet([source]) as tools:
            return await tools.call(name, arguments)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-2 ** 2", "-4"),
        ("0.1 + 0.2", "0.3"),
        ("1e-3 * 1_000", "1"),
        ("10 / 4", "2.5"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3 (about 0.3333333333333333)"),
        ("1 / 3 * 3", "1"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** -2", "0.25"),
        ("2 ** 100", "1267650600228229401496703205376"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
        ("sqrt(2.25)", "1.5"),
        ("sqrt(2)", "1.4142135623730951"),
        ("8 ** (1/3)", "2.0"),
        ("round(2.675, 2)", "2.68"),
        ("round(3.5)", "4"),
        ("max(1, 5/2, 2)", "2.5"),
        ("floor(-1.5) + ceil(1.2)", "0"),
        ("cos(0)", "1.0"),
        ("2 * pi", "6.283185307179586"),
        ("0x10 + 0b1", "17"),
    ],
)
def test_values(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("2 ^ 3", "a power is written"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("9 ** (10 ** 100)", "the power is too large"),
        ("0.5 ** 10 ** 9", "the power is too large"),
        ("1e999999999", "1e999999999 is too large"),
        ("1e-999999999", "1e-999999999 is too large or too small"),
        ("*".join(["9" * 100] * 9) + "**9", "too large"),
        ("exp(1000)", "it has no value"),
        ("(-1) ** 0.5", "it has no value"),
        ("sqrt(-1)", "it has no value"),
        ("log(0)", "it has no value"),
        ("round(1, 100)", "whole numbers up to 30"),
        ("x + 1", "'x' is no arithmetic"),
        ("__import__('os').system('ls')", "is no arithmetic"),
        ("(1).__class__", "is no arithmetic"),
        ("[1, 2]", "is no arithmetic"),
        ("'a' * 10 ** 9", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("1j", "is no arithmetic"),
        ("lambda: 1", "is no arithmetic"),
        ("1 +", "cannot be read"),
        ("", "cannot be read"),
        ("(" * 400 + "1" + ")" * 400, "too many parentheses|cannot be read"),
        ("1" * 2000, "2000 characters; allowed: 1000"),
    ],
)
def test_what_the_calculator_refuses(expression, message):
    start = time.monotonic()
    with pytest.raises(ToolError, match=message):
        calculator(expression)
    assert time.monotonic() - start < 2


@pytest.mark.skipif(
    not isinstance(probe_tiers("auto"), Tier), reason=f"no sandbox: {probe_tiers('auto')}"
)
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "It printed nothing and ended with status 0."),
        ("print('a')\n1 / 0", "a\nTraceback"),
        ("print('a', flush=True)\nwhile True: pass", "a\nThe program was ended: it took too long."),
        ("while True: print('x')", "x\n"),
    ],
)
def test_python(code, text):
    sandbox = Sandbox(SandboxSettings(cpu_s=0.5, output_kb=8))
    answer = call_tool(PythonTool(sandbox), "python", code=code)
    assert answer.text.startswith(text) and not answer.is_error
    if "x\n" in text:
        assert answer.text.endswith("The program was ended: it wrote too much.")


TEXTS = ["the cat sat", "the dog sat on the mat", "Dogs and cats", "the the the", ""]


def compute_bm25(query: str, texts: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    documents = [text.lower().split() for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query.lower().split():
            df = sum(word in other for other in documents)
            tf = Counter(document)[word]
            if df:
                idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
                score += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


def index(tmp_path, rows):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SearchTool(path)


@pytest.mark.parametrize("query", ["the", "sat dog", "cat cat", "unknown", "The MAT"])
def test_scores_equal_the_formula(tmp_path, query):
    search = index(tmp_path, [{"text": text} for text in TEXTS])
    np.testing.assert_allclose(search.compute_scores(query), compute_bm25(query, TEXTS), rtol=1e-12)


def test_a_score_by_hand(tmp_path):
    search = index(tmp_path, [{"text": "a b"}, {"text": "a a"}])
    # |d| = mean: tf * 2.2 / (tf + 1.2); df of a: 2 of 2, of b: 1 of 2
    of_a, of_b = math.log(1 + 0.5 / 2.5), math.log(1 + 1.5 / 1.5)
    expected = [of_a + of_b, of_a * 2 * 2.2 / 3.2]
    np.testing.assert_allclose(search.compute_scores("a b"), expected, rtol=1e-12)


def test_search_tells_titles_and_texts_in_order(tmp_path):
    rows = [{"text": "about cats"}, {"text": "cats cats", "title": "Pets"}, {"text": "dogs"}]
    search = index(tmp_path, rows)
    assert call_tool(search, "search", query="cats").text == "[1] Pets\ncats cats\n\n[2] about cats"
    assert call_tool(search, "search", query="cats", top_k=1).text == "[1] Pets\ncats cats"
    assert call_tool(search, "search", query="birds").text == "Nothing was found."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"text": "a"}\n{"txt": "b"}\n', ":2: allowed: an object with text"),
        ('{"text": "a"}\n{\n', ":2 is no JSON"),
    ],
)
def test_an_index_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        SearchTool(path)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def entry(tmp_path, python="weather", **function):
    (tmp_path / "own.py").write_text(
        "def weather(city, days=1):\n    return f'{city}: rain for {days}'\n"
        "def other(town):\n    return town\n"
    )
    changed = {**WEATHER, "function": {**WEATHER["function"], **function}}
    return {**changed, "python": f"{tmp_path}/own.py:{python}"}


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_tools_of_a_file(tmp_path, dump):
    path = tmp_path / "tools.yaml"
    path.write_text(dump([entry(tmp_path)]))
    [loaded] = load_tool_file(path)
    assert loaded.schema() == WEATHER
    assert call_tool(loaded, "weather", city="Oslo").text == "Oslo: rain for 1"
    assert (
        call_tool(loaded, "weather", days=2).text == "Error: weather: 'city' is a required property"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"python": "other"}, r"takes \(town\); the schema has city, days"),
        ({"python": "missing"}, "has no function 'missing'"),
        ({"name": 3}, r"\[0\].function.name=3; allowed: text"),
        ({"parameters": {"type": "objekt"}}, r"\[0\].function.parameters: 'objekt' is not valid"),
        ({"parameters": {"type": "string"}}, "allowed: a schema of type object"),
        ({"extra": 1}, r"\[0\].function: extra; allowed: description"),
    ],
)
def test_entries_that_are_no_tools(tmp_path, change, message):
    path = tmp_path / "tools.yaml"
    path.write_text(json.dumps([entry(tmp_path, **change)]))
    with pytest.raises(ConfigError, match=message):
        load_tool_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "cannot be read"),
        ("{}", "allowed: a list of tools"),
        ("[1]", "the keys type, function"),
    ],
)
def test_files_that_are_no_lists_of_tools(tmp_path, content, message):
    path = tmp_path / "tools.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_tool_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tool_file(tmp_path / "missing.yaml")
