"""A domain's prompts by number: from files, with what is too long left out, and from the arithmetic task."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyrl.config.recipe import ArithmeticTask, DomainSection
from polyrl.data.characters import save_tokenizer
from polyrl.data.prompts import Messages
from polyrl.data.rows import DataError
from polyrl.data.sources import _PROMPTS_AT_HAND, Source, open_training, open_validation
from polyrl.data.tokens import ModelTokenizer, TokenIds


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(folder)
    return ModelTokenizer(str(folder))


def write_rows(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return str(path)


def train_on(tokenizer: ModelTokenizer, max_tokens: int | None = None, **settings: Any) -> Source:
    domain = DomainSection(name="d", reward="arithmetic", **settings)
    return open_training(domain, tokenizer, seed=3, max_tokens=max_tokens, needs_answer=True, key="data")


def test_rows_keep_their_order_and_long_prompts_are_left_out_and_counted(
    tmp_path: Path, tokenizer: ModelTokenizer, caplog: pytest.LogCaptureFixture
):
    place = write_rows(tmp_path / "a.jsonl", ["1", "2" * 9, "33", "4" * 10, "5"])
    with caplog.at_level(logging.WARNING):
        source = train_on(tokenizer, max_tokens=9, source=place)
    assert [source.task(prompt).prompt for prompt in range(source.num_prompts)] == ["1", "2" * 9, "33", "5"]
    assert [len(source.tokens(prompt)) for prompt in range(4)] == [1, 9, 2, 1]
    assert [record.getMessage() for record in caplog.records] == [
        f"{place}: 1 of 5 rows are left out: no token, or more than 9"
    ]


def test_only_the_first_prompts_are_taken_where_the_recipe_says_so(tmp_path: Path, tokenizer: ModelTokenizer):
    source = train_on(tokenizer, source=write_rows(tmp_path / "a.jsonl", ["1", "2", "3"]), num_prompts=2)
    assert source.num_prompts == 2


def test_no_more_is_read_than_it_takes_to_find_enough_prompts(
    tmp_path: Path, tokenizer: ModelTokenizer, caplog: pytest.LogCaptureFixture
):
    place = write_rows(tmp_path / "a.jsonl", ["1" * 10, "2", "3"])
    with Path(place).open("a") as file:
        file.write("no JSON\n")
    domain = DomainSection(name="d", reward="arithmetic", source=place)
    wanted: dict[str, Any] = {"seed": 3, "max_tokens": 9, "needs_answer": True, "key": "data"}
    with caplog.at_level(logging.WARNING):
        source = open_training(domain, tokenizer, **wanted, enough=2)
    assert [source.task(prompt).prompt for prompt in range(source.num_prompts)] == ["2", "3"]
    assert not caplog.records  # of a part, nobody counts
    with pytest.raises(DataError, match="not JSON"):
        open_training(domain, tokenizer, **wanted, enough=3)


def test_a_digest_is_of_the_prompts_in_their_order(tmp_path: Path, tokenizer: ModelTokenizer):
    def digest(*prompts: str, **settings: Any) -> str:
        return train_on(tokenizer, source=write_rows(tmp_path / "a.jsonl", list(prompts)), **settings).digest()

    ours = digest("1", "23", "4")
    assert digest("1", "23", "4", "5", num_prompts=3) == ours
    others = [digest("23", "1", "4"), digest("1", "2", "34"), digest("1", "23"), digest("1", "23", "4", "5")]
    assert len({ours, *others}) == 5
    assert not train_on(tokenizer, source="arithmetic").digest()


@pytest.mark.parametrize(
    ("prompts", "message"), [(["1" * 9], "none of its 1 prompts can be used"), ([], "there is no row")]
)
def test_a_file_without_a_prompt_that_can_be_used_is_an_error(
    tmp_path: Path, tokenizer: ModelTokenizer, prompts: list[str], message: str
):
    with pytest.raises(DataError, match=message):
        train_on(tokenizer, max_tokens=5, source=write_rows(tmp_path / "a.jsonl", prompts))


def test_arithmetic_has_its_own_validation_which_is_the_same_whatever_the_seed(tokenizer: ModelTokenizer):
    domain = DomainSection(name="d", source="arithmetic")
    training = open_training(domain, tokenizer, seed=3, max_tokens=None, needs_answer=True, key="data")
    validation = open_validation(
        "arithmetic", domain, tokenizer, num_prompts=5, max_tokens=None, needs_answer=True, key="data"
    )
    assert (training.num_prompts, validation.num_prompts) == (100_000, 5)
    seen = {str(training.task(prompt).prompt) for prompt in range(500)}
    assert not seen.intersection(str(validation.task(prompt).prompt) for prompt in range(5))
    assert tokenizer.text(training.tokens(7).tolist()) == training.task(7).prompt


def test_arithmetic_problems_that_are_too_long_are_drawn_again_and_the_others_stay(tokenizer: ModelTokenizer):
    anything, short = (train_on(tokenizer, max_tokens=limit, source="arithmetic") for limit in (None, 9))
    lengths = [len(anything.tokens(prompt)) for prompt in range(200)]
    assert max(lengths) > 9 >= min(lengths)
    for prompt, length in enumerate(lengths):
        assert (
            len(short.tokens(prompt)) <= 9
            and tokenizer.text(short.tokens(prompt).tolist()) == short.task(prompt).prompt
        )
        assert length > 9 or short.task(prompt) == anything.task(prompt)
    with pytest.raises(DataError, match=r"^arithmetic: no problem was found with at most 2 tokens"):
        train_on(tokenizer, max_tokens=2, source="arithmetic")


def test_validation_has_its_own_number_of_prompts(tmp_path: Path, tokenizer: ModelTokenizer):
    place = write_rows(tmp_path / "a.jsonl", ["1", "2", "3"])
    some = DomainSection(name="d", source=place, reward="math", validation=place, num_prompts=1)
    found = open_validation(place, some, tokenizer, num_prompts=2, max_tokens=None, needs_answer=True, key="data")
    assert found.num_prompts == 2


def test_a_file_has_validation_where_the_recipe_names_it_and_a_set_has_the_name_it_is_given():
    file: dict[str, Any] = {"name": "d", "source": "a.jsonl", "reward": "math"}
    assert DomainSection(**file).validation_sets == {}
    assert DomainSection(**file, validation="v.jsonl").validation_sets == {"d": "v.jsonl"}
    assert DomainSection(name="d", source="arithmetic").validation_sets == {"d": "arithmetic"}
    several = {"easy": "e.jsonl", "hard": "h.jsonl"}
    assert DomainSection(**file, validation=several).validation_sets == several


def test_a_sum_can_be_asked_for_as_written(tokenizer: ModelTokenizer):
    task = train_on(tokenizer, source="arithmetic", prompt_key="sum", template="What is {prompt}?").task(0)
    assert task.prompt == f"What is {' + '.join(map(str, task.fields['terms']))}?"
    assert task.expected == str(sum(task.fields["terms"]))


class CountingTokenizer(ModelTokenizer):
    """Counts how often each prompt is tokenised."""

    def __init__(self, folder: str) -> None:
        self.asked: Counter[str] = Counter()
        super().__init__(folder)

    def tokens(self, prompts: Sequence[str | Messages], chat: Mapping[str, Any] | None = None) -> list[TokenIds]:
        self.asked.update(str(prompt) for prompt in prompts)
        return super().tokens(prompts, chat or {})


def test_problems_of_the_rounds_under_way_are_kept_and_older_ones_drawn_again_the_same(
    tmp_path: Path,
):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(tmp_path)
    counting = CountingTokenizer(str(tmp_path))
    source = train_on(counting, source="arithmetic", arithmetic=ArithmeticTask(max_terms=20))
    first, text = source.tokens(7).tolist(), str(source.task(7).prompt)
    for _ in range(8):
        source.tokens(7)
    assert counting.asked[text] == 1
    for prompt in range(100, 100 + _PROMPTS_AT_HAND):
        source.tokens(prompt)
    assert source.tokens(7).tolist() == first
    assert counting.asked[text] == 2


def test_a_domains_switches_reach_the_chat_template_and_the_reward_sees_the_same_prompt(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    template = "{{ messages[0]['content'] }}={% if not thinks %}1{% endif %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    tokenizer = ModelTokenizer(str(tmp_path))
    settings = {"source": write_rows(tmp_path / "a.jsonl", ["2"]), "chat": True}
    for thinks, written in ((True, "2="), (False, "2=1")):
        source = train_on(tokenizer, chat_template_kwargs={"thinks": thinks}, **settings)
        assert source.written(0) == written and tokenizer.text(source.tokens(0).tolist()) == written
    arithmetic = train_on(tokenizer, source="arithmetic", chat=True, chat_template_kwargs={"thinks": False})
    assert arithmetic.written(0).endswith("=1")
    with pytest.raises(ValueError, match=r"^chat_template_kwargs\.tokenize: is set by PolyRL"):
        train_on(tokenizer, chat_template_kwargs={"tokenize": True}, **settings)
