"""Tasks of `reasoning-gym`: a question, one answer, and the data set's own score.

    environment = "reasoning-gym", environment_args = { dataset = "chain_sum", size = 500 }

Rules kept here: task number n is entry n of the data set, the same in every process. The answer is what stands in
`<answer>` tags; without tags, the whole text. An answer that the data set's score cannot bear is worth nothing: the
policy wrote it, and a failure would be an exit that it learns. Some data sets evaluate an answer as Python: they get
numbers, operators and lists alone, and those that evaluate names too are refused without `allow_code = true`.
"""

import ast
import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from polyrl.errors import UserError, one_line
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.own import Turn
from polyrl.telemetry.repeats import Repeats

log = logging.getLogger(__name__)

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SUM = re.compile(r"(?!.*\*\*)[\d\s+\-*/().]{1,1000}", re.DOTALL)
_WORDS = re.compile(r"[\w\s-]*")
_SEVERAL = "composite"
"""A data set of several: `settings.datasets = [{ name = "chain_sum", weight = 2.0, config = {} }, ...]`."""


def _is_sum(answer: str) -> bool:
    """Return whether an answer is plain arithmetic. Powers are none: a few digits of them fill the memory."""
    return _SUM.fullmatch(answer) is not None


def _is_list(answer: str) -> bool:
    """Return whether an answer is a written value, such as a list, or words and numbers alone."""
    if _WORDS.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


_EVALUATE: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": _is_list,
    "countdown": _is_sum,
    "n_queens": _is_list,
    "puzzle24": _is_sum,
    "spiral_matrix": _is_list,
    "string_insertion": _is_list,
}
"""Data sets that evaluate an answer as Python, and the answers in which nothing can run."""
_RUN_CODE = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
"""Data sets that evaluate names as well, and with them whatever Python has."""

_UNSCORED = Repeats()


class ReasoningGym:
    max_turns = 1

    def __init__(
        self,
        dataset: str,
        size: int = 1000,
        seed: int = 0,
        system: str = "",
        settings: dict[str, Any] | None = None,
        allow_code: bool = False,
    ) -> None:
        """`settings` are the data set's own."""
        if not allow_code:
            _refuse_code(dataset, settings or {})
        try:
            self._data = _dataset(dataset, size, seed, json.dumps(settings or {}, sort_keys=True))
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"reasoning-gym: {dataset}: {one_line(error)}") from error
        self._system, self._name, self._allow_code = system, dataset, allow_code
        self._entry: dict[str, Any] = {}
        self.num_tasks = size

    def begin(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self._entry = self._data[int(task["index"]) % self.num_tasks]
        question = {"role": "user", "content": str(self._entry["question"])}
        return [{"role": "system", "content": self._system}, question] if self._system else [question]

    def step(self, text: str) -> Turn:
        found = _TAGGED.findall(text)
        answer = (found[-1] if found else text).strip()
        is_harmless = _EVALUATE.get(self._entry["metadata"].get("source_dataset", self._name))
        if not self._allow_code and is_harmless is not None and not is_harmless(answer):
            answer = ""  # nothing runs, and it is as wrong
        return Turn(done=True, reward=self._score(answer))

    def _score(self, answer: str) -> float:
        try:
            return float(self._data.score_answer(answer=answer, entry=self._entry))
        except Exception as error:  # noqa: BLE001  whatever it is, the answer is the cause if the data set's own bears it
            self._data.score_answer(answer=str(self._entry["answer"]), entry=self._entry)
            if (often := _UNSCORED.again(self._name)) is not None:
                log.warning("reasoning-gym: %s: an answer is worth 0: %s%s", self._name, one_line(error), often)
            return 0.0


def _refuse_code(dataset: str, settings: Mapping[str, Any]) -> None:
    parts = settings.get("datasets") if dataset == _SEVERAL else None
    names = [one.get("name") for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []
    for name in (dataset, *names):
        if name in _RUN_CODE:
            raise UserError(
                f"reasoning-gym: {name} runs what the model wrote on this machine; allow_code = true accepts that"
            )


@lru_cache(maxsize=16)
def _dataset(name: str, size: int, seed: int, written: str) -> Any:
    """Return a data set, which all episodes share: it is read by number only."""
    settings = json.loads(written)
    if name == _SEVERAL and isinstance(settings.get("datasets"), list):
        spec = need("reasoning_gym.composite", "reasoning-gym").DatasetSpec
        settings["datasets"] = [spec(**{"weight": 1.0, "config": {}, **one}) for one in settings["datasets"]]
    return need("reasoning_gym", "reasoning-gym").create_dataset(name, size=size, seed=seed, **settings)
