"""A run's rounds, and the lengths of its answers as a trace for the simulator: python lengths.py RUN TRACE.jsonl."""

import json
import sys
from pathlib import Path

from polyrl.ids import GroupId, LeaseId, PromptId, SampleId, group_of
from polyrl.journal.files import open_journals
from polyrl.journal.records import resume_scheduler
from polyrl.scheduling.core.commands import Generate, OpenRound
from polyrl.scheduling.core.events import SampleFinished

PROMPT_TOKENS = 20  # the journal does not have them

scheduler = None
num_prompts = 0
now = 0.0
opened: list[float] = []
prompts: dict[GroupId, PromptId] = {}
samples: dict[LeaseId, SampleId] = {}
lengths: dict[PromptId, dict[SampleId, int]] = {}
for header, records in open_journals(sys.argv[1]):
    scheduler = resume_scheduler(header, scheduler)
    num_prompts = header.config.domains[0].num_prompts
    for record in records:
        now, event = record.now, record.event
        if isinstance(event, SampleFinished):
            sample = samples[event.lease]
            lengths.setdefault(prompts[group_of(sample)], {})[sample] = event.num_tokens
        for command in scheduler.handle(event, now):
            if isinstance(command, OpenRound):
                opened.append(now)
                prompts |= {group.group: group.prompt for group in command.groups}
            elif isinstance(command, Generate):
                samples[command.lease] = command.sample

print("rounds opened at", ", ".join(f"{at - opened[0]:.1f}" for at in opened), f"s; the end at {now - opened[0]:.1f} s")
with Path(sys.argv[2]).open("w", encoding="utf-8") as trace:
    for prompt in map(PromptId, range(num_prompts)):  # row i is prompt i; most are not asked for
        of_prompt = [length for _, length in sorted(lengths.get(prompt, {}).items())]
        row = {"domain": "math", "prompt_tokens": PROMPT_TOKENS, "lengths": of_prompt or [1]}
        trace.write(json.dumps(row) + "\n")
