"""The README is true: its code runs, its paths and commands exist, and its texts are those that users see."""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import quickstart
import skip_attn_compile
from skip_attn_compile.rules import REASONS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
MADE_BY_THE_DEMO = {"out/quickstart.png"}  # asserted in test_quickstart.py


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def inline_code() -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE))


def make_commands() -> list[str]:
    lines = "".join(blocks("sh")).splitlines()
    return [line for line in lines + inline_code() if line.startswith("make ")]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rewrite in a tenth of the time; the demo's test goes through Inductor."""
    monkeypatch.chdir(ROOT)
    for name in ("backend", "compile_pipeline"):
        monkeypatch.setattr(skip_attn_compile, name, functools.partial(getattr(skip_attn_compile, name), inner="aot_eager"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[number], f"README.md, python block {number}", "exec"), {})
    printed = capsys.readouterr().out
    if "handle.report(" in blocks("python")[number]:
        assert "transformer: 3 steps, 1 dense (t = 1), 2 sparse" in printed
    elif "report(" in blocks("python")[number]:
        excerpt = next(block for block in blocks("text") if block.startswith("site "))
        assert printed.splitlines()[0].split() == excerpt.splitlines()[0].split(), "the README shows a report with other columns"
        assert "sparse" in printed
        assert "ignored by pattern 'blocks.0.*'" in printed


def test_the_first_block_has_ten_lines_of_use() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line]
    assert len(lines) <= 10


def test_paths_exist() -> None:
    paths = [code for code in inline_code() if re.fullmatch(r"[\w.-]*/[\w./-]*|[\w-]+\.(py|md|toml)|Makefile|LICENSE", code)]
    assert len(paths) > 10, "the pattern above finds the paths"
    folders = (ROOT, ROOT / "skip_attn_compile", ROOT / "examples")
    missing = [path for path in paths if path not in MADE_BY_THE_DEMO and not any((folder / path).exists() for folder in folders)]
    assert not missing


def test_every_shell_command_is_a_make_target_that_ci_or_a_test_runs() -> None:
    commands = "".join(blocks("sh")).splitlines()
    assert commands == ["make demo", "make test"]
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^demo:.*\n\t\$\(RUN\) examples/quickstart.py", MAKEFILE, re.MULTILINE), "test_quickstart.py runs this script"


def test_make_variables_and_demo_options_exist() -> None:
    for command in make_commands():
        assert re.search(rf"^{command.split()[1]}:", MAKEFILE, re.MULTILINE), command
        for variable in re.findall(r"([A-Z_]+)=", command):
            assert re.search(rf"^{variable} \?=", MAKEFILE, re.MULTILINE), f"{command}: the Makefile has no {variable}"
        for arguments in re.findall(r'DEMO_ARGS="([^"]*)"', command):
            known = {option for parameter in get_command(quickstart.app).params for option in parameter.opts}
            assert set(re.findall(r"--[\w-]+", arguments)) <= known
    assert CliRunner().invoke(quickstart.app, ["--help"]).exit_code == 0


def test_make_dry_run_knows_the_targets() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for target in ("demo", "test", "lint"):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, env=environment, check=True, capture_output=True)


def test_the_reasons_are_those_of_the_report() -> None:
    table = README.split("| reason | what to do |\n|---|---|\n")[1].split("\n\n")[0]
    shown = [re.match(r"\| `(.*?)` \|", row.replace(r"\|", "|")) for row in table.splitlines()]
    assert [match and match[1] for match in shown] == [text.replace("!r", "") for text in REASONS.values()]


def test_the_graph_is_the_one_that_the_backend_makes() -> None:
    graphs: list[torch.fx.Graph] = []

    def record(gm: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(gm.graph)
        return gm

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    config = skip_attn_compile.SkipConfig(threshold=0.1, tile_order="own_first")
    model = torch.compile(Attention(), backend=skip_attn_compile.backend(config, inner=record))
    with torch.no_grad():
        model(*torch.randn(3, 1, 1, 4096, 8))
    (graph,) = graphs
    text = next(block for block in blocks("text") if block.startswith("before"))
    assert graph.find_nodes(op="placeholder")[-1].name == "skip_attn_control"
    assert "skip_attn_control" in text
    (call,) = graph.find_nodes(op="call_function", target=torch.ops.skip_attn_compile.attention.default)
    shown = re.search(r"skip_attn_compile\.attention\(q, k, v, lam\[0\], (.*)\)", text)
    assert shown is not None
    assert shown[1] == ", ".join(map(repr, call.args[4:]))
    assert len(graph.output_node().args[0]) == len(re.findall(r"return \((.*)\)", text)[1].split(","))
