"""Tokenised conversations and preference pairs, with a mask of the tokens to train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ConversationsConfig, DataConfig, PairsConfig
from mcore_rl.data.batch import Batch, Jagged, pack_images
from mcore_rl.data.chat_template import MARK, ChatTemplate, ChatTemplateError, find_missing_part
from mcore_rl.data.files import Digest, open_rows
from mcore_rl.data.image_files import ImageError, StoredImage
from mcore_rl.data.images import RowImages
from mcore_rl.data.rows import (
    REASONING,
    ConcatFiles,
    Message,
    PreferenceRow,
    RowColumn,
    SupervisedRow,
    TypedRows,
    choose_prompt_column,
    read_preference_rows,
    read_supervised_rows,
)
from mcore_rl.data.sampler import IndexSampler, MixtureSampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A conversation up to its last trained token."""

    ids: list[int]  # with all tokens of its images
    is_trained: list[bool]
    images: tuple[StoredImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """A row: a conversation, or the chosen and the rejected conversation of a pair."""

    conversations: tuple[Tokens, ...]
    margin: float = 0.0


class Examples(Generic[R]):
    """Rows of a source, tokenised on access.

    A first pass over all rows checks them, finds rows that are too long, and computes `digest` of
    their tokens and masks.
    """

    def __init__(
        self,
        rows: TypedRows[R],
        encode: Callable[[R], Example],
        config: ConversationsConfig | PairsConfig,
        source: str,
        images: RowImages | None = None,
    ) -> None:
        """Check all rows; `source` begins the errors."""
        self._rows, self._encode, self._source, self._images = rows, encode, source, images
        digest, lengths = Digest(), np.empty(len(rows), np.int64)
        for index in range(len(rows)):
            example = self._encode_row(index)
            digest.add(asdict(example))
            lengths[index] = max(len(tokens.ids) for tokens in example.conversations)
        self.digest = digest.hexdigest()
        is_short = lengths <= config.token_limit
        self.num_rows, self.num_dropped = len(rows), int((~is_short).sum())
        if self.num_dropped and (config.long_rows == "refuse" or not is_short.any()):
            longest = int(lengths.argmax())
            hint = ", or data.long_rows=drop" if is_short.any() else ""
            raise ConfigError(
                f"{source}: row {longest} has {lengths[longest]} tokens; allowed: up to "
                f"data.max_tokens={config.token_limit}{hint}"
            )
        self._short_rows: npt.NDArray[np.int64] = np.flatnonzero(is_short)

    def __len__(self) -> int:
        return len(self._short_rows)

    def __getitem__(self, row: int) -> Example:
        index = int(self._short_rows[row])
        example = self._encode_row(index)
        for tokens in example.conversations:
            _store_images(tokens, self._images, f"{self._source}: row {index}")
        return example

    def take(self, rows: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        return collate_examples([self[row] for row in rows])

    def _encode_row(self, index: int) -> Example:
        try:
            return self._encode(self._rows[index])
        except (ChatTemplateError, ImageError) as error:
            raise ConfigError(f"{self._source}: row {index} {error}") from error


AnyExamples = Examples[SupervisedRow] | Examples[PreferenceRow]


class ExampleFiles(ConcatFiles[AnyExamples, Example]):
    """Examples of one or more files."""

    def take(self, rows: Sequence[int]) -> Batch:
        """Return a batch of these rows."""
        return collate_examples([self[row] for row in rows])


def load_conversations(
    name: str,
    config: ConversationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    setting: str = "data.train_file",
    images: RowImages | None = None,
) -> Examples[SupervisedRow]:
    """Load conversations from a source of rows (data/files.py); `setting` names it in errors.

    Raises:
        ConfigError: the source cannot be read, or a row is no conversation with a message to train
            on, does not fit the chat template, or is too long.
    """
    source = open_rows(name, setting)
    messages = RowColumn(config.messages_column, "data.messages_column")
    tools = RowColumn(config.tools_column, "data.tools_column") if config.tools_column else None

    template = ChatTemplate(tokenizer)

    def encode(row: SupervisedRow) -> Example:
        tokens = _encode_row(row, template, images)
        if config.train_on_prompt:
            image_id = images.tokens.token_id if images else None
            is_trained = [index > 0 and t != image_id for index, t in enumerate(tokens.ids)]
            tokens = replace(tokens, is_trained=is_trained)
        return Example((tokens,))

    rows = read_supervised_rows(source, messages, tools, images.place if images else None)
    return Examples(rows, encode, config, source.source, images)


def load_chats(
    name: str,
    config: DataConfig,
    max_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    images: RowImages | None = None,
    num_rows: int | None = None,
) -> Batch:
    """Load whole conversations in the prompt column of warm_start.train_file.

    `max_tokens` is the limit of prompt and response together, `num_rows` the rows to load (None:
    all). Returns the columns prompt_ids, response_ids and response_mask. Raises ConfigError as
    `load_conversations` does.
    """
    source = open_rows(name, "warm_start.train_file")
    messages = choose_prompt_column(source[0], config)
    tools = RowColumn(config.tools_column, "data.tools_column") if config.tools_column else None
    template, conversations = ChatTemplate(tokenizer), list[Tokens]()
    rows = read_supervised_rows(source, messages, tools, images.place if images else None)
    for number, row in enumerate(islice(rows, num_rows)):
        where = f"{source.source}: row {number}"
        try:
            tokens = _encode_row(row, template, images)
        except (ChatTemplateError, ImageError) as error:
            raise ConfigError(f"{where} {error}") from error
        _store_images(tokens, images, where)
        if len(tokens.ids) > max_tokens:
            raise ConfigError(
                f"{where} has {len(tokens.ids)} tokens; allowed: up to data.max_prompt_tokens "
                f"+ rollout.max_response_tokens={max_tokens}"
            )
        conversations.append(tokens)
    return _collate(conversations)


def load_pairs(
    name: str,
    config: PairsConfig,
    tokenizer: PreTrainedTokenizerBase,
    setting: str = "data.train_file",
) -> Examples[PreferenceRow]:
    """Load preference pairs, to train on the assistant's messages after the prompt.

    Raises ConfigError as `load_conversations` does.
    """
    source = open_rows(name, setting)
    prompt = RowColumn(config.prompt_column, "data.prompt_column")
    chosen = RowColumn(config.chosen_column, "data.chosen_column")
    rejected = RowColumn(config.rejected_column, "data.rejected_column")
    margin = RowColumn(config.margin_column, "data.margin_column") if config.margin_column else None
    tools = RowColumn(config.tools_column, "data.tools_column") if config.tools_column else None

    template = ChatTemplate(tokenizer)

    def encode(row: PreferenceRow) -> Example:
        conversations = tuple(
            encode_conversation(
                [*row.prompt, *answer],
                [False] * len(row.prompt) + [m["role"] == "assistant" for m in answer],
                row.tools,
                template,
            )
            for answer in (row.chosen, row.rejected)
        )
        return Example(conversations, row.margin or 0.0)

    rows = read_preference_rows(source, prompt, chosen, rejected, margin, tools)
    return Examples(rows, encode, config, source.source)


def _encode_row(row: SupervisedRow, template: ChatTemplate, images: RowImages | None) -> Tokens:
    """Encode a conversation, with all tokens of its images, none of which is trained on."""
    tokens = encode_conversation(row.messages, row.is_trained, row.tools, template)
    if images is None:
        return tokens
    last = max(index for index, flag in enumerate(row.is_trained) if flag)
    num = sum(len(message.get("images", ())) for message in row.messages[: last + 1])
    placed = tuple(row.images[:num])  # the tokens end with the last trained message
    token_id, sizes = images.tokens.token_id, [image.size for image in placed]
    counts = iter([images.tokens.count(size) for size in sizes])
    ids = images.tokens.expand(tokens.ids, sizes)
    mask = list[bool]()
    for token, flag in zip(tokens.ids, tokens.is_trained, strict=True):
        mask += [False] * next(counts) if token == token_id else [flag]
    return Tokens(ids, mask, placed)


def _store_images(tokens: Tokens, images: RowImages | None, where: str) -> None:
    """Store the images of a conversation; ConfigError for a damaged one."""
    for image in tokens.images:
        assert images is not None
        try:
            images.store.add(image)
        except ImageError as error:
            raise ConfigError(f"{where} has an image that {error}") from error


def encode_conversation(
    messages: Sequence[Message],
    is_trained: Sequence[bool],
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
) -> Tokens:
    """Encode a conversation by the chat template, up to its last trained token.

    The trained tokens are the content of each trained message and the special token right after it;
    at the end of the text without such a token, the end-of-sequence token is appended.
    """
    tokenizer = template.tokenizer
    text, messages = template.write(messages, tools)
    spans = [
        _find_span(text, messages, index, tools, template)
        for index, flag in enumerate(is_trained)
        if flag
    ]
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
    )
    ids = list(encoding["input_ids"])
    starts = [start for start, _ in encoding["offset_mapping"]]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    mask = [False] * len(ids)
    for start, end in spans:
        first, after = np.searchsorted(starts, [start, end]).tolist()
        mask[first:after] = [True] * (after - first)
        if after < len(ids) and (ids[after] in special or ids[after] == tokenizer.eos_token_id):
            mask[after] = True
    if spans[-1][1] == len(text):
        ids.append(int(tokenizer.eos_token_id))
        mask.append(True)
    if True not in mask[1:]:
        raise ChatTemplateError("has no token to train on")
    end = len(mask) - mask[::-1].index(True)
    return Tokens(ids[:end], mask[:end])


def collate_examples(examples: Sequence[Example]) -> Batch:
    """Build the columns prompt_ids, response_ids, response_mask and margins.

    prompt_ids end before the first trained token of a conversation. The conversations of a row
    follow each other.
    """
    conversations = [tokens for example in examples for tokens in example.conversations]
    num_each = len(examples[0].conversations)
    margins = np.repeat([example.margin for example in examples], num_each)
    return _collate(conversations).with_columns(margins=margins)


def _collate(conversations: Sequence[Tokens]) -> Batch:
    firsts = [max(1, tokens.is_trained.index(True)) for tokens in conversations]
    split = list(zip(conversations, firsts, strict=True))
    return Batch(
        {
            "prompt_ids": Jagged.pack((t.ids[:first] for t, first in split), np.int64),
            "response_ids": Jagged.pack((t.ids[first:] for t, first in split), np.int64),
            "response_mask": Jagged.pack((t.is_trained[first:] for t, first in split), np.int8),
            **pack_images([[image.digest for image in t.images] for t in conversations]),
        }
    )


def build_scoring_batch(batch: Batch) -> Batch:
    """Move conversations to prompt_ids, with a dummy response token whose score is theirs.

    The state before a response token gives its score, so the state of the last token of the
    conversation scores the dummy token, which the model never reads. Other columns are unchanged.
    """
    conversations = [
        np.concatenate(parts)
        for parts in zip(batch.jagged("prompt_ids"), batch.jagged("response_ids"), strict=True)
    ]
    return batch.with_columns(
        prompt_ids=Jagged.pack(conversations, np.int64),
        response_ids=Jagged.pack([[0]] * len(conversations), np.int64),
        response_mask=Jagged.pack([[1]] * len(conversations), np.int8),
    )


class ExampleBatches:
    """Endless shuffled batches of examples.

    Args:
        take: Returns the batch of these rows.
        sizes: Number of rows of each file.
        batch_size: Rows per batch.
        seed: Seed of the order.
        weights: Mixture weight of each file; without them rows are shuffled over all files.
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


def _find_span(
    text: str,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
) -> tuple[int, int]:
    """Find the part of `text` that the model is to generate for a message: [start, end).

    The part begins after the generation prompt, if the template has one. Otherwise it begins, and
    in any case it ends, where the text differs from that with another message in this place.
    (Rendering the messages up to this one does not help: templates change earlier messages by those
    that follow.)

    Raises:
        ChatTemplateError: the part lacks something of the message.
    """
    role = messages[index]["role"]
    marked = [*messages]
    removed = ("tool_calls", *REASONING)
    marked[index] = {name: value for name, value in messages[index].items() if name not in removed}
    before, after = template.split_at(marked, index, tools, MARK.format(index))
    start = _count_common(before, text)
    if index and role == "assistant":
        start = _find_prompt_end(text, messages, index, tools, template, start)
    end = len(text) - _count_common(after[::-1], text[start:][::-1])
    if missing := find_missing_part(messages[index], text[start:end]):
        raise ChatTemplateError(
            f"trains on message {index}, of which the model's chat template leaves out {missing}; "
            f"allowed: messages that it writes whole, or (sft) `train: false`"
        )
    return start, end


def _find_prompt_end(
    text: str,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    limit: int,
) -> int:
    """Find the end in `text` of the generation prompt of a message.

    The prompt may open reasoning, which the template drops from some messages: the text then has a
    prefix of the prompt, to the end of one of its tokens, and this end is returned.

    Args:
        limit: First position at which `text` depends on the content of the message.
    """
    history = template.render(messages[:index], tools)
    prompt = template.render(messages[:index], tools, add_generation_prompt=True)
    if prompt == history or not prompt.startswith(history):
        return limit
    if text.startswith(prompt):
        return len(prompt)
    opening = prompt[len(history) :]
    first = 0  # end of the message before
    with suppress(ChatTemplateError):  # a message with calls only
        _, after = template.split_at(messages, index - 1, tools, MARK.format(index))
        first = len(text) - _count_common(after[::-1], text[::-1])
    encoding = template.tokenizer(opening, add_special_tokens=False, return_offsets_mapping=True)
    ends = [int(end) for _, end in encoding["offset_mapping"]]
    for length in reversed(ends):
        place = text.find(opening[:length], first)
        if place >= 0 and (place + length <= limit or (length == len(opening) and place < limit)):
            return place + length
    return limit


def _count_common(left: str, right: str) -> int:
    """Count the characters of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
