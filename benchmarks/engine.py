"""The builtin engine beside a peer on the same work: transformers' continuous batching, or the vLLM server.

Both are warm like the engine. transformers runs in this process, once, after the engine. The vLLM server (vllm_peer.py)
takes turns with the engine, and its figures are medians over the turns; the shorter a job, the more turns.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import parser_of, tell, vllm_peer
from benchmarks.scratch import scratch
from polyrl.bench import engine
from polyrl.bench.engine import WARM_TOKENS, Ran, Work
from polyrl.cli import bench
from polyrl.errors import UserError
from polyrl.run.event_loop import run_loop

_TURNS_S = 8.0
"""The engine's jobs take about so long, all turns together."""
_MIN_TURNS, _MAX_TURNS = 5, 25


def main(argv: Sequence[str]) -> int:
    parser = parser_of("engine", argv, __doc__)
    bench.add_model_options(parser)
    bench.add_engine_options(parser)
    parser.add_argument("--peer", choices=["transformers", "vllm"], help="measured on the same work, in the same run")
    args = parser.parse_args(argv)
    result = measure(bench.engine_work(args), peer=args.peer)
    return tell(result, engine.table(result), as_json=args.json)


def measure(work: Work, *, peer: str | None = None) -> dict[str, Any]:
    """Raises UserError when the peer is not installed, or cannot do this work."""
    if peer is None:
        return engine.measure(work) | {"peer": None, "peer_tok_s": None}
    result = _beside_vllm(work) if peer == "vllm" else _beside_transformers(work)
    result["ratio_to_peer"] = round(result["job_tok_s"] / max(1, result["peer_tok_s"]), 2)
    return result


# transformers


class PeerRan(NamedTuple):
    """Tokens a second: of the whole job, and of its decoding, which leaves out the time of a short job."""

    job: float
    decoding: float


def _beside_transformers(work: Work) -> dict[str, Any]:
    if work.new < 2:
        raise UserError(f"--new: {work.new}, expected at least 2 with --peer transformers: its decoding is measured")
    result = engine.measure(work)
    model, device = engine.prepare(work)  # a new one: the engine compiled the other's layers and merged its products
    theirs = run_transformers(work, model, device)
    result |= {"peer": "transformers", "peer_tok_s": round(theirs.job), "peer_decoding_tok_s": round(theirs.decoding)}
    result["decoding_ratio_to_peer"] = round(work.batch / result["step_ms"] * 1e3 / theirs.decoding, 2)
    del model
    engine.free_memory()
    return result


def run_transformers(work: Work, model: Any, device: str) -> PeerRan:
    """transformers' own continuous batching on the same work, after a short job that warms it up."""
    import torch
    from transformers import GenerationConfig

    model.set_attn_implementation("sdpa")
    prompts = engine.prompts_of(work, model.config.vocab_size)

    def seconds(new: int) -> float:
        config = GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0)
        began = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        num = sum(len(one.generated_tokens) for one in outputs.values())
        if num != work.batch * new:
            raise UserError(f"--peer transformers: {num} tokens came, {work.batch * new} were wanted")
        return took

    few = min(WARM_TOKENS, work.new // 2)
    seconds(few)
    short, whole = seconds(few), seconds(work.new)
    return PeerRan(work.batch * work.new / whole, work.batch * (work.new - few) / max(1e-9, whole - short))


# vLLM


class EngineTurns(NamedTuple):
    ours: list[Ran]
    theirs: list[float]
    """Tokens a second."""

    @property
    def ratio_quartiles(self) -> list[float]:
        """The middle half of the ratios of neighbouring turns: from, and to."""
        ratios = [one.num_tokens / one.seconds / their for one, their in zip(self.ours, self.theirs, strict=True)]
        first, _, third = statistics.quantiles(ratios, n=4)
        return [round(first, 2), round(third, 2)]

    @property
    def median(self) -> Ran:
        return sorted(self.ours, key=lambda one: one.seconds)[len(self.ours) // 2]


def _beside_vllm(work: Work) -> dict[str, Any]:
    vllm_peer.check_installed()
    model, device = engine.prepare(work)
    if device != "cpu":
        raise UserError("--peer vllm: it is measured on the CPU; this machine has a GPU")
    turns = run_loop(run_in_turns(work, model, device))
    result = engine.figures(work, model, device, turns.median)
    result |= {"peer": "vllm", "peer_tok_s": round(statistics.median(turns.theirs))}
    return result | {"turns": len(turns.ours), "ratio_quartiles": turns.ratio_quartiles}


async def run_in_turns(work: Work, model: Any, device: str) -> EngineTurns:
    """The engine and the vLLM server, one after the other, again and again."""
    turns = EngineTurns([], [])
    with scratch(Path(tempfile.gettempdir())) as folder:
        if work.model is None:
            _save_quietly(model, str(folder))
        asked = vllm_peer.Asked(engine.prompts_of(work, model.config.vocab_size), work.new)
        context = work.prompt + work.new
        async with vllm_peer.serve(work.model or str(folder), slots=work.batch, max_context=context) as server:
            num_turns = _MIN_TURNS
            while len(turns.ours) < num_turns:
                with server.standing_still():
                    turns.ours.append(await engine.run_engine(work, model, device))
                await server.tok_s(asked._replace(new=min(WARM_TOKENS, work.new)))
                turns.theirs.append(await server.tok_s(asked))
                num_turns = num_turns_for(turns.ours[0].seconds)
    return turns


def num_turns_for(job_s: float) -> int:
    return min(_MAX_TURNS, max(_MIN_TURNS, round(_TURNS_S / job_s)))


def _save_quietly(model: Any, folder: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
