"""plan: what would happen, by name, without compiling."""

import dataclasses

import pytest
import torch

from models import dit, tokens
from skip_attn_compile import Calibration, Rule, SkipConfig, backend, plan


def test_names_and_decisions_are_those_of_the_compiled_model() -> None:
    model = dit(cross=True)
    rules = (Rule("blocks.1.attn1", dense=True), Rule("blocks.1.attn2", threshold=0.7))
    config = SkipConfig(threshold=0.3, min_kv_len=0, ignore=("blocks.0.attn2",), rules=rules)
    be = backend(config, inner="eager")
    torch.compile(model, backend=be)(tokens(), tokens(seed=1))
    planned = plan(model, config)
    assert [(layer.name, layer.decision) for layer in planned.layers] == [(site.name, site.decision) for site in be.report().sites]
    assert [layer.policy.reasons for layer in planned.layers] == [site.reasons for site in be.report().sites]
    assert [layer.operating_point for layer in planned.layers] == ["0.3", "", "", "0.7"]


def test_text_shows_the_formula_and_unmatched_patterns_with_near_misses() -> None:
    config = SkipConfig(target_sparsity=0.5, calibration=Calibration(30.0, 2.0), ignore=("blocks.0.atn1",))
    text = str(plan(dit(), config, "transformer"))
    assert "transformer.blocks.0.attn1  Attention  sparse    81.55 / L" in text
    assert "ignore pattern 'blocks.0.atn1' matched no attention layer; nearest: transformer.blocks.0.attn1" in text
    assert "fewer than 1024 keys" in text
    assert "noise levels" not in text
    assert "at noise levels above 0.93; schedule_table" in str(plan(dit(), dataclasses.replace(config, disabled_until_timestep=0.93)))


def test_component_name_selects() -> None:
    config = SkipConfig(threshold=0.3, ignore=("transformer_2.*",))
    assert {layer.decision for layer in plan(dit(), config, "transformer").layers} == {"sparse"}
    assert {layer.decision for layer in plan(dit(), config, "transformer_2").layers} == {"kept"}


def test_model_without_attention_says_so() -> None:
    assert "no module whose class name says attention was found" in str(plan(torch.nn.Linear(2, 2), SkipConfig(threshold=0.1)))


@pytest.mark.parametrize(("model", "config"), [(object(), SkipConfig(threshold=0.1)), (torch.nn.Linear(2, 2), 0.1)])
def test_wrong_types_are_value_errors(model: object, config: object) -> None:
    with pytest.raises(ValueError, match="needs"):
        plan(model, config)
