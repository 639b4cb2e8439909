"""`polyrl generate` and `polyrl worker --engine builtin`: what is printed, and every way to be refused in a line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builtin.reference import Reference
from tests.builtin.tiny_models import letters_of, save_letters, save_tiny

import polyrl
from polyrl.cli.main import main

PROMPT = [40, 41, 42]
CHAT = "{% for m in messages %}" + letters_of([7, 8]) + "{{ m.content }}{% endfor %}" + letters_of([9])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"), tokenizer=True)


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["generate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_answer_is_on_stdout_and_a_line_of_figures_on_stderr(capsys, folder, reference):
    code, out, err = run(capsys, "--model", str(folder), "--prompt", letters_of(PROMPT), "--tokens", "12")
    assert (code, out) == (0, letters_of(reference.greedy(PROMPT, 12)) + "\n")
    (line,) = err.splitlines()
    assert line.startswith("12 tokens in ")
    assert "tok/s, cut off; loaded in" in line


def test_json_holds_text_tokens_log_probabilities_and_figures(capsys, folder, reference):
    arguments = ["--model", str(folder), "--prompt", letters_of(PROMPT), "--tokens", "12", "--json"]
    code, out, err = run(capsys, *arguments, "--temperature", "0.8", "--seed", "5")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said["text"] == letters_of(said["token_ids"])
    assert (said["tokens"], said["prompt_tokens"], said["finish"]) == (12, 3, "length")
    assert said["tok_s"] == pytest.approx(12 / said["seconds"], rel=0.05)
    assert 0 < said["first_token_s"] < said["seconds"]
    assert said["logprobs"] == pytest.approx(reference.logprobs(PROMPT, said["token_ids"], 0.8), abs=1e-4)
    assert json.loads(run(capsys, *arguments, "--temperature", "0.8", "--seed", "5")[1])["text"] == said["text"]
    assert json.loads(run(capsys, *arguments, "--temperature", "0.8", "--seed", "6")[1])["text"] != said["text"]


def test_a_chat_template_is_used_where_there_is_one_unless_the_prompt_is_raw(capsys, tmp_path):
    save_letters(save_tiny("qwen3", tmp_path), 512, chat_template=CHAT)
    reference = Reference(tmp_path)
    arguments = ["--model", str(tmp_path), "--prompt", letters_of(PROMPT), "--tokens", "8"]
    assert run(capsys, *arguments)[1] == letters_of(reference.greedy([7, 8, *PROMPT, 9], 8)) + "\n"
    assert run(capsys, *arguments, "--raw")[1] == letters_of(reference.greedy(PROMPT, 8)) + "\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "nowhere"], "nowhere: no config.json there"),
        ([], "--model: missing"),
        (["--model", "{folder}", "--tokens", "0"], "--tokens: 0; expected at least 1"),
        (["--model", "{folder}", "--temperature", "-1"], "--temperature: -1; expected a number from 0 to 100"),
        (["--model", "{folder}", "kv_token=9"], "kv_token: unknown key; did you mean kv_tokens?"),
        (["--model", "{folder}", "dtype=int8"], "dtype"),
        (["--model", "{folder}", "kv_tokens=32"], "do not fit into the cache of 32"),
        (["--model", "{folder}", "--prompt", ""], "the prompt is empty"),
        (["--model", "{folder}", "--prompt", "abc\udcff"], "--prompt: 'abc\\udcff' is not UTF-8"),
        (["--model", "{folder}", "--prompt", letters_of([5] * 600)], "600 tokens, and the model's context is 512"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(capsys, folder, arguments, complaint):
    given = [one.format(folder=folder) for one in arguments]
    code, out, err = run(capsys, "--prompt", letters_of(PROMPT), *given)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("polyrl: error: ")
    assert complaint in line


def test_a_directory_without_a_tokenizer_is_refused(capsys, tmp_path):
    save_tiny("llama", tmp_path)
    assert "no tokenizer there" in run(capsys, "--model", str(tmp_path), "--prompt", "x")[2]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{ what is this", "its tokenizer.json cannot be read: JSONDecodeError"),
        ("tokenizer.json", '{"model": {"type": "Nope"}}', "its tokenizer cannot be used"),
        ("tokenizer_config.json", "[]", "its tokenizer_config.json holds no object"),
        ("chat_template.jinja", "{{ x(", "its chat template cannot be used, TemplateSyntaxError"),
        (
            "chat_template.jinja",
            "{{ raise_exception('no user') }}",
            "its chat template cannot be used, TemplateError: no",
        ),
    ],
)
def test_a_tokenizer_or_a_chat_template_that_cannot_be_used_is_one_line(capsys, tmp_path, name, content, complaint):
    (save_tiny("llama", tmp_path, tokenizer=True) / name).write_text(content)
    code, out, err = run(capsys, "--model", str(tmp_path), "--prompt", letters_of(PROMPT))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith(f"polyrl: error: {tmp_path}: {complaint}")


def test_bytes_that_the_locale_has_no_letters_for_are_a_prompt_in_utf_8(capsys, folder, reference):
    as_in_ascii = letters_of(PROMPT).encode().decode("ascii", "surrogateescape")
    out = run(capsys, "--model", str(folder), "--prompt", as_in_ascii, "--tokens", "5")[1]
    assert out == letters_of(reference.greedy(PROMPT, 5)) + "\n"


def in_a_process(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """The command line, where a library cannot be imported."""
    source = str(Path(polyrl.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {source!r})\n"
    program += f"sys.modules[{without!r}] = None\n" if without else ""
    program += "from polyrl.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


JOIN = ("worker", "--join", "http://127.0.0.1:1")


@pytest.mark.parametrize("library", ["torch", "transformers"])
@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), (*JOIN, "--engine", "builtin")], ids=lambda c: c[0])
def test_a_missing_library_is_one_line_that_says_what_to_install(command, library):
    ended = in_a_process(*command, "--model", "somewhere", without=library)
    expected = f"polyrl: error: the builtin engine needs {library}: pip install 'polyrl[train]'\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", expected)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--engine", "builtin"), "--model: missing"),
        (("--engine", "emulated", "--model", "x"), "did you mean --engine builtin?"),
        (("--engine", "builtin", "--model", "x", "tokens_per_s=3"), "tokens_per_s: unknown key"),
        (("--engine", "builtin", "--model", "{folder}", "kv_tokens=16", "block_tokens=32"), "kv_tokens: got 16"),
        (("--engine", "builtin", "--model", "nowhere"), "--model: nowhere: no config.json there"),
        (("--engine", "builtin", "model=nowhere", "--check"), "--model: nowhere: no config.json there"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_worker_with_settings_of_no_engine_is_refused_before_it_starts(capsys, folder, arguments, complaint):
    assert main([*JOIN, *(one.format(folder=folder) for one in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_a_worker_whose_model_cannot_be_loaded_says_so_and_leaves(tmp_path):
    (tmp_path / "token").write_text("a" * 64)
    (tmp_path / "config.json").write_text('{"architectures": ["Oracle"]}')
    ended = in_a_process(
        *(*JOIN, "--quiet", "--token-file", str(tmp_path / "token"), "--name", "w"),
        *("--engine", "builtin", "--model", str(tmp_path)),
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"polyrl: error: worker w: {tmp_path}: Oracle is not supported; supported are ")
