"""What plain torch.compile makes of each tiny model: its graphs, graph breaks and recompiles, as recorded in plain_compile.json.

    python tests/plain_compile.py      # writes the file for the installed torch, diffusers and Python

Tracing takes most of the conformance suite's time, and plain torch.compile's half of it never changes while the versions stay. With other
versions the file says nothing, and the suite traces. The models that are also run at a second size are always traced, so a file that no
longer fits does not go unnoticed.
"""

import json
import platform
from functools import cache
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


def recorded(case: Case, way: str) -> Traced | None:
    """At one size; None where the file is of other versions."""
    content = _content()
    if content["versions"] != VERSIONS:
        return None
    numbers = content["traced"].get(f"{case}-{way}")
    return None if numbers is None else Traced(*numbers)


@cache
def _content() -> dict:
    return json.loads(FILE.read_text())


def main() -> None:
    classes = transformer_classes()
    traced = {f"{case}-{way}": trace_plain(case, way) for case in CASES if case.class_name in classes for way in ways(case)}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in traced.items())
    FILE.write_text(f'{{\n  "versions": {json.dumps(VERSIONS)},\n  "traced": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
