"""The adapter for FlashInfer's Blackwell kernels, as far as a machine without such a GPU can tell; and lambda on the host."""

import ast
import dataclasses
import logging
import math
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from models import DIM, dit
from skip_attn_compile import SkipConfig, backend, kernels, ops, timestep
from skip_attn_compile.kernels import Problem, choose, flashinfer, reference
from skip_attn_compile.results import empty_results

BLACKWELL = Problem("cuda", (10, 0), torch.bfloat16, 128, 128, "none", False, False, "ascending", True)


def inputs(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, rows: int = 70, keys: int = 90, dim: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((rows, heads), (keys, kv_heads), (keys, kv_heads))
    query, key, value = (torch.randn(batch, length, n, dim).transpose(1, 2) for length, n in sizes)
    return query, key, value


def prefill(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, *, sm_scale: float, lse: Tensor, **_: object
) -> None:
    """What the package documents, dense: tokens of all samples in a row, log-sum-exp [tokens, heads] to base 2."""
    for sample in range(len(qo_indptr) - 1):
        rows, keys = (slice(*x[sample : sample + 2].tolist()) for x in (qo_indptr, kv_indptr))
        repeated = [x[keys].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v)]
        scores = q[rows].transpose(0, 1) @ repeated[0].mT * sm_scale
        o[rows] = (scores.softmax(-1) @ repeated[1]).transpose(0, 1)
        lse[rows] = scores.logsumexp(-1).T / math.log(2)


@pytest.mark.parametrize("memory", ["BSHD", "BHSD"])
def test_results_are_those_of_the_operator(memory: str) -> None:
    query, key, value = inputs()
    if memory == "BHSD":
        query, key, value = (x.contiguous() for x in (query, key, value))
    out, lse, counts = results = empty_results(query, value)
    for x in results:
        x.fill_(7)
    flashinfer.attend(prefill, query, key, value, torch.tensor(0.1), results, 0.2)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, scale=0.2, enable_gqa=True))
    expected = (query @ key.repeat_interleave(2, 1).mT * 0.2).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    assert not counts.any()


def test_memory_as_diffusers_makes_it_is_not_copied() -> None:
    query, key, value = inputs()
    out = empty_results(query, value)[0]
    given = flashinfer.arguments(query, key, value, torch.tensor(0.1), out, 1.0)
    assert [given[name].data_ptr() for name in "qkvo"] == [x.data_ptr() for x in (query, key, value, out)]


def test_no_keys() -> None:
    query, key, value = inputs(keys=0)
    out, lse, _ = results = empty_results(query, value)
    flashinfer.attend(prefill, query, key, value, torch.tensor(0.1), results, 0.2)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("threshold", "factor"),
    [(0.1, 9.0), ([0.1, 0.1], 9.0), (0.0, None), (-1.0, None), (math.nan, None), ([math.nan, 0.0], None), (3.0, 90.0), (math.inf, 90.0)],
    ids=str,
)
def test_lambda_becomes_a_factor(threshold: float | list[float], factor: float | None) -> None:
    query, key, value = inputs()
    given = flashinfer.arguments(query, key, value, torch.tensor(threshold), torch.empty_like(query), 1.0)
    assert given["skip_softmax_threshold_scale_factor"] == pytest.approx(factor)


def test_it_has_one_lambda_for_the_batch() -> None:
    query, key, value = inputs()
    with pytest.raises(ValueError, match="one lambda for the whole batch, got .*; call it once for each"):
        flashinfer.arguments(query, key, value, torch.tensor([0.1, 0.2]), torch.empty_like(query), 1.0)


def test_the_call_fits_the_installed_package() -> None:
    """Read, not imported: importing it needs a GPU's libraries."""
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer-python is not installed")
    root = Path(spec.origin).parent
    assert "cute_dsl_fmha_ragged_prefill" in (root / "attention" / "cute_dsl" / "__init__.py").read_text()
    tree = ast.parse((root / "attention" / "cute_dsl" / "fmha.py").read_text())
    (function,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "cute_dsl_fmha_ragged_prefill")
    query, key, value = inputs()
    given = flashinfer.arguments(query, key, value, torch.tensor(0.1), torch.empty_like(query), 1.0)
    optional = len(function.args.args) - len(function.args.defaults)
    parameters = [
        Parameter(x.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if n < optional else None)
        for n, x in enumerate(function.args.args)
    ]
    Signature(parameters).bind(**given)
    types = {x.arg: ast.unparse(x.annotation) for x in function.args.args if x.annotation is not None}
    for name, x in given.items():
        assert type(x).__name__ in types[name], name


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())
    monkeypatch.setattr("skip_attn_compile.kernels.triton.find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("capability", flashinfer.CAPABILITIES)
def test_it_serves_when_asked_for(capability: tuple[int, int]) -> None:
    problem = BLACKWELL._replace(capability=capability)
    found = choose(problem, "flashinfer")
    assert isinstance(found, kernels.Implementation)
    assert found.name == "flashinfer"
    preferred = choose(problem)
    assert isinstance(preferred, kernels.Implementation)
    assert preferred.name == "triton"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (9, 0)}, "16-bit inputs are built for compute capability 10.0 and 10.3, this device has 9.0"),
        ({"capability": (12, 0)}, "this device has 12.0"),
        ({"is_causal": True}, "its causal mask is aligned to the last key, not to the first"),
        ({"query_mask": True}, "it cannot leave rows out of its votes"),
        ({"mask": "key"}, "takes masks of kind none, not key"),
        ({"tile_order": "own_first"}, "takes tile_order ascending, not own_first"),
        ({"head_dim": 96, "value_dim": 96}, "takes head_dim 64, 128"),
        ({"lambda_on_host": False}, "takes lambda on the host, as a tensor on the CPU"),
    ],
    ids=str,
)
def test_what_it_does_not_take(change: dict, reason: str) -> None:
    reasons = choose(BLACKWELL._replace(**change), "flashinfer")
    assert isinstance(reasons, list)
    assert reason in "; ".join(reasons)


# ---- lambda on the host: the meta device is the GPU ----

ON_HOST = dataclasses.replace(reference.IMPLEMENTATION, name="on_host", masks=("none",), lambda_on_host=True)
ON_DEVICE = dataclasses.replace(reference.IMPLEMENTATION, name="on_device")


class Thresholds(Interpreter):
    """Runs a graph and keeps the threshold that each attention got."""

    def __init__(self, gm: GraphModule, seen: list[Tensor]) -> None:
        super().__init__(gm)
        self.seen = seen

    def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        if target in (ops.attention, ops.attention_lambda_on_host):
            self.seen.append(args[3])
        return super().call_function(target, args, kwargs)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "implementations", lambda: (ON_HOST, ON_DEVICE))


@pytest.mark.usefixtures("both")
def test_lambda_stays_on_the_host_where_a_kernel_wants_it_there(caplog: pytest.LogCaptureFixture) -> None:
    """Self-attention is served by the one that takes lambda on the host, cross-attention under a mask by the other, in one graph."""
    seen: list[Tensor] = []
    ours = backend(SkipConfig(threshold=0.25, min_kv_len=0), lambda gm, _: lambda *args: Thresholds(gm, seen).run(*args))
    model = dit(blocks=1, cross=True).to("meta")
    compiled = torch.compile(model, backend=ours, fullgraph=True)
    x, context = torch.empty(2, 256, DIM, device="meta"), torch.empty(2, 128, DIM, device="meta")
    mask = torch.empty(2, 1, 1, 128, device="meta", dtype=torch.bool)
    compiled(x, context, mask)
    assert [t.device.type for t in seen] == ["cpu", "meta"]
    assert seen[0].tolist() == 0.25
    ours.update(threshold=0.5)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x, context, mask)
    assert seen[2].tolist() == 0.5

    ours.update(disabled_until_timestep=0.9)
    caplog.set_level(logging.WARNING, logger="skip_attn_compile")
    for level, threshold in ((0.95, 0.0), (0.5, 0.5), (torch.tensor(0.5), 0.5), (torch.tensor(0.95), 0.0)):
        with timestep(level):
            compiled(x, context, mask)
        assert seen[-2].tolist() == threshold
    warnings = lambda: [record for record in caplog.records if record.name.startswith("skip_attn_compile")]
    assert not warnings()
    for _ in range(2):
        with timestep(torch.tensor(0.5, device="meta")):
            compiled(x, context, mask)
        assert seen[-2].tolist() == 0
    (warning,) = warnings()
    assert "is known on the device alone, but its attention takes lambda on the host, so its calls are dense" in warning.getMessage()
