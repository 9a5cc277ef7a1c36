"""Frozen dataclasses <-> JSON, with nothing known about plans but the classes that are given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


def to_json(x: object) -> str:
    """Text of a dataclass of dataclasses, tuples, texts and numbers; each says its type."""
    return json.dumps(_pack(x), indent=1)


def from_json(text: str, types: Mapping[str, type]) -> object:
    """What `to_json` wrote, equal to what it was given.

    Args:
        text: JSON.
        types: every dataclass that occurs, by its name.
    """
    return _unpack(json.loads(text), types)


def _pack(x: Any) -> Any:
    if dataclasses.is_dataclass(x):
        fields = {f.name: _pack(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"type": type(x).__name__, **fields}
    return [_pack(i) for i in x] if isinstance(x, tuple) else x


def _unpack(x: Any, types: Mapping[str, type]) -> Any:
    if isinstance(x, dict):
        fields = {k: _unpack(v, types) for k, v in x.items() if k != "type"}
        return types[x["type"]](**fields)
    return tuple(_unpack(i, types) for i in x) if isinstance(x, list) else x
