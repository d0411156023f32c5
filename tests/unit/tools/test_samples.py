"""`mcore-rl samples`: from a batch to tables, lists, pages and HTML, each worked out by hand."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mcore_rl.cli.main import main
from mcore_rl.data.batch import Batch
from mcore_rl.data.sample import Sample, TurnSpan
from mcore_rl.data.sample_tables import summary_columns, table_path, token_columns, write_table
from mcore_rl.tools.samples.page import Message, page_of
from mcore_rl.tools.samples.tables import SampleReader
from mcore_rl.tools.samples.token_texts import TokenTexts, visible
from tests.pages import of_kind

START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = (START, END, "<｜User｜>", "<｜Assistant｜>")  # noqa: RUF001
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
ASSISTANT = f"{START}assistant\n"
HOSTILE = "<script>alert(1)</script>\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\0&"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, so that most characters are several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return made


def piece_tokenizer() -> Tokenizer:
    """Of the kind of Llama 2: blanks are in tokens, rare bytes are tokens of their own."""
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
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return path


@pytest.fixture(scope="module")
def texts(tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer)


BYTES = byte_tokenizer()


def ids(text: str) -> list[int]:
    return BYTES.encode(text, add_special_tokens=False).ids


def sample(
    prompt: str,
    *parts: tuple[str, str],
    version: int = 3,
    untrained: tuple[int, ...] = (),
    **fields,
) -> Sample:
    """Parts of the response: ("turn", text) or ("context", text), one after the other."""
    response: list[int] = []
    mask: list[int] = []
    spans: list[TurnSpan] = []
    for kind, text in parts:
        found = ids(text)
        if kind == "turn":
            spans.append(TurnSpan(str(len(spans)), len(response), len(response) + len(found)))
        chosen = kind == "turn" and len(spans) - 1 not in untrained
        response += found
        mask += [int(chosen)] * len(found)
    return Sample(
        prompt_ids=ids(prompt),
        response_ids=response,
        response_mask=mask,
        rollout_log_probs=[-1.0 * chosen for chosen in mask],
        weight_versions=[version if chosen else -1 for chosen in mask],
        finish_reason=fields.pop("finish_reason", "stop"),
        turn_spans=tuple(spans),
        **fields,
    )


def trained(samples: list[Sample], gaps: dict[tuple[int, int], float]) -> Batch:
    """With log-probs of the trainer that differ at (sample, response token)."""
    batch = Batch.of(samples)
    rows = [row.copy() for row in batch.jagged("rollout_log_probs")]
    for (row, token), gap in gaps.items():
        rows[row][token] -= gap
    column = batch.jagged("rollout_log_probs").with_values(np.concatenate(rows))
    mask = batch.jagged("response_mask")
    advantages = column.with_values(np.where(mask.values, np.float32(0.5), np.float32(0)))
    return batch.with_columns(log_probs=column, advantages=advantages)


def written(run: Path, tokenizer: Path, step: int, batch: Batch, evaluation: str = "") -> Path:
    (run / "samples").mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text("{}")
    (run / "samples" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    columns = summary_columns(batch) | token_columns(batch)
    write_table(table_path(run, step, evaluation), columns, len(batch))
    return run


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


def shown(message: Message) -> tuple[str, int, str]:
    return message.role, message.turn, message.text


def test_a_trajectory_of_two_segments_is_its_messages_by_role_and_turn(tmp_path, tokenizer, texts):
    batch = trained(AGENT[::-1], {(1, UMLAUT + 1): 0.25, (1, 0): 0.01})
    [summary] = SampleReader(str(written(tmp_path, tokenizer, 1, batch))).summaries([1])
    page = page_of(summary, texts, 0.1)
    first, second = page.segments
    assert [shown(message) for message in first] == [
        ("system", -1, f"{START}system\nBe brief.{END}\n"),
        ("user", -1, f"{START}user\n2+3?{END}\n"),
        ("assistant", 0, f"{ASSISTANT}{CALL}\n"),
        ("user", -1, f"{START}user\n"),
        ("tool", -1, f"<tool_response>5 is it</tool_response>{END}\n"),
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


def test_a_turn_tells_what_is_chosen_what_is_a_call_and_which_tokens_differ(
    tmp_path, tokenizer, texts
):
    batch = trained(AGENT, {(0, UMLAUT + 1): 0.25, (0, 0): 0.01})
    [summary] = SampleReader(str(written(tmp_path, tokenizer, 1, batch))).summaries([1])
    (*_, call, _, _, last), (_, repeated, _, _) = page_of(summary, texts, 0.1).segments

    def parts(message: Message, **wanted) -> str:
        """Text of the spans of which all of this is true."""
        return "".join(
            span.text for span in message.spans
            if all(getattr(span, name) == value for name, value in wanted.items())
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


def test_roles_come_of_markers_that_are_tokens_and_not_of_text_that_looks_like_them(
    tmp_path, texts, tokenizer
):
    """A prompt of DeepSeek's form; the user spells another template's marker."""
    plain = [token for letter in f"{START}system\n" for token in ids(letter)]
    asked, answers = "<｜User｜>", "<｜Assistant｜>"  # noqa: RUF001
    one = sample(asked, ("turn", "yes"), group_id=0)
    one.prompt_ids = ids(f"before{asked}") + plain + ids(answers)
    batch = Batch.of([one])
    [summary] = SampleReader(str(written(tmp_path, tokenizer, 1, batch))).summaries([1])
    [messages] = page_of(summary, texts, 0.1).segments
    assert [shown(message) for message in messages] == [
        ("context", -1, "before"),
        ("user", -1, f"{asked}{START}system\n"),
        ("assistant", 0, f"{answers}yes"),
    ]
    assert messages[-1].facts == "3 tokens, version 3"  # nobody compared their log-probs


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_are_the_text_and_every_token_once(texts, text):
    found = list(texts.pieces(ids(text)))
    assert "".join(piece.text for piece in found) == text
    bounds = [0, *(bound for piece in found for bound in (piece.start, piece.end)), len(ids(text))]
    assert all(bounds[i] == bounds[i + 1] for i in range(0, len(bounds), 2))
    if "\ufffd" not in text:  # else tokens wait for the rest of a character that is whole
        assert all(len(piece.text) == 1 or piece.is_marker for piece in found)


@given(tokens=st.lists(st.integers(0, 300), max_size=60))
def test_any_tokens_are_pieces_of_a_bounded_number_of_them(texts, tokens):
    found = list(texts.pieces(tokens))
    assert [at for piece in found for at in range(piece.start, piece.end)] == [*range(len(tokens))]
    assert all(piece.end - piece.start <= 8 for piece in found)
    unknown = [piece.text for piece in found if tokens[piece.start] >= BYTES.get_vocab_size()]
    assert all(re.fullmatch(r"\[token \d+\]", text) for text in unknown)


def test_blanks_and_bytes_of_tokenizers_without_a_byte_level_are_kept(tmp_path):
    path = tmp_path / "tokenizer.json"
    made = piece_tokenizer()
    made.save(str(path))
    tokens = ["<s>", "▁a", "▁b", "<0xC3>", "<0xBC>", "<0xC3>", "a", "▁b"]
    found = TokenTexts(path).pieces([made.token_to_id(token) for token in tokens])
    assert [piece.text for piece in found] == ["<s>", " a", " b", "ü", "\ufffda", " b"]


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
    assert visible(text) == seen


def hostile_run(run: Path, tokenizer: Path) -> Path:
    """One response that means harm, to a prompt that does, with a part and a role that do."""
    one = sample(
        f"{START}user\n{HOSTILE}{END}\n{ASSISTANT}", ("turn", HOSTILE), group_id=0,
        reward_parts={HOSTILE: 1.0}, role=HOSTILE,
    )  # fmt: skip
    return written(run, tokenizer, 1, trained([one], {(0, 3): 2.0, (0, 26): 3.0}))


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "samples", *map(str, arguments)])
    status = main()
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_page_in_plain_text(monkeypatch, capsys, tmp_path, tokenizer):
    batch = trained(
        [
            sample(
                f"{START}user\n2+3?{END}\n{ASSISTANT}", ("turn", f"5{END}"), group_id=2, reward=1.0
            )
        ],
        {(0, 0): 0.5},
    )
    run = written(tmp_path / "run", tokenizer, 7, batch)
    five = ids("5")[0]
    assert command(monkeypatch, capsys, run) == (0, f"""\
step 7, group 2, trajectory 0
  reward: 1
  status: finished (stop)
  length: 1 segments, 1 turns, 2 tokens of responses, 2 of them the policy's
  advantage: 0.5
  weights: version 3
  largest gap: 0.5 nats between trainer and servers

[user]
{START}user
2+3?{END}

[assistant, turn 0 (2 tokens, version 3, largest gap 0.5, advantage 0.5)]
{ASSISTANT}5{END}
  gap 0.5 at '5': token {five}: servers -1, trainer -1.5, advantage 0.5, version 3

""", "")  # fmt: skip


@pytest.mark.parametrize("option", [(), ("--list",)])
def test_nothing_of_a_response_reaches_whoever_reads_but_text(
    monkeypatch, capsys, tmp_path, tokenizer, option
):
    status, out, _ = command(monkeypatch, capsys, hostile_run(tmp_path, tokenizer), *option)
    assert status == 0 and r"\x1b[2J\x1b]0;mine\x07\r\x9b31m\u202e\x00&" in out
    assert all(character == "\n" or character.isprintable() for character in out)


def test_on_a_terminal_there_are_colours_in_a_pager_and_no_other_escapes(tmp_path, tokenizer):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PAGER": "tee seen", "TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    run = hostile_run(tmp_path, tokenizer)
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli.main", "samples", str(run)],
        stdout=theirs, stderr=subprocess.PIPE, env=environment, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    assert (done.returncode, done.stderr) == (0, b"")
    seen = (tmp_path / "seen").read_text()
    assert "\x1b[1;37;41m" in seen and "\x1b[2m" in seen and "\x1b[1;32m" in seen
    rest = re.sub(r"\x1b\[[0-9;]*m", "", seen)
    assert all(character == "\n" or character.isprintable() for character in rest)


class Elements(HTMLParser):
    """The tags of a page, its attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def test_html_is_one_file_of_text_that_runs_and_loads_nothing(
    monkeypatch, capsys, tmp_path, tokenizer
):
    file = tmp_path / "page.html"
    run = hostile_run(tmp_path / "run", tokenizer)
    status, out, err = command(monkeypatch, capsys, run, "--html", file)
    assert (status, err) == (0, "") and out.startswith(f"{file}: step 1, group 0, trajectory 0")
    content = file.read_bytes().decode()
    page = Elements(content)
    assert page.tags == {
        "html", "head", "meta", "title", "style", "body", "h1", "dl", "dt", "dd", "p", "span",
        "section", "h3", "pre",
    }  # fmt: skip
    assert page.attributes == {"lang", "charset", "http-equiv", "content", "class", "title"}
    assert page.text.count(visible(HOSTILE)) == 5  # title, heading, part, prompt and response
    assert all(character == "\n" or character.isprintable() for character in content)
    assert 'class="c gap" title="token ' in content
    assert [entry.name for entry in tmp_path.glob("*page*")] == ["page.html"]


GROUPS = [  # group, reward, tokens, gap
    (0, 0.5, 3, 0.01),
    (1, 1.0, 1, 0.2),
    (2, 0.0, 2, math.nan),
]


@pytest.fixture
def several(tmp_path, tokenizer) -> Path:
    """Steps 3 and 5 with three groups of one response each, and an evaluation."""
    samples = [
        sample(ASSISTANT, ("turn", "x" * length), group_id=group, reward=reward)
        for group, reward, length, _ in GROUPS
    ]
    gaps = {(row, 0): gap for row, (*_, gap) in enumerate(GROUPS)}
    run = tmp_path / "outputs" / "mine"
    for step in (3, 5):
        written(run, tokenizer, step, trained(samples, gaps))
    asked = sample(ASSISTANT, ("turn", "evaluated"), group_id=-1)
    return written(run, tokenizer, 5, Batch.of([asked]), "math")


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ((), [(5, 0), (5, 1), (5, 2)]),
        (("--step", "3"), [(3, 0), (3, 1), (3, 2)]),
        (("--step", "all", "--group", "1"), [(3, 1), (5, 1)]),
        (("--step", "4-9", "--reverse"), [(5, 2), (5, 1), (5, 0)]),
        (("--sort", "reward"), [(5, 1), (5, 0), (5, 2)]),
        (("--sort", "length"), [(5, 0), (5, 2), (5, 1)]),
        (("--sort", "gap", "--num", "2"), [(5, 2), (5, 1)]),
        (("--sort", "gap", "--reverse", "--num", "1"), [(5, 0)]),
        (("--evaluation", "math"), [(5, -1)]),
        (("--trajectory", "0", "--group", "2"), [(5, 2)]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_a_list_has_what_is_asked_for_in_its_order(monkeypatch, capsys, several, options, listed):
    status, out, err = command(monkeypatch, capsys, several, "--list", *options)
    assert (status, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["step", "group", "trajectory"]
    assert [tuple(map(int, line.split()[:2])) for line in lines] == listed


def test_a_list_tells_what_no_table_has(monkeypatch, capsys, several):
    columns = summary_columns(Batch.of([sample(ASSISTANT, ("turn", "x"), group_id=0)]))
    write_table(table_path(several, 6), columns, 9)
    _, out, _ = command(monkeypatch, capsys, several, "--list")
    assert out.splitlines()[1].split() == ["6", "0", "0", "1", "1", "1", "finished", "0"]
    assert out.splitlines()[2].startswith("8 samples of these steps are in no table: samples.max")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("typo",), "RUN='typo' does not exist"),
        ((".",), "RUN='.' is not the output folder of a run: no config.json"),
        (("begun",), "RUN='begun' has no samples: no step has been trained yet, or "
         "samples.every=0"),
        (("outputs/mine", "--step", "4"), "--step=4: there is no table of it; there are tables of "
         "2 steps, from 3 to 5"),
        (("outputs/mine", "--step", "x"), "--step='x'; allowed: all, a step, or two as in 3-7"),
        (("outputs/mine", "--group", "9"), "--group=9: no trajectory of these steps; "
         "mcore-rl samples outputs/mine --list shows them"),
        (("outputs/mine", "--evaluation", "code"), "--evaluation='code': outputs/mine has none of "
         "that name; allowed: math"),
        (("outputs/mine", "--sort", "gaps"), "--sort='gaps'; allowed: 'reward', 'gap', 'length'"),
        (("outputs/mine", "--num", "0"), "--num=0; allowed: at least 1"),
        (("outputs/mine", "--tokenizer", "begun"), "there is no tokenizer at begun/tokenizer.json"),
        (("outputs/mine", "--html", "no/x.html"), "--html=no/x.html: there is no folder no"),
        (("outputs/mine", "--html", "x", "--list"), "--list and --html exclude each other; "
         "allowed: one of them"),
        (("alone",), "there is no tokenizer at alone/samples/tokenizer.json; allowed: --tokenizer "
         "with the folder of the model"),
        (("texts",), "texts/samples/step_000001.parquet has no tokens (prompt_ids, response_ids, "
         "response_mask): samples.tokens=false; allowed: --list"),
        (("older",), "older/samples/step_000001.parquet has no column trajectory, segment, "
         "num_turns, status, replayed: it is of a version of mcore-rl before there was "
         "`mcore-rl samples`"),
        (("broken",), "broken/samples/step_000001.parquet cannot be read: "),
        (("outputs/mine", "--tokenizer", "begun/config.json"), "begun/config.json cannot be read "
         "as a tokenizer: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_is_not_there_is_told_in_one_line(
    monkeypatch, capsys, tmp_path, several, tokenizer, arguments, told
):
    monkeypatch.chdir(tmp_path)
    one = summary_columns(batch := Batch.of([sample(ASSISTANT, ("turn", "x"), group_id=0)]))
    for name in ("begun", "alone", "texts", "older", "broken"):
        written(tmp_path / name, tokenizer, 1, batch)
    (tmp_path / "begun" / "samples" / "step_000001.parquet").unlink()
    (tmp_path / "alone" / "samples" / "tokenizer.json").unlink()
    write_table(table_path(tmp_path / "texts", 1), one, 1)
    write_table(table_path(tmp_path / "older", 1), {"group": one["group"]}, 1)
    table_path(tmp_path / "broken", 1).write_bytes(b"PAR1 and no more")
    status, out, err = command(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"mcore-rl samples: {told}") and err.count("\n") == 1
    assert told.endswith(": ") or err == f"mcore-rl samples: {told}\n"


@pytest.mark.parametrize("line", of_kind("samples"), ids=str)
def test_a_command_of_a_page_runs(monkeypatch, capsys, several, line):
    monkeypatch.chdir(several.parents[1])
    status, out, err = command(monkeypatch, capsys, *line.text.split()[2:])
    assert (status, err) == (0, "") and out


def test_no_engine_is_imported_to_look_at_a_page(several):
    program = """if True:
        import sys
        from mcore_rl.cli.main import main
        sys.argv = ["mcore-rl", "samples", sys.argv[1]]
        assert main() == 0
        print({"torch", "transformers", "vllm", "ray", "megatron", "hydra"} & set(sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(several)], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "set()", done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(several):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c",
         f"{sys.executable} -m mcore_rl.cli.main samples {several} --step all | head -1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "step 3, group 0, trajectory 0\n"
