"""Local copies of models named on a hub (hf:ORG/NAME, ms:ORG/NAME), and of models and data at URLs.

Plans and dry runs need config.json alone: those of published models come with the package.
They are made before anything else reads a path, so that all processes get folders and files. Of a
model only safetensors, JSON and tokenizer files are fetched: no pickles and no code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mcore_rl
from mcore_rl.config.atomic_file import open_lock
from mcore_rl.config.checks import find_closest, is_url, list_values
from mcore_rl.config.errors import ConfigError, describe_error
from mcore_rl.jobs.failure import RunFailed

PUBLISHED_CONFIGS = Path(mcore_rl.__file__).parent / "models" / "published"  # ORG/NAME/config.json
CACHE = "MCORE_RL_CACHE"  # environment variable: folder of the copies of URLs
_INDEX = "*.safetensors.index.json"
_WEIGHTS = ("*.safetensors", _INDEX)
_OTHER_FILES = (
    "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
_DATA_FILES = ("*.arrow", "*.json")  # of a folder of save_to_disk
_IGNORED = ("*/*", "consolidated*")  # folders; Mistral's second copy of the weights
_MODEL_SETTING = re.compile(
    r"model\.path|(critic|reward_model|teacher\.models\..+)\.model_path|models\..+\.path"
)
_ADAPTER_SETTING = re.compile(r"models\..+\.adapter")
_DATA_SETTING = re.compile(
    r"data\.(train_files?|test_file|(test_files|sets)\..+)|warm_start\.train_file|"
    r"agent\.search_file"
)
_LIKE_MODEL_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")  # NAME or ORG/NAME, no other path
_EXPORT = "checkpoint.export_to"
_LAST_FILE = "config.json"  # of an export: a folder without it is no checkpoint
HUBS = ("hf:", "ms:")
_HUB_NAME = re.compile(r"(hf|ms):([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
# Fields of a file in a store that change with its content; the first that it has counts.
_CONTENT_TAGS = (
    "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip
_T = TypeVar("_T")
_describe = partial(describe_error, max_characters=300)


def fetch_inputs(config: _T, *, with_weights: bool = True) -> _T:
    """Return the settings of a job with local paths in place of hub names and URLs.

    Args:
        with_weights: False if a dry run needs the other files of models only.

    Raises:
        ConfigError: A model or a file cannot be fetched; names the setting.
    """
    local: dict[tuple[str, str], str] = {}
    for key, value in list_values("", config):
        if isinstance(value, str) and _MODEL_SETTING.fullmatch(key):
            path = fetch_model(key, value, with_weights=with_weights)
        elif isinstance(value, str) and _ADAPTER_SETTING.fullmatch(key):
            path = fetch_model(key, value)
        elif isinstance(value, str) and _DATA_SETTING.fullmatch(key) and is_url(value):
            path = _fetch_url(key, value, _DATA_FILES)
        else:
            continue
        if path != value:
            local[key, value] = path
    return _replace_texts("", config, local) if local else config


def check_is_local(config: object) -> None:
    """Raise ConfigError for a model or data that `fetch_inputs` would fetch."""
    for key, value in list_values("", config):
        is_model = _MODEL_SETTING.fullmatch(key) or _ADAPTER_SETTING.fullmatch(key)
        if not isinstance(value, str) or not (is_model or _DATA_SETTING.fullmatch(key)):
            continue
        if is_url(value) or (is_model and value.startswith(HUBS)):
            raise ConfigError(f"{key}={value!r} is not on this machine; allowed: a local path")


def fetch_model(setting: str, name: str, *, with_weights: bool = True) -> str:
    """Return the local folder of a model: `name` itself, unless it is a hub name or a URL.

    Without weights the name of a published model is the folder of its config.json in this package,
    unless the current folder has a file of that name.

    Raises:
        ConfigError: The model cannot be fetched, or only its config.json is known.
    """
    patterns = [*_OTHER_FILES, *(_WEIGHTS if with_weights else ())]
    if is_url(name):
        return _fetch_url(setting, name, patterns, () if with_weights else (_INDEX,), is_model=True)
    if not name.startswith(HUBS):
        return _choose_folder(setting, name, with_weights=with_weights)
    if not (match := _HUB_NAME.fullmatch(name)):
        raise ConfigError(
            f"{setting}={name!r}; allowed: {name[:3]}ORG/NAME or {name[:3]}ORG/NAME@REVISION"
        )
    hub, repository, revision = match.groups()
    fetch = _fetch_from_hub if hub == "hf" else _fetch_from_modelscope
    ignored = [*_IGNORED, *(() if with_weights else (_INDEX,))]
    if _is_first_rank():
        _report_fetch(name)
    folder = fetch(f"{setting}={name!r}", repository, revision, patterns, ignored)
    if with_weights and not any(Path(folder).glob("*.safetensors")):
        raise ConfigError(
            f"{setting}={name!r} has no *.safetensors file; allowed: a repository with config.json "
            "and safetensors"
        )
    return folder


def find_published(name: str) -> Path | None:
    """Return the folder of a published model's config.json, by NAME or ORG/NAME; else None."""
    folders = PUBLISHED_CONFIGS.glob("*/*")
    return next((path for path in folders if name in (path.name, _get_full_name(path))), None)


def _get_full_name(folder: Path) -> str:
    return str(folder.relative_to(PUBLISHED_CONFIGS))


def _choose_folder(setting: str, name: str, *, with_weights: bool) -> str:
    """Return a model's folder, or where weights are not needed that of a published config.json."""
    if not _LIKE_MODEL_NAME.fullmatch(name) or os.path.lexists(name):
        return name
    if (folder := find_published(name)) is not None:
        full_name = _get_full_name(folder)
        if with_weights:
            raise ConfigError(
                f"{setting}={name!r} is no folder, and this package has no weights of "
                f"{full_name}; allowed: a folder with its weights, or hf:{full_name}"
            )
        print(f"{setting}={name}: config.json of {full_name}, from this package", file=sys.stderr)
        return str(folder)
    if not with_weights:
        folders = sorted(PUBLISHED_CONFIGS.glob("*/*"))
        known = [_get_full_name(path) if "/" in name else path.name for path in folders]
        close = find_closest(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"published: {', '.join(known)}"
        if close or "/" not in name:
            raise ConfigError(f"{setting}={name!r} does not exist; {hint}")
    return name  # what reads it says that it does not exist


def _fetch_from_hub(
    source: str, repository: str, revision: str | None, allowed: list[str], ignored: list[str]
) -> str:
    """Download a repository to the cache of huggingface_hub; `source` begins errors."""
    from huggingface_hub import snapshot_download  # takes a moment, and most runs need none
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not (sys.stderr.isatty() and _is_first_rank()):
        disable_progress_bars()
    try:
        return snapshot_download(
            repository, revision=revision, allow_patterns=allowed, ignore_patterns=ignored
        )
    except Exception as error:
        reason = _explain_hub_error(error, revision)
        raise ConfigError(f"{source} cannot be fetched: {reason}") from error


def _explain_hub_error(error: Exception, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"{hub} asks to accept its terms there, and to log in (HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{hub} has no such repository, or it is private (HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision {revision!r}"
    reason = _describe(error)
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} does not answer"
        return f"{cause}, and {constants.HF_HUB_CACHE} does not have all of it ({reason})"
    return reason


def _fetch_from_modelscope(
    source: str, repository: str, revision: str | None, allowed: list[str], ignored: list[str]
) -> str:
    """Download a repository to the cache of modelscope; `source` begins errors."""
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{source} needs the package modelscope: {error}; allowed: pip install modelscope, or "
            "a local folder"
        ) from error
    try:
        return str(
            snapshot_download(
                repository, revision=revision, allow_patterns=allowed, ignore_patterns=ignored
            )
        )
    except Exception as error:
        reason = _describe(error)
        raise ConfigError(f"{source} cannot be fetched: {reason}") from error


# Files at URLs, through fsspec


def open_store(setting: str, url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        ConfigError: fsspec does not know the protocol, or its package is missing.
    """
    from fsspec.core import url_to_fs

    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        raise ConfigError(
            f"{setting}={url!r} needs a package that is missing: {error}; allowed: install it, or "
            "a local path"
        ) from error
    except Exception as error:
        raise ConfigError(f"{setting}={url!r} cannot be opened: {_describe(error)}") from error
    return store, path.rstrip("/")


def check_export(url: str) -> None:
    """Check that checkpoint.export_to can be opened, and has no checkpoint yet; "" is none.

    Raises:
        ConfigError: It cannot, or has.
    """
    if not url:
        return
    store, path = open_store(_EXPORT, url)
    try:
        is_complete = store.exists(f"{path}/{_LAST_FILE}")
    except Exception as error:
        raise ConfigError(f"{_EXPORT}={url!r} cannot be read: {_describe(error)}") from error
    if is_complete:
        raise ConfigError(f"{_EXPORT}={url!r} has a {_LAST_FILE}; allowed: a folder without one")


def export_checkpoint(folder: Path, url: str) -> None:
    """Copy a complete checkpoint to checkpoint.export_to; without its config.json it is incomplete.

    Raises:
        RunFailed: A file cannot be written; the message says where the weights are.
    """
    if not url:
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    last = folder / _LAST_FILE
    try:
        store, path = open_store(_EXPORT, url)
        if hasattr(store, "auto_mkdir"):  # file systems with folders, such as the local one
            store.auto_mkdir = True
        for part in ([file for file in files if file != last], [last]):
            names = [f"{path}/{file.relative_to(folder)}" for file in part]
            store.put([str(file) for file in part], names)
            for file, name in zip(part, names, strict=True):
                if (size := store.info(name)["size"]) != file.stat().st_size:
                    raise OSError(f"{name} has {size} bytes instead of {file.stat().st_size}")
    except Exception as error:
        raise RunFailed(
            f"{_EXPORT}={url!r} is incomplete: {_describe(error)}; the weights are in {folder}"
        ) from error


def _fetch_url(
    setting: str,
    url: str,
    patterns: Sequence[str],
    ignored: Collection[str] = (),
    *,
    is_model: bool = False,
) -> str:
    """Copy a file, or the files of a folder that fit the patterns, into the cache.

    The copy is at CACHE/PROTOCOL/PATH_OF_PARENT/VERSION/NAME, where VERSION changes with the
    content: a run that goes on while the store gets other files keeps its own.
    """
    store, path = open_store(setting, url)
    source = f"{setting}={url!r}"
    try:
        info = store.info(path)
        is_folder = info["type"] == "directory"
        entries = _list_entries(store, path, patterns, ignored) if is_folder else [info]
    except FileNotFoundError as error:
        raise ConfigError(f"{source} does not exist") from error
    except Exception as error:
        raise ConfigError(f"{source} cannot be read: {_describe(error)}") from error
    if is_model and not is_folder:
        raise ConfigError(f"{source} is a file; allowed: the folder of a Hugging Face checkpoint")
    if not entries:
        raise ConfigError(f"{source} has no file of: {', '.join(patterns)}")
    *parents, name = [part for part in path.split("/") if part not in ("", ".", "..")]
    folder = _get_cache_dir().joinpath(url.partition(":")[0], *parents)
    version, copy = _compute_version(url, entries), Path(name)
    target = folder / version / name
    try:
        with _lock_folder(folder, version):
            if not target.exists():
                _report_fetch(url)
                partial = folder / f".{version}.partial"
                if partial.is_symlink():  # files below it would be written somewhere else
                    raise OSError(f"{partial} is a link")
                (partial / copy if is_folder else partial).mkdir(parents=True, exist_ok=True)
                _copy_missing(store, entries, partial / copy, is_folder=is_folder)
                partial.rename(folder / version)
    except Exception as error:
        raise ConfigError(f"{source} cannot be copied to {folder}: {_describe(error)}") from error
    return str(target)


def _list_entries(
    store: Any, folder: str, patterns: Sequence[str], ignored: Collection[str]
) -> list[Mapping[str, Any]]:
    """Return the files of a folder that fit a pattern and none of `ignored`, by name."""
    entries = [entry for entry in store.ls(folder, detail=True) if entry["type"] == "file"]
    names = {_get_name(entry): entry for entry in entries}
    return [
        names[name]
        for name in sorted(names)
        if any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in (*_IGNORED, *ignored))
    ]


def _get_name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _compute_version(url: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest that changes with the URL and the content of its files."""
    described = [
        (
            _get_name(entry),
            entry.get("size"),
            next((str(entry[tag]) for tag in _CONTENT_TAGS if entry.get(tag)), ""),
        )
        for entry in entries
    ]
    return hashlib.sha256(json.dumps([url.rstrip("/"), described]).encode()).hexdigest()[:12]


def _copy_missing(
    store: Any, entries: Sequence[Mapping[str, Any]], target: Path, *, is_folder: bool
) -> None:
    """Copy files from a store, without those that an interrupted copy has written."""
    local = {entry["name"]: target / _get_name(entry) if is_folder else target for entry in entries}
    sizes = {entry["name"]: entry.get("size") for entry in entries}
    names = [n for n, path in local.items() if not _has_size(path, sizes[n])]
    if names:
        store.get(names, [str(local[name]) for name in names])
    for name in names:
        if sizes[name] is not None and not _has_size(local[name], sizes[name]):
            raise OSError(f"{name} has {sizes[name]} bytes in the store, its copy does not")


def _has_size(path: Path, size: int | None) -> bool:
    return size is not None and path.is_file() and path.stat().st_size == size


def _get_cache_dir() -> Path:
    """Return the folder of copies: MCORE_RL_CACHE, else mcore_rl in the user's cache folder."""
    if folder := os.environ.get(CACHE):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore_rl"


@contextmanager
def _lock_folder(folder: Path, version: str) -> Iterator[None]:
    """Let one process at a time copy a version."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(open_lock(folder / f".{version}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _report_fetch(name: str) -> None:
    """Print that something is fetched, which may take minutes."""
    print(f"fetching {name}", file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    """Return whether this process may speak: it is rank 0, or not of torchrun."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def _replace_texts(key: str, value: Any, local: Mapping[tuple[str, str], str]) -> Any:
    """Return a copy of settings in which the texts of `local`, by key and text, are replaced."""

    def replace_part(name: str, part: Any) -> Any:
        return _replace_texts(f"{key}.{name}" if key else name, part, local)

    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: replace_part(name, getattr(value, name)) for name in names})
    if isinstance(value, Mapping):
        return {name: replace_part(str(name), part) for name, part in value.items()}
    if isinstance(value, list):
        return [_replace_texts(key, part, local) for part in value]
    return local.get((key, value), value) if isinstance(value, str) else value
