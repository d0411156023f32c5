"""Fields of requests, and how long texts are handled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mcore_rl.agents.api_server.sessions import decode_token_bytes
from mcore_rl.agents.chat_template.codec import (
    ContextFullError,
    TemplateRenderer,
    check_length,
    encode,
    parse_messages,
)
from mcore_rl.agents.loops import Task
from mcore_rl.config.errors import ConfigError
from tests.unit.agents.families import FAMILIES, tokenizer_of
from tests.unit.agents.served import (
    AGAIN,
    CALCULATOR,
    QUESTION,
    ask,
    client,
    post,
    run,
    until,
)
from tests.unit.agents.test_loops import TOKENIZER, call

# Of each field a value that would change the answer, and one that does not.
OF_CHATS: dict[str, tuple[Any, Any]] = {
    "parallel_tool_calls": (False, True),
    "chat_template_kwargs": ({"enable_thinking": False}, {}),
    "structured_outputs": ({"choice": ["a", "b"]}, None),
    "guided_json": ({}, None),
    "min_tokens": (9, 0),
    "ignore_eos": (True, False),
    "continue_final_message": (True, False),
    "add_generation_prompt": (False, True),
    "reasoning_effort": ("low", None),
    "bad_words": (["no"], []),
    "allowed_token_ids": ([1], None),
    "skip_special_tokens": (False, True),
    "logit_bias": ({"1": 2.0}, {}),
    "top_logprobs": (2, 0),
    "functions": ([{"name": "f"}], []),
    "modalities": (["text", "audio"], ["text"]),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "tool_choice": ("required", "auto"),
    "thing_of_tomorrow": (1, None),
}
OF_TEXTS: dict[str, tuple[Any, Any]] = {
    "min_tokens": (9, 0),
    "ignore_eos": (True, False),
    "structured_outputs": ({"regex": "a"}, None),
    "truncate_prompt_tokens": (5, None),
    "echo": (True, False),
    "suffix": ("a", ""),
    "best_of": (2, 1),
    "logprobs": (1, 0),
}


def test_a_field_that_changes_the_answer_is_refused_and_one_that_does_not_is_taken():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        url = base_url.removesuffix("/v1")
        cases: list[tuple[str, dict[str, Any], dict[str, tuple[Any, Any]]]] = [
            ("v1/chat/completions", {"messages": QUESTION}, OF_CHATS),
            ("v1/completions", {"prompt": "6 * 7 ="}, OF_TEXTS),
        ]
        for route, body, fields in cases:
            for field, (changes, _) in fields.items():
                refused = await post(url, api_key, route, {**body, field: changes})
                assert refused.status_code == 400, field
                error = refused.json()["error"]
                assert (error["code"], error["param"]) == ("unsupported", field)
                assert error["message"].startswith(f"{field}={changes!r} is not supported here")
            neutral = {field: value for field, (_, value) in fields.items()}
            unused = {"temperature": 0.1, "user": "me", "metadata": {"a": "b"}, "top_k": 3}
            taken = await post(url, api_key, route, body | neutral | unused)
            assert taken.status_code == 200, taken.text

    _, policy = run(["42", "42"], program)
    assert len(policy.requests) == 2


def test_fields_of_tokens_that_change_the_answer_are_refused():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        url, route = base_url.removesuffix("/v1"), "inference/v1/generate"
        for field, value in {
            "min_tokens": 3, "ignore_eos": True, "structured_outputs": {"regex": "a"},
            "allowed_token_ids": [1], "prompt_logprobs": 1, "logit_bias": {"1": 1},
        }.items():  # fmt: skip
            body = {"token_ids": [1], "sampling_params": {field: value}}
            refused = await post(url, api_key, route, body)
            assert refused.status_code == 400, field
            assert refused.json()["error"]["param"] == field
        for field, value in {"features": {"image": 1}, "stream": True}.items():
            body = {"token_ids": [1], "sampling_params": {}, field: value}
            assert (await post(url, api_key, route, body)).json()["error"]["param"] == field
        neutral = {"min_tokens": 0, "skip_special_tokens": False, "min_p": 0.5, "n": None}
        body = {"token_ids": [1], "sampling_params": neutral, "model": "any", "priority": 1}
        assert (await post(url, api_key, route, body)).status_code == 200

    _, policy = run(["42"], program)
    assert len(policy.requests) == 1


@pytest.mark.parametrize(
    "nulls",
    [
        {"n": None},
        {"n": None, "stop": None, "stream": None, "stream_options": None, "tools": None},
        {"stop_token_ids": None, "return_token_ids": None, "logprobs": None},
        {"tool_choice": None, "response_format": None, "model": None, "max_tokens": None},
    ],
)
def test_a_null_is_a_field_that_is_not_there(nulls):
    async def program(task: Task, base_url: str, api_key: str) -> None:
        answer = await post(base_url, api_key, "chat/completions", {"messages": QUESTION, **nulls})
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert choice["message"]["content"] == "42"
        body: dict[str, Any] = {"reward": 0.5, "turn_rewards": None, "token_rewards": None}
        assert (await post(base_url, api_key, "sessions/reward", body)).status_code == 200

    [sample], _ = run(["42"], program)
    assert sample.reward == 0.5


LEFT_OUT = "left out"


@pytest.mark.parametrize("arguments", ["", None, " \n", "{}", {}, LEFT_OUT])
def test_a_call_without_arguments_has_none(arguments):
    function = {"name": "look", "arguments": arguments}
    if arguments == LEFT_OUT:
        del function["arguments"]
    call = {"id": "a", "type": "function", "function": function}
    [message] = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("look", {})]

    async def program(task: Task, base_url: str, api_key: str) -> None:
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "a", "content": "A door."}
        answer = await ask(client(base_url, api_key), [*QUESTION, turn, result], tools=[CALCULATOR])
        assert answer.choices[0].message.content == "42"

    _, policy = run(["42"], program)
    assert '"name": "look", "arguments": {}' in policy.prompts[0]


@pytest.mark.parametrize("call", [{"function": None}, {"function": "look"}, "look", {}])
def test_a_call_without_a_function_is_refused(call):
    with pytest.raises(ConfigError, match="message 0 has a tool call"):
        parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])


@pytest.mark.parametrize("arguments", ["[1]", "7", "{", [1], 7])
def test_arguments_that_are_no_object_are_refused(arguments):
    call = {"function": {"name": "look", "arguments": arguments}}
    with pytest.raises(ConfigError, match="message 0 has a tool call"):
        parse_messages([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("tools", [None, []])
def test_a_request_without_tools_gets_a_call_as_text(tools):
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        options = {} if tools is None else {"extra_body": {"tools": tools}}
        [choice] = (await ask(ai, QUESTION, **options)).choices
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.content == f"Well.\n{call('6 * 7')}"
        [choice] = (await ask(ai, [*QUESTION, choice.message, AGAIN], **options)).choices
        stream = await ask(ai, QUESTION, stream=True, **options)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        assert not any(delta.tool_calls for delta in deltas)

    samples, policy = run(["Well." + call("6 * 7"), "42", call("1")], program)
    assert len(samples) == 2  # the first is gone on from
    assert policy.prompts[1].startswith(policy.prompts[0] + "Well." + call("6 * 7"))


def byte_fallback() -> PreTrainedTokenizerFast:
    """Make a tokenizer as SentencePiece does, with a token for each byte without a piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581Hi", "\u2581"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([AddedToken("<é>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["🌊", "a 🌊🌊 b", "é東", "\x00\ud7ff", "<|im_start|>🌊</think>"])
def test_the_bytes_of_tokens_are_those_of_the_text_and_no_replacement(text):
    pieces = decode_token_bytes(TOKENIZER, TOKENIZER.encode(text, add_special_tokens=False))
    assert b"".join(pieces) == text.encode()
    assert not any("\ufffd".encode() in data for data in pieces)


def test_the_bytes_of_a_vocabulary_with_byte_fallback_and_of_no_token():
    tokenizer = byte_fallback()
    ids = [257, 1 + 0xF0, 1 + 0x9F, 258, 259, 9999]
    expected = [b" Hi", b"\xf0", b"\x9f", b" ", "<é>".encode(), b""]
    assert decode_token_bytes(tokenizer, ids) == expected


def test_log_probs_of_an_emoji_have_its_bytes():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        answer = await ask(client(base_url, api_key), QUESTION, logprobs=True)
        [choice] = answer.choices
        tokens = choice.logprobs.content
        assert len(tokens) > 2  # of which none is a character
        text = bytes(byte for token in tokens for byte in token.bytes).decode()
        assert text == "🌊<|im_end|>" and choice.message.content == "🌊"

    run(["🌊"], program)


def test_stop_texts_of_the_run_and_of_a_request_both_end_a_turn():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        for options, text in ({"stop": "!"}, "41"), ({"stop": ["?"]}, "4"), ({}, "2"):
            answer = await ask(ai, QUESTION, **options)
            assert answer.choices[0].message.content == text

    _, policy = run(["41! or 42", "4? or 5", "2END!"], program, stop=("END",))
    assert [sampling.stop for _, sampling, _ in policy.requests] == [
        ("END", "!"),
        ("END", "?"),
        ("END",),
    ]


WORDS = "of the and 12 "  # 14 characters, and no fewer tokens than 7
LONG = WORDS * 150_000


def with_tool(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        (
            "chat/completions",
            {"messages": [{"role": "system", "content": "x" * 2**21}, *QUESTION]},
        ),
        ("chat/completions", {"messages": QUESTION, "tools": [with_tool(LONG)]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 9000}),
        ("completions", {"prompt": LONG}),
    ],
    ids=["a message", "a word", "a tool", "many messages", "a prompt"],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(route, body, monkeypatch):
    lengths: list[int] = []
    plain = TOKENIZER.encode
    monkeypatch.setattr(
        TOKENIZER,
        "encode",
        lambda text, **kw: lengths.append(len(text)) or plain(text, **kw),
    )

    async def program(task: Task, base_url: str, api_key: str) -> None:
        lengths.clear()
        refused = await post(base_url, api_key, route, body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert sum(lengths) <= 4 * 4 * 4096  # characters, of 2 million
        await ask(client(base_url, api_key), QUESTION)

    [sample], policy = run(["42"], program)
    assert len(policy.requests) == 1 and sample.status == "truncated"


def test_an_answer_of_a_tool_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    lengths: list[int] = []

    async def program(task: Task, base_url: str, api_key: str) -> None:
        ai = client(base_url, api_key)
        [choice] = (await ask(ai, QUESTION, tools=[CALCULATOR])).choices
        [tool_call] = choice.message.tool_calls
        plain = TOKENIZER.encode
        monkeypatch.setattr(
            TOKENIZER,
            "encode",
            lambda text, **kw: lengths.append(len(text)) or plain(text, **kw),
        )
        result = {"role": "tool", "tool_call_id": tool_call.id, "content": LONG}
        with pytest.raises(openai.BadRequestError, match="of 4096 tokens are used"):
            await ask(ai, [*QUESTION, choice.message, result], tools=[CALCULATOR])

    [sample], _ = run([call("6 * 7")], program)
    assert sum(lengths) <= 4 * 4 * 4096 and sample.status == "truncated"


def test_a_body_that_is_larger_than_any_that_fits_is_a_limit_of_the_trajectory():
    async def program(task: Task, base_url: str, api_key: str) -> None:
        body = {"messages": [{"role": "user", "content": "x" * (3 * 2**20)}]}
        refused = await post(base_url, api_key, "chat/completions", body)
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        await ask(client(base_url, api_key), QUESTION)

    [sample], _ = run(["42"], program)
    assert sample.status == "truncated"


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_other_requests_are_answered_while_a_text_is_tokenised(route, monkeypatch):
    goes_on, plain, waits = threading.Event(), TOKENIZER.encode, threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        if "slow" in text:
            waits.set()
            assert goes_on.wait(20), "nothing else was answered meanwhile"
        return plain(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", slow)

    async def program(task: Task, base_url: str, api_key: str) -> None:
        body = {"messages": [{"role": "user", "content": "slow"}], "prompt": "slow"}
        body.pop("messages" if route == "completions" else "prompt")
        first = asyncio.create_task(post(base_url, api_key, route, body))
        await until(waits.is_set)
        second = await ask(client(base_url, api_key), QUESTION)
        assert second.choices[0].message.content == "42" and not first.done()
        goes_on.set()
        assert (await first).status_code == 200

    samples, policy = run(["42", "41"], program)
    assert len(samples) == 2 and "slow" in policy.prompts[1]


def test_a_text_of_long_tokens_that_fits_is_taken():
    text = "<tool_response>" * 1300  # 19500 characters
    assert len(encode(TOKENIZER, text, 1300)) == 1300
    with pytest.raises(ContextFullError, match="more than 600 of 600 tokens are used"):
        encode(TOKENIZER, text, 600)
    check_length(TOKENIZER, text, 1299)  # so little too long is found out by tokenising it
    check_length(TOKENIZER, "", 1)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_rendered_conversation_has_the_tokens_that_transformers_gives_it(family):
    tokenizer, options = tokenizer_of(family), {"date_string": "26 Jul 2024"}
    rows = [
        {"role": "user", "content": " 東京 🌊\n\n"},
        {"role": "assistant", "content": "Yes."},
        AGAIN,
    ]
    arguments = {"add_generation_prompt": True, "return_dict": False}
    expected = tokenizer.apply_chat_template(rows, **arguments, **options)
    assert TemplateRenderer(tokenizer, options).render(parse_messages(rows), ()) == expected
