"""State files of calibration: what was measured outlasts the process, and nothing else is taken for it."""

import json
import math
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from models import TOKENS, dit, tokens
from skip_attn_compile import Measurement, calibrate
from skip_attn_compile.gate import Gate
from skip_attn_compile.json_values import MAX_BYTES
from skip_attn_compile.state import described, digest

ALL = {"min_kv_len": 0, "progress": False}


def test_an_interrupted_run_resumes_without_loss(tmp_path: Path) -> None:
    model, state = dit(2), tmp_path / "state.json"
    whole = calibrate(model, lambda seed: model(tokens(seed=seed)), range(4), **ALL)
    ran: list[int] = []
    interruptions = [2]

    def run(seed: int) -> None:
        if seed in interruptions:
            model(tokens(seed=interruptions.pop()))
            raise KeyboardInterrupt
        ran.append(seed)
        model(tokens(seed=seed))

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, run, range(4), state=state, **ALL)
    assert not model._forward_pre_hooks
    resumed = calibrate(model, run, range(4), state=state, **ALL)
    assert ran == [0, 1, 2, 3]
    assert resumed == whole == Measurement.load(state)
    assert calibrate(model, run, range(4), state=state, **ALL) == whole, "all done: nothing runs"
    assert ran == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="state.json holds another calibration, 32 thresholds .* ascending, .*this one is .* own_first"):
        calibrate(model, run, range(4), state=state, tile_order="own_first", **ALL)
    with pytest.raises(ValueError, match="layers \\* without blocks.0.\\*"):
        calibrate(model, run, range(4), state=state, ignore=("blocks.0.*",), **ALL)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_state_file_of_another_run_is_refused(tmp_path: Path) -> None:
    model, state = dit(2), tmp_path / "state.json"
    calibrate(model, lambda seed: model(tokens(seed=seed)), range(4), state=state, **ALL)
    written = state.read_text()
    with pytest.raises(ValueError, match="state.json holds 4 items, more than the 2 that are given"):
        calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), state=state, **ALL)
    smaller = dit(1)
    for items in (4, 6):
        with pytest.raises(ValueError, match="another model, Dit, 11,872 parameters, .*, this one is Dit, 6,464 parameters, "):
            calibrate(smaller, lambda seed: smaller(tokens(seed=seed)), range(items), state=state, **ALL)
    assert state.read_text() == written
    tuned = dit(2, seed=1)
    with pytest.raises(ValueError, match="another model, Dit, 11,872 parameters, weights .*, this one is Dit, 11,872 parameters, weights"):
        calibrate(tuned, lambda seed: tuned(tokens(seed=seed)), range(4), state=state, **ALL)
    renamed = dit(2)
    renamed._modules = {"layers" if name == "blocks" else name: module for name, module in renamed._modules.items()}
    renamed.forward = types.MethodType(lambda self, x: self.layers[1](self.layers[0](x)), renamed)
    with pytest.raises(ValueError, match="another model, one with a layer blocks.0.attn1; give another state file"):
        calibrate(renamed, lambda seed: renamed(tokens(seed=seed)), range(4), state=state, **ALL)
    assert not smaller._forward_pre_hooks


@pytest.mark.parametrize("place", ["", "state.json/x.json"])
def test_a_state_that_cannot_be_written_is_refused_before_anything_runs(place: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()
    with pytest.raises(ValueError, match="state must be a file that can be written, got .*give another path"):
        calibrate(dit(1), pytest.fail, ["it ran"], state=tmp_path / place, **ALL)


def test_what_a_run_wrote_can_be_resumed_whatever_it_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that a device says may lie outside [0, 1], or be NaN; a call may have all keys masked, or no tokens."""
    model, state = dit(1, cross=True), tmp_path / "state.json"
    masked = torch.zeros(1, 1, 1, TOKENS, dtype=torch.bool)
    inputs = [(tokens(), None, 1.002), (tokens(), masked, 0.5), (tokens(length=0), None, 0.5), (tokens(), None, math.nan)]

    def run(number: int) -> None:
        x, mask, t = inputs[number]
        monkeypatch.setattr(Gate, "running_level", lambda _: torch.tensor(t))
        model(x, x, mask)

    for count in (1, 2, 3, 4):
        measurement = calibrate(model, run, range(count), state=state, **ALL)
    assert measurement == Measurement.load(state)
    assert measurement == calibrate(model, run, range(4), **ALL)
    cells = (*measurement.fitted, *measurement.held_out)
    assert {cell.t for cell in cells} == {1.0, 0.5, None}
    assert {cell.length_bin for cell in cells} == {TOKENS // 128}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(items="x"),
        lambda data: data.update(items=-1),
        lambda data: data.update(fitted=[]),
        lambda data: data.update(models={}),
        lambda data: data.update(models={"": 1}),
        lambda data: data.update(attention_classes=None),
        lambda data: data.update(attention_classes={"": [1]}),
        lambda data: data.update(times=[]),
        lambda data: data["times"][0].__setitem__(2, 3),
        lambda data: data.update(setup=[1]),
        lambda data: data["setup"].update(thresholds=[0.5, 0.5]),
        lambda data: data["setup"].update(tile=[64]),
        lambda data: data["setup"].update(include="*"),
        lambda data: data["fitted"][0].__setitem__(0, 3),
        lambda data: data["fitted"][0].__setitem__(2, "x"),
        lambda data: data["fitted"][0].__setitem__(3, "x"),
        lambda data: data["fitted"][0].__setitem__(4, [64, 2, 1, 9000]),
        lambda data: data["fitted"][0].__setitem__(4, [64, -2, 1, 9000]),
        lambda data: data["fitted"][0].__setitem__(4, [64, 2, 100, 9000]),
        lambda data: data["fitted"][0].__setitem__(4, [0, 0, 0, 9000]),
        lambda data: data["fitted"][0].__setitem__(4, [64, 2, 3, 63]),
        lambda data: data["fitted"][0].__setitem__(4, [64, 2, 3]),
        lambda data: data["fitted"][0].__setitem__(4, [64, "2", 3, 9000]),
    ],
)
def test_a_state_file_with_what_no_run_gives_is_named(change: Callable[[dict], object], tmp_path: Path) -> None:
    path, model = tmp_path / "state.json", dit(1)
    calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), thresholds=(0.1, 0.5), state=path, **ALL)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="state.json must be a measurement written by calibrate"):
        Measurement.load(path)


def test_models_with_parameters_of_any_kind_are_described() -> None:
    model = dit(1)
    model.unused = nn.LazyLinear(3)
    model.sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    model.meta = nn.Parameter(torch.empty(3, device="meta"))
    with_all = described({"": model})
    assert with_all == described({"": model})
    model.blocks[0].attn1.to_q.weight[0, 0] += 1
    assert with_all != described({"": model})


def test_digests_tell_apart() -> None:
    given = [[torch.tensor([1.0, 2]), torch.tensor([3.0])], [torch.tensor([1.0]), torch.tensor([2.0, 3])], [None], []]
    given += [[torch.zeros(2, 3)], [torch.zeros(3, 2)], [torch.zeros(6, dtype=torch.int32)], [torch.zeros(3, dtype=torch.complex64).conj()]]
    assert len({digest(tensors) for tensors in given}) == len(given)


def test_a_state_file_of_an_earlier_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"skip_attn_compile_measurement": 1, "items": 1}')
    with pytest.raises(ValueError, match="state.json must be .* format 1, where this version reads 3; calibrate anew, into another file"):
        Measurement.load(path)


def test_a_state_file_may_be_large_and_says_each_thing_once(tmp_path: Path) -> None:
    """40 layers, 50 steps and ten bins of lengths make 30 MiB."""
    path, model = tmp_path / "state.json", dit(1)
    measurement = calibrate(model, lambda: model(tokens()), state=path, **ALL)
    written = path.read_bytes()
    path.write_bytes(b" " * MAX_BYTES + written)
    assert Measurement.load(path) == measurement
    path.write_bytes(b'{"items": 7, ' + written[1:])
    with pytest.raises(ValueError, match="items must stand once in its object, got 7 and 1"):
        Measurement.load(path)


def test_a_state_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ValueError, match="must be a measurement written by calibrate"):
            Measurement.load(path)


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"skip_attn_compile_measurement": 9}', "null", DEEP], ids=str.__len__)
def test_a_broken_state_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="state.json must be a measurement written by calibrate"):
        Measurement.load(path)


WORKER = """
import os, signal, sys
from models import dit, tokens
from skip_attn_compile import calibrate

model = dit(2)

def run(seed):
    model(tokens(seed=seed))
    if seed == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

calibrate(model, run, range(4), state=sys.argv[1], min_kv_len=0)
"""


def test_a_killed_process_resumes_and_gives_the_same_curve(tmp_path: Path) -> None:
    state = tmp_path / "state.json"

    def work(killed_at: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])}
        command = [sys.executable, "-W", "ignore", "-c", WORKER, str(state), str(killed_at)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    assert work(killed_at=2).returncode == -signal.SIGKILL
    assert Measurement.load(state).items == 2, "what was done by then is kept"
    (tmp_path / "state.json.part").write_text("{")  # killed while it wrote
    finished = work(killed_at=-1)
    assert finished.returncode == 0, finished.stderr
    assert "calibration" in finished.stderr, "progress is shown"
    model = dit(2)
    whole = calibrate(model, lambda seed: model(tokens(seed=seed)), range(4), **ALL)
    assert Measurement.load(state) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
