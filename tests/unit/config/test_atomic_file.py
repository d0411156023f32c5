"""Files that are written beside their final name: complete or absent, and never through a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.cli.options import write_option_file
from mcore_rl.config.atomic_file import create_folder, open_lock, write_atomically, write_file
from mcore_rl.config.errors import ConfigError
from mcore_rl.jobs.output import lock_run_dir, write_json
from mcore_rl.rollout.desired_servers import write_desired_servers


def test_file_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    file = tmp_path / "file"
    mask = os.umask(0o027)
    try:
        write_file(file, "text ü")
    finally:
        os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.read_bytes() == "text ü".encode()
    assert [*tmp_path.iterdir()] == [file]


def test_file_stays_as_it_was_after_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(ValueError, match="halfway"), write_atomically(file) as partial_path:
        partial_path.write_text("ne")
        raise ValueError("halfway")
    assert file.read_text() == "old"
    assert [*tmp_path.iterdir()] == [file]


def publish_table(folder: Path) -> None:
    import pyarrow as pa

    from mcore_rl.data.sample_tables import write_table

    write_table(folder / "name", {"x": pa.array([1])}, 1)


def publish_tensors(folder: Path) -> None:
    from mcore_rl.checkpoint.files import open_atomic, write_at

    with open_atomic(folder / "name", 16) as fd:
        write_at(fd, 0, b"0" * 16)


WRITERS: dict[str, Callable[[Path], object]] = {
    "json": lambda folder: write_json(folder / "name", {}),
    "option": lambda folder: write_option_file(folder / "name", "text", "--output"),
    "servers": lambda folder: write_desired_servers(folder, [0]),
    "table": publish_table,
    "tensors": publish_tensors,
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_link_under_the_temporary_name_is_not_followed(
    tmp_path: Path, writer: Callable[[Path], object]
) -> None:
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    for name in ("name", "servers.json"):
        (folder / f".{name}.partial").symlink_to(victim)
    writer(folder)
    assert victim.read_text() == "precious"
    written = next(file for file in folder.iterdir() if not file.name.startswith("."))
    assert written.is_file() and not written.is_symlink()


def test_folder_replaces_a_link_and_what_a_killed_run_left(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    link, left, file = tmp_path / ".link", tmp_path / ".left", tmp_path / ".file"
    link.symlink_to(victim)
    left.mkdir()
    (left / "half").touch()
    file.touch()
    for folder in (link, left, file):
        create_folder(folder)
        assert folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())
    assert (victim / "precious").exists()


def plant_link(lock: Path) -> None:
    lock.symlink_to(lock.parent.parent / "victim")


@pytest.mark.parametrize("plant", [plant_link, os.mkfifo, Path.mkdir])
def test_lock_of_a_run_is_a_regular_file(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    plant(folder / ".lock.partial")
    with pytest.raises(ConfigError, match="cannot be made"), lock_run_dir(str(folder)):
        pass
    assert not (tmp_path / "victim").exists()


def test_lock_stays_between_processes(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    first, second = open_lock(lock), open_lock(lock)
    assert os.fstat(first).st_ino == os.fstat(second).st_ino
    os.close(first)
    os.close(second)
