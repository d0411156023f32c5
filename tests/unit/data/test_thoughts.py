"""The start of the answer in a response: by hand, and by the parsers of `renderers`."""

import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.data.thoughts import find_answer
from tests.unit.agents.families import tokenizer_of

OPENS, CLOSES = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("response", "prompt_end", "answer"),
    [
        ("C", "", "C"),
        (" C \n", "", " C \n"),  # as it is, without thoughts
        ("", "", ""),
        ("<think>\nA? No.\n</think>\n\nC\n", "", "C\n"),
        ("\n<think>A?</think>C", "<|assistant|>", "C"),
        ("<think></think>C", "", "C"),
        ("A? No.\n</think>\n\nC", OPENS, "C"),
        ("<think>\nA?</think> C", OPENS, "C"),  # opened twice
        ("A? No.\n</think>\n\nC", "", "C"),  # as in vLLM: nobody has seen what opened them
        ("<think>A?", "", ""),
        ("A?", OPENS, ""),
        ("A?</think>", OPENS, ""),
        ("", OPENS, ""),
        ("C", CLOSES, "C"),
        ("<think>A?</think>C", CLOSES, "C"),
        ("<think>A?", CLOSES, ""),
        ("It ends with </think>.", CLOSES, "It ends with </think>."),
        ("<think>A?</think>It ends with </think>.", "", "It ends with </think>."),
        ("<think>A?</think> <think>B?</think> C", "", "C"),
        ("<think>A?</think> <think>B?", "", ""),
        ("<think>A?</think>\nC <think>B?</think>", "", "C <think>B?</think>"),
        ("`<think>` and `</think>`", "", "`<think>` and `</think>`"),
        ("C", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", "C"),
        ("[THINK]A?[/THINK]C", "", "C"),
        ("A?</seed:think>C", "<seed:think>", "C"),
        ("<|channel>thought\nA?<channel|>C", "<|turn>model\n", "C"),
        ("<|START_THINKING|>A?", "", ""),
        (
            "<|channel|>analysis<|message|>A?<|end|><|start|>assistant<|channel|>final<|message|>C",
            "<|start|>assistant",
            "C",
        ),
        ("<|channel|>analysis<|message|>A? the final answer", "<|start|>assistant", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}"),
    ],
)
def test_the_answer_begins_behind_the_thoughts(response, prompt_end, answer):
    assert find_answer(response, prompt_end) == answer


TURNS = [
    "<think>\nThe answer is A? No.\n</think>\n\nThe answer is C.",
    "The answer is A? No.\n</think>\n\nThe answer is C.",
    "<think>\nThe answer is A?",
    "The answer is C.",
    "<think></think>C",
]
HARMONY = [
    "<|channel|>analysis<|message|>A? No.<|end|><|start|>assistant<|channel|>final<|message|>C",
    "<|channel|>analysis<|message|>A? No.",
    "<|channel|>final<|message|>C",
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"enable_thinking": False}),
        ("qwen3.5", {}),
        ("published/qwen3", {}),
        ("deepseek-r1", {}),
        ("glm-4.5", {}),
        ("gpt-oss", {}),
    ],
)
def test_the_answer_is_the_content_that_the_codec_of_a_family_reads(family, options):
    tokenizer = tokenizer_of(family)
    codec = select_codec(tokenizer, options=options)
    prompt = codec.render([ChatMessage("user", "A or C?")])
    prompt_text = tokenizer.decode(prompt)
    # The renderers differ on thoughts that nothing opens, and on GLM's turns without any mark.
    opens = prompt_text.rstrip().endswith("<think>")
    texts = [t for t in TURNS if opens or t.startswith("<think>")]
    for text in HARMONY if family == "gpt-oss" else texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        content = codec.parse(ids, (), prompt).content
        assert find_answer(text, prompt_text).strip() == content.strip(), text
