"""Trained tokens of conversations, by the chat template's own marks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ConversationsConfig, DataConfig, PairsConfig
from mcore_rl.data.chat_template import ChatTemplate
from mcore_rl.data.examples import (
    Example,
    ExampleBatches,
    ExampleFiles,
    Tokens,
    build_scoring_batch,
    encode_conversation,
    load_chats,
    load_conversations,
    load_pairs,
)
from mcore_rl.examples.tasks import tiny_model

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
# Writes an empty thought before the last answer only, as Qwen3's does, and trims contents.
THINKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last and '</think>' not in message['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BARE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
CALLS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<call>{{ call['name'] }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.train_tokenizer(["user\nStart with 5. Add 2.", "assistant\n5+2=7 #### 7"] * 9)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def assistants(messages) -> list[bool]:
    return [message["role"] == "assistant" for message in messages]


def trained(tokenizer, messages, flags=None) -> str:
    result = encode_conversation(
        messages, flags or assistants(messages), [], ChatTemplate(tokenizer)
    )
    selected = zip(result.ids, result.is_trained, strict=True)
    return tokenizer.decode([token for token, flag in selected if flag])


@pytest.mark.parametrize(
    "messages",
    [
        chat("Start with 5.", "5+2=7"),
        chat("Add 2.", "7", "Add 4.", "11 #### 1", "Add 9.", "#### 0"),
        [{"role": "system", "content": "Add."}, *chat("Add 2.", "7", "Add 4.", " 11\n\n1 ")],
        chat("7", "7", "7", "7"),
    ],
)
def test_trained_tokens_are_those_that_the_template_marks_as_generated(tokenizer, messages):
    tokenizer.chat_template = CHATML
    expected = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    result = encode_conversation(messages, assistants(messages), [], ChatTemplate(tokenizer))
    num = len(result.ids)  # up to the last trained token
    assert result.ids == expected["input_ids"][:num]
    assert [int(flag) for flag in result.is_trained] == expected["assistant_masks"][:num]
    assert sum(expected["assistant_masks"][num:]) == 0
    assert result.is_trained[-1]


def test_a_template_that_changes_earlier_messages_is_followed(tokenizer):
    tokenizer.chat_template = THINKS
    messages = chat("Add 2.", "7 ", "Add 4.", "<think>\n7+4\n</think>\n\n1")
    assert trained(tokenizer, messages) == "7<|im_end|><think>\n7+4\n</think>\n\n1<|im_end|>"
    assert trained(tokenizer, chat("Add 2.", "7")) == "<think>\n\n</think>\n\n7<|im_end|>"


def test_flags_of_messages_decide_and_a_text_that_does_not_end_gets_its_end(tokenizer):
    tokenizer.chat_template = BARE
    messages = chat("Add 2.", "7", "Add 4.", "1")
    assert trained(tokenizer, messages) == "71<|im_end|>"
    assert trained(tokenizer, messages, [False, False, False, True]) == "1<|im_end|>"
    assert trained(tokenizer, messages, [False, True, False, False]) == "7"


def test_a_message_of_calls_is_trained_on_as_it_is_written(tokenizer):
    tokenizer.chat_template = CALLS
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {}}]}
    messages = [*chat("Add 2."), call]
    assert trained(tokenizer, messages) == "<call>add</call><|im_end|>"


def test_null_argument_of_a_row_is_trained_on(tokenizer, write):
    tokenizer.chat_template = CALLS.replace("call['name']", "call | tojson")
    call = {"name": "find", "arguments": {"x": None, "y": [{"z": None}]}}
    messages = [*chat("Add 2."), {"role": "assistant", "content": None, "tool_calls": [call]}]
    examples = load_conversations(write([{"messages": messages}]), ConversationsConfig(), tokenizer)
    [tokens] = examples[0].conversations
    assert f"<call>{json.dumps(call)}</call>" in tokenizer.decode(tokens.ids)


@pytest.fixture
def write(tmp_path, tokenizer):
    """write(rows) is the name of a JSONL file of them."""
    tokenizer.chat_template = CHATML

    def make(rows) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return make


def rows_of(batch, name) -> list[list[int]]:
    return [row.tolist() for row in batch.jagged(name)]


def test_a_batch_begins_its_responses_at_the_first_trained_token(write, tokenizer):
    messages = chat("Add 2.", "7", "Add 4.", "1")
    examples = load_conversations(
        write([{"messages": messages}] * 2), ConversationsConfig(), tokenizer
    )
    batch = examples.take([1, 0])
    full = encode_conversation(messages, assistants(messages), [], ChatTemplate(tokenizer))
    for prompt, response, mask in zip(
        *(rows_of(batch, n) for n in ("prompt_ids", "response_ids", "response_mask")), strict=True
    ):
        assert prompt + response == full.ids
        assert [0] * len(prompt) + mask == [int(flag) for flag in full.is_trained]
        assert mask[0] == 1 and 0 in mask


def test_whole_conversations_of_a_warm_start_are_those_of_training_on_examples(write, tokenizer):
    name = write([{"messages": chat("Add 2.", "7", "Add 4.", "1")}, {"messages": chat("7", "7")}])
    expected = load_conversations(name, ConversationsConfig(), tokenizer).take([0, 1])
    columns = "prompt_ids", "response_ids", "response_mask"
    parts = zip(rows_of(expected, "prompt_ids"), rows_of(expected, "response_ids"), strict=True)
    lengths = [len(prompt) + len(response) for prompt, response in parts]
    batch = load_chats(name, DataConfig(), lengths[0], tokenizer)
    for column in columns:
        assert rows_of(batch, column) == rows_of(expected, column)
    message = f"row 0 has {lengths[0]} tokens; allowed: up to data.max_prompt_tokens"
    with pytest.raises(ConfigError, match=message):
        load_chats(name, DataConfig(), lengths[0] - 1, tokenizer)


def test_all_tokens_but_the_first_are_trained_on_with_the_prompt(write, tokenizer):
    config = ConversationsConfig(train_on_prompt=True)
    name = write([{"messages": chat("Add 2.", "7")}])
    batch = load_conversations(name, config, tokenizer).take([0])
    assert [len(row) for row in rows_of(batch, "prompt_ids")] == [1]
    assert set(rows_of(batch, "response_mask")[0]) == {1}


PAIR = {
    "prompt": chat("Add 2."),
    "chosen": [{"role": "assistant", "content": "7"}],
    "rejected": [{"role": "assistant", "content": "8 9"}],
    "by": 2,
}


def test_pairs_follow_each_other_with_their_margin_and_a_score_at_their_end(write, tokenizer):
    name = write([PAIR, PAIR | {"by": None}])
    examples = load_pairs(name, PairsConfig(margin_column="by"), tokenizer)
    batch = examples.take([1, 0])
    answers = [tokenizer.decode(row) for row in batch.jagged("response_ids")]
    assert answers == ["7<|im_end|>", "8 9<|im_end|>"] * 2
    assert batch.array("margins").tolist() == [0, 0, 2, 2]
    scored = build_scoring_batch(batch)
    texts = [tokenizer.decode(row) for row in scored.jagged("prompt_ids")]
    assert texts[1].endswith("Add 2.<|im_end|><|im_start|>assistant\n8 9<|im_end|>")
    assert rows_of(scored, "response_mask") == [[1]] * 4


def test_the_prompts_of_both_conversations_of_a_pair_have_its_tools(write):
    tokenizer = tiny_model.train_tokenizer(["user\nAdd 2.", "assistant\n7"] * 9, with_tools=True)
    adder = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    name = write([PAIR | {"tools": [adder]}])
    batch = load_pairs(name, PairsConfig(tools_column="tools"), tokenizer).take([0])
    plain = load_pairs(name, PairsConfig(), tokenizer).take([0])
    for with_tools, without in zip(
        batch.jagged("prompt_ids"), plain.jagged("prompt_ids"), strict=True
    ):
        assert "add" in tokenizer.decode(with_tools) and "add" not in tokenizer.decode(without)
    assert rows_of(batch, "response_ids") == rows_of(plain, "response_ids")


def test_long_rows_are_refused_or_left_out(write, tokenizer):
    rows = [{"messages": chat("Add 2.", text)} for text in ("7", "7 " * 90, "8")]
    with pytest.raises(ConfigError, match=r"row 1 has \d+ tokens; allowed: up to data.max_tokens="):
        load_conversations(write(rows), ConversationsConfig(max_tokens=40), tokenizer)
    config = ConversationsConfig(max_tokens=40, long_rows="drop")
    examples = load_conversations(write(rows), config, tokenizer)
    assert (len(examples), examples.num_rows, examples.num_dropped) == (2, 3, 1)
    assert tokenizer.decode(examples.take([1]).jagged("response_ids")[0]) == "8<|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system') }}", "does not fit the model's chat template: no system"),
        ("{{ messages[0]['content'] }}", "chat template leaves out message 1"),
    ],
)
def test_a_row_that_the_template_does_not_write_is_named(write, tokenizer, template, reason):
    name = write([{"messages": chat("Add 2.", "7")}])
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=f"data.train_file=.*: row 0 .*{reason}"):
        load_conversations(name, ConversationsConfig(), tokenizer)


def test_batches_go_on_from_their_state():
    made = [ExampleBatches(lambda rows: rows, [10], 4, seed=1) for _ in range(2)]
    drawn = [next(made[0]) for _ in range(3)]
    made[1].load_state_dict(made[0].state_dict())
    assert next(made[1]) == next(made[0])
    assert sorted(np.concatenate(drawn)[:10].tolist()) == list(range(10))


def test_files_follow_each_other_and_a_batch_is_in_the_order_of_its_rows():
    def rows(*numbers):
        return [Example((Tokens([9, number], [False, True]),)) for number in numbers]

    files = ExampleFiles(rows(0, 1, 2), rows(3), rows(4, 5))
    assert files.sizes == [3, 1, 2] and len(files) == 6
    batch = files.take([5, 0, 3, 4, 0])
    assert [row.tolist() for row in batch.jagged("response_ids")] == [[5], [0], [3], [4], [0]]


def test_with_weights_a_batch_has_its_share_of_each_file():
    batches = ExampleBatches(lambda rows: rows, [4, 100], 8, seed=1, weights=[3.0, 1.0])
    drawn = [next(batches) for _ in range(4)]
    assert [sum(row < 4 for row in rows) for rows in drawn] == [6] * 4
    again = ExampleBatches(lambda rows: rows, [4, 100], 8, seed=1, weights=[3.0, 1.0])
    again.load_state_dict(batches.state_dict())
    assert next(again) == next(batches)


def test_a_conversation_that_trains_from_its_first_token_on_has_a_token_to_be_scored_by():
    batch = ExampleFiles([Example((Tokens([7, 8, 9], [True, True, True]),))]).take([0])
    assert [batch.jagged(n)[0].tolist() for n in ("prompt_ids", "response_ids")] == [[7], [8, 9]]
    assert batch.jagged("response_mask")[0].tolist() == [1, 1]
