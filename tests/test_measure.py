"""measure: the counts are those of one run for each lambda, and the output is dense."""

import pytest
import torch
import torch.nn.functional as F

from models import leveled
from skip_attn_compile.measure import measure
from skip_attn_compile.reference import reference_attention

THRESHOLDS = torch.logspace(-6, 0, 32)


def draw(sq: int, skv: int, heads: int = 2, kv_heads: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each key tile has a level of its own, 0 to 10 nats, so that every lambda skips another share."""
    generator = torch.Generator().manual_seed(seed)
    query = 0.3 * torch.randn(2, heads, sq, 16, generator=generator)
    key, value = (torch.randn(2, kv_heads, skv, 16, generator=generator) for _ in range(2))
    query[..., 0] = 4.0
    key[..., 0] = (10 * torch.rand(2, kv_heads, -(-skv // 128), generator=generator)).repeat_interleave(128, -1)[..., :skv]
    return query, key, value


CASES = {
    "plain": (draw(256, 512), {}),
    "ragged": (draw(200, 333), {}),
    "own_first": (draw(256, 512), {"tile_order": "own_first"}),
    "tiles of ModelOpt": (draw(300, 512), {"tile_q": 128}),
    "grouped heads": (draw(128, 512, heads=4), {}),
    "causal": (draw(512, 512), {"is_causal": True, "tile_order": "own_first"}),
    "key mask": (draw(256, 512), {"attn_mask": (torch.arange(512) < torch.tensor([[512], [300]]))[:, None, None]}),
    "query mask": (draw(256, 512), {"query_mask": (torch.arange(256) < torch.tensor([[256], [150]]))[:, None, :, None]}),
}


@pytest.mark.parametrize(("inputs", "options"), CASES.values(), ids=CASES)
def test_counts_are_those_of_one_run_for_each_lambda(inputs, options) -> None:
    given = {
        "attn_mask": None,
        "query_mask": None,
        "is_causal": False,
        "scale": None,
        "tile_order": "ascending",
        "tile_q": 64,
        "tile_k": 128,
    }
    given |= options
    out, counts = measure(*inputs, THRESHOLDS, *given.values())
    for number, threshold in enumerate(THRESHOLDS):
        expected_out, _, expected = reference_attention(*inputs, threshold, **given)
        assert torch.equal(counts[..., 0], expected[..., 0])
        assert torch.equal(counts[..., 1 + number], expected[..., 1])
    dense, _, _ = reference_attention(*inputs, torch.tensor(0.0), **given)
    assert torch.equal(out, dense)
    assert not torch.equal(out, expected_out), "lambda 1 skips something"
    assert bool((counts.diff(dim=-1)[..., 1:] >= 0).all()), "a larger lambda skips more"
    assert len(set(counts[..., 1:].sum((0, 1)).tolist())) > 4


def test_output_is_that_of_sdpa_in_its_layout() -> None:
    x = leveled().transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = measure(x, x, x, THRESHOLDS, None, None, False, None, "ascending", 64, 128)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x))
    assert out.stride() == x.stride()


def test_it_is_a_well_behaved_operator() -> None:
    query, key, value = draw(128, 256)
    arguments = (query, key, value, THRESHOLDS[:3], None, None, False, None, "own_first", 64, 128)
    torch.library.opcheck(measure, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("thresholds", "tiles", "text"),
    [
        (torch.tensor(0.1), (64, 128), r"thresholds must be float32 \[n\] with 1 to 32 lambdas, got shape \(\)"),
        (torch.rand(33), (64, 128), r"got shape \(33,\)"),
        (torch.rand(0), (64, 128), r"got shape \(0,\)"),
        (torch.rand(3).double(), (64, 128), "threshold must be float32"),
        (torch.rand(3), (0, 128), "tile_q must be at least 1, got 0"),
        (torch.rand(3), (64, -1), "tile_k must be at least 1, got -1"),
    ],
)
def test_wrong_arguments_are_named(thresholds, tiles, text) -> None:
    with pytest.raises(ValueError, match=text):
        measure(*draw(128, 256), thresholds, None, None, False, None, "ascending", *tiles)
