"""A table of all diffusers transformers: what the backend does to each, and whether the result is the same as without it.

    python examples/conformance.py [--inner inductor] [--json] [model ...]

Every transformer class that the installed diffusers exports, with tiny random weights, compiled whole and block by block. Where ours
and plain torch.compile differ in graphs, graph breaks or recompiles, or a result is off, the last column says so, and the exit status
is 1. The configurations are in tests/diffusers_models.py; a class without one is listed.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from conformance_row import conform, ways
from diffusers_models import CASES, transformer_classes

HEADER = ("model", "compiled", "calls", "sparse", "kept", "eager", "graphs", "breaks", "recompiles", "skipped", "result")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", default="aot_eager", help="what compiles the graphs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with all reasons and notes")
    parser.add_argument("models", nargs="*", help="class names (default: all)")
    options = parser.parse_args(arguments)
    unknown = set(options.models) - set(transformer_classes())
    if unknown:
        parser.error(f"the installed diffusers exports no {', '.join(sorted(unknown))}")
    if not options.json:
        print(f"| {' | '.join(HEADER)} |")
        print("|---" * len(HEADER) + "|")
    failed = False
    for result in results(options.inner, options.models):
        failed |= bool(result["faults"])
        print(json.dumps(result) if options.json else line(result), flush=True)
    return int(failed)


def results(inner: str, models: list[str]) -> Iterator[dict[str, Any]]:
    classes = [name for name in transformer_classes() if not models or name in models]
    for name in classes:
        cases = [case for case in CASES if case.class_name == name]
        if not cases:
            yield {"model": name, "way": "", "faults": ["no tiny configuration in tests/diffusers_models.py"]}
        for case in cases:
            for way in ways(case):
                try:
                    row = conform(case, way, inner)
                except Exception as error:  # the other models are still of interest
                    yield {"model": str(case), "way": way, "faults": [f"{type(error).__name__}: {error}".splitlines()[0]]}
                else:
                    yield {**asdict(row), "faults": row.faults}


def line(row: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    if "calls" not in row:
        cells = [row["model"], row["way"], *[""] * 8, "; ".join(row["faults"])]
    else:
        visited, skipped = (sum(column) for column in zip((0, 0), *row["tiles"].values(), strict=True))
        shown = lambda reason: re.sub(r" \[[^]]*\]", "", reason).split(",")[0]  # without shapes
        reasons = sorted({shown(reason) for reasons in row["kept"].values() for reason in reasons})
        cells = [
            row["model"],
            row["way"],
            len(row["calls"]),
            len(row["tiles"]),
            f"{len(row['kept'])}: {', '.join(reasons)}" if reasons else "",
            len(row["outside"]) or "",
            *(ours if ours == plain else f"{ours}, plain {plain}" for ours, plain in (row["graphs"], row["breaks"], row["recompiles"])),
            f"{skipped / visited:.0%}" if visited else "",
            "; ".join(row["faults"]) or ("equal" if row["calls"] else "no scaled_dot_product_attention"),
        ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
