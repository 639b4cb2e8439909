"""TextArena's game FrozenLake-v0, for a small model: words for it, and a teacher who plays it badly.

The game is the package's own, played by its adapter, unmodified. A small model reads its boards in few tokens: a word
for each kind of cell, and the unknown token for all that is written between two cells.

    Welcome ... |  P  |     |\\n+-----+ ...      ->      <unknown> P _ <unknown> ...
"""

import random
import re
from pathlib import Path

from polyrl.data import characters
from polyrl.hosts.adapters.textarena import TextArenaGame

GAME = "FrozenLake-v0"
_CELL = r"\|  [ PHG]  "
_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WORDS = ("|     ", "|  P  ", "|  H  ", "|  G  ", *_MOVES)
VOCABULARY = (characters.PAD, characters.END, characters.UNKNOWN, *_WORDS)
_LOOKS = 0.3
"""The share of moves before which the teacher looks at the board."""


def make() -> TextArenaGame:
    """Raises UserError where textarena is not installed."""
    return TextArenaGame(GAME)


def encode(text: str) -> list[int]:
    words = [word for word in re.split(f"({_CELL})", text) if word]
    return [VOCABULARY.index(word) if word in _WORDS else characters.UNKNOWN_ID for word in words]


def save_tokenizer(folder: Path) -> None:
    characters.save_words(folder, VOCABULARY, {"Regex": _CELL})


def teach(said: list[str], draws: random.Random) -> str:
    """Return a move: mostly any, now and then one that leads onto safe ice, and down or right where that does."""
    if draws.random() >= _LOOKS:
        return draws.choice(list(_MOVES))
    cells = [cell[3] for cell in re.findall(_CELL, said[-1])]
    size = int(len(cells) ** 0.5)
    row, column = divmod(cells.index("P"), size)
    safe = [
        name
        for name, (down, right) in _MOVES.items()
        if 0 <= row + down < size and 0 <= column + right < size and cells[(row + down) * size + column + right] != "H"
    ]
    forward = [name for name in safe if name in ("down", "right")]
    return draws.choice(forward or safe)
