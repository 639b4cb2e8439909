"""An OpenEnv server for the tests: the policy counts to three. It says its port, and has one session."""

# pyright: reportMissingImports=false
import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class CountAction(Action):
    message: str


class CountObservation(Observation):
    text: str = ""


class Counting(Environment):
    def __init__(self) -> None:
        super().__init__()
        self._at = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._at = 0
        return CountObservation(text="count to three", done=False, reward=None)

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._at += 1
        if action.message != str(self._at):
            return CountObservation(text="wrong", done=True, reward=0.0)
        return CountObservation(text="next", done=self._at == 3, reward=1.0 if self._at == 3 else None)

    @property
    def state(self) -> State:
        return State(step_count=self._at)


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    print(port, flush=True)
    uvicorn.run(
        create_fastapi_app(Counting, CountAction, CountObservation), host="127.0.0.1", port=port, log_level="warning"
    )
