"""Who raises, who catches.

PolyrlError                 everything we raise on purpose
├── UserError               the person can fix it: one line, exit code 2, no traceback   (caught by cli)
│   ├── ConfigError         a key or a value of a TOML file or an override
│   └── JournalError        a journal that cannot be read
├── RunFailed               a run that Python started died of a bug, or was killed; it can be resumed
├── NoReward                an answer has none, and would have none if it were asked for again (caught by client)
├── RequestError            somebody asked the manager for what cannot be: they are told so (caught by manager)
│   └── Refused             a peer said what cannot be true: it is told, and counted
└── LawViolation            we are wrong: an invariant of the scheduler does not hold      (caught by nobody)
"""

EXIT_BAD_INPUT = 2
"""The exit code of a process that ended with a UserError."""


class PolyrlError(Exception):
    """Everything PolyRL raises on purpose."""


class UserError(PolyrlError):
    """The person can fix it. The message is one line: what was wrong, where, what was expected."""


class ConfigError(UserError):
    """A key or a value of a configuration is wrong. The message starts with its dotted path."""


class JournalError(UserError):
    """A journal is missing, cut short or damaged. The message names the file and the record."""


class RunFailed(PolyrlError):
    """A run's process was killed, or has a bug. The message ends with what it said last."""


class NoReward(PolyrlError):
    """An answer has no reward, and another attempt would end the same. The message is one line."""


class RequestError(PolyrlError):
    """Somebody asked the manager for what cannot be. The asker is told; everything else goes on."""


class Refused(RequestError):
    """A peer said what cannot be true. `kind` is the name under which refusals are counted."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(plain(reason)[:_MAX_REASON])
        self.kind = kind


class LawViolation(PolyrlError):
    """An invariant of the scheduler does not hold: a bug of ours, never the environment's."""


_SHOWN_CHARACTERS = 300
_MAX_REASON = 2000


def one_line(error: BaseException) -> str:
    """What somebody else's code raised, as a line: `TypeName: what it says`, cut where it is long."""
    text = plain(" ".join(str(error).split()))
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def plain(text: str) -> str:
    """A stranger's words as one line that every terminal shows as it is: what is not printable is written out.

    A newline would begin a line of a log that nobody wrote, an escape sequence moves the cursor, a mark of direction
    shows what follows backwards.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


def shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
