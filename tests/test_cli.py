"""The command: from a script to a config.json that the package and others read, and to a picture."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from matplotlib.figure import Figure
from typer.main import get_command
from typer.testing import CliRunner

import calibrate_tiny_wan
from models import dit, tokens
from skip_attn_compile import Measurement, SkipConfig, calibrate, cli, picture, timestep
from skip_attn_compile.commands import _told, app
from skip_attn_compile.kernels import flashinfer
from skip_attn_compile.operands import check_inputs

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
from __future__ import annotations

import dataclasses

from models import dit, tokens
from pipelines import run, wan22
from skip_attn_compile import timestep

def build():
    model = dit(3)

    def run(seed):
        for t in (0.9, 0.6, 0.3):
            with timestep(t):
                output = model(tokens(seed=seed))
        return output

    return model, run, range(2)

def experts():
    pipe = wan22()
    return pipe, lambda: run(pipe, steps=4)

ALL = 3

def wrong():
    return 3

@dataclasses.dataclass
class Options:
    blocks: int = 3

def asks(options):
    return build()

def counts():
    model = dit(3)

    def run(seed):
        print("ran")
        return model(tokens(seed=seed))

    return model, run, range(2)

def fails():
    def run():
        raise ValueError("mine")

    return dit(1), run
"""
ALL = ("--min-kv-len", "0", "--tile-order", "own_first")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output


def measured(blocks: int) -> Measurement:
    model = dit(blocks)
    return calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), tile_order="own_first", min_kv_len=0, progress=False)


def test_a_model_is_calibrated_into_its_config(script: str, tmp_path: Path) -> None:
    out, drawn, state = tmp_path / "model" / "config.json", tmp_path / "curves.png", tmp_path / "state.json"
    out.parent.mkdir()
    out.write_text('{"_class_name": "Dit"}')
    code, output = call("calibrate", f"{script}:build", "--target", 0.2, "--out", out, "--picture", drawn, "--state", state, *ALL)
    assert code == 0, output
    assert "achieved minus target on held-out items" in output
    assert json.loads(out.read_text())["_class_name"] == "Dit", "the model's own keys stay"
    config = SkipConfig.from_checkpoint(out, min_kv_len=0)
    assert config == measured(3).config(0.2)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size > 20_000
    again = tmp_path / "again.json"
    code, output = call("show", state, "--target", 0.2, "--gate", 0.7, "--out", again)
    assert code == 0, output
    gated = SkipConfig.from_checkpoint(again, min_kv_len=0)
    assert gated.disabled_until_timestep == 0.7
    code, output = call("show", state, "--target", 0.2)
    assert '"sparse_attention_config"' in output
    served = tmp_path / "served.json"
    chosen = ("--gate", 0.8, "--ignore", "blocks.2.*", "--target", 0.1, "--out", served)
    code, output = call("sensitivity", f"{script}:build", "--config", out, "--min-kv-len", 0, "--psnr", 20, "--no-alone", *chosen)
    assert code == 0, output
    ignored = re.search(r"for PSNR >= 20 dB: disabled_until_timestep=0\.8, ignore=\((.*)\)", output)[1]
    proposed = SkipConfig.from_checkpoint(served, min_kv_len=0)
    assert proposed.disabled_until_timestep == 0.8
    assert proposed.checkpoint_ignore == ("blocks.2.*", *re.findall(r"'(.*?)'", ignored))
    assert (proposed.calibration, proposed.target_sparsity) == (config.calibration, 0.1)


def test_a_pipeline_is_calibrated_into_its_folder(script: str, tmp_path: Path) -> None:
    arguments = ("--target", 0.03, "--out", tmp_path / "pipe", "--ignore", "*.attn2", "--picture", tmp_path / "p.png")
    code, output = call("calibrate", f"{script}:experts", *arguments, *ALL)
    assert code == 0, output
    for component in ("transformer", "transformer_2"):
        config = SkipConfig.from_checkpoint(tmp_path / "pipe" / component / "config.json")
        assert config.target_sparsity == 0.03
        assert config.checkpoint_ignore == ("*.attn2",)
    (tmp_path / "pipe" / "model_index.json").write_text('{"transformer": ["diffusers", "X"], "transformer_2": ["diffusers", "X"]}')
    options = ("--config", tmp_path / "pipe", "--min-kv-len", 0, "--psnr", 200, "--no-alone", "--out", tmp_path / "served")
    code, output = call("sensitivity", f"{script}:experts", *options)
    assert code == 0, output
    for component in ("transformer", "transformer_2"):
        config = SkipConfig.from_checkpoint(tmp_path / "served" / component / "config.json")
        assert config.checkpoint_ignore == ("*.attn2", "blocks.0.attn1", "blocks.1.attn1")


def test_layers_that_a_config_json_cannot_name_are_measured_and_shown(script: str, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    included = ("--target", 0.1, "--include", "blocks.1.*")
    for arguments in (("calibrate", f"{script}:build", *included, "--state", state, *ALL), ("show", state, "--target", 0.1)):
        code, output = call(*arguments)
        assert code == 0, output
        assert "include=('blocks.1.*',)" in output
    code, output = call("show", state, "--target", 0.1, "--out", tmp_path / "config.json")
    assert code == 2
    assert "use --ignore" in output
    tried = tmp_path / "tried.json"
    options = ("--threshold", 0.1, "--include", "blocks.1.*", "--no-alone", "--state", tried)
    code, output = call("sensitivity", f"{script}:build", *options, *ALL)
    assert code == 0, output
    assert tried.exists()
    assert re.findall(r"^blocks\.\d", output, re.MULTILINE) == ["blocks.1"]


def test_what_is_refused_is_told_in_a_line(script: str, tmp_path: Path) -> None:
    for arguments, text in [
        (("calibrate", f"{script}:build", "--target", "0.99", *ALL), "skip-attn: target_sparsity=0.99 is beyond reach"),
        (("calibrate", f"{script}:build", "--tile-order", "own_first"), "skip-attn: calibration measured no attention call"),
        (("show", tmp_path / "script.py"), "skip-attn: "),
        (("calibrate", f"{script}:build", "--out", "x.json"), "--out needs --target"),
        (("sensitivity", f"{script}:build"), "give --config, --threshold or both"),
        (("sensitivity", f"{script}:build", "--threshold", "0.1", "--out", "x.json"), "--out needs --config"),
        (("sensitivity", f"{script}:build", "--threshold", "0.1", "--target", "0.1"), "--target needs --config"),
        (("sensitivity", f"{script}:build", "--config", "c.json", "--out", "x.json", "--include", "*"), "use --ignore"),
        (("calibrate", "nowhere.py:build"), "must be the path of a Python file, a colon and a function"),
        (("calibrate", f"{script}:wrong"), "must return (pipe_or_model, run) or (pipe_or_model, run, items), got 3"),
        (("calibrate", f"{script}:absent"), "must have a function absent that takes no arguments, got None"),
        (("calibrate", f"{script}:ALL"), "must have a function ALL that takes no arguments, got 3"),
        (("calibrate", f"{script}:asks"), "must have a function asks that takes no arguments, got <function asks"),
        (("show", tmp_path / "none.json"), "none.json must be a measurement written by calibrate"),
        (("show", tmp_path), "must be a measurement written by calibrate"),
    ]:
        code, output = call(*arguments)
        assert code in (1, 2)
        assert text in " ".join(output.replace("│", " ").split())
    failed = CliRunner().invoke(app, ["calibrate", f"{script}:fails"])
    assert repr(failed.exception) == "ValueError('mine')", "the user's own mistake keeps its traceback"


def test_all_that_the_package_refuses_is_told_and_what_others_refuse_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2, 1, 4, 64)
    with pytest.raises(typer.Exit), _told():
        flashinfer.arguments(x, x, x, torch.tensor([0.1, 0.2]), x, 1.0)
    assert capsys.readouterr().err.startswith("skip-attn: flashinfer takes one lambda for the whole batch")
    with pytest.raises(typer.Exit), _told():
        check_inputs(x, x, x.half(), torch.zeros(()), None, None)
    assert capsys.readouterr().err.startswith("skip-attn: value must be torch.float32")
    with pytest.raises(ValueError, match="batch_size"), _told():
        torch.nn.functional.cross_entropy(torch.ones(2, 3), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--target", "0.1", "--out", "."), "out must be a file that can be written"),
        (("--target", "0.1", "--out", "list.json/config.json"), "out must be a file that can be written"),
        (("--target", "0.1", "--out", "list.json"), "list.json must hold an object, or not exist, got list"),
        (("--target", "0.1", "--out", "bad.json"), "bad.json: cannot be read as JSON"),
        (("--target", "0.1", "--out", "new.json", "--include", "*.attn1"), "use --ignore"),
        (("--picture", "curves.xyz"), "picture must end in one of .eps"),
        (("--picture", "curves"), "write curves.png"),
        (("--picture", "list.json/curves.png"), "picture must be a file that can be written"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_anything_runs(
    options: tuple[str, ...], text: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    Path("bad.json").write_text("{bad")
    code, output = call("calibrate", f"{script}:counts", *options, *ALL)
    assert code in (1, 2)
    assert text in " ".join(output.replace("│", " ").split())
    assert "ran" not in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "list.json", "script.py"]


def test_what_was_measured_is_kept_when_a_target_is_refused(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, output = call("calibrate", f"{script}:build", "--target", 0.99, *ALL)
    assert code == 1
    (kept,) = re.findall(r"what was measured is in (\S+), for skip-attn show", output)
    code, output = call("show", kept, "--target", 0.2, "--out", tmp_path / "config.json")
    assert code == 0, output
    assert SkipConfig.from_checkpoint(tmp_path / "config.json", min_kv_len=0) == measured(3).config(0.2)


def test_the_picture_shows_points_curve_range_and_layers() -> None:
    measurement = measured(3)
    page = picture.figure(measurement, 0.2, cutoff=0.5)
    assert isinstance(page, Figure)
    left, right = page.axes[:2]
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels[:3] == ["512 keys", "512 keys, held out", "where the curve holds"]
    assert labels[4] == "target 20%"
    assert len(left.lines[0].get_xdata()) == 32
    image = right.images[0].get_array()
    curve = measurement.fit("", target=0.2).calibration
    shares = measurement.shares("", curve, 0.2)
    assert image[:, 0].tolist() == pytest.approx([100 * shares[f"blocks.{n}.attn1", None] for n in range(3)])
    items = [points.share_at(curve.threshold_at(0.2, 512)) for part in (False, True) for points in measurement.curves("", held_out=part)]
    assert image.mean() == pytest.approx(100 * sum(items) / 2), "all layers have as many tiles"
    assert items[0] == pytest.approx(0.2, abs=0.02)
    assert [label.get_text() for label in right.get_yticklabels()] == ["blocks.0.attn1", "blocks.1.attn1", "blocks.2.attn1"]


def test_a_gate_that_leaves_nothing_of_an_expert_can_be_drawn() -> None:
    model = dit(3)

    def run() -> None:
        with timestep(0.9):
            model(tokens())

    measurement = calibrate(model, run, tile_order="own_first", min_kv_len=0, progress=False)
    curve = lambda cutoff: picture.figure(measurement, 0.1, cutoff).axes[0].get_legend().get_texts()[2].get_text()
    assert curve(0.5) == curve(0.0)


def test_the_project_installs_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"skip-attn": f"{cli.__name__}:{cli.main.__name__}"}
    assert {"typer", "matplotlib"} <= set(project["optional-dependencies"]["cli"])


def test_the_commands_of_the_readme_exist_and_its_script_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(ROOT / "README.md").read_text(), calibrate_tiny_wan.__doc__]
    lines = [line.split() for text in texts for line in re.findall(r"^ *skip-attn (.*)$", text, re.MULTILINE)]
    assert {line[0] for line in lines} == {"calibrate", "show", "sensitivity"}
    commands = get_command(app).commands
    for line in lines:
        known = {option for parameter in commands[line[0]].params for option in parameter.opts}
        assert {word for word in line if word.startswith("--")} <= known
        assert line[1].endswith(".json") or (ROOT / line[1].removesuffix(":build")).is_file()
    monkeypatch.setattr(calibrate_tiny_wan, "STEPS", 1)
    monkeypatch.setattr(calibrate_tiny_wan, "FRAMES", 2)
    model, run, items = calibrate_tiny_wan.build()
    assert run(items[1]).shape == (1, 3, 2, 64, 64)
    assert run(items[1]).equal(run(items[1]))
    assert not run(items[1]).equal(run(items[2]))
    assert next(model.parameters()).device.type in ("cpu", "cuda")


def test_without_its_libraries_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"skip-attn needs typer: pip install 'skip_attn_compile\[cli\]'"):
        cli.main()


def test_the_package_itself_needs_none_of_them() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib', 'tqdm', 'diffusers')))"
    program = f"{blocked}; import skip_attn_compile; skip_attn_compile.sensitivity"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
