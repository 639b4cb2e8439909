"""The exceptions of PolyRL, and the part that catches each.

PolyrlError                 everything we raise on purpose
├── UserError               the person can fix it: one line, exit code 2, no traceback   (caught by cli)
│   ├── ConfigError         a key or a value of a TOML file or an override
│   ├── RankLost            a rank of the trainer is gone; the run can go on by itself  (caught by cli)
│   └── JournalError        a journal that cannot be read
├── RunFailed               a run that Python started died of a bug, or was killed; it can be resumed
├── NoReward                an answer has no reward, and another attempt would end the same (caught by client)
├── RequestError            a request that the manager cannot fulfil: the sender is told why (caught by manager)
│   └── Refused             a peer sent something that cannot be true: it is told, and counted
└── LawViolation            a bug of ours: an invariant of the scheduler does not hold     (never caught)
"""

EXIT_BAD_INPUT = 2
"""The exit code of a process that ended with a UserError."""


class PolyrlError(Exception):
    """Everything PolyRL raises on purpose."""


class UserError(PolyrlError):
    """An error that the user can fix. The message is one line: what was wrong, where, and what was expected."""


class ConfigError(UserError):
    """A key or a value of a configuration is wrong. The message starts with its dotted path."""


class RankLost(UserError):
    """A rank of the trainer, or its node, is gone. Nothing is lost: the run goes on from its last step."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(f"{why}; {advice}")
        self.why = why


class JournalError(UserError):
    """A journal is missing, cut short or damaged. The message names the file and the record."""


class RunFailed(PolyrlError):
    """A run's process was killed, or has a bug. The message ends with the last output of the process."""


class NoReward(PolyrlError):
    """An answer has no reward, and another attempt would end the same. The message is one line."""


class RequestError(PolyrlError):
    """A request that the manager cannot fulfil. The sender is told why; everything else goes on."""


class Refused(RequestError):
    """A peer sent something that cannot be true. `kind` is the name under which refusals are counted."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(plain(reason)[:_MAX_REASON])
        self.kind = kind


class LawViolation(PolyrlError):
    """An invariant of the scheduler does not hold: a bug of ours, never the environment's."""


_SHOWN_CHARACTERS = 300
_MOST_CHARACTERS = 1 << 14
_MAX_REASON = 2000


def one_line(error: BaseException) -> str:
    """Return an exception of foreign code as one line, `TypeName: message`, shortened if it is long."""
    text = plain(" ".join(str(error)[:_MOST_CHARACTERS].split()))
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def plain(text: str) -> str:
    """Return untrusted text as one line that is safe in a terminal: whitespace becomes a space, the rest is escaped.

    Otherwise a newline could forge a line of a log, an escape sequence could move the cursor, and a direction mark
    could show the following text backwards. Of a long text only the beginning is returned: escaping takes a second for
    every few megabytes, and a decoder's message has the very tag that it does not know.
    """
    text = text[:_MOST_CHARACTERS]
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def plain_lines(text: str) -> str:
    """Return untrusted text of several lines, each of them `plain`."""
    return "\n".join(map(plain, text.split("\n")))


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else character.encode("unicode_escape").decode()


def shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
