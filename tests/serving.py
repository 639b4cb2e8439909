"""Models to serve, and a manager with its fleet to serve them, as processes that a test may kill."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

POLYRL = [sys.executable, "-m", "polyrl"]
BYTE_WORKER = [sys.executable, str(Path(__file__).with_name("bytes_worker.py"))]
PATIENCE_S = 150.0
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Tokens 0 to 255 are bytes, in no particular order; 256 to 258 are special, and 258 ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|end|>")]
    tokenizer.add_special_tokens(special)
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """As Llama's: tokens 0 to 255 are bytes, the others words with a mark for the space before them."""
    vocab = {f"<0x{number:02X}>": number for number in range(256)}
    words = [f"{'▁' if number % 2 else ''}{chr(97 + number % 26)}{number}" for number in range(256, 299)]
    vocab |= {word: 256 + number for number, word in enumerate(words)} | {"<unk>": 299}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return folder


class ServedFleet:
    """A manager that serves, and its workers. Whatever was started is ended with the block."""

    def __init__(self, folder: Path, model: Path | None, settings: tuple[str, ...] = ()) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self._model = model
        self._settings = settings
        self._port = 0
        self._manager: subprocess.Popen[str] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def start_manager(self) -> None:
        serve = () if self._model is None else ("--serve", str(self._model))
        run = ("--run-dir", str(self.run_dir), "--port", str(self._port))
        with (self.folder / "manager.log").open("ab") as log:
            argv = [*POLYRL, "manager", *run, *serve, *self._settings]
            self._manager = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._manager.stdout is not None
        first = self._manager.stdout.readline()
        assert first.startswith("manager: http"), (self.folder / "manager.log").read_text()
        self._port = int(first.split()[1].rpartition(":")[2])

    def kill_manager(self) -> None:
        assert self._manager is not None
        self._manager.kill()
        self._manager.wait()

    def stop_manager(self) -> None:
        assert self._manager is not None
        self._manager.send_signal(signal.SIGTERM)
        assert self._manager.wait(30) == 0

    def start_worker(self, name: str, *engine: str) -> None:
        join = ("--join", self.url, "--token-file", str(self.run_dir / "worker.token"), "--name", name)
        self._start(name, [*POLYRL, "worker", *join, *engine])

    def start_byte_worker(self, name: str, *settings: str) -> None:
        self._start(name, [*BYTE_WORKER, self.url, str(self.run_dir / "worker.token"), name, *settings])

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.workers[name] = subprocess.Popen(argv, stdout=log, stderr=log)

    def kill_worker(self, name: str) -> None:
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in (*self.workers.values(), *([] if self._manager is None else [self._manager])):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def token(self, scope: str) -> str:
        return (self.run_dir / f"{scope}.token").read_text().strip()

    def client(self, **others: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{
                "base_url": f"{self.url}/v1",
                "api_key": self.token("generate"),
                "max_retries": 0,
                "timeout": 60.0,
                **others,
            }
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.token("generate"), max_retries=0, timeout=60.0
        )

    def status(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token('admin')}"}
        return httpx.get(f"{self.url}/v1/status", headers=headers, timeout=10).json()

    def until_active(self, num_workers: int) -> None:
        self.until(lambda now: sum(one["state"] == "active" for one in now["workers"]) == num_workers)

    def until_idle(self) -> None:
        """Nothing is asked, nothing runs."""
        self.until(lambda now: now["queues"]["samples_asked"] == now["queues"]["samples_running"] == 0)

    def until(self, holds: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds(now := self.status()):
            assert time.monotonic() < end, now
            time.sleep(0.1)

    def verified(self) -> dict[str, Any]:
        """The ledger, when all laws held all along."""
        done = subprocess.run(
            [*POLYRL, "ledger", str(self.run_dir), "--verify", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)


@contextmanager
def served(folder: Path, model: Path | None, *settings: str) -> Iterator[ServedFleet]:
    fleet = ServedFleet(folder, model, settings)
    with contextlib.closing(fleet):
        fleet.start_manager()
        yield fleet
