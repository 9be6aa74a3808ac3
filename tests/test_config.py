"""A config cannot be wrong: every mistake is a ValueError that names the field and the value."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from skip_attn_compile import Rule, SkipConfig

BAD_THRESHOLDS = [
    *(float("nan"), float("inf"), float("-inf"), -1.5, -1e-9, "0.1", "", True, False, [0.1], (0.1,), 1j, {}, ...),
    *(torch.tensor(0.1), torch.tensor([0.1]), np.float32("nan"), np.float64("inf"), np.bool_(True), np.array([0.1, 0.2])),
]
BAD_PATTERNS = ["", " ", "blocks.0 ", "\tblocks", "blocks.[0", "[", "[!", "[!]", "[]", "a[b]c[d", None, 0, b"blocks.*", ("blocks",), 1.5]
GOOD_PATTERNS = ["*", "blocks.[0-3].attn1", "blocks.?.attn1", "[[]", "[]]", "[!]]", "a]b", "[!a]*", "blocks.0"]


def _id(value: object) -> str:
    return repr(value)[:30]


@pytest.mark.parametrize("value", BAD_THRESHOLDS, ids=_id)
def test_bad_threshold_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="threshold must be finite and >= 0, got ") as config_error:
        SkipConfig(threshold=value)
    assert repr(value) in str(config_error.value)
    with pytest.raises(ValueError, match="threshold must be finite and >= 0, got "):
        Rule("blocks.*", threshold=value)


@pytest.mark.parametrize("value", [0, 1, 0.25, np.float32(0.25), np.float64(0.25), np.int64(1), Fraction(1, 4), 1e-30, 3.0], ids=_id)
def test_real_numbers_become_floats(value: object) -> None:
    for made in (SkipConfig(threshold=value), Rule("*", threshold=value)):
        assert type(made.threshold) is float
        assert made.threshold == float(value)


def test_negative_zero_is_zero() -> None:
    assert SkipConfig(threshold=-0.0).threshold == 0.0


def test_huge_integer_threshold_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="threshold"):
        SkipConfig(threshold=10**400)


def test_threshold_above_one_warns(caplog: pytest.LogCaptureFixture) -> None:
    SkipConfig(threshold=1.0)
    assert not caplog.records
    SkipConfig(threshold=1.5)
    assert "threshold=1.5 acts as 1" in caplog.text


@pytest.mark.parametrize("field", ["include", "ignore"])
@pytest.mark.parametrize("pattern", BAD_PATTERNS, ids=_id)
def test_malformed_pattern_is_named(field: str, pattern: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        SkipConfig(threshold=0.1, **{field: ("blocks.*", pattern)})
    assert repr(pattern) in str(error.value)


@pytest.mark.parametrize("pattern", BAD_PATTERNS, ids=_id)
def test_malformed_rule_pattern_is_named(pattern: object) -> None:
    with pytest.raises(ValueError, match="pattern") as error:
        Rule(pattern, threshold=0.1)
    assert repr(pattern) in str(error.value)


@pytest.mark.parametrize("pattern", GOOD_PATTERNS)
def test_wellformed_patterns_pass(pattern: str) -> None:
    assert SkipConfig(threshold=0.1, include=[pattern], ignore=[pattern]).ignore == (pattern,)
    assert Rule(pattern, dense=True).pattern == pattern


@pytest.mark.parametrize("field", ["include", "ignore", "rules"])
@pytest.mark.parametrize("value", ["blocks.*", "", None, 3, 0.5, True], ids=_id)
def test_a_value_that_is_no_sequence_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as error:
        SkipConfig(threshold=0.1, **{field: value})
    assert repr(value) in str(error.value)


def test_string_for_tuple_says_how_to_write_it() -> None:
    with pytest.raises(ValueError, match=r"write ignore=\('blocks.0.\*',\)"):
        SkipConfig(threshold=0.1, ignore="blocks.0.*")


def test_empty_include_is_an_error() -> None:
    with pytest.raises(ValueError, match="include must hold at least one pattern"):
        SkipConfig(threshold=0.1, include=())


@pytest.mark.parametrize(
    "rules", [["blocks.*"], [("blocks.*", 0.1)], [None], [{"pattern": "*", "threshold": 0.1}], [Rule], Rule("*", dense=True)], ids=_id
)
def test_wrong_rules_are_named(rules: object) -> None:
    with pytest.raises(ValueError, match="rules must"):
        SkipConfig(threshold=0.1, rules=rules)


@pytest.mark.parametrize("value", [-1, 1.0, "1024", None, True, float("nan"), torch.tensor(3)], ids=_id)
def test_bad_min_kv_len_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="min_kv_len must be an integer >= 0, got ") as error:
        SkipConfig(threshold=0.1, min_kv_len=value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("field", ["tile_order", "implementation"])
@pytest.mark.parametrize("value", ["descending", "Auto", "", None, 0, ["auto"], {}, torch.zeros(2)], ids=_id)
def test_bad_choice_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be one of .*, got ") as error:
        SkipConfig(threshold=0.1, **{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("arguments", [{"threshold": 0.1, "dense": True}, {}, {"dense": False}, {"threshold": None}], ids=_id)
def test_rule_sets_one_thing(arguments: dict) -> None:
    with pytest.raises(ValueError, match="must set one of threshold, .*dense"):
        Rule("blocks.*", **arguments)


@pytest.mark.parametrize("dense", [1, 0, "yes", None, np.bool_(True)], ids=_id)
def test_dense_must_be_bool(dense: object) -> None:
    with pytest.raises(ValueError, match="dense must be True or False, got"):
        Rule("blocks.*", dense=dense)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("treshold", "threshold"), ("ignored", "ignore"), ("min_kv_length", "min_kv_len"), ("tile_orders", "tile_order")],
)
def test_unknown_keyword_suggests_the_field(misspelt: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"SkipConfig has no field '{misspelt}'; did you mean {meant}\\?"):
        SkipConfig(**{"threshold": 0.1, misspelt: 1})


def test_unknown_keyword_without_a_near_miss_lists_the_fields() -> None:
    with pytest.raises(ValueError, match="Rule has no field 'xyz'; it has pattern, threshold, .*dense"):
        Rule("*", xyz=1)


def test_positional_arguments_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="SkipConfig takes 0 positional arguments, got 1; write them as keywords"):
        SkipConfig(0.1)
    with pytest.raises(ValueError, match="Rule takes 1 positional arguments?, got 2"):
        Rule("*", 0.1)


def test_rule_without_pattern_is_an_error() -> None:
    with pytest.raises(ValueError, match="pattern must be a non-empty fnmatch pattern"):
        Rule(threshold=0.1)


@pytest.mark.parametrize("arguments", [{}, {"threshold": None}, {"rules": [Rule("*", dense=True)]}], ids=_id)
def test_no_operating_point_names_threshold(arguments: dict) -> None:
    with pytest.raises(ValueError, match="no operating point: set threshold"):
        SkipConfig(**arguments)


def test_a_rule_is_an_operating_point() -> None:
    assert SkipConfig(rules=[Rule("blocks.*", threshold=0.1)]).threshold is None


def test_frozen() -> None:
    for made, field in ((SkipConfig(threshold=0.1), "threshold"), (Rule("*", threshold=0.1), "dense")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field, 0.2)


def test_a_list_given_is_not_shared() -> None:
    patterns = ["blocks.*"]
    config = SkipConfig(threshold=0.1, include=patterns)
    patterns.append("more")
    assert config.include == ("blocks.*",)


def test_a_generator_is_read_once() -> None:
    config = SkipConfig(threshold=0.1, ignore=(f"blocks.{i}" for i in range(2)), rules=(r for r in [Rule("*", threshold=0.2)]))
    assert (config.ignore, config.rules) == (("blocks.0", "blocks.1"), (Rule("*", threshold=0.2),))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c)), dataclasses.replace])
def test_copies_are_equal_and_hash_alike(duplicate) -> None:
    config = SkipConfig(threshold=0.1, include=["a.*"], ignore=["a.b"], rules=[Rule("a.c", threshold=0.2), Rule("a.d", dense=True)])
    other = duplicate(config)
    assert other == config
    assert hash(other) == hash(config)
    assert other != dataclasses.replace(config, min_kv_len=7)


def test_replace_validates() -> None:
    with pytest.raises(ValueError, match="threshold must be finite and >= 0, got -1"):
        dataclasses.replace(SkipConfig(threshold=0.1), threshold=-1)
    with pytest.raises(ValueError, match="did you mean"):
        dataclasses.replace(SkipConfig(threshold=0.1), treshold=0.2)
