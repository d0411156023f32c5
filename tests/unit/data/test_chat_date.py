"""One date in all prompts of a run, whatever day it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path

import pytest

from mcore_rl.agents.chat_template.codec import ChatMessage, parse_messages
from mcore_rl.agents.chat_template.validation import select_codec
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.rules_train import validate_eval, validate_train
from mcore_rl.config.schema import (
    ConversationsConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    RLConfig,
    SFTConfig,
)
from mcore_rl.data.datasets import load_prompts, load_supervised
from mcore_rl.data.examples import load_conversations
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.jobs.output import STARTED, read_chat_date
from tests.unit.agents.families import template_of, tokenizer_of

CHAT = [{"role": "user", "content": "What day is it?"}]
ROW = {"messages": CHAT, "answer": "9", "response": "Sunday."}
# How templates of families write the day, and what that is.
DATES = {
    template_of("llama-3"): "Today Date: 09 Mar 2025\n",
    template_of("llama-3").replace("strftime_now is defined", "false"): "Today Date: 09 Mar 2025\n",
    "Today: {{ strftime_now('%Y-%m-%d') }}": "Today: 2025-03-09",  # gpt-oss, Mistral
    "It is {{ strftime_now('%B %d, %Y') }}.": "It is March 09, 2025.",  # Granite
    "{{ strftime_now('%A %H:%M') }}": "Sunday 00:00",
}


def saved(folder: Path, template: str) -> str:
    rest = "" if "eot_id" in template else "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer_of("llama-3", template + rest).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("template", DATES)
def test_the_date_of_a_prompt_is_that_of_the_setting(tmp_path, template):
    tokenizer = load_tokenizer(saved(tmp_path, template), "2025-03-09")
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert DATES[template] in prompt
    default = load_tokenizer(tmp_path).apply_chat_template(CHAT, tokenize=False)
    day = date.fromisoformat(ModelConfig.chat_date)
    assert (f"{day:%d %b %Y}" in default) == ("09 Mar 2025" in DATES[template])
    assert "2025" not in default


def test_rows_agents_and_examples_have_the_same_date(tmp_path):
    path = saved(tmp_path / "model", template_of("llama-3"))
    tokenizer = load_tokenizer(path, "2025-03-09")
    file = tmp_path / "rows.jsonl"
    answered = [*CHAT, {"role": "assistant", "content": "Sunday."}]
    file.write_text(json.dumps(ROW | {"whole": answered}) + "\n")
    prompt = load_prompts(file, DataConfig(), tokenizer)[0].prompt_ids
    assert "Today Date: 09 Mar 2025" in tokenizer.decode(prompt)
    assert select_codec(load_tokenizer(path, "2025-03-09")).render(parse_messages(CHAT)) == prompt
    supervised = load_supervised(file, DataConfig(), "response", tokenizer)
    assert supervised.jagged("prompt_ids")[0].tolist() == prompt
    config = ConversationsConfig(messages_column="whole")
    examples = load_conversations(str(file), config, tokenizer)
    assert examples.take([0]).jagged("prompt_ids")[0].tolist() == prompt
    today = select_codec(load_tokenizer(path)).render([ChatMessage("user", CHAT[0]["content"])])
    assert today != prompt


@pytest.mark.parametrize("value", ["", "today", "20250309", "2025-02-30", "9 Mar 2025"])
def test_a_date_that_is_none_is_refused(value):
    message = rf"model\.chat_date='{value}'; allowed: a date, YYYY-MM-DD"
    for config, check in ((RLConfig(), validate_rl), (SFTConfig(), validate_train)):
        config.model.chat_date = value
        with pytest.raises(ConfigError, match=message):
            check(config)
    config = EvalConfig()
    config.model.chat_date, config.model.path = value, "m"
    with pytest.raises(ConfigError, match=message if value else "data.sets is empty"):
        validate_eval(config)


def test_an_evaluation_and_a_chat_have_the_date_of_the_run(tmp_path):
    config = RLConfig()
    config.model.chat_date = "2025-03-09"
    (tmp_path / STARTED).write_text(json.dumps(asdict(config)))
    assert read_chat_date(str(tmp_path)) == "2025-03-09"
    (tmp_path / STARTED).write_text(json.dumps({"model_type": "llama", "model": "x"}))
    assert read_chat_date(str(tmp_path)) == ModelConfig.chat_date
    assert read_chat_date(str(tmp_path / "nowhere")) == ModelConfig.chat_date
