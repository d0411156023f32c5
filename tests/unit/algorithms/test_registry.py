"""Functions by name and by import path, with their settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mcore_rl.algorithms.advantages import ADVANTAGES
from mcore_rl.algorithms.losses import LOSSES
from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError

Scaled = Callable[[int], str]


@dataclass(frozen=True)
class Settings:
    scale: float
    unit: str = "m"
    most: int | None = None
    is_round: bool = False
    limit: float = math.inf

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale={self.scale}; allowed: above 0")


def scaled(number: int, settings: Settings) -> str:
    return f"{number * settings.scale:g} {settings.unit} {settings.most} {settings.is_round}"


def plain(number: int) -> str:
    return str(number)


@pytest.fixture
def registry() -> Registry[Scaled]:
    made: Registry[Scaled] = Registry("room.choice", ("number",))
    made.register("scaled")(scaled)
    made.register("plain")(plain)
    return made


def test_an_entry_has_its_name_and_is_unchanged_by_its_decorator(registry):
    def other(number: int) -> str:
        return ""

    assert registry.register("a")(other) is other
    assert registry["a"] is other
    assert registry["scaled"] is scaled
    assert registry.names == ["a", "plain", "scaled"]


def test_a_name_is_given_once(registry):
    with pytest.raises(ValueError, match=r"room\.choice: 'plain' is registered twice"):
        registry.register("plain")(plain)


def test_an_unknown_name_is_a_configuration_error(registry):
    with pytest.raises(
        ConfigError, match=r"room\.choice='x' is unknown; allowed: plain, scaled, or an import path"
    ):
        registry["x"]


def test_settings_are_filled_in_by_type_and_default(registry):
    assert registry.bind("scaled", {"scale": 2, "most": 3})(4) == "8 m 3 False"
    result = registry.bind("scaled", {"scale": 0.5, "unit": "s", "most": None, "is_round": True})
    assert result(4) == "2 s None True"
    assert registry.bind("plain", {})(4) == "4"


def test_a_number_may_be_infinite_where_its_default_is(registry):
    for limit in (math.inf, -math.inf):
        assert registry.build_settings("scaled", {"scale": 1.0, "limit": limit}).limit == limit


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("functions", "name", "setting"),
    [(LOSSES, "positive_nll", "min_reward"), (ADVANTAGES, "gigpo", "step_weight")],
)
def test_no_function_of_ours_takes_a_number_that_is_not_finite(functions, name, setting, value):
    with pytest.raises(ConfigError, match=rf"{functions.settings_key}\.{setting}={value}; allowed"):
        functions.bind(name, {setting: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"room.choice_settings.scale is needed by room.choice='scaled'"),
        ({"scale": "2"}, r"room.choice_settings.scale='2'; allowed: a number"),
        ({"scale": True}, r"room.choice_settings.scale=True; allowed: a number"),
        ({"scale": 1.0, "most": 0.5}, r"settings.most=0.5; allowed: a whole number, null"),
        ({"scale": 1.0, "unit": 3}, r"settings.unit=3; allowed: text"),
        ({"scale": 1.0, "is_round": 1}, r"settings.is_round=1; allowed: true or false"),
        ({"scale": -1.0}, r"room.choice_settings.scale=-1.0; allowed: above 0"),
        ({"scale": math.nan}, r"room.choice_settings.scale=nan; allowed: a finite number"),
        ({"scale": math.inf}, r"room.choice_settings.scale=inf; allowed: a finite number"),
        ({"scale": 1.0, "limit": math.nan}, r"settings.limit=nan; allowed: a finite number"),
        (
            {"scael": 1.0},
            r"room.choice_settings.scael is no setting of room.choice='scaled'; allowed: scale, "
            "unit, most, is_round, limit",
        ),
    ],
)
def test_a_wrong_setting_is_named(registry, settings, message):
    with pytest.raises(ConfigError, match=message):
        registry.bind("scaled", settings)


def test_settings_of_a_function_that_has_none_are_refused(registry):
    with pytest.raises(ConfigError, match=r"room.choice_settings={'x': 1}: .*'plain' has no set"):
        registry.bind("plain", {"x": 1})


USER_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Tensor

@dataclass(frozen=True)
class Settings:
    suffix: str = "!"

@dataclass(frozen=True)
class Listed:
    sizes: list[float]

@dataclass
class Loose:
    suffix: str = "!"

def loud(number: int, settings: Settings) -> str:
    return f"{number}{settings.suffix}"

def loose(number: int, settings: Loose) -> str: ...
def listed(number: int, settings: Listed): ...
def bare(number, settings): ...
def two(number, other): ...
def none(): ...
def keyword(*, number): ...
def optional(number, other=3): return f"{number + other}"
def hidden(number: Tensor): ...
value = 3
"""


@pytest.fixture
def user_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "own_file.py").write_text(USER_FILE)
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    yield tmp_path
    sys.modules.pop("own_file", None)


@pytest.mark.parametrize("where", ["own_file", "own_file.py", "{}/own_file.py"])
def test_a_function_outside_of_the_package_has_its_import_path(registry, user_path, where):
    # As a module of the current folder, and as a file; with `import annotations`.
    path = f"{where.format(user_path)}:loud"
    assert registry.bind(path, {})(3) == "3!"
    assert registry.bind(path, {"suffix": "?"})(3) == "3?"
    assert registry[path] is registry[path]
    assert registry.bind(path.replace("loud", "optional"), {})(3) == "6"


def test_two_files_of_one_name_are_two_modules(registry, user_path):
    (user_path / "a").mkdir()
    (user_path / "a" / "own_file.py").write_text(USER_FILE.replace('"!"', '"a"'))
    assert registry.bind("own_file.py:loud", {})(3) == "3!"
    assert registry.bind("a/own_file.py:loud", {})(3) == "3a"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:f", r"'nowhere' cannot be imported: ModuleNotFoundError: No module named"),
        ("nowhere.py:f", r"'nowhere.py' cannot be imported: FileNotFoundError: .*nowhere.py"),
        ("broken.py:f", r"'broken.py' cannot be imported: ModuleNotFoundError: .*nowhere_at_all"),
        (
            "own_file.py:lood",
            r"has no function 'lood'; it has: Settings, Listed, Loose, loud, loose",
        ),
        ("own_file.py:value", r"has no function 'value'"),
        ("own_file.py:two", r"takes \(number, other\); allowed: \(number\), and a last"),
        ("own_file.py:none", r"takes \(\); allowed: \(number\)"),
        ("own_file.py:keyword", r"takes \(\*, number\); allowed: \(number\)"),
        (
            "own_file.py:bare",
            r"its parameter settings is annotated as .*empty.*frozen datacl",
        ),
        (
            "own_file.py:loose",
            r"its parameter settings is annotated as .*Loose.*frozen data",
        ),
        (
            "own_file.py:listed",
            r"field sizes of its settings is annotated as .*list\[float\]",
        ),
        (
            "own_file.py:hidden",
            r"its signature cannot be read: name 'Tensor' is not defined",
        ),
    ],
)
def test_an_import_path_that_leads_nowhere_is_one_clear_error(registry, user_path, path, message):
    with pytest.raises(ConfigError, match=rf"room.choice='{path}'.*{message}"):
        registry.bind(path, {})


@pytest.mark.parametrize(
    "path", ["os:system", "posix:system", "builtins:eval", "subprocess:run", "math:sqrt"]
)
def test_a_function_of_python_is_none_of_a_setting(path):
    # It would be called with what a run has, once that has begun.
    for registry in (LOSSES, ADVANTAGES):
        message = (
            rf"^{registry.setting}='{path}' is Python's own \w+\.\w+; allowed: a function that was"
        )
        with pytest.raises(ConfigError, match=message):
            registry.bind(path, {})


def test_nor_is_one_that_a_file_of_ones_own_has_imported(tmp_path):
    (tmp_path / "mine.py").write_text("from os import system\ndef loss(inputs): ...\n")
    with pytest.raises(ConfigError, match=r"is Python's own posix\.system"):
        LOSSES.bind(f"{tmp_path / 'mine.py'}:system", {})
    assert LOSSES.bind(f"{tmp_path / 'mine.py'}:loss", {}) is not None
