"""The Triton kernel in Triton's interpreter, on the CPU: counts as the reference has them, values within rounding, nothing read in vain.

`conftest.py` asks for the interpreter where there is no GPU; `gpu/test_triton_kernel.py` runs the compiled kernel. `test_triton_compile.py`
compiles it for GPUs that are not here.
"""

import dataclasses
import math
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import FEATURE_CASES, LENGTH_CASES, ORDERS, THRESHOLDS, Case, Inputs
from checks import assert_within
from models import dit, skip_config, tokens
from skip_attn_compile import backend, kernels
from skip_attn_compile.kernels import triton as implementation
from skip_attn_compile.kernels import triton_table as table
from skip_attn_compile.kernels.triton_table import Config, Launch
from skip_attn_compile.reference import reference_attention
from skip_attn_compile.report import SiteReport
from skip_attn_compile.results import empty_results

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("these tests run in Triton's interpreter, where there is no GPU", allow_module_level=True)

Results = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def interpreter_repairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter multiplies the bits of bfloat16 numbers, and reduces by a function of ours in Python, element by element."""
    reduce, dot = interpreter.ReduceOps.apply_impl, interpreter.InterpreterBuilder.create_dot
    max_or_nan = implementation._kernel().fn.__globals__["max_or_nan"]

    def numpy_max(self, operands):
        return self.min_max(operands[0], np.max) if self.combine_fn is max_or_nan else reduce(self, operands)

    def widen(x):
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), interpreter.tl.float32) if x.dtype.scalar.is_bf16() else x

    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", numpy_max)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest))
    implementation.plans.clear()  # of other configurations
    with np.errstate(all="ignore"):  # log2(0), exp2 of rows past the end
        yield


def attend(inputs: Inputs, *, is_causal: bool = False, scale: float = 0.25, tile_order: str = "ascending") -> Results:
    """The kernel, with poisoned outputs: what it does not write stays NaN, or -7."""
    out, lse, counts = results = empty_results(inputs.query, inputs.value)
    out.fill_(math.nan)
    lse.fill_(math.nan)
    counts.fill_(-7)
    implementation.run(*inputs, results, is_causal, scale, tile_order)
    return results


def check(inputs: Inputs, **options: object) -> Tensor:
    """Kernel and reference on the same call; returns the counts, summed: [visited, skipped]."""
    options.setdefault("scale", 0.25)
    out, lse, counts = attend(inputs, **options)  # type: ignore[arg-type]
    wide = (x.float() for x in inputs[:3])
    want_out, want_lse, want_counts = reference_attention(*wide, *inputs[3:], **options)  # type: ignore[arg-type]
    assert torch.equal(counts, want_counts)
    # Weights are rounded to the input's precision, and so is the result; the exponent, up to 100 here, to float32.
    eps, eps32 = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps
    assert_within(out, want_out, float(inputs.value[inputs.value.isfinite()].abs().max()) * (eps + 100 * eps32))
    assert_within(lse, want_lse, 100 * eps32)
    return counts.sum((0, 1))


def run_case(case: Case) -> Tensor:
    return check(case.inputs(), is_causal=case.causal, scale=case.scale, tile_order=case.tile_order)


TRIALS = torch.tensor([math.nan, 0.0, 1e-6, 1e-3, 0.05, 0.3, 0.7, 1.0, 2.0])


def check_measure(case: Case, trials: Tensor = TRIALS, tile_q: int = 64) -> Tensor:
    """Kernel and reference measure the same call; returns the counts, summed: [visited, skipped at each of `trials`]."""
    inputs = case.inputs()
    _, _, _, _, attn_mask, query_mask = inputs
    out, _, _ = empty_results(inputs.query, inputs.value)
    counts = torch.full((*out.shape[:2], 1 + len(trials)), -7, dtype=torch.int32)
    arguments = (
        *inputs[:3],
        trials,
        attn_mask,
        query_mask,
        (out.fill_(math.nan), counts),
        case.causal,
        case.scale,
        case.tile_order,
    )
    implementation.measure(*arguments, (tile_q, 128))
    options = {"is_causal": case.causal, "scale": case.scale, "tile_order": case.tile_order}
    wide = (x.float() for x in inputs[:3])
    zero = torch.tensor(0.0)
    _, _, want = reference_attention(*wide, zero, attn_mask, query_mask, **options, tile_q=tile_q, trials=trials)
    assert torch.equal(counts, want)
    dense = attend(inputs._replace(threshold=zero), **options)[0]
    if tile_q == 64:
        assert torch.equal(out, dense)
    else:  # larger groups may begin elsewhere: the same, rounded in another order
        assert_within(out, dense.float(), 4 * torch.finfo(out.dtype).eps * float(inputs.value[inputs.value.isfinite()].abs().max()))
    return counts.sum((0, 1))


def served(case: Case) -> bool:
    return (case.tile_q, case.tile_k) == (64, 128) and case.dtype != torch.float64 and not case.mask.startswith("general")


def small(case: Case) -> Case:
    """One item and one key head where more would say nothing new: the interpreter takes milliseconds a tile."""
    share = min(case.Hq // case.Hkv, 2)
    batch = case.B if isinstance(case.threshold, tuple) or case.mask != "none" else 1
    return dataclasses.replace(case, B=batch, Hq=share, Hkv=1, Sq=min(case.Sq, 65) if share > 1 else case.Sq)


CASES = [
    Case("gqa_4_to_2", B=1, Hq=4, Hkv=2, Sq=65, Skv=300),
    *(small(case) for case in FEATURE_CASES if served(case)),
    *(case for case in LENGTH_CASES if case.name in ("1x1", "64x64", "129x129", "1x1000", "65x1", "63x1000")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_match_the_reference(case: Case) -> None:
    """Every case in one of the two orders; both orders where one order would say little."""
    orders = ORDERS if case.name in ("causal_start_past_diagonal", "mask_key_add") else (ORDERS[len(case.name) % 2],)
    for order in orders:
        run_case(dataclasses.replace(case, tile_order=order))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_measured_counts_are_those_of_the_reference(case: Case) -> None:
    order = ORDERS[len(case.name) % 2]
    check_measure(dataclasses.replace(case, tile_order=order), tile_q=(64, 128)[len(case.name) // 2 % 2])


SMALL = Case("small", B=1, Hq=1, Hkv=1, Sq=129, Skv=520)


@pytest.mark.parametrize("threshold", [*THRESHOLDS, math.nan, -1.0, math.inf])
def test_thresholds(threshold: float) -> None:
    visited, skipped = run_case(dataclasses.replace(SMALL, threshold=threshold, tile_order="own_first"))
    assert 0 < skipped < visited if threshold > 1e-3 else skipped < 3 if threshold > 0 else skipped == 0


@pytest.mark.parametrize("mask", ["none", "key_bool"])
def test_threshold_zero_is_dense_attention(mask: str) -> None:
    """Without a mask by a kernel that does not vote, with one by the kernel that does."""
    inputs = dataclasses.replace(SMALL, B=2, mask=mask, threshold=(0.0, 0.5)).inputs()
    out = attend(inputs)[0]
    exact = F.scaled_dot_product_attention(*(x.double() for x in inputs[:3]), inputs.attn_mask, scale=0.25)
    assert_within(out[0], exact[0], 1e-5)


@pytest.mark.parametrize("mask", ["none", "key_bool"])
@pytest.mark.parametrize("order", ORDERS)
def test_one_measurement_counts_as_one_run_for_each_lambda(mask: str, order: str) -> None:
    case = dataclasses.replace(SMALL, mask=mask, tile_order=order)
    counts = check_measure(case)
    for number, threshold in enumerate(TRIALS):
        visited, skipped = attend(case.inputs()._replace(threshold=threshold), tile_order=order)[2].sum((0, 1))
        assert (visited, skipped) == (counts[0], counts[1 + number])
    _, _, fewest, *_, most, beyond = counts[1:].tolist()
    assert fewest < most == beyond < counts[0]


@pytest.mark.parametrize("number", [1, 2, 31, 32])
def test_any_number_of_lambdas(number: int) -> None:
    counts = check_measure(dataclasses.replace(SMALL, Hq=2), torch.logspace(-4, 0, number))
    assert len(counts) == 1 + number


def test_lambdas_need_not_be_contiguous() -> None:
    check_measure(SMALL, torch.logspace(-3, 0, 8)[::2])


@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_objects_to_every_lambda(where: str) -> None:
    inputs = steps()
    (inputs.query if where == "query" else inputs.key)[0, 0, 100, 3] = math.nan
    out, counts = torch.empty(1, 1, 128, 16), torch.empty(1, 1, 3, dtype=torch.int32)
    lambdas = torch.tensor([0.1, 1.0])
    implementation.measure(*inputs[:3], lambdas, None, None, (out, counts), False, 0.25, "ascending", (64, 128))
    _, _, want = reference_attention(*inputs[:3], torch.tensor(0.0), scale=0.25, trials=lambdas)
    assert torch.equal(counts, want)
    assert counts[0, 0, 1] == {"query": 3, "key": 0}[where]


def test_measuring_reads_no_value_of_a_masked_tile() -> None:
    keep = (torch.arange(640) // 128 != 1).view(1, 1, 1, 640)
    inputs = steps()._replace(attn_mask=keep)
    inputs.value[:, :, 128:256] = math.nan
    for tile_q in (64, 128):
        out, counts = torch.empty(1, 1, 128, 16), torch.empty(1, 1, 2, dtype=torch.int32)
        implementation.measure(*inputs[:3], torch.tensor([0.1]), keep, None, (out, counts), False, 0.25, "ascending", (tile_q, 128))
        assert out.isfinite().all()
        assert counts.tolist() == [[[4 * 128 // tile_q, 2 * 128 // tile_q]]]


def steps(**fields: object) -> Inputs:
    """One item, one head, 128 rows, 640 keys; the keys of the second to the fourth tile score low for all rows: skipped at 0.1."""
    inputs = dataclasses.replace(SMALL, Sq=128, Skv=640, **fields).inputs()
    inputs.query[..., :2] = 4
    inputs.key[..., :2] = 6
    inputs.key[:, :, 128:512, :2] = 0
    return inputs


def test_value_of_skipped_tiles_is_not_read() -> None:
    inputs = steps()
    inputs.value[:, :, 128:512] = math.nan
    out, _, counts = attend(inputs)
    assert out.isfinite().all()
    assert counts.tolist() == [[[10, 6]]]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_masked_tiles_are_passed_over(threshold: float, added: bool) -> None:
    keep = (torch.arange(640) // 128 != 1).view(1, 1, 1, 640)
    inputs = steps(threshold=threshold)._replace(attn_mask=torch.where(keep, 0.0, -math.inf) if added else keep)
    inputs.key[:, :, 128:256] = math.nan
    inputs.value[:, :, 128:256] = math.nan
    out, _, counts = attend(inputs)
    assert out.isfinite().all()
    assert counts.tolist() == [[[8, 4 if threshold else 0]]]


@pytest.mark.parametrize("mask", ["none", "key_add"])
def test_nan_in_a_query_stays_in_its_row_and_objects(mask: str) -> None:
    inputs = steps()
    inputs.query[0, 0, 100, 3] = math.nan
    if mask != "none":
        inputs = inputs._replace(attn_mask=torch.zeros(640).index_fill(0, torch.arange(0, 640, 3), -math.inf))
    out, lse, counts = attend(inputs)
    bad = torch.arange(128) == 100
    assert torch.equal(out[0, 0].isnan().all(-1), bad)
    assert torch.equal(out[0, 0].isnan().any(-1), bad)
    assert torch.equal(lse[0, 0].isnan(), bad)
    assert counts.tolist() == [[[10, 3]]]


def test_nan_in_a_key_is_not_lost_in_the_maximum() -> None:
    inputs = steps()
    inputs.key[0, 0, 200, 3] = math.nan
    out, lse, counts = attend(inputs)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert counts.tolist() == [[[10, 0]]]


def test_the_interpreters_own_reduction_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the repairs above: numpy's max is what the kernel's function computes."""
    inputs = dataclasses.replace(SMALL, Sq=2, Skv=129).inputs()
    inputs.query[0, 0, 1, 3] = math.nan
    quick = attend(inputs)
    monkeypatch.undo()
    for slow, want in zip(attend(inputs), quick, strict=True):
        assert torch.equal(slow.nan_to_num(nan=5), want.nan_to_num(nan=5))


def set_config(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """`config` for every problem; a `tma` in it holds where K and V can be described, whatever the GPU and the dtype."""

    def chosen(*problem: object) -> Config:
        return config._replace(tma=config.tma and bool(problem[-1]))

    monkeypatch.setattr(table, "config", chosen)
    monkeypatch.setattr(table, "is_described", lambda _, *tensors: all(map(table.is_describable, tensors)))


@pytest.mark.parametrize("case", [Case("head_dim_40", B=1, D=40, Dv=72), Case("head_dim_48", B=1, D=48, Dv=32, mask="key_bool")], ids=str)
def test_rows_in_chunks_of_dimensions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(monkeypatch, Config(64, 4, 1, 16))
    run_case(dataclasses.replace(case, Hq=1, Hkv=1, Sq=65, Skv=300, threshold=(0.1,)))
    run_case(dataclasses.replace(case, Hq=1, Hkv=1, Sq=5, Skv=150, threshold=0.0))


def test_dense_blocks_of_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(monkeypatch, Config(128, 8, 1, 128))
    for rows in (64, 65, 129, 200):
        run_case(dataclasses.replace(SMALL, Sq=rows, threshold=0.0))


WAYS = [*((case, True, True) for case in CASES), (SMALL, True, False), (SMALL, False, True)]


@pytest.mark.parametrize(("case", "tma", "early"), WAYS, ids=str)
def test_ways_to_load(case: Case, tma: bool, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper."""
    set_config(monkeypatch, Config(64, 4, 2, 128, tma, early))
    described = spy_on_descriptors(monkeypatch)
    run_case(dataclasses.replace(case, tile_order=ORDERS[len(case.name) % 2]))
    assert bool(described) == (tma and all(map(table.is_describable, case.inputs()[1:3])))


@pytest.mark.parametrize("tile_q", [64, 128])
@pytest.mark.parametrize("mask", ["none", "key_bool"])
def test_ways_to_load_to_measure(mask: str, tile_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Config(tile_q, 8, 2, 128, tma=True, early=tile_q == 64)
    set_config(monkeypatch, chosen)
    monkeypatch.setattr(table, "measuring", lambda *problem: (Launch(problem[-2] or tile_q == 64, "all", chosen),))
    described = spy_on_descriptors(monkeypatch)
    check_measure(dataclasses.replace(SMALL, Hq=2, mask=mask, tile_order="own_first"), tile_q=tile_q)
    assert described


def spy_on_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What descriptors are made of."""
    make, described = implementation._module().Descriptor, []

    def making(x: Tensor, *layout: object) -> object:
        described.append(x)
        return make(x, *layout)

    monkeypatch.setattr(implementation._module(), "Descriptor", making)
    return described


def test_any_strides() -> None:
    inputs = dataclasses.replace(SMALL, B=2, Hq=2, Sq=9, Skv=200).inputs()
    query, key, value = inputs[:3]
    expanded = key[:1].expand(2, -1, -1, -1), value[:1].expand(2, -1, -1, -1)
    check(inputs._replace(key=expanded[0], value=expanded[1]))
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    check(Inputs(*transposed, *inputs[3:]))
    channels_not_last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, key, value)]
    check(Inputs(*channels_not_last, *inputs[3:]))
    check(inputs._replace(query=torch.cat((query, query), 3)[..., 1::2], key=torch.cat((key, key), 3)[..., 1::2]))


def test_rows_and_keys_past_the_end_are_not_read() -> None:
    inputs = dataclasses.replace(SMALL, Sq=65, Skv=200).inputs()
    padded = [torch.full((1, 1, 400, 16), math.nan) for _ in range(3)]
    for target, x in zip(padded, inputs[:3], strict=True):
        target[:, :, : x.shape[2]] = x
    check(Inputs(padded[0][:, :, :65], padded[1][:, :, :200], padded[2][:, :, :200], *inputs[3:]))


@pytest.mark.parametrize("mask", ["batch", "one", "keys", "everything"])
def test_forms_of_key_masks(mask: str) -> None:
    inputs = dataclasses.replace(SMALL, B=2, Sq=65, Skv=300, query_mask=True).inputs()
    keep = torch.rand(2, 1, 1, 300) < 0.5
    form = {"batch": keep, "one": keep[:1], "keys": keep[0, 0, 0], "everything": keep[:, :, :, :1]}[mask]
    check(inputs._replace(attn_mask=form))
    check(inputs._replace(attn_mask=torch.where(form, 0.5, -math.inf).bfloat16(), query_mask=inputs.query_mask[:1]))


@pytest.mark.parametrize("scale", [-0.25, 0.0, 1.0])
def test_scales(scale: float) -> None:
    check(SMALL.inputs(), scale=scale)


def test_no_keys_and_no_rows() -> None:
    inputs = SMALL.inputs()
    out, lse, counts = attend(inputs._replace(key=inputs.key[:, :, :0], value=inputs.value[:, :, :0]))
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert counts.eq(0).all()
    assert attend(inputs._replace(query=inputs.query[:, :, :0]))[2].eq(0).all()


def test_what_it_does_not_take_is_a_value_error() -> None:
    inputs = SMALL.inputs()
    with pytest.raises(ValueError, match="key mask"):
        attend(inputs._replace(attn_mask=torch.ones(129, 520) > 0))
    wide = torch.zeros(1, 1, 64, 264)
    with pytest.raises(ValueError, match="head_dim at most 256"):
        attend(Inputs(wide, wide, wide, torch.tensor(0.1), None, None))
    with pytest.raises(ValueError, match="number of heads"):
        attend(inputs._replace(value=inputs.value.expand(-1, 2, -1, -1)))
    with pytest.raises(ValueError, match="threshold must be float32"):
        attend(inputs._replace(threshold=inputs.threshold.double()))
    with pytest.raises(ValueError, match="key must be torch.float32"):
        attend(inputs._replace(key=inputs.key.half()))
    with pytest.raises(ValueError, match="attn_mask must be boolean"):
        attend(inputs._replace(attn_mask=torch.ones(520).int()))


def test_serves_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, on the CPU: the graph calls the kernel, and the report has its counts and its name."""

    def reported(name: str) -> list[SiteReport]:
        be = backend(skip_config(implementation=name), inner=lambda graph, inputs: graph)
        torch.manual_seed(0)
        torch.compile(dit(1), backend=be)(tokens())
        return be.report().sites

    on_cpu = dataclasses.replace(implementation.IMPLEMENTATION, device_types=("cpu",))
    want = reported("reference")
    monkeypatch.setattr(kernels, "implementations", lambda: (on_cpu,))
    (have,) = reported("triton")
    assert have.skipped > 0
    assert [dataclasses.replace(have, implementation="reference")] == want


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_problem_has_a_configuration(capability: tuple[int, int] | None, element_size: int, described: bool) -> None:
    described = described and capability == (9, 0) and element_size == 2
    for dim in range(1, 257):
        launches = [x for masked in (True, False) for x in table.attending(capability, element_size, dim, masked, described)]
        assert [(x.vote, x.which) for x in launches] == [(True, "all"), (True, "sparse"), (False, "dense")]
        for tile_q in (64, 128):
            (masked,) = table.measuring(capability, element_size, dim, tile_q, True, described)
            (launch,) = table.measuring(capability, element_size, dim, tile_q, False, described)
            assert masked.vote, "V of a masked tile is not read"
            assert masked.config == launch.config
            assert launch.config.block_q == tile_q
            launches.append(launch)
        for _, _, chosen in launches[:3]:
            assert chosen.block_q == 64 or (chosen.block_q == 128 and chosen == launches[2].config)
        for _, _, chosen in launches:
            assert chosen.num_warps in (4, 8)
            assert chosen.chunk in (32, 64, 128, 256)
            assert not chosen.tma or (described and chosen.chunk >= dim), "a descriptor's block has all dimensions"
            assert not chosen.early or capability == (9, 0), "measured there alone"
        (_, sparse, dense), on_hopper = launches[:3], capability == (9, 0) and element_size == 2
        assert sparse.config.tma == described
        assert sparse.config.early == (on_hopper and dim <= 128)
        assert dense.config.tma == (described and not 64 < dim <= 128)


def test_what_is_described() -> None:
    """Only what the copy engine can address: multiples of 16 bytes; and on Hopper alone."""
    x = torch.zeros(2, 300, 4, 3 * 64, dtype=torch.bfloat16)[..., 64:128].transpose(1, 2)
    assert table.is_described((9, 0), x, x)
    assert table.is_described((9, 0), x, x[:, :, 3:])
    assert not any(table.is_described(capability, x, x) for capability in (None, (8, 0), (8, 9), (10, 0), (12, 0)))
    assert not table.is_described((9, 0), x.float(), x.float())
    for wrong in (
        x[..., 1:],  # starts in the middle of 16 bytes
        x[..., ::2],
        x[:1].expand(2, -1, -1, -1),
        x[:, :, :0],
        torch.zeros(1, 1, 300, 36, dtype=torch.bfloat16),  # rows of 72 bytes
        x.as_strided((1, 1, 300, 64), (64, 64, 8, 1)),  # rows that overlap
        x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert not table.is_described((9, 0), x, wrong)
        assert not table.is_described((9, 0), wrong, x)


@pytest.mark.parametrize("newer_name", [False, True])
def test_tf32_is_for_who_asks(newer_name: bool) -> None:
    """By the newer name alone, `torch.get_float32_matmul_precision` raises; float32 only; and what was planned before is not used."""
    inputs = SMALL.inputs()._replace(key=SMALL.inputs().key.float(), query=SMALL.inputs().query.float(), value=SMALL.inputs().value.float())
    half = inputs._replace(query=inputs.query.half(), key=inputs.key.half(), value=inputs.value.half())
    attend(inputs)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        if newer_name:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        attend(inputs)
        attend(half)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
    assert [plan.steps[0].arguments["PRECISION"] for plan in implementation.plans.values()] == ["ieee", "tf32", "ieee"]


def test_a_kind_of_call_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is asked once for each launch of a kind; afterwards what it compiled is started, with the arguments in the kernel's order."""
    asked, started = [], []
    names = implementation._kernel().arg_names

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> "Kernel":
            self.grid = grid
            return self

        def __call__(self, *tensors: Tensor, **arguments: object) -> "Compiled":
            asked.append(dict(zip(names, tensors, strict=False)) | arguments)
            return Compiled()

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert len(grid) == 3
            return lambda *values: started.append(dict(zip(names, values, strict=True)))

    monkeypatch.setattr(implementation, "_kernel", Kernel)
    inputs = SMALL.inputs()
    for _ in range(3):
        attend(inputs)
    assert (len(asked), len(started)) == (2, 4)
    for number, values in enumerate(started):
        for name, launched in asked[number % 2].items():
            assert name in ("out", "lse", "counts", "num_warps", "num_stages") or launched is values[name] or launched == values[name]
    others = (
        inputs._replace(key=inputs.key.transpose(2, 3).contiguous().transpose(2, 3)),
        inputs._replace(value=F.pad(inputs.value, (1, 0))[..., 1:]),
        inputs._replace(threshold=inputs.threshold.view(1)),
        inputs._replace(threshold=torch.cat([inputs.threshold.view(1)] * 2)[1]),  # four bytes on
        inputs._replace(attn_mask=torch.ones(520) > 0),
        inputs._replace(attn_mask=torch.ones(520)),
        inputs._replace(query=inputs.query[:, :, :100]),
        inputs._replace(query=inputs.query.half(), key=inputs.key.half(), value=inputs.value.half()),
    )
    for other in others:
        attend(other)
        attend(other)
    assert len(implementation.plans) == 1 + len(others)
    attend(inputs, scale=0.5)
    attend(inputs, is_causal=True)
    attend(inputs, tile_order="own_first")
    assert len(implementation.plans) == 4 + len(others)


def test_what_it_publishes() -> None:
    published = implementation.IMPLEMENTATION
    assert str(published) == "triton (compute capability 8.0 or newer, tiles of 64 rows and 128 keys, ascending or own_first)"
    assert published in kernels.implementations()
