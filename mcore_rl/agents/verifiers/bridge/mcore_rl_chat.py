"""A harness of verifiers: its `null`, without starting a program for each rollout.

It imports nothing of mcore_rl. verifiers finds it by its name, as an installed package.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, omit
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]
TURNS = "mcore_rl_turns"  # key in the info of a trace: prompt length and token ids of each answer


class ChatHarness(NullHarness):
    """Asks the model and calls its tools until an answer has no call.

    A conversation without room for another token ends, and is scored.
    """

    async def setup(self, runtime: vf.Runtime) -> None:
        """Install nothing."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Run one conversation in this process."""
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(DefaultAsyncHttpxClient(timeout=None))
            model = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http)
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)

            async def call_tool(call: Any) -> Any:
                """Return the content of a tool's answer."""
                if tool_interception_url:
                    gate = await gate_tool_call(http, tool_interception_url, secret, call)
                    if gate["action"] == "deny":
                        return gate["message"]["content"]
                arguments = json.loads(call.function.arguments or "{}")
                if call.function.name not in dispatch:
                    return f"error: unknown tool {call.function.name!r}"
                return await call_mcp(connected, dispatch, call.function.name, arguments)

            messages: list[Any] = self._build_opening(data)
            try:
                while True:
                    answer = await model.chat.completions.create(
                        model=ctx.model,
                        messages=messages,
                        tools=tools or omit,
                        extra_body={"return_token_ids": True},
                    )
                    [choice] = answer.choices
                    prompt = (answer.model_extra or {})["prompt_token_ids"]
                    token_ids = (choice.model_extra or {})["token_ids"]
                    turn = {"prompt": len(prompt), "token_ids": token_ids}
                    trace.info.setdefault(TURNS, []).append(turn)
                    messages.append(choice.message.model_dump(exclude_none=True))
                    if not choice.message.tool_calls:
                        break
                    messages += [
                        {"role": "tool", "tool_call_id": call.id, "content": await call_tool(call)}
                        for call in choice.message.tool_calls
                    ]
            except APIStatusError as error:
                # Once verifiers has stopped a rollout, it refuses its requests.
                if trace.stop_condition is None and not is_context_overflow(error):
                    raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _build_opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or ())]
