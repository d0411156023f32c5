"""What a job need not wait for before it starts."""

import os
import subprocess
import sys

import pytest

from mcore_rl.config.schema import EngineConfig, Layout
from mcore_rl.jobs.rl import _same_ranks

_SLOW = {"matplotlib", "megatron.core", "vllm"}  # for the picture at the end, for ranks and servers


_COMPILER = {"torch._dynamo", "torch.distributed.tensor", "sympy"}
_CLIENTS = {"pydantic", "httpx", "websockets", "fastapi", "uvicorn", "openai"}
_TRANSFORMERS = {"transformers"}


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        ("jobs.rl", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS),
        ("jobs.evaluate", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS),
        ("workers.rollout_worker", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS),
        ("workers.model_server", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS),
        ("jobs.convert.commands", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS | {"ray"}),
        # What each worker process of a conversion imports.
        ("jobs.convert.to_megatron", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS | {"ray"}),
        ("jobs.convert.to_hf", _SLOW | _COMPILER | _CLIENTS | _TRANSFORMERS | {"ray"}),
    ],
)
def test_a_job_starts_without_what_its_driver_has_no_use_for(module, unused) -> None:
    program = f"import sys, mcore_rl.{module}; print(sorted({unused} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("[]\n", 0), found.stderr


# A unit whose module tells which process imports it.
_UNITS = """
import os
from dataclasses import dataclass

print("imported by", os.getpid(), file=open({log!r}, "a"))

@dataclass(frozen=True)
class Unit:
    name: str
    nbytes: int = 0

    def write(self, folder, wrote, kept):
        return os.getpid()
"""
_WRITE = """
from pathlib import Path
from convert_units import Unit
from mcore_rl.jobs.convert.workers import writer

if __name__ == "__main__":
    with writer(4, Path(), [Unit], {}) as write:
        done = list(write([Unit(str(number)) for number in range(8)], lambda num_bytes: None))
    print(len(done), len({pid for _, pid in done}) > 1)
"""


def test_processes_of_a_conversion_do_not_each_import_what_units_need(tmp_path) -> None:
    log = tmp_path / "log"
    (tmp_path / "convert_units.py").write_text(_UNITS.format(log=str(log)))
    (tmp_path / "program.py").write_text(_WRITE)
    command = [sys.executable, str(tmp_path / "program.py")]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}  # as of packages that are installed
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("8 True\n", 0), found.stderr
    assert (
        len(set(log.read_text().splitlines())) == 2
    )  # the command, and what workers are forked of


# Of what a driver needs for tokens and agents: servers of HTTP, torch's compiler, generation.
_UNUSED = {
    "fastapi", "uvicorn", "torch._dynamo", "torch.distributed.tensor",
    "transformers.generation.utils", "transformers.modeling_utils",
}  # fmt: skip
_DRY_RUN = """
import sys
from mcore_rl.cli.main import main
sys.argv = ["mcore-rl", "rl", *sys.argv[1:], "--dry-run"]
assert main() == 0
print(sorted({unused} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "settings", [["recipe=quickstart"], ["recipe=toy_countdown"], ["recipe=toy_calculator"]]
)
def test_a_driver_that_makes_a_model_and_reads_its_tokenizer_imports_no_models(tmp_path, settings):
    program = _DRY_RUN.format(unused=_SLOW | _UNUSED)
    command = [sys.executable, "-c", program, *settings, f"output_dir={tmp_path / 'out'}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_actor_takes_over_the_ranks_of_a_warm_start_that_are_as_many() -> None:
    """As the quickstart's are; test_building.py has how a group is rebuilt."""
    one, two, actor = (
        EngineConfig(layout=layout) for layout in (Layout(), Layout(dp=2), Layout(tp=2, ep=2))
    )
    assert _same_ranks(two, actor)
    assert not _same_ranks(one, actor)
