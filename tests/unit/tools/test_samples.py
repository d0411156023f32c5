"""From a batch to the messages of a page, each worked out by hand; tokens as text."""

from __future__ import annotations

import base64
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from mcore_rl.data.batch import Batch
from mcore_rl.data.image_files import inspect_image
from mcore_rl.data.images import ImageStore
from mcore_rl.data.sample import Sample
from mcore_rl.observability.console import escape_control
from mcore_rl.tools.samples.output import format_html
from mcore_rl.tools.samples.page import PageMessage, TokenTexts, build_page
from mcore_rl.tools.samples.tables import SampleReader
from tests import tiny_vision
from tests.unit.agents.families import FAMILIES, tokenizer_of
from tests.unit.data.test_images import draw
from tests.unit.tools.sample_runs import (
    ADDED,
    ASSISTANT,
    BYTES,
    END,
    HOSTILE,
    SPECIAL,
    START,
    ids,
    sample,
    trained,
    written,
)


def piece_tokenizer() -> Tokenizer:
    """Build a tokenizer like that of Llama 2: blanks are in tokens, rare bytes are tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", *bytes_, "▁", "▁a", "a", "b", "▁b"]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<s>"])
    return made


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> TokenTexts:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    BYTES.save(str(path))
    return TokenTexts(path)


# Two segments: a call and its answer, then a context made anew that keeps the first turn.
TOOL = f"\n{START}user\n<tool_response>5 is it</tool_response>{END}\n{ASSISTANT}"
CALL = f"<think>hm</think><tool_call>add(2, 3)</tool_call>{END}"
AGENT = [
    sample(
        f"{START}system\nBe brief.{END}\n{START}user\n2+3?{END}\n{ASSISTANT}",
        ("turn", CALL),
        ("context", TOOL),
        ("turn", f"fünf{END}"),
        group_id=4, trajectory=1, segment=0, reward=0.75, status="truncated",
        reward_parts={"answer": 0.5, "form": 0.25}, finish_reason="length",
    ),
    sample(
        f"{START}user\n2+3?{END}\n{ASSISTANT}",
        ("turn", CALL),
        ("context", f"\n{START}user\nIn English.{END}\n{ASSISTANT}"),
        ("turn", "fi"),
        group_id=4, trajectory=1, segment=1, reward=0.75, status="truncated", untrained=(0,),
        reward_parts={"answer": 0.5, "form": 0.25}, finish_reason="length", version=4,
    ),
]  # fmt: skip
UMLAUT = len(ids(CALL)) + len(ids(TOOL)) + 1  # where its two bytes begin


def shown(message: PageMessage) -> tuple[str, int, str]:
    return message.role, message.turn, message.text


def test_a_trajectory_of_two_segments_is_its_messages_by_role_and_turn(tmp_path, texts):
    batch = trained(AGENT[::-1], {(1, UMLAUT + 1): 0.25, (1, 0): 0.01})
    [summary] = SampleReader(str(written(tmp_path, 1, batch))).read_summaries([1])
    page = build_page(summary, texts, 0.1)
    first, second = page.segments
    assert [shown(message) for message in first] == [
        ("system", -1, f"{START}system\nBe brief.{END}\n"),
        ("user", -1, f"{START}user\n2+3?{END}\n"),
        ("assistant", 0, f"{ASSISTANT}{CALL}\n"),
        ("tool", -1, f"{START}user\n<tool_response>5 is it</tool_response>{END}\n"),
        ("assistant", 1, f"{ASSISTANT}fünf{END}"),
    ]
    assert [shown(message) for message in second] == [
        ("user", -1, f"{START}user\n2+3?{END}\n"),
        ("assistant", 0, f"{ASSISTANT}{CALL}\n"),
        ("user", -1, f"{START}user\nIn English.{END}\n"),
        ("assistant", 1, f"{ASSISTANT}fi"),
    ]
    assert page.title == "step 1, group 4, trajectory 1"
    assert dict(page.facts) == {
        "reward": "0.75", "reward parts": "answer 0.5, form 0.25", "status": "truncated (length)",
        "length": f"2 segments, 4 turns, {summary.num_tokens} tokens of responses, "
        f"{2 * len('fi') + len(ids(CALL)) + len(ids(END)) + 3} of them the policy's",
        "advantage": "0.5", "weights": "version 3 to 4",
        "largest gap": "0.25 nats between trainer and servers",
    }  # fmt: skip


def test_a_page_shows_the_reference_answer_and_the_other_columns_of_the_row(tmp_path, texts):
    """Expect a line each, escaped, and cut if long."""
    fields = {"answer": f"5{HOSTILE}", "level": 2, "tests": ["a\nb"], "notes": "x" * 1000}
    samples = [sample("2+3?", ("turn", "5"), group_id=1, fields=fields)]
    [summary] = SampleReader(str(written(tmp_path, 1, trained(samples, {})))).read_summaries([1])
    facts = dict(build_page(summary, texts, 0.1).facts)
    assert facts["reference answer"] == f"5{escape_control(' '.join(HOSTILE.split()))}"
    assert (facts["column level"], facts["column tests"]) == ("2", '["a\\nb"]')
    assert facts["column notes"] == f"{'x' * 300} ..."


def test_a_turn_tells_what_is_chosen_what_is_a_call_and_which_tokens_differ(tmp_path, texts):
    batch = trained(AGENT, {(0, UMLAUT + 1): 0.25, (0, 0): 0.01})
    [summary] = SampleReader(str(written(tmp_path, 1, batch))).read_summaries([1])
    (*_, call, _, last), (_, repeated, _, _) = build_page(summary, texts, 0.1).segments

    def parts(message: PageMessage, **attributes) -> str:
        """Text of the spans of which all of this is true."""
        return "".join(
            span.text for span in message.spans
            if all(getattr(span, name) == value for name, value in attributes.items())
        )  # fmt: skip

    assert parts(call, is_chosen=True) == CALL and parts(call, is_chosen=False) == f"{ASSISTANT}\n"
    assert parts(call, part="call") == "<tool_call>add(2, 3)</tool_call>"
    assert parts(call, part="reasoning") == "<think>hm</think>"
    [marked] = [span for span in last.spans if span.gap is not None]
    assert (marked.text, marked.gap) == ("ü", 0.25)  # of the two tokens that are one character
    assert marked.about.split("\n")[1] == (
        f"token {ids('ü')[1]}: servers -1, trainer -1.25, advantage 0.5, version 3"
    )
    assert last.facts == "6 tokens, version 3, largest gap 0.25, advantage 0.5"
    assert repeated.facts == f"{len(ids(CALL))} tokens, context: trained in another segment"
    assert parts(repeated, is_chosen=True) == ""


HERMES = "<tool_call>x</tool_call>"
JSON_CALL = '{"name": "add", "parameters": {"a": 2}}'


@pytest.mark.parametrize(
    ("family", "answer_text", "reasoning", "call"),
    [
        ("llama-3", f"{JSON_CALL}<|eot_id|>", "", JSON_CALL),
        ("llama-3", f"So: {JSON_CALL}<|eot_id|>", "", ""),
        ("llama-3", f"{JSON_CALL} is it<|eot_id|>", "", ""),
        ("llama-3", '{"a": 2}<|eot_id|>', "", ""),
        ("llama-3", '{"name": "add"', "", ""),
        ("published/qwen3", f"{JSON_CALL}<|im_end|>", "", ""),
        ("qwen3.5", f"hm\n</think>\n\n{HERMES}{END}", "hm\n</think>", HERMES),
        ("published/deepseek-r1-distill", "hm</think>Yes.", "hm</think>", ""),
        ("published/deepseek-r1-distill", "hm", "hm", ""),
        ("published/qwen3", f"hm</think>Yes.{END}", "", ""),
    ],
)  # fmt: skip
def test_parts_without_a_marker_of_their_own_are_known_by_what_the_template_puts_before_the_turn(
    family, answer_text, reasoning, call, tmp_path
):
    tokenizer = tokenizer_of(family)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = {"enable_thinking": True, "date_string": "26 Jul 2024"}
    prompt = tokenizer.apply_chat_template(
        CHAT[1:2], add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    answer = tokenizer.encode(answer_text, add_special_tokens=False)
    mask = [1] * len(answer)
    sample_of_family = Sample(prompt, answer, mask, [-1.0] * len(answer), mask, "stop", 0)
    [summary] = SampleReader(
        str(written(tmp_path, 1, Batch.collate([sample_of_family])))
    ).read_summaries([1])
    [(*_, last)] = build_page(summary, TokenTexts(tmp_path / "tokenizer.json"), 0.1).segments
    texts_by_part = {name: "" for name in ("reasoning", "call", "")}
    for span in last.spans:
        texts_by_part[span.part] += span.text
    assert (texts_by_part["reasoning"], texts_by_part["call"]) == (reasoning, call)


def test_every_trajectory_of_a_table_of_many_is_its_own(tmp_path, texts):
    samples = [sample(ASSISTANT, ("turn", f"this is {n}"), group_id=n) for n in range(200)]
    reader = SampleReader(str(written(tmp_path, 1, Batch.collate(samples))))
    for summary in reader.read_summaries([1])[::-9]:
        [[message]] = build_page(summary, texts, 0.1).segments
        assert message.text == f"{ASSISTANT}this is {summary.group}"


def test_roles_come_of_markers_that_are_tokens_and_not_of_text_that_looks_like_them(
    tmp_path, texts
):
    """Use a prompt of DeepSeek's form; the user spells another template's marker."""
    plain = [token for letter in f"{START}system\n" for token in ids(letter)]
    user, answers = "<｜User｜>", "<｜Assistant｜>"  # noqa: RUF001
    hostile = sample(user, ("turn", "yes"), group_id=0)
    hostile.prompt_ids = ids(f"before{user}") + plain + ids(answers)
    batch = Batch.collate([hostile])
    [summary] = SampleReader(str(written(tmp_path, 1, batch))).read_summaries([1])
    [messages] = build_page(summary, texts, 0.1).segments
    assert [shown(message) for message in messages] == [
        ("context", -1, "before"),
        ("user", -1, f"{user}{START}system\n"),
        ("assistant", 0, f"{answers}yes"),
    ]
    assert messages[-1].facts == "3 tokens, version 3"  # nobody compared their log-probs


ADD = {
    "name": "add",
    "description": "a sum",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALLED = {
    "type": "function",
    "id": "functions.add:0",
    "function": {"name": "add", "arguments": {"a": 2}},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "name": "add", "tool_call_id": "functions.add:0", "content": "5"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure?"},
]  # fmt: skip
WITHOUT_MARKERS = ("llama-2", "mixtral", "deepseek-v2")  # theirs are plain text
WITHOUT_TOOLS = (*WITHOUT_MARKERS, "published/deepseek-v3", "moonlight", "llama-3")


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_are_those_of_the_messages_that_a_chat_template_has_rendered(family, tmp_path):
    chat, options = CHAT, {"tools": [{"type": "function", "function": ADD}]}
    if family in WITHOUT_TOOLS:
        chat, options = [CHAT[0], CHAT[1], CHAT[4], CHAT[5]], {"date_string": "26 Jul 2024"}
    if family == "mixtral":  # has no system
        chat = chat[1:]
    tokenizer = tokenizer_of(family)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    answer = tokenizer.encode("Yes.", add_special_tokens=False)
    mask = [1] * len(answer)
    other_sample = Sample(prompt, answer, mask, [-1.0] * len(answer), mask, "stop", 0)
    [summary] = SampleReader(
        str(written(tmp_path, 1, Batch.collate([other_sample])))
    ).read_summaries([1])
    [messages] = build_page(summary, TokenTexts(tmp_path / "tokenizer.json"), 0.1).segments
    assert "".join(message.text for message in messages) == tokenizer.decode([*prompt, *answer])
    roles = [message.role for message in messages if message.role != "context"]
    expected = [message["role"] for message in chat] + ["assistant"]
    if family in WITHOUT_MARKERS:
        assert roles == ["assistant"]
    elif "deepseek" in family:  # the system has no marker
        assert roles == expected[1:]
    else:
        assert [role for role, _ in itertools.groupby(roles)] == expected
    assert messages[-1].turn == 0 and messages[-1].text.endswith("Yes.")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_are_the_text_and_every_token_once(texts, text):
    pieces = list(texts.split(ids(text)))
    assert "".join(piece.text for piece in pieces) == text
    bounds = [0, *(bound for piece in pieces for bound in (piece.start, piece.end)), len(ids(text))]
    assert all(bounds[i] == bounds[i + 1] for i in range(0, len(bounds), 2))
    if "\ufffd" not in text:  # else tokens wait for the rest of a character that is whole
        assert all(len(piece.text) == 1 or piece.text in (*SPECIAL, *ADDED) for piece in pieces)


@given(tokens=st.lists(st.integers(0, 300), max_size=60))
def test_any_tokens_are_pieces_of_a_bounded_number_of_them(texts, tokens):
    pieces = list(texts.split(tokens))
    assert [index for piece in pieces for index in range(piece.start, piece.end)] == [
        *range(len(tokens))
    ]
    assert all(piece.end - piece.start <= 8 for piece in pieces)
    unknown = [piece.text for piece in pieces if tokens[piece.start] >= BYTES.get_vocab_size()]
    assert all(re.fullmatch(r"\[token \d+\]", text) for text in unknown)


def test_blanks_and_bytes_of_tokenizers_without_a_byte_level_stay(tmp_path):
    path = tmp_path / "tokenizer.json"
    made = piece_tokenizer()
    made.save(str(path))
    tokens = ["<s>", "▁a", "▁b", "<0xC3>", "<0xBC>", "<0xC3>", "a", "▁b"]
    pieces = TokenTexts(path).split([made.token_to_id(token) for token in tokens])
    assert [piece.text for piece in pieces] == ["<s>", " a", " b", "ü", "\ufffda", " b"]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("two\nlines\tü 你 👩\u200d💻", "two\nlines\tü 你 👩\u200d💻"),
        ("\x1b[31m", r"\x1b[31m"),
        ("a\rb\x00\x7f\x9b\x85", r"a\rb\x00\x7f\x9b\x85"),
        ("\u202eabc\u2066\u2028", r"\u202eabc\u2066\u2028"),
    ],
)
def test_only_text_is_shown(text, seen):
    assert escape_control(text) == seen


def test_images_are_shown_in_the_place_of_their_tokens(tmp_path):
    text = tiny_vision.build_tokenizer()
    pad = "<|image_pad|>"

    def encode(content: str) -> list[int]:
        return text.encode(content)

    files = [draw(64, 64), draw(96, 64, "blue")]
    digests = [ImageStore.open(tmp_path / "images").add(inspect_image(f, 10**6)) for f in files]
    prompt = encode(f"{START}user\n<|vision_start|>{pad * 4}<|vision_end|>?{END}\n{ASSISTANT}")
    response = encode(f"red{END}\n{START}user\n<|vision_start|>{pad * 6}<|vision_end|>{END}\n")
    num = len(response)
    seen = Sample(
        prompt, response, [int(i < 4) for i in range(num)], [0.0] * num, [0] * num, "stop", 0,
        images=(*digests, "../config.json"),
    )  # fmt: skip
    run = written(tmp_path, 1, Batch.collate([seen]))
    text.backend_tokenizer.save(str(run / "samples" / "tokenizer.json"))
    [summary] = SampleReader(str(run)).read_summaries([1])
    page = build_page(summary, TokenTexts(run / "samples" / "tokenizer.json"), 0.1, run)
    shown_text = "".join(message.text for message in page.segments[0])
    for digest, num in zip(digests, (4, 6), strict=True):
        assert f"<|vision_start|>[image {digest[:8]}: {num} tokens]<|vision_end|>" in shown_text
    assert pad not in shown_text
    html = format_html(page)
    for content in files:
        assert f'src="data:image/png;base64,{base64.b64encode(content).decode()}"' in html
    assert html.count("<img") == 2
    (tmp_path / "images" / digests[1]).unlink()
    assert f"6 tokens, not in {tmp_path / 'images'}]" in format_html(page)
