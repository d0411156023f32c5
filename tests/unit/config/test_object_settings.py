"""Python objects as values of settings: their names, and how other processes get them."""

import subprocess
import sys
import textwrap
import threading

import cloudpickle
import pytest

from mcore_rl.agents.tools.base import tool
from mcore_rl.agents.tools.sources import load_tool_sources
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.import_path import load_function, load_object
from mcore_rl.config.object_settings import name_objects
from mcore_rl.config.python_objects import export_objects, import_objects, keep_objects
from mcore_rl.config.schema import RLConfig
from mcore_rl.data.files import open_rows
from mcore_rl.examples.file_transport import FileTransport
from mcore_rl.examples.rft import RejectionSampling
from mcore_rl.weight_sync.transport import check_transport


def make_reward(scale):
    def reward(text):
        return scale * len(text)

    return reward


def test_function_of_an_importable_module_is_named_by_its_import_path():
    config = RLConfig()
    config.reward.name, config.trainer.mode = make_reward, RejectionSampling
    with name_objects(config) as named:
        assert named.reward.name == "tests.unit.config.test_object_settings:make_reward"
        assert named.trainer.mode == "mcore_rl.examples.rft:RejectionSampling"
        assert load_object("reward.name", named.reward.name) is make_reward


def test_closures_of_one_name_are_apart_and_forgotten_at_the_end():
    config = RLConfig()
    config.reward.terms = {
        "twice": {"name": make_reward(2)},
        "thrice": {"name": make_reward(3), "settings": {"inner": make_reward(5)}},
    }
    with name_objects(config) as named:
        terms = named.reward.terms
        names = [terms["twice"]["name"], terms["thrice"]["name"]]
        names.append(terms["thrice"]["settings"]["inner"])
        assert names == ["<python>:reward", "<python>:reward_2", "<python>:reward_3"]
        assert [load_function("key", name)("ab") for name in names] == [4, 6, 10]
        with keep_objects():
            pass
        assert {*export_objects()} == {*names} and {*export_objects(names[0])} == {names[0]}
    with pytest.raises(ConfigError, match=r"reward.name='<python>:reward' is an object of the Py"):
        load_function("reward.name", "<python>:reward")
    assert config.reward.terms["twice"]["name"]("ab") == 4  # the settings themselves are as before


def test_a_worker_gets_the_object_by_value_and_that_of_the_latest_run():
    exported, config = [], RLConfig()
    for scale in (2, 7):
        config.reward.name = make_reward(scale)
        with name_objects(config) as named:
            exported.append(export_objects())
    with keep_objects():  # as in another process
        for scale, pickles in zip((2, 7), exported, strict=True):
            import_objects(pickles)
            assert load_function("reward.name", named.reward.name)("abc") == 3 * scale


def test_a_module_that_other_processes_cannot_import_travels_with_its_functions(
    tmp_path, monkeypatch
):
    (tmp_path / "session_helpers.py").write_text("def triple(x):\n    return 3 * x\n")
    module = "import session_helpers\n\n\ndef reward(text):\n    return session_helpers.triple(1)\n"
    (tmp_path / "session_reward.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    import session_reward

    config = RLConfig()
    config.reward.name = session_reward.reward
    with name_objects(config) as named:
        assert named.reward.name == "<python>:reward"
        [data] = export_objects().values()
    program = f"import cloudpickle; print(cloudpickle.loads({data!r})('a'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr
    assert not cloudpickle.list_registry_pickle_by_value()


def test_a_worker_gets_a_tool_by_value():
    def add(first: int, second: int) -> int:
        """Add two numbers."""
        return first + second

    config = RLConfig()
    config.agent.tools = [tool(add)]
    with name_objects(config) as named:
        pickles = export_objects()
    with keep_objects():  # as in another process
        import_objects(pickles)
        [source] = load_tool_sources(named.agent)
        assert source(2, 3) == 5 and source.tool.name == "add"


def test_a_transport_of_a_session_is_refused_as_servers_do_not_receive_it():
    config = RLConfig()
    config.weight_sync.transport = type("Own", (FileTransport,), {"__module__": "__main__"})
    refusal = pytest.raises(ConfigError, match="a class of a Python session, which the processes")
    with name_objects(config) as named, refusal:
        check_transport(named.weight_sync.transport)


def test_rows_stay_in_the_process_that_reads_them():
    config = RLConfig()
    config.data.train_files = [[{"a": 1}], ({"a": n} for n in range(3))]
    config.data.test_files = {"own": [{"a": 5}, {"a": 6}]}
    with name_objects(config) as named:
        assert named.data.train_files == ["<python>:train_files_0", "<python>:train_files_1"]
        first, second = (open_rows(n, "data.train_files") for n in named.data.train_files)
        assert [row.values["a"] for row in (*first, *second)] == [1, 0, 1, 2]
        assert len(open_rows(named.data.train_files[1], "data.train_files")) == 3  # once more
        assert len(open_rows(named.data.test_files["own"], "data.test_files.own")) == 2
        assert not export_objects()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("seed", len, "seed=<built-in function len>; allowed: no Python object in this setting"),
        ("output_dir", make_reward, "output_dir=<function make_reward"),
        ("data.train_file", 7, "data.train_file is a int; allowed: a file or folder, an import "),
        ("data.train_file", {"a": 1}, "data.train_file is a dict; allowed: a file or folder, an "),
    ],
)
def test_an_object_where_none_is_taken_is_refused(setting, value, message):
    config = RLConfig()
    group, _, name = setting.rpartition(".")
    setattr(config.data if group else config, name, value)
    with pytest.raises(ConfigError) as raised, name_objects(config):
        pass
    assert str(raised.value).startswith(message)


def test_a_function_that_holds_a_lock_is_refused_before_a_run():
    lock, config = threading.Lock(), RLConfig()
    config.reward.name = lambda text: lock.locked()
    refusal = pytest.raises(ConfigError, match=r"reward.name=<function.* cannot be sent to the")
    with refusal, name_objects(config):
        pass


def test_a_function_of_a_script_is_not_imported_again(tmp_path):
    """Its file would run once more in each worker."""
    script = textwrap.dedent("""
        from mcore_rl.config.object_settings import name_objects
        from mcore_rl.config.python_objects import export_objects
        from mcore_rl.config.schema import RLConfig

        def reward(text):
            return 1.0

        config = RLConfig()
        config.reward.name = reward
        with name_objects(config) as named:
            print(named.reward.name, len(export_objects()))
    """)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "<python>:reward 1\n", done.stderr
