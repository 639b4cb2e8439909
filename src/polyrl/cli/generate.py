"""`polyrl generate`: try a model directory on one prompt, with the builtin engine in this process."""

import argparse
import json
import sys

from polyrl.errors import UserError, shorten

EXAMPLE = """\
examples:
  polyrl generate --model DIR --prompt "What is 7 plus 5?"
  polyrl generate --model DIR --prompt "Once upon a time" --raw --temperature 0.8 --seed 3 --tokens 500
  polyrl generate --model DIR --prompt "What is 7 plus 5?" --json device=cuda dtype=bfloat16

Settings of the engine are key=value (docs/concepts/builtin-engine.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the engine")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="at most so many (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (default: %(default)g)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="same seed, same answer (default: %(default)s)"
    )
    parser.add_argument("--raw", action="store_true", help="go on from the prompt as it is, without a chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of live text")


def run(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides
    from polyrl.engines import registry
    from polyrl.run.event_loop import run_loop
    from polyrl.wire.frames import Sampling

    if args.tokens < 1:
        raise UserError(f"--tokens: {args.tokens}; expected at least 1")
    if not 0 <= args.temperature <= 100:
        raise UserError(f"--temperature: {args.temperature:g}; expected a number from 0 to 100")
    text = _text(args.prompt)
    registry.check_libraries()
    given = apply_overrides({}, args.settings, example="slots=16")
    config = registry.builtin_config(given, args.model)
    from polyrl.run.generating import LoadedModel, generate

    model = LoadedModel(config, tuple(given))
    prompt = model.tokens(text, raw=args.raw)
    sampling = Sampling(temperature=args.temperature)

    def show(piece: str) -> None:
        if not args.json:
            print(piece, end="", flush=True)

    made = run_loop(generate(model, prompt, args.tokens, args.seed, sampling, show))
    show("\n")
    if not args.json:
        num, cut_off = len(made.tokens), ", cut off" if made.finish == "length" else ""
        figures = f"{num} tokens in {made.seconds:.2f} s, {made.tok_s:.1f} tok/s{cut_off}"
        print(f"{figures}; loaded in {model.load_s:.1f} s", file=sys.stderr)
        return 0
    said = {
        "model": config.model,
        "text": made.text,
        "finish": made.finish,
        "tokens": len(made.tokens),
        "prompt_tokens": len(prompt),
        "seconds": round(made.seconds, 4),
        "tok_s": round(made.tok_s, 2),
        "first_token_s": round(made.first_token_s, 4),
        "load_s": round(model.load_s, 3),
        "temperature": args.temperature,
        "seed": args.seed,
        "token_ids": made.tokens,
        "logprobs": made.logprobs,
    }
    print(json.dumps(said))
    return 0


def _text(given: str) -> str:
    """Decode an argument as UTF-8. Bytes that the locale cannot decode reach us as surrogates."""
    try:
        return given.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        raise UserError(f"--prompt: {shorten(repr(given))} is not UTF-8; expected text") from error
