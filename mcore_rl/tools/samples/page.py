"""A trajectory as messages: who says what, and which tokens of it are worth a look."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.observability.console import escape_control
from mcore_rl.tools.samples.tables import Array, Segment, Summary, segments_of
from mcore_rl.tools.samples.token_texts import Piece, TokenTexts

# Added tokens of chat templates: those after which a role is named, and those that are of one.
_LLAMA = "<|start_header_id|>"
_HEADERS = ("<|im_start|>", _LLAMA)
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
_ROLES = {"ipython": "tool", "observation": "tool", "developer": "system"}  # other names of ours
_ROLE = re.compile(r"\s*(system|user|assistant|tool|ipython|observation|developer)\b")
_OF_KIMI_SYSTEM = re.compile(r"(system|tool_declare)\b")  # else it is the name of a tool
_USER_WITH_RESULT = re.compile(rf"\s*user\s*{_RESULT}")
_MOST_SHOWN = 300  # characters of a column of the data row
_NAME_TOKENS = 12  # in which a header has named its role, at a letter each
# Parts of what the policy says; one that is not closed goes on to the end of the turn.
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
_THINK, _THOUGHT = "<think>", "</think>"
_END = re.compile(r"\s*(?:<\|\w+\|>)?\s*")  # of a turn


@dataclass(frozen=True, slots=True)
class Span:
    """Text of neighbouring tokens that are shown alike."""

    text: str  # harmless: see console.visible
    is_chosen: bool
    part: str = ""  # "reasoning" or "call", of a turn
    gap: float | None = None  # largest of its tokens, nats, where it is to be marked
    about: str = ""  # its token in numbers


@dataclass(slots=True)
class PageMessage:
    """What one role says. `turn` is the number of the policy's turn in it; -1: it has none."""

    role: str  # system, user, assistant or tool; "context" where the template does not tell
    turn: int = -1
    spans: list[Span] = field(default_factory=list)
    facts: str = ""  # of the turn

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    facts: list[tuple[str, str]]  # a name and what there is to say
    segments: list[list[PageMessage]]


def page_of(summary: Summary, texts: TokenTexts, mark_gap: float) -> Page:
    """Tokens are marked whose log-probs differ by `mark_gap` nats or more.

    Raises:
        ConfigError: the table has no tokens, or cannot be read.
    """
    segments = segments_of(summary)
    messages = [list(messages_of(segment, texts, mark_gap)) for segment in segments]
    return Page(title_of(summary), list(_facts(summary, segments)), messages)


def title_of(summary: Summary) -> str:
    role = f", role {escape_control(summary.role)}" if summary.role else ""
    return f"step {summary.step}, group {summary.group}, trajectory {summary.trajectory}{role}"


def _facts(summary: Summary, segments: Sequence[Segment]) -> Iterator[tuple[str, str]]:
    yield "reward", number(summary.reward)
    if summary.answer is not None:
        yield "reference answer", _shorten(summary.answer)
    for name, value in summary.columns.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"column {escape_control(name)}", _shorten(text)
    if summary.parts:
        parts = (f"{escape_control(name)} {number(part)}" for name, part in summary.parts.items())
        yield "reward parts", ", ".join(parts)
    if summary.reward_error:
        yield "no reward", escape_control(summary.reward_error)
    yield "status", f"{summary.status} ({summary.finish_reason})"
    chosen = sum(int(segment.is_chosen.sum()) for segment in segments)
    length = f"{summary.num_tokens} tokens of responses, {chosen} of them the policy's"
    yield "length", f"{len(segments)} segments, {summary.num_turns} turns, {length}"
    if summary.advantage is not None:
        yield "advantage", number(summary.advantage)
    found = np.concatenate([segment.versions[segment.is_chosen] for segment in segments])
    if len(found):
        replayed = ", replayed from an earlier step" if summary.is_replayed else ""
        yield "weights", f"version {_range(found)}{replayed}"
    if summary.max_gap is not None:
        yield "largest gap", f"{summary.max_gap:.4g} nats between trainer and servers"


def _shorten(text: str) -> str:
    """On one line, without what is far behind."""
    line = escape_control(" ".join(text.split()))
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} ..."


def number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.4g}"


def _range(values: Array) -> str:
    least, most = int(values.min()), int(values.max())
    return str(least) if least == most else f"{least} to {most}"


def messages_of(segment: Segment, texts: TokenTexts, mark_gap: float) -> Iterator[PageMessage]:
    """Prompt and response, as messages one after the other."""
    pieces = list(texts.pieces(segment.ids.tolist()))
    for role, turn, own in _cut(pieces, segment):
        spans = list(_spans(own, turn, segment, mark_gap))
        facts = _turn_facts(segment, turn) if turn >= 0 else ""
        yield PageMessage(role, turn, _merged(spans), facts)


def _cut(pieces: Sequence[Piece], segment: Segment) -> Iterator[tuple[str, int, list[Piece]]]:
    """Messages: a role, the policy's turn in it or -1, and its pieces."""
    role, turn, own = "context", -1, list[Piece]()
    for index, piece in enumerate(pieces):
        now = int(segment.turns[piece.start])
        opened = _opened_role(pieces, index) if now < 0 else ""
        if piece.text == _RESULT and role == "tool":  # of several in a message, or after a header
            opened = ""
        begins_turn = now >= 0 and now != turn
        goes_on = begins_turn and turn < 0 and role == "assistant"  # after the header of a turn
        if (opened or begins_turn) and not goes_on:
            if own:
                yield role, turn, own
            role, turn, own = opened or "assistant", -1, []
        if begins_turn:
            turn = now
        own.append(piece)
    if own:
        yield role, turn, own


def _opened_role(pieces: Sequence[Piece], index: int) -> str:
    """Of the message that a piece of the context opens; empty where it opens none.

    Markers that are spelled with other tokens are many pieces, and open none.
    """
    marker = pieces[index].text
    following = [piece.text for piece in pieces[index + 1 : index + 1 + _NAME_TOKENS]]
    after = "".join(following)
    if marker == _KIMI_SYSTEM:
        return "system" if _OF_KIMI_SYSTEM.match(after) else "tool"
    if marker not in _HEADERS:
        return _OPENERS.get(marker, "")
    if _RESULT in following and _USER_WITH_RESULT.match(after):
        return "tool"
    found = _ROLE.match(after)
    return _ROLES.get(found[1], found[1]) if found else "context"


def _spans(pieces: Sequence[Piece], turn: int, segment: Segment, mark_gap: float) -> Iterator[Span]:
    is_said = [int(segment.turns[piece.start]) == turn >= 0 for piece in pieces]
    header = "".join(p.text for p, said in zip(pieces, is_said, strict=True) if not said)
    said = [p.text if said else "" for p, said in zip(pieces, is_said, strict=True)]
    parts = _parts(said, header)
    for piece, part in zip(pieces, parts, strict=True):
        tokens = slice(piece.start, piece.end)
        is_chosen = bool(segment.is_chosen[tokens].any())
        gaps = np.abs(segment.trainer[tokens] - segment.servers[tokens])[segment.is_chosen[tokens]]
        gap = float(gaps.max()) if len(gaps) else math.nan
        yield Span(
            escape_control(piece.text),
            is_chosen,
            part,
            gap if gap >= mark_gap else None,
            _about(segment, piece) if is_chosen else "",
        )


def _parts(texts: Sequence[str], header: str) -> list[str]:
    """For each text which part of the whole it begins in; empty: in none.

    `header`: what the template has put before the turn.
    """
    whole, starts = "".join(texts), np.cumsum([0, *map(len, texts)])
    found = [""] * len(texts)
    for name, *span in _parts_of(whole, header):
        for index in range(*np.searchsorted(starts[:-1], span)):
            if texts[index]:  # others begin there, too, and are none of it
                found[index] = name
    return found


def _parts_of(said: str, header: str) -> Iterator[tuple[str, int, int]]:
    """Names, starts and ends; a later one may be inside of one before it."""
    if _THINK in header and _THOUGHT not in header.rpartition(_THINK)[2]:
        before, closed, _ = said.partition(_THOUGHT)
        yield "reasoning", 0, len(before) + len(closed)
    for name, form in _PARTS.items():
        for match in form.finditer(said):
            yield name, *match.span()
    if _LLAMA in header and (end := _end_of_json_call(said)):
        yield "call", 0, end


def _end_of_json_call(said: str) -> int:
    """Where a turn that is nothing but a call of Llama-3 ends: an object with a name; else 0."""
    start = len(said) - len(said.lstrip())
    try:
        found, end = json.JSONDecoder().raw_decode(said, start)
    except (ValueError, RecursionError):
        return 0
    is_call = isinstance(found, dict) and bool(found.get("name")) and _END.fullmatch(said, end)
    return end if is_call else 0


def _about(segment: Segment, piece: Piece) -> str:
    """A line for each token, such as `token 17: servers -0.5, trainer -0.51, version 3`."""
    lines = []
    for at in range(piece.start, piece.end):
        told = [f"token {segment.ids[at]}:"]
        for name, values in (
            ("servers", segment.servers),
            ("trainer", segment.trainer),
            ("advantage", segment.advantages),
        ):
            if not math.isnan(values[at]):
                told.append(f"{name} {number(values[at])},")
        lines.append(" ".join([*told, f"version {segment.versions[at]}"]))
    return "\n".join(lines)


def _turn_facts(segment: Segment, turn: int) -> str:
    own = segment.turns == turn
    chosen = own & segment.is_chosen
    told = [f"{own.sum()} tokens"]
    if not chosen.any():
        return ", ".join([*told, "context: trained in another segment"])
    told.append(f"version {_range(segment.versions[chosen])}")
    gaps = np.abs(segment.trainer - segment.servers)[chosen]
    if not np.isnan(gaps).all():
        told.append(f"largest gap {number(float(np.nanmax(gaps)))}")
    advantages = segment.advantages[chosen]
    if not np.isnan(advantages).any():
        told.append(f"advantage {number(float(advantages.mean()))}")
    rewards = segment.rewards[chosen]
    if not np.isnan(rewards).any():
        told.append(f"reward {number(float(rewards.sum()))}")
    return ", ".join(told)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of the context as one: there is nothing to say of their tokens."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is None or span.is_chosen or last.is_chosen or last.part != span.part:
            found.append(span)
        else:
            found[-1] = Span(last.text + span.text, False, span.part)
    return found
