"""The operator as PyTorch sees it: schema, fake, strides, dispatch, derivative, errors."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cases import Case
from skip_attn_compile import kernels, ops
from skip_attn_compile.kernels import Implementation, Problem, reference
from skip_attn_compile.ops import attention
from skip_attn_compile.reference import reference_attention
from skip_attn_compile.results import output_stride

B, H, S, D = 2, 2, 150, 16
DENSE_ORDERS = [(*order, 3) for order in itertools.permutations(range(3))]  # of (B, H, S) in memory, outermost first

OPCHECKS = [
    Case("plain"),
    Case("gqa", Hq=4, Hkv=2),
    Case("value_dim_24", Dv=24),
    Case("key_mask_bool", mask="key_bool"),
    Case("key_mask_add", mask="key_add"),
    Case("general_mask", mask="general_bool"),
    Case("query_mask", query_mask=True),
    Case("causal", Sq=300, Skv=300, causal=True),
    Case("threshold_per_item", threshold=(0.0, 0.5)),
    Case("own_first", tile_order="own_first"),
    Case("bf16", dtype=torch.bfloat16),
    Case("fp16", dtype=torch.float16),
    Case("fp64", dtype=torch.float64),
    Case("one_row", Sq=1),
    Case("one_key", Skv=1),
    Case("one_item", B=1),
]


def arguments(case: Case) -> tuple:
    return (*case.inputs(), case.causal, case.scale, case.tile_order, "auto")


def call(query, key=None, value=None, threshold=0.1, mask=None, query_mask=None, causal=False, scale=None, order="ascending", name="auto"):
    threshold = torch.tensor(threshold, device=query.device) if isinstance(threshold, float) else threshold
    return attention(
        query, query if key is None else key, query if value is None else value, threshold, mask, query_mask, causal, scale, order, name
    )


def in_memory_order(order: tuple[int, ...], *shape: int) -> torch.Tensor:
    """A dense tensor of `shape` whose dimensions lie in memory in `order`, outermost first."""
    back = [order.index(dim) for dim in range(len(shape))]
    return torch.randn([shape[dim] for dim in order]).permute(back)


LAYOUTS = {
    **{"".join("BHSD"[d] for d in order): in_memory_order(order, B, H, S, D) for order in DENSE_ORDERS},
    "one item": in_memory_order((0, 2, 1, 3), 1, H, S, D),
    "one head": in_memory_order((0, 2, 1, 3), B, 1, S, D),
    "one row": in_memory_order((0, 1, 2, 3), B, H, 1, D),
    "all one": torch.randn(1, 1, 1, D),
    "sliced channels": torch.randn(B, S, H, 3 * D)[..., D : 2 * D].transpose(1, 2),
    "sliced rows": torch.randn(B, H, 2 * S, D)[:, :, ::2],
    "expanded": torch.randn(B, 1, S, D).expand(B, H, S, D),
    "channels not last": in_memory_order((0, 1, 3, 2), B, H, S, D),
}


@pytest.mark.parametrize("case", OPCHECKS, ids=str)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(attention, arguments(case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_every_layout(layout: str) -> None:
    query = LAYOUTS[layout]
    torch.library.opcheck(attention, (query, query, query[..., :8], torch.tensor(0.1), None, None, False, None, "ascending", "auto"))


def test_opcheck_where_the_derivative_is_missing() -> None:
    query = torch.randn(1, 2, 70, 8, requires_grad=True)
    with torch.no_grad():
        torch.library.opcheck(
            attention, (query, query, query, torch.tensor(0.1), None, None, False, None, "ascending", "auto"), test_utils="test_schema"
        )


@pytest.mark.parametrize("value_dim", [D, 24])
@pytest.mark.parametrize("order", DENSE_ORDERS, ids=lambda order: "".join("BHSD"[d] for d in order))
def test_output_keeps_the_memory_order_of_a_dense_query(order: tuple[int, ...], value_dim: int) -> None:
    query = in_memory_order(order, B, H, S, D)
    out = call(query, value=torch.randn(B, H, S, value_dim))[0]
    by_stride = tuple(sorted(range(4), key=lambda dim: -out.stride(dim)))
    assert by_stride == order
    assert out.permute(order).is_contiguous()


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)], ids=["BSHD", "BHSD"])
def test_output_strides_are_those_of_scaled_dot_product_attention(order: tuple[int, ...]) -> None:
    query = in_memory_order(order, B, H, S, D)
    assert call(query)[0].stride() == F.scaled_dot_product_attention(query, query, query).stride()


@pytest.mark.parametrize("layout", ["sliced channels", "sliced rows", "expanded", "channels not last", "all one"])
def test_output_of_a_query_without_a_dense_order_is_bshd(layout: str) -> None:
    out = call(LAYOUTS[layout])[0]
    assert out.transpose(1, 2).is_contiguous()


def test_a_size_one_dimension_does_not_hide_the_order() -> None:
    assert call(in_memory_order((0, 2, 1, 3), 1, H, S, D))[0].stride() == (H * S * D, D, H * D, 1)
    assert call(in_memory_order((0, 1, 2, 3), 1, H, S, D))[0].stride() == (H * S * D, S * D, D, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_and_real_have_the_same_strides(layout: str) -> None:
    given = (LAYOUTS[layout], LAYOUTS[layout], LAYOUTS[layout][..., :8], torch.tensor(0.1))
    real = call(*given)
    with FakeTensorMode() as mode:
        fakes = call(*map(mode.from_tensor, given))
    for fake, tensor in zip(fakes, real, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)], ids=["BSHD", "BHSD"])
def test_symbolic_lengths_get_no_guard_and_the_right_strides(order: tuple[int, ...]) -> None:
    query = in_memory_order(order, B, H, S, D)
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    symbolic = torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC
    static = torch.fx.experimental.symbolic_shapes.DimDynamic.STATIC
    context = torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=[static, static, symbolic, static])
    fake = mode.from_tensor(query, symbolic_context=context)
    before = len(environment.guards)
    with mode:
        out, lse, _ = attention(fake, fake, fake, torch.tensor(0.1), None, None, False, None, "ascending", "auto")
    assert len(environment.guards) == before
    assert isinstance(out.shape[2], torch.SymInt)
    assert lse.shape[2] == out.shape[2]
    assert out.permute(order).is_contiguous()


def test_unbacked_lengths_trace() -> None:
    """Lengths that are read from data, as in Mochi under fullgraph."""

    def run(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        chosen = x[keep.nonzero().squeeze(1)].unsqueeze(0).unflatten(2, (2, 8)).transpose(1, 2)
        return attention(chosen, chosen, chosen, torch.tensor(0.1), None, None, False, None, "ascending", "auto")[0]

    x, keep = torch.randn(200, 16), torch.rand(200) < 0.7
    graph = make_fx(run, tracing_mode="symbolic")(x, keep)
    torch.testing.assert_close(graph(x, keep), run(x, keep))


def test_one_compilation_for_many_lengths() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=True)
    def run(x: torch.Tensor) -> torch.Tensor:
        return call(x)[0]

    for length in (150, 64, 129, 1000):
        x = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(run(x), call(x)[0])
    assert counter.frame_count == 1


def test_is_the_reference_on_a_cpu() -> None:
    case = Case("plain", Hq=4, Skv=1000, mask="key_bool", tile_order="own_first", query_mask=True)
    expected = reference_attention(*case.inputs(), scale=case.scale, tile_order=case.tile_order)
    for actual, wanted in zip(attention(*arguments(case)), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_inputs_are_not_written() -> None:
    case = Case("plain", mask="key_add")
    given = arguments(case)
    attention(*given)
    for tensor, fresh in zip(given, arguments(case), strict=True):
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, fresh)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_a_missing_derivative_raises(name: str) -> None:
    given = {n: torch.randn(1, 2, 70, 8) for n in ("query", "key", "value")} | {"attn_mask": torch.randn(1, 1, 1, 70)}
    given[name].requires_grad_()
    run = lambda: call(given["query"], given["key"], given["value"], mask=given["attn_mask"])[0]
    with pytest.raises(RuntimeError, match="no derivative, but grad mode is on and an input requires grad; run under torch.no_grad"):
        run()
    with torch.no_grad():
        out = run()
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(run(), out)


def test_no_derivative_is_needed_without_requires_grad() -> None:
    assert torch.is_grad_enabled()
    assert not call(torch.randn(1, 2, 70, 8))[0].requires_grad


Q = torch.zeros(2, 4, 70, 8)
BAD_INPUTS = {
    "query of rank 3": ((Q[0],), r"query must be \[batch, heads, tokens, head_dim\], got \[4, 70, 8\]; "),
    "key of rank 5": ((Q, Q[None]), r"key must be \[batch, heads, tokens, head_dim\], got \[1, 2, 4, 70, 8\]; "),
    "integers": ((Q.long(),), r"query must have a floating-point dtype, got torch.int64; use query.float\(\)"),
    "key of another dtype": ((Q, Q.half()), r"key must be torch.float32 on cpu as query is, got torch.float16 on cpu; use key.to\(query\)"),
    "value of another device": (
        (Q, Q, Q.to("meta")),
        r"value must be torch.float32 on cpu as query is, got torch.float32 on meta; use value.to",
    ),
    "key of another batch": ((Q, Q[:1]), r"key must have query's batch size 2, got \[1, 4, 70, 8\]; expand it"),
    "key of another head_dim": ((Q, Q[..., :4]), r"key must have query's head_dim 8, got \[2, 4, 70, 4\]"),
    "value of another length": ((Q, Q, Q[:, :, :60]), r"value must have key's number of keys 70, got \[2, 4, 60, 8\]"),
    "value of other heads": ((Q, Q, Q[:, :2]), r"value must have key's number of heads 4, got \[2, 2, 70, 8\]"),
    "value of another batch": ((Q, Q, Q[:1]), r"value must have key's batch size 2, got \[1, 4, 70, 8\]"),
    "heads that do not divide": ((Q, Q[:, :3], Q[:, :3]), r"query heads must be a multiple of key heads, got 4 and 3; "),
    "no key heads": ((Q, Q[:, :0], Q[:, :0]), r"query heads must be a multiple of key heads, got 4 and 0; "),
    "threshold of another dtype": (
        (Q, Q, Q, torch.tensor(0.1).double()),
        r"threshold must be float32 on cpu, got torch.float64 on cpu; use .*float",
    ),
    "integer threshold": ((Q, Q, Q, torch.tensor(1)), r"threshold must be float32 on cpu, got torch.int64"),
    "threshold of rank 2": ((Q, Q, Q, torch.zeros(2, 1)), r"threshold must be \[\] or \[batch\] = \[2\], got \[2, 1\]; "),
    "threshold of another batch": ((Q, Q, Q, torch.zeros(3)), r"threshold must be \[\] or \[batch\] = \[2\], got \[3\]; "),
    "integer mask": ((Q, Q, Q, 0.1, torch.ones(70).int()), r"attn_mask must be boolean .* got torch.int32; use attn_mask.bool\(\)"),
    "mask too short": (
        (Q, Q, Q, 0.1, torch.ones(69) > 0),
        r"attn_mask must be on cpu and broadcast to \[2, 4, 70, 70\], got \[69\] on cpu; ",
    ),
    "mask of rank 5": ((Q, Q, Q, 0.1, torch.ones(1, 1, 1, 1, 70) > 0), r"attn_mask must .* got \[1, 1, 1, 1, 70\]"),
    "mask of other heads": ((Q, Q, Q, 0.1, torch.ones(2, 3, 1, 70) > 0), r"attn_mask must .* got \[2, 3, 1, 70\]"),
    "query mask of rank 2": (
        (Q, Q, Q, 0.1, None, torch.ones(2, 70) > 0),
        r"query_mask must be boolean \[batch, 1, rows, 1\], got torch.bool \[2, 70\]; ",
    ),
    "additive query mask": (
        (Q, Q, Q, 0.1, None, torch.ones(2, 1, 70, 1)),
        r"query_mask must be boolean .* got torch.float32 \[2, 1, 70, 1\]",
    ),
    "query mask too long": (
        (Q, Q, Q, 0.1, None, torch.ones(2, 1, 71, 1) > 0),
        r"query_mask must .* broadcast to \[2, 1, 70, 1\], got \[2, 1, 71, 1\]",
    ),
    "query mask of heads": (
        (Q, Q, Q, 0.1, None, torch.ones(2, 4, 70, 1) > 0),
        r"query_mask must .* broadcast to \[2, 1, 70, 1\], got \[2, 4, 70, 1\]",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_named(name: str) -> None:
    given, message = BAD_INPUTS[name]
    with pytest.raises(ValueError, match=message):
        call(*given)


@pytest.mark.parametrize("name", [n for n in BAD_INPUTS if "device" not in n])
def test_bad_inputs_are_named_before_anything_is_compiled(name: str) -> None:
    given, message = BAD_INPUTS[name]
    counter = CompileCounter()
    with pytest.raises(Exception, match=message):
        torch.compile(call, backend=counter, fullgraph=True)(*given)
    assert counter.frame_count == 0


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match="implementation 'fastest' cannot run this attention: no such implementation"):
        call(Q, name="fastest")
    with pytest.raises(ValueError, match="tile_order .*descending"):
        call(Q, order="descending")


def test_an_implementation_that_does_not_fit_says_why() -> None:
    with pytest.raises(ValueError, match="implementation 'sm90' cannot run this attention: .*cpu"):
        call(Q, name="sm90")


def test_output_stride_is_dense_for_every_layout() -> None:
    for query in LAYOUTS.values():
        stride = output_stride(query, 24)
        shape = (*query.shape[:3], 24)
        assert sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 == torch.Size(shape).numel()


class Kernel:
    """An implementation for keys as long as queries that checks its arguments itself, ahead of the reference; counts what it is asked."""

    def __init__(self) -> None:
        self.asked = self.ran = 0

    def run(self, query, key, *rest) -> None:
        if key.shape != query.shape or key.dtype != query.dtype:
            raise ValueError("the kernel's own words")
        self.ran += 1
        rest[-4][0].fill_(7)

    def unavailable(self, problem: Problem) -> str | None:
        self.asked += 1
        return None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    implementation = dataclasses.replace(
        reference.IMPLEMENTATION, name="kernel", run=kernel.run, unavailable=kernel.unavailable, masks=("none",), checks_arguments=True
    )
    monkeypatch.setattr(kernels, "implementations", lambda: (implementation, reference.IMPLEMENTATION))
    monkeypatch.setattr(ops, "_plans", {})
    return kernel


def test_an_implementation_is_chosen_once_for_each_kind_of_query(kernel: Kernel) -> None:
    for _ in range(3):
        assert call(Q)[0].eq(7).all()
        assert call(Q, threshold=0.5, scale=2.0)[0].eq(7).all()
    assert (kernel.ran, kernel.asked) == (6, 1)
    call(Q[:1])
    call(Q.contiguous().transpose(2, 3).contiguous().transpose(2, 3))
    call(Q.half())
    call(Q, causal=True)
    assert (kernel.ran, kernel.asked) == (10, 5)


@pytest.mark.parametrize("name", [n for n in BAD_INPUTS if n.startswith(("key", "heads"))])
def test_a_remembered_choice_hides_no_bad_input(name: str, kernel: Kernel) -> None:
    assert call(Q)[0].eq(7).all()
    given, message = BAD_INPUTS[name]
    with pytest.raises(ValueError, match=message):
        call(*given)


def remembered(monkeypatch: pytest.MonkeyPatch, **fields_by_name: dict[str, bool]) -> list[str]:
    """Implementations of these names that check their arguments, as the reference runs; which of them ran."""
    ran: list[str] = []

    def implementation(name: str, fields: dict[str, bool]) -> Implementation:
        run = lambda *given: (ran.append(name), reference.IMPLEMENTATION.run(*given))
        return dataclasses.replace(reference.IMPLEMENTATION, name=name, run=run, checks_arguments=True, **fields)

    monkeypatch.setattr(kernels, "implementations", lambda: tuple(implementation(*given) for given in fields_by_name.items()))
    monkeypatch.setattr(ops, "_plans", {})
    return ran


def test_values_of_another_width_are_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = remembered(monkeypatch, any={})
    query = torch.randn(2, 4, 70, 8)
    for value_dim in (16, 32, 8, 32, 16):
        value = torch.randn(2, 4, 70, value_dim)
        for x, wanted in zip(call(query, query, value), reference_attention(query, query, value, torch.tensor(0.1)), strict=True):
            assert torch.equal(x, wanted)
    assert (len(ran), len(ops._plans)) == (5, 3)


def test_a_call_with_odd_memory_does_not_decide_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = remembered(monkeypatch, strict={"needs_alignment": True}, any={})
    for key in (torch.randn(2, 4, 70, 9)[..., 1:], Q, Q):
        call(Q, key, key)
    assert ran == ["any", "strict", "strict"]
    assert len(ops._plans) == 2


def test_memory_that_is_always_odd_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = remembered(monkeypatch, strict={"needs_alignment": True}, any={})
    odd, started = torch.randn(2, 4, 70, 9)[..., 1:], []
    start = ops._start
    monkeypatch.setattr(ops, "_start", lambda *given: started.append(given) or start(*given))
    for _ in range(3):
        call(Q, odd, odd)
    assert (ran, len(started)) == (["any"] * 3, 1)


def test_another_implementation_takes_what_the_remembered_one_refuses(kernel: Kernel) -> None:
    query, key = torch.randn(2, 4, 70, 8), torch.randn(2, 4, 90, 8)
    assert call(query)[0].eq(7).all()
    with pytest.raises(ValueError, match="the kernel's own words"):  # it is chosen again: only what it publishes can lead elsewhere
        call(query, key, key)
    masked = call(query, key, key, mask=torch.ones(90) > 0)
    for actual, wanted in zip(masked, reference_attention(query, key, key, torch.tensor(0.1)), strict=True):
        assert torch.equal(actual, wanted)
    assert call(query)[0].eq(7).all()


def test_the_reference_is_not_remembered_since_it_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_plans", {})
    call(Q)
    assert not ops._plans


def test_remembered_kinds_are_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_PLANS_KEPT", 4)
    for rows in range(1, 12):
        call(Q[:, :, :rows])
        assert len(ops._plans) <= 4
