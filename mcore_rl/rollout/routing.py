"""Which server a group of samples is generated on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.data.batch import Batch
from mcore_rl.inference.protocol import SamplingParams


@dataclass(eq=False, slots=True)
class Asked:
    """A group that has been asked for and has not come back."""

    stream: str  # "train" or "evaluation"
    group_id: int
    prompts: Batch  # of all groups that were asked for together
    row: int  # its own
    num_prompt: int  # tokens
    sampling: SamplingParams
    server: int | None = None  # that generates it
    is_again: bool = False  # a server that generated it has died, or was removed

    @property
    def tokens(self) -> int:
        """At most: of all its trajectories, each with its prompt."""
        return self.sampling.n * (self.num_prompt + self.sampling.max_tokens)


def asked_together(prompts: Batch, sampling: SamplingParams, stream: str) -> list[Asked]:
    """The groups of these prompts."""
    ids = prompts.array("group_ids").tolist()
    tokens = prompts.lengths("prompt_ids").tolist()
    rows = enumerate(zip(ids, tokens, strict=True))
    return [Asked(stream, group, prompts, row, num, sampling) for row, (group, num) in rows]


def prompts_of(groups: Sequence[Asked]) -> Batch:
    """A row for each group; groups that were asked for together stay together."""
    rows: dict[int, tuple[Batch, list[int]]] = {}
    for one in groups:
        rows.setdefault(id(one.prompts), (one.prompts, []))[1].append(one.row)
    return Batch.concat([prompts.take(its) for prompts, its in rows.values()])


def route(
    groups: Sequence[Asked], outstanding: Mapping[int, int], homes: Mapping[int, int]
) -> list[int]:
    """The server of each group: in order, the one with the fewest tokens, then of lowest number.

    `outstanding` are the tokens of each server that may be chosen. A group whose server before is
    in `homes`, which has its prompt in the cache, goes there again, unless the others have fewer
    tokens by more than a group's.
    """
    tokens, largest = dict(outstanding), max((one.tokens for one in groups), default=0)
    found = []
    for one in groups:
        least = min(tokens, key=lambda number: (tokens[number], number))
        home = homes.get(one.group_id, least)
        is_free = home in tokens and tokens[home] <= tokens[least] + largest
        found.append(home if is_free else least)
        tokens[found[-1]] += one.tokens
    return found


def tokens_by_server(asked: Iterable[Asked], numbers: Iterable[int]) -> dict[int, int]:
    """Outstanding ones, of the servers with these numbers."""
    found = dict.fromkeys(numbers, 0)
    for one in asked:
        if one.server in found:
            found[one.server] += one.tokens
    return found
