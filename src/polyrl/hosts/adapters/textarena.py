"""Games of `textarena` for one player: every observation is a message, and the end has the game's reward.

    environment = "textarena", environment_args = { game = "FrozenLake-v0" }

Rules kept here: games draw from Python's and numpy's global generators, so each game has a state of its own, put in
place while it moves: one at a time, and the same game whatever else is played. The policy sees what is new, never the
whole history again: its earlier turns are in the conversation already.
"""

import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from polyrl.errors import UserError
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.own import Turn

_ONE_AT_A_TIME = threading.Lock()
_RAW = "-raw"
_TOO_LONG = re.compile(rf"(\d{{{sys.int_info.default_max_str_digits}}})\d+")
"""A number that Python does not read: a game would break on it, where a shorter one is a wrong move."""
_FOR_ONE: set[str] = set()
"""Games that were found to be for one player."""


class TextArenaGame:
    max_turns = 100

    def __init__(self, game: str, system: str = "", settings: dict[str, Any] | None = None) -> None:
        """`settings` are the game's own, such as `size`."""
        arena = need("textarena", "textarena")
        known = need("textarena.envs.registration", "textarena").ENV_REGISTRY
        bare = game.removesuffix("-train").removesuffix(_RAW)
        if f"{bare}{_RAW}" not in known:
            raise UserError(f"textarena: no game {game!r}; expected one of its names, for example FrozenLake-v0")
        self._random = random.Random(0).getstate()
        self._numpy = np.random.RandomState(0).get_state()
        self._game: Any = self._in_turn(lambda: arena.make(f"{bare}{_RAW}", **(settings or {})))
        self._system = system
        if game not in _FOR_ONE:
            self._check(game)

    def begin(self, task: dict[str, Any], seed: int) -> list[dict[str, str]]:
        number = (seed * 1_000_003 + int(task["index"])) % (1 << 32)
        self._random = random.Random(number).getstate()
        self._numpy = np.random.RandomState(number).get_state()
        self._in_turn(lambda: self._game.reset(num_players=1))
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._seen()}]

    def step(self, text: str) -> Turn:
        move = _TOO_LONG.sub(r"\1", text if "[" in text else f"[{text.strip()}]")
        done, _ = self._in_turn(lambda: self._game.step(action=move))
        if not done:
            return Turn(self._seen())
        rewards, info = self._game.close()
        why = info[0].get("reason") or ""
        return Turn(done=True, reward=(rewards or {}).get(0, 0.0), why=str(why))

    def _check(self, game: str) -> None:
        try:
            self._in_turn(lambda: self._game.reset(num_players=1))
        except AssertionError as error:
            raise UserError(f"textarena: {game} is not a game for one player: {error}") from error
        _FOR_ONE.add(game)

    def _seen(self) -> str:
        """Return what the game says since the last look, without the player's own moves."""
        player, said = self._in_turn(self._game.get_observation)
        return "\n".join(str(one[1]).strip() for one in said if one[0] != player)

    def _in_turn(self, act: Callable[[], Any]) -> Any:
        with _ONE_AT_A_TIME:
            ours, theirs = random.getstate(), np.random.get_state()
            random.setstate(self._random)
            np.random.set_state(self._numpy)
            try:
                return act()
            finally:
                self._random, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(ours)
                np.random.set_state(theirs)
