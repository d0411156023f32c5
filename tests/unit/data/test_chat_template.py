"""Every message of a row is in what the chat template writes, or the row is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.agents.chat_template.codec import ToolSpec
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ConversationsConfig, DataConfig, PairsConfig
from mcore_rl.data.datasets import load_prompts, load_supervised
from mcore_rl.data.examples import load_conversations, load_pairs
from mcore_rl.data.files import open_rows
from tests.unit.agents.families import tokenizer_of

Message = dict[str, Any]
Write = Callable[..., str]


def say(role: str, text: str | None, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


def calling(arguments: object, text: str | None = "", **more: Any) -> list[Message]:
    function = {"name": "look", "arguments": arguments}
    call = {"type": "function", "id": "functions.look:0", "function": function}
    answer = say("tool", "A door.", tool_call_id=call["id"], name="look")
    return [say("assistant", text, tool_calls=[call], **more), answer]


ASK, END = say("user", "What is there?"), say("assistant", "A door, I see.")
GO_ON = say("user", "Go on.")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(first, second, ...) is a file with these conversations."""

    def make(*chats: Sequence[Message]) -> str:
        rows = [{"messages": chat, "answer": 1, "response": "x"} for chat in chats]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "rows.jsonl")

    return make


ELSE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {% elif m.role == 'system' %}S: "
    "{% else %}A: {% endif %}{{ m.content }}\n{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }}: "
    "{{ m.content }}\n{% endif %}{% endfor %}"
)
SHORT = "{% for m in messages %}{% if m.content != 'x' %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"  # noqa: E501
REFUSED = {
    "human with Qwen3": ("published/qwen3", "", [say("human", "a"), END], "message 0"),
    "what another message says, too": (
        "published/qwen3", "", [say("human", "a"), say("user", "a"), END], "message 0",
    ),
    "an empty one": ("published/qwen3", "", [ASK, say("human", ""), END], "message 1"),
    "developer with GLM": ("published/glm-4.5", "", [say("developer", "a"), ASK, END], "message 0"),
    "function with DeepSeek": (
        "published/deepseek-v3", "", [ASK, say("function", "a"), END], "message 1",
    ),
    "gpt as any": ("chatml", ELSE, [ASK, say("gpt", "a"), END], "the role 'gpt' of message 1"),
    "a tool as the model": ("chatml", ELSE, [ASK, say("tool", "a"), END], "the role 'tool'"),
    "two systems": (
        "chatml", ONE_SYSTEM, [say("system", "a"), ASK, say("system", "b"), END], "message 2",
    ),
    "a content": ("chatml", SHORT, [ASK, say("user", "x"), END], "message 1"),
    "calls": ("chatml", "", [ASK, *calling({"at": 1}), END], "call 0 of 'look' of message 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "template", "messages", "message"), REFUSED.values(), ids=REFUSED
)
def test_a_row_with_a_message_that_is_not_written_is_refused(
    write: Write, family: str, template: str, messages: list[Message], message: str
):
    tokenizer, name = tokenizer_of(family, template), write([ASK, END], messages)
    for load in (
        lambda: load_prompts(name, DataConfig(), tokenizer),
        lambda: load_supervised(name, DataConfig(), "response", tokenizer),
        lambda: load_conversations(name, ConversationsConfig(), tokenizer),
    ):
        with pytest.raises(ConfigError, match=f"rows.jsonl': row 1 .*{message}.*; allowed: "):
            load()


JSON_ANSWER = say("tool", 'a "door"\n', tool_call_id="functions.look:0")
WORDS = (
    "{% for m in messages %}{{ {'human': 'Q', 'gpt': 'A'}[m.role] }}: {{ m.content }}{% endfor %}"
)
WRITTEN = {
    "a role by its name": ("chatml", "", [say("human", "a"), END]),
    "roles that the template knows": ("chatml", WORDS, [say("human", "a"), say("gpt", "b")]),
    "no roles": (
        "chatml", "{% for m in messages %}{{ m.content }}\n{% endfor %}", [say("system", "a"), ASK],
    ),
    "an answer as JSON": ("llama-3", "", [ASK, *calling({"at": 1})[:1], JSON_ANSWER]),
    "reasoning that the model does not see again": (
        "published/qwen3", "", [ASK, say("assistant", "<think>\nHm.\n</think>\n\nA."), GO_ON],
    ),
    "white space": (
        "qwen3.5", "", [say("user", " a\n"), say("assistant", "\n1 "), say("user", "\n")],
    ),
    "system messages in one place": (
        "published/deepseek-v3", "", [say("system", "a"), ASK, say("system", "b"), END, GO_ON],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "template", "messages"), WRITTEN.values(), ids=WRITTEN)
def test_a_row_whose_messages_are_written_is_a_prompt(
    write: Write, family: str, template: str, messages: list[Message]
):
    prompts = load_prompts(write(messages), DataConfig(), tokenizer_of(family, template))
    assert prompts[0].messages == messages


HALF = json.dumps("x\ud83d")  # with \ud83d as JSON writes it


@pytest.mark.parametrize("column", ["messages", "answer", "response", "tools", "name of a key"])
def test_half_a_surrogate_pair_is_refused_with_its_row(tmp_path: Path, column: str):
    row = {"messages": [ASK], "answer": "\U0001f600", "response": "x", "tools": []}
    bad = json.dumps(row)
    if column == "name of a key":
        bad = bad.replace('"content"', f'{HALF}: 1, "content"')
    else:
        bad = json.dumps(row | {column: [say("user", "HALF")]}).replace('"HALF"', HALF)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{bad}\n")
    source = open_rows(tmp_path / "rows.jsonl", "data.train_file")
    assert source[0].values == row
    column = "messages" if column == "name of a key" else column
    message = rf"row 1 of column '{column}' has half a surrogate pair in 'x\\ud83d'; allowed: "
    with pytest.raises(ConfigError, match=message):
        source[1]
    with pytest.raises(ConfigError, match=message):
        load_prompts(tmp_path / "rows.jsonl", DataConfig(), tokenizer_of("chatml"))


def test_half_a_pair_of_a_function_or_of_a_table_is_refused_with_its_row(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def rows(): return [{'a': 'x'}, {'a': {'b': ['\\ud800']}}]")
    source = open_rows(f"{tmp_path / 'mine.py'}:rows", "data.train_file")
    with pytest.raises(ConfigError, match="rows': row 1 of column 'a' has half a surrogate pair"):
        list(source)
    data = pa.array([b"x"] * 5 + [b"\xed\xa0\x80"])  # a half as some programs write it
    texts = pa.StringArray.from_buffers(6, *data.buffers()[1:])
    pq.write_table(pa.table({"a": texts}), tmp_path / "rows.parquet")
    source = open_rows(tmp_path / "rows.parquet", "data.train_file")
    assert source[4].values == {"a": "x"}
    for read in (lambda: list(source), lambda: source[5]):
        with pytest.raises(ConfigError, match=r"rows\.parquet': row 5 has text that is no UTF-8"):
            read()


CALLING = (
    "published/qwen2.5", "published/qwen3", "published/qwen3-2507", "qwen3.5", "published/glm-4.5",
    "kimi-k2", "llama-3", "deepseek-v3", "published/deepseek-v3",
)  # fmt: skip
ARGUMENTS = {"at": 'the "old" door', "n": [1, 2.5], "deep": {"é": True}}


def trained(name: str, tokenizer: Any) -> list[str]:
    """Return the trained spans of the last conversation of a file."""
    examples = load_conversations(name, ConversationsConfig(), tokenizer)
    [tokens] = examples[len(examples) - 1].conversations
    runs, before = list[list[int]](), False
    for token, flag in zip(tokens.ids, tokens.is_trained, strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = flag
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("family", CALLING)
def test_calls_are_trained_as_the_family_writes_them_whether_arguments_are_text_or_not(
    write: Write, family: str
):
    tokenizer = tokenizer_of(family)
    result = [
        trained(write([ASK, *calling(arguments, None if "deepseek" in family else "")]), tokenizer)
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=2))
    ]
    assert result[0] == result[1] == result[2]
    [text] = result[0]
    if select_codec(tokenizer).tool_refusal:  # its calls are JSON in a block of code
        assert json.dumps(ARGUMENTS, ensure_ascii=False) in text
        return
    properties: Any = {"at": {"type": "string"}}
    tools = [ToolSpec("look", "Looks.", {"type": "object", "properties": properties})]
    ids = tokenizer.encode(text, add_special_tokens=False)
    [call] = select_codec(tokenizer).parse(ids, tools).calls
    assert (call.status, call.name) == ("ok", "look")
    assert call.arguments == ARGUMENTS


@pytest.mark.parametrize("arguments", ["{", "[1]", 7, '{"at": NaN}', '{"at": 1e999}', "9" * 5000])
def test_arguments_that_are_no_object_are_refused(write: Write, arguments: object):
    with pytest.raises(ConfigError, match=r"row 1 of column 'messages' .* it must be a chat whose"):
        load_prompts(
            write([ASK], [ASK, *calling(arguments)]), DataConfig(), tokenizer_of("published/qwen3")
        )


THOUGHT = {"reasoning_content": "Hm, so."}
PARTS = {
    "the reasoning of an earlier turn": (
        "published/qwen3", [ASK, END | THOUGHT, GO_ON, END], "message 1.* its reasoning_content",
    ),
    "the same in the content": (
        "published/qwen3", [ASK, say("assistant", "<think>\nHm.\n</think>\n\nA."), GO_ON, END],
        "message 1.* 'Hm.'",
    ),
    "of any turn": (
        "published/deepseek-r1-distill", [ASK, say("assistant", "<think>\nHm.\n</think>\n\nA.")],
        "message 1.* 'Hm.'",
    ),
    "in a field that the template has not": (
        "published/qwen2.5", [ASK, END | THOUGHT], "message 1.* its reasoning_content",
    ),
    "by another name": (
        "published/glm-4.5", [ASK, END | {"reasoning": "Hm."}], "message 1.* its reasoning",
    ),
    "a content beside calls": (
        "llama-3", [ASK, *calling({"at": 1}, "I look."), END], "message 1 .role 'assistant'",
    ),
    "the name of a call": (
        "kimi-k2",
        [ASK, say("assistant", "", tool_calls=[{"id": "c0", "function": {"name": "look"}}])],
        "call 0 of 'look'",
    ),
    "arguments": (
        "chatml",
        [ASK, *calling({"at": "home"}), END],
        "call 0 of 'look'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "message"), PARTS.values(), ids=PARTS)
def test_what_a_message_says_is_trained_on_or_refused(
    write: Write, family: str, messages: list[Message], message: str
):
    tokenizer, name = tokenizer_of(family), write([ASK, END], messages)
    with pytest.raises(ConfigError, match=f"rows.jsonl': row 1 .*{message}.*; allowed: "):
        load_conversations(name, ConversationsConfig(), tokenizer)


REPR = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ ARGUMENTS }}){% endfor %}{% if not loop.last %}\n{% endif %}{% endfor %}"  # noqa: E501


@pytest.mark.parametrize(
    ("written", "is_text"),
    [
        ("c.function.arguments", True),  # Python's repr of an object
        ("c.function.arguments | string", True),
        ("c.function.arguments | tojson", False),
        ("c.function.arguments | tojson(indent=2, sort_keys=true)", False),
        ("c.function.arguments | tojson | tojson", None),
        ("'...'", None),
    ],
)
def test_arguments_are_given_in_the_form_that_the_template_writes_as_json(
    write: Write, written: str, is_text: bool | None
):
    tokenizer = tokenizer_of("chatml", REPR.replace("ARGUMENTS", written))
    name = write([ASK, *calling({"to": 'it\'s "home"', "at": 1})[:1]])
    if is_text is None:
        with pytest.raises(ConfigError, match=r"arguments of call 0 \('look'\), or changes them"):
            load_conversations(name, ConversationsConfig(), tokenizer)
        return
    [text] = trained(name, tokenizer)
    assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == {
        "to": 'it\'s "home"',
        "at": 1,
    }


def test_an_earlier_turn_that_is_not_trained_may_lose_its_reasoning(write: Write):
    tokenizer = tokenizer_of("published/qwen3")
    name = write([ASK, END | THOUGHT | {"train": False}, GO_ON, END | THOUGHT])
    assert trained(name, tokenizer) == ["<think>\nHm, so.\n</think>\n\nA door, I see.<|im_end|>"]


def test_pairs_are_held_to_the_same(tmp_path: Path):
    pair = {"prompt": [ASK], "chosen": [END], "rejected": [say("assistant", "No.")]}
    for bad, message in (
        (pair | {"rejected": [END | THOUGHT]}, "its reasoning_content"),
        (pair | {"prompt": [say("human", "a")]}, r"message 0 \(role 'human'\)"),
    ):
        (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n{json.dumps(bad)}\n")
        with pytest.raises(ConfigError, match=f"pairs.jsonl': row 1 .*leaves out {message}"):
            load_pairs(
                str(tmp_path / "pairs.jsonl"), PairsConfig(), tokenizer_of("published/qwen2.5")
            )


BEFORE = {
    "a question": [ASK],
    "a tool": [ASK, *calling({"at": 1})],
    "turns": [ASK, END, GO_ON],
    "turns with a tool": [ASK, *calling({"at": 1}), END, GO_ON],
    "a tool after turns": [ASK, END, GO_ON, *calling({"at": 1})],
}
AFTER = {
    "nothing": [],
    "a turn": [GO_ON, say("assistant", "2")],
    "a tool": [GO_ON, *calling({})],
}


@pytest.mark.parametrize(
    ("family", "starts"),
    [
        ("published/glm-4.5", ["\n<think></think>\nYes."]),
        ("published/qwen3-2507", ["Yes."]),
        ("published/qwen2.5", ["Yes."]),
        ("kimi-k2", ["Yes."]),
        ("llama-3", ["Yes."]),
        ("deepseek-v3", ["Yes."]),
        # Reasoning, if empty, is written in the last turn alone: it is trained where it is.
        ("published/qwen3", ["Yes.", "<think>\n\n</think>\n\nYes."]),
        ("qwen3.5", ["Yes.", "</think>\n\nYes."]),
    ],
)
def test_where_training_starts_does_not_depend_on_the_history(
    write: Write, family: str, starts: list[str]
):
    tokenizer, result = tokenizer_of(family), set()
    for before in BEFORE.values():
        for after in AFTER.values():
            messages = [*before, say("assistant", "Yes."), *after]
            flagged = [m | {"train": i == len(before)} for i, m in enumerate(messages)]
            [text] = trained(write(flagged), tokenizer)
            result.add(text[: text.index("Yes.") + 4])
    assert result == {*starts}
