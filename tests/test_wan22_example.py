"""The two-expert example runs as its first lines say, and its pieces agree with each other."""

import json
from pathlib import Path

from test_quickstart import run_script


def test_from_checkpoint_to_report(tmp_path: Path) -> None:
    output = run_script("wan22_checkpoint.py", "--inner", "eager", "--regional", folder=tmp_path)
    written = json.loads((tmp_path / "out" / "wan22" / "transformer" / "config.json").read_text())
    assert written["sparse_attention_config"]["config_groups"]["group_0"]["disabled_until_timestep"] == 0.93
    assert "UniPCMultistepScheduler, 12 steps" in output
    assert "  0.93      4       8" in output, "the table"
    assert "at noise levels above 0.93" in output, "the plan"
    assert "transformer: 6 steps, 4 dense" in output, "the report"
    assert "transformer_2: 6 steps, 0 dense" in output
    rows = {line.split()[0]: line.split() for line in output.split("latents")[1].splitlines() if line.startswith("transformer")}
    assert rows["transformer.blocks.0.attn2"][1] == "kept"
    for expert in ("transformer", "transformer_2"):
        assert 1.0 < float(rows[f"{expert}.blocks.0.attn1"][6].rstrip("%")) < 60.0


def test_the_users_values_beat_the_checkpoints(tmp_path: Path) -> None:
    output = run_script("wan22_checkpoint.py", "--inner", "eager", "--threshold", "0.5", "--cutoff", "0.97", folder=tmp_path)
    assert "transformer: 6 steps, 2 dense" in output
    assert "transformer.blocks.0.attn1  WanAttention  sparse    0.5" in output
