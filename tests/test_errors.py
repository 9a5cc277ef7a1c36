"""Errors: all parts are there, on every class, under the public path."""

from __future__ import annotations

import inspect
import pickle

import pytest
from expecttest import assert_expected_inline

from torch_bcg import errors
from torch_bcg.errors import BCGError, BCGWarning, MarkError, OptionError

PARTS = {"where": "segment 3", "expected": "[4, 8]", "found": "[5, 8]", "fix": "pass fake="}
CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, BCGError)]


def test_message_reads_top_down() -> None:
    error = BCGError("my::route returned another shape.", **PARTS)
    assert_expected_inline(
        str(error),
        """\
my::route returned another shape.
  where: segment 3
  expected: [4, 8]
  found: [5, 8]
  to do: pass fake=""",
    )


def test_loggers_that_read_args_find_the_sentence() -> None:
    assert BCGError("It moved.", **PARTS).args == ("It moved.",)


def test_part_of_several_lines_stays_under_its_name() -> None:
    error = BCGError("It moved.", **{**PARTS, "found": "weight\nbias"})
    assert "  found: weight\n    bias\n  to do:" in str(error)


@pytest.mark.parametrize("missing", PARTS)
def test_no_part_can_be_left_out(missing: str) -> None:
    parts = {name: text for name, text in PARTS.items() if name != missing}
    with pytest.raises(TypeError, match=missing):
        BCGError("It moved.", **parts)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_class(cls: type[BCGError]) -> None:
    error = cls("It moved.", **PARTS)
    assert (error.what, error.where, error.expected) == ("It moved.", "segment 3", "[4, 8]")
    assert (error.found, error.fix) == ("[5, 8]", "pass fake=")
    assert isinstance(error, RuntimeError)
    assert cls.__module__ == "torch_bcg"
    assert "aised" in (cls.__doc__ or "") or cls is BCGError, "the docstring says when"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_survives_a_process_boundary(cls: type[BCGError], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_bcg." + cls.__name__, cls, raising=False)
    back = pickle.loads(pickle.dumps(cls("It moved.", **PARTS)))
    assert type(back) is cls
    assert str(back) == str(cls("It moved.", **PARTS))


def test_caught_under_the_builtin_name_too() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(MarkError, TypeError)
    assert issubclass(BCGWarning, UserWarning)
    assert BCGWarning.__module__ == "torch_bcg"


def test_all_names_everything() -> None:
    public = {c.__name__ for c in CLASSES} | {"BCGWarning"}
    assert set(errors.__all__) == public
