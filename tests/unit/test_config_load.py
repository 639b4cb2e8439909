"""Configuration: what is read, what is overridden, and the one line that every mistake becomes."""

import enum
import math
import subprocess
import sys
import tomllib
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from polyrl.config import apply_overrides, build, dump_toml, load_toml
from polyrl.errors import ConfigError, UserError


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Domain(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    name: str
    quota: Annotated[int, Meta(ge=0)] = 1
    quantiles: list[tuple[float, float]] = []

    def __post_init__(self) -> None:
        if self.quota == 13:
            raise ValueError("quota: 13 brings bad luck,\nexpected any other number")
        if self.name == "nobody":
            raise ValueError("nobody is not a domain")


class Fleet(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(ge=0)] = 0
    price: Annotated[float, Meta(gt=0, le=100)] = 1.5
    spot: bool = True
    limit: Annotated[float, Meta(ge=0)] | None = None
    mode: Literal["eager", "lazy"] = "eager"
    color: Color = Color.RED


class Uniform(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, tag_field="kind", tag="uniform"):
    high: float = 1.0


class Constant(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, tag_field="kind", tag="constant"):
    value: float = 1.0


class Settings(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    title: str = ""
    fleet: Fleet = Fleet()
    domains: Annotated[list[Domain], Meta(max_length=3)] = []
    prices: dict[str, Fleet] = {}
    noise: Uniform | Constant = Constant()
    host: Annotated[str, Meta(pattern="^[a-z]*$")] = ""

    def __post_init__(self) -> None:
        if self.title == "wrong":
            raise ValueError("title: 'wrong' is taken")


class Buggy(Struct, frozen=True):
    size: int = 1

    def __post_init__(self) -> None:
        raise TypeError("a bug of ours")


def line_of(tree, source=""):
    """The message that building the settings ends in."""
    with pytest.raises(ConfigError) as caught:
        build(tree, Settings, source=source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def override_line(tree, override):
    with pytest.raises(ConfigError) as caught:
        apply_overrides(tree, [override])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Reading a file


def test_a_file_is_read_as_a_tree(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[fleet]\nworkers = 3\n[[domains]]\nname = "math"\n')
    assert load_toml(path) == {"fleet": {"workers": 3}, "domains": [{"name": "math"}]}


def test_the_mark_that_some_editors_put_before_utf_8_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[fleet]\nworkers = 3\n", encoding="utf-8-sig")
    assert load_toml(path) == {"fleet": {"workers": 3}}


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.toml: no such file$"):
        load_toml(tmp_path / "gone.toml")
    with pytest.raises(UserError, match=r"is a directory, expected a TOML file$"):
        load_toml(tmp_path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a = 1\n\nb = = 2\n", 3),
        (b"a = 1\na = 2\n", 2),
        (b"a = 1\nb = [1,\n", 2),
        (b"a = 1\n# \xff\n", 2),
    ],
)
def test_text_that_is_not_toml_is_refused_with_file_and_line(tmp_path, content, line):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, "a = " + "9" * 5000])
def test_monstrous_values_are_refused_and_not_a_crash(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(ConfigError):
        load_toml(path)


# Overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("inf", math.inf),
        ("true", True),
        ("True", "True"),
        ('"3"', "3"),
        ("spot trace", "spot trace"),
        ("", ""),
        ("a=b", "a=b"),
        ("[1, 2]", [1, 2]),
        ("{ x = 1 }", {"x": 1}),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_an_overriding_value_is_toml_or_else_a_bare_string(text, value):
    assert apply_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_leave_the_rest_and_the_original_alone_and_the_last_one_wins():
    tree = {"fleet": {"workers": 1, "spot": True}}
    assert apply_overrides(tree, ["fleet.workers=2", "fleet.workers=3"]) == {"fleet": {"workers": 3, "spot": True}}
    assert tree == {"fleet": {"workers": 1, "spot": True}}


def test_an_override_reaches_into_a_list_by_index():
    tree = {"domains": [{"quota": 1}, {"quota": 2}], "times": [1.0, 2.0]}
    changed = apply_overrides(tree, ["domains.1.quota=5", "times.0=9"])
    assert changed == {"domains": [{"quota": 1}, {"quota": 5}], "times": [9, 2.0]}


@pytest.mark.parametrize("override", ["fleet.workers", "=3", "fleet..workers=3", ".=1", ""])
def test_an_override_without_a_key_or_a_value_is_refused_with_an_example(override):
    assert override_line({}, override).endswith("expected section.key=value, for example fleet.workers=3")


def test_an_override_through_something_that_is_no_table_is_refused():
    assert override_line({"a": {"b": 3}}, "a.b.c=1") == "a.b.c: a.b is 3, expected a table"


@pytest.mark.parametrize("index", ["2", "-1", "first"])
def test_an_override_of_an_element_that_is_not_there_says_which_are(index):
    message = override_line({"domains": [{}, {}]}, f"domains.{index}.quota=1")
    assert message == (
        f"domains.{index}.quota: domains is a list, got {msgspec.json.encode(index).decode()}, "
        "expected an index from 0 to 1"
    )


# Building


def test_a_right_tree_becomes_its_struct():
    tree = {"fleet": {"workers": 2, "price": 3, "color": "green"}, "domains": [{"name": "math"}]}
    assert build(tree, Settings) == Settings(
        fleet=Fleet(workers=2, price=3.0, color=Color.GREEN), domains=[Domain(name="math")]
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"fleet": {"worker": 1}}, "fleet.worker: unknown key; did you mean fleet.workers?"),
        ({"fleets": {}}, "fleets: unknown key; did you mean fleet?"),
        (
            {"domains": [{"name": "a"}, {"name": "b", "xyz": 1}]},
            "domains.1.xyz: unknown key; expected one of name, quota, quantiles",
        ),
        ({"fleet": {"line\nbreak": 1}}, 'fleet."line\\nbreak": unknown key'),
        (
            {"prices": {"us east": {"pric": 1}}},
            'prices."us east".pric: unknown key; did you mean prices."us east".price?',
        ),
        ({"noise": {"kind": "uniform", "value": 1}}, "noise.value: unknown key; expected one of kind, high"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one_or_all_of_them(tree, message):
    assert message in line_of(tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"fleet": {"workers": -1}}, "fleet.workers: got -1, expected an integer >= 0"),
        ({"fleet": {"workers": 1.5}}, "fleet.workers: got 1.5, expected an integer >= 0"),
        ({"fleet": {"workers": True}}, "fleet.workers: got true, expected an integer >= 0"),
        ({"fleet": {"price": 0}}, "fleet.price: got 0, expected a number > 0 and <= 100"),
        ({"fleet": {"spot": "True"}}, 'fleet.spot: got "True", expected true or false'),
        ({"fleet": {"limit": "x"}}, 'fleet.limit: got "x", expected a number >= 0'),
        ({"fleet": 3}, "fleet: got 3, expected a table"),
        ({"title": {}}, "title: got a table, expected a string"),
        ({"title": "a" * 9, "fleet": {"workers": "b" * 99}}, f'fleet.workers: got "{"b" * 56}..., expected'),
        ({"fleet": {"mode": "lasy"}}, 'fleet.mode: got "lasy", expected one of "eager", "lazy"; did you mean "lazy"?'),
        ({"fleet": {"color": "x"}}, 'fleet.color: got "x", expected one of "red", "green"'),
        ({"noise": {"kind": "normal"}}, 'noise.kind: got "normal", expected one of "uniform", "constant"'),
        ({"noise": {}}, 'noise.kind: missing, expected one of "uniform", "constant"'),
        ({"noise": {"kind": "uniform", "high": "x"}}, 'noise.high: got "x", expected a number'),
        ({"domains": [{}]}, "domains.0.name: missing, expected a string"),
        ({"domains": {}}, "domains: got a table, expected a list of at most 3 item(s)"),
        ({"domains": [{"name": "a"}] * 4}, "domains: got a list of 4, expected a list of at most 3 item(s)"),
        (
            {"domains": [{"name": "a", "quantiles": [[0, 1], [1, "x"]]}]},
            'domains.0.quantiles.1.1: got "x", expected a number',
        ),
        (
            {"domains": [{"name": "a", "quantiles": [[0]]}]},
            "domains.0.quantiles.0: got a list of 1, expected a list of 2",
        ),
        ({"prices": {"a": {}, "b": {"price": -1}}}, "prices.b.price: got -1, expected a number > 0 and <= 100"),
        ({"host": "A"}, 'host: got "A", expected a string that matches ^[a-z]*$'),
        ({"domains": [{"name": "a"}], "fleet": {"price": math.nan}}, "fleet.price: got nan, expected a finite number"),
        (
            {"domains": [{"name": "a", "quota": 1 << 64}]},
            "domains.0.quota: got an integer of 65 bits, expected one from -9223372036854775808 to 9223372036854775807",
        ),
        (
            {"domains": [{"name": "a"}], "fleet": {"workers": -(1 << 20_000)}},  # too long for Python to show
            "fleet.workers: got an integer of 20001 bits, expected one from -9223372036854775808 to "
            "9223372036854775807",
        ),
        ({"domains": [{"name": "a"}], "fleet": {"price": math.inf}}, "fleet.price: got inf, expected a finite number"),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_what_was_expected(tree, message):
    assert message in line_of(tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"title": "wrong"}, "title: 'wrong' is taken"),
        (
            {"domains": [{"name": "a"}, {"name": "b", "quota": 13}]},
            "domains.1.quota: 13 brings bad luck, expected any other number",
        ),
        ({"domains": [{"name": "nobody"}]}, "domains.0: nobody is not a domain"),
    ],
)
def test_a_structs_own_objection_gets_the_path_of_the_struct(tree, message):
    assert line_of(tree) == message


def test_the_source_is_named_at_the_end():
    assert line_of({"title": 3}, source="my.toml") == "title: got 3, expected a string (in my.toml)"


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        ([], "in my.toml"),
        (["fleet.spot=false", "fleet.work=3", "title=x"], "in my.toml"),
        (["fleet.workers=many"], "given as fleet.workers=many"),
        (["fleet.workers=3", "fleet.workers = -1", "fleet.spot=false"], "given as fleet.workers = -1"),
        (["fleet.workers=nan"], "given as fleet.workers=nan"),
        (["fleet={workers = -3}"], "given as fleet={workers = -3}"),
        (["flet.workers=3"], "given as flet.workers=3"),
        (["domains.0={name = 'a', quota = -1}"], "given as domains.0={name = 'a', quota = -1}"),
        (["domains.0.quota=-1"], "given as domains.0.quota=-1"),
    ],
)
def test_a_mistake_is_blamed_on_the_override_that_made_it_and_otherwise_on_the_file(overrides, origin):
    tree = {"fleet": {"workers": -3 if "my.toml" in origin else 3}, "domains": [{"name": "a"}]}
    with pytest.raises(ConfigError) as wrong:
        build(apply_overrides(tree, overrides), Settings, source="my.toml", overrides=overrides)
    assert str(wrong.value).endswith(f" ({origin})")


def test_a_bug_in_a_structs_check_is_not_blamed_on_the_person():
    with pytest.raises(msgspec.ValidationError):
        build({}, Buggy)


json_like = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.datetimes() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
sections = st.dictionaries(st.sampled_from([*Fleet.__struct_fields__, "kind", "name"]), json_like, max_size=4)
trees = st.dictionaries(
    st.sampled_from(Settings.__struct_fields__), json_like | sections | st.lists(sections, max_size=2), max_size=3
)


@given(trees)
def test_whatever_the_tree_it_is_built_or_refused_in_one_line(tree):
    try:
        build(tree, Settings)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


# Writing


numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=0)
fleets = st.builds(
    Fleet,
    workers=st.integers(min_value=0, max_value=2**60),
    price=st.floats(min_value=0, max_value=100, exclude_min=True),
    spot=st.booleans(),
    limit=st.none() | numbers,
    mode=st.sampled_from(["eager", "lazy"]),
    color=st.sampled_from(Color),
)
domains = st.builds(
    Domain,
    name=st.text().filter(lambda name: name != "nobody"),
    quota=st.integers(min_value=0, max_value=12),
    quantiles=st.lists(st.tuples(numbers, numbers), max_size=2),
)
configurations = st.builds(
    Settings,
    title=st.text().filter(lambda title: title != "wrong"),
    fleet=fleets,
    domains=st.lists(domains, max_size=3),
    prices=st.dictionaries(st.text(), fleets, max_size=2),
    noise=st.builds(Uniform, high=numbers) | st.builds(Constant, value=numbers),
)


@given(configurations)
def test_what_is_written_reads_back_as_the_same_configuration(configuration):
    assert build(tomllib.loads(dump_toml(configuration)), Settings) == configuration


def test_a_written_configuration_is_plain_to_read():
    configuration = Settings(
        title="a",
        fleet=Fleet(limit=math.inf),
        domains=[Domain(name="math", quantiles=[(0.5, 1.0)]), Domain(name="code")],
    )
    assert dump_toml(configuration) == (
        'title = "a"\nhost = ""\n'
        '\n[fleet]\nworkers = 0\nprice = 1.5\nspot = true\nlimit = inf\nmode = "eager"\ncolor = "red"\n'
        '\n[[domains]]\nname = "math"\nquota = 1\nquantiles = [[0.5, 1.0]]\n'
        '\n[[domains]]\nname = "code"\nquota = 1\nquantiles = []\n'
        "\n[prices]\n"
        '\n[noise]\nkind = "constant"\nvalue = 1.0\n'
    )


_TOGETHER = """
import sys, threading, time
from polyrl.config import build
from polyrl.config.load import load_toml
from polyrl.config.recipe import Recipe

sys.setswitchinterval(1e-5)
tree = load_toml(sys.argv[1])

def make(wait_s):
    time.sleep(wait_s)
    build(tree, Recipe)

threads = [threading.Thread(target=make, args=(number * 0.003,)) for number in range(8)]
for one in threads: one.start()
for one in threads: one.join()
"""


def test_a_type_that_several_threads_meet_first_ends_no_process(tmp_path):
    """msgspec crashes where two threads describe a type to themselves at once, as the rows of two runs did."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('name = "x"\n[model]\npath = "m"\n[train]\nsteps = 1\n[data]\nsource = "arithmetic"\n')
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _TOGETHER, str(recipe)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
