"""What the user asks for: frozen, validated at construction, and therefore never wrong later."""

import dataclasses
import difflib
import logging
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

TILE_ORDERS = ("ascending", "own_first")
IMPLEMENTATIONS = ("auto", "reference", "sm90")


class _Checked:
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


@dataclass(frozen=True)
class Rule(_Checked):
    """What to do in the modules that a pattern selects. Later rules win over earlier ones.

    pattern: fnmatch pattern on a module's name, `blocks.0.attn1` or `transformer.blocks.0.attn1`.
    threshold: lambda there, finite and >= 0; or
    dense: True leaves attention as it is there.
    """

    pattern: str = ""
    threshold: float | None = dataclasses.field(default=None, kw_only=True)
    dense: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_pattern("pattern", self.pattern)
        if not isinstance(self.dense, bool):
            raise ValueError(f"dense must be True or False, got {self.dense!r}")
        object.__setattr__(self, "threshold", check_threshold(self.threshold))
        if (self.threshold is not None) == self.dense:
            given = f"threshold={self.threshold}, dense={self.dense}"
            raise ValueError(f"Rule({self.pattern!r}) must set either threshold or dense=True, got {given}")


@dataclass(frozen=True, kw_only=True)
class SkipConfig(_Checked):
    """Which attention calls skip, and how much.

    threshold: lambda, finite and >= 0; a tile of 128 keys is skipped for 64 query rows when no key in it can weigh more than lambda
        relative to a row's heaviest key so far. 0 skips nothing, useful values lie in (0, 1), and values above 1 act as 1.
    include: fnmatch patterns; modules that match none stay as they are.
    ignore: fnmatch patterns; modules that match one stay as they are, whatever include and rules say.
    rules: `Rule`s in order; the last that matches a module decides there.
    min_kv_len: calls with fewer keys stay dense (keys, not bytes); it compares with the key length of each call.
    tile_order: "ascending", or "own_first": each row group starts at the keys of its own position, which skips more tiles at equal lambda.
    implementation: "auto", or the name of one that must be used: "reference", "sm90".
    """

    threshold: float | None = None
    include: tuple[str, ...] = ("*",)
    ignore: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    min_kv_len: int = 1024
    tile_order: str = "ascending"
    implementation: str = "auto"

    def __post_init__(self) -> None:
        set_field = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_field("threshold", check_threshold(self.threshold))
        set_field("include", _check_patterns("include", self.include))
        set_field("ignore", _check_patterns("ignore", self.ignore))
        set_field("rules", _check_rules(self.rules))
        if not self.include:
            raise ValueError('include must hold at least one pattern, got (); write include=("*",) for every module')
        if isinstance(self.min_kv_len, bool) or not isinstance(self.min_kv_len, int) or self.min_kv_len < 0:
            raise ValueError(f"min_kv_len must be an integer >= 0, got {self.min_kv_len!r}")
        for name, allowed in (("tile_order", TILE_ORDERS), ("implementation", IMPLEMENTATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.threshold is None and all(rule.threshold is None for rule in self.rules):
            raise ValueError("no operating point: set threshold, for example SkipConfig(threshold=0.1)")


def check_threshold(value: Any, name: str = "threshold") -> float | None:
    """`value` as a float, None for not given; ValueError unless it is a finite number >= 0."""
    if value is None:
        return None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
    if value > 1:
        log.warning("%s=%g acts as 1: a weight relative to a row's maximum cannot exceed 1; useful values lie in (0, 1)", name, value)
    return float(value)


def _check_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ValueError(f"{name} must be a sequence of patterns, got the string {patterns!r}; write {name}=({patterns!r},)")
    if not isinstance(patterns, Iterable):
        raise ValueError(f"{name} must be a sequence of patterns, got {patterns!r}")
    patterns = tuple(patterns)
    for pattern in patterns:
        _check_pattern(name, pattern)
    return patterns


def _check_pattern(name: str, pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern or pattern != pattern.strip():
        raise ValueError(f"{name} must be a non-empty fnmatch pattern without outer spaces, got {pattern!r}")
    closed = pattern
    while (start := closed.find("[")) >= 0:
        # fnmatch: a "]" right after "[" or "[!" is a member of the class
        end = closed.find("]", start + (3 if closed[start + 1 : start + 2] == "!" else 2))
        if end < 0:
            raise ValueError(f"{name} has an unclosed '[' and could never match, got {pattern!r}; write '[[]' for a literal '['")
        closed = closed[end + 1 :]


def _check_rules(rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, Rule):
        raise ValueError(f"rules must be a sequence of Rule, got one Rule; write rules=({rules!r},)")
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(f"rules must be a sequence of Rule, got {rules!r}")
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"rules must hold Rule objects, got {rule!r}")
    return rules
