"""JSON from outside is an object, or a clear error."""

from __future__ import annotations

import pytest

from mcore_rl.config import json_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.json_file import read_json_object


def test_an_object_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert read_json_object(tmp_path / "a.json") == {"a": [1, "é"]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not valid JSON: Expecting value"),
        (b'{"a": 1', "is not valid JSON"),
        (b"[1]", "is a JSON list, not an object"),
        (b"\xff", "is not valid JSON: .*utf-8.* can't decode"),
        (b"[" * 100_000, "is not valid JSON: it is nested too deep"),
        (b'{"a":' * 100_000, "is not valid JSON: it is nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path, data, message):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"a\.json {message}"):
        read_json_object(tmp_path / "a.json")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "b.json", "No such file")):
        with pytest.raises(ConfigError, match=f"{path} cannot be read: {reason}"):
            read_json_object(path)


def test_a_file_without_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    (tmp_path / "a.json").write_text('{"a": 1234}')
    with pytest.raises(ConfigError, match="has more than 10 bytes"):
        read_json_object(tmp_path / "a.json")
