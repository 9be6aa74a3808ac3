"""Masks that models make of a key mask, on a Hopper GPU: the kernel serves them as a key mask and a query mask."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models
import skip_attn_compile
from skip_attn_compile import SkipConfig

BATCH, TOKENS, HEAD_DIM = 2, 1024, 64


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value and m [B, S]. Scores are integers, the same for all rows: tiles of 128 keys lie on levels 0 to 7."""
    query, key = torch.zeros(2, BATCH, TOKENS, models.HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    query[..., 0] = 8.0  # times 1/sqrt(64)
    key[..., 0] = (torch.arange(TOKENS, device="cuda") // 128 * 3 % 8)[None, :, None].to(key.dtype)
    real = torch.arange(TOKENS, device="cuda") < torch.tensor([[700], [900]], device="cuda")
    return query.transpose(1, 2), key.transpose(1, 2), torch.randn_like(key).transpose(1, 2), real


@pytest.mark.parametrize("form", [models.hunyuan_video_15, models.chroma, models.ltx])
def test_a_mask_made_of_a_key_mask_is_served(form: Callable[[Tensor], Tensor]) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        mask = form(real)
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, mask)

    torch.compiler.reset()
    be = skip_attn_compile.backend(SkipConfig(threshold=0.1))
    compiled = torch.compile(attend, backend=be)
    given = inputs()
    sparse = compiled(*given)
    with models.reference_sdpa(torch.tensor(0.1, device="cuda")) as tiles:
        expected = attend(*given)
    torch.testing.assert_close(sparse, expected, rtol=2e-2, atol=2e-2)
    (site,) = be.report().sites
    assert (site.implementation, site.visited, site.skipped) == ("sm90", *tiles[0])
    assert site.skipped > 0

    be.update(threshold=0.0)
    rows = given[-1][:, None, :, None]  # cuDNN gives the others some number, where the mask leaves them no key
    torch.testing.assert_close(compiled(*given) * rows, torch.compile(attend)(*given) * rows, rtol=2e-2, atol=2e-2)
