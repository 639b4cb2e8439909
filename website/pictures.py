"""What the pictures of the concept pages show, as data; diagrams.py draws them."""

from pathlib import Path

from website.diagrams import Arrow, Box, Boxes, Lanes, Span, draw

FOLDER = Path(__file__).parents[1] / "docs" / "concepts" / "pictures"

PICTURES_BY_PAGE: dict[str, Boxes | Lanes] = {
    "words": Boxes(
        "Prompts make groups, groups a round, a round a step, a step a version",
        {
            "prompt": Box(0, 0, "prompt"),
            "group": Box(1, 0, "group:/its n samples"),
            "round": Box(2, 0, "round: the groups/that feed a step"),
            "step": Box(2, 1, "step t", strong=True),
            "version": Box(1, 1, "weight version/t + 1"),
            "workers": Box(0, 1, "workers/generate with it"),
        },
        [Arrow("prompt", "group"), Arrow("group", "round"), Arrow("round", "step", "trained"),
         Arrow("step", "version", "published"), Arrow("version", "workers", "installed"),
         Arrow("workers", "prompt", "next round")],
    ),
    "scheduler": Boxes(
        "Events go into the scheduler, commands come out; the journal holds both",
        {
            "driver": Box(0, 0.5, "driver: manager/or simulator"),
            "scheduler": Box(2, 0.5, "scheduler:/pure, one owner", strong=True),
            "journal": Box(1, 1.6, "journal: events,/digests of commands"),
            "replay": Box(2, 1.6, "replay: the same/commands again"),
            "events": Box(1, 0, "event, now"),
            "commands": Box(1, 0.85, "commands,/each with its why"),
        },
        [Arrow("driver", "events"), Arrow("events", "scheduler"), Arrow("scheduler", "commands"),
         Arrow("commands", "driver"), Arrow("commands", "journal"), Arrow("journal", "replay")],
    ),
    "ledger": Boxes(
        "Two records, and everything that is shown is made from them",
        {
            "manager": Box(0, 0, "manager"),
            "trainer": Box(0, 1, "trainer"),
            "journal": Box(1, 0, "journal: prompts,/tokens, dollars", strong=True),
            "metrics": Box(1, 1, "metrics.jsonl:/rewards, losses", strong=True),
            "ledger": Box(2, 0, "ledger --verify,/replay, story"),
            "plots": Box(2, 1, "plot, dashboard,/trackers"),
        },
        [Arrow("manager", "journal", "before/it acts"), Arrow("trainer", "metrics", "a line/a step"),
         Arrow("journal", "ledger"), Arrow("metrics", "plots"), Arrow("journal", "plots")],
    ),
    "live": Boxes(
        "Workers and the trainer dial the manager; it writes the journal before it sends",
        {
            "worker": Box(0, 0, "workers/(engine inside)"),
            "host": Box(0, 1, "hosts, reward/workers"),
            "manager": Box(1, 0.5, "manager: inbox,/owner, scheduler", strong=True),
            "trainer": Box(2, 0, "trainer"),
            "journal": Box(2, 1, "journal: events/and payload"),
        },
        [Arrow("worker", "manager", "tokens"), Arrow("host", "manager", "calls"),
         Arrow("trainer", "manager", "statements"), Arrow("manager", "journal", "first")],
    ),
    "tail-batching": Lanes(
        "Four short rounds defer their slow prompts; the fifth round is long and takes them all",
        {
            "round 0, short": [Span(0, 14, "128"), Span(14, 18, "", strong=True)],
            "round 1, short": [Span(18, 32, "128"), Span(32, 36, "", strong=True)],
            "round 2, short": [Span(36, 50, "128"), Span(50, 54, "", strong=True)],
            "round 3, short": [Span(54, 68, "128"), Span(68, 72, "", strong=True)],
            "round 4, long": [Span(72, 100, "4 x 32 deferred", strong=True)],
        },
        "Short: 160 prompts race for 128 places; 32 are deferred (red).",
    ),
    "rounds": Boxes(
        "The states of a group, from open to trained",
        {
            "open": Box(0, 0, "open: its/samples race"),
            "claimed": Box(1, 0, "claimed: its/place is sure"),
            "delivered": Box(2, 0, "delivered:/all scored"),
            "taken": Box(2, 1, "taken by/the trainer"),
            "trained": Box(1, 1, "trained", strong=True),
            "deferred": Box(0, 1, "deferred, or/dropped: why"),
        },
        [Arrow("open", "claimed"), Arrow("claimed", "delivered"), Arrow("delivered", "taken"),
         Arrow("taken", "trained"), Arrow("open", "deferred")],
    ),
    "training-step": Boxes(
        "Groups add sums of gradients; one division at the end",
        {
            "groups": Box(0, 0, "groups, as they/are complete"),
            "packs": Box(1, 0, "packs: flat rows/without padding"),
            "sums": Box(2, 0, "gradients of sums/are added up"),
            "divide": Box(2, 1, "divide once,/clip, update", strong=True),
            "version": Box(1, 1, "version t + 1"),
        },
        [Arrow("groups", "packs"), Arrow("packs", "sums"), Arrow("sums", "divide", "at the end"),
         Arrow("divide", "version")],
    ),
    "episodes": Boxes(
        "An environment asks, a worker answers, the environment acts, and pays at the end",
        {
            "host": Box(0, 0, "host: runs the/environment"),
            "manager": Box(1, 0, "manager: keeps/every call", strong=True),
            "worker": Box(2, 0, "worker: draws/the answer"),
            "tool": Box(0, 1, "tool, game,/other program"),
            "trainer": Box(1, 1, "trainer: drawn/tokens, reward"),
        },
        [Arrow("host", "manager", "call k"), Arrow("manager", "worker", "prompt"), Arrow("host", "tool", "acts"),
         Arrow("manager", "trainer", "at the end")],
    ),
    "algorithms": Boxes(
        "From rewards to one number for each token, and to the gradient",
        {
            "rewards": Box(0, 0, "rewards/of a group"),
            "advantage": Box(1, 0, "advantage"),
            "loss": Box(2, 0, "loss of a token:/ratio, clip", strong=True),
            "correction": Box(2, 1, "correction:/engine vs trainer"),
            "kl": Box(1, 1, "KL to the/reference"),
            "sum": Box(0, 1, "aggregation:/one number"),
        },
        [Arrow("rewards", "advantage"), Arrow("advantage", "loss"), Arrow("loss", "correction", "weighted"),
         Arrow("correction", "kl", "added"), Arrow("kl", "sum")],
    ),
    "data": Boxes(
        "From rows to numbered prompts, all before anything starts",
        {
            "rows": Box(0, 0, "rows: JSONL,/Parquet, ..."),
            "text": Box(1, 0, "template,/chat template"),
            "tokens": Box(2, 0, "tokens; too long:/left out, counted"),
            "order": Box(2, 1, "order: a function/of seed and epoch", strong=True),
            "step": Box(1, 1, "prompts/of a step"),
        },
        [Arrow("rows", "text", "checked"), Arrow("text", "tokens"), Arrow("tokens", "order", "numbered"),
         Arrow("order", "step")],
    ),
    "fleet": Boxes(
        "A worker's life in the fleet",
        {
            "waiting": Box(0, 0, "waits/for weights"),
            "pulling": Box(1, 0, "pulling"),
            "active": Box(2, 0, "active", strong=True),
            "draining": Box(2, 1, "draining"),
            "gone": Box(1, 1, "gone: its samples/go on elsewhere"),
        },
        [Arrow("waiting", "pulling"), Arrow("pulling", "active", "installed"), Arrow("active", "draining"),
         Arrow("draining", "gone"), Arrow("pulling", "gone", "missed,/stalled, dead")],
    ),
    "routing": Boxes(
        "A sample goes to the least loaded worker with credit, and on from its last token when that one dies",
        {
            "queue": Box(0, 0.5, "waiting samples,/longest first"),
            "a": Box(2, 0, "worker a:/1 of 10"),
            "b": Box(2, 1, "worker b: lost/at token 120", strong=True),
            "router": Box(1, 0.5, "router: credit,/load, prefix"),
            "again": Box(0, 1.5, "sample 7:/120 tokens"),
        },
        [Arrow("queue", "router"), Arrow("router", "a", "lease"), Arrow("router", "b", "lease"),
         Arrow("b", "again", "lease over"), Arrow("again", "queue", "goes on at token 120")],
    ),
    "weights": Boxes(
        "A delta goes from the trainer to some workers, from them to others, and is checked before use",
        {
            "trainer": Box(0, 0, "trainer publishes/version t + 1"),
            "one": Box(1, 0, "worker pulls/the delta"),
            "two": Box(2, 0, "worker pulls/from a worker"),
            "check": Box(1, 1, "digests checked", strong=True),
            "install": Box(2, 1, "installed between/two tokens"),
        },
        [Arrow("trainer", "one", "4 at once"), Arrow("one", "two", "relay"), Arrow("one", "check"),
         Arrow("check", "install")],
    ),
    "scaling": Boxes(
        "What a step took and cost decides how many workers, and how wide engines are",
        {
            "step": Box(0, 0, "step: seconds,/dollars, losses"),
            "rule": Box(1, 0, "rule: cheapest/or fastest n", strong=True),
            "provider": Box(2, 0, "provider starts,/drains workers"),
            "lengths": Box(0, 1, "lengths of/recent rounds"),
            "width": Box(1, 1, "devices an/engine spans"),
            "servers": Box(2, 1, "servers start/with that width"),
        },
        [Arrow("step", "rule"), Arrow("rule", "provider"), Arrow("lengths", "width"), Arrow("width", "servers")],
    ),
    "engines": Boxes(
        "One contract, several engines",
        {
            "worker": Box(0, 1, "worker"),
            "contract": Box(1, 1, "contract: one/suite of tests", strong=True),
            "builtin": Box(2, 0, "builtin"),
            "served": Box(2, 0.7, "vLLM, SGLang"),
            "emulated": Box(2, 1.4, "emulated"),
            "own": Box(2, 2.1, "module:Class"),
        },
        [Arrow("worker", "contract"), Arrow("contract", "builtin"), Arrow("contract", "served"),
         Arrow("contract", "emulated"), Arrow("contract", "own")],
    ),
    "builtin-engine": Boxes(
        "Batching decides, a runner computes, the seed and the position draw",
        {
            "jobs": Box(0, 0, "samples:/prompt, seed"),
            "batching": Box(1, 0, "batching: what the/next step computes"),
            "runner": Box(2, 0, "runner: CPU/or CUDA graphs", strong=True),
            "cache": Box(1, 1, "KV blocks,/drafts"),
            "draw": Box(2, 1, "draw by seed/and position"),
        },
        [Arrow("jobs", "batching"), Arrow("batching", "runner"), Arrow("cache", "runner"), Arrow("runner", "draw")],
    ),
    "devices": Lanes(
        "The trainer's devices generate while the fleet pulls, then train while the fleet generates",
        {
            "trainer's devices": [Span(0, 40, "generate (T_seed)", strong=True), Span(40, 100, "train on groups")],
            "worker 1": [Span(0, 14, "pull"), Span(14, 88, "generate")],
            "worker 2": [Span(0, 22, "pull"), Span(22, 84, "generate")],
        },
        "At the end of T_seed the devices hand their samples over, each after its last token.",
    ),
    "checkpoints": Boxes(
        "A step is logged before it is done; a resumed run loads the checkpoint and trains the logged steps again",
        {
            "step": Box(0, 0, "step trained"),
            "log": Box(1, 0, "its samples/are logged", strong=True),
            "done": Box(2, 0, "done for/the manager"),
            "checkpoint": Box(1, 1, "checkpoint: every/10 steps"),
            "resume": Box(2, 1, "--resume: load it,/train the log again"),
        },
        [Arrow("step", "log"), Arrow("log", "done"), Arrow("log", "checkpoint"), Arrow("checkpoint", "resume")],
    ),
    "rewards": Boxes(
        "Answers are scored beside generation; a failure is never a zero",
        {
            "answer": Box(0, 0, "an answer ends"),
            "pool": Box(1, 0, "processes with/a time limit"),
            "scored": Box(2, 0, "scored", strong=True),
            "retry": Box(1, 1, "failed: tried/again"),
            "dropped": Box(2, 1, "sample dropped,/with a reason"),
        },
        [Arrow("answer", "pool"), Arrow("pool", "scored"), Arrow("pool", "retry", "no result"),
         Arrow("retry", "dropped", "3 times")],
    ),
    "sandbox": Boxes(
        "A program runs behind walls; its results are compared outside",
        {
            "answer": Box(0, 0, "program that/a model wrote"),
            "walls": Box(1, 0, "sandbox: no files,/no network, limits", strong=True),
            "results": Box(2, 0, "what it printed/or returned"),
            "verdict": Box(2, 1, "compared outside:/the verdict"),
        },
        [Arrow("answer", "walls"), Arrow("walls", "results"), Arrow("results", "verdict")],
    ),
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, picture in PICTURES_BY_PAGE.items():
        (FOLDER / f"{name}.svg").write_text(draw(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
