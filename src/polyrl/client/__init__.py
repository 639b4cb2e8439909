"""The trainer's side of the fleet: submit rounds, take complete groups as they arrive, publish versions.

    async with connect("http://host:5000", token, config, prompts=prompt_of, reward=score) as fleet:
        await fleet.publish(0)
        async for group in fleet.round(0):
            ...
            await fleet.take(group)
        await fleet.step_done(0)

| module | holds |
|---|---|
| `fleet` | what a trainer does, and what it hears |
| `line` | staying connected: whatever was said is said again until it is on file at the manager |

It survives breaks and restarts of the manager: what was missed is sent again.

Left out: training, serving weights (a version is a number here, with a digest and addresses), and the local worker.
"""

from polyrl.client.fleet import Fleet, Group, Prompt, PromptOf, RewardOf, RewardResult, RoundOver, Sample, connect
from polyrl.wire.frames import Origin, Sampling

__all__ = [
    "Fleet",
    "Group",
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
