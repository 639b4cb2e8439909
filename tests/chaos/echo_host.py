"""A host's process for tests: `python echo_host.py URL TOKEN_FILE NAME [PAUSE_S]` plays a deterministic environment."""

import asyncio
import sys
from pathlib import Path

from polyrl.hosts.agent import HostAgent, HostOptions
from polyrl.hosts.episode import CallLimits, Episode, EpisodeEnd
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer

TURNS = 4


class SlowEcho:
    """Asks four times; each prompt is all that was said, and a mark. A tool takes its time between two calls."""

    name: str = "echo"
    num_tasks: int | None = None
    max_at_once: int | None = None
    worn_out: str = ""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def play(self, episode: Episode) -> EpisodeEnd:
        said = [5, 6, 8 + episode.index]
        for turn in range(TURNS):
            answer = await episode.call(said, CallLimits(max_tokens=40))
            await asyncio.sleep(self._pause_s)
            said = [*said, *answer.tokens, 9, 10 + turn]
        return EpisodeEnd(reward=float(sum(said) % 7), num_turns=TURNS)


if __name__ == "__main__":
    url, token_file, name, *pause = sys.argv[1:]
    dialer = Dialer(url, read_token_file(Path(token_file)))
    agent = HostAgent(SlowEcho(float(pause[0]) if pause else 0.0), dialer, HostOptions(name, slots=64))
    print(asyncio.run(agent.run()), flush=True)
