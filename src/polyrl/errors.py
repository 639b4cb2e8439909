"""Who raises, who catches.

PolyrlError                 everything we raise on purpose
├── UserError               the person can fix it: one line, exit code 2, no traceback   (caught by cli)
│   ├── ConfigError         a key or a value of a TOML file or an override
│   └── JournalError        a journal that cannot be read
└── LawViolation            we are wrong: an invariant of the scheduler does not hold      (caught by nobody)
"""


class PolyrlError(Exception):
    """Everything PolyRL raises on purpose."""


class UserError(PolyrlError):
    """The person can fix it. The message is one line: what was wrong, where, what was expected."""


class ConfigError(UserError):
    """A key or a value of a configuration is wrong. The message starts with its dotted path."""


class JournalError(UserError):
    """A journal is missing, cut short or damaged. The message names the file and the record."""


class LawViolation(PolyrlError):
    """An invariant of the scheduler does not hold: a bug of ours, never the environment's."""
