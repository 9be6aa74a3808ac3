"""Every variant of sparse_attention_config gives its curve; every mistake is a CheckpointError that says where it stands."""

import copy
import dataclasses
import json
import logging
import math
import os
import pathlib
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skip_attn_compile import Calibration, Rule, SkipConfig
from skip_attn_compile.checkpoint import read
from skip_attn_compile.checkpoint_format import CheckpointSparsity, write
from skip_attn_compile.json_values import MAX_BYTES, CheckpointError

A, B = 2822.6209952221557, 4.388250623520793
FORMULA = "a * exp(b * target_sparsity)"
V4_FORMULA = "1 - exp(-a * (S/(1-S))**b / L**c)"
MODELOPT = {"tile": (128, 128), "tile_order": "ascending"}

V1 = {
    "config_groups": {
        "group_0": {
            "algorithm": "skip_softmax",
            "targets": ["WanAttention"],
            "ignore": ["blocks.0.attn1", "blocks.0.attn2"],
            "threshold_scale_factor": {"formula": FORMULA, "coefficients": {"a": A, "b": B}},
            "target_sparsity": 0.7,
            "disabled_until_timestep": 0.93,
        }
    },
    "producer": {"name": "modelopt", "version": "0.45.0"},
}
V1_RECORD = CheckpointSparsity(
    calibration=Calibration(A, B, **MODELOPT),
    ignore=("blocks.0.attn1", "blocks.0.attn2"),
    target_sparsity=0.7,
    disabled_until_timestep=0.93,
    targets=("WanAttention",),
    producer=("modelopt", "0.45.0"),
)
V2 = {
    "config_groups": {
        "group_0": {"algorithm": "sparse_softmax", "targets": ["LlamaAttention"], "sparsity_n": 2, "sparsity_m": 4, "dense_sink_tokens": 0},
        "group_1": {
            "algorithm": "skip_softmax",
            "targets": ["LlamaAttention"],
            "ignore": ["layers.0.self_attn"],
            "initial_disabled_steps": 4,
            "threshold_scale_factor": {"formula": FORMULA, "prefill": {"a": 7.93, "b": 8.61}, "decode": {"a": 0.12, "b": 9.85}},
            "target_sparsity": {"prefill": 0.5, "decode": 0.25},
        },
    },
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
V2_RECORD = CheckpointSparsity(
    calibration=Calibration(7.93, 8.61, **MODELOPT),
    ignore=("layers.0.self_attn",),
    target_sparsity=0.5,
    initial_disabled_steps=4,
    targets=("LlamaAttention",),
    producer=("modelopt", "0.47.0"),
)
V3 = {
    "sparse_algo": "softmax_skip",
    "ignore": ["blocks.39.*"],
    "threshold_scale_factor": {"formula": "a*exp(b*target_sparsity)", "log_a": math.log(50.0), "b": 2},
    "target_sparsity": 0.25,
}
V3_RECORD = CheckpointSparsity(calibration=Calibration(math.exp(math.log(50.0)), 2.0), ignore=("blocks.39.*",), target_sparsity=0.25)
CURVE = {"algorithm": "skip_softmax", "threshold_scale_factor": {"coefficients": {"a": 3, "b": -1}}, "target_sparsity": 0}
CURVE_RECORD = CheckpointSparsity(calibration=Calibration(3.0, -1.0), target_sparsity=0.0)

GROUP = "config_groups.group_0"
FACTOR = f"{GROUP}.threshold_scale_factor"


def edited(config, path, value=None):
    """A copy of `config` with the member at the dotted `path` set, or deleted where no value is given."""
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    at = config
    for key in parents:
        at = at[key]
    if value is DELETED:
        del at[last]
    else:
        at[last] = value
    return config


DELETED = object()


def as_file(config, folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps({"_class_name": "WanTransformer3DModel", "sparse_attention_config": config})
    (folder / "config.json").write_text(text)
    return folder


VARIANTS = {
    "V1": (V1, V1_RECORD),
    "V2": (V2, V2_RECORD),
    "V3": (V3, V3_RECORD),
    "V2 groups in the other order": ({"config_groups": dict(reversed(V2["config_groups"].items())), "producer": V2["producer"]}, V2_RECORD),
    "any group name": ({"config_groups": {"low noise": CURVE}}, CURVE_RECORD),
    "V3 flat, newer names": (CURVE, CURVE_RECORD),
    "V3 coefficients nested": (
        {"sparse_algo": "softmax_skip", "threshold_scale_factor": {"formula": FORMULA, "coefficients": {"a": 3, "b": -1}}},
        CheckpointSparsity(calibration=Calibration(3.0, -1.0)),
    ),
    "V3 a inline": (
        {"sparse_algo": "softmax_skip", "threshold_scale_factor": {"formula": FORMULA, "a": 3, "b": -1}, "target_sparsity": 0.0},
        CURVE_RECORD,
    ),
    "flat without any algorithm": (
        {"threshold_scale_factor": {"a": 3, "b": -1}, "disabled_layers": ["x.*"]},
        CheckpointSparsity(Calibration(3.0, -1.0), ("x.*",)),
    ),
    "ModelOpt 0.37: the group has the algorithm, the top level has the curve": (
        {
            "config_groups": {"group_0": {"sparse_algo": "softmax_skip", "targets": ["LlamaAttention"]}},
            "threshold_scale_factor": {"formula": FORMULA, "prefill": {"a": 7.93, "b": 8.61}, "decode": {"a": 0.12, "b": 9.85}},
            "producer": {"name": "modelopt", "version": "0.37.0"},
        },
        CheckpointSparsity(Calibration(7.93, 8.61, **MODELOPT), targets=("LlamaAttention",), producer=("modelopt", "0.37.0")),
    ),
    "missing formula": (edited(V1, f"{FACTOR}.formula", DELETED), V1_RECORD),
    "null formula": (edited(V1, f"{FACTOR}.formula", None), V1_RECORD),
    "formula without spaces": (edited(V1, f"{FACTOR}.formula", "a*exp(b*target_sparsity)"), V1_RECORD),
    "formula with many spaces": (edited(V1, f"{FACTOR}.formula", "  a  *  exp ( b * target_sparsity )\n"), V1_RECORD),
    "the same curve twice": (edited(V1, f"{FACTOR}.prefill", {"a": A, "b": B}), V1_RECORD),
    "a beside log_a": (edited(V1, f"{FACTOR}.coefficients.log_a", math.log(A)), V1_RECORD),
    "b = 0": (edited(V1, f"{FACTOR}.coefficients.b", 0), dataclasses.replace(V1_RECORD, calibration=Calibration(A, 0.0, **MODELOPT))),
    "b < 0": (edited(V1, f"{FACTOR}.coefficients.b", -3), dataclasses.replace(V1_RECORD, calibration=Calibration(A, -3.0, **MODELOPT))),
    "target 1": (edited(V1, f"{GROUP}.target_sparsity", 1), dataclasses.replace(V1_RECORD, target_sparsity=1.0)),
    "null target": (edited(V1, f"{GROUP}.target_sparsity", None), dataclasses.replace(V1_RECORD, target_sparsity=None)),
    "target for decode only": (
        edited(V1, f"{GROUP}.target_sparsity", {"decode": 0.5}),
        dataclasses.replace(V1_RECORD, target_sparsity=None),
    ),
    "gate by phase": (
        edited(V1, f"{GROUP}.disabled_until_timestep", {"prefill": 0.5}),
        dataclasses.replace(V1_RECORD, disabled_until_timestep=0.5),
    ),
    "null ignore": (edited(V1, f"{GROUP}.ignore", None), dataclasses.replace(V1_RECORD, ignore=())),
    "ignore at both levels": (
        edited(V1, "ignore", ["x", "blocks.0.attn2"]),
        dataclasses.replace(V1_RECORD, ignore=("blocks.0.attn1", "blocks.0.attn2", "x")),
    ),
    "unknown keys": (edited(edited(V1, f"{GROUP}.raw", [1]), "note", {}), V1_RECORD),
    "no curve": (edited(V1, FACTOR, DELETED), dataclasses.replace(V1_RECORD, calibration=None)),
    "another producer": (
        edited(V1, "producer", {"name": "somebody"}),
        dataclasses.replace(V1_RECORD, calibration=Calibration(A, B), producer=("somebody", "")),
    ),
    "our facts beat what is known of ModelOpt": (
        edited(
            V1,
            f"{GROUP}.skip_attn_compile",
            {"tile": [64, 128], "tile_order": "own_first", "sparsity_range": [0.1, 0.9], "kv_lens": [4096]},
        ),
        dataclasses.replace(
            V1_RECORD, calibration=Calibration(A, B, tile=(64, 128), tile_order="own_first", sparsity_range=(0.1, 0.9), kv_lens=(4096,))
        ),
    ),
    "only another algorithm": ({"config_groups": {"group_0": V2["config_groups"]["group_0"]}}, CheckpointSparsity()),
    "someone else's sparse attention": ({"use_sparse_attention": True, "sparse_topk_blocks": 16}, CheckpointSparsity()),
    "empty": ({}, CheckpointSparsity()),
}
READABLE = pytest.mark.parametrize(("config", "record"), VARIANTS.values(), ids=VARIANTS)


@READABLE
def test_every_variant_is_read(config, record, tmp_path) -> None:
    before = copy.deepcopy(config)
    assert read({"sparse_attention_config": config}) == record
    assert read(as_file(config, tmp_path)) == record
    assert config == before


@READABLE
def test_written_as_v1_nothing_is_lost(config, record) -> None:
    if record.calibration is None:
        with pytest.raises(ValueError, match="there is none to write"):
            write(record)
        return
    written = json.loads(json.dumps(write(record), allow_nan=False))
    group = written["sparse_attention_config"]["config_groups"]["group_0"]
    assert group["algorithm"] == "skip_softmax"
    curve = {"a": record.calibration.a, "b": record.calibration.b}
    assert group["threshold_scale_factor"] == {"formula": FORMULA, "coefficients": curve, "prefill": curve}
    assert dataclasses.replace(read(written), producer=record.producer) == record
    assert write(read(written)) == written


# What the readers that serve diffusion models take from a file, key by key.
def test_other_readers_find_what_they_look_for() -> None:
    written = SkipConfig.from_checkpoint({"sparse_attention_config": V1}).to_checkpoint(like={"sparse_attention_config": V1})
    assert list(written) == ["sparse_attention_config"]
    inner = written["sparse_attention_config"]
    assert list(inner) == ["config_groups", "producer"]
    assert inner["producer"]["name"] == "skip_attn_compile"
    (group,) = inner["config_groups"].values()  # every member is taken for a group
    expected = edited(V1, f"{FACTOR}.prefill", {"a": A, "b": B})["config_groups"]["group_0"]
    assert {key: value for key, value in group.items() if key != "skip_attn_compile"} == expected
    assert group["skip_attn_compile"] == {"tile": [128, 128], "tile_order": "ascending"}


ERRORS = {
    "a is a string": (f"{FACTOR}.coefficients.a", "2822", f'{FACTOR}.coefficients.a must be a finite number > 0, got "2822"'),
    "a is a bool": (f"{FACTOR}.coefficients.a", True, f"{FACTOR}.coefficients.a must be a finite number > 0, got true"),
    "a is 0": (f"{FACTOR}.coefficients.a", 0, "coefficients.a must be a finite number > 0, got 0"),
    "a < 0": (f"{FACTOR}.coefficients.a", -1.5, "coefficients.a must be a finite number > 0, got -1.5"),
    "a is NaN": (f"{FACTOR}.coefficients.a", math.nan, "coefficients.a must be a finite number > 0, got NaN"),
    "a is infinite": (f"{FACTOR}.coefficients.a", math.inf, "coefficients.a must be a finite number > 0, got Infinity"),
    "a is beyond a float": (f"{FACTOR}.coefficients.a", 10**400, "coefficients.a must be a finite number > 0, got 1000"),
    "a is null": (f"{FACTOR}.coefficients.a", None, "coefficients.a must be a finite number > 0, got null"),
    "a is missing": (f"{FACTOR}.coefficients.a", DELETED, "coefficients.a must be a finite number > 0, got nothing"),
    "a is a list": (f"{FACTOR}.coefficients.a", [1], "coefficients.a must be a finite number > 0, got [1]"),
    "b is a string": (f"{FACTOR}.coefficients.b", "4", 'coefficients.b must be a finite number, got "4"'),
    "b is missing": (f"{FACTOR}.coefficients.b", DELETED, "coefficients.b must be a finite number, got nothing"),
    "b is NaN": (f"{FACTOR}.coefficients.b", math.nan, "coefficients.b must be a finite number, got NaN"),
    "b is infinite": (f"{FACTOR}.coefficients.b", -math.inf, "coefficients.b must be a finite number, got -Infinity"),
    "log_a overflows": (
        f"{FACTOR}.coefficients",
        {"log_a": 1000, "b": 1},
        "coefficients.log_a must be a finite number whose exp is finite and > 0, got 1000",
    ),
    "log_a underflows": (
        f"{FACTOR}.coefficients",
        {"log_a": -1000, "b": 1},
        "coefficients.log_a must be a finite number whose exp is finite and > 0",
    ),
    "coefficients are a list": (f"{FACTOR}.coefficients", [A, B], "coefficients must be an object, got [2822"),
    "coefficients of V4": (f"{FACTOR}.coefficients.c", 0.5, "coefficients must be the coefficients of"),
    "no coefficients": (f"{FACTOR}.coefficients", DELETED, f"{FACTOR} must be an object with coefficients, with prefill, or with a and b"),
    "empty factor": (FACTOR, {}, f"{FACTOR} must be an object with coefficients"),
    "decode only": (FACTOR, {"decode": {"a": 1, "b": 1}}, f"{FACTOR} must be an object with coefficients, with prefill"),
    "factor is a number": (FACTOR, 5000.0, f"{FACTOR} must be an object, got 5000.0"),
    "two curves": (f"{FACTOR}.prefill", {"a": 1, "b": B}, f"{FACTOR} must be one curve"),
    "V4": (f"{FACTOR}.formula", V4_FORMULA, f'{FACTOR}.formula must be "{FORMULA}", got "{V4_FORMULA}"'),
    "V4 beside its coefficients": (
        FACTOR,
        {"coefficients": {"formula": V4_FORMULA, "a": 1, "b": 2, "c": 3}},
        f'{FACTOR}.coefficients.formula must be "{FORMULA}", got "{V4_FORMULA}"',
    ),
    "unknown formula": (
        f"{FACTOR}.formula",
        "a + b * target_sparsity",
        'formula must be "a * exp(b * target_sparsity)", got "a + b * target_sparsity"',
    ),
    "formula in log space": (f"{FACTOR}.formula", "exp(log_a + b * target_sparsity)", 'got "exp(log_a + b * target_sparsity)"'),
    "formula that would do harm": (f"{FACTOR}.formula", "__import__('os').abort()", "got \"__import__('os').abort()\""),
    "empty formula": (f"{FACTOR}.formula", "", 'formula must be "a * exp(b * target_sparsity)", got ""'),
    "formula is no string": (f"{FACTOR}.formula", 3, "formula must be a string, got 3"),
    "target above 1": (f"{GROUP}.target_sparsity", 70, f"{GROUP}.target_sparsity must be a number in [0, 1], got 70"),
    "target < 0": (f"{GROUP}.target_sparsity", -0.1, "target_sparsity must be a number in [0, 1], got -0.1"),
    "target is a string": (f"{GROUP}.target_sparsity", "0.7", 'target_sparsity must be a number in [0, 1], got "0.7"'),
    "target is a bool": (f"{GROUP}.target_sparsity", True, "target_sparsity must be a number in [0, 1], got true"),
    "target of prefill": (f"{GROUP}.target_sparsity", {"prefill": "x"}, 'target_sparsity.prefill must be a number in [0, 1], got "x"'),
    "gate above 1": (f"{GROUP}.disabled_until_timestep", 930, f"{GROUP}.disabled_until_timestep must be a number in [0, 1], got 930"),
    "steps are a fraction": (f"{GROUP}.initial_disabled_steps", 2.5, f"{GROUP}.initial_disabled_steps must be an integer >= 0, got 2.5"),
    "steps < 0": (f"{GROUP}.initial_disabled_steps", -1, "initial_disabled_steps must be an integer >= 0, got -1"),
    "steps are a bool": (f"{GROUP}.initial_disabled_steps", True, "initial_disabled_steps must be an integer >= 0, got true"),
    "ignore is a string": (f"{GROUP}.ignore", "blocks.0", f'{GROUP}.ignore must be a list of strings, got "blocks.0"'),
    "ignore holds a number": (
        f"{GROUP}.ignore",
        ["x", 3],
        f"{GROUP}.ignore[1] must be a non-empty fnmatch pattern without outer spaces, got 3",
    ),
    "ignore holds half a class": (f"{GROUP}.ignore", ["blocks.[0"], f"{GROUP}.ignore[0] has an unclosed '['"),
    "targets are a string": (f"{GROUP}.targets", "WanAttention", f'{GROUP}.targets must be a list of strings, got "WanAttention"'),
    "targets hold a number": (f"{GROUP}.targets", [1], f"{GROUP}.targets[0] must be a string, got 1"),
    "algorithm is no string": (f"{GROUP}.algorithm", 1, f"{GROUP}.algorithm must be a string, got 1"),
    "group is a list": (GROUP, [], f"{GROUP} must be an object, got []"),
    "groups are a list": ("config_groups", [V1["config_groups"]["group_0"]], "config_groups must be an object, got [{"),
    "producer is a string": ("producer", "modelopt", 'producer must be an object, got "modelopt"'),
    "producer's name is a number": ("producer.name", 1, "producer.name must be a string, got 1"),
    "producer's version is a number": ("producer.version", 0.45, "producer.version must be a string, got 0.45"),
    "our facts are a list": (f"{GROUP}.skip_attn_compile", [1], f"{GROUP}.skip_attn_compile must be an object, got [1]"),
    "our tile is one number": (f"{GROUP}.skip_attn_compile", {"tile": 64}, f"{GROUP}.skip_attn_compile.tile must be integers > 0, got 64"),
    "our order is unknown": (f"{GROUP}.skip_attn_compile", {"tile_order": "down"}, f"{GROUP}.skip_attn_compile.tile_order must be one of"),
    "our range is upside down": (
        f"{GROUP}.skip_attn_compile",
        {"sparsity_range": [1, 0]},
        f"{GROUP}.skip_attn_compile.sparsity_range must be",
    ),
    "our lengths are fractions": (
        f"{GROUP}.skip_attn_compile",
        {"kv_lens": [0.5]},
        f"{GROUP}.skip_attn_compile.kv_lens must be integers > 0",
    ),
    "two groups": (
        "config_groups.other",
        V1["config_groups"]["group_0"],
        "config_groups.group_0 and config_groups.other are all of algorithm skip_softmax",
    ),
    "three groups": (
        "config_groups",
        {"a": CURVE, "b": CURVE, "c": CURVE},
        "config_groups.a and config_groups.b and config_groups.c are all of",
    ),
}


@pytest.mark.parametrize(("path", "value", "text"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize(
    "overrides", [{}, {"threshold": 0.1}, {"target_sparsity": 0.5, "calibration": Calibration(1, 1)}], ids=["plain", "lambda", "target"]
)
def test_a_mistake_is_named(path, value, text, overrides, tmp_path) -> None:
    wrong = edited(V1, path, value)
    with pytest.raises(CheckpointError) as in_dict:
        SkipConfig.from_checkpoint({"sparse_attention_config": wrong}, **overrides)
    assert str(in_dict.value).startswith("dict: ")
    assert text in str(in_dict.value)
    with pytest.raises(CheckpointError) as in_file:
        SkipConfig.from_checkpoint(as_file(wrong, tmp_path), **overrides)
    assert str(in_file.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert text in str(in_file.value)


@pytest.mark.parametrize("value", [3, "skip_softmax", [V1], True], ids=repr)
def test_a_config_that_is_no_object(value) -> None:
    with pytest.raises(CheckpointError, match="dict: sparse_attention_config must be an object, got "):
        SkipConfig.from_checkpoint({"sparse_attention_config": value})


def test_error_paths_of_a_flat_config_start_at_its_top() -> None:
    with pytest.raises(CheckpointError, match=r"dict: threshold_scale_factor\.b must be a finite number, got \"2\""):
        SkipConfig.from_checkpoint({"sparse_attention_config": edited(V3, "threshold_scale_factor.b", "2")})


def test_long_values_are_cut() -> None:
    with pytest.raises(CheckpointError) as error:
        SkipConfig.from_checkpoint({"sparse_attention_config": edited(V1, f"{FACTOR}.coefficients.a", "9" * 10**6)})
    assert len(str(error.value)) < 500


# Sources


def test_every_source_gives_the_same_config(tmp_path) -> None:
    folder = as_file(V1, tmp_path / "transformer")
    outer = {"sparse_attention_config": V1}
    expected = SkipConfig(
        target_sparsity=0.7,
        calibration=Calibration(A, B, **MODELOPT),
        disabled_until_timestep=0.93,
        checkpoint_ignore=("blocks.0.attn1", "blocks.0.attn2"),
    )
    sources = [folder, str(folder), f"{folder}/", folder / "config.json", str(folder / "config.json"), outer, V1, OrderedDict(outer)]
    for source in sources:
        assert SkipConfig.from_checkpoint(source) == expected, source


def test_a_byte_order_mark_is_no_matter(tmp_path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"sparse_attention_config": V1}).encode())
    assert read(tmp_path) == V1_RECORD


def test_a_diffusers_model_its_config_and_its_pipeline(tmp_path) -> None:
    diffusers = pytest.importorskip("diffusers")
    shape = {"num_attention_heads": 1, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 8, "text_dim": 8, "freq_dim": 8}
    plain = diffusers.WanTransformer3DModel(**shape)
    plain.save_pretrained(tmp_path / "transformer")
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sparse_attention_config": V1}))
    model = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "transformer")
    config = SkipConfig.from_checkpoint(path)
    assert SkipConfig.from_checkpoint(model) == SkipConfig.from_checkpoint(model.config) == config
    assert SkipConfig.from_checkpoint(torch.compile(model)) == config
    with pytest.raises(CheckpointError, match=r"WanTransformer3DModel\.config: no sparse_attention_config .* set threshold"):
        SkipConfig.from_checkpoint(plain)

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=model, transformer_2=model)
    assert SkipConfig.from_checkpoint(pipe) == {"transformer": config, "transformer_2": config}
    pipe.save_pretrained(tmp_path / "pipe")
    assert SkipConfig.from_checkpoint(tmp_path / "pipe") == {"transformer": config, "transformer_2": config}


@pytest.mark.parametrize(
    "source", [None, 3, 0.5, True, b"x", [V1], (), object(), SkipConfig, torch.nn.Linear(1, 1)], ids=lambda s: type(s).__name__
)
def test_a_wrong_source_says_what_to_give(source) -> None:
    with pytest.raises(CheckpointError, match="source must be a component's folder, its config.json, a dict, a diffusers model"):
        SkipConfig.from_checkpoint(source)


@pytest.mark.parametrize(
    "source", ["", "nowhere", "nvidia/Wan2.2-T2V-A14B-Diffusers-FP8", "a\0b", "x" * 5000, "\ud800", pathlib.Path("/nowhere/config.json")]
)
def test_a_missing_file_is_named(source, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="not a file; what a model hub holds must be downloaded first"):
        SkipConfig.from_checkpoint(source)


def deep(depth: int) -> bytes:
    return b'{"sparse_attention_config": ' + b"[" * depth + b"]" * depth + b"}"


GOOD = json.dumps({"sparse_attention_config": V1}).encode()
FILES = {
    "empty": (b"", "cannot be read as JSON"),
    "truncated": (GOOD[:200], "cannot be read as JSON"),
    "trailing": (GOOD + b"}", "cannot be read as JSON"),
    "not UTF-8": (b'{"name": "\xff\xfe"}', "cannot be read as JSON in UTF-8: .*codec can't decode"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "cannot be read as JSON in UTF-8"),
    "deep": (deep(10**6), "nested too deeply"),
    "huge": (b" " * (MAX_BYTES + 1) + GOOD, f"a config must have at most {MAX_BYTES} bytes, got {MAX_BYTES + 1 + len(GOOD)}"),
    "huge integer": (GOOD.replace(b"0.93", b"9" * 10_000), "cannot be read as JSON"),
    "duplicate key": (GOOD.replace(b'{"a":', b'{"a": 1, "a":'), f"a must stand once in its object, got 1 and {A}"),
    "duplicate group": (
        b'{"sparse_attention_config": {"config_groups": {"group_0": 1, "group_0": 2}}}',
        "group_0 must stand once in its object, got 1 and 2",
    ),
    "NaN": (GOOD.replace(b"2822.6209952221557", b"NaN"), r"coefficients\.a must be a finite number > 0, got NaN"),
    "Infinity": (GOOD.replace(b"0.93", b"Infinity"), r"disabled_until_timestep must be a number in \[0, 1\], got Infinity"),
    "1e999": (GOOD.replace(b"2822.6209952221557", b"1e999"), r"coefficients\.a must be a finite number > 0, got Infinity"),
    "a list": (b"[1]", r"the config must be an object, got \[1\]"),
    "a string": (b'"x"', 'the config must be an object, got "x"'),
    "null": (b"null", "the config must be an object, got null"),
}


@pytest.mark.parametrize(("data", "text"), FILES.values(), ids=FILES)
@pytest.mark.parametrize("overrides", [{}, {"threshold": 0.1}], ids=["plain", "lambda"])
def test_a_broken_file_is_named(data, text, overrides, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes(data)
    for source in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(CheckpointError, match=text) as error:
            SkipConfig.from_checkpoint(source, **overrides)
        assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_the_cause_is_chained(tmp_path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError) as error:
        read(tmp_path)
    assert isinstance(error.value.__cause__, UnicodeDecodeError)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    as_file(V1, tmp_path)
    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        read(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a file"):
        read(tmp_path)


def test_a_dict_that_holds_itself_is_an_error() -> None:
    loop: dict = {}
    loop["sparse_attention_config"] = loop
    loop["config_groups"] = [loop]
    with pytest.raises(CheckpointError, match="config_groups must be an object, got a list"):
        read(loop)


# The operating point


def test_the_checkpoints_target_is_used_and_logged(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "skip_attn_compile")
    folder = as_file(V1, tmp_path)
    config = SkipConfig.from_checkpoint(folder)
    assert (config.target_sparsity, config.disabled_until_timestep) == (0.7, 0.93)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", f"{folder / 'config.json'}: target_sparsity=0.7, as the checkpoint says"),
        ("INFO", f"{folder / 'config.json'}: disabled_until_timestep=0.93, as the checkpoint says"),
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"threshold": 0.1}, {"threshold": 0.1}),
        ({"threshold": 0}, {"threshold": 0.0}),
        ({"target_sparsity": 0.5}, {"target_sparsity": 0.5}),
        ({"target_sparsity": 0}, {"target_sparsity": 0.0}),
        ({"threshold": None}, {"target_sparsity": 0.7}),
        ({"calibration": Calibration(5, 5)}, {"target_sparsity": 0.7, "calibration": Calibration(5, 5)}),
        ({"ignore": ["x.*"]}, {"target_sparsity": 0.7, "ignore": ("x.*",)}),
        ({"ignore": ()}, {"target_sparsity": 0.7}),
        ({"checkpoint_ignore": ()}, {"target_sparsity": 0.7}),
        ({"disabled_until_timestep": 0.5}, {"target_sparsity": 0.7, "disabled_until_timestep": 0.5}),
        ({"disabled_until_timestep": 0}, {"target_sparsity": 0.7, "disabled_until_timestep": 0.0}),
        ({"disabled_until_timestep": None}, {"target_sparsity": 0.7}),
        ({"threshold": 0.1, "disabled_until_timestep": 0.5}, {"threshold": 0.1, "disabled_until_timestep": 0.5}),
        ({"rules": [Rule("*", dense=True)], "min_kv_len": 0}, {"target_sparsity": 0.7, "rules": (Rule("*", dense=True),), "min_kv_len": 0}),
    ],
    ids=repr,
)
def test_overrides_beat_the_checkpoint_but_for_its_ignore(overrides, expected, caplog) -> None:
    caplog.set_level(logging.INFO, "skip_attn_compile")
    config = SkipConfig.from_checkpoint(V1, **overrides)
    gate = {"disabled_until_timestep": 0.93} if expected.get("target_sparsity") == 0.7 else {}  # none with an operating point of the user's
    of_checkpoint = {"calibration": Calibration(A, B, **MODELOPT), "checkpoint_ignore": V1_RECORD.ignore, **gate}
    assert config == SkipConfig(**{**of_checkpoint, **expected})
    assert ("as the checkpoint says" in caplog.text) == (config.target_sparsity == 0.7)


def test_wrong_overrides_are_named_as_in_a_config() -> None:
    for overrides, text in [
        ({"treshold": 0.1}, "did you mean threshold"),
        ({"threshold": -1}, "threshold must be finite and >= 0, got -1"),
        ({"threshold": 0.1, "target_sparsity": 0.5}, "exclude each other"),
        ({"calibration": {"a": 1}}, "calibration must be a Calibration"),
        ({"checkpoint_ignore": "x"}, "checkpoint_ignore must be a sequence of patterns"),
    ]:
        with pytest.raises(ValueError, match=text):
            SkipConfig.from_checkpoint(V1, **overrides)


NO_CURVE = {"absent": {}, "no curve": {"sparse_attention_config": edited(V1, FACTOR, DELETED)}, "null": {"sparse_attention_config": None}}


@pytest.mark.parametrize("source", NO_CURVE.values(), ids=NO_CURVE)
def test_without_a_calibration_threshold_is_the_way(source, tmp_path) -> None:
    for overrides in ({}, {"target_sparsity": 0.5}):
        with pytest.raises(
            CheckpointError, match="dict: no sparse_attention_config with a skip_softmax calibration in it; set threshold instead"
        ):
            SkipConfig.from_checkpoint(source, **overrides)
    ignore = read(source).ignore
    assert SkipConfig.from_checkpoint(source, threshold=0.1) == SkipConfig(threshold=0.1, checkpoint_ignore=ignore)
    own = {"target_sparsity": 0.5, "calibration": Calibration(1, 1)}
    assert SkipConfig.from_checkpoint(source, **own) == SkipConfig(**own, checkpoint_ignore=ignore)


def test_without_a_target_the_error_asks_for_one() -> None:
    with pytest.raises(CheckpointError, match="names no target_sparsity; give one, .*or a threshold"):
        SkipConfig.from_checkpoint(edited(V1, f"{GROUP}.target_sparsity", DELETED))


def test_dense_first_steps_are_never_silent(caplog) -> None:
    SkipConfig.from_checkpoint(V2)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "dict: initial_disabled_steps=4 asks for dense first steps" in caplog.text
    caplog.clear()
    SkipConfig.from_checkpoint(V1)
    assert not caplog.records


# Writing


def test_a_config_survives_the_round_trip() -> None:
    curve = Calibration(A, B, tile=(64, 128), tile_order="own_first", sparsity_range=(0.05, 0.85), kv_lens=(4096, 75600))
    point = {"target_sparsity": 0.5, "calibration": curve, "disabled_until_timestep": 0.86}
    config = SkipConfig(**point, ignore=("y", "x"), checkpoint_ignore=("x", "z"))
    again = SkipConfig.from_checkpoint(json.loads(json.dumps(config.to_checkpoint())))
    assert again == SkipConfig(**point, checkpoint_ignore=("x", "z", "y"), tile_order="own_first"), "the order belongs to the curve"
    assert SkipConfig.from_checkpoint(config.to_checkpoint(), tile_order="ascending").tile_order == "ascending"
    assert SkipConfig.from_checkpoint(config.to_checkpoint(), threshold=0.1).tile_order == "ascending"
    assert again.to_checkpoint() == config.to_checkpoint()


def test_a_curve_of_unknown_tiles_stays_unknown() -> None:
    config = SkipConfig(target_sparsity=0.0, calibration=Calibration(A, B))
    written = config.to_checkpoint()
    assert "skip_attn_compile" not in written["sparse_attention_config"]["config_groups"]["group_0"]
    assert SkipConfig.from_checkpoint(written) == config


def test_like_keeps_what_a_config_does_not_hold() -> None:
    written = SkipConfig(target_sparsity=0.5, calibration=Calibration(1, 2)).to_checkpoint(like=V2)
    assert read(written) == CheckpointSparsity(
        Calibration(1.0, 2.0), target_sparsity=0.5, initial_disabled_steps=4, targets=("LlamaAttention",), producer=read(written).producer
    )
    assert SkipConfig(target_sparsity=0.5, calibration=Calibration(1, 2)).to_checkpoint(like=read(V2)) == written


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"threshold": 0.1}, "no calibration; threshold=0.1"),
        ({"threshold": 0.1, "calibration": Calibration(1, 1)}, "to_checkpoint cannot write threshold=0.1"),
        ({"rules": [Rule("a.*", target_sparsity=0.2), Rule("b", dense=True)]}, r"rules for a\.\*, b"),
        ({"rules": [Rule("a.*", calibration=Calibration(2, 2))]}, r"rules for a\.\*"),
        ({"include": ["a.*"]}, r"include=\('a\.\*',\)"),
    ],
    ids=repr,
)
def test_what_the_format_cannot_say_is_not_dropped(fields, text) -> None:
    config = SkipConfig(**(fields if "threshold" in fields else {"target_sparsity": 0.5, "calibration": Calibration(1, 1), **fields}))
    with pytest.raises(ValueError, match=text) as error:
        config.to_checkpoint()
    assert "a checkpoint holds one calibration, a target_sparsity and ignore patterns" in str(error.value)


# Pipelines

KEPT = SkipConfig(threshold=0.0, ignore=("*",))
LOW = edited(edited(V1, f"{FACTOR}.coefficients.a", 100.0), f"{GROUP}.ignore", ["blocks.1.*"])
BROKEN = '{"sparse_attention_config": '


def pipeline(folder: pathlib.Path, index=None, **components) -> pathlib.Path:
    """A pipeline's folder on disk: component name = its config, a text as it stands, or None for no file."""
    folder.mkdir(exist_ok=True)
    classes = {name: ["diffusers", "WanTransformer3DModel"] for name in components}
    head = {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1", "boundary_ratio": 0.875, "expand_timesteps": False}
    (folder / "model_index.json").write_text(index if isinstance(index, str) else json.dumps(head | classes | (index or {})))
    for name, config in components.items():
        (folder / name).mkdir()
        if config is not None:
            as_file(config, folder / name)
    return folder


def test_each_expert_gets_its_own_curve(tmp_path) -> None:
    folder = pipeline(tmp_path, transformer=V1, transformer_2=LOW, vae="{}", text_encoder="{}", scheduler=None)
    configs = SkipConfig.from_checkpoint(folder)
    assert list(configs) == ["transformer", "transformer_2"]
    assert configs["transformer"] == SkipConfig.from_checkpoint(V1)
    assert configs["transformer_2"] == SkipConfig.from_checkpoint(LOW)
    assert SkipConfig.from_checkpoint(str(folder / "model_index.json")) == configs


def test_overrides_hold_for_every_component(tmp_path) -> None:
    folder = pipeline(tmp_path, transformer=V1, transformer_2=LOW)
    rules = [Rule("blocks.2.*", threshold=0.3)]
    configs = SkipConfig.from_checkpoint(folder, target_sparsity=0.4, rules=iter(rules), ignore=iter(["x"]))
    for name, source in (("transformer", V1), ("transformer_2", LOW)):
        assert configs[name] == SkipConfig.from_checkpoint(source, target_sparsity=0.4, rules=rules, ignore=["x"])


@pytest.mark.parametrize("absent", [None, {"transformer_2": [None, None]}], ids=["not named", "null"])
def test_one_expert_only(absent, tmp_path) -> None:
    assert SkipConfig.from_checkpoint(pipeline(tmp_path, absent, transformer=V1)) == {"transformer": SkipConfig.from_checkpoint(V1)}


def test_a_denoiser_of_another_name_is_found_by_its_config(tmp_path) -> None:
    assert list(SkipConfig.from_checkpoint(pipeline(tmp_path, prior=V1, decoder="{}", unet=V1))) == ["prior", "unet"]


def test_an_index_without_components_is_read_by_folder(tmp_path) -> None:
    assert list(SkipConfig.from_checkpoint(pipeline(tmp_path, "{}", transformer=V1, transformer_2=LOW, vae="{}"))) == [
        "transformer",
        "transformer_2",
    ]


UNUSABLE = {
    "truncated": (BROKEN, "cannot be read as JSON"),
    "no file": (None, "not a file"),
    "V4": (edited(V1, f"{FACTOR}.formula", V4_FORMULA), "1 - exp"),
    "wrong type": (edited(V1, f"{FACTOR}.coefficients.a", "1"), "must be a finite number > 0"),
}


@pytest.mark.parametrize(("config", "text"), UNUSABLE.values(), ids=UNUSABLE)
def test_the_first_unreadable_component_is_an_error(config, text, tmp_path) -> None:
    folder = pipeline(tmp_path, transformer=config, transformer_2=V1)
    for overrides in ({}, {"target_sparsity": 0.5}, {"threshold": 0.1}):
        with pytest.raises(CheckpointError, match=text) as error:
            SkipConfig.from_checkpoint(folder, **overrides)
        assert str(folder / "transformer" / "config.json") in str(error.value)


@pytest.mark.parametrize(("config", "text"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_later_unreadable_component_stays_dense(config, text, tmp_path, caplog) -> None:
    folder = pipeline(tmp_path, transformer=V1, transformer_2=config)
    for overrides in ({}, {"target_sparsity": 0.5}, {"calibration": Calibration(1, 1)}):
        caplog.clear()
        assert SkipConfig.from_checkpoint(folder, **overrides) == {
            "transformer": SkipConfig.from_checkpoint(V1, **overrides),
            "transformer_2": KEPT,
        }
        (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "stays dense" in r.getMessage()]
        assert text in warning
        assert str(folder / "transformer_2" / "config.json") in warning


@pytest.mark.parametrize(("config", "text"), UNUSABLE.values(), ids=UNUSABLE)
def test_under_threshold_a_later_unreadable_component_gets_it(config, text, tmp_path, caplog) -> None:
    configs = SkipConfig.from_checkpoint(pipeline(tmp_path, transformer=V1, transformer_2=config), threshold=0.1, min_kv_len=0)
    assert configs["transformer_2"] == SkipConfig(threshold=0.1, min_kv_len=0)
    assert "threshold is used, and no `ignore` of this component's checkpoint is known" in caplog.text


@pytest.mark.parametrize("config", ["{}", edited(V1, FACTOR, DELETED), {"config_groups": {}}], ids=["nothing", "no curve", "no group"])
@pytest.mark.parametrize("names", [("transformer", "transformer_2"), ("transformer_2", "transformer")], ids=["later", "first"])
def test_a_component_without_calibration(config, names, tmp_path, caplog) -> None:
    with_curve, without = names
    folder = pipeline(tmp_path, **{name: V1 if name == with_curve else config for name in ("transformer", "transformer_2")})
    for overrides in ({}, {"target_sparsity": 0.5}):
        configs = SkipConfig.from_checkpoint(folder, **overrides)
        assert configs == {with_curve: SkipConfig.from_checkpoint(V1, **overrides), without: KEPT}
        assert f"{folder / without / 'config.json'}: no sparse_attention_config with a skip_softmax calibration" in caplog.text
    ignore = read(folder / without).ignore
    assert SkipConfig.from_checkpoint(folder, threshold=0.1)[without] == SkipConfig(threshold=0.1, checkpoint_ignore=ignore)
    own = {"target_sparsity": 0.5, "calibration": Calibration(1, 1)}
    assert SkipConfig.from_checkpoint(folder, **own)[without] == SkipConfig(**own, checkpoint_ignore=ignore)


NOTHING = {
    "two": {"transformer": "{}", "transformer_2": "{}"},
    "none": {"vae": "{}"},
    "later unreadable": {"transformer": "{}", "transformer_2": BROKEN},
}


@pytest.mark.parametrize("components", NOTHING.values(), ids=NOTHING)
def test_a_pipeline_without_any_calibration_names_threshold(components, tmp_path) -> None:
    folder = pipeline(tmp_path, **components)
    for overrides in ({}, {"target_sparsity": 0.5}):
        with pytest.raises(
            CheckpointError, match="no sparse_attention_config with a skip_softmax calibration in any component.* set threshold instead"
        ):
            SkipConfig.from_checkpoint(folder, **overrides)
    denoisers = [name for name in components if name.startswith("transformer")]
    assert SkipConfig.from_checkpoint(folder, threshold=0.1) == dict.fromkeys(denoisers, SkipConfig(threshold=0.1))


@pytest.mark.parametrize(
    ("index", "text"),
    [("[1]", "a pipeline's index must be an object, got [1]"), ("{", "cannot be read"), ('{"a": 1, "a": 2}', "stand once")],
)
def test_a_broken_index_is_named(index, text, tmp_path) -> None:
    folder = pipeline(tmp_path, index, transformer=V1)
    with pytest.raises(CheckpointError) as error:
        SkipConfig.from_checkpoint(folder)
    assert str(folder / "model_index.json") in str(error.value)
    assert text in str(error.value)


def test_wrong_overrides_are_no_matter_of_a_component(tmp_path) -> None:
    with pytest.raises(ValueError, match="did you mean threshold") as error:
        SkipConfig.from_checkpoint(pipeline(tmp_path, transformer=V1, transformer_2=LOW), treshold=0.1)
    assert not isinstance(error.value, CheckpointError)


# Anything at all

KEYS = [
    "sparse_attention_config",
    "config_groups",
    "group_0",
    "algorithm",
    "sparse_algo",
    "threshold_scale_factor",
    "coefficients",
    "prefill",
]
KEYS += [
    "a",
    "b",
    "c",
    "log_a",
    "formula",
    "target_sparsity",
    "disabled_until_timestep",
    "initial_disabled_steps",
    "ignore",
    "targets",
    "producer",
    "name",
]
KEYS += ["skip_attn_compile", "tile", "tile_order", "sparsity_range", "kv_lens"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([FORMULA, V4_FORMULA, "skip_softmax", "softmax_skip", "modelopt", "own_first", 0.5, 1.0, 128]),
)
KEY = st.sampled_from(KEYS) | st.text(max_size=3)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=4), max_leaves=12)
OVERRIDES = st.sampled_from([{}, {"threshold": 0.1}, {"target_sparsity": 0.5}, {"calibration": Calibration(1, 1)}])
ANYTHING = settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def loads_or_raises(source, overrides) -> None:
    try:
        config = SkipConfig.from_checkpoint(source, **overrides)
    except CheckpointError:
        return
    assert isinstance(config, SkipConfig)
    if config.threshold is None:
        again = SkipConfig.from_checkpoint(json.loads(json.dumps(config.to_checkpoint())))
        assert again == dataclasses.replace(config, ignore=(), checkpoint_ignore=config.checkpoint_ignore)


@ANYTHING
@given(JSON, OVERRIDES)
def test_any_value_loads_or_raises(value, overrides) -> None:
    loads_or_raises(value if not isinstance(value, str) else f"/nowhere/{value}", overrides)
    loads_or_raises({"sparse_attention_config": value}, overrides)


def places(value, path=()):
    """Every place in a JSON value, by the keys and indices that lead there."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw):
    """A valid config with up to three places replaced, removed or added."""
    config = {"sparse_attention_config": copy.deepcopy(draw(st.sampled_from([inner for inner, _ in VARIANTS.values()])))}
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from([place for place in places(config) if place] or [("sparse_attention_config",)]))
        at = config
        for key in parents:
            at = at[key]
        what = draw(st.sampled_from(["replace", "remove", "add"]))
        if what == "remove" and config:
            del at[last]
        else:
            at[draw(KEY) if what == "add" and isinstance(at, dict) else last] = draw(JSON)
    return config


@ANYTHING
@given(mutated(), OVERRIDES)
def test_any_mutation_loads_or_raises(config, overrides) -> None:
    loads_or_raises(config, overrides)


@ANYTHING
@given(
    st.binary(max_size=64)
    | st.tuples(st.integers(0, len(GOOD)), st.binary(max_size=4)).map(lambda edit: GOOD[: edit[0]] + edit[1] + GOOD[edit[0] + 1 :])
)
def test_any_bytes_load_or_raise(tmp_path, data) -> None:
    (tmp_path / "config.json").write_bytes(data)
    loads_or_raises(tmp_path, {})
