"""Conversations and preference pairs as token ids, with a mask of the tokens to train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ConversationsConfig, DataConfig, PairsConfig
from mcore_rl.data.batch import Batch, Jagged
from mcore_rl.data.chat_template import MARK, ChatTemplate, ChatTemplateError, missing_part
from mcore_rl.data.digest import Digest
from mcore_rl.data.files import open_rows
from mcore_rl.data.rows import (
    REASONING,
    Column,
    FilesInOrder,
    Message,
    PreferenceRow,
    SupervisedRow,
    TypedRows,
    preference_rows,
    supervised_rows,
)
from mcore_rl.data.sampler import IndexSampler, MixtureSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A conversation up to its last trained token."""

    ids: list[int]
    is_trained: list[bool]


@dataclass(frozen=True, slots=True)
class Example:
    """A row: one conversation, or the chosen and the rejected one of a pair."""

    conversations: tuple[Tokens, ...]
    margin: float = 0.0


class Examples(Generic[R]):
    """The rows of a source, tokenised when they are asked for.

    A first pass over all rows checks them, finds those that are too long, and computes `digest`
    of their tokens and masks.
    """

    def __init__(
        self,
        rows: TypedRows[R],
        encode: Callable[[R], Example],
        config: ConversationsConfig | PairsConfig,
        source: str,
    ) -> None:
        """`source` begins the errors."""
        self._rows, self._encode, self._source = rows, encode, source
        digest, lengths = Digest(), np.empty(len(rows), np.int64)
        for index in range(len(rows)):
            example = self._example(index)
            digest.add(asdict(example))
            lengths[index] = max(len(tokens.ids) for tokens in example.conversations)
        self.digest = digest.hexdigest()
        is_short = lengths <= config.max_tokens
        self.num_rows, self.num_dropped = len(rows), int((~is_short).sum())
        if self.num_dropped and (config.long_rows == "refuse" or not is_short.any()):
            longest = int(lengths.argmax())
            hint = ", or data.long_rows=drop" if is_short.any() else ""
            raise ConfigError(
                f"{source}: row {longest} has {lengths[longest]} tokens; allowed: up to "
                f"data.max_tokens={config.max_tokens}{hint}"
            )
        self._kept: npt.NDArray[np.int64] = np.flatnonzero(is_short)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, row: int) -> Example:
        return self._example(int(self._kept[row]))

    def batch(self, rows: Sequence[int]) -> Batch:
        return batch_of([self[row] for row in rows])

    def _example(self, index: int) -> Example:
        try:
            return self._encode(self._rows[index])
        except ChatTemplateError as error:
            raise ConfigError(f"{self._source}: row {index} {error}") from error


AnyExamples = Examples[SupervisedRow] | Examples[PreferenceRow]


class ExampleFiles(FilesInOrder[AnyExamples, Example]):
    """Examples of files."""

    def batch(self, rows: Sequence[int]) -> Batch:
        return batch_of([self[row] for row in rows])


def load_conversations(
    name: str,
    config: ConversationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    setting: str = "data.train_file",
) -> Examples[SupervisedRow]:
    """Of a source of rows (data/files.py); `setting` names it in errors.

    Raises:
        ConfigError: it cannot be read, a row is no conversation with a message to train on, does
            not fit the chat template, or is too long.
    """
    source = open_rows(name, setting)
    messages = Column(config.messages_column, "data.messages_column")
    tools = Column(config.tools_column, "data.tools_column") if config.tools_column else None

    template = ChatTemplate(tokenizer)

    def encode(row: SupervisedRow) -> Example:
        tokens = encoded(row.messages, row.is_trained, row.tools, template)
        if config.train_on_prompt:
            tokens = Tokens(tokens.ids, [False] + [True] * (len(tokens.ids) - 1))
        return Example((tokens,))

    return Examples(supervised_rows(source, messages, tools), encode, config, source.source)


def load_chats(
    name: str,
    config: DataConfig,
    max_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    setting: str = "warm_start.train_file",
) -> Batch:
    """Whole conversations in the prompt column, as columns prompt_ids, response_ids, response_mask.

    Raises ConfigError as `load_conversations`; `max_tokens` is what the policy may read and write.
    """
    source = open_rows(name, setting)
    messages = Column(config.prompt_column, "data.prompt_column")
    tools = Column(config.tools_column, "data.tools_column") if config.tools_column else None
    template, found = ChatTemplate(tokenizer), []
    for number, row in enumerate(supervised_rows(source, messages, tools)):
        where = f"{source.source}: row {number}"
        try:
            found.append(encoded(row.messages, row.is_trained, row.tools, template))
        except ChatTemplateError as error:
            raise ConfigError(f"{where} {error}") from error
        if len(found[-1].ids) > max_tokens:
            raise ConfigError(
                f"{where} has {len(found[-1].ids)} tokens; allowed: up to data.max_prompt_tokens "
                f"+ rollout.max_response_tokens={max_tokens}"
            )
    return _batch_of(found)


def load_pairs(
    name: str,
    config: PairsConfig,
    tokenizer: PreTrainedTokenizerBase,
    setting: str = "data.train_file",
) -> Examples[PreferenceRow]:
    """The same for preference pairs. Messages of the assistant after the prompt are trained on."""
    source = open_rows(name, setting)
    prompt = Column(config.prompt_column, "data.prompt_column")
    chosen = Column(config.chosen_column, "data.chosen_column")
    rejected = Column(config.rejected_column, "data.rejected_column")
    margin = Column(config.margin_column, "data.margin_column") if config.margin_column else None
    tools = Column(config.tools_column, "data.tools_column") if config.tools_column else None

    template = ChatTemplate(tokenizer)

    def encode(row: PreferenceRow) -> Example:
        found = [
            encoded(
                [*row.prompt, *answer],
                [False] * len(row.prompt) + [m["role"] == "assistant" for m in answer],
                row.tools,
                template,
            )
            for answer in (row.chosen, row.rejected)
        ]
        return Example(tuple(found), row.margin or 0.0)

    rows = preference_rows(source, prompt, chosen, rejected, margin, tools)
    return Examples(rows, encode, config, source.source)


def encoded(
    messages: Sequence[Message],
    is_trained: Sequence[bool],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
) -> Tokens:
    """A conversation as the chat template writes it, up to its last trained token.

    Trained are the tokens of what a trained message says, and the special token that ends it: the
    one right after it or, at the end of a text without one, the end-of-sequence token.
    """
    tokenizer = template.tokenizer
    text, messages = template.write(messages, tools)
    spans = [
        _span(text, messages, index, tools, template)
        for index, flag in enumerate(is_trained)
        if flag
    ]
    found = tokenizer(
        text,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
    )
    ids, starts = list(found["input_ids"]), [start for start, _ in found["offset_mapping"]]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    mask = [False] * len(ids)
    for start, end in spans:
        first, after = np.searchsorted(starts, [start, end]).tolist()
        mask[first:after] = [True] * (after - first)
        if after < len(ids) and (ids[after] in special or ids[after] == tokenizer.eos_token_id):
            mask[after] = True
    if spans[-1][1] == len(text):
        ids.append(int(tokenizer.eos_token_id))  # type: ignore[arg-type]
        mask.append(True)
    if True not in mask[1:]:
        raise ChatTemplateError("has no token to train on")
    end = len(mask) - mask[::-1].index(True)
    return Tokens(ids[:end], mask[:end])


def batch_of(examples: Sequence[Example]) -> Batch:
    """Jagged columns prompt_ids, response_ids and response_mask, and the array margins.

    A conversation begins with prompt_ids, up to its first trained token. Those of a row follow each
    other.
    """
    found = [tokens for example in examples for tokens in example.conversations]
    num_each = len(examples[0].conversations)
    margins = np.repeat([example.margin for example in examples], num_each)
    return _batch_of(found).with_columns(margins=margins)


def _batch_of(conversations: Sequence[Tokens]) -> Batch:
    """A conversation begins with prompt_ids, up to its first trained token."""
    firsts = [max(1, tokens.is_trained.index(True)) for tokens in conversations]
    split = list(zip(conversations, firsts, strict=True))
    return Batch(
        {
            "prompt_ids": Jagged.of((t.ids[:first] for t, first in split), np.int64),
            "response_ids": Jagged.of((t.ids[first:] for t, first in split), np.int64),
            "response_mask": Jagged.of((t.is_trained[first:] for t, first in split), np.int8),
        }
    )


def scored_batch(batch: Batch) -> Batch:
    """Rows whose only response token is one after the conversation: its score is the whole's.

    The state before a response token scores it, so that of the last token scores this one. It is
    never read itself. The jagged columns prompt_ids, response_ids, response_mask; other arrays.
    """
    whole = [
        np.concatenate(parts)
        for parts in zip(batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True)
    ]
    return batch.with_columns(
        prompt_ids=Jagged.of(whole, np.int64),
        response_ids=Jagged.of([[0]] * len(whole), np.int64),
        response_mask=Jagged.of([[1]] * len(whole), np.int8),
    )


class ExampleBatches:
    """Shuffled batches without end; `take` gives the batch of rows.

    `sizes` are rows of each file. With `weights`, one a file, files are mixed.
    """

    def __init__(
        self,
        take: Callable[[Sequence[int]], Batch],
        sizes: Sequence[int],
        batch_size: int,
        seed: int,
        weights: Sequence[float] = (),
    ) -> None:
        self._take = take
        self._sampler: IndexSampler | MixtureSampler
        if weights:
            self._sampler = MixtureSampler(sizes, weights, batch_size, seed)
        else:
            self._sampler = IndexSampler(sum(sizes), batch_size, seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._take(next(self._sampler))

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)


def _span(
    text: str,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
) -> tuple[int, int]:
    """Where in `text` is what a message says: what the model is to write in its place.

    It begins after the generation prompt, where the template has one. Else, and where it ends, it
    is what the template does not write around another message in the same place. (Templates change
    earlier messages by what follows, so the text of the messages up to here would not do.)

    Raises:
        ChatTemplateError: it is not all that the message says.
    """
    role = messages[index]["role"]
    others = [*messages]
    removed = ("tool_calls", *REASONING)
    others[index] = {name: value for name, value in messages[index].items() if name not in removed}
    before, after = template.split_at(others, index, tools, MARK.format(index))
    start = _common_length(before, text)
    if index and role == "assistant":
        start = _after_generation_prompt(text, messages, index, tools, template, start)
    end = len(text) - _common_length(after[::-1], text[start:][::-1])
    if missing := missing_part(messages[index], text[start:end]):
        raise ChatTemplateError(
            f"trains on message {index}, of which the model's chat template leaves out {missing}; "
            f"allowed: messages that it writes whole, or (sft) `train: false`"
        )
    return start, end


def _after_generation_prompt(
    text: str,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    most: int,
) -> int:
    """Where in `text` the generation prompt before a message ends, or what is written of it.

    `most`: where the text of this message is another than that of another one in its place. The
    prompt may open reasoning, which the template leaves out of some messages: what the text has of
    the prompt, to the end of one of its tokens, is then not trained.
    """
    history = template.render(messages[:index], tools)
    prompt = template.render(messages[:index], tools, add_generation_prompt=True)
    if prompt == history or not prompt.startswith(history):
        return most
    if text.startswith(prompt):
        return len(prompt)
    opening = prompt[len(history) :]
    first = 0  # behind the message before
    with suppress(ChatTemplateError):  # of one with calls alone
        _, after = template.split_at(messages, index - 1, tools, MARK.format(index))
        first = len(text) - _common_length(after[::-1], text[::-1])
    encoding = template.tokenizer(opening, add_special_tokens=False, return_offsets_mapping=True)
    ends = [int(end) for _, end in encoding["offset_mapping"]]
    for length in reversed(ends):
        place = text.find(opening[:length], first)
        if place >= 0 and (place + length <= most or (length == len(opening) and place < most)):
            return place + length
    return most


def _common_length(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
