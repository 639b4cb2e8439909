"""The arguments of a reward model, checked before the run starts: no library is imported for it, no weights are read.

Rules kept here: each fault is one line that begins with the argument's name. Weights are safetensors, which hold
numbers and nothing that runs.
"""

import importlib.util
from pathlib import Path
from typing import Any, Literal

import msgspec

from polyrl.config.model_dir import read_object
from polyrl.errors import ConfigError
from polyrl.rewards.judging.questions import is_url
from polyrl.scheduling.core.bounds import AtLeastOne, Count, NotNegative, Positive

_KIND = "ForSequenceClassification"
_DEFAULT_LABELS = ("LABEL_0", "LABEL_1")
"""The labels that transformers gives a model whose config.json names none."""


class RewardModelArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of a reward model; docs/guides/judge.md has the table."""

    path: str = ""
    url: str = ""
    server: Literal["vllm", "sglang"] = "vllm"
    model: str = ""
    api_key_env: str = ""
    label: int | str = ""
    sigmoid: bool = False
    form: Literal["auto", "chat", "pair", "text"] = "auto"
    prompt_key: str = ""
    max_tokens: Count = 0
    truncate: Literal["left", "right", "no"] = "left"
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: AtLeastOne = 1
    batch_size: AtLeastOne = 16
    wait_ms: NotNegative = 5.0
    concurrency: AtLeastOne = 32
    timeout_s: Positive = 20.0
    attempts: AtLeastOne = 5
    pause_s: Positive = 0.5

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.url):
            raise ValueError("path: expected either a folder with a sequence classifier, or url, a server of one")
        if self.url:
            self._check_server()
        else:
            _check_folder(Path(self.path), self.label, self.form)

    def _check_server(self) -> None:
        if not is_url(self.url):
            raise ValueError(f"url: got {self.url!r}, expected an address such as http://10.0.0.5:8000")
        if isinstance(self.label, str) and self.label:
            raise ValueError(f"label: got {self.label!r}, expected its number: a server does not tell the names")
        if self.server == "sglang" and self.form in ("chat", "pair"):
            raise ValueError(f'form: "{self.form}" is not known to SGLang\'s /classify, expected "text"')

    @property
    def served_form(self) -> str:
        """The form in which a server is sent prompt and answer."""
        if self.form != "auto":
            return self.form
        return "chat" if self.server == "vllm" else "text"


def labels_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels of a config.json, in the order of their numbers."""
    named = config.get("id2label")
    if not isinstance(named, dict) or not named:
        return _DEFAULT_LABELS
    try:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    except ValueError as error:
        raise ValueError("path: the id2label of its config.json has keys that are no numbers") from error


def label_number(labels: tuple[str, ...], label: int | str) -> int:
    """Return the number of the chosen label; 0 where there is only one. Raises ValueError."""
    if label == "":
        if len(labels) == 1:
            return 0
        raise ValueError(f"label: missing, expected one of {', '.join(labels)}")
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return label
    if label not in labels:
        raise ValueError(f"label: got {label!r}, expected one of {', '.join(labels)}")
    return labels.index(str(label))


def _check_folder(folder: Path, label: int | str, form: str) -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"path: needs {missing[0]}, which is not installed: pip install 'polyrl[train]'")
    try:
        config = read_object(folder, "config.json")
    except ConfigError as error:
        raise ValueError(f"path: {error}") from error
    kinds = config.get("architectures") or []
    if kinds and not any(str(one).endswith(_KIND) for one in kinds):
        raise ValueError(f"path: {folder} is of {kinds[0]}, expected one that ends with {_KIND}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"path: {folder} has no safetensors; pickled weights are not read")
    if form == "text":
        raise ValueError('form: "text" is for a server, expected "auto", "chat" or "pair"')
    label_number(labels_of(config), label)
