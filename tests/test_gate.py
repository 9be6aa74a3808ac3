"""The timestep gate of compiled models: where t comes from, what it changes, what it must not cost."""

import contextvars
import copy
import gc
import logging
import pickle
import threading
import types
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from models import DIM, dit, skip_config, tokens
from skip_attn_compile import TimestepSpec, backend, timestep
from skip_attn_compile.backend import SkipBackend
from skip_attn_compile.calls import innermost_call
from skip_attn_compile.steps import StepLog
from skip_attn_compile.timestep import Reading

SPEC = TimestepSpec("timestep", 1000)


class Noisy(nn.Module):
    """A model that is told its noise level. Its class is not one that the package knows."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.dit = dit(blocks)

    def forward(self, x: Tensor, timestep: Tensor | float | None = None, scale: float = 1.0) -> Tensor:
        return self.dit(x) * scale if timestep is None else self.dit(x + 0 * torch.as_tensor(timestep).max()) * scale


class WanTransformer3DModel(Noisy):
    """One whose class it does know: timesteps up to 1000."""


X = tokens()


def gated(threshold: float = 0.3, cutoff: float = 0.97, **keywords) -> SkipBackend:
    return backend(skip_config(threshold, disabled_until_timestep=cutoff), inner="eager", **keywords)


def steps(be: SkipBackend) -> list[tuple[float | None, bool]]:
    return [(step.t, step.dense) for run in be.report().runs for step in run.steps]


def skipped(be: SkipBackend) -> int:
    """Since the last time it was asked."""
    before = getattr(be, "_seen", 0)
    be._seen = be.report().skipped
    return be._seen - before


def t(*values: float) -> Tensor:
    return torch.tensor(values)


# Sources


def test_a_graph_that_holds_the_model_sees_its_argument_from_the_first_call_on() -> None:
    be, model = gated(), WanTransformer3DModel()
    compiled = torch.compile(model, backend=be, fullgraph=True)
    outputs = {level: compiled(X, t(level)) for level in (1000.0, 970.0, 971.0)}
    assert steps(be) == [(1.0, True), (pytest.approx(0.97), False), (pytest.approx(0.971), True)]
    assert [str(run) for run in be.report().runs] == [
        "WanTransformer3DModel: 2 steps, 1 dense (t = 1), 1 sparse (t = 0.97); t from argument timestep",
        "WanTransformer3DModel: 1 step, 1 dense (t = 0.971), 0 sparse; t from argument timestep",
    ]
    assert torch.equal(outputs[1000.0], outputs[971.0])
    assert not torch.equal(outputs[1000.0], outputs[970.0]), "the effect must be visible, else nothing was compared"
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("position", ["positional", "keyword"])
def test_an_attached_model_shows_its_argument_by_a_hook(position: str) -> None:
    be, model = gated(), Noisy()
    be.attach(model, "transformer", timestep_spec=SPEC)
    model.compile(backend=be, fullgraph=True)
    for level in (1000.0, 500.0):
        model(X, t(level)) if position == "positional" else model(x=X, timestep=t(level))
    assert steps(be) == [(1.0, True), (0.5, False)]
    assert [run.model for run in be.report().runs] == ["transformer"]
    assert 0 < be.report().skipped < be.report().visited


def test_blocks_compiled_one_by_one_get_the_level_of_their_model() -> None:
    be, model = gated(), WanTransformer3DModel(3)
    be.attach(model)
    for block in model.dit.blocks:
        block.compile(backend=be)
    model(X, t(1000.0))
    assert (skipped(be), be.report().graphs) == (0, 1)
    model(X, t(970.0))
    assert steps(be) == [(1.0, True), (pytest.approx(0.97), False)], "one step, not one for each block"
    assert all(site.skipped > 0 for site in be.report().sites)


@pytest.mark.parametrize("value", [(0.2, 0.98, 0.1), ((0.2, 0.98), (0.3, 0.1))], ids=["per sample", "per token"])
def test_the_largest_noise_level_counts(value) -> None:
    be, model = gated(), WanTransformer3DModel()
    compiled = torch.compile(model, backend=be)
    compiled(X, 1000 * torch.tensor(value))
    compiled(X, 1000 * torch.tensor(value).clamp(max=0.5))
    assert steps(be) == [(pytest.approx(0.98), True), (0.5, False)]


def test_explicit_t_beats_the_argument_and_ends_with_the_block() -> None:
    be, model = gated(), WanTransformer3DModel()
    be.attach(model)
    compiled = torch.compile(model, backend=be)
    with timestep(0.2):
        compiled(X, t(1000.0))
        with timestep(t(0.99)):
            compiled(X, t(1.0))
    compiled(X, t(1000.0))
    assert [(s.source, s.dense) for run in be.report().runs for s in run.steps] == [
        ("timestep()", False),
        ("timestep()", True),
        ("argument timestep", True),
    ]


def test_python_numbers_as_timesteps() -> None:
    be, model = gated(), Noisy()
    be.attach(model, timestep_spec=SPEC)
    compiled = torch.compile(model, backend=be)
    for level in (1000, 970, 970.5, 1.0):
        compiled(X, level)
    assert [dense for _, dense in steps(be)] == [True, False, True, False]


def test_a_decorated_forward_is_seen_too() -> None:
    import functools

    def decorated(forward):
        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

        return wrapper

    model = type("WanTransformer3DModel", (Noisy,), {"forward": decorated(Noisy.forward)})()
    be = gated()
    compiled = torch.compile(model, backend=be, fullgraph=True)
    compiled(X, t(1000.0))
    compiled(X, timestep=t(500.0))
    assert steps(be) == [(1.0, True), (0.5, False)]


# t not known


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_unknown_t_is_dense_with_one_warning(caplog) -> None:
    be, model = gated(), Noisy()
    compiled = torch.compile(model, backend=be)
    for _ in range(3):
        compiled(X, t(1.0))
    assert skipped(be) == 0
    [warning] = warnings_of(caplog)
    assert "the noise level of a call of forward is not known, so it is dense; attach(model)" in warning
    report = be.report()
    assert [str(run) for run in report.runs] == ["Noisy: 1 step, 1 dense, 0 sparse; t from no source"]
    with timestep(0.5):  # the way that needs no attach
        compiled(X, t(1.0))
    assert skipped(be) > 0


def test_blocks_of_an_unattached_model_are_dense_with_one_warning(caplog) -> None:
    be, model = gated(), WanTransformer3DModel()
    for block in model.dit.blocks:
        block.compile(backend=be)
    model(X, t(1.0))
    assert skipped(be) == 0
    [warning] = warnings_of(caplog)
    assert "attach(model)" in warning


@pytest.mark.parametrize(
    ("model", "spec", "value", "text"),
    [
        (Noisy, None, t(1.0), "how Noisy is told its noise level is not known, so it is dense; say it with attach(model, timestep_spec="),
        (Noisy, SPEC, None, "Noisy was called without a number or tensor timestep, so the call is dense"),
        (Noisy, TimestepSpec("timestep"), t(500.0), "Noisy was called with timestep = 500, which would be noise level 500, outside [0, 1]"),
        (Noisy, SPEC, t(float("nan")), "Noisy was called with timestep = nan, which would be noise level nan"),
    ],
    ids=["class", "argument", "scale", "nan"],
)
def test_what_an_attached_model_does_not_tell_is_dense_with_one_warning(model, spec, value, text, caplog) -> None:
    be, model = gated(), model()
    be.attach(model, timestep_spec=spec)
    compiled = torch.compile(model, backend=be)
    for factor in (1.0, 0.9):  # another value at each step is no other mistake
        compiled(X, None if value is None else factor * value)
    assert be.report().skipped == 0
    [warning] = warnings_of(caplog)
    assert text in warning


def test_rounding_beyond_pure_noise_is_no_mistake(caplog) -> None:
    be, model = gated(), WanTransformer3DModel()
    torch.compile(model, backend=be)(X, t(1000.5))
    assert steps(be) == [(1.0, True)]
    assert not warnings_of(caplog)


def test_a_bad_spec_is_named() -> None:
    with pytest.raises(ValueError, match=r"timestep_spec must be a TimestepSpec\(argument, scale\), got 1000"):
        gated().attach(Noisy(), timestep_spec=1000)
    be = gated()
    with pytest.raises(ValueError, match=r"must name an argument of Noisy.forward \(x, timestep, scale\), got 'timestp'"):
        be.attach(Noisy(), timestep_spec=TimestepSpec("timestp"))
    assert not be._models.live()
    model = dit(1)
    model.forward = types.MethodType(lambda self, x, sigma: x, model)
    be.attach(model, timestep_spec=TimestepSpec("sigma"))  # of the instance's own forward


# What it must not cost


def test_gate_off_never_reads_t(monkeypatch) -> None:
    def refuse(*_):
        raise AssertionError("t was read")

    monkeypatch.setattr(TimestepSpec, "noise_level", refuse)
    be, model = gated(cutoff=0.0), WanTransformer3DModel()
    be.attach(model)
    compiled = torch.compile(model, backend=be)
    compiled(X, t(1000.0))
    assert skipped(be) > 0
    assert not model._forward_pre_hooks
    assert be.report().runs == []
    be.update(disabled_until_timestep=0.5)
    with pytest.raises(AssertionError, match="t was read"):
        compiled(X, t(1000.0))


def test_the_gate_changes_without_a_recompile() -> None:
    counter = CompileCounterWithBackend("eager")
    model = WanTransformer3DModel()
    be = backend(skip_config(0.3), inner=counter, model=model)
    compiled = torch.compile(model, backend=be)
    compiled(X, t(900.0))
    assert skipped(be) > 0
    be.update(disabled_until_timestep=0.5)  # installs the hook: no recompile either
    assert model._forward_pre_hooks
    compiled(X, t(900.0))
    assert skipped(be) == 0
    for level in range(1000, 0, -50):
        compiled(X, t(float(level)))
    assert [run.dense_steps for run in be.report().runs] == [1, 10]
    assert be.config.threshold == 0.3
    be.update(threshold=0.0, disabled_until_timestep=0.0)
    compiled(X, t(900.0))
    assert counter.frame_count == 1


def test_update_names_what_is_wrong() -> None:
    be = gated()
    with pytest.raises(ValueError, match="needs threshold, target_sparsity or disabled_until_timestep, got none"):
        be.update()
    with pytest.raises(
        ValueError, match=r"disabled_until_timestep must be a noise level in \[0, 1\], 1 = pure noise and 0 = no gate, got 970"
    ):
        be.update(disabled_until_timestep=970)
    assert be.config.disabled_until_timestep == 0.97


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), None, True, "0.97"])
def test_a_bad_cutoff_is_named(value) -> None:
    with pytest.raises(ValueError, match=r"disabled_until_timestep must be a noise level in \[0, 1\]"):
        skip_config(disabled_until_timestep=value)


def test_dense_is_bitwise_threshold_zero() -> None:
    model = WanTransformer3DModel()
    be = gated()
    out = torch.compile(model, backend=be)(X, t(1000.0))
    torch.compiler.reset()
    assert torch.equal(out, torch.compile(model, backend=gated(0.0, 0.0))(X, t(1000.0)))


def test_attaching_again_leaves_one_hook_and_models_stay_copies_of_themselves() -> None:
    be, model = gated(), WanTransformer3DModel()
    be.attach(model)
    be.attach(model, "transformer")
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X, t(1.0)), model(X, t(1.0)))
    compiled = torch.compile(model, backend=be)
    compiled(X, t(500.0))
    assert steps(be) == [(0.5, False)]


def test_a_failed_call_leaves_no_level_behind() -> None:
    be, model = gated(), WanTransformer3DModel()
    be.attach(model)
    block = model.dit.blocks[0]
    block.compile(backend=be)
    with pytest.raises(RuntimeError):
        model(torch.randn(1, 4, DIM + 1), t(1000.0))
    block(X)
    assert steps(be) == [(None, True)]


def test_two_threads_do_not_see_each_others_t() -> None:
    be, model = gated(), WanTransformer3DModel()
    be.attach(model)
    compiled = torch.compile(model, backend=be)
    compiled(X, t(1.0))
    be._gate.log.clear()
    barrier = threading.Barrier(2)

    def denoise(levels: list[float]) -> None:
        for level in levels:
            barrier.wait()
            compiled(X, t(level))

    schedules = [[1000.0, 990.0, 980.0], [500.0, 400.0, 300.0]]
    threads = [threading.Thread(target=denoise, args=(levels,)) for levels in schedules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.dense_steps for run in be.report().runs) == [0, 3]
    assert all(len(run.steps) == 3 for run in be.report().runs)


def test_a_dropped_backend_is_not_kept_alive_by_its_hooks() -> None:
    model = WanTransformer3DModel()
    be = gated(model=model)
    reference = weakref.ref(be)
    del be
    gc.collect()
    assert reference() is None
    model(X, t(1.0))


def test_an_interrupted_call_does_not_keep_the_model_alive() -> None:
    be, model = gated(), WanTransformer3DModel()
    be.attach(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model.dit.proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X, t(1.0))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_an_interrupted_call_is_not_taken_for_one_that_runs() -> None:
    be, model = gated(), WanTransformer3DModel()
    be.attach(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        handle = model.dit.proj.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(X, t(1.0))
        handle.remove()
    assert innermost_call(be._gate).outer is None, "each call forgets the one before"
    model(X, t(1.0))
    assert innermost_call(be._gate) is None


def test_a_thread_inside_a_call_sees_it() -> None:
    """As asyncio.to_thread runs it: with a copy of the context."""
    be, seen = gated(), []

    class Outer(Noisy):
        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            thread = threading.Thread(target=contextvars.copy_context().run, args=(self.dit, x))
            thread.start()
            thread.join()
            seen.append(innermost_call(be._gate))
            return x

    model = Outer()
    be.attach(model, timestep_spec=SPEC)
    be.attach(model.dit, "inner", timestep_spec=TimestepSpec("x"))
    model.dit.proj.register_forward_pre_hook(lambda *_: seen.append(innermost_call(be._gate)))
    model(X, t(500.0))
    inner, outer = seen
    assert (inner.module(), inner.outer.module(), outer.module()) == (model.dit, model, model)


def test_every_call_of_a_step_finds_the_steps_entry() -> None:
    log, readings = StepLog(), [Reading(0.5, "x"), Reading(0.5, "x")]
    for reading in readings:
        log.add("model", reading, False)
    [entry] = log._entries["model", threading.get_ident()]
    assert entry.reading is readings[1], "the blocks of the second call compare with it"
    assert [str(run) for run in log.runs()] == ["model: 1 step, 0 dense, 1 sparse (t = 0.5); t from x"]


def test_backends_that_are_gone_leave_no_hooks() -> None:
    model = WanTransformer3DModel()
    for _ in range(3):
        be = gated(model=model)
    del be
    gc.collect()
    model(X, t(1.0))
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_gate_switched_off_takes_its_hooks_off() -> None:
    model = WanTransformer3DModel()
    be, other = gated(model=model), gated(model=model)
    be.update(disabled_until_timestep=0.0)
    assert len(model._forward_pre_hooks) == 1, "the other backend's"
    other.update(disabled_until_timestep=0.0)
    assert not model._forward_pre_hooks


def test_a_model_that_calls_itself_keeps_its_level() -> None:
    class Twice(WanTransformer3DModel):
        def forward(self, x: Tensor, timestep: Tensor, again: bool = True) -> Tensor:
            x = self(x, timestep / 2, again=False) if again else x
            return super().forward(x, timestep)

    be, model = gated(cutoff=0.4), Twice()
    be.attach(model)
    for block in model.dit.blocks:
        block.compile(backend=be)
    model(X, t(600.0))
    assert steps(be) == [(pytest.approx(0.3), False), (pytest.approx(0.6), True)]


def test_the_gate_moves_within_one_explicit_step() -> None:
    be, model = gated(), WanTransformer3DModel()
    compiled = torch.compile(model, backend=be)
    with timestep(0.5):
        compiled(X, t(1.0))
        be.update(disabled_until_timestep=0.2)
        compiled(X, t(1.0))
    assert steps(be) == [(0.5, False), (0.5, True)]


# A level on a device is a tensor that nothing waits for. The CPU has no such tensors; `meta` has, and cannot be read at all.


def test_a_level_on_a_device_is_never_read() -> None:
    be = gated()
    reading = be._gate._from_argument("Noisy", SPEC, torch.full((2,), 970.0, device="meta"))
    assert reading.level.device.type == "meta"
    assert reading.dense(0.97).device.type == "meta"
    assert reading.dense(0.97) is reading.dense(0.97), "one kernel a model call, not one for each block"
    be._gate.log.add("model", reading, reading.dense(0.97))
