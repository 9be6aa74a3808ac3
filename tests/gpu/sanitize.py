"""The Hopper kernel for compute-sanitizer: small shapes, every loop, order and mask, measuring too; tiles are kept and skipped.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py [--shapes 1]

Not a test by itself: under the tools a call takes seconds. --shapes N: the first N shapes only.
"""

import argparse
import itertools

import torch
from test_sm90 import SCALE, THRESHOLD, exact_inputs

from skip_attn_compile import ops
from skip_attn_compile.measure import measure

# B, Hq, Hkv, Sq, Skv. The second runs without clusters; the last has more blocks than the GPU multiprocessors, so that a CTA takes several.
SHAPES = ((1, 2, 1, 200, 700), (1, 1, 1, 64, 500), (1, 2, 2, 256, 1024), (1, 70, 7, 256, 300))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    shapes = SHAPES[: parser.parse_args().shapes]
    torch.manual_seed(0)
    trials = torch.logspace(-6, 0, 32, device="cuda")
    calls, visited, skipped = 0, 0, 0
    for head_dim, shape, order in itertools.product((128, 64), shapes, ("ascending", "own_first")):
        query, key, value = exact_inputs(*shape, head_dim, torch.bfloat16)
        batch, _, _, rows, keys = shape
        key_mask = torch.rand(batch, 1, 1, keys, device="cuda") < 0.5
        row_mask = torch.rand(batch, 1, rows, 1, device="cuda") < 0.5
        forms = ((None, None, False), (None, None, True), (key_mask, None, False), (key_mask.to(query.dtype), row_mask, False))
        for attn_mask, query_mask, causal in forms:
            for threshold in (0.0, THRESHOLD, 0.5):
                lam = torch.tensor(threshold, device="cuda")
                counts = ops.attention(query, key, value, lam, attn_mask, query_mask, causal, SCALE, order, "sm90")[2].sum((0, 1)).tolist()
                visited, skipped = visited + counts[0], skipped + counts[1]
            measure(query, key, value, trials, attn_mask, query_mask, causal, SCALE, order, 64, 128)
            measure(query, key, value, trials, attn_mask, query_mask, causal, SCALE, "ascending", 128, 128)
            calls += 5
    torch.cuda.synchronize()
    assert 0.1 < skipped / visited < 0.9, (visited, skipped)
    print(f"{calls} calls, {skipped} of {visited} tiles skipped")


if __name__ == "__main__":
    main()
