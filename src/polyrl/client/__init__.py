"""The trainer's side of the fleet: submit rounds, take complete groups as they arrive, publish versions.

    async with connect("http://host:5000", token, config, prompts=prompt_of, reward=score) as fleet:
        await fleet.publish(0)
        async for group in fleet.round(0):
            ...
            await fleet.take(group)
        await fleet.step_done(0)

| module | holds |
|---|---|
| `fleet` | the trainer's calls, and the messages it receives |
| `group_rewards` | rewards of whole groups, beside the groups that still come |
| `line` | staying connected: every statement is sent again until the manager has it on file |

It survives broken connections and restarts of the manager: missed messages are sent again.

Left out: training, serving weights (a version is a number here, with a digest and addresses), and the local worker.
"""

from polyrl.client.fleet import (
    EpisodeCall,
    Fleet,
    Group,
    GroupRewardOf,
    Prompt,
    PromptOf,
    RewardOf,
    RewardResult,
    RoundOver,
    Sample,
    connect,
)
from polyrl.wire.frames import Origin, Sampling

__all__ = [
    "EpisodeCall",
    "Fleet",
    "Group",
    "GroupRewardOf",
    "Origin",
    "Prompt",
    "PromptOf",
    "RewardOf",
    "RewardResult",
    "RoundOver",
    "Sample",
    "Sampling",
    "connect",
]
