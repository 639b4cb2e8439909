"""Environments behind an OpenEnv server: a session an episode, actions and observations as objects.

    environment = "openenv", environment_args = { url = "http://127.0.0.1:8000", sessions = 4, action = "message" }

Rules kept here: a server has so many sessions, and turns further ones away: a host claims no more places than that, and
an episode waits here while the session of the last one is closed. An answer that is a JSON object is the action; any
other text is the value of the field `action`. An action that the server does not take is the policy's mistake: it is
told so, and its turn is spent. Rewards of steps are summed.
"""

import asyncio
import json
from typing import Any
from weakref import WeakKeyDictionary

from polyrl.errors import UserError
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.own import Turn
from polyrl.hosts.tools import is_deep

_REFUSED = "code: VALIDATION_ERROR"
"""In the client's words. The session goes on after it."""
_SESSIONS: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]" = WeakKeyDictionary()


class OpenEnvSession:
    max_turns = 64

    def __init__(
        self,
        url: str,
        sessions: int = 1,
        action: str = "message",
        observation: str = "",
        system: str = "",
        reset: dict[str, Any] | None = None,
    ) -> None:
        """`observation` is the field that the policy sees; empty: the whole object, as JSON."""
        if sessions < 1:
            raise UserError(f"openenv: sessions: {sessions}; expected at least 1")
        self.max_at_once = sessions
        self._client_class = need("openenv", "openenv").GenericEnvClient
        self._url, self._sessions, self._action, self._field = url, sessions, action, observation
        self._system, self._reset = system, reset or {}
        self._client: Any = None
        self._place: asyncio.Semaphore | None = None

    async def begin(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        of_loop = _SESSIONS.setdefault(asyncio.get_running_loop(), {})
        place = of_loop.setdefault(self._url, asyncio.Semaphore(self._sessions))
        await place.acquire()
        self._place = place
        self._client = self._client_class(base_url=self._url)
        await self._client.connect()
        given = {name: value for name, value in task.items() if name != "index"}
        result = await self._client.reset(**{"seed": seed, **self._reset, **given})
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._shown(result.observation)}]

    async def step(self, text: str) -> Turn:
        try:
            result = await self._client.step(self._as_action(text))
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            return Turn("error: the environment takes no such action; its fields, or their types, are others")
        if result.done and result.reward is None:
            return Turn(done=True)
        return Turn(self._shown(result.observation), done=bool(result.done), reward=result.reward)

    async def close(self) -> None:
        try:
            if self._client is not None:
                await self._client.close()
        finally:
            if self._place is not None:
                self._place.release()
                self._place = None

    def _shown(self, observation: Any) -> str:
        if self._field and isinstance(observation, dict):
            return str(observation.get(self._field, ""))
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    def _as_action(self, text: str) -> dict[str, Any]:
        try:
            read = None if is_deep(text) else json.loads(text)
        except (ValueError, RecursionError):
            read = None
        return read if isinstance(read, dict) else {self._action: text.strip()}
