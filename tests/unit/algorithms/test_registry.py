import pytest

from mcore_rl.algorithms.registry import Registry
from mcore_rl.config.errors import ConfigError


def test_an_entry_is_found_by_its_name_and_unchanged_by_its_decorator():
    registry: Registry[type] = Registry("room.setting")
    entry = registry.register("b")(int)
    registry.register("a")(str)
    assert entry is int
    assert registry["b"] is int
    assert registry.names == ["a", "b"]


def test_a_name_is_given_once():
    registry: Registry[type] = Registry("room.setting")
    registry.register("a")(int)
    with pytest.raises(ValueError, match=r"room\.setting: 'a' is registered twice"):
        registry.register("a")(str)


def test_an_unknown_name_is_a_configuration_error():
    registry: Registry[type] = Registry("room.setting")
    registry.register("a")(int)
    with pytest.raises(ConfigError, match=r"room\.setting='x' is unknown; allowed: a"):
        registry["x"]
