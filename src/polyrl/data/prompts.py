"""From a row to a prompt: which column, which template, which chat messages; and the expected answer.

    template = "Question: {prompt}\\nAnswer:"      text with {prompt}, and any other column, in braces
    answer_key = "reward_model.ground_truth"      a column within a column
    chat = true                                   wrapped as a user's message, after `system` if there is one
    a list of messages in the column              used unchanged: roles and contents

Rules kept here: a row whose prompt is missing or of the wrong type is an error that names the file and the line.
So is an answer column that the recipe names and no row has: the reward would silently compare with nothing.
Left out: tokens (tokens.py).
"""

import string
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from polyrl.config.explain import did_you_mean
from polyrl.config.recipe import DomainFields
from polyrl.data.rows import DataError, Fields, Row, kind_of, read_rows
from polyrl.errors import ConfigError

Messages = list[dict[str, str]]
NeedsAnswer = bool | str
"""Whether a row without an answer is an error; a text: only if the row has no column of this name either."""

MISSING = msgspec.UNSET
_USUAL_ANSWER_KEY = DomainFields().answer_key


class Task(NamedTuple):
    """One prompt before it is tokenized, and the data that its reward needs."""

    prompt: str | Messages
    """The text that the model is to see, or messages for the tokenizer's chat template."""
    expected: str
    fields: Fields


def read_tasks(
    source: str, domain: DomainFields, *, needs_answer: NeedsAnswer, key: str = "data", validates: bool = False
) -> Iterator[Task]:
    """Yield the rows of a source as tasks.

    `key` names the section of settings. `validates` means
    that the source is one of `validation`, not the one in `source`.
    """
    args, place = (domain.validation_args, "validation") if validates else (domain.source_args, "source")

    def rows() -> Iterator[Row]:
        return read_rows(source, domain.num_prompts, args, f"{key}.{place}")

    if domain.answer_key != _USUAL_ANSWER_KEY:
        _check_answer_key(rows(), domain.answer_key, key)
    for row in rows():
        yield to_task(row, domain, needs_answer=needs_answer, key=key)


def to_task(row: Row, domain: DomainFields, *, needs_answer: NeedsAnswer, key: str = "data") -> Task:
    prompt = _prompt(row, domain, key)
    return Task(prompt, expected_of(row, domain.answer_key, needs_answer=needs_answer), row.fields)


@lru_cache
def template_columns(template: str) -> list[str]:
    """Return the columns that a template names, besides the prompt. The recipe has checked the template."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return [name for name in dict.fromkeys(names) if name != "prompt"]


def column(fields: Fields, name: str) -> Any:
    """Return a column by its name, or by a path such as `reward_model.ground_truth`; MISSING if there is none."""
    if name in fields:
        return fields[name]
    found: Any = fields
    for part in name.split("."):
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return MISSING
    return found


def _prompt(row: Row, domain: DomainFields, key: str) -> str | Messages:
    name = domain.prompt_key
    value = column(row.fields, name)
    if value is MISSING:
        raise _no_column(row, name, f"{key}.prompt_key")
    if isinstance(value, list) and value:
        return _messages(row.place, name, value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{row.place}: {name}: got {kind_of(value)}, expected a text or a list of messages")
    columns = template_columns(domain.template)
    found = {one: column(row.fields, one) for one in columns}
    missing = [one for one, its in found.items() if its is MISSING]
    if missing:
        raise _no_column(row, missing[0], f"{key}.template")
    text = _fill(domain.template, {**found, "prompt": value}, key)
    if not domain.chat:
        return text
    system = [{"role": "system", "content": domain.system}] if domain.system else []
    return [*system, {"role": "user", "content": text}]


def _check_answer_key(rows: Iterator[Row], name: str, key: str) -> None:
    """Raise DataError if no row has the column. Reads up to the first row that has it, which mostly is the first."""
    first = next(rows, None)
    if first is not None and all(column(row.fields, name) is MISSING for row in chain([first], rows)):
        raise _no_column(first, name, f"{key}.answer_key")


def _no_column(row: Row, name: str, key: str) -> DataError:
    hint = did_you_mean(name, row.fields, repr)
    has = ", ".join(row.fields) or "nothing"
    return DataError(f"{row.place}: no column {name!r}, which {key} names; the row has {has}{hint and f'; {hint}'}")


def _fill(template: str, columns: Fields, key: str) -> str:
    try:
        return "".join(_parts(template, columns))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}.template: {error}") from error


def _parts(template: str, columns: Fields) -> Iterator[str]:
    """Fill the template as `str.format` does, except that `a.b` is the column b within a, and never an attribute."""
    for text, name, spec, conversion in string.Formatter().parse(template):
        yield text
        if name is not None:
            value = string.Formatter().convert_field(columns[name], conversion)  # pyright: ignore[reportArgumentType]
            yield format(value, spec or "")


def _messages(place: str, name: str, value: list[Any]) -> Messages:
    messages: Messages = []
    for number, one in enumerate(value):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str):
            raise DataError(f'{place}: {name}.{number}: expected a message, {{"role": "...", "content": "..."}}')
        messages.append({"role": one["role"], "content": one["content"]})
    return messages


def expected_of(row: Row, name: str, *, needs_answer: NeedsAnswer) -> str:
    """Return the expected answer as text. Values that are neither texts nor numbers become JSON, for custom rewards."""
    value = column(row.fields, name)
    instead = needs_answer if isinstance(needs_answer, str) else ""
    if instead and column(row.fields, instead) not in (MISSING, None):
        needs_answer = False
    match value:
        case str() if value.strip() or not needs_answer:
            return value
        case int() | float() if not isinstance(value, bool):
            return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        case _ if needs_answer:
            found = "nothing" if value is MISSING else kind_of(value)
            either = f", or a column {instead!r}" if instead else ""
            raise DataError(
                f"{row.place}: {name}: got {found}, expected the answer, which the reward compares with{either}"
            )
        case None | msgspec.UNSET:
            return ""
        case _:
            return msgspec.json.encode(value).decode()
