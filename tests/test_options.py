"""Options: who wins, what is refused, and that every message names source, choice and nearest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from torch_bcg.errors import OptionError
from torch_bcg.options import Options


def test_defaults() -> None:
    assert_expected_inline(
        "\n".join(f"{k}={v!r}" for k, v in dataclasses.asdict(Options.make(None, {})).items()),
        """\
mark=()
execute='graphs'
check=('address',)
outputs='clone'
max_programs=32
min_segment_kernels=1
on_cut='accept'
on_eager_call='warn'
on_moved='recapture'
dump=None""",
    )
    assert Options.make({}, {}) == Options()


def test_every_field_says_what_it_does() -> None:
    assert all(f.metadata["help"] for f in dataclasses.fields(Options))


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().outputs = "alias"  # type: ignore[misc]


def test_option_wins_over_variable_wins_over_default() -> None:
    environ = {"TORCH_BCG_OUTPUTS": "alias", "TORCH_BCG_MAX_PROGRAMS": "4", "HOME": "/"}
    made = Options.make({"max_programs": 8}, environ)
    assert (made.outputs, made.max_programs, made.on_cut) == ("alias", 8, "accept")


def test_execute_off_in_the_environment_always_wins() -> None:
    environ = {"TORCH_BCG_EXECUTE": "off"}
    assert Options.make({"execute": "graphs"}, environ).execute == "off"
    assert Options.make(Options(), environ).execute == "off"
    assert Options.make({"execute": "graphs"}, {"TORCH_BCG_EXECUTE": "segments"}) == Options()


def test_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BCG_OUTPUTS", "alias")
    assert Options.make().outputs == "alias"
    monkeypatch.delenv("TORCH_BCG_OUTPUTS")
    assert Options.make().outputs == "clone"


def test_an_options_object_is_taken_as_it_is() -> None:
    chosen = Options(outputs="alias")
    assert Options.make(chosen, {"TORCH_BCG_OUTPUTS": "clone"}) == chosen


def test_the_caller_keeps_its_dict() -> None:
    given = {"max_programs": 8}
    Options.make(given, {})
    assert given == {"max_programs": 8}


@pytest.mark.parametrize(
    ("execute", "unrecorded"),
    [
        ("graphs", []),
        ("segments", [0, 1, 2, 3, 4]),
        ("off", [0, 1, 2, 3, 4]),
        ("segments:3", [3]),
        ("segments:1-3", [1, 2, 3]),
        ("segments:0", [0]),
    ],
)
def test_execute_parsed(execute: str, unrecorded: list[int]) -> None:
    made = Options.make({"execute": execute}, {})
    assert [i for i in range(5) if made.unrecorded(i)] == unrecorded


@pytest.mark.parametrize(
    "value", ["off", ["off"], "address", ["address"], ("address",), "address, address"]
)
def test_check_takes_text_or_sequence(value: object) -> None:
    want = () if "off" in value else ("address",)
    assert Options.make({"check": value}, {}).check == want


def test_marks_become_a_tuple() -> None:
    assert Options.make({"mark": (name for name in ["my::op", "my::other"])}, {}).mark == (
        "my::op",
        "my::other",
    )


def test_dump_takes_a_path(tmp_path: Path) -> None:
    assert Options.make({"dump": tmp_path}, {}).dump == str(tmp_path)
    assert Options.make(None, {"TORCH_BCG_DUMP": "/dumps"}).dump == "/dumps"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("execute", "graph"),
        ("execute", "segments:"),
        ("execute", "segments:5-3"),
        ("execute", "segments:-1"),
        ("execute", True),
        ("check", "address,of"),
        ("check", "off,address"),
        ("check", ()),
        ("check", True),
        ("check", {"address": 1}),
        ("outputs", "copy"),
        ("outputs", ["clone"]),
        ("max_programs", 0),
        ("max_programs", True),
        ("max_programs", 2.0),
        ("max_programs", "many"),
        ("min_segment_kernels", -1),
        ("on_cut", None),
        ("on_eager_call", "ignore"),
        ("on_moved", "warn"),
        ("mark", "my::op"),
        ("mark", 7),
        ("dump", True),
        ("dump", ""),
    ],
)
def test_wrong_value(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({name: value}, {})
    assert caught.value.where == f"option {name!r}"
    assert caught.value.found == repr(value)


@pytest.mark.parametrize("later", ["inner", "buckets", "rows", "pad", "max_padding", "passes"])
def test_what_does_not_exist_yet_is_unknown(later: str) -> None:
    with pytest.raises(OptionError, match=f"There is no option '{later}'"):
        Options.make({later: None}, {})


def test_marks_are_not_read_from_the_environment() -> None:
    with pytest.raises(OptionError, match="no variable 'TORCH_BCG_MARK'"):
        Options.make(None, {"TORCH_BCG_MARK": "my::op"})


def test_message_of_an_unknown_option() -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({"max_program": 4}, {})
    assert_expected_inline(
        str(caught.value),
        """\
There is no option 'max_program'.
  where: torch.compile(..., options={...})
  expected: mark, execute, check, outputs, max_programs, min_segment_kernels, on_cut,
    on_eager_call, on_moved, dump
  found: max_program
  to do: did you mean max_programs?""",
    )


def test_message_of_an_unknown_variable() -> None:
    with pytest.raises(OptionError) as caught:
        Options.make(None, {"TORCH_BCG_EXECUT": "off"})
    assert_expected_inline(
        str(caught.value),
        """\
There is no variable 'TORCH_BCG_EXECUT'.
  where: the environment
  expected: TORCH_BCG_EXECUTE, TORCH_BCG_CHECK, TORCH_BCG_OUTPUTS, TORCH_BCG_MAX_PROGRAMS,
    TORCH_BCG_MIN_SEGMENT_KERNELS, TORCH_BCG_ON_CUT, TORCH_BCG_ON_EAGER_CALL,
    TORCH_BCG_ON_MOVED, TORCH_BCG_DUMP
  found: TORCH_BCG_EXECUT
  to do: did you mean TORCH_BCG_EXECUTE?""",
    )


def test_message_of_a_wrong_value() -> None:
    with pytest.raises(OptionError) as caught:
        Options.make(None, {"TORCH_BCG_ON_MOVED": "recaptured"})
    assert_expected_inline(
        str(caught.value),
        """\
'recaptured' is no value of 'on_moved'.
  where: variable TORCH_BCG_ON_MOVED
  expected: recapture, error
  found: 'recaptured'
  to do: did you mean recapture?""",
    )


def test_a_wrong_variable_is_refused_even_where_an_option_wins() -> None:
    with pytest.raises(OptionError, match="'sometimes' is no value of 'execute'"):
        Options.make({"execute": "graphs"}, {"TORCH_BCG_EXECUTE": "sometimes"})


def test_an_instance_made_by_hand_is_checked():
    with pytest.raises(OptionError, match="max_programs"):
        Options.make(Options(max_programs=-1), {})
    for check in (Options(), Options(check=())):
        assert Options.make(check, {}) == check
