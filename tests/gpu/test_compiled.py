"""The backend on a Hopper GPU: Inductor, CUDA graphs, live lambda, counts; against eager runs with the reference."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import skip_attn_compile
from skip_attn_compile import Rule, SkipConfig, kernels
from skip_attn_compile.kernels import sm90

HEADS, HEAD_DIM, TOKENS = 4, 64, 1024


class Attention(nn.Module):
    """[B,S,H,D] projections in bfloat16. Keys are integers and queries point one way, so that every score and decision is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.to_v = nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM)
        self.masked = False

    def forward(self, x: Tensor) -> Tensor:
        # Tiles of 128 keys lie on levels 0 to 7, the same for all rows, whatever x is.
        tokens = x.shape[1]
        level = torch.arange(tokens, device=x.device) // 128 * 3 % 8
        key = torch.zeros(x.shape[0], tokens, HEADS, HEAD_DIM, dtype=x.dtype, device=x.device)
        key[..., 0] = level[None, :, None].to(x.dtype)
        query = torch.zeros_like(key)
        query[..., 0] = 8.0  # times 1/sqrt(64): a score is the level, in nats
        value = self.to_v(x).unflatten(2, (HEADS, HEAD_DIM))
        mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device=x.device) if self.masked else None
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield Model().to("cuda", torch.bfloat16).eval().requires_grad_(False)
    torch.compiler.reset()


def inputs(tokens: int = TOKENS) -> Tensor:
    return torch.randn(1, tokens, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def reference_sdpa(thresholds: list[float]):
    return models.reference_sdpa(*[torch.tensor(threshold, device="cuda") for threshold in thresholds])


def counts_of(be) -> list[tuple[int, int]]:
    return [(site.visited, site.skipped) for site in be.report().sites]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_lambda_changes_between_calls_and_counts_are_exact(model: Model, mode: str | None, regional: bool) -> None:
    rules = (Rule("blocks.1", threshold=0.01),)
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1, rules=rules, ignore=("blocks.2",)), model=model)
    compiled = model
    if regional:
        for block in model.blocks:
            block.compile(backend=be, mode=mode)
    else:
        compiled = torch.compile(model, backend=be, mode=mode)
    rewritten = 3 if regional else 2
    with torch.no_grad():
        for threshold in (0.1, 0.1, 0.1, 0.0, 0.5, 0.5, 1e-3):
            be.update(threshold=threshold)
            before = counts_of(be)
            x = inputs()
            torch.compiler.cudagraph_mark_step_begin()  # blocks replayed one by one read what the one before wrote
            actual = compiled(x).clone()
            after = counts_of(be)
            added = [(a - c, b - d) for (a, b), (c, d) in zip(after, before or [(0, 0)] * 3, strict=True)]
            torch._dynamo.config.disable = True
            try:
                with reference_sdpa([threshold, 0.01, 0.0]) as expected_counts:
                    expected = Model.forward(model, x) if not regional else reference_forward(model, x)
            finally:
                torch._dynamo.config.disable = False
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
            assert added[:rewritten] == expected_counts[:rewritten]
    assert be.report().site("blocks.0").implementation == "sm90"
    assert be.report().graphs == 1
    assert be.report().site("blocks.0").skipped > 0


def reference_forward(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = Attention.forward(block, x)
    return x


def test_cuda_graphs_are_recorded_and_not_captured_again(model: Model) -> None:
    from torch._inductor.cudagraph_trees import get_container

    be = skip_attn_compile.backend(SkipConfig(threshold=0.1), model=model)
    compiled = torch.compile(model, backend=be, mode="reduce-overhead")
    x = inputs()
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
        manager = get_container(torch.cuda.current_device()).get_tree_manager()
        assert manager is not None
        recorded = manager.new_graph_id().id
        for threshold in (0.0, 0.5, 1e-3):
            be.update(threshold=threshold)
            compiled(x)
        assert manager.new_graph_id().id == recorded + 1  # ids count up: none was taken in between


def test_dynamic_lengths_on_one_graph(model: Model) -> None:
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1), model=model)
    compiled = torch.compile(model, backend=be, dynamic=True)
    with torch.no_grad():
        for tokens in (1024, 1280, 2000, 512):
            x = inputs(tokens)
            before = counts_of(be)
            compiled(x)
            added = [(a - c, b - d) for (a, b), (c, d) in zip(counts_of(be), before or [(0, 0)] * 3, strict=True)]
            with reference_sdpa([0.1 if tokens >= 1024 else 0.0]) as expected:
                reference_forward(model, x)
            assert added == expected
    assert be.report().graphs == 1


def test_nothing_waits_for_the_device(model: Model) -> None:
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1), model=model)
    compiled = torch.compile(model, backend=be)
    x = inputs()
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            be.update(threshold=0.3)
            compiled(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_a_kernel_that_takes_lambda_on_the_host(model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first block is served by one that wants it there, the others by one that reads it on the device; in one graph, with no wait."""
    host = []

    def run(query, key, value, threshold, *rest) -> None:
        host.append(float(threshold))
        sm90.run(query, key, value, threshold.to(query.device, non_blocking=True), *rest)

    on_host = dataclasses.replace(
        sm90.IMPLEMENTATION, name="on_host", run=run, lambda_on_host=True, checks_arguments=False, masks=("none",)
    )
    monkeypatch.setattr(kernels, "implementations", lambda: (on_host, sm90.IMPLEMENTATION))
    model.blocks[1].masked = True
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1), model=model)
    compiled = torch.compile(model, backend=be, mode="reduce-overhead")
    x = inputs()
    with torch.no_grad():
        for threshold in (0.1, 0.1, 0.5, 1e-3):
            be.update(threshold=threshold)
            before = counts_of(be) or [(0, 0)] * 3
            compiled(x)
            with reference_sdpa([threshold]) as expected:
                reference_forward(model, x)
            assert [(a - c, b - d) for (a, b), (c, d) in zip(counts_of(be), before, strict=True)] == expected
            assert host[-2:] == pytest.approx([threshold] * 2)
        assert [site.implementation for site in be.report().sites] == ["on_host", "sm90", "on_host"]
        assert be.report().graphs == 1
        be.update(disabled_until_timestep=0.5)
        level = torch.tensor(0.25, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with skip_attn_compile.timestep(level):
                compiled(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert host[-2:] == [0.0, 0.0]
    assert "is known on the device alone, but its attention takes lambda on the host" in caplog.text
