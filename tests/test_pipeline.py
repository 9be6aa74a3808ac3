"""compile_pipeline on real diffusers pipelines with tiny weights: outputs, gate, runs, counts; and what is left after uncompile."""

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from pipelines import CALLS, cogvideox, flux, ltx, run, wan22
from skip_attn_compile import Calibration, Rule, SkipConfig, compile_pipeline
from skip_attn_compile.pipeline import CompiledPipeline, SchedulerLevel
from skip_attn_compile.schedule import noise_levels
from skip_attn_compile.timestep import spec_of

# lambda 1 skips what it can: the effect must be visible in weights that are random.
EVERYTHING = {"threshold": 1.0, "min_kv_len": 0, "tile_order": "own_first"}


def config(**fields: Any) -> SkipConfig:
    return SkipConfig(**{**EVERYTHING, **fields})


def steps(handle: CompiledPipeline) -> dict[str, list[list[tuple[float, bool]]]]:
    """Component -> runs -> (t, dense)."""
    found: dict[str, list[list[tuple[float, bool]]]] = {}
    for r in handle.report().runs:
        found.setdefault(r.model, []).append([(step.t, step.dense) for step in r.steps])
    return found


def state(pipe: DiffusionPipeline) -> list[Any]:
    """All that a compiled pipeline could leave behind on its modules and on itself."""
    modules = [m for part in pipe.components.values() if isinstance(part, nn.Module) for m in part.modules()]
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._forward_hooks_always_called)) for m in modules]
    return [
        sorted(vars(pipe)),
        [type(part) for part in pipe.components.values()],
        [sorted(vars(m)) for m in modules],
        [m.forward.__func__ for m in modules],
        hooks,
    ]


# What a run shows


@pytest.mark.parametrize("build", CALLS, ids=lambda build: build.__name__)
def test_dense_steps_are_dense_and_the_rest_skips(build: Callable[[], DiffusionPipeline]) -> None:
    pipe = build()
    plain, before = run(pipe), state(pipe)
    handle = compile_pipeline(pipe, config(disabled_until_timestep=0.9), inner="aot_eager")
    sparse = run(pipe)
    seen = steps(handle)
    for component, runs in seen.items():
        [levels] = runs
        assert [dense for _, dense in levels] == [t > 0.9 for t, _ in levels]
        assert handle.backends[component].report().skipped > 0 or all(dense for _, dense in levels)
    assert sum(len(levels) for [levels] in seen.values()) == 8
    assert any(dense for [levels] in seen.values() for _, dense in levels)
    assert not torch.equal(plain, sparse)
    handle.update(threshold=0.0)
    torch.testing.assert_close(run(pipe), plain, rtol=1e-3, atol=1e-3)
    handle.uncompile()
    assert torch.equal(run(pipe), plain)
    assert state(pipe) == before
    assert handle.report().skipped > 0, "the report stays readable"


def test_the_schedulers_own_sigma_decides() -> None:
    """Shift 5 and 30 steps: five sigmas are above .97, the fifth by less than its integer timestep is truncated."""
    pipe = wan22(boundary_ratio=0.5)
    handle = compile_pipeline(pipe, config(disabled_until_timestep=0.97), inner="eager")
    run(pipe, steps=30)
    assert "t from the scheduler" in str(handle.report())
    [levels] = steps(handle)["transformer"]
    assert sum(dense for _, dense in levels) == 5
    exact = noise_levels(pipe.scheduler)
    assert [t for [levels] in steps(handle).values() for t, _ in levels] == exact
    truncated = [int(t) / 1000 for t in pipe.scheduler.timesteps]
    assert all(a < b for a, b in zip(truncated, exact, strict=True))
    handle.update(disabled_until_timestep=(truncated[4] + exact[4]) / 2)  # dense by the sigma, sparse by the timestep
    run(pipe, steps=30)
    assert sum(dense for _, dense in steps(handle)["transformer"][1]) == 5


def test_two_experts_of_one_class_have_their_own_curves() -> None:
    high, low = Calibration(5.0, 2.0), Calibration(1.0, 4.0)
    configs = {
        "transformer": config(threshold=None, target_sparsity=0.3, calibration=high),
        "transformer_2": config(threshold=None, target_sparsity=0.5, calibration=low, ignore=("blocks.1.*",)),
    }
    pipe = wan22()
    handle = compile_pipeline(pipe, configs, inner="eager")
    run(pipe)
    report = handle.report()
    site = report.site("transformer.blocks.0.attn1")
    assert site.threshold == pytest.approx(high.threshold_at(0.3, int(site.kv_lens[0])))
    site = report.site("transformer_2.blocks.0.attn1")
    assert site.threshold == pytest.approx(low.threshold_at(0.5, int(site.kv_lens[0])))
    assert report.site("transformer.blocks.1.attn1").decision == "sparse"
    assert report.site("transformer_2.blocks.1.attn1").decision == "kept"
    assert report.runs == [], "no gate, no runs"


def test_no_recompile_in_twenty_steps_with_a_gate_in_the_middle() -> None:
    pipe, counter = flux(), CompileCounterWithBackend("eager")
    handle = compile_pipeline(pipe, config(disabled_until_timestep=0.5), inner=counter)
    run(pipe, steps=20)
    assert counter.frame_count == 1
    [levels] = steps(handle)["transformer"]
    assert len(levels) == 20
    assert 3 < sum(dense for _, dense in levels) < 17
    handle.update(disabled_until_timestep=0.8, threshold=0.5)
    run(pipe, steps=20, seed=1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("build", [wan22, ltx], ids=lambda build: build.__name__)
def test_regional_compilation_gives_the_same_steps_and_counts(build: Callable[[], DiffusionPipeline]) -> None:
    outcomes = []
    for regional in (False, True):
        torch.compiler.reset()
        pipe = build()
        handle = compile_pipeline(pipe, config(disabled_until_timestep=0.9), regional=regional, inner="eager")
        out = run(pipe, steps=4)
        sites = {site.name: (site.decision, site.visited, site.skipped) for site in handle.report().sites}
        outcomes.append((steps(handle), sites, out))
        handle.uncompile()
        modules = pipe.transformer.modules()
        assert not any("_compiled_call_impl" in vars(m) or m._forward_pre_hooks or m._forward_hooks for m in modules)
    (whole_steps, whole_sites, whole), (regional_steps, regional_sites, blocks) = outcomes
    assert regional_steps == whole_steps
    assert regional_sites == whole_sites
    torch.testing.assert_close(blocks, whole)


def test_guidance_in_one_call_or_two_is_one_step() -> None:
    for pipe, calls in ((cogvideox(), 1), (flux(), 1), (flux(), 2)):
        handle = compile_pipeline(pipe, config(disabled_until_timestep=0.5), inner="eager")
        made = []
        hook = pipe.transformer.register_forward_pre_hook(lambda *_, made=made: made.append(1))
        run(pipe, steps=6, **({"negative_prompt": "no", "true_cfg_scale": 2.0} if calls == 2 else {}))
        hook.remove()
        assert len(made) == 6 * calls
        [levels] = steps(handle)["transformer"]
        assert len(levels) == 6


def test_two_pipelines_in_two_threads_see_their_own_steps_and_counts() -> None:
    pipes = [wan22(), flux()]  # here: weights are drawn from the one generator of all threads
    handles = [
        compile_pipeline(pipe, config(disabled_until_timestep=cutoff), inner="eager")
        for pipe, cutoff in zip(pipes, (0.9, 0.4), strict=True)
    ]

    def outcome(n: int) -> tuple[Any, int]:
        before = handles[n].report().skipped
        run(pipes[n], steps=4)
        return {name: runs[-1] for name, runs in steps(handles[n]).items()}, handles[n].report().skipped - before

    expected = [outcome(n) for n in range(2)]
    found: list[Any] = [None, None]

    def work(n: int) -> None:
        found[n] = outcome(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


# The scheduler's level


SCHEDULERS = {
    "FlowMatchEuler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "FlowMatchHeun": lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0),
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"),
    "UniPC of timesteps": diffusers.UniPCMultistepScheduler,
    "DPM++": diffusers.DPMSolverMultistepScheduler,
    "DPM++ single": diffusers.DPMSolverSinglestepScheduler,
    "DPM++ flow": lambda: diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"),
    "DEIS": diffusers.DEISMultistepScheduler,
    "Euler": diffusers.EulerDiscreteScheduler,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "Heun": diffusers.HeunDiscreteScheduler,
    "KDPM2": diffusers.KDPM2DiscreteScheduler,
    "KDPM2 ancestral": diffusers.KDPM2AncestralDiscreteScheduler,
    "LCM": diffusers.LCMScheduler,
    "LMS": diffusers.LMSDiscreteScheduler,
    "EDM": diffusers.EDMEulerScheduler,
    "EDM DPM++": diffusers.EDMDPMSolverMultistepScheduler,
    "SCM": lambda: diffusers.SCMScheduler(prediction_type="trigflow"),
    "SA": diffusers.SASolverScheduler,
    "TCD": diffusers.TCDScheduler,
    "IPNDM": diffusers.IPNDMScheduler,
}


class Loop:
    """What a pipeline does with its scheduler; `see` is asked at each model call."""

    def __init__(self, scheduler: Any, told: bool, shown: bool = False) -> None:
        self.scheduler, self.told, self.shown = scheduler, told, shown

    def __call__(self, see: Callable[[], Any], skip: int = 0) -> list[Any]:
        self.scheduler.set_timesteps(2 if isinstance(self.scheduler, diffusers.SCMScheduler) else 6)
        timesteps = self.scheduler.timesteps
        timesteps = timesteps[skip : len(noise_levels(self.scheduler))]
        if self.told:
            self.scheduler.set_begin_index(skip)
        seen, sample = [], torch.randn(1, 4, 8, 8)
        for t in timesteps:
            self._current_timestep = t if self.shown else None
            seen.append(see())
            sample = self.scheduler.step(0.1 * sample, t, sample, return_dict=False)[0]
        return seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedulers_level_at_every_step(name: str) -> None:
    loop = Loop(SCHEDULERS[name](), told=True)
    see = SchedulerLevel(loop)
    for _ in range(2):
        seen = loop(see)
        assert seen == noise_levels(loop.scheduler)
        assert len(seen) == (2 if name == "SCM" else len(loop.scheduler.timesteps))
    assert see() is None, "the pipeline is not running"
    if name != "SCM":  # it steps from its first timestep alone
        assert loop(see, skip=2) == noise_levels(loop.scheduler)[2:]


def test_without_a_begin_index_the_first_level_needs_the_pipelines_own_t() -> None:
    for shown in (True, False):
        for skip in (0, 2):
            loop = Loop(diffusers.FlowMatchEulerDiscreteScheduler(), told=False, shown=shown)
            seen = loop(SchedulerLevel(loop), skip=skip)
            levels = noise_levels(loop.scheduler)[skip:]
            assert seen == ([levels[0] if shown else None, *levels[1:]])


def test_a_pipeline_that_steps_copies_of_its_scheduler_is_gated_by_the_argument() -> None:
    loop = Loop(diffusers.FlowMatchEulerDiscreteScheduler(), told=False)
    see, step = SchedulerLevel(loop), copy.deepcopy(loop.scheduler)
    step.set_timesteps(6)
    loop.scheduler.step = step.step
    assert loop(see) == [None] * 6


def test_another_pipeline_that_runs_the_model_is_not_taken_for_the_compiled_one() -> None:
    """A server makes one for each request, around one model."""
    pipe = wan22()
    handle = compile_pipeline(pipe, config(disabled_until_timestep=0.9), inner="eager")
    run(pipe, steps=4)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=12.0)
    other = diffusers.WanPipeline(**{**pipe.components, "scheduler": scheduler}, boundary_ratio=0.875)
    pipe.scheduler.set_timesteps(4)
    pipe.scheduler.set_begin_index(3)
    run(other, steps=4)
    shown = [step for r in handle.report().runs[1::2] for step in r.steps]
    assert {step.source for step in shown} == {"argument timestep"}
    assert [step.t for step in shown] == pytest.approx(noise_levels(scheduler))


def test_levels_that_are_none_are_left_to_the_argument() -> None:
    loop = Loop(diffusers.CMStochasticIterativeScheduler(), told=True)
    loop.scheduler.set_timesteps(6)
    with pytest.raises(ValueError, match="must have timesteps that map to noise levels"):
        noise_levels(loop.scheduler)
    bare = SimpleNamespace(step_index=0, timesteps=torch.tensor([999.0]), sigmas=torch.tensor([14.0, 0.0]))
    for scheduler in (loop.scheduler, bare):
        loop.scheduler = scheduler
        see = SchedulerLevel(loop)
        asked = lambda self, see=see: see()
        see._code = asked.__code__
        assert asked(loop) is None


def test_a_scheduler_without_steps_leaves_t_to_the_argument() -> None:
    loop = Loop(diffusers.DDIMScheduler(), told=False)
    assert loop(SchedulerLevel(loop)) == [None] * 6


def test_a_call_of_the_transformer_alone_is_gated_by_its_argument() -> None:
    pipe = flux()
    handle = compile_pipeline(pipe, config(disabled_until_timestep=0.5), inner="eager")
    run(pipe, steps=4)
    inputs: dict[str, Any] = {}
    hook = pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: inputs.update(kwargs), with_kwargs=True)
    run(pipe, steps=4)
    hook.remove()
    with torch.no_grad():
        pipe.transformer(**{**inputs, "timestep": torch.tensor([0.75])})
    last = handle.report().runs[-1].steps[-1]
    assert (last.t, last.dense, last.source) == (0.75, True, "argument timestep")


def test_another_scheduler_put_in_later_is_used() -> None:
    pipe = wan22()
    handle = compile_pipeline(pipe, config(disabled_until_timestep=0.9), inner="eager")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=12.0)
    run(pipe, steps=4)
    assert [t for [levels] in steps(handle).values() for t, _ in levels] == noise_levels(pipe.scheduler)


# The handle


def test_only_components_with_a_config_are_compiled() -> None:
    pipe = wan22()
    handle = compile_pipeline(pipe, {"transformer_2": config()}, inner="eager")
    run(pipe)
    report = handle.report()
    assert report.implementations == handle.backends["transformer_2"].report().implementations
    assert list(report.implementations) == ["reference"]
    assert {site.name.split(".")[0] for site in report.sites} == {"transformer_2"}
    assert "transformer: no config was given for it, so it is not compiled" in str(report)
    assert pipe.transformer._compiled_call_impl is None


def test_a_pattern_of_a_shared_config_need_match_one_component() -> None:
    pipe = wan22()
    ignore = ("transformer_2.blocks.1.*", "transformer_3.*")
    handle = compile_pipeline(pipe, config(ignore=ignore, rules=(Rule("transformer.blocks.0.*", dense=True),)), inner="eager")
    run(pipe)
    report = handle.report()
    assert [(u.field, u.pattern) for u in report.unmatched] == [("ignore", "transformer_3.*")]
    assert [site.decision for site in report.sites] == ["kept", "kept", "sparse", "sparse", "sparse", "sparse", "kept", "kept"]


def test_an_update_that_one_component_refuses_changes_none() -> None:
    pipe = wan22()
    configs = {"transformer": config(calibration=Calibration(1.0, 1.0)), "transformer_2": config()}
    handle = compile_pipeline(pipe, configs, inner="eager")
    with pytest.raises(ValueError, match="needs a calibration"):
        handle.update(target_sparsity=0.5)
    assert [b.config for b in handle.backends.values()] == list(configs.values())


def test_uncompiling_twice_and_compiling_again() -> None:
    pipe = flux()
    first = compile_pipeline(pipe, config(), inner="eager")
    first.uncompile()
    second = compile_pipeline(pipe, config(), inner="eager")
    first.uncompile()
    run(pipe, steps=2)
    assert (first.report().visited, second.report().skipped > 0) == (0, True)
    with pytest.raises(ValueError, match="update cannot take effect: the pipeline was uncompiled"):
        first.update(threshold=0.5)


def test_types_and_attributes_stay_what_they_are() -> None:
    pipe = flux()
    transformer = pipe.transformer
    compile_pipeline(pipe, config(), inner="eager")
    assert pipe.transformer is transformer
    assert type(transformer) is diffusers.FluxTransformer2DModel
    assert not any("_orig_mod" in name for name in transformer.state_dict())


# What is wrong is named, and nothing is changed


def test_wrong_requests_are_named() -> None:
    pipe = wan22()
    before = state(pipe)
    own_backend = {"backend": "inductor"}
    for arguments, keywords, text in [
        ((pipe.transformer, config()), {}, "needs a diffusers pipeline, got WanTransformer3DModel; for a model use torch.compile"),
        (
            (SimpleNamespace(components={"vae": nn.Linear(1, 1)}), config()),
            {},
            "found no transformer or unet in SimpleNamespace; it has vae",
        ),
        (
            (pipe, {"transfomer": config()}),
            {},
            "config names 'transfomer', which is no denoiser of WanPipeline; it has transformer, transformer_2",
        ),
        ((pipe, 0.1), {}, r"needs a SkipConfig, or a dict of them by component, got 0.1"),
        ((pipe, {"transformer": 0.1}), {}, r"got 0.1; write SkipConfig\(threshold=0.1\)"),
        ((pipe, {}), {}, "at least one of transformer, transformer_2, got an empty dict"),
        ((pipe, config()), own_backend, "brings its own backend; to choose what compiles the rest, pass inner="),
        ((pipe, config()), {"inner": "nothing"}, "inner must be one of"),
        ((pipe, config()), {"timestep_spec": 1000}, "timestep_spec must be a TimestepSpec"),
        ((cogvideox(), config()), {"regional": True}, r"transformer, a CogVideoXTransformer3DModel, does not say which blocks repeat"),
    ]:
        with pytest.raises(ValueError, match=text):
            compile_pipeline(*arguments, **keywords)
    assert state(pipe) == before


@pytest.mark.parametrize("wrong", [{"mode": "default", "options": {"x": 1}}, {"bogus": 1}])
def test_a_compilation_that_fails_changes_nothing(wrong: dict[str, Any]) -> None:
    pipe = wan22()
    before = state(pipe)
    with pytest.raises((RuntimeError, TypeError)):
        compile_pipeline(pipe, config(disabled_until_timestep=0.5), **wrong)
    assert state(pipe) == before


def test_one_module_under_two_names_is_refused() -> None:
    pipe = wan22()
    pipe.transformer_2 = pipe.transformer
    with pytest.raises(ValueError, match="models of their own, got transformer_2 of WanPipeline twice"):
        compile_pipeline(pipe, config())


def test_dynamos_recompile_limit_is_told_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    pipe = flux()
    for _ in range(torch._dynamo.config.recompile_limit):
        handle = compile_pipeline(pipe, config(), inner="eager")
        run(pipe, steps=1)
        handle.uncompile()
    assert "runs eager" not in caplog.text
    handle = compile_pipeline(pipe, config(), inner="eager")
    run(pipe, steps=1)
    assert "any further one runs eager" in caplog.text
    assert "then call torch.compiler.reset()" in str(handle.report())
    torch.compiler.reset()
    run(pipe, steps=1)
    assert handle.report().visited > 0


def test_a_compiled_model_is_refused() -> None:
    pipe = wan22()
    handle = compile_pipeline(pipe, {"transformer_2": config()}, inner="eager")
    with pytest.raises(ValueError, match=r"transformer_2 is compiled already; call .uncompile\(\) on the handle"):
        compile_pipeline(pipe, config())
    assert pipe.transformer._compiled_call_impl is None
    handle.uncompile()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ValueError, match="transformer is compiled already"):
        compile_pipeline(pipe, config())


def test_every_denoiser_of_the_tests_is_known() -> None:
    assert all(spec_of(build().transformer) is not None for build in CALLS)
