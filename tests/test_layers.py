"""Whose layer is it? Names, rules and counts per layer, however the model was compiled, and when nothing can tell."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from graphs import recording_backend
from models import TILES, Attention, Block, Dit, dit, reference_sdpa, skip_config, tokens
from skip_attn_compile import Rule, backend
from skip_attn_compile.backend import SkipBackend
from skip_attn_compile.report import UNKNOWN_LAYER, Report

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NAMES = ["blocks.0.attn1", "blocks.1.attn1"]
RULES = {"ignore": ("blocks.1.*",), "rules": (Rule("blocks.2.*", threshold=0.05),)}
LAMBDAS = (0.3, 0.0, 0.05, 0.3)  # of the four blocks under RULES


def names(be: SkipBackend) -> list[str]:
    return [site.name for site in be.report().sites]


def counts(report: Report) -> list[tuple[int, int]]:
    return [(site.visited, site.skipped) for site in report.sites]


def compile_blocks(model: Dit, be: SkipBackend) -> None:
    for block in model.blocks:
        block.compile(backend=be)


def expect(model: nn.Module, *lambdas: float, seed: int = 0) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """(output, tiles of each call) of the model in eager mode at these lambdas."""
    with reference_sdpa(*lambdas) as tiles:
        return model.forward(tokens(seed=seed)), tiles


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x):
        return self.inner(x)


GLOBAL = dit()


def call_global(x):
    return GLOBAL(x)


# Whole models: names.


@pytest.mark.parametrize("how", ["compile", "module.compile", "forward", "method", "local", "loop"])
def test_whole_model_names(how: str) -> None:
    model, be = dit(), backend(skip_config(), inner="eager")
    if how == "compile":
        run = torch.compile(model, backend=be)
    elif how == "module.compile":
        model.compile(backend=be)
        run = model
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=be)
        run = model
    elif how == "method":
        run = torch.compile(model.forward, backend=be)
    elif how == "local":
        run = torch.compile(lambda x: model(x), backend=be)
    else:
        run = torch.compile(lambda x: [model(y) for y in (x,)], backend=be)
    run(tokens())
    assert names(be) == NAMES
    assert all(site.decision == "sparse" for site in be.report().sites)


def test_names_of_a_function_over_a_global_model() -> None:
    be = backend(skip_config(), inner="eager")
    torch.compile(call_global, backend=be)(tokens())
    assert names(be) == NAMES


def test_names_within_a_wrapper_module() -> None:
    be = backend(skip_config(ignore=("inner.blocks.0.*",)), inner="eager")
    torch.compile(Wrapper(dit()), backend=be)(tokens())
    assert names(be) == ["inner.blocks.0.attn1", "inner.blocks.1.attn1"]
    assert [site.decision for site in be.report().sites] == ["kept", "sparse"]


def test_an_attached_model_within_a_wrapper_keeps_its_own_names() -> None:
    model = dit()
    be = backend(skip_config(ignore=("blocks.0.*",)), inner="eager", model=model)
    torch.compile(Wrapper(model), backend=be)(tokens())
    assert names(be) == NAMES
    assert [site.decision for site in be.report().sites] == ["kept", "sparse"]


@pytest.mark.parametrize("wrapper_first", [True, False])
def test_of_a_model_and_its_wrapper_both_attached_the_model_names_its_layers(wrapper_first: bool) -> None:
    model = dit()
    wrapper = Wrapper(model)
    be = backend(skip_config(ignore=("blocks.0.*",)), inner="eager")
    for one, name in ((wrapper, "whole"), (model, ""))[:: 1 if wrapper_first else -1]:
        be.attach(one, name)
    compile_blocks(model, be)
    output = wrapper(tokens())
    assert names(be) == NAMES
    torch.testing.assert_close(output, expect(model, 0.0, 0.3)[0], **CLOSE)


def test_a_block_that_two_models_share_is_dense_where_they_disagree() -> None:
    """Whichever is attached first: it might be the ignored one's call."""
    first, second = dit(1), dit(1, seed=1)
    second.blocks[0] = first.blocks[0]
    for models in ((first, "a"), (second, "b")), ((second, "b"), (first, "a")):
        torch.compiler.reset()
        be = backend(skip_config(0.5, ignore=("b.*",)), inner="eager")
        for model, name in models:
            be.attach(model, name)
        second.blocks[0].compile(backend=be)
        second(tokens())
        assert (be.report().visited, be.report().skipped) == (TILES, 0)


def test_a_block_attached_beside_its_model_does_not_escape_the_models_rules() -> None:
    model = dit(2)
    be = backend(skip_config(0.5, ignore=("blocks.0.*",)), inner="eager", model=model)
    be.attach(model.blocks[0], "block")
    compile_blocks(model, be)
    torch.testing.assert_close(model(tokens()), expect(model, 0.0, 0.5)[0], **CLOSE)


def test_callers_that_are_remembered_are_bounded() -> None:
    model, be = dit(1), backend(skip_config(), inner="eager")
    be.attach(model)
    compile_blocks(model, be)
    model(tokens())
    [frame] = be._graphs[0].frames
    kept = []
    for _ in range(1100):  # as offloading does
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    kept.append(parameter)
                    module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)
        inputs = [None] * (1 + max(anchor.position for anchor in frame.anchors))
        for anchor in frame.anchors:
            inputs[anchor.position] = model.blocks[0].get_submodule(anchor.owner)._parameters[anchor.name]
        assert frame.resolve(inputs, be._models) is not None
    assert 0 < len(frame._by_id) <= 1024


def test_data_parallels_module_part_is_left_out() -> None:
    model = dit()
    be = backend(skip_config(), inner="eager")
    torch.compile(nn.DataParallel(model), backend=be)(tokens())
    assert names(be) == NAMES


def test_orig_mod_part_is_left_out() -> None:
    model = dit()
    be = backend(skip_config(), inner="eager")
    for n in range(2):
        model.blocks[n] = torch.compile(model.blocks[n], backend="eager")
    torch.compile(model, backend=be)(tokens())
    assert names(be) == NAMES


def test_a_compiled_model_can_be_attached() -> None:
    be = backend(skip_config(), inner="eager")
    compiled = torch.compile(dit(), backend=be)
    be.attach(compiled, "transformer")
    compiled(tokens())
    assert names(be) == [f"transformer.{name}" for name in NAMES]


def test_a_component_name_given_later_is_used_from_then_on() -> None:
    model, x = dit(), tokens()
    be, recorder = recording_backend(skip_config(rules=(Rule("transformer.blocks.0.*", threshold=0.0),)))
    compiled = torch.compile(model, backend=be)
    compiled(x)
    assert be.report().site("blocks.0.attn1").threshold == 0.3
    be.attach(model, "transformer")
    compiled(x)
    report = be.report()
    assert [site.name for site in report.sites] == [f"transformer.{name}" for name in NAMES]
    assert [site.threshold for site in report.sites] == [0.0, 0.3]
    first, second = expect(model, 0.3, 0.3)[1], expect(model, 0.0, 0.3)[1]
    assert counts(report) == [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, second, strict=True)]
    assert len(recorder.graphs) == 1


def test_attaching_another_model_does_not_lose_the_counts_of_the_first() -> None:
    model, x = dit(), tokens()
    be, _ = recording_backend(skip_config())
    torch.compile(model, backend=be)(x)
    before = counts(be.report())
    be.attach(nn.Linear(1, 1), "something else")
    assert counts(be.report()) == before
    be.attach(dit(seed=1), "second")
    report = be.report()
    assert counts(report)[:2] == before
    assert UNKNOWN_LAYER not in [site.name for site in report.sites]


def test_attach_refuses_what_has_no_layers() -> None:
    be = backend(skip_config())
    with pytest.raises(ValueError, match=r"attach needs the torch.nn.Module whose layers are to be named, got str"):
        be.attach("transformer")
    with pytest.raises(ValueError, match="name must be a string, the component's name such as 'transformer', got 3"):
        be.attach(dit(1), 3)


# Regional compilation.


def test_one_compilation_serves_all_blocks_by_their_rules() -> None:
    model = dit(4)
    be, recorder = recording_backend(skip_config(**RULES), model=model)
    compile_blocks(model, be)
    out = model(tokens())
    reference, tiles = expect(dit(4), *LAMBDAS)
    torch.testing.assert_close(out, reference, **CLOSE)
    report = be.report()
    assert len(recorder.graphs) == 1
    assert [site.name for site in report.sites] == [f"blocks.{n}.attn1" for n in range(4)]
    assert [site.threshold for site in report.sites] == list(LAMBDAS)
    assert [site.decision for site in report.sites] == ["sparse", "dense now", "sparse", "sparse"]
    assert report.sites[1].reasons == ("ignored by pattern 'blocks.1.*'",)
    assert counts(report) == tiles
    assert tiles[0][1] > 0
    assert tiles[2][1] != tiles[3][1]


def test_update_reaches_every_block() -> None:
    model = dit(4)
    be, recorder = recording_backend(skip_config(**RULES), model=model)
    compile_blocks(model, be)
    be.update(threshold=0.1)
    model(tokens())
    be.update(threshold=0.0)
    model(tokens())
    twice = [expect(dit(4), a, 0.0, 0.05, a)[1] for a in (0.1, 0.0)]
    assert counts(be.report()) == [(a[0] + b[0], a[1] + b[1]) for a, b in zip(*twice, strict=True)]
    assert len(recorder.graphs) == 1


def test_all_blocks_ignored_keeps_sdpa() -> None:
    model = dit(2)
    be, _recorder = recording_backend(skip_config(ignore=("blocks.*",)), model=model)
    compile_blocks(model, be)
    assert torch.equal(model(tokens()), dit(2)(tokens()))
    assert [site.decision for site in be.report().sites] == ["kept", "kept"]
    assert all(site.reasons == ("ignored by pattern 'blocks.*'",) for site in be.report().sites)


def test_patterns_never_match_a_block_relative_name() -> None:
    """One config, one decision, however the model was compiled."""
    config = skip_config(ignore=("attn1",), include=("blocks.*",))
    model = dit(2)
    be, _ = recording_backend(config, model=model)
    compile_blocks(model, be)
    model(tokens())
    assert [site.decision for site in be.report().sites] == ["sparse", "sparse"]


def test_unattached_blocks_are_dense_and_say_attach(caplog: pytest.LogCaptureFixture) -> None:
    model, x = dit(2), tokens()
    be, recorder = recording_backend(skip_config())
    compile_blocks(model, be)
    out = model(x)
    model(x)
    torch.testing.assert_close(out, expect(dit(2), 0.0)[0], **CLOSE)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "attach(model)" in warnings[0]
    report = be.report()
    assert "call attach(model)" in str(report)
    assert report.skipped == 0
    assert report.visited == 4 * TILES
    assert all(site.decision == "dense now" for site in report.sites)
    assert not report.unmatched, "no layer has a name yet, so no pattern can have missed"

    be.attach(model)  # without a recompile
    model(x)
    tiles = expect(dit(2), 0.3)[1]
    report = be.report()
    assert len(recorder.graphs) == 1
    assert [(s.name, s.decision, s.visited, s.skipped) for s in report.sites[:2]] == [
        (f"blocks.{n}.attn1", "sparse", *tiles[n]) for n in range(2)
    ]
    assert (report.site(UNKNOWN_LAYER).visited, report.site(UNKNOWN_LAYER).skipped) == (4 * TILES, 0)


def test_two_models_of_one_class_both_attached() -> None:
    high, low = dit(2), dit(2, seed=4)
    be, recorder = recording_backend(
        skip_config(ignore=("transformer_2.blocks.0.*",), rules=(Rule("transformer.blocks.1.*", threshold=0.05),))
    )
    be.attach(high, "transformer")
    be.attach(low, "transformer_2")
    compiled = [torch.compile(model, backend=be) for model in (high, low)]
    outs = [c(tokens()) for c in compiled]
    expected = [expect(high, 0.3, 0.05), expect(low, 0.0, 0.3)]
    for out, (reference, _) in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, reference, **CLOSE)
    report = be.report()
    assert len(recorder.graphs) == 1
    assert [site.name for site in report.sites] == [f"{c}.{n}" for c in ("transformer", "transformer_2") for n in NAMES]
    assert counts(report) == expected[0][1] + expected[1][1]


def test_a_second_model_that_is_not_attached_gets_what_all_candidates_get(caplog: pytest.LogCaptureFixture) -> None:
    first, second = dit(2), dit(2, seed=4)
    be, _ = recording_backend(skip_config())
    torch.compile(first, backend=be)(tokens())
    torch.compile(second, backend=be)(tokens())
    report = be.report()
    assert counts(report)[:2] == expect(first, 0.3)[1]
    tiles = expect(second, 0.3)[1]
    unknown = report.site(UNKNOWN_LAYER)
    assert (unknown.visited, unknown.skipped) == (sum(t[0] for t in tiles), sum(t[1] for t in tiles))
    assert unknown.decision == "sparse"
    assert "attach(model)" in caplog.text


def test_an_unattached_block_beside_an_ignored_one_is_dense() -> None:
    """It might be the ignored one."""
    first, second = dit(2), dit(2, seed=4)
    be, recorder = recording_backend(skip_config(ignore=("blocks.0.*",)), model=first)
    compile_blocks(first, be)
    compile_blocks(second, be)
    first(tokens())
    torch.testing.assert_close(second(tokens()), expect(dit(2, seed=4), 0.0)[0], **CLOSE)
    report = be.report()
    assert (report.site(UNKNOWN_LAYER).visited, report.site(UNKNOWN_LAYER).skipped) == (2 * TILES, 0)
    assert report.site("blocks.1.attn1").skipped > 0
    assert len(recorder.graphs) == 1


def test_attaching_a_model_that_ignores_makes_unknown_callers_dense() -> None:
    """What all candidates get is decided anew when a candidate is added."""
    first, second, third = dit(1), dit(1, seed=4), dit(1, seed=2)
    be, _ = recording_backend(skip_config(ignore=("ignored.*",)))
    run = [torch.compile(model, backend=be) for model in (first, second)]
    run[0](tokens())
    run[1](tokens())
    before = be.report().site(UNKNOWN_LAYER).skipped
    assert before > 0
    be.attach(third, "ignored")
    run[1](tokens())
    assert be.report().site(UNKNOWN_LAYER).skipped == before


def test_shared_parameters_do_not_confuse_blocks() -> None:
    model = dit(3)
    for block in model.blocks[1:]:
        block.attn1.to_q = model.blocks[0].attn1.to_q  # a module that three blocks hold
        block.ff.weight = model.blocks[0].ff.weight  # a Parameter
    be, _ = recording_backend(skip_config(ignore=("blocks.1.*",)), model=model)
    compile_blocks(model, be)
    model(tokens())
    tiles = expect(copy.deepcopy(model), 0.3, 0.0, 0.3)[1]
    assert counts(be.report()) == tiles


def test_wholly_tied_blocks_are_unknown() -> None:
    model = Dit(1).requires_grad_(False)
    model.blocks.append(Block())
    for block in model.blocks[1:]:
        for module, twin in zip(block.modules(), model.blocks[0].modules(), strict=True):
            for name in module._parameters:
                module._parameters[name] = twin._parameters[name]
    be, _ = recording_backend(skip_config(ignore=("blocks.1.*",)), model=model)
    compile_blocks(model, be)
    model(tokens())
    report = be.report()
    assert report.site(UNKNOWN_LAYER).visited == 2 * TILES
    assert report.skipped == 0


def replace_parameters(model: nn.Module) -> None:
    """As offloading does at every forward: other Parameter objects, the same names."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)


@pytest.mark.parametrize("regional", [True, False])
def test_replaced_parameters_are_recognised_without_a_recompile(regional: bool) -> None:
    model = dit(4)
    be, recorder = recording_backend(skip_config(**RULES), model=model)
    run = model if regional else torch.compile(model, backend=be)
    if regional:
        compile_blocks(model, be)
    for _ in range(3):
        run(tokens())
        replace_parameters(model)
    tiles = expect(dit(4), *LAMBDAS)[1]
    assert len(recorder.graphs) == 1
    expected = [(3 * v, 3 * s) for v, s in tiles]
    if not regional:
        expected[1] = (0, 0)  # kept
    assert counts(be.report()) == expected


def test_parameters_exchanged_between_blocks_follow_the_blocks() -> None:
    """An id that was seen before is no proof of who holds it now."""
    model = dit(2)
    be, _ = recording_backend(skip_config(ignore=("blocks.1.*",)), model=model)
    compile_blocks(model, be)
    model(tokens())
    one, two = model.blocks
    for a, b in zip(one.modules(), two.modules(), strict=True):
        a._parameters, b._parameters = b._parameters, a._parameters
    out = model(tokens())
    other = dit(2)
    other.blocks = nn.ModuleList(reversed(other.blocks))
    reference, _tiles = expect(other, 0.3, 0.0)
    torch.testing.assert_close(out, reference, **CLOSE)
    assert be.report().sites[1].skipped == 0


def test_dead_models_are_forgotten() -> None:
    be = backend(skip_config(), inner="eager")
    model = dit(2)
    be.attach(model, "transformer")
    compile_blocks(model, be)
    model(tokens())
    watch = weakref.ref(model)
    assert "transformer.blocks.0.attn1" in names(be)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert watch() is None, "the backend holds the model weakly"
    assert "transformer.blocks.0.attn1" not in names(be)


class Application:
    def run(self) -> bool:
        """Compile, call and delete a model, in one frame: is the model gone?"""
        be = backend(skip_config(), inner="eager")
        compiled = torch.compile(dit(1), backend=be)
        compiled(tokens())
        watch = weakref.ref(compiled._orig_mod)
        del compiled
        torch._dynamo.reset()
        gc.collect()
        return watch() is None and be.config is not None


def test_a_backend_does_not_keep_a_deleted_model_alive() -> None:
    assert Application().run()


class Split(nn.Module):
    """Dynamo gives up on the outer forward, so each block becomes a frame of its own."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    @torch._dynamo.disable(recursive=False)
    def walk(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.walk(x + 1)


def test_frames_that_dynamo_splits() -> None:
    torch.manual_seed(0)
    model = Split(4).requires_grad_(False)
    be, recorder = recording_backend(skip_config(**RULES), model=model)
    out = torch.compile(model, backend=be)(tokens())
    reference, tiles = expect(model, *LAMBDAS)
    torch.testing.assert_close(out, reference, **CLOSE)
    report = be.report()
    assert [site.name for site in report.sites] == [f"blocks.{n}.attn1" for n in range(4)]
    assert counts(report) == tiles
    assert sum(len(gm.graph.find_nodes(op="output")) for gm in recorder.graphs) <= 2


def test_split_frames_of_an_unattached_model_take_no_block_for_a_model() -> None:
    """The block's frame has the whole model above it on the stack: block-relative names must not become full names."""
    torch.manual_seed(0)
    model = Split(2).requires_grad_(False)
    be, _ = recording_backend(skip_config(ignore=("blocks.1.*",)))
    torch.compile(model, backend=be)(tokens())
    report = be.report()
    assert "attn1" not in [site.name for site in report.sites]
    assert report.skipped == 0 or report.site("blocks.1.attn1").skipped == 0


def test_a_break_inside_a_block() -> None:
    class Breaking(Attention):
        def forward(self, x, context=None, mask=None):
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    model = Dit(2)
    for block in model.blocks:
        block.attn1 = Breaking()
    model.requires_grad_(False)
    be, _recorder = recording_backend(skip_config(ignore=("blocks.0.*",)), model=model)
    out = torch.compile(model, backend=be)(tokens())
    reference, tiles = expect(model, 0.0, 0.3)
    torch.testing.assert_close(out, reference, **CLOSE)
    report = be.report()
    assert {site.name for site in report.sites} == set(NAMES)
    assert [report.site(name).skipped for name in NAMES] == [t[1] for t in tiles]


def test_an_attention_module_compiled_alone() -> None:
    """Its graph has no module stack."""
    model = dit(2)
    be, recorder = recording_backend(skip_config(ignore=("blocks.1.*",)), model=model)
    for block in model.blocks:
        block.attn1.compile(backend=be)
    model(tokens())
    tiles = expect(dit(2), 0.3, 0.0)[1]
    assert names(be) == NAMES
    assert counts(be.report()) == tiles
    assert len(recorder.graphs) == 1


def test_blocks_without_parameters_cannot_be_told_apart() -> None:
    class Bare(nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Bare() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    x = 4 * torch.randn(1, 1, 512, 16)
    model = Model()
    be, _ = recording_backend(skip_config(ignore=("blocks.1",)), model=model)
    for block in model.blocks:
        block.compile(backend=be)
    model(x)
    assert be.report().skipped == 0
    assert be.report().site(UNKNOWN_LAYER).visited == 2 * 8 * 4


def test_one_module_called_twice_is_two_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            return self.attn(self.attn(x))

    torch.manual_seed(0)
    model = Twice().requires_grad_(False)
    be, _ = recording_backend(skip_config())
    torch.compile(model, backend=be)(tokens())
    assert names(be) == ["attn", "attn#1"]
    assert counts(be.report()) == expect(model, 0.3)[1]


def test_a_module_held_under_two_names_has_the_first() -> None:
    model = dit(2)
    model.alias = model.blocks[0]
    be, _ = recording_backend(skip_config(), model=model)
    compile_blocks(model, be)
    model(tokens())
    assert names(be) == NAMES
