"""JSON from outside: read within limits, and looked at one value at a time, so that every complaint names file, path and value."""

import json
import math
import numbers
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skip_attn_compile.validate import check_pattern

TOP = "the config"
_UNNAMED = (TOP, "sparse_attention_config")  # left out of the paths of their members, as users write these
MAX_BYTES = 16 * 2**20  # real ones have a few KiB


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text states the file (or "dict"), the JSON path and the value."""


def load(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise CheckpointError(f"{path}: {key} must stand once in its object, got {show(table[key])} and {show(value)}")
            table[key] = value
        return table

    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: not a file; what a model hub holds must be downloaded first")
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise CheckpointError(f"{path}: a config must have at most {max_bytes} bytes, got {os.path.getsize(path)}")
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{path}: nested too deeply to be read") from error
    except (OSError, ValueError) as error:  # also UnicodeDecodeError, JSONDecodeError
        raise CheckpointError(f"{path}: cannot be read as JSON in UTF-8: {error}") from error


# From JSON values to a record.


_NOTHING = object()


class At:
    """A JSON value and where it stands; a null counts as absent."""

    def __init__(self, where: str, path: str, value: Any) -> None:
        self.where, self.path, self.value = where, path, value

    def fails(self, contract: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.path} must be {contract}, got {show(self.value)}")

    def member(self, key: Any) -> "At":
        if not isinstance(self.value, Mapping):
            raise self.fails("an object")
        return At(self.where, str(key) if self.path in _UNNAMED else f"{self.path}.{key}", self.value.get(key, _NOTHING))

    def get(self, key: str) -> "At | None":
        member = self.member(key)
        return None if member.value is None or member.value is _NOTHING else member

    def members(self) -> "list[At]":
        if not isinstance(self.value, Mapping):
            raise self.fails("an object")
        return [self.member(key) for key in self.value]

    def items(self) -> "list[At]":
        if not isinstance(self.value, list | tuple):
            raise self.fails("a list of strings")
        return [At(self.where, f"{self.path}[{i}]", value) for i, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fails("a string")
        return self.value

    def patterns(self) -> list[str]:
        items = self.items()
        for item in items:
            try:
                check_pattern(item.path, item.value)
            except ValueError as error:
                raise CheckpointError(f"{self.where}: {error}") from error
        return [item.value for item in items]

    def number(self, contract: str, holds: Callable[[float], bool] = lambda x: True, then: Callable[[float], float] = float) -> float:
        try:
            number = float(self.value) if isinstance(self.value, numbers.Real) and not isinstance(self.value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not holds(number):
            raise self.fails(contract)
        return then(number)

    def count(self) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise self.fails("an integer >= 0")
        return self.value


def show(value: Any) -> str:
    """`value` as JSON, short."""
    if value is _NOTHING:
        return "nothing"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # no JSON, a cycle, an integer beyond Python's limit, too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else text[:200] + "..."
