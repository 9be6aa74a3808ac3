"""What plain torch.compile makes of each tiny model: its graphs, graph breaks and recompiles, as recorded in plain_compile.json.

    python tests/plain_compile.py      # writes the file for the installed torch, diffusers and Python

Tracing takes most of the conformance suite's time, and plain torch.compile's half of it never changes while the versions stay. With other
versions the file says nothing, and the suite traces. One model of each kind is always traced, and compared with it.
"""

import json
import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import diffusers
import torch

from conformance_row import Traced, trace_plain, ways
from diffusers_models import CASES, Case, transformer_classes

FILE = Path(__file__).with_suffix(".json")
VERSIONS = {
    "torch": torch.__version__.split("+")[0],
    "diffusers": diffusers.__version__,
    "python": ".".join(platform.python_version_tuple()[:2]),
}


_content = json.loads(FILE.read_text())
_traced: dict[str, list[int]] = _content["traced"] if _content["versions"] == VERSIONS else {}

RECORDED = set(_traced) or None  # which rows are; None where the file is of other versions


def recorded(case: Case, way: str) -> Traced | None:
    numbers = _traced.get(f"{case}-{way}")
    return None if numbers is None else Traced(*numbers)


def main() -> None:
    classes = transformer_classes()
    rows = [(n, way) for n, case in enumerate(CASES) if case.class_name in classes for way in ways(case)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        traced = pool.map(_trace, *zip(*rows, strict=True))
        numbers = [f"    {json.dumps(f'{CASES[n]}-{way}')}: {json.dumps(found)}" for (n, way), found in zip(rows, traced, strict=True)]
    lines = ",\n".join(numbers)
    FILE.write_text(f'{{\n  "versions": {json.dumps(VERSIONS)},\n  "traced": {{\n{lines}\n  }}\n}}\n')


def _trace(number: int, way: str) -> Traced:  # by number: what a case draws its inputs with cannot be sent to another process
    return trace_plain(CASES[number], way)


if __name__ == "__main__":
    main()
