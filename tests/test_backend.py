"""The backend under torch.compile: compile counts, modes of torch, inner compilers, threads, and equality with what it replaces."""

import logging
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

import skip_attn_compile
from graphs import Recorder, recording_backend, targets
from models import TILES, TOKENS, Attention, dit, leveled, reference_sdpa, skip_config, tokens
from skip_attn_compile import Rule, SkipConfig, backend
from skip_attn_compile.backend import SkipBackend

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def counts(be: SkipBackend) -> list[tuple[int, int]]:
    return [(site.visited, site.skipped) for site in be.report().sites]


def decisions(be: SkipBackend) -> list[str]:
    return [site.decision for site in be.report().sites]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_is_eager_with_sdpa_replaced_by_the_reference(inner: str) -> None:
    model, x = dit(3), tokens()
    be = backend(skip_config(0.3), inner=inner)
    out = torch.compile(model, backend=be, fullgraph=True)(x)
    with reference_sdpa(0.3) as expected:
        reference = model(x)
    assert counts(be) == expected
    assert all(0 < skipped < visited == TILES for visited, skipped in expected)
    torch.testing.assert_close(out, reference, **CLOSE)
    assert (out - model(x)).abs().max() > 2e-3, "the effect must be visible, else nothing was compared"


def test_threshold_zero_is_plain_compile_within_rounding() -> None:
    model, x = dit(), tokens()
    be, recorder = recording_backend(skip_config(0))
    torch.testing.assert_close(torch.compile(model, backend=be)(x), torch.compile(model, backend="eager")(x), **CLOSE)
    assert [visited for visited, _ in counts(be)] == [TILES] * 2
    assert be.report().skipped == 0
    assert "skip_attn_compile.attention" in targets(recorder.graphs[0])


def test_all_kept_is_bitwise_plain_compile_and_the_same_graph_module() -> None:
    model, x = dit(), tokens()
    seen = []
    be = backend(skip_config(0.3, ignore=("*",)), inner=(recorder := Recorder()))

    def spy(gm, inputs, **keywords):
        seen.append(gm)
        return be(gm, inputs, **keywords)

    out = torch.compile(model, backend=spy)(x)
    assert recorder.graphs[0] is seen[0]
    assert torch.equal(out, torch.compile(model, backend="eager")(x))
    be = backend(skip_config(0.3, ignore=("*",)), inner="aot_eager")
    assert torch.equal(torch.compile(model, backend=be)(x), torch.compile(model, backend="aot_eager")(x))
    assert decisions(be) == ["kept", "kept"]


def test_the_threshold_changes_without_a_recompile() -> None:
    model, x = dit(1), tokens()
    be, recorder = recording_backend(skip_config(0))
    compiled = torch.compile(model, backend=be)
    before = (0, 0)
    for threshold in (0.0, 1e-3, 0.5, 0.0):
        be.update(threshold=threshold)
        out = compiled(x)
        with reference_sdpa(threshold) as expected:
            torch.testing.assert_close(out, model(x), **CLOSE)
        (now,) = counts(be)
        assert (now[0] - before[0], now[1] - before[1]) == expected[0]
        before = now
    assert before[1] > 0
    assert len(recorder.graphs) == 1
    assert be.config.threshold == 0.0


def test_four_lengths_are_one_compilation_and_short_ones_are_dense() -> None:
    model = dit(1)
    be, recorder = recording_backend(skip_config(0.5, min_kv_len=400))
    compiled = torch.compile(model, backend=be, dynamic=True)
    before = (0, 0)
    for length in (512, 399, 400, 777):
        x = tokens(length=length)
        out = compiled(x)
        with reference_sdpa(0.5 if length >= 400 else 0.0) as expected:
            torch.testing.assert_close(out, model(x), **CLOSE)
        (now,) = counts(be)
        assert (now[0] - before[0], now[1] - before[1]) == expected[0], length
        assert (expected[0][1] > 0) == (length >= 400)
        before = now
    assert len(recorder.graphs) == 1
    assert be.report().sites[0].reasons == ("dense in calls with fewer than 400 keys",)


def test_automatic_dynamic_shapes_give_a_second_graph_and_one_row() -> None:
    model = dit(1)
    be, recorder = recording_backend(skip_config(0.3))
    compiled = torch.compile(model, backend=be)
    total = [0, 0]
    for length in (512, 640, 700, 512):
        compiled(tokens(length=length))
        with reference_sdpa(0.3) as expected:
            model(tokens(length=length))
        total = [t + n for t, n in zip(total, expected[0], strict=True)]
    assert len(recorder.graphs) == 2
    assert counts(be) == [tuple(total)]
    assert len(be.report().sites[0].kv_lens) == 2


def test_a_static_short_length_is_kept_beside_a_long_one() -> None:
    model = dit(1)
    be = backend(skip_config(0.3, min_kv_len=300), inner="eager")
    compiled = torch.compile(model, backend=be, dynamic=False)
    compiled(tokens(length=256))
    assert decisions(be) == ["kept"]
    assert be.report().sites[0].reasons == ("short: 256 keys < min_kv_len 300",)
    compiled(tokens(length=512))
    (site,) = be.report().sites
    assert (site.decision, site.kv_lens, site.visited) == ("sparse", ("256", "512"), TILES)


def test_min_kv_len_counts_exactly() -> None:
    for limit, decision in ((TOKENS, "sparse"), (TOKENS + 1, "kept")):
        torch._dynamo.reset()
        be = backend(skip_config(0.3, min_kv_len=limit), inner="eager")
        torch.compile(dit(1), backend=be)(tokens())
        assert decisions(be) == [decision]


def test_graph_breaks_are_several_graphs_and_one_report() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Broken().requires_grad_(False), tokens()
    be, recorder = recording_backend(skip_config(0.3))
    out = torch.compile(model, backend=be)(x)
    with reference_sdpa(0.3) as expected:
        torch.testing.assert_close(out, model(x), **CLOSE)
    assert len(recorder.graphs) == 2
    assert [site.name for site in be.report().sites] == ["first", "second"]
    assert counts(be) == expected


def test_no_grad_and_inference_mode_take_turns() -> None:
    model, x = dit(1).requires_grad_(True), tokens()
    be = backend(skip_config(0.3), inner="aot_eager")
    compiled = torch.compile(model, backend=be)
    with torch.no_grad(), reference_sdpa(0.3) as expected:
        reference = model(x)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            out = compiled(x)
            be.update(threshold=0.3)  # writes the control tensor in this mode
            compiled(x)
        torch.testing.assert_close(out, reference, **CLOSE)
    assert be.report().visited == 8 * TILES
    assert be.report().skipped == 8 * expected[0][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_its_dtype_and_values(dtype: torch.dtype) -> None:
    model, x = dit(2), tokens()
    be = backend(skip_config(0.3), inner="aot_eager")
    with torch.autocast("cpu", dtype=dtype):
        out = torch.compile(model, backend=be, fullgraph=True)(x)
        plain = torch.compile(model, backend="aot_eager")(x)
        dense = backend(skip_config(0), inner="aot_eager")
        at_zero = torch.compile(model, backend=dense)(x)
        with reference_sdpa(0.3) as expected:
            reference = model(x)
    assert out.dtype == at_zero.dtype == plain.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps * plain.abs().max().item()
    torch.testing.assert_close(at_zero, plain, rtol=0, atol=tolerance)
    torch.testing.assert_close(out, reference, rtol=0, atol=tolerance)
    assert all(site.skipped > 0 for site in be.report().sites)
    assert counts(be) == expected


def test_autocast_that_starts_inside_the_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.attn(x)

    model, x = Model().requires_grad_(False), tokens()
    be = backend(skip_config(0), inner="aot_eager")
    out, plain = torch.compile(model, backend=be)(x), torch.compile(model, backend="aot_eager")(x)
    assert out.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(out, plain, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * plain.abs().max().item())
    assert decisions(be) == ["dense now"]


def test_bfloat16_weights() -> None:
    model, x = dit(1).bfloat16(), tokens().bfloat16()
    be = backend(skip_config(0.3), inner="aot_eager")
    out = torch.compile(model, backend=be)(x)
    with reference_sdpa(0.3) as expected:
        torch.testing.assert_close(out, model(x), rtol=0.05, atol=0.05)
    assert counts(be) == expected


def test_a_needed_gradient_keeps_sdpa_and_training_works() -> None:
    model, x = dit(1).requires_grad_(True), tokens()
    be = backend(skip_config(0.3), inner="aot_eager")
    compiled = torch.compile(model, backend=be)
    compiled(x).square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, **CLOSE)
    (site,) = be.report().sites
    assert (site.decision, site.reasons) == ("kept", ("an input requires grad, and skip-softmax attention has no backward",))
    with torch.no_grad():
        compiled(x)
    assert be.report().sites[0].visited == TILES


def test_a_graph_with_a_gradient_elsewhere_is_rewritten_and_trains() -> None:
    """Frozen attention below a head that learns."""
    model, x = dit(1), tokens()
    head = nn.Linear(32, 4)
    be = backend(skip_config(0.3), inner="aot_eager")

    def run(x):
        return head(model(x))

    torch.compile(run, backend=be)(x).sum().backward()
    assert be.report().skipped > 0
    got = head.weight.grad.clone()
    head.weight.grad = None
    with reference_sdpa(0.3):
        run(x).sum().backward()
    torch.testing.assert_close(got, head.weight.grad, rtol=1e-3, atol=1e-2)


def test_a_graph_with_symbolic_integers_among_its_outputs() -> None:
    model = dit(1)
    be, recorder = recording_backend(skip_config(0.3))

    def run(x):
        out = model(x)
        torch._dynamo.graph_break()
        return out, out.shape[1] * 2

    compiled = torch.compile(run, backend=be, dynamic=True)
    for length in (512, 600):
        out, twice = compiled(tokens(length=length))
        assert (out.shape[1], twice) == (length, 2 * length)
    assert be.report().skipped > 0
    assert sum("skip_attn_compile.attention" in targets(gm) for gm in recorder.graphs) == 1


def test_a_graph_with_no_output_but_ours() -> None:
    """Dynamo leaves out a call whose result nobody uses; a mutated buffer is a graph output for AOT alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()
            self.register_buffer("last", torch.zeros(1, TOKENS, 32))

        def forward(self, x):
            self.last.copy_(self.attn(x))

    model, x = Model().requires_grad_(False), tokens()
    be = backend(skip_config(0.3), inner="aot_eager")
    assert torch.compile(model, backend=be)(x) is None
    with reference_sdpa(0.3) as expected:
        torch.testing.assert_close(model.last, model.attn(x), **CLOSE)
    assert counts(be) == expected


def test_a_python_float_argument_of_sdpa() -> None:
    def run(x, scale):
        return F.scaled_dot_product_attention(x, x, x, scale=scale)

    x = leveled()
    be = backend(skip_config(0.3), inner="aot_eager")
    compiled = torch.compile(run, backend=be)
    for scale in (0.5, 0.25, 0.125):  # the second makes it a symbol
        out = compiled(x, scale)
        with reference_sdpa(0.3):
            torch.testing.assert_close(out, run(x, scale), **CLOSE)
    assert be.report().skipped > 0


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_other_inner_compilers_ignore_or_get_modes(mode: str | None) -> None:
    be, recorder = recording_backend(skip_config(0.3))
    torch.compile(dit(1), backend=be, mode=mode)(tokens())
    assert recorder.keywords == [{"mode": mode} if mode else {}]
    assert be.report().skipped > 0


def test_a_callable_inner_compiler_gets_the_options() -> None:
    be, recorder = recording_backend(skip_config(0.3))
    torch.compile(dit(1), backend=be, options={"level": 3})(tokens())
    assert recorder.keywords == [{"options": {"level": 3}}]


def test_a_bad_inner_compiler_is_named() -> None:
    for inner in ("inductr", None, 3, ["eager"]):
        with pytest.raises(ValueError, match="inner must be one of inductor, aot_eager, eager or a callable, got") as error:
            backend(skip_config(0.3), inner=inner)
        assert repr(inner) in str(error.value)


def test_a_bad_config_is_named() -> None:
    for config in (0.3, None, {"threshold": 0.3}):
        with pytest.raises(ValueError, match="backend needs a SkipConfig, got"):
            backend(config)


def test_an_error_of_the_inner_compiler_comes_through() -> None:
    def broken(gm, inputs):
        raise ZeroDivisionError("inner")

    with pytest.raises(Exception, match="ZeroDivisionError: inner"):
        torch.compile(dit(1), backend=backend(skip_config(0.3), inner=broken))(tokens())


def test_backends_are_compared_by_identity() -> None:
    model, x, config = dit(1), tokens(), skip_config(0.3)
    first, second = recording_backend(config), recording_backend(config)
    assert first[0] != second[0]
    assert len({first[0], second[0]}) == 2
    for be, recorder in (first, second):
        torch.compile(model, backend=be)(x)
        assert len(recorder.graphs) == 1
        assert be.report().visited == TILES


def test_a_graph_that_dynamo_is_not_capturing_compiles() -> None:
    class Add(nn.Module):
        def forward(self, x):
            return x + 1

    be = backend(skip_config())
    compiled = be(torch.fx.symbolic_trace(Add()), [torch.ones(2)])
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert be.report().graphs == 1


def test_attention_in_a_graph_that_dynamo_is_not_capturing_is_refused() -> None:
    graph = torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q))
    for node in graph.graph.nodes:
        node.meta["example_value"] = torch.zeros(1, 1, 512, 8)
    with pytest.raises(ValueError, match=r"the backend needs a graph that Dynamo is capturing, .*use torch.compile\(model, backend=...\)"):
        backend(skip_config())(graph, [torch.zeros(1, 1, 512, 8)])


def test_a_function_without_attention_is_left_alone() -> None:
    be, _recorder = recording_backend(skip_config(0.3))
    assert torch.compile(lambda x: x + 1, backend=be)(torch.zeros(2)).tolist() == [1, 1]
    report = be.report()
    assert (report.sites, report.graphs) == ([], 1)
    assert "no scaled_dot_product_attention call was seen in 1 compiled graph" in str(report)


def test_update_validates_and_changes_nothing_on_error() -> None:
    be = backend(skip_config(0.3))
    for bad in (float("nan"), -1, "0.1", None, True, torch.tensor(0.1)):
        with pytest.raises(ValueError, match="threshold"):
            be.update(threshold=bad)
    assert be.config.threshold == 0.3


def test_updates_of_two_threads_both_hold() -> None:
    be = backend(skip_config(0.5), inner="eager")
    reading = threading.Event()
    refuse = be._refuse_what_needs_a_recompile

    def slow(config: SkipConfig) -> None:
        reading.set()
        time.sleep(0.05)
        refuse(config)

    be._refuse_what_needs_a_recompile = slow
    first = threading.Thread(target=be.update, kwargs={"threshold": 0.1})
    first.start()
    reading.wait()
    be.update(disabled_until_timestep=0.9)
    first.join()
    assert (be.config.threshold, be.config.disabled_until_timestep) == (0.1, 0.9)


def test_a_parameter_as_query_is_served_where_no_gradient_is_needed() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 1, 64, 8))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.latents, x, x)

    model, x = Latents(), torch.randn(1, 1, 300, 8)
    be = backend(skip_config(0.5), inner="eager")
    compiled = torch.compile(model, backend=be)
    with torch.no_grad():
        compiled(x)
    assert be.report().sites[0].decision == "sparse"
    compiled(x).sum().backward()
    assert model.latents.grad is not None


def test_update_does_not_touch_what_rules_set() -> None:
    model, x = dit(2), tokens()
    be = backend(skip_config(0.3, rules=[Rule("blocks.1.*", threshold=0.0)]), inner="eager")
    compiled = torch.compile(model, backend=be)
    be.update(threshold=0.5)
    compiled(x)
    assert [site.threshold for site in be.report().sites] == [0.5, 0.0]
    assert [site.skipped > 0 for site in be.report().sites] == [True, False]


def test_reset_forgets_graphs_and_counts() -> None:
    model, x = dit(1), tokens()
    be, recorder = recording_backend(skip_config(0.3))
    compiled = torch.compile(model, backend=be)
    compiled(x)
    torch.compiler.reset()
    assert be.report().sites == []
    compiled(x)
    assert len(recorder.graphs) == 2
    assert be.report().visited == TILES
    be.reset()
    be.reset()
    assert be.report().graphs == 0


def test_report_of_the_one_line_form() -> None:
    model, x = dit(1), tokens()
    compiled = torch.compile(model, backend=backend(skip_config(0.3), inner="eager"))
    assert skip_attn_compile.report(compiled).graphs == 0
    compiled(x)
    assert skip_attn_compile.report(compiled).visited == TILES
    assert skip_attn_compile.report(model).visited == TILES


def test_report_of_a_compiled_function() -> None:
    model, x = dit(1), tokens()
    compiled = torch.compile(lambda x: model(x), backend=backend(skip_config(0.3), inner="eager"))
    compiled(x)
    assert skip_attn_compile.report(compiled).visited == TILES


def test_report_of_module_compile() -> None:
    model, x = dit(1), tokens()
    be = backend(skip_config(0.3), inner="eager")
    model.compile(backend=be)
    assert skip_attn_compile.report(model).graphs == 0
    model(x)
    assert skip_attn_compile.report(model).visited == TILES


def test_report_of_two_backends_asks_for_the_object() -> None:
    model, x = dit(1), tokens()
    compiled = [torch.compile(model, backend=backend(skip_config(t), inner="eager")) for t in (0.1, 0.3)]
    for each in compiled:
        each(x)
    assert [skip_attn_compile.report(each).sites[0].threshold for each in compiled] == [0.1, 0.3]
    with pytest.raises(ValueError, match="with 2 of them.*keep the backend object"):
        skip_attn_compile.report(model)


@pytest.mark.parametrize(
    "thing", [None, 3, "model", nn.Linear(1, 1), torch.compile(nn.Linear(1, 1), backend="eager")], ids=lambda t: type(t).__name__
)
def test_report_of_something_else_is_an_error(thing: object) -> None:
    with pytest.raises(ValueError, match="report needs a model that one skip_attn_compile backend has compiled"):
        skip_attn_compile.report(thing)


def test_two_threads_count_exactly() -> None:
    model = dit(2)
    inputs = [tokens(seed=seed) for seed in range(2)]
    be = backend(skip_config(0.3), inner="eager")
    compiled = torch.compile(model, backend=be)
    compiled(inputs[0])
    expected = [0, 0]
    references = []
    for n, x in enumerate(inputs):
        with reference_sdpa(0.3) as tiles:
            references.append(model(x))
        times = 10 + (n == 0)
        expected = [expected[i] + times * sum(t[i] for t in tiles) for i in range(2)]
    errors, start = [], threading.Barrier(2)

    def work(x, reference):
        try:
            start.wait()
            for _ in range(10):
                torch.testing.assert_close(compiled(x), reference, **CLOSE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, references, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [be.report().visited, be.report().skipped] == expected


def test_decisions_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="skip_attn_compile"):
        torch.compile(dit(4), backend=backend(skip_config(0.3, ignore=("blocks.1.*",)), inner="eager"))(tokens())
    assert "4 attention sites: 3 rewritten, 1 kept" in caplog.text
    assert caplog.text.count("ignored by pattern 'blocks.1.*'") == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_dynamo_restarts_are_not_counted_twice() -> None:
    """AOTAutograd may call the backend twice for one frame; only the second graph is there in the end."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    class Restarting(Recorder):
        def __call__(self, gm, inputs, **keywords):
            run = super().__call__(gm, inputs, **keywords)
            if len(self.graphs) == 1:
                raise TensorifyScalarRestartAnalysis
            return run

    be = backend(skip_config(0.3), inner=(inner := Restarting()))
    torch.compile(dit(1), backend=be)(tokens())
    assert len(inner.graphs) == 2
    assert be.report().graphs == 1
    assert be.report().visited == TILES


def test_example_inputs_of_dynamo_are_not_changed() -> None:
    lengths = []

    def spy(gm, inputs):
        lengths.append((len(inputs), len(gm.graph.find_nodes(op="placeholder"))))
        run = be(gm, inputs)
        lengths.append((len(inputs), len(gm.graph.find_nodes(op="placeholder"))))
        return run

    be = backend(skip_config(0.3), inner="eager")
    torch.compile(dit(1), backend=spy)(tokens())
    assert lengths[0] == lengths[1]


def test_the_backend_composes_with_a_counter() -> None:
    counter = CompileCounter()
    be = backend(skip_config(0.3), inner=counter)
    torch.compile(dit(2), backend=be)(tokens())
    assert counter.frame_count == 1
    assert be.report().skipped > 0


# Inductor itself: few, each costs seconds.


def test_inductor_with_modes_and_options() -> None:
    model, x = dit(1), tokens()
    with reference_sdpa(0.3) as expected:
        reference = model(x)
    be = backend(skip_config(0.3))
    for keywords in ({}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": True}}):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=be, fullgraph=True, **keywords)(x), reference, **CLOSE)
        assert counts(be) == expected


@pytest.mark.parametrize("keywords", [{"options": {"epilogue_fusoin": True}}, {"mode": "fastest"}], ids=str)
def test_inductor_refuses_bad_modes_and_options(keywords: dict) -> None:
    with pytest.raises(Exception, match="epilogue_fusoin|fastest"):
        torch.compile(dit(1), backend=backend(skip_config(0.3)), **keywords)(tokens())


def test_inductor_dynamic_shapes_and_updates() -> None:
    model = dit(1)
    be = backend(skip_config(0.3, min_kv_len=300))
    compiled = torch.compile(model, backend=be, dynamic=True)
    with torch.inference_mode():
        for length, threshold in ((512, 0.3), (256, 0.3), (640, 0.0), (700, 0.5)):
            be.update(threshold=threshold)
            x = tokens(length=length)
            out = compiled(x)
            with reference_sdpa(threshold if length >= 300 else 0.0):
                torch.testing.assert_close(out, model(x), **CLOSE)
    assert be.report().graphs == 1


CACHE_SCRIPT = """
import sys, torch, skip_attn_compile
from torch._dynamo.utils import counters
from models import leveled, reference_sdpa, skip_config

class Attend(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

model, x = torch.nn.Sequential(Attend(), Attend()), leveled()
for version, fields in eval(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    skip_attn_compile.__version__ = version
    be = skip_attn_compile.backend(skip_config(**fields))
    out = torch.compile(model, backend=be)(x)
    ignored, threshold = "0" in fields.get("ignore", ()), be.config.threshold
    with reference_sdpa(0.0 if ignored else threshold, threshold, tile_order=be.config.tile_order) as tiles:
        torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)
    seen = [(site.visited, site.skipped) for site in be.report().sites]
    assert seen == ([(0, 0), tiles[1]] if ignored else tiles), (seen, tiles)
    assert seen[1][1] > 0
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    misses = counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    assert (hits > 0) != (misses > 0), counters
    print("hit" if hits else "miss")
"""


def test_inductors_disk_cache_knows_config_and_version(tmp_path: pathlib.Path) -> None:
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}

    def run(*steps: tuple[str, dict]) -> list[str]:
        command = [sys.executable, "-c", CACHE_SCRIPT, repr(steps)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split()

    assert run(("1", {"threshold": 0.3})) == ["miss"]
    steps = {
        "the same": ("1", {"threshold": 0.3}, "hit"),
        "lambda is an input of the graph": ("1", {"threshold": 0.5}, "hit"),
        "another order": ("1", {"threshold": 0.3, "tile_order": "own_first"}, "miss"),
        "another site": ("1", {"threshold": 0.3, "ignore": ("0",)}, "miss"),
        "another version of this package": ("2", {"threshold": 0.3}, "miss"),
    }
    found = run(*(step[:2] for step in steps.values()))
    assert dict(zip(steps, found, strict=True)) == {name: step[2] for name, step in steps.items()}


def test_lack_of_an_implementation_is_a_warning_and_other_reasons_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="skip_attn_compile")
    for config in (skip_config(implementation="sm90"), skip_config(implementation="sm90", ignore=("*",)), skip_config(ignore=("*",))):
        be, _ = recording_backend(config)
        torch.compile(dit(), backend=be)(tokens())
        torch._dynamo.reset()
    warnings = {r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == "skip_attn_compile.backend"}
    assert any("blocks.0.attn1 is kept: sm90 runs on cuda, not on cpu" in message for message in warnings)
    assert not any("ignored" in message for message in warnings)
