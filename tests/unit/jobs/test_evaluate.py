"""What `mcore-rl eval` tells of its data sets before it starts."""

from __future__ import annotations

from mcore_rl.config.eval_schema import EvalConfig
from mcore_rl.data.datasets import PromptDataset, PromptRow
from mcore_rl.jobs.evaluate import _tell_of_short_sets


def test_a_set_with_fewer_rows_than_were_asked_for_is_told(capsys):
    sets = {name: PromptDataset([PromptRow([1], {})] * size) for name, size in (("a", 3), ("b", 5))}
    config = EvalConfig()
    for asked in (0, 3):
        config.data.num_prompts = asked
        _tell_of_short_sets(config, sets)
    assert capsys.readouterr().err == ""
    config.data.num_prompts = 5
    _tell_of_short_sets(config, sets)
    told = "mcore-rl: warning: data.num_prompts=5: data.sets.a has 3 rows, and all are taken\n"
    assert capsys.readouterr().err == told
