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
inner='eager'
execute='graphs'
check=('address',)
outputs='clone'
buckets=None
bucket_dim=None
rows='facts'
pad=()
max_padding=2.0
max_programs=32
min_segment_kernels=1
on_cut='accept'
on_eager_call='warn'
on_moved='recapture'
passes=()
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
    ("value", "want"),
    [
        ("off", ()),
        (["off"], ()),
        ("address", ("address",)),
        (["address"], ("address",)),
        (("address",), ("address",)),
        ("address, address", ("address",)),
        ("poison", ("poison",)),
        ("verify,address", ("address", "verify")),
        (["poison", "verify", "address"], ("address", "verify", "poison")),
    ],
)
def test_check_takes_text_or_sequence(value: object, want: tuple[str, ...]) -> None:
    assert Options.make({"check": value}, {}).check == want
    if isinstance(value, str):
        assert Options.make(None, {"TORCH_BCG_CHECK": value}).check == want


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("inner", "inductor", "inductor"),
        ("inner", {}, ()),
        ("inner", {"debug": False, "cpp.threads": 2}, (("cpp.threads", 2), ("debug", False))),
        ("inner", (("debug", False),), (("debug", False),)),
        ("inner", sorted, sorted),
        ("buckets", None, None),
        ("buckets", "none", None),
        ("buckets", "None", None),
        ("buckets", "ladder", "ladder"),
        ("buckets", [256, 64, 128], (64, 128, 256)),
        ("buckets", (64,), (64,)),
        ("buckets", range(8, 25, 8), (8, 16, 24)),
        ("buckets", "256, 64,128", (64, 128, 256)),
        ("buckets", "64", (64,)),
        ("bucket_dim", None, None),
        ("bucket_dim", "none", None),
        ("bucket_dim", ("input_ids", 1), ("input_ids", 1)),
        ("bucket_dim", ["x", -1], ("x", -1)),
        ("bucket_dim", "input_ids, 1", ("input_ids", 1)),
        ("bucket_dim", "batch['ids'],1", ("batch['ids']", 1)),
        ("rows", "facts", "facts"),
        ("rows", "independent", "independent"),
        ("pad", {}, ()),
        ("pad", {"slots": 0, "bias": float("-inf")}, (("bias", float("-inf")), ("slots", 0))),
        ("pad", (("slots", 0),), (("slots", 0),)),
        ("pad", "slots=0, seq_lens=1", (("seq_lens", 1), ("slots", 0))),
        ("pad", "scale=0.5", (("scale", 0.5),)),
        ("max_padding", 1, 1.0),
        ("max_padding", 1.5, 1.5),
        ("max_padding", "4", 4.0),
        ("max_padding", "inf", float("inf")),
    ],
)
def test_what_is_padded_and_how(name: str, value: object, want: object) -> None:
    made = Options.make({name: value}, {})
    assert getattr(made, name) == want
    assert type(getattr(made, name)) is type(want)
    assert hash(made) == hash(Options.make(made, {}))
    assert made == Options.make(made, {})
    if isinstance(value, str):
        assert Options.make(None, {f"TORCH_BCG_{name.upper()}": value}) == made


def test_integers_of_pad_stay_integers() -> None:
    made = Options.make(None, {"TORCH_BCG_PAD": "slots=0,scale=0.0"})
    assert [type(number) for _, number in made.pad] == [float, int]


def test_the_order_in_which_sizes_and_pads_are_given_is_no_difference() -> None:
    one = Options.make({"buckets": [8, 4], "pad": {"a": 0, "b": 1}}, {})
    assert one == Options.make({"buckets": (4, 8), "pad": {"b": 1, "a": 0}}, {})


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
        ("check", "verify,verfy"),
        ("buckets", "ladders"),
        ("buckets", ""),
        ("buckets", "64,,128"),
        ("buckets", "64,64"),
        ("buckets", []),
        ("buckets", [64, 64]),
        ("buckets", [0, 64]),
        ("buckets", [-4]),
        ("inner", "Inductor"),
        ("inner", None),
        ("inner", {"debug": []}),
        ("inner", ("debug",)),
        ("buckets", [64.0]),
        ("buckets", ["64"]),
        ("buckets", [True]),
        ("buckets", 64),
        ("buckets", {64: 1}),
        ("bucket_dim", "input_ids"),
        ("bucket_dim", ",1"),
        ("bucket_dim", "input_ids,one"),
        ("bucket_dim", ("input_ids",)),
        ("bucket_dim", ("input_ids", 1, 2)),
        ("bucket_dim", ("input_ids", True)),
        ("bucket_dim", ("input_ids", "1")),
        ("bucket_dim", (1, "input_ids")),
        ("bucket_dim", 1),
        ("rows", "all"),
        ("rows", None),
        ("pad", None),
        ("pad", "slots"),
        ("pad", "slots=x"),
        ("pad", "=0"),
        ("pad", "slots=0,slots=1"),
        ("pad", ""),
        ("pad", {"slots": "0"}),
        ("pad", {"slots": True}),
        ("pad", {"slots": None}),
        ("pad", {"scale": float("nan")}),
        ("pad", {0: 0}),
        ("pad", {"": 0}),
        ("pad", ["slots"]),
        ("pad", 0),
        ("max_padding", 0.5),
        ("max_padding", "nan"),
        ("max_padding", "double"),
        ("max_padding", True),
        ("max_padding", None),
    ],
)
def test_wrong_value(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({name: value}, {})
    assert caught.value.where == f"option {name!r}"
    assert caught.value.found == repr(value)


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
  expected: mark, inner, execute, check, outputs, buckets, bucket_dim, rows, pad,
    max_padding, max_programs, min_segment_kernels, on_cut, on_eager_call, on_moved,
    passes, dump
  found: max_program
  to do: did you mean max_programs?""",
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_fusion_sizes": 8},
            ["no setting 'max_fusion_sizes'", "did you mean max_fusion_size?"],
        ),
        (
            {"triton.cudagraphs": True},
            ["'triton.cudagraphs' cannot be given", "False, which it is"],
        ),
        ({"fallback_random": False}, ["'fallback_random' cannot be given", "True, which it is"]),
    ],
)
def test_wrong_settings_of_inductor(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({"inner": settings}, {})
    assert caught.value.where == "option 'inner'"
    assert all(word in str(caught.value) for word in words)


def test_message_of_an_unknown_variable() -> None:
    with pytest.raises(OptionError) as caught:
        Options.make(None, {"TORCH_BCG_EXECUT": "off"})
    assert_expected_inline(
        str(caught.value),
        """\
There is no variable 'TORCH_BCG_EXECUT'.
  where: the environment
  expected: TORCH_BCG_INNER, TORCH_BCG_EXECUTE, TORCH_BCG_CHECK, TORCH_BCG_OUTPUTS,
    TORCH_BCG_BUCKETS, TORCH_BCG_BUCKET_DIM, TORCH_BCG_ROWS, TORCH_BCG_PAD,
    TORCH_BCG_MAX_PADDING, TORCH_BCG_MAX_PROGRAMS, TORCH_BCG_MIN_SEGMENT_KERNELS,
    TORCH_BCG_ON_CUT, TORCH_BCG_ON_EAGER_CALL, TORCH_BCG_ON_MOVED, TORCH_BCG_DUMP
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


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("bucket", "buckets"),
        ("bucketdim", "bucket_dim"),
        ("row", "rows"),
        ("pads", "pad"),
        ("max_pading", "max_padding"),
    ],
)
def test_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({wrong: None}, {})
    assert caught.value.fix == f"did you mean {right}?"
    with pytest.raises(OptionError) as caught:
        Options.make(None, {f"TORCH_BCG_{wrong.upper()}": "1"})
    assert caught.value.fix == f"did you mean TORCH_BCG_{right.upper()}?"


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("buckets", "lader", "ladder"),
        ("rows", "dependent", "independent"),
        ("check", "verfy", "verify"),
    ],
)
def test_the_nearest_value(name: str, wrong: str, right: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({name: wrong}, {})
    assert caught.value.fix == f"did you mean {right}?"


def test_message_of_a_wrong_pad() -> None:
    with pytest.raises(OptionError) as caught:
        Options.make(None, {"TORCH_BCG_PAD": "slots:0"})
    assert_expected_inline(
        str(caught.value),
        """\
'slots:0' is no value of 'pad'.
  where: variable TORCH_BCG_PAD
  expected: a mapping from argument to number, as in {"slots": 0} or slots=0
  found: 'slots:0'
  to do: use one of those, or leave it out""",
    )


def test_message_of_wrong_buckets() -> None:
    with pytest.raises(OptionError) as caught:
        Options.make({"buckets": [64, 64]}, {})
    assert_expected_inline(
        str(caught.value),
        """\
[64, 64] is no value of 'buckets'.
  where: option 'buckets'
  expected: None, ladder, distinct integers from 1 up, as in [64, 128] or 64,128
  found: [64, 64]
  to do: use one of those, or leave it out""",
    )


def test_a_wrong_variable_is_refused_even_where_an_option_wins() -> None:
    with pytest.raises(OptionError, match="'sometimes' is no value of 'execute'"):
        Options.make({"execute": "graphs"}, {"TORCH_BCG_EXECUTE": "sometimes"})


def test_an_instance_made_by_hand_is_checked():
    with pytest.raises(OptionError, match="max_programs"):
        Options.make(Options(max_programs=-1), {})
    for check in (Options(), Options(check=())):
        assert Options.make(check, {}) == check
