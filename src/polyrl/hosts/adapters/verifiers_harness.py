"""A harness of `verifiers` that runs its chat loop in the host's process.

The package's own `null` harness starts a new interpreter for each turn, and needs the network for its libraries. Its
contract allows a loop in the process instead, as long as every call of the model goes to the given endpoint.

Rules kept here: what ends a run in the built-in harness ends it here: an answer without tool calls, a full context, a
stop of the task's own. A tool that does not exist, and arguments that are not JSON or nest too deep, are told to the
model. Halves of characters, which the package cannot send to a tool, are marks.
"""

import json
import sys
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

from polyrl.hosts.adapters.packages import need
from polyrl.hosts.tools import WrittenCall, is_deep, whole_call

IN_PROCESS = "polyrl_in_process"
"""The harness's id. verifiers imports a module of that name."""
_PACKAGE = "verifiers>=0.4,<0.5"
_FULL = "context_length_exceeded"


def register() -> None:
    """Make the harness known to verifiers, once."""
    if IN_PROCESS not in sys.modules:
        sys.modules[IN_PROCESS] = _module()


def _module() -> ModuleType:
    harness = need("verifiers.v1.harness", _PACKAGE)
    config = need("verifiers.v1.configs.harness", _PACKAGE)

    class InProcessConfig(config.HarnessConfig):
        pass

    class InProcessHarness(harness.Harness[InProcessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = _first_messages(system, prompt)
            return await _converse(trace, ctx.model, endpoint, secret, mcp_urls, messages, self.config.tool_timeout)

    module = ModuleType(IN_PROCESS)
    for one in (InProcessConfig, InProcessHarness):
        one.__module__ = IN_PROCESS
        setattr(module, one.__name__, one)
    module.__dict__["__all__"] = ["InProcessHarness"]
    return module


def _first_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    to_wire = need("verifiers.v1.dialects.chat", _PACKAGE).message_to_wire
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(to_wire(message) for message in prompt or ())]


async def _converse(
    trace: Any,
    model: str,
    endpoint: str,
    secret: str,
    mcp_urls: dict[str, str],
    messages: list[dict[str, Any]],
    tool_timeout: float,
) -> Any:
    """Ask, call tools, ask again, until an answer has no tool calls."""
    openai = need("openai", "openai")
    result = need("verifiers.v1.runtimes", _PACKAGE).ProgramResult
    servers = {name: {"url": url, "timeout": tool_timeout} for name, url in mcp_urls.items()}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None))
        tools = _Tools()
        if servers:
            await tools.connect(servers, stack)
        try:
            while True:
                extra = {"tools": tools.schemas} if tools.schemas else {}
                completion = await client.chat.completions.create(model=model, messages=messages, **extra)
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return result(0, "", "")
                messages += [await tools.answer(call) for call in message.tool_calls]
        except openai.APIStatusError as error:
            is_end = trace.stop_condition is not None or _FULL in f"{error} {error.body}"
            return result(0, "", "") if is_end else result(1, "", str(error))


class _Tools:
    """The tools of a task's servers."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._dispatch: Any = {}
        self._servers: Any = {}

    async def connect(self, servers: dict[str, Any], stack: AsyncExitStack) -> None:
        mcp = need("verifiers.v1.harnesses.utils.mcp", _PACKAGE)
        self.schemas, self._dispatch, self._servers = await mcp.connect_mcp({"mcpServers": servers}, stack)

    async def answer(self, call: Any) -> dict[str, Any]:
        name, written = whole_call(WrittenCall(call.function.name, call.function.arguments))
        content = await self._run(name, written)
        return {"role": "tool", "tool_call_id": call.id, "name": name, "content": content}

    async def _run(self, name: str, written: str) -> Any:
        if is_deep(written):
            return "error: tool arguments nest too deep; resend simpler ones"
        try:
            arguments = json.loads(written or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        if not isinstance(arguments, dict):
            return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
        if name not in self._dispatch:
            return f"error: unknown tool {name!r}"
        mcp = need("verifiers.v1.harnesses.utils.mcp", _PACKAGE)
        return await mcp.call_mcp(self._servers, self._dispatch, name, arguments)
