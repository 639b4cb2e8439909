"""The languages of programs, as a table: how each is compiled and started. A new one is a row here.

Rules kept here: compilers are programs too, and run inside the sandbox. The system's own are used, found once.
"""

import shutil
from collections.abc import Callable
from functools import lru_cache

from msgspec import Struct

from polyrl.errors import UserError

_SYSTEM_PATH = "/usr/bin:/bin"


class Language(Struct, frozen=True, kw_only=True):
    file: str
    """The name of the source file."""
    command: str = ""
    """The program that compiles or runs it; empty: the warm interpreter does."""
    compile: tuple[str, ...] = ()
    """Arguments of the compiler, which makes a file called `program`; empty: nothing is compiled."""
    run: tuple[str, ...] = ()
    """Arguments of the command, for a language that is not compiled."""
    has_calls: bool = False
    """Whether functions can be called, and pytest files run."""
    limits_address_space: bool = True
    """Whether memory that is reserved and not used is limited. Some run-times reserve gigabytes."""
    install: str = ""


BINARY = "program"
LANGUAGES: dict[str, Language] = {
    "python": Language(file="solution.py", has_calls=True),
    "c": Language(
        file="main.c", command="gcc", compile=("-O2", "-std=c17", "-o", BINARY, "main.c", "-lm"), install="gcc"
    ),
    "c++": Language(
        file="main.cpp", command="g++", compile=("-O2", "-std=c++20", "-o", BINARY, "main.cpp"), install="g++"
    ),
    "javascript": Language(
        file="main.js", command="node", run=("main.js",), limits_address_space=False, install="nodejs"
    ),
}
ALIASES = {"py": "python", "python3": "python", "cpp": "c++", "cc": "c++", "js": "javascript", "node": "javascript"}

Find = Callable[[str], str | None]


def find_language(name: str) -> Language | None:
    lower = name.strip().lower()
    return LANGUAGES.get(ALIASES.get(lower, lower))


@lru_cache
def find_command(name: str) -> str | None:
    """Return the path of a system's program; programs elsewhere are not visible inside."""
    return shutil.which(name, path=_SYSTEM_PATH)


def check_installed(language: Language, find: Find = find_command) -> None:
    """Raise UserError if the compiler or the run-time is missing."""
    if language.command and find(language.command) is None:
        raise UserError(f"{language.command} is missing in /usr/bin: apt-get install {language.install}")


def compiler(language: Language, find: Find = find_command) -> list[str]:
    return [find(language.command) or language.command, *language.compile]


def start(language: Language, find: Find = find_command) -> list[str]:
    """Return the command line of a run, in the program's folder; empty for the warm interpreter."""
    if language.compile:
        return [f"./{BINARY}"]
    return [find(language.command) or language.command, *language.run] if language.command else []
