"""Which commands of the guides are played, with which changes, and where the others are run.

A session is a page, typed into one shell from its first command to its last. Changed are the port, which may be taken;
the number of steps, since a test need not learn; `make setup`, which is done; models that an earlier session has made;
and sleeps, which wait three times as long as a reader does, since tests share their machine.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = DOCS / "guides"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(
    r"(polyrl|python3?|make|pip|export|curl|kill|sleep|wait|mkdir|cat|head|tail|grep|cmp|wandb|tensorboard|torchrun|helm|kubectl|sky|sudo)"
    r" (?!error:|rank |node )"
)
REFUSED = "polyrl: error:"


class PlayedGuide(NamedTuple):
    """A page that is played."""

    page: str
    files: Mapping[str, tuple[str, str]] = {}
    """What the reader writes: a file's name, the page that shows it, and the line that its block begins with."""
    begin: str = ""
    """What a reader has done before."""
    changes: Mapping[str, str] = {}
    """Regular expressions of what is typed otherwise, and what in its place."""
    prints: tuple[str, ...] = ()
    """What must be seen at the end."""


class TypedLine(NamedTuple):
    text: str
    is_refused: bool
    """The page shows that it ends with an error."""


TRAINED = "polyrl train arithmetic train.steps={} --run-dir {}\n"
SESSIONS = (
    PlayedGuide(
        "train",
        {"mine.toml": ("train", 'name = "mine"'), "rewards_of_mine.py": ("train", "from polyrl import RewardInput")},
        begin="sed -i 's/^steps = 40/steps = 4/' mine.toml\n",
        changes={
            r"train\.steps=20": "train.steps=2",
            "train --resume runs/mine": "train --resume runs/mine train.steps=5",
            r"(polyrl train mine.toml .*--run-dir runs/fleet)": r"\1 train.steps=1000 fleet.workers=1"
            " >fleet.log 2>&1 & FLEET=$!\n"
            "shows runs/fleet worker-0",
            r"(drain) NAME (.*)": r"\1 worker-0 \2\nkill -INT $FLEET; wait $FLEET",
        },
        prints=("done: all 4 steps are trained", "worker-0: draining", "models/adapter"),
    ),
    PlayedGuide(
        "read-a-run",
        begin=TRAINED.format(13, "runs/arithmetic")
        + "cp -r runs/arithmetic run; cp -r run runs/synchronous; cp -r run runs/streaming\n",
        prints=("reward/mean", "step 12", "verified", "drawn in compared"),
    ),
    PlayedGuide(
        "dashboard",
        changes={
            r"(train arithmetic) (--run-dir \S+)": r"\1 train.steps=2 \2",
            r"polyrl dash runs/first": "timeout --preserve-status 20 polyrl dash runs/first --no-browser",
        },
        prints=("/dash/#token=",),
    ),
    PlayedGuide("story", prints=("sample 200/3: prompt",)),
    PlayedGuide(
        "stories",
        begin="ln -s $ROOT/examples examples\n",
        changes={r" \.\.\.$": " train.steps=2", "(SlowCalculator.*)": r"\1 train.steps=1 rounds.samples_per_prompt=2"},
        prints=("done: all 2 steps are trained", "done: all 1 steps are trained"),
    ),
    PlayedGuide(
        "simulate",
        {"mine.toml": ("scenarios", 'name = "mine"'), "same.toml": ("simulate", 'name = "same"')},
        begin="ln -s $ROOT/examples examples\nprintf 'at_s,workers\\n0,2\\n60,1\\n' >spot.csv\n",
        changes={r"polyrl simulate (agent-tools-8b|elastic-8b|spot-trace)(.*)": r"polyrl simulate \1 --steps 2\2"},
        prints=("mine, seed 1: 10 steps", "out/mine: ", "same commands"),
    ),
    PlayedGuide(
        "plan",
        {"mine.toml": ("scenarios", 'name = "mine"')},
        changes={
            r"polyrl plan elastic-8b": "polyrl plan elastic-8b --steps 2 --workers 0-1 --factors 1 --staleness 0",
            r"--hosts \S+": "--hosts 4,8 --steps 2",
        },
        prints=("cheapest at $4",),
    ),
    PlayedGuide(
        "fleet",
        {"generate.py": ("fleet", '"""Generate answers')},
        prints=("going on after", "a: draining", "\n96\n", "same commands", "worker c: left"),
    ),
    PlayedGuide(
        "serve",
        prints=('"text":"b5=8c4=12d2=14"', "b5=8c4=12d2=14 stop 15\n"),
    ),
    PlayedGuide(
        "agents",
        {"agent.toml": ("agents", 'name = "agent"')},
        begin="sed -i 's/steps = 40/steps = 4/' agent.toml\n",
        changes={
            r"(polyrl train agent.toml\S*( manager.port=\d+)?)": r"\1 & AGENT=$!"
            "\nshows runs/agent trainer",
            r"(polyrl samples runs/agent --step 0)": r"wait $AGENT\n\1",
            "--step 39": "--step 3",
        },
        prints=('"environment": "calculator"', "done: all 4 steps are trained", "environment calculator:", "verified"),
    ),
    PlayedGuide(
        "code", changes={r"polyrl train code": "polyrl train code train.steps=2"}, prints=("done: all 2 steps",)
    ),
    PlayedGuide(
        "python",
        begin="polyrl data model arithmetic --out models/arithmetic\n",
        changes={r'"train.steps": 40': '"train.steps": 2', r'"train.steps": 80': '"train.steps": 3'},
    ),
    PlayedGuide(
        "providers",
        begin=TRAINED.format("1000 manager.port=PORT", "runs/first")[:-1] + " >run.log 2>&1 & RUN=$!\n"
        "shows runs/first trainer\n",
        changes={r"--workers 8": "--workers 1", r"(up runs/first --auto)": r"\1; kill -INT $RUN; wait $RUN"},
    ),
)
ELSEWHERE = {
    "agents": {"polyrl demo agent": "tests/chaos/test_demos.py"},
    "code": {"sudo apt-get|pip install": "of the reader's machine"},
    "data": {
        "polyrl data prepare": "tests/data/test_prepare.py",
        "polyrl data model arithmetic|polyrl train arithmetic": "train.md has the same",
        "python examples/smollm2.py|polyrl train smollm2": "tests/data/test_example_smollm2.py",
    },
    "deploy": {"helm|kubectl|sky": "tests/deploy"},
    "engine-versions": {"": "tests/engines/test_served_engine.py"},
    "engines": {"python3|polyrl worker": "tests/engines/test_served_engine.py"},
    "environments": {
        "polyrl env try": "tests/hosts/test_trying.py",
        "make environments|python examples|polyrl train examples": "tests/environments/test_killed.py",
    },
    "extend": {"polyrl worker": "tests/integration/test_extend.py"},
    "ranks": {
        "polyrl train|torchrun": "tests/chaos/test_ranks.py",
    },
    "read-a-run": {"tensorboard|wandb": "programs of others, and wandb's needs its service"},
    "reward-workers": {"polyrl worker --rewards": "tests/chaos/test_reward_workers.py"},
}
"""Of each page, commands that a test of their own runs, or why none does."""


def commands(page: str) -> list[TypedLine]:
    """Return what a page shows as typed: whole blocks, and of those with prompts, their lines behind a `$`."""
    found, python = [], []
    for kind, text in BLOCK.findall((GUIDES / f"{page}.md").read_text(encoding="utf-8")):
        if kind in ("", "console"):
            found += _typed(text.replace("\\\n", " "))
        elif kind == "python":
            python.append(text)
    if page in ("serve", "python"):  # elsewhere it is a file of the reader's
        found.append(TypedLine(f"python - <<'END'\n{''.join(python)}END", is_refused=False))
    return found


def _typed(block: str) -> Iterator[TypedLine]:
    lines = block.splitlines()
    if any(line.startswith("$ ") for line in lines):
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            if line.startswith("$ "):
                yield TypedLine(line[2:], below.startswith(REFUSED))
    elif TYPED.match(block):
        yield from (TypedLine(one, is_refused=False) for one in _whole(lines))


def _whole(lines: list[str]) -> Iterator[str]:
    """Yield the commands of a block without prompts: one with an open quote goes on in the next line."""
    text = ""
    for line in lines:
        text = f"{text}\n{line}" if text else line
        if text.count("'") % 2 == 0:
            yield text
            text = ""
    assert not text, text


def where_else(page: str, command: str) -> str | None:
    """Return where a command is run that no session plays; None: it is played."""
    return next((where for words, where in ELSEWHERE.get(page, {}).items() if re.match(words, command)), None)


def script(session: PlayedGuide, port: int) -> tuple[str, set[str]]:
    """Return what is typed, and those of its commands that must be refused."""
    typed, refused = [], set()
    begin = (
        [TypedLine(session.begin.replace("PORT", str(port)).rstrip("\n"), is_refused=False)] if session.begin else []
    )
    for command in [*begin, *commands(session.page)]:
        if where_else(session.page, command.text) is None:
            text = changed(command.text, session, port)
            typed.append(text)
            if command.is_refused:
                refused.add(text)
    return "\n".join(typed) + "\n", refused


def changed(text: str, session: PlayedGuide, port: int) -> str:
    text = re.sub(r"^make setup.*$", ":", text)
    for old, new in session.changes.items():
        text = re.sub(old, new, text)
    text = text.replace("5000", str(port)).replace("polyrl manager ", f"polyrl manager --port {port} ")
    text = re.sub(r"(polyrl train (?!--)\S+)(?!.*manager\.port)", rf"\1 manager.port={port}", text)
    return re.sub(r"^(polyrl data model \S+ --out (\S+).*)$", r"[ -e \2 ] || \1", text, flags=re.MULTILINE)


def files(session: PlayedGuide) -> dict[str, str]:
    """Return the files that the reader writes, as the pages show them."""
    found = {}
    for name, (page, first) in session.files.items():
        path = next(path for path in (GUIDES / f"{page}.md", DOCS / "reference" / f"{page}.md") if path.is_file())
        found[name] = next(text for _, text in BLOCK.findall(path.read_text("utf-8")) if text.startswith(first))
    return found
