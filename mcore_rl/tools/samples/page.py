"""Pages of trajectories: messages by role, with the text of each token and its numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.regular_file import check_regular
from mcore_rl.data.batch import IMAGES
from mcore_rl.data.sample_tables import SAMPLES, TOKENIZER
from mcore_rl.observability.console import escape_control
from mcore_rl.tools.samples.tables import Array, Segment, Summary, read_segments

# Added tokens of chat templates: those that a role name follows, and those of one role.
_LLAMA = "<|start_header_id|>"
_HEADERS = ("<|im_start|>", "<|start|>", _LLAMA)
_KIMI_SYSTEM, _RESULT = "<|im_system|>", "<tool_response>"
_OPENERS = {
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
    "<|observation|>": "tool",
    "<|im_user|>": "user",
    "<|im_assistant|>": "assistant",
    "<｜User｜>": "user",  # noqa: RUF001 (DeepSeek's own bars)
    "<｜Assistant｜>": "assistant",  # noqa: RUF001
    "<｜tool▁outputs▁begin｜>": "tool",  # noqa: RUF001
    "<｜tool▁outputs▁end｜>": "assistant",  # noqa: RUF001
    _RESULT: "tool",
}
_ROLES = {  # other names of roles; "functions.NAME": a tool of gpt-oss
    "ipython": "tool",
    "observation": "tool",
    "functions": "tool",
    "developer": "system",
}
_ROLE = re.compile(rf"\s*(system|user|assistant|tool|{'|'.join(_ROLES)})\b")
_KIMI_SYSTEM_NAME = re.compile(r"(system|tool_declare)\b")  # else it is the name of a tool
_USER_WITH_RESULT = re.compile(rf"\s*user\s*{_RESULT}")
_MOST_SHOWN = 300  # characters of a column of the data row
_NAME_TOKENS = 12  # of a header, in which its role is named, at a letter each
# Parts of a turn of the policy; one that is not closed ends with the turn.
_PARTS = {
    "reasoning": re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL),
    "call": re.compile(
        r"<tool_call>.*?(?:</tool_call>|\Z)"
        r"|<｜tool▁calls▁begin｜>.*?(?:<｜tool▁calls▁end｜>|\Z)"  # noqa: RUF001
        r"|<\|tool_calls_section_begin\|>.*?(?:<\|tool_calls_section_end\|>|\Z)"
        r"|<\|python_tag\|>.*",
        re.DOTALL,
    ),
}
_THINK, _END_THINK = "<think>", "</think>"
_END = re.compile(r"\s*(?:<\|\w+\|>)?\s*")  # of a turn

_IMAGE = "<|image_pad|>"  # a token of an image
_INCOMPLETE = "\ufffd"  # the decoded text of bytes that are no whole character
_MAX_TOKENS_PER_CHARACTER = 8  # one for each of its four bytes, and as many to spare


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """Numbers of a token that the policy chose; NaN where there is none."""

    id: int
    servers: float  # log-probs in nats, as of the trainer
    trainer: float
    advantage: float
    version: int  # of the weights

    def __str__(self) -> str:
        """Return a line such as `token 17: servers -0.5, trainer -0.51, version 3`."""
        numbers = {name: getattr(self, name) for name in ("servers", "trainer", "advantage")}
        known = [f"{n} {format_number(x)}," for n, x in numbers.items() if not math.isnan(x)]
        return " ".join([f"token {self.id}:", *known, f"version {self.version}"])


@dataclass(frozen=True, slots=True)
class Span:
    """Text of neighbouring tokens that are shown in the same way."""

    text: str  # escaped: see console.escape_control
    is_chosen: bool
    part: str = ""  # "reasoning" or "call", of a turn
    gap: float | None = None  # largest of its tokens, nats, where it is to be marked
    tokens: tuple[TokenNumbers, ...] = ()  # those that the policy chose
    image: Path | None = None  # its file

    @property
    def about(self) -> str:
        """The numbers of its tokens, a line each."""
        return "\n".join(map(str, self.tokens))


@dataclass(slots=True)
class PageMessage:
    """Message of a role. `turn` is the number of the policy's turn in it; -1: it has none."""

    role: str  # system, user, assistant or tool; "context" where the template does not say
    turn: int = -1
    spans: list[Span] = field(default_factory=list)
    facts: str = ""  # of the turn

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    facts: list[tuple[str, str]]  # names and values
    segments: list[list[PageMessage]]


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens [start, end) and their text: one token, or those that share a character."""

    text: str
    start: int
    end: int


class TokenTexts:
    """The tokenizer of a run, or another one."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json; raise ConfigError if that fails."""
        try:
            check_regular(path)
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._added = set(self._tokenizer.get_added_tokens_decoder())

    def split(self, ids: Sequence[int]) -> Iterator[Piece]:
        """Yield all tokens as pieces, in order. Bytes that make no character are U+FFFD."""
        # A piece is the text that tokens from `start` add to those from `before`: some decoders
        # treat the first token of a text specially.
        before = start = 0
        for end, token in enumerate(ids, 1):
            if token in self._added or self._tokenizer.id_to_token(token) is None:
                if start < end - 1:
                    yield Piece(self._decode_added(ids, before, start, end - 1), start, end - 1)
                text = self._tokenizer.id_to_token(token)
                yield Piece(f"[token {token}]" if text is None else text, end - 1, end)
                before, start = end - 1, end
                continue
            text = self._decode_added(ids, before, start, end)
            if text.endswith(_INCOMPLETE) and end - start < _MAX_TOKENS_PER_CHARACTER:
                continue
            yield Piece(text, start, end)
            before, start = start, end
        if start < len(ids):
            yield Piece(self._decode_added(ids, before, start, len(ids)), start, len(ids))

    def _decode_added(self, ids: Sequence[int], before: int, start: int, end: int) -> str:
        known, text = (self._decode(ids[before:to]) for to in (start, end))
        if not text.startswith(known):  # of bytes that are no character if taken together
            return self._decode(ids[start:end])
        return text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def find_tokenizer(run: Path, given: Path | None) -> Path:
    """Return the tokenizer.json of a run, or the given one: the file, or a folder with it.

    Raises:
        ConfigError: There is none.
    """
    if given is None:
        path = run / SAMPLES / TOKENIZER
        hint = "; allowed: --tokenizer with the folder of the model"
    else:
        path, hint = (given / TOKENIZER if given.is_dir() else given), ""
    if not path.is_file():
        raise ConfigError(f"there is no tokenizer at {path}{hint}")
    return path


def build_page(summary: Summary, texts: TokenTexts, mark_gap: float, run: Path = Path()) -> Page:
    """Build a page; mark tokens whose log-probs differ by `mark_gap` nats or more.

    Args:
        run: Output folder, which has the images.

    Raises:
        ConfigError: The table has no tokens, or cannot be read.
    """
    segments = read_segments(summary)
    messages = [list(list_messages(segment, texts, mark_gap, run)) for segment in segments]
    return Page(format_title(summary), list(_list_facts(summary, segments)), messages)


def format_title(summary: Summary) -> str:
    role = f", role {escape_control(summary.role)}" if summary.role else ""
    return f"step {summary.step}, group {summary.group}, trajectory {summary.trajectory}{role}"


def _list_facts(summary: Summary, segments: Sequence[Segment]) -> Iterator[tuple[str, str]]:
    yield "reward", format_number(summary.reward)
    if summary.answer is not None:
        yield "reference answer", _shorten(summary.answer)
    for name, value in summary.columns.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"column {escape_control(name)}", _shorten(text)
    if summary.parts:
        parts = (
            f"{escape_control(name)} {format_number(part)}" for name, part in summary.parts.items()
        )
        yield "reward parts", ", ".join(parts)
    if summary.reward_error:
        yield "no reward", escape_control(summary.reward_error)
    yield "status", f"{summary.status} ({summary.finish_reason})"
    chosen = sum(int(segment.is_chosen.sum()) for segment in segments)
    length = f"{summary.num_tokens} tokens of responses, {chosen} of them the policy's"
    yield "length", f"{len(segments)} segments, {summary.num_turns} turns, {length}"
    if summary.advantage is not None:
        yield "advantage", format_number(summary.advantage)
    versions = np.concatenate([segment.versions[segment.is_chosen] for segment in segments])
    if len(versions):
        replayed = ", replayed from an earlier step" if summary.is_replayed else ""
        yield "weights", f"version {_format_range(versions)}{replayed}"
    if summary.max_gap is not None:
        yield "largest gap", f"{summary.max_gap:.4g} nats between trainer and servers"


def _shorten(text: str) -> str:
    """Return a text on one line, cut where it is long."""
    line = escape_control(" ".join(text.split()))
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} ..."


def format_number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.4g}"


def _format_range(values: Array) -> str:
    least, most = int(values.min()), int(values.max())
    return str(least) if least == most else f"{least} to {most}"


def list_messages(
    segment: Segment, texts: TokenTexts, mark_gap: float, run: Path = Path()
) -> Iterator[PageMessage]:
    """Yield prompt and response as messages."""
    pieces = list(texts.split(segment.ids.tolist()))
    images = iter([run / IMAGES / Path(digest).name for digest in segment.images])
    if segment.images:
        pieces = _join_image_tokens(pieces)
    for role, turn, message_pieces in _split_messages(pieces, segment):
        spans = list(_build_spans(message_pieces, turn, segment, mark_gap, images))
        facts = _format_turn_facts(segment, turn) if turn >= 0 else ""
        yield PageMessage(role, turn, _merge_context(spans), facts)


def _join_image_tokens(pieces: Sequence[Piece]) -> list[Piece]:
    """Make one piece of the tokens of each image."""
    joined = list[Piece]()
    for piece in pieces:
        if joined and piece.text == _IMAGE == joined[-1].text:
            joined[-1] = Piece(_IMAGE, joined[-1].start, piece.end)
        else:
            joined.append(piece)
    return joined


def _split_messages(
    pieces: Sequence[Piece], segment: Segment
) -> Iterator[tuple[str, int, list[Piece]]]:
    """Yield role, turn of the policy or -1, and pieces of each message."""
    role, turn, message = "context", -1, list[Piece]()
    for index, piece in enumerate(pieces):
        piece_turn = int(segment.turns[piece.start])
        opened = _find_opened_role(pieces, index) if piece_turn < 0 else ""
        if piece.text == _RESULT and role == "tool":  # of several in a message, or after a header
            opened = ""
        begins_turn = piece_turn >= 0 and piece_turn != turn
        # After the header of a turn.
        is_continued = begins_turn and turn < 0 and role == "assistant"
        if (opened or begins_turn) and not is_continued:
            if message:
                yield role, turn, message
            role, turn, message = opened or "assistant", -1, []
        if begins_turn:
            turn = piece_turn
        message.append(piece)
    if message:
        yield role, turn, message


def _find_opened_role(pieces: Sequence[Piece], index: int) -> str:
    """Return the role of the message that a piece of the context opens; empty if it opens none.

    A marker spelled with other tokens has many pieces, and opens none.
    """
    marker = pieces[index].text
    following = [piece.text for piece in pieces[index + 1 : index + 1 + _NAME_TOKENS]]
    after = "".join(following)
    if marker == _KIMI_SYSTEM:
        return "system" if _KIMI_SYSTEM_NAME.match(after) else "tool"
    if marker not in _HEADERS:
        return _OPENERS.get(marker, "")
    if _RESULT in following and _USER_WITH_RESULT.match(after):
        return "tool"
    match = _ROLE.match(after)
    return _ROLES.get(match[1], match[1]) if match else "context"


def _build_spans(
    pieces: Sequence[Piece], turn: int, segment: Segment, mark_gap: float, images: Iterator[Path]
) -> Iterator[Span]:
    is_in_turn = [int(segment.turns[piece.start]) == turn >= 0 for piece in pieces]
    header = "".join(p.text for p, is_in in zip(pieces, is_in_turn, strict=True) if not is_in)
    texts = [p.text if is_in else "" for p, is_in in zip(pieces, is_in_turn, strict=True)]
    parts = _find_parts(texts, header)
    for piece, part in zip(pieces, parts, strict=True):
        tokens = slice(piece.start, piece.end)
        image = next(images, None) if piece.text == _IMAGE else None
        if image is not None:
            text = f"[image {image.name[:8]}: {piece.end - piece.start} tokens]"
            yield Span(text, False, part, image=image)
            continue
        is_chosen = bool(segment.is_chosen[tokens].any())
        gaps = np.abs(segment.trainer[tokens] - segment.servers[tokens])[segment.is_chosen[tokens]]
        gap = float(gaps.max()) if len(gaps) else math.nan
        yield Span(
            escape_control(piece.text),
            is_chosen,
            part,
            gap if gap >= mark_gap else None,
            tuple(_list_token_numbers(segment, piece)) if is_chosen else (),
        )


def _find_parts(texts: Sequence[str], header: str) -> list[str]:
    """Return for each text the part of the turn in which it begins; empty for none.

    `header` is the text of the template before the turn.
    """
    turn_text, starts = "".join(texts), np.cumsum([0, *map(len, texts)])
    parts = [""] * len(texts)
    for name, *span in _list_parts(turn_text, header):
        for index in range(*np.searchsorted(starts[:-1], span)):
            if texts[index]:  # texts outside of the turn are empty
                parts[index] = name
    return parts


def _list_parts(turn_text: str, header: str) -> Iterator[tuple[str, int, int]]:
    """Yield names, starts and ends; a later part may lie inside an earlier one."""
    if _THINK in header and _END_THINK not in header.rpartition(_THINK)[2]:
        before, closed, _ = turn_text.partition(_END_THINK)
        yield "reasoning", 0, len(before) + len(closed)
    for name, form in _PARTS.items():
        for match in form.finditer(turn_text):
            yield name, *match.span()
    if _LLAMA in header and (end := _find_json_call_end(turn_text)):
        yield "call", 0, end


def _find_json_call_end(turn_text: str) -> int:
    """Return the end of a turn that is one call of Llama-3, a JSON object with a name; else 0."""
    start = len(turn_text) - len(turn_text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(turn_text, start)
    except (ValueError, RecursionError):
        return 0
    is_call = isinstance(value, dict) and bool(value.get("name")) and _END.fullmatch(turn_text, end)
    return end if is_call else 0


def _list_token_numbers(segment: Segment, piece: Piece) -> Iterator[TokenNumbers]:
    for index in range(piece.start, piece.end):
        yield TokenNumbers(
            int(segment.ids[index]),
            float(segment.servers[index]),
            float(segment.trainer[index]),
            float(segment.advantages[index]),
            int(segment.versions[index]),
        )


def _format_turn_facts(segment: Segment, turn: int) -> str:
    is_in_turn = segment.turns == turn
    chosen = is_in_turn & segment.is_chosen
    facts = [f"{is_in_turn.sum()} tokens"]
    if not chosen.any():
        return ", ".join([*facts, "context: trained in another segment"])
    facts.append(f"version {_format_range(segment.versions[chosen])}")
    gaps = np.abs(segment.trainer - segment.servers)[chosen]
    if not np.isnan(gaps).all():
        facts.append(f"largest gap {format_number(float(np.nanmax(gaps)))}")
    advantages = segment.advantages[chosen]
    if not np.isnan(advantages).any():
        facts.append(f"advantage {format_number(float(advantages.mean()))}")
    rewards = segment.rewards[chosen]
    if not np.isnan(rewards).any():
        facts.append(f"reward {format_number(float(rewards.sum()))}")
    return ", ".join(facts)


def _merge_context(spans: Sequence[Span]) -> list[Span]:
    """Merge neighbouring spans of the context, whose tokens have no numbers."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        is_image = span.image or (last and last.image)
        if last is None or is_image or span.is_chosen or last.is_chosen or last.part != span.part:
            merged.append(span)
        else:
            merged[-1] = Span(last.text + span.text, False, span.part)
    return merged
