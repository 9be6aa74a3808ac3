"""Every transformer class of the installed diffusers through the backend; examples/conformance.py prints the same as a table."""

import json

import diffusers
import pytest
from packaging.version import Version

import conformance
from conformance_row import conform, ways
from diffusers_models import CASES, Case, transformer_classes
from plain_compile import RECORDED, recorded

CLASSES = transformer_classes()
ROWS = [(case, way) for case in CASES if case.class_name in CLASSES for way in ways(case)]


def test_every_class_has_a_tiny_configuration() -> None:
    missing = CLASSES.keys() - {case.class_name for case in CASES}
    if missing and Version(diffusers.__version__) >= Version("0.43"):
        pytest.skip(f"no tiny configuration in diffusers_models.py: {', '.join(sorted(missing))}")
    assert not missing


# One model of each kind; of the others the numbers of plain torch.compile are on record.
TRACED = {
    "FluxTransformer2DModel",
    "HunyuanVideo15Transformer3DModel",
    "LTXVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "SanaTransformer2DModel",
    "UNet2DConditionModel",
    "WanTransformer3DModel",
}


@pytest.mark.parametrize(("case", "way"), ROWS, ids=[f"{case}-{way}" for case, way in ROWS])
def test_model_conforms(case: Case, way: str) -> None:
    known = recorded(case, way)
    traced = str(case) in TRACED and way == ways(case)[-1]
    row = conform(case, way, plain=None if traced else known)
    assert row.faults == []
    if traced and known is not None:  # else a record that no longer fits went unnoticed
        assert (row.graphs[1], row.breaks[1], row.recompiles[1]) == known


def test_every_model_has_its_record() -> None:
    assert RECORDED is None or {f"{case}-{way}" for case, way in ROWS} == RECORDED


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    name = "MiniMaxMusic3RVQDepthDecoder"
    assert conformance.main([name]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"| {name} | full | 2 | 2 |  |  | 1 | 0 | 1 | 16% | equal |"
    assert conformance.main(["--json", "T5FilmDecoder"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == {}


def test_the_table_names_a_class_without_configuration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conformance, "CASES", [])
    assert conformance.main(["WanTransformer3DModel"]) == 1
    assert "| WanTransformer3DModel |" in (out := capsys.readouterr().out)
    assert "no tiny configuration" in out
