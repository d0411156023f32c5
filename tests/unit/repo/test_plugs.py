"""The page on parts of your own has the signatures of the code."""

from __future__ import annotations

import inspect
import re

import pytest

from mcore_rl.agents.environments.base import Environment
from mcore_rl.agents.loops import AgentLoop
from mcore_rl.agents.tools.base import StatefulTool
from mcore_rl.engine.base import BaseEngine
from mcore_rl.inference.protocol import GenerationServer
from mcore_rl.observability.trackers import Tracker
from mcore_rl.reshard.executor import MessageTransport
from mcore_rl.trainers.base import RLTrainer
from mcore_rl.weight_sync.transport import WeightTransport
from tests.pages import ROOT

CONTRACTS = (
    RLTrainer, BaseEngine, GenerationServer, WeightTransport, MessageTransport, Tracker,
    Environment, StatefulTool, AgentLoop,
)  # fmt: skip
PAGE = (ROOT / "docs" / "plugs.md").read_text()


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
def test_the_page_has_what_a_part_must_define(contract: type):
    """All abstract methods, or all methods of a protocol, in the order of the code."""
    [block] = re.findall(rf"(?:^|\n\n|\n```text\n)({contract.__name__}:\n(?:    .+\n)+)", PAGE)
    names = getattr(contract, "__abstractmethods__", None) or {
        name for name, value in vars(contract).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }  # fmt: skip
    members = {
        name: value for base in reversed(contract.__mro__) for name, value in vars(base).items()
    }
    lines = [describe_method(name, members[name]) for name in members if name in names]
    assert block == f"{contract.__name__}:\n" + "".join(f"    {line}\n" for line in lines)


def describe_method(name: str, method: object) -> str:
    """Return a method's name and signature without `self`, or the type of a property."""
    is_property = isinstance(method, property)
    function = method.fget if is_property else method
    assert inspect.isfunction(function), (name, method)
    signature = inspect.signature(function)
    if is_property:
        return f"{name}: {signature.return_annotation}"
    _, *parameters = signature.parameters.values()
    text = str(signature.replace(parameters=parameters)).removesuffix(" -> 'None'")
    text = re.sub("'([^']*)'", lambda match: match[1] or '""', text)
    return ("async " if inspect.iscoroutinefunction(function) else "") + name + text
