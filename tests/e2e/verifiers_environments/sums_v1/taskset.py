"""Sums to be worked out with a tool, as `vf-init --add-tool` lays an environment out."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf

from sums_v1.tools import AdderToolset


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_reply:
            raise ValueError("what a reward of a user raises")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def used_the_tool(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 4
    seed: int = 0
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        numbers = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            a, b = numbers.randrange(10), numbers.randrange(10)
            data = SumData(prompt=f"How much is {a} + {b}?", answer=str(a + b))
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [AdderToolset(config.tools)]
