"""lambda = c0 + c1 / L inside the graph: lengths, key masks, live changes, the warning above 1."""

import logging

import pytest
import torch

from graphs import recording_backend
from models import TOKENS, dit, reference_sdpa, tokens
from skip_attn_compile import Calibration, Rule, SkipConfig

CURVE = Calibration(a=30.0, b=2.0)
TARGET = 0.5


def lambda_at(kv_len: int, target: float = TARGET, curve: Calibration = CURVE) -> float:
    return curve.threshold_at(target, kv_len)


def target_config(**fields: object) -> SkipConfig:
    return SkipConfig(**{"target_sparsity": TARGET, "calibration": CURVE, "min_kv_len": 0, **fields})


def counts_of(be) -> list[tuple[int, int]]:
    return [(site.visited, site.skipped) for site in be.report().sites]


def expect_reference(model, be, compiled, x, *thresholds: float) -> None:
    """One call of `compiled` gives the values of the reference at `thresholds`, call by call, and adds its counts."""
    before = counts_of(be) if be.report().sites else None
    with reference_sdpa(*thresholds) as counts:
        expected = model(*x)
    actual = compiled(*x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    added = counts_of(be) if before is None else [(a - c, b - d) for (a, b), (c, d) in zip(counts_of(be), before, strict=True)]
    assert added == counts


def test_lambda_follows_the_length_without_a_recompile() -> None:
    model = dit()
    be, recorder = recording_backend(target_config())
    compiled = torch.compile(model, backend=be, dynamic=True)
    skipped = set()
    for length in (512, 640, 1024, 768):
        expect_reference(model, be, compiled, (tokens(length=length),), lambda_at(length))
        skipped.add(be.report().sparsity)
    assert len(recorder.graphs) == 1
    assert len(skipped) > 1


def test_min_kv_len_is_decided_in_the_graph_for_a_symbolic_length() -> None:
    model = dit()
    be, recorder = recording_backend(target_config(min_kv_len=600))
    compiled = torch.compile(model, backend=be, dynamic=True)
    for length, threshold in ((512, 0.0), (599, 0.0), (600, lambda_at(600)), (768, lambda_at(768))):
        expect_reference(model, be, compiled, (tokens(length=length),), threshold)
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
def test_length_is_the_number_of_unmasked_keys_of_each_sample(additive: bool) -> None:
    model = dit(blocks=1, cross=True)
    lengths = torch.tensor([512, 300])
    mask = (torch.arange(512) < lengths[:, None])[:, None, None]
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    x = (tokens(batch=2), tokens(batch=2, seed=1), mask)
    be, _ = recording_backend(target_config())
    compiled = torch.compile(model, backend=be)
    compiled(*x)
    per_sample = torch.tensor([lambda_at(512), lambda_at(300)])
    with reference_sdpa(lambda_at(TOKENS), per_sample) as counts:
        model(*x)
    assert counts_of(be) == counts
    assert be.report().site("blocks.0.attn2").skipped > 0


def test_threshold_and_target_change_between_calls_without_a_recompile() -> None:
    model, x = dit(), (tokens(),)
    be, recorder = recording_backend(target_config())
    compiled = torch.compile(model, backend=be)
    expect_reference(model, be, compiled, x, lambda_at(TOKENS))
    be.update(threshold=0.0)
    expect_reference(model, be, compiled, x, 0.0)
    be.update(target_sparsity=0.1)
    expect_reference(model, be, compiled, x, lambda_at(TOKENS, 0.1))
    be.update(threshold=0.9)
    expect_reference(model, be, compiled, x, 0.9)
    assert len(recorder.graphs) == 1


def test_rules_change_target_and_curve_value_by_value() -> None:
    model, x = dit(blocks=4), (tokens(),)
    other = Calibration(a=60.0, b=2.0)
    rules = (Rule("blocks.1.*", target_sparsity=0.2), Rule("blocks.2.*", calibration=other), Rule("blocks.3.*", threshold=0.6))
    be, _ = recording_backend(target_config(rules=rules))
    compiled = torch.compile(model, backend=be)
    thresholds = (lambda_at(TOKENS), lambda_at(TOKENS, 0.2), lambda_at(TOKENS, curve=other), 0.6)
    expect_reference(model, be, compiled, x, *thresholds)
    assert [site.threshold for site in be.report().sites] == pytest.approx(thresholds)


def test_target_without_a_curve_here_is_kept_with_that_reason() -> None:
    be, _ = recording_backend(target_config(calibration=None, rules=(Rule("blocks.0.*", calibration=CURVE),)))
    torch.compile(dit(), backend=be)(tokens())
    first, second = be.report().sites
    assert (first.decision, second.decision) == ("sparse", "kept")
    assert second.reasons == ("target_sparsity 0.5 without a calibration here",)


def test_update_that_cannot_take_effect_is_refused() -> None:
    be, _ = recording_backend(SkipConfig(threshold=0.3, min_kv_len=4096))
    torch.compile(dit(), backend=be)(tokens())
    with pytest.raises(ValueError, match="every site was kept"):
        be.update(threshold=0.1)


def test_update_that_would_need_a_recompile_is_refused() -> None:
    be, _ = recording_backend(SkipConfig(rules=(Rule("blocks.0.*", threshold=0.3),), min_kv_len=0))
    torch.compile(dit(), backend=be)(tokens())
    with pytest.raises(ValueError, match=r"update would need a recompile: blocks\.1\.attn1 kept when it was compiled"):
        be.update(threshold=0.1)
    assert be.config.threshold is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "needs threshold, target_sparsity or disabled_until_timestep, got none"),
        ({"threshold": 0.1, "target_sparsity": 0.1}, "either threshold or target_sparsity"),
        ({"threshold": -1.0}, "threshold must be finite and >= 0, got -1.0"),
        ({"target_sparsity": 1.5}, r"target_sparsity must be in \[0, 1\]"),
        ({"target_sparsity": 0.5}, "needs a calibration"),
    ],
)
def test_bad_update_changes_nothing(change: dict[str, float], message: str) -> None:
    be, _ = recording_backend(SkipConfig(threshold=0.3))
    with pytest.raises(ValueError, match=message):
        be.update(**change)
    assert be.config == SkipConfig(threshold=0.3)


class TestLambdaAboveOne:
    STEEP = Calibration(a=30.0, b=10.0)  # 30 * e^5 = 4452: above 1 up to 4452 keys at target .5

    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "clamped to 1" in r.getMessage()]

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_warns_once_for_each_site_and_length_and_acts_as_one(self, dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
        model = dit()
        be, _ = recording_backend(target_config(calibration=self.STEEP))
        compiled = torch.compile(model, backend=be, dynamic=dynamic)
        for _ in range(2):
            expect_reference(model, be, compiled, (tokens(),), 1.0)
        first, second = self.warnings(caplog)
        assert first.startswith("blocks.0.attn1: at 512 keys lambda = 8.696 for target_sparsity 0.5 is clamped to 1")
        assert second.startswith("blocks.1.attn1: at 512 keys")
        assert [site.clamped for site in be.report().sites] == [2, 2]

    def test_length_under_a_mask_is_marked_when_the_report_is_read(self, caplog: pytest.LogCaptureFixture) -> None:
        be, _ = recording_backend(target_config(calibration=self.STEEP, include=("*.attn2",)))
        mask = torch.ones(2, 1, 1, 512, dtype=torch.bool)
        torch.compile(dit(blocks=1, cross=True), backend=be)(tokens(batch=2), tokens(batch=2, seed=1), mask)
        assert self.warnings(caplog) == []
        site = be.report().site("blocks.0.attn2")
        assert site.clamped == 1
        assert "lambda was 1 or more in 1 calls and acted as 1: the target is out of the curve's reach there" in site.reasons

    def test_no_mark_below_one(self) -> None:
        be, _ = recording_backend(target_config())
        torch.compile(dit(), backend=be)(tokens())
        assert [site.clamped for site in be.report().sites] == [0, 0]


def test_report_shows_the_expected_share_and_a_foreign_curve() -> None:
    curve = Calibration(a=30.0, b=2.0, tile=(128, 128), sparsity_range=(0.1, 0.4))
    be, _ = recording_backend(target_config(calibration=curve))
    torch.compile(dit(), backend=be)(tokens())
    site = be.report().sites[0]
    assert site.expected == pytest.approx(TARGET)
    assert site.target_sparsity == TARGET
    assert "the curve was fitted at tiles (128, 128), ascending; here they are (64, 128), ascending" in site.reasons
    assert "the target 0.5 lies outside the shares 0.1 to 0.4 that the curve was fitted on" in site.reasons
    be.update(threshold=0.25)
    assert be.report().sites[0].expected == pytest.approx(curve.sparsity_at(0.25, TOKENS))
