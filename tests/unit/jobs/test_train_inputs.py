"""How many rows a step may draw of what there is."""

import re

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.config.schema import ConversationsConfig, SFTConfig, StepsConfig
from mcore_rl.data.examples import ExampleFiles
from mcore_rl.jobs.train_inputs import _check_train_rows


def check(sizes: list[int], weights: list[float], batch_size: int) -> None:
    files = [f"{number}.jsonl" for number in range(len(sizes))]
    data = ConversationsConfig(train_files=files, train_weights=weights)
    config = SFTConfig(data=data, trainer=StepsConfig(batch_size=batch_size))
    _check_train_rows(config, ExampleFiles(*(["row"] * size for size in sizes)))


def test_a_step_takes_no_row_twice():
    check([3, 5], [], 8)
    check([3, 5], [1.0, 1.0], 6)
    told = "trainer.batch_size=9: data.train_files[0] and data.train_files[1] has 8 rows"
    with pytest.raises(ConfigError, match=re.escape(told)):
        check([3, 5], [], 9)
    told = "trainer.batch_size=8 takes 4 of this file: data.train_files[0] has 3 rows"
    with pytest.raises(ConfigError, match=re.escape(told)):
        check([3, 5], [1.0, 1.0], 8)
