"""The front of the command line: lazy commands, and an exit code for every way to end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyrl
from polyrl.cli.main import COMMANDS, CliCommand, main

FAKE_COMMAND = """
import os
import sys
from polyrl.errors import LawViolation, UserError

EXAMPLE = ""

def add_arguments(parser):
    parser.add_argument("how")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seed", type=int, default=0)

def run(args):
    match args.how:
        case "well":
            print(args.overrides, args.seed)
            return 0
        case "refused":
            raise UserError("fleet.workers: got -1, expected an integer >= 0")
        case "interrupted":
            raise KeyboardInterrupt
        case "broken":
            raise LawViolation("a sample has two ends")
        case "talkative":
            for _ in range(100_000):
                print("many words")
            return 0
        case "abroad":
            print("zw\u00f6lf")
            return 0
        case "reading":
            print(os.read(0, 10))
            return 0
        case "without a file":
            open("nowhere/at/all")
        case code:
            return int(code)
"""
HEAVY = ("msgspec", "numpy", "rich", "matplotlib", "hypothesis", "asyncio", "polyrl.config", "polyrl.scheduling")


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A table with one command, `end`, that ends as its first argument says."""
    (tmp_path / "fake_end_command.py").write_text(FAKE_COMMAND)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"end": CliCommand("end in a given way", "fake_end_command")}


def in_a_process(code, *arguments, cwd=None):
    """Run Python code with this polyrl on its path."""
    source = str(Path(polyrl.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {source!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_lists_every_command_and_ends_with_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  {name} " in text and command.help in text for name, command in COMMANDS.items())
    assert "polyrl simulate spot-trace" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert re.search(rf"\nexamples?:\n(?:  .*\n)*  polyrl {name} ", capsys.readouterr().out)


def test_help_imports_nothing_heavy():
    ended = in_a_process(
        "from polyrl.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print('LOADED', *sys.modules)\n"
    )
    loaded = ended.stdout.rpartition("LOADED")[2].split()
    assert "argparse" in loaded
    assert not set(HEAVY) & set(loaded)


def test_help_starts_in_under_half_a_second():
    def seconds():
        """Of its own work: others may keep the machine busy."""
        before = os.times()
        in_a_process("from polyrl.cli.main import main; main(['--help'])")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.5


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"polyrl {polyrl.__version__}\n"


def test_no_command_shows_the_help_as_an_error(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_nearest_one(capsys):
    assert main(["simulat"]) == 2
    assert capsys.readouterr().err == "polyrl: error: unknown command 'simulat'; did you mean simulate?\n"


def test_a_command_like_no_other_is_answered_with_all_of_them(capsys):
    assert main(["xyz"]) == 2
    assert f"expected one of {', '.join(COMMANDS)}" in capsys.readouterr().err


MISTAKES = {
    ("--versoin",): "--versoin: unknown option; did you mean --version?",
    ("--frobnicate",): "--frobnicate: unknown option; expected one of --help, --version",
    ("train", "--drty-run"): "--drty-run: unknown option; did you mean --dry-run?",
    ("simulate", "ramp", "--sed=3"): "--sed: unknown option; did you mean --seed?",
    (
        "data",
        "prepare",
        "math",
        "--ot",
        "rows",
    ): "--ot: unknown option; did you mean --out?",  # and not: --out is missing
    ("worker", "--chek", "--", "--host"): "--chek: unknown option; did you mean --check?",
    ("worker", "--check", "--engine", "vlm"): (
        '--engine: unknown name "vlm"; expected emulated, builtin, vllm, sglang, or module:Class; did you mean vllm?'
    ),
    ("weights", "inpect", "x"): (
        "ACTION: got 'inpect', expected one of inspect, verify, diff, serve, pull; did you mean inspect?"
    ),
    ("train", "arithmetic", "lr=1e-4"): "lr: unknown key; did you mean optimizer.lr? (given as lr=1e-4)",
    ("train", "arithmetic", "train.mode=sync", "--dry-run"): (
        'train.mode: got "sync", expected one of "async", "streaming", "synchronous"; did you mean "synchronous"? '
        "(given as train.mode=sync)"
    ),
    ("train", "arithmetic", "--ranks", "2", "train.ranks=3"): "--ranks 2 and train.ranks=3: expected one of them",
    ("train", "-z"): "unrecognized arguments: -z; `polyrl train --help` explains it",
}


@pytest.mark.parametrize("argv", MISTAKES)
def test_wrong_usage_is_one_line_with_the_nearest_name_and_2(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err == f"polyrl: error: {MISTAKES[argv]}\n"


def test_help_is_given_beside_an_option_that_is_wrong(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--drty-run", "--help"])
    assert "--dry-run" in capsys.readouterr().out


def test_an_option_may_be_cut_short(commands, capsys):
    assert main(["end", "well", "--se", "3"], commands) == 0
    assert capsys.readouterr().out == "[] 3\n"


def test_a_command_gets_its_arguments_in_any_order(commands, capsys):
    assert main(["end", "well", "a.b=1", "--seed", "3", "c.d=-2"], commands) == 0
    assert capsys.readouterr().out == "['a.b=1', 'c.d=-2'] 3\n"


def test_the_exit_code_of_a_command_is_passed_on(commands):
    assert main(["end", "1"], commands) == 1


def test_a_command_explains_itself(commands, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["end", "--help"], commands)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: polyrl end ")
    assert "End in a given way." in text


def test_a_value_that_argparse_refuses_is_one_line_and_2(commands, capsys):
    assert main(["end", "well", "--seed", "many"], commands) == 2
    expected = "argument --seed: invalid int value: 'many'; `polyrl end --help` explains it"
    assert capsys.readouterr().err == f"polyrl: error: {expected}\n"


def test_a_users_mistake_is_one_line_and_2(commands, capsys):
    assert main(["end", "refused"], commands) == 2
    output = capsys.readouterr()
    assert output.err == "polyrl: error: fleet.workers: got -1, expected an integer >= 0\n"
    assert output.out == ""


def test_an_interrupt_ends_with_130(commands, capsys):
    assert main(["end", "interrupted"], commands) == 130
    assert capsys.readouterr().err == "polyrl: interrupted\n"


INTERRUPTED_IMPORT = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException as error:  # as some extensions do, whose import then fails otherwise
    raise ModuleNotFoundError("half of it is missing") from error
"""


def test_an_interrupt_within_an_import_ends_with_a_line_whatever_is_imported(tmp_path):
    (tmp_path / "extension.py").write_text(INTERRUPTED_IMPORT)
    ended = in_a_process(
        "from polyrl.cli.main import CliCommand, main\n"
        "sys.exit(main(['end'], {'end': CliCommand('end', 'extension')}))",
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stderr) == (130, "polyrl: interrupted\n")


LOOPING_COMMAND = """
import asyncio, os, signal
from polyrl.run.event_loop import run_loop

EXAMPLE = ""

def add_arguments(parser): ...

def run(args):
    async def wait():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)  # cancelled: it can still put away what it has
            print("put away")
    return run_loop(wait())
"""


def test_an_interrupt_cancels_what_a_loop_runs(tmp_path):
    (tmp_path / "looping.py").write_text(LOOPING_COMMAND)
    ended = in_a_process(
        "from polyrl.cli.main import CliCommand, main\n"
        "sys.exit(main(['loop'], {'loop': CliCommand('loop', 'looping')}))",
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "put away\n", "polyrl: interrupted\n")


def test_a_bug_of_ours_is_not_caught(commands):
    with pytest.raises(Exception, match="a sample has two ends"):
        main(["end", "broken"], commands)


def test_a_bug_of_ours_ends_the_process_with_1_and_a_traceback(commands, tmp_path):
    ended = in_a_process(
        "from polyrl.cli.main import CliCommand, main\n"
        "sys.exit(main(sys.argv[1:], {'end': CliCommand('end', 'fake_end_command')}))",
        *("end", "broken"),
        cwd=tmp_path,
    )
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


def test_a_reader_that_goes_away_ends_the_command_quietly(commands, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from polyrl.cli.main import CliCommand, main\n"
        "sys.exit(main(['end', 'talkative'], {'end': CliCommand('end', 'fake_end_command')}))"
    )
    source = str(Path(polyrl.__file__).parents[1])
    command = [sys.executable, "-c", code, source]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


END = """import sys; sys.path.insert(0, sys.argv[1])
from polyrl.cli.main import CliCommand, main
sys.exit(main(["end", sys.argv[2]], {"end": CliCommand("end", "fake_end_command")}))
"""


def in_a_shell(folder, how, around, **environment):
    """`around`: a shell command line, with the program as $0 and its arguments."""
    source = str(Path(polyrl.__file__).parents[1])
    return subprocess.run(
        ["sh", "-c", around, sys.executable, "-c", END, source, how],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_line_and_1(commands, tmp_path, unbuffered):
    ended = in_a_shell(tmp_path, "well", 'exec "$0" "$@" >/dev/full', PYTHONUNBUFFERED=unbuffered)
    expected = "polyrl: error: standard output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


def test_a_failure_of_another_file_is_not_taken_for_one_of_stdout(commands, tmp_path):
    ended = in_a_shell(tmp_path, "without a file", 'exec "$0" "$@"')
    assert ended.returncode == 1
    assert "FileNotFoundError" in ended.stderr


def test_a_closed_stdout_is_one_line_and_2(commands, tmp_path):
    ended = in_a_shell(tmp_path, "well", 'exec "$0" "$@" >&-')
    expected = "polyrl: error: standard output is closed; expected somewhere to write to, such as /dev/null\n"
    assert (ended.returncode, ended.stderr) == (2, expected)


def test_a_closed_stdin_is_an_empty_one_so_that_no_socket_takes_its_place(commands, tmp_path):
    ended = in_a_shell(tmp_path, "reading", 'exec "$0" "$@" <&-')
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "b''\n", "")


def test_a_letter_that_stdout_lacks_is_replaced(commands, tmp_path):
    ended = in_a_shell(tmp_path, "abroad", 'exec "$0" "$@"', PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (0, "zw?lf\n")


def test_a_working_directory_that_was_deleted_is_one_line_and_2(commands, tmp_path):
    ended = in_a_shell(tmp_path, "well", 'mkdir gone; cd gone; rmdir ../gone; exec "$0" "$@"')
    assert ended.returncode == 2
    assert ended.stderr == "polyrl: error: the working directory was deleted; expected to be in one that is there\n"


def test_importing_polyrl_and_loading_a_recipe_imports_nothing_heavy():
    heavy = ("torch", "numpy", "aiohttp", "asyncio", "rich", "uvloop")
    code = f"import sys, polyrl; assert not {{*sys.modules}} & {{'msgspec', *{heavy}}}; polyrl.load('arithmetic'); "
    code += f"print(sorted({{*sys.modules}} & {{*{heavy}}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
