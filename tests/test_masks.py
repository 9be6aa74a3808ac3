"""Masks that are made of a key mask are served as one; those that only look so stay, each with its reason."""

from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphs import graph_text, recording_backend, targets
from models import HEADS, TOKENS, chroma, hunyuan_video_15, leveled, ltx, reference_sdpa, skip_config

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
OP = "skip_attn_compile.attention"
X = torch.cat([leveled(), 2 * leveled()])  # [2, 2, 512, 16]
BATCH = len(X)
VALID = torch.arange(TOKENS) < torch.tensor([[300], [450]])  # [B, S], padding at the end as diffusers has it
REASON = "mask {} is not a key mask [batch|1, 1, 1, keys], nor one and-ed with a query mask [batch|1, 1, queries, 1]"

Build = Callable[[Tensor], Tensor]


def attend(build: Build) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention with the mask that `build` makes of m [B, S], inside the graph."""
    return lambda x, m: F.scaled_dot_product_attention(x, x, x, build(m))


def compiled(build: Build, m: Tensor = VALID, x: Tensor = X, symbolic: bool = False):
    """The output, the graph and the site. With `symbolic` the batch size and the number of tokens are symbols."""
    be, recorder = recording_backend(skip_config())
    if symbolic:
        x, m = x.clone(), m.clone()
        for tensor, dims in ((x, (0, 2)), (m, (0, 1))):
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
    out = torch.compile(attend(build), backend=be)(x, m)
    (graph,) = recorder.graphs
    (site,) = be.report().sites
    return out, graph, site


def hunyuan_video_refiner(m: Tensor) -> Tensor:
    mask = hunyuan_video_15(m)
    mask[:, :, :, 0] = True
    return mask


def minus_infinity(m: Tensor) -> Tensor:
    return torch.zeros(m.shape).masked_fill_(~m, float("-inf"))


class TestGraphs(expecttest.TestCase):
    """`EXPECTTEST_ACCEPT=1 pytest tests/test_masks.py` writes the expected texts anew."""

    def setUp(self) -> None:
        torch._dynamo.reset()

    def text(self, build: Build, **keywords) -> str:
        """The graph up to the operator."""
        lines = graph_text(compiled(build, **keywords)[1]).split("\n")
        return "\n".join(lines[: 1 + next(n for n, line in enumerate(lines) if OP in line)])

    def test_hunyuan_video_15(self) -> None:
        self.assertExpectedInline(
            self.text(hunyuan_video_15),
            """\
m: b8[2, 512]
x: f32[2, 2, 512, 16]
skip_attn_control: f32[1, 2]
getitem: b8[2, 1, 1, 512] = getitem(m, [slice(None, None, None), None, None, slice(None, None, None)])
getitem_1: b8[2, 1, 512, 1] = getitem(m, [slice(None, None, None), None, slice(None, None, None), None])
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
sum_1 = sum(getitem, -1)
clamp_min = clamp_min(sum_1, 1)
reshape = reshape(clamp_min, [-1])
unsqueeze = unsqueeze(select, 1)
unsqueeze_1 = unsqueeze(select_1, 1)
truediv = truediv(unsqueeze_1, reshape)
add = add(unsqueeze, truediv)
amax = amax(add, 1)
ge = ge(amax, 1)
select_2 = select(add, 0, 0)
attention_default = skip_attn_compile.attention(x, x, x, select_2, getitem, getitem_1, False, None, 'ascending', 'auto')""",
        )

    def test_chroma_with_symbolic_sizes(self) -> None:
        self.assertExpectedInline(
            self.text(chroma, symbolic=True),
            """\
s54
s83
m: b8[s54, s53]
x: f32[s54, 2, s53, 16]
skip_attn_control: f32[1, 2]
getitem_2: b8[s54, 1, 1, s53] = getitem(m, [slice(None, None, None), None, None, slice(None, None, None)])
getitem_3: b8[s54, 1, s53, 1] = getitem(m, [slice(None, None, None), None, slice(None, None, None), None])
size = size(x, 2)
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
sum_1 = sum(getitem_2, -1)
clamp_min = clamp_min(sum_1, 1)
reshape = reshape(clamp_min, [-1])
unsqueeze = unsqueeze(select, 1)
unsqueeze_1 = unsqueeze(select_1, 1)
truediv = truediv(unsqueeze_1, reshape)
add = add(unsqueeze, truediv)
amax = amax(add, 1)
ge = ge(amax, 1)
select_2 = select(add, 0, 0)
attention_default = skip_attn_compile.attention(x, x, x, select_2, getitem_2, getitem_3, False, None, 'ascending', 'auto')""",
        )

    def test_ltx(self) -> None:
        self.assertExpectedInline(
            self.text(ltx),
            """\
m: b8[2, 512]
x: f32[2, 2, 512, 16]
skip_attn_control: f32[1, 2]
to: f32[2, 512] = to(m, torch.float32)
sub: f32[2, 512] = sub(1, to)
mul: f32[2, 512] = mul(sub, -10000.0)
getitem: f32[2, 1, 1, 512] = getitem(mul, [slice(None, None, None), None, None, slice(None, None, None)])
select = select(skip_attn_control, 1, 0)
select_1 = select(skip_attn_control, 1, 1)
gt = gt(getitem, -inf)
sum_1 = sum(gt, -1)
clamp_min = clamp_min(sum_1, 1)
reshape = reshape(clamp_min, [-1])
unsqueeze = unsqueeze(select, 1)
unsqueeze_1 = unsqueeze(select_1, 1)
truediv = truediv(unsqueeze_1, reshape)
add = add(unsqueeze, truediv)
amax = amax(add, 1)
ge = ge(amax, 1)
select_2 = select(add, 0, 0)
attention_default = skip_attn_compile.attention(x, x, x, select_2, getitem, None, False, None, 'ascending', 'auto')""",
        )


SERVED: dict[str, Build] = {
    "a product": chroma,
    "an and of repeated rows": hunyuan_video_15,
    "logical_and": lambda m: torch.logical_and(m[:, None, None], m.unsqueeze(1).unsqueeze(3)),
    "for every head": lambda m: chroma(m).expand(-1, HEADS, -1, -1),
    "for every head by the batch": lambda m: chroma(m).repeat_interleave(HEADS, 0).view(-1, HEADS, m.shape[1], m.shape[1]),
    "of an and": lambda m: chroma(m & m.roll(1, 1)),
    "of a slice": lambda m: chroma(F.pad(m, (1, 0))[:, 1:]),
    "of a batch in another order": lambda m: chroma(m[[1, 0]]),
    "of a tile": lambda m: chroma(m[:, 128:384].repeat(1, 2)),
    "one for the batch": lambda m: chroma(m[:1]).squeeze(),
    "a key mask for every row": lambda m: m.view(-1, 1, 1, m.shape[1]).expand(-1, 1, m.shape[1], -1),
    "a key mask of heads": ltx,
    "a key mask of heads, cast": lambda m: minus_infinity(m).double().view(-1, 1, 1, m.shape[1]).repeat(1, HEADS, 1, 1).to(X.dtype),
    "a key mask of heads, repeated in place": lambda m: minus_infinity(m)[:, None, None].repeat_interleave(HEADS, dim=1),
    "a key mask of heads and rows": lambda m: minus_infinity(m).reshape(-1, 1, 1, m.shape[1]).repeat(1, HEADS, m.shape[1], 1),
    "a query mask": lambda m: m[:, None, :, None],
    "a query mask for every key": lambda m: m[:, None, :, None].expand(-1, HEADS, -1, m.shape[1]),
    "queries and keys of their own": lambda m: m[:, None, None] & m.roll(64, 1)[:, None, :, None],
    "keys along the first dimension": lambda m: (m.transpose(0, 1) & True).transpose(0, 1)[:, None, None],
    "one value": lambda m: m.any().expand(1, 1, 1, m.shape[1]),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("how", SERVED)
def test_a_mask_made_of_key_masks_is_served(how: str, symbolic: bool) -> None:
    build = SERVED[how]
    out, graph, site = compiled(build, symbolic=symbolic)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, attend(build)(X, VALID), **CLOSE)
    assert (site.decision, site.visited, site.skipped) == ("sparse", *tiles[0])
    assert site.skipped > 0
    examples = [node.meta.get("example_value") for node in graph.graph.nodes]
    built = [list(e.shape) for e in examples if isinstance(e, Tensor) and e.dim() == 4 and e.shape[2] == e.shape[3] != 1]
    assert not built, "nothing of [batch, heads, queries, keys] is left in the graph"


@pytest.mark.parametrize("how", SERVED)
def test_threshold_zero_is_sdpa(how: str) -> None:
    """Also in the rows without a key: on a CPU both give 0."""
    be, _ = recording_backend(skip_config(0.0))
    out = torch.compile(attend(SERVED[how]), backend=be)(X, VALID)
    torch.testing.assert_close(out, attend(SERVED[how])(X, VALID), **CLOSE)


@torch.library.custom_op("test_masks::invert", mutates_args=("x",))
def invert(x: Tensor) -> None:
    x.logical_not_()


def written(m: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    rows = m[:, None, None].repeat(1, 1, TOKENS, 1)
    write(rows)
    return rows.view(BATCH, 1, TOKENS, TOKENS)


def written_through_a_view(m: Tensor) -> Tensor:
    rows = m[:, None, None].repeat(1, 1, TOKENS, 1)
    rows.transpose(2, 3)[..., :8, :] = True
    return rows.view(BATCH, 1, TOKENS, TOKENS)


def written_by_an_index(m: Tensor) -> Tensor:
    mask = chroma(m)
    mask[..., 0] = True
    return mask


def written_after_it_was_copied(m: Tensor, copy: Build) -> Tensor:
    m = m.clone()
    mask = copy(m)
    m.logical_not_()
    return mask


def written_before_it_is_viewed(m: Tensor) -> Tensor:
    mask = minus_infinity(m)[:, None].repeat_interleave(HEADS, 0)
    mask[1] = 0
    return mask.view(BATCH, HEADS, 1, TOKENS)


@torch.compiler.allow_in_graph
def mul(a: Tensor, b: Tensor) -> Tensor:
    return a | b


STAY: dict[str, Build] = {
    "heads that differ": lambda m: torch.stack([m, m.flip(1)], 1)[:, :, None],
    "heads that differ, repeated for every row": lambda m: torch.stack([m, m.flip(1)], 1)[:, :, None].expand(-1, -1, TOKENS, -1),
    "batch and heads exchanged": lambda m: m[:, None].repeat(HEADS, 1, 1).view(BATCH, HEADS, 1, TOKENS),
    "repeated along the keys": lambda m: m.repeat_interleave(HEADS, 1).view(BATCH, HEADS, 1, TOKENS),
    "repeated unequally": lambda m: m[:, None].repeat_interleave(torch.tensor([1, 3]), 0, output_size=4).view(BATCH, HEADS, 1, TOKENS),
    "rows that differ": lambda m: m[:, None, None].repeat(1, 1, TOKENS, 1).tril(),
    "a first key for rows without one": hunyuan_video_refiner,
    "written to through a view": written_through_a_view,
    "written to before it is viewed": written_before_it_is_viewed,
    "written to by an index": written_by_an_index,
    "written to by out=": lambda m: written(m, lambda rows: torch.logical_not(rows, out=rows)),
    "written to by inplace=": lambda m: written(minus_infinity(m), lambda rows: F.relu(rows, inplace=True)),
    "written to by an operator": lambda m: written(m, torch.ops.test_masks.invert.default),
    "written to by an operator's packet": lambda m: written(m, torch.ops.test_masks.invert),
    "made of what was written to since": lambda m: written_after_it_was_copied(m, lambda m: m[:, None, None].repeat(1, 1, TOKENS, 1)),
    "made for heads of what was written to since": lambda m: written_after_it_was_copied(
        m, lambda m: m.repeat_interleave(HEADS, 0).view(BATCH, HEADS, 1, TOKENS)
    ),
    "a function of the same name": lambda m: mul(m[:, None, None], m[:, None, :, None]),
    "an or": lambda m: m[:, None, None] | m[:, None, :, None],
    "a product and a third": lambda m: chroma(m) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(),
    "a product of numbers, which are added": lambda m: chroma(m.to(X.dtype)),
    "a product, as numbers": lambda m: chroma(m).to(X.dtype),
    "two key masks and a query mask": lambda m: chroma(m) & m.roll(64, 1)[:, None, None],
    "a sum": lambda m: minus_infinity(m)[:, None, None] + minus_infinity(m)[:, None, :, None],
    "a number for every row": lambda m: minus_infinity(m)[:, None, :, None],
    "keys along the first dimension": lambda m: (m.transpose(0, 1) & True).transpose(0, 1)[:, None, None].repeat(1, 1, TOKENS, 1),
}


@pytest.mark.parametrize("how", STAY)
def test_what_only_looks_so_stays(how: str) -> None:
    build = STAY[how]
    out, graph, site = compiled(build)
    assert torch.equal(out, attend(build)(X, VALID))
    assert OP not in targets(graph)
    assert (site.decision, site.reasons) == ("kept", (REASON.format(list(build(VALID).shape)),))


def test_a_mask_cut_anew_is_followed_no_further() -> None:
    def run(x: Tensor, m: Tensor) -> Tensor:
        x = torch.cat(x.chunk(2, 2))
        return F.scaled_dot_product_attention(x, x, x, m.reshape(2 * BATCH, 1, 1, TOKENS // 2).expand(-1, HEADS, -1, -1))

    be, _ = recording_backend(skip_config())
    out = torch.compile(run, backend=be)(X, VALID)
    with reference_sdpa(0.3) as tiles:
        torch.testing.assert_close(out, run(X, VALID), **CLOSE)
    assert [(site.visited, site.skipped) for site in be.report().sites] == tiles


def test_heads_repeated_along_the_queries_stay() -> None:
    def run(x: Tensor, m: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:1, :, :2], x[:1], x[:1], m[:, :1].repeat_interleave(HEADS, 0).view(1, HEADS, 2, 1))

    be, _ = recording_backend(skip_config())
    assert torch.equal(torch.compile(run, backend=be)(X, VALID), run(X, VALID))
    assert [site.decision for site in be.report().sites] == ["kept"]


def test_blocks_share_their_masks_and_lambda() -> None:
    def run(x: Tensor, m: Tensor) -> Tensor:
        return attend(chroma)(attend(chroma)(x, m), m)

    be, recorder = recording_backend(skip_config())
    torch.compile(run, backend=be)(X, VALID)
    called = targets(recorder.graphs[0])
    assert [called.count(name) for name in (OP, "mul", "truediv")] == [2, 0, 1]


def test_a_mask_that_something_else_uses_is_still_built() -> None:
    def run(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        mask = chroma(m)
        return F.scaled_dot_product_attention(x, x, x, mask), mask.sum()

    be, recorder = recording_backend(skip_config())
    out = torch.compile(run, backend=be)(X, VALID)
    with reference_sdpa(0.3):
        torch.testing.assert_close(out, run(X, VALID), **CLOSE)
    assert OP in targets(recorder.graphs[0])


def test_a_mask_of_one_call_may_be_kept_for_another() -> None:
    """One layer is ignored: it reads the big mask, the other does not."""

    def run(x: Tensor, m: Tensor) -> Tensor:
        mask = chroma(m)
        return F.scaled_dot_product_attention(x, x, x, mask) + F.scaled_dot_product_attention(x, x, x, mask, 0.5)

    be, _ = recording_backend(skip_config())
    torch.compile(run, backend=be)(X, VALID)
    assert [site.decision for site in be.report().sites] == ["sparse", "kept"]


def test_a_mask_of_ones_gives_what_no_mask_gives() -> None:
    out, _, site = compiled(chroma, torch.ones_like(VALID))
    be, _ = recording_backend(skip_config())
    plain = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend=be)(X)
    assert torch.equal(out, plain)
    assert (site.visited, site.skipped) == (be.report().visited, be.report().skipped)


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        out, _, site = compiled(hunyuan_video_15)
    assert site.decision == "sparse"
    torch.testing.assert_close(out, compiled(hunyuan_video_15)[0])


def test_padding_rows_do_not_vote() -> None:
    """Queries that point elsewhere, where the mask leaves them out, do not keep the others from skipping."""
    x = X.clone()
    x[:, :, 280:] *= -1
    valid = torch.arange(TOKENS) < torch.tensor([[280], [280]])
    product = compiled(chroma, valid, x)[2]
    keys_only = compiled(lambda m: m[:, None, None], valid, x)[2]
    assert product.skipped / product.visited > keys_only.skipped / keys_only.visited


def test_a_cast_is_rounded_as_often_as_it_was() -> None:
    """1 + 1/256 in bfloat16 is 1: what is added to the scores is the rounded value, not the one it was made of."""
    bias = (1.0 + VALID / 256) * 3.0

    def run(x: Tensor, bias: Tensor, *dtypes: torch.dtype) -> Tensor:
        mask = bias[:, None, None].expand(-1, HEADS, -1, -1)
        for dtype in dtypes:
            mask = mask.to(dtype)
        return F.scaled_dot_product_attention(x, x, x, mask)

    for dtypes in ((torch.float64, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float32)):
        torch._dynamo.reset()
        be, _ = recording_backend(skip_config(0.0))
        x = X.double().to(dtypes[-1])
        torch.testing.assert_close(torch.compile(run, backend=be)(x, bias, *dtypes), run(x, bias, *dtypes), rtol=1e-5, atol=1e-5)


def test_what_is_written_elsewhere_does_not_matter() -> None:
    def build(m: Tensor) -> Tensor:
        buffer = torch.zeros(m.shape[1])
        buffer[0] = m.shape[1]
        torch.ops.test_masks.invert(m[:1] | True)
        return hunyuan_video_15(m)

    assert compiled(build, symbolic=True)[2].decision == "sparse"


def test_keys_are_counted_after_the_cast() -> None:
    """The lowest float64 is a number, and -inf in float32: then the key takes no part."""
    text = graph_text(compiled(lambda m: minus_infinity(m).double()[:, None, None].repeat_interleave(HEADS, dim=1).to(X.dtype))[1])
    assert 0 < text.index(" = to(") < text.index(" = gt(to")
