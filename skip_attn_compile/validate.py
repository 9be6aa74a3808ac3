"""Checks of what users write. Every mistake is a ValueError that names the field, the contract and the value."""

import dataclasses
import difflib
import logging
import math
import numbers
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)


class Checked:
    """Unknown keywords and surplus arguments become a ValueError that names the field, like every other mistake in a config."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
        positional = [f for f in fields if not f.kw_only]
        if len(args) > len(positional):
            raise ValueError(f"{cls.__name__} takes {len(positional)} positional arguments, got {len(args)}; write them as keywords")
        for name in kwargs:
            if name not in {f.name for f in fields}:
                close = difflib.get_close_matches(name, [f.name for f in fields], 1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(f.name for f in fields)}"
                raise ValueError(f"{cls.__name__} has no field {name!r}; {hint}")
        return super().__new__(cls)


def check_threshold(value: Any, name: str = "threshold") -> float | None:
    """`value` as a float, None for not given; ValueError unless it is a finite number >= 0."""
    if value is None:
        return None
    if not is_finite(value) or value < 0:
        raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
    if value > 1:
        log.warning("%s=%g acts as 1: a weight relative to a row's maximum cannot exceed 1; useful values lie in (0, 1)", name, value)
    return float(value)


def check_target_sparsity(value: Any, name: str = "target_sparsity") -> float | None:
    """`value` as a float, None for not given; ValueError unless it is a number in [0, 1]."""
    if value is None:
        return None
    if not is_finite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], the share of tiles to skip, got {value!r}")
    return float(value)


def check_cutoff(name: str, value: Any) -> float:
    """`value` as a float; ValueError unless it is a noise level in [0, 1]."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a noise level in [0, 1], 1 = pure noise and 0 = no gate, got {value!r}")
    return float(value)


def is_finite(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False


def check_ints(name: str, values: Any, length: int | None = None) -> tuple[int, ...]:
    numbers_given = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if numbers_given is None or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in numbers_given):
        raise ValueError(f"{name} must be integers > 0, got {values!r}")
    if length is not None and len(numbers_given) != length:
        raise ValueError(f"{name} must be {length} integers > 0, got {values!r}")
    return numbers_given


def check_range(name: str, values: Any) -> tuple[float, float]:
    given = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else ()
    if len(given) != 2 or not all(is_finite(v) for v in given) or not 0 <= given[0] <= given[1] <= 1:
        raise ValueError(f"{name} must be two numbers, 0 <= smallest <= largest <= 1, got {values!r}")
    return float(given[0]), float(given[1])


def check_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ValueError(f"{name} must be a sequence of patterns, got the string {patterns!r}; write {name}=({patterns!r},)")
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{name} must be a sequence of patterns, got {patterns!r}")
    patterns = tuple(patterns)
    for pattern in patterns:
        check_pattern(name, pattern)
    return patterns


def check_pattern(name: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern or pattern != pattern.strip():
        raise ValueError(f"{name} must be a non-empty fnmatch pattern without outer spaces, got {pattern!r}")
    closed = pattern
    while (start := closed.find("[")) >= 0:
        # fnmatch: a "]" right after "[" or "[!" is a member of the class
        end = closed.find("]", start + (3 if closed[start + 1 : start + 2] == "!" else 2))
        if end < 0:
            raise ValueError(f"{name} has an unclosed '[' and could never match, got {pattern!r}; write '[[]' for a literal '['")
        closed = closed[end + 1 :]
