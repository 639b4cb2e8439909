"""A host's process for tests: `python slow_tools_host.py URL TOKEN_FILE NAME SLOTS`. Its tools take 1 to 20 seconds."""

import asyncio
import random
import sys
from pathlib import Path

from polyrl.hosts.agent import HostAgent, HostOptions
from polyrl.hosts.episode import CallLimits, Episode, EpisodeEnd
from polyrl.run.event_loop import run_loop
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer

TURNS = 3
TOKENS = 60
"""Of an answer, at most."""
TOOL_S = (1.0, 20.0)


class SlowTools:
    """Asks three times; a tool takes its time after each answer."""

    name: str = "tools"
    num_tasks: int | None = None
    max_at_once: int | None = None
    worn_out: str = ""

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def play(self, episode: Episode) -> EpisodeEnd:
        draw = random.Random(episode.name)
        said = [5, 6, 8 + episode.index]
        for turn in range(TURNS):
            answer = await episode.call(said, CallLimits(max_tokens=TOKENS))
            await asyncio.sleep(draw.uniform(*TOOL_S))
            said = [*said, *answer.tokens, 9, 10 + turn]
        return EpisodeEnd(reward=float(sum(said) % 7), num_turns=TURNS)


if __name__ == "__main__":
    url, token_file, name, slots = sys.argv[1:]
    agent = HostAgent(SlowTools(), Dialer(url, read_token_file(Path(token_file))), HostOptions(name, slots=int(slots)))
    print(run_loop(agent.run()), flush=True)
