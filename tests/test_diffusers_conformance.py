"""Every transformer class of the installed diffusers through the backend; examples/conformance.py prints the same as a table."""

import diffusers
import pytest
from packaging.version import Version

from conformance_row import conform, ways
from diffusers_models import CASES, Case, transformer_classes

CLASSES = transformer_classes()
ROWS = [(case, way) for case in CASES if case.class_name in CLASSES for way in ways(case)]


def test_every_class_has_a_tiny_configuration() -> None:
    missing = CLASSES.keys() - {case.class_name for case in CASES}
    if missing and Version(diffusers.__version__) >= Version("0.43"):
        pytest.skip(f"no tiny configuration in diffusers_models.py: {', '.join(sorted(missing))}")
    assert not missing


@pytest.mark.parametrize(("case", "way"), ROWS, ids=[f"{case}-{way}" for case, way in ROWS])
def test_model_conforms(case: Case, way: str) -> None:
    # Recompiles are counted once a class: a block compiles in a fraction of the time of its model.
    row = conform(case, way, other_size=way == ways(case)[-1])
    assert row.faults == []
