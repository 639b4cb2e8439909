"""The front of the command line: finds the command, runs it, and turns how it ended into an exit code.

A command is a module with `EXAMPLE`, `add_arguments(parser)` and `run(args) -> int`. It is imported only when it is
chosen, so that `polyrl --help` costs nothing; so this module imports only the standard library and modules that need no
more.

Rules: a UserError is one line on stderr and exit code 2. A failure of ours is not caught: its traceback is the bug
report. Options and positional arguments may be mixed (`polyrl simulate ramp --seed 3 fleet.workers=2`), so a command
has no subcommands of its own. A command that sets a default for `rest` gets the arguments after `--` in it, unchanged.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

from polyrl import __version__
from polyrl.cli.parser import Parser
from polyrl.errors import EXIT_BAD_INPUT, UserError, plain_lines
from polyrl.run import event_loop

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_READER_GONE = 141  # 128 + SIGPIPE

EXAMPLES = """\
example:
  polyrl simulate spot-trace fleet.workers=4 --seed 7

`polyrl COMMAND --help` explains a command."""


class CliCommand(NamedTuple):
    help: str
    module: str


COMMANDS: Mapping[str, CliCommand] = {
    "demo": CliCommand("watch a small model learn here, while workers join and are killed", "polyrl.cli.demo"),
    "train": CliCommand("make a model better, on whatever devices there are", "polyrl.cli.train"),
    "export": CliCommand("write a run's newest weights as a Hugging Face directory", "polyrl.cli.export"),
    "manager": CliCommand("collect tokens from a fleet and hand complete groups to a trainer", "polyrl.cli.manager"),
    "worker": CliCommand("join a fleet with one engine", "polyrl.cli.worker"),
    "up": CliCommand("start workers of a run, on this machine or wherever its recipe says", "polyrl.cli.up"),
    "down": CliCommand("end the workers that a run has started", "polyrl.cli.down"),
    "env": CliCommand("play an environment's episodes for a run, or try one", "polyrl.cli.env"),
    "dash": CliCommand("look at a run in the browser: answers, rewards, workers, money", "polyrl.cli.dash"),
    "top": CliCommand("watch a live run in the terminal: rounds, workers, waits, steps", "polyrl.cli.top"),
    "status": CliCommand("show workers, rounds, queues, and who waits for whom", "polyrl.cli.status"),
    "doctor": CliCommand("say why a run waits, for whom, since when, and what happens next", "polyrl.cli.doctor"),
    "drain": CliCommand("have a worker hand everything over and leave", "polyrl.cli.drain"),
    "generate": CliCommand("try a model on one prompt, with live tokens", "polyrl.cli.generate"),
    "weights": CliCommand("look at weight versions, check, compare and move them", "polyrl.cli.weights"),
    "data": CliCommand("make what a run starts from: prompts, or a small model", "polyrl.cli.data"),
    "simulate": CliCommand("play a scenario on a virtual clock: table, pictures, JSON", "polyrl.cli.simulate"),
    "plan": CliCommand("find the cheapest and the fastest way to run a scenario", "polyrl.cli.plan"),
    "reproduce": CliCommand("play published results again, and compare", "polyrl.cli.reproduce"),
    "bench": CliCommand("measure engine, train, weights, scheduler, rewards or episodes here", "polyrl.cli.bench"),
    "ledger": CliCommand("say what became of every prompt, sample, token and dollar of a run", "polyrl.cli.ledger"),
    "plot": CliCommand("draw a run: reward, step times, throughput, every worker", "polyrl.cli.plot"),
    "trace": CliCommand("write a run's timeline for Perfetto or chrome://tracing", "polyrl.cli.trace"),
    "replay": CliCommand("run a journal again and compare every command", "polyrl.cli.replay"),
    "samples": CliCommand("show what the model answered, and what each answer was worth", "polyrl.cli.samples"),
    "rewards": CliCommand("score a file of answers with a recipe's rewards", "polyrl.cli.rewards"),
    "story": CliCommand("say why a sample took as long as it did", "polyrl.cli.story"),
}


class CommandModule(Protocol):
    """A command's module."""

    EXAMPLE: str
    """Whole commands, at the end of its help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None, commands: Mapping[str, CliCommand] = COMMANDS) -> int:
    """Run one command and return its exit code. argparse exits by itself on --help."""
    try:
        _prepare_process()
        with event_loop.that_end_imports():
            return _run_and_flush(sys.argv[1:] if argv is None else argv, commands)
    except UserError as error:
        print(f"polyrl: error: {plain_lines(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(event_loop.LINE, file=sys.stderr)
        return event_loop.EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_READER_GONE
    except OSError as error:
        if _stdout_takes_more():
            raise
        print(f"polyrl: error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        _discard_stdout()
        return EXIT_FAILED


def _prepare_process() -> None:
    """Set up the streams and check the working directory: some libraries abort without them. Raises UserError."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # uvloop takes one of these for a standard stream
        pass
    os.close(descriptor)
    if sys.stdout is None:
        raise UserError("standard output is closed; expected somewhere to write to, such as /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that the terminal lacks ends no answer
    try:
        os.getcwd()  # MKL asks for it
    except FileNotFoundError as error:
        raise UserError("the working directory was deleted; expected to be in one that is there") from error


def _run_and_flush(argv: Sequence[str], commands: Mapping[str, CliCommand]) -> int:
    """Run the command and flush its output. A closed pipe can be handled here, but not at interpreter exit."""
    try:
        code = _dispatch(argv, commands)
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _dispatch(argv: Sequence[str], commands: Mapping[str, CliCommand]) -> int:
    if not argv:
        _front_parser(argv, commands).print_help(sys.stderr)
        return EXIT_BAD_INPUT
    name, *rest = argv
    if name.startswith("-"):
        _front_parser(argv, commands).parse_args(argv)
        return EXIT_OK
    if name not in commands:
        raise UserError(_unknown_command(name, commands))
    return _run_command(name, commands[name], rest)


def _run_command(name: str, command: CliCommand, argv: Sequence[str]) -> int:
    module, args = parse(name, command, argv)
    return module.run(args)


def parse(name: str, command: CliCommand, argv: Sequence[str]) -> "tuple[CommandModule, argparse.Namespace]":
    """Return the module of a command and its arguments. Raises UserError."""
    module = cast("CommandModule", importlib.import_module(command.module))
    parser = Parser(argv, prog=f"polyrl {name}", description=_sentence(command.help), epilog=module.EXAMPLE)
    module.add_arguments(parser)
    if parser.get_default("rest") is None or "--" not in argv:
        return module, parser.parse_intermixed_args(argv)
    cut = list(argv).index("--")
    args = parser.parse_intermixed_args(argv[:cut])
    args.rest = list(argv[cut + 1 :])
    return module, args


def _front_parser(argv: Sequence[str], commands: Mapping[str, CliCommand]) -> argparse.ArgumentParser:
    """Return the parser for --help, --version and unknown options. It never sees a command's arguments."""
    width = max(len(name) for name in commands)
    listing = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in commands.items())
    parser = Parser(
        argv,
        prog="polyrl",
        usage="polyrl [--help] [--version] COMMAND ...",
        description="RL post-training for language models that you can pull the plug on.",
        epilog=f"commands:\n{listing}\n\n{EXAMPLES}",
    )
    parser.add_argument("--version", action="version", version=f"polyrl {__version__}")
    return parser


def _unknown_command(name: str, commands: Mapping[str, CliCommand]) -> str:
    from polyrl.config.explain import did_you_mean

    hint = did_you_mean(name, commands) or f"expected one of {', '.join(commands)}"
    return f"unknown command {name!r}; {hint}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _stdout_takes_more() -> bool:
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
