import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import DataConfig
from mcore_rl.data.datasets import PromptDataset, load_prompts, load_supervised
from mcore_rl.data.tokenizer import check_tokenizer_matches, load_tokenizer
from mcore_rl.examples.tasks import tiny_model

CHATS = [
    [{"role": "user", "content": "Add 1 and 2."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 30 and 4."}],
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.train_tokenizer(["user\nAdd 1 and 2. Be brief.", "assistant\n#### 3"] * 20)


@pytest.fixture
def parquet(tmp_path):
    def write(**columns: list) -> str:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table(columns), path)
        return str(path)

    return write


def test_prompts_are_chats_through_the_template_with_the_other_columns_as_fields(
    parquet, tokenizer
):
    path = parquet(messages=CHATS, answer=["3", "34"], source=["a", "b"])
    prompts = load_prompts(path, DataConfig(), tokenizer)
    assert len(prompts) == 2
    assert tokenizer.decode(prompts[1].prompt_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd 30 and 4.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompts[1].fields == {"answer": "34", "source": "b"}


def test_prompt_and_answer_columns_may_have_other_names(parquet, tokenizer):
    path = parquet(question=CHATS, solution=["3", "34"])
    config = DataConfig(prompt_column="question", answer_column="solution")
    assert load_prompts(path, config, tokenizer)[0].fields == {"solution": "3", "answer": "3"}


@pytest.mark.parametrize(
    ("columns", "names", "fields"),
    [
        (("prompt", "solution"), ["prompt", "solution"], {"solution": "3", "answer": "3"}),
        (("question", "label"), ["question", "label"], {"label": "3", "answer": "3"}),
        (("problem", "ground_truth"), ["problem", "ground_truth"], {"ground_truth": "3"}),
        (("messages", "answer"), [], {"answer": "3"}),
        (("problem", "question", "answer"), ["question"], {"problem": CHATS[0]}),
        (("prompt", "gold"), ["prompt"], {"gold": "3"}),
    ],
)
def test_columns_are_the_first_known_ones_where_no_setting_names_them(
    parquet, tokenizer, columns, names, fields
):
    *prompts, answer = columns
    path = parquet(**{name: [CHATS[0]] for name in prompts}, **{answer: ["3"]})
    loaded = load_prompts(path, DataConfig(), tokenizer)
    assert loaded[0].messages == CHATS[0]
    assert fields.items() <= loaded[0].fields.items()
    assert ("answer" in loaded[0].fields) == (answer != "gold")
    lines = list(loaded.describe_columns())
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert f"{path!r}: column {name!r} is read, as data." in line


def test_text_prompt_is_a_message_of_the_user(parquet, tokenizer):
    path = parquet(prompt=["Add 1 and 2."], chat=[CHATS[0]], answer=["3"])
    from_text = load_prompts(path, DataConfig(), tokenizer)[0]
    from_chat = load_prompts(path, DataConfig(prompt_column="chat"), tokenizer)[0]
    assert from_text.prompt_ids == from_chat.prompt_ids
    assert from_text.messages == from_chat.messages == CHATS[0]


def test_text_prompt_is_tokenised_as_it_is_without_a_chat_template(parquet):
    base = tiny_model.train_tokenizer(["Add 1 and 2. Be brief."] * 20)
    base.chat_template = None
    base.bos_token = base.eos_token
    base.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", base.eos_token_id)]
    )
    text, chat = parquet(prompt=["Add 1 and 2."], answer=["3"]), CHATS[:1]
    ids = load_prompts(text, DataConfig(), base)[0].prompt_ids
    assert base.decode(ids) == "Add 1 and 2."  # without EOS
    base.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A",
        special_tokens=[("<|im_start|>", base.convert_tokens_to_ids("<|im_start|>"))],
    )
    ids = load_prompts(text, DataConfig(), base)[0].prompt_ids
    assert base.decode(ids) == "<|im_start|>Add 1 and 2."
    with pytest.raises(
        ConfigError, match=r"row 0 is a chat .* no chat template; allowed: a prompt"
    ):
        load_prompts(parquet(messages=chat, answer=["3"]), DataConfig(), base)


def test_supervised_rows_end_with_the_end_of_sequence_and_train_on_all_of_the_response(
    parquet, tokenizer
):
    path = parquet(messages=CHATS, response=["#### 3", "30+4=34\n#### 34"])
    batch = load_supervised(path, DataConfig(), "response", tokenizer)
    assert len(batch) == 2
    for row, text in enumerate(["#### 3", "30+4=34\n#### 34"]):
        response = batch.jagged("response_ids")[row].tolist()
        assert tokenizer.decode(response[:-1]) == text
        assert response[-1] == tokenizer.eos_token_id
        assert batch.jagged("response_mask")[row].tolist() == [1] * len(response)
    prompts = load_prompts(parquet(messages=CHATS, answer=["3", "34"]), DataConfig(), tokenizer)
    for row in range(2):
        assert batch.jagged("prompt_ids")[row].tolist() == prompts[row].prompt_ids


def test_a_missing_file_is_named_with_its_setting(tokenizer):
    with pytest.raises(ConfigError, match=r"data\.test_file='/no/such\.parquet' does not exist"):
        load_prompts("/no/such.parquet", DataConfig(), tokenizer, setting="data.test_file")


def test_a_file_that_is_no_parquet_is_named(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    path.write_text("question,answer\n")
    with pytest.raises(ConfigError, match=r"data\.train_file=.*cannot be read as parquet"):
        load_prompts(path, DataConfig(), tokenizer)


def test_a_missing_column_is_named_with_its_setting_and_the_columns_there_are(parquet, tokenizer):
    path = parquet(messages=CHATS, truth=["3", "34"])
    with pytest.raises(
        ConfigError, match=r"no column 'answer' \(data\.answer_column\); it has: messages, truth"
    ):
        load_prompts(path, DataConfig(), tokenizer, check_answer=str)
    with pytest.raises(ConfigError, match=r"no column 'solution' \(data\.answer_column\)"):
        load_prompts(path, DataConfig(answer_column="solution"), tokenizer)
    with pytest.raises(ConfigError, match=r"no column 'prompt' \(data\.prompt_column\)"):
        load_prompts(path, DataConfig(prompt_column="prompt"), tokenizer)
    with pytest.raises(
        ConfigError, match=r"warm_start\.train_file=.*'response' \(warm_start\.response_column\)"
    ):
        load_supervised(path, DataConfig(), "response", tokenizer)


def test_a_file_without_rows_is_refused(parquet, tokenizer):
    path = parquet(messages=[], answer=[])
    with pytest.raises(ConfigError, match=r"data\.train_file=.*has no rows"):
        load_prompts(path, DataConfig(), tokenizer)


@pytest.mark.parametrize(
    "chat",
    [" ", None, [], [{"role": "user", "content": None}], [{"content": "Add 1 and 2."}]],
)
def test_a_prompt_that_is_no_chat_is_refused(parquet, tokenizer, chat):
    path = parquet(messages=[chat], answer=["3"])
    with pytest.raises(ConfigError, match=r"row 0 of column 'messages' .*list of messages"):
        load_prompts(path, DataConfig(), tokenizer)


def test_a_prompt_that_is_too_long_is_named_with_the_limit(parquet, tokenizer):
    path = parquet(messages=CHATS, answer=["3", "34"])
    with pytest.raises(
        ConfigError, match=r"prompt of row 1 has \d+ tokens; .*data\.max_prompt_tokens=8"
    ):
        load_prompts(path, DataConfig(max_prompt_tokens=8), tokenizer)


def test_long_prompts_are_dropped_with_long_prompts_drop(parquet, tokenizer):
    path = parquet(messages=[CHATS[1], CHATS[0], CHATS[1]], answer=["34", "3", "35"])
    short = len(load_prompts(path, DataConfig(), tokenizer)[1].prompt_ids)
    config = DataConfig(max_prompt_tokens=short, long_prompts="drop")
    prompts = load_prompts(path, config, tokenizer)
    assert (len(prompts), prompts.num_dropped, prompts.num_rows) == (1, 2, 3)
    assert prompts[0].fields["answer"] == "3"
    config.long_prompts = "refuse"
    with pytest.raises(ConfigError, match=r"or data\.long_prompts=drop, .* out 2 of 3 rows"):
        load_prompts(path, config, tokenizer)
    config = DataConfig(max_prompt_tokens=short - 1, long_prompts="drop")
    with pytest.raises(
        ConfigError, match=r"no row is short enough: the prompt of row 0 has \d+ tok"
    ):
        load_prompts(path, config, tokenizer)


def test_prompts_of_several_files_are_counted_on_and_keep_the_number_of_their_row(
    tmp_path, tokenizer
):
    paths = [tmp_path / "a.parquet", tmp_path / "b.jsonl"]
    pq.write_table(pa.table({"messages": [CHATS[1], CHATS[0]], "answer": ["34", "3"]}), paths[0])
    rows = [{"messages": CHATS[0], "answer": 7}, {"messages": CHATS[1], "answer": 8}] * 2
    paths[1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = len(load_prompts(paths[1], DataConfig(), tokenizer)[0].prompt_ids)
    config = DataConfig(max_prompt_tokens=short, long_prompts="drop")
    dataset = PromptDataset(*(load_prompts(path, config, tokenizer) for path in paths))
    assert (len(dataset), dataset.sizes) == (3, [1, 2])
    assert [dataset[row].fields["answer"] for row in range(3)] == ["3", 7, 7]
    assert [dataset.get_row_number(row) for row in range(3)] == [1, 2, 4]


WITH_TOOLS = (
    "{% for tool in tools or [] %}<{{ tool['function']['name'] }}>{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
)


def test_tools_of_a_row_are_given_to_the_template(parquet):
    words = tiny_model.train_tokenizer(["user\nAdd 1 and 2. Be brief.", "assistant\n#### 3"] * 20)
    words.chat_template = WITH_TOOLS
    tools = [json.dumps([{"type": "function", "function": {"name": "add"}}]), None]
    path = parquet(messages=CHATS, answer=["3", "34"], response=["#### 3"] * 2, tools=tools)
    prompts = load_prompts(path, DataConfig(tools_column="tools"), words)
    texts = ["<add>user:Add 1 and 2.\n", "system:Be brief.\nuser:Add 30 and 4.\n"]
    assert [words.decode(prompts[row].prompt_ids) for row in range(2)] == texts
    assert prompts[0].fields["tools"] == tools[0]
    batch = load_supervised(path, DataConfig(tools_column="tools"), "response", words)
    assert [words.decode(ids) for ids in batch.jagged("prompt_ids")] == texts
    without = load_prompts(path, DataConfig(), words)
    assert words.decode(without[0].prompt_ids) == "user:Add 1 and 2.\n"


def test_tools_that_the_template_does_not_use_are_refused(parquet, tokenizer):
    tools = [[], [{"type": "function", "function": {"name": "add"}}]]
    path = parquet(messages=CHATS, answer=["3", "34"], tools=tools)
    with pytest.raises(ConfigError, match=r"row 1 has tools, and the model's chat template does"):
        load_prompts(path, DataConfig(tools_column="tools"), tokenizer)
    with pytest.raises(ConfigError, match=r"no column 'tool' \(data\.tools_column\)"):
        load_prompts(path, DataConfig(tools_column="tool"), tokenizer)


def test_a_response_that_is_no_text_is_refused(parquet, tokenizer):
    path = parquet(messages=CHATS, response=["#### 3", None])
    with pytest.raises(ConfigError, match=r"row 1 of column 'response' .*'None'; it must be text"):
        load_supervised(path, DataConfig(), "response", tokenizer)


@pytest.mark.parametrize(("answers", "row"), [(["3", None], 1), ([float("nan"), 34.0], 0)])
def test_a_row_without_an_answer_is_refused(parquet, tokenizer, answers, row):
    path = parquet(messages=CHATS, answer=answers)
    with pytest.raises(ConfigError, match=rf"row {row} has no answer in column 'answer'"):
        load_prompts(path, DataConfig(), tokenizer)


def test_a_chat_that_the_template_refuses_is_named_by_its_row(parquet):
    words = tiny_model.train_tokenizer(["user\nAdd 1 and 2. Be brief.", "assistant\n#### 3"] * 20)
    words.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system prompts') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    path = parquet(messages=CHATS, answer=["3", "34"])
    with pytest.raises(ConfigError, match=r"row 1 does not fit .*chat template: no system prompts"):
        load_prompts(path, DataConfig(), words)


def test_a_saved_tokenizer_loads_and_encodes_the_same(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "Add 30 and 4. Be brief."
    assert loaded.encode(text) == tokenizer.encode(text)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path='/no/such' does not exist"):
        load_tokenizer("/no/such")
    with pytest.raises(ConfigError, match=r"model\.path='/dev/null' is not a folder"):
        load_tokenizer("/dev/null")
    with pytest.raises(
        ConfigError, match=r"model\.path=.*has no tokenizer; it needs one of: tokenizer"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("removed", "message"),
    [("eos_token", "has no eos_token"), ("chat_template", "has no chat template")],
)
def test_a_tokenizer_that_cannot_end_or_chat_is_refused(tmp_path, tokenizer, removed, message):
    tokenizer.save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings.pop(removed, None)
    settings_file.write_text(json.dumps(settings))
    if removed == "chat_template":
        (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tokenizer):
    highest = max(tokenizer.get_vocab().values())
    check_tokenizer_matches(tokenizer, highest + 1)
    with pytest.raises(ConfigError, match=rf"ids up to {highest} .*vocab_size={highest}"):
        check_tokenizer_matches(tokenizer, highest)
