"""The file of the servers that a run is to have."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config.errors import ConfigError
from mcore_rl.rollout.desired_servers import FILE, read_desired_servers, write_desired_servers


def test_a_run_has_all_servers_until_others_are_written(tmp_path):
    assert read_desired_servers(tmp_path, 3) == {0, 1, 2}
    write_desired_servers(tmp_path, {2, 0})
    assert read_desired_servers(tmp_path, 3) == {0, 2}
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "text", ["[0]", '{"servers": [[0]]}', '{"servers": []}', '{"servers": [3]}', '{"servers": 0}']
)
def test_a_file_of_other_content_is_refused_with_its_name(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / FILE))):
        read_desired_servers(tmp_path, 3)


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"gone/servers\.json cannot be written: No such"):
        write_desired_servers(tmp_path / "gone", {0})
