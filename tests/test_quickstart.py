"""The demo and the training script run as a newcomer would run them; wrong options are refused before anything is loaded."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import quickstart
from quickstart_picture import draw
from tiny_wan import train
from tiny_wan.digits import COLORS, FIRST_COLOR_ID, Glyphs, load_glyphs, make_batch, token_table
from tiny_wan.sampling import FOLDER, load_model, sample

ROOT = Path(__file__).resolve().parents[1]


def run_script(path: str, *arguments: str, folder: Path) -> str:
    """Run an example in `folder`, from outside the repository; its output."""
    environment = {**os.environ, "COLUMNS": "140", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / path), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_end_to_end(tmp_path: Path) -> None:
    """Four frames are 1024 tokens, the fewest that min_kv_len lets skip."""
    output = run_script("quickstart.py", "--steps", "2", "--frames", "4", "--device", "cpu", folder=tmp_path)
    rows = [line.split() for line in output.splitlines() if line.startswith("blocks.")]
    assert [row[1] for row in rows if row[0].endswith("attn1")] == ["sparse"] * 8
    assert [row[1] for row in rows if row[0].endswith("attn2")] == ["kept"] * 8
    assert "short: 4 keys < min_kv_len 1024" in output
    assert "PSNR" in output
    assert "SSIM" in output
    assert "reference implementation" in output
    assert Image.open(tmp_path / "out" / "quickstart.png").size[0] > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-digits", "3"], "two digits"),
        (["--prompt-digits", "3,12"], "two digits"),
        (["--prompt-digits", "3,x"], "two digits"),
        (["--prompt-digits", "3,²"], "two digits"),
        (["--threshold", "-1"], "threshold must be finite and >= 0"),
        (["--threshold", "nan"], "threshold must be finite and >= 0"),
        (["--threshold", "much"], "threshold"),
        (["--steps", "0"], "steps"),
        (["--frames", "17"], "frames"),
        (["--frames", "0"], "frames"),
        (["--seed", "-1"], "seed"),
        (["--device", "tpu9"], "device"),
        (["--device", "meta"], "auto, cpu or cuda"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "load_model", lambda *_: pytest.fail("loaded the model first"))
    result = CliRunner().invoke(quickstart.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_skipped_share_is_taken_step_by_step() -> None:
    class Site:
        def __init__(self, name: str, visited: int, skipped: int) -> None:
            self.name, self.visited, self.skipped = name, visited, skipped

    class Report:
        def __init__(self, *sites: Site) -> None:
            self.sites = sites

    steps = quickstart.SkippedByStep()
    steps.take(Report(Site("a", 10, 1), Site("kept", 0, 0)))
    steps.take(Report(Site("a", 20, 6), Site("kept", 0, 0), Site("b", 4, 4)))
    names, share = steps.share()
    assert names == ["a", "b"]
    np.testing.assert_allclose(share, [[0.1, 0.5], [math.nan, 1.0]])


def test_quality_of_equal_videos() -> None:
    video = np.random.default_rng(0).random((2, 16, 16, 3))
    assert quickstart.psnr(video, video) == math.inf
    assert quickstart.ssim(video, video) == pytest.approx(1)
    assert quickstart.psnr(video, np.clip(video + 0.1, 0, 1)) == pytest.approx(20, abs=1)


@pytest.mark.parametrize("frames", [1, 3, 16])
def test_picture_without_any_sparse_site(frames: int, tmp_path: Path) -> None:
    video = np.zeros((frames, 64, 64, 3))
    draw(tmp_path / "picture.png", "title", video, video, [], np.zeros((0, 2)))
    assert Image.open(tmp_path / "picture.png").size[0] > 1000


def test_description_says_what_the_ids_are() -> None:
    words, text = quickstart.describe((3, 7))
    assert words[0, :2].tolist() == [3, 7]
    assert all(list(COLORS)[word - FIRST_COLOR_ID] in text for word in words[0, 2:].tolist())


@pytest.fixture(scope="module")
def glyphs() -> Glyphs:
    return load_glyphs()


def test_clips(glyphs: Glyphs) -> None:
    videos, words = make_batch(3, glyphs, torch.Generator().manual_seed(0))
    assert videos.shape == (3, 3, 16, 64, 64)
    assert float(videos.min()) >= -1
    assert float(videos.max()) <= 1
    assert torch.all((words[:, :2] >= 0) & (words[:, :2] < FIRST_COLOR_ID))
    assert torch.all((words[:, 2:] >= FIRST_COLOR_ID) & (words[:, 2:] < len(token_table())))
    moved = (videos[:, :, 1:] - videos[:, :, :-1]).abs().amax((1, 2, 3, 4))
    assert torch.all(moved > 0.1), "the digits move"


def test_the_model_is_trained(glyphs: Glyphs) -> None:
    """The velocity it predicts is far better than that of the same model with random weights."""
    videos, words = make_batch(1, glyphs, torch.Generator().manual_seed(0), frames=4)
    noise = torch.randn(videos.shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.7])
    text = token_table()[words]
    losses = []
    for model in (load_model(), train.new_model(torch.device("cpu"), None)):
        with torch.no_grad():
            losses.append(float(train.flow_loss(model, 0.3 * videos + 0.7 * noise, sigma, text, noise - videos)))
    assert losses[0] < 0.1 * losses[1]


def test_sampling_is_deterministic() -> None:
    words, _ = quickstart.describe((1, 2))
    model = load_model()
    first, second = (sample(model, words, steps=1, frames=2, seed=3) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (1, 3, 2, 64, 64)


def test_train_script_writes_a_model_that_loads(tmp_path: Path) -> None:
    arguments = ("--steps", "2", "--batch", "1", "--frames", "2", "--preview-steps", "1", "--init", str(FOLDER))
    run_script("tiny_wan/train.py", "run", *arguments, folder=tmp_path)
    out = tmp_path / "run"
    assert {path.name for path in out.iterdir()} >= {"config.json", "train_log.json", "samples.png", "data.png"}
    trained = load_model(folder=out)
    assert sum(p.numel() for p in trained.parameters()) == sum(p.numel() for p in load_model().parameters())
