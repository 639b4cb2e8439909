"""Tasks of `reasoning-gym`: a question, one answer, and the data set's own score.

    environment = "reasoning-gym", environment_args = { dataset = "chain_sum", size = 500 }

Rules kept here: task number n is entry n of the data set, the same in every process. The answer is what stands in
`<answer>` tags; without tags, the whole text.
"""

import re
from functools import lru_cache
from typing import Any

from polyrl.errors import UserError, one_line
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.own import Turn

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    max_turns = 1

    def __init__(
        self, dataset: str, size: int = 1000, seed: int = 0, system: str = "", settings: dict[str, Any] | None = None
    ) -> None:
        """`settings` are the data set's own."""
        given = tuple(sorted((settings or {}).items()))
        try:
            self._data = _dataset(dataset, size, seed, repr(given), given)
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"reasoning-gym: {dataset}: {one_line(error)}") from error
        self._system = system
        self._entry: dict[str, Any] = {}
        self.num_tasks = size

    def begin(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        self._entry = self._data[int(task["index"]) % self.num_tasks]
        question = {"role": "user", "content": str(self._entry["question"])}
        return [{"role": "system", "content": self._system}, question] if self._system else [question]

    def step(self, text: str) -> Turn:
        found = _TAGGED.findall(text)
        answer = (found[-1] if found else text).strip()
        return Turn(done=True, reward=float(self._data.score_answer(answer=answer, entry=self._entry)))


@lru_cache(maxsize=16)
def _dataset(name: str, size: int, seed: int, _key: str, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Return a data set, which all episodes share: it is read by number only."""
    return need("reasoning_gym", "reasoning-gym").create_dataset(name, size=size, seed=seed, **dict(settings))
