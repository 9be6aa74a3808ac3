"""capture: Dynamo's flags around one model's forward, for what depends on values, and nowhere else."""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from diffusers_models import CASES, run
from models import Dit, dit, skip_config, tokens
from skip_attn_compile import backend, capture, compile_pipeline


class Ragged(nn.Module):
    """Attention over the tokens that a mask leaves, as Mochi's: their number is a value."""

    def __init__(self) -> None:
        super().__init__()
        self.dit: Dit = dit(1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = torch.nonzero(mask).flatten()
        return self.dit(torch.cat([x, x[:, kept]], 1))


class Pipeline:
    """What compile_pipeline needs of one."""

    def __init__(self, **components: nn.Module) -> None:
        self.components = components

    def __call__(self) -> None: ...


MASK = torch.arange(512) < 384


def flags() -> tuple[bool, bool]:
    config = torch._dynamo.config
    return config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops


def test_one_graph_holds_what_depends_on_values() -> None:
    model, before = Ragged(), flags()
    counter = CompileCounterWithBackend("eager")
    be = backend(skip_config(0.3), inner=counter)
    be.attach(model)
    taken = capture(model)
    compiled = torch.compile(model, backend=be)
    expected = compiled(tokens(), MASK)
    assert flags() == before
    assert counter.frame_count == 1
    assert be.report().site("dit.blocks.0.attn1").skipped > 0
    compiled(tokens(), torch.arange(512) < 256)
    compiled(tokens().double().float(), MASK)
    compiled(tokens(batch=2), MASK)  # a recompile: captured again
    assert [len(list(graph.graph.find_nodes(op="call_function", target=torch.nonzero))) for graph in counter.graphs] == [1, 1]
    taken.remove()
    assert not model._forward_pre_hooks
    torch.testing.assert_close(compiled(tokens(), MASK), expected)


def test_flags_are_restored_after_a_failure_and_in_nested_calls() -> None:
    outer = nn.Sequential(Ragged())
    before = flags()
    capture(outer)
    capture(outer[0])
    seen: list[tuple[bool, bool]] = []
    outer[0].dit.register_forward_pre_hook(lambda *_: seen.append(flags()))
    with pytest.raises(TypeError, match="mask"):
        outer(tokens())
    assert flags() == before
    outer[0](tokens(), MASK)
    assert seen == [(True, True)]
    assert flags() == before


def test_a_hook_that_fails_first_and_an_interrupt_leave_nothing_behind() -> None:
    model, before = Ragged(), flags()
    failing = model.register_forward_pre_hook(lambda *_: 1 / 0)
    capture(model)
    with pytest.raises(ZeroDivisionError):
        model(tokens(), MASK)
    failing.remove()
    model(tokens(), MASK)
    assert flags() == before

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    interrupting = model.dit.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens(), MASK)
    interrupting.remove()
    model(tokens(), MASK)
    assert flags() == before

    def swallow(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            inner(tokens())

    inner = dit(1)
    capture(inner)
    inner.proj.register_forward_pre_hook(interrupt)
    swallowing = model.register_forward_pre_hook(swallow)
    model(tokens(), MASK)
    swallowing.remove()
    assert flags() == before, "an inner call that was interrupted and caught"
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        model(tokens(), MASK)
        assert flags() == (True, before[1]), "what the user sets himself stays"


@pytest.mark.parametrize("when", ["interrupted", "running"])
def test_taken_off_in_the_middle_of_a_call(when: str) -> None:
    model, before = Ragged(), flags()
    taken = capture(model)

    def act(*_: object) -> None:
        if when == "interrupted":
            raise KeyboardInterrupt
        taken.remove()

    model.dit.register_forward_pre_hook(act)
    with contextlib.suppress(KeyboardInterrupt):
        model(tokens(), MASK)
    taken.remove()
    assert flags() == before


def test_mochi_is_served() -> None:
    """diffusers' own: its joint attention depends on the number of text tokens, and is in no graph without the flags."""
    case = next(case for case in CASES if case.class_name == "MochiTransformer3DModel")
    for captured in (False, True):
        torch.compiler.reset()
        model, before = case.build(), flags()
        counter = CompileCounterWithBackend("eager")
        be = backend(skip_config(0.3), inner=counter, model=model)
        if captured:
            capture(model)
        model.compile(backend=be)
        run(model, case.draw())
        report = be.report()
        joint = [site for site in report.sites if site.name.endswith("attn1")]
        assert [site.skipped > 0 for site in joint] == [True] * len(joint)
        assert len(joint) == (model.config.num_layers if captured else 0)
        assert any("attn1 (MochiAttention): " in note and "skip_attn_compile.capture(model)" in note for note in report.notes) != captured
        assert (counter.frame_count == 1) == captured
        assert flags() == before


def test_for_a_pipeline_and_taken_off_again() -> None:
    model = Ragged()
    pipe = Pipeline(transformer=model)
    handle = compile_pipeline(pipe, skip_config(0.3), capture=True, inner="eager", fullgraph=True)
    model(tokens(), MASK)
    assert handle.report().site("transformer.dit.blocks.0.attn1").skipped > 0
    handle.uncompile()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(ValueError, match=r"capture needs the torch.nn.Module that is compiled, got str"):
        capture("model")
