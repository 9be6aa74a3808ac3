"""What a wheel holds, with a library built ahead of time and without one, and that the package finds it there before it builds anything."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from skip_attn_compile import build, kernels, ops

ROOT = Path(__file__).parent.parent
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")
IN_WHEEL = f"skip_attn_compile/_lib/{build.LIBRARY}"


def make_wheel(where: Path, library: bytes | None) -> Path:
    checkout = where / "checkout"
    for folder in ("skip_attn_compile", "csrc", ".ci"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__", "_lib"))
    for file in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / file, checkout)
    if library is not None:
        (checkout / "skip_attn_compile" / "_lib").mkdir()
        (checkout / IN_WHEEL).write_bytes(library)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(where)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = where.glob("*.whl")
    return wheel


def ask(installed: Path, *questions: str, **environment: str) -> list[str]:
    """What a fresh interpreter says that has the wheel's content first on its path, no compiler and an empty cache."""
    names = ("SKIP_ATTN_COMPILE_LIBRARY", "CUDA_HOME", "CUDA_PATH")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    clean |= {"PYTHONPATH": str(installed), "PATH": "/nowhere", "SKIP_ATTN_COMPILE_CACHE": str(installed.parent / "cache"), **environment}
    program = f"""
from pathlib import Path
from skip_attn_compile import build
real = Path.is_file
Path.is_file = lambda self: self.name != "nvcc" and real(self)
print({", ".join(questions)}, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=installed, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def carrying(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel with a library, and the folder it is unpacked in."""
    where = tmp_path_factory.mktemp("carrying")
    wheel = make_wheel(where, b"library")
    zipfile.ZipFile(wheel).extractall(where / "site")
    return wheel, where / "site"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("plain")
    wheel = make_wheel(where, None)
    zipfile.ZipFile(wheel).extractall(where / "site")
    return wheel, where / "site"


def test_wheel_with_a_library_is_for_its_platform(carrying: tuple[Path, Path]) -> None:
    wheel, _ = carrying
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")
    archive = zipfile.ZipFile(wheel)
    assert archive.read(IN_WHEEL) == b"library"
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: false" in archive.read(metadata).decode()


def test_wheel_without_a_library_is_for_all(plain: tuple[Path, Path]) -> None:
    wheel, _ = plain
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_both_hold_the_sources(carrying: tuple[Path, Path], plain: tuple[Path, Path]) -> None:
    wanted = {f"skip_attn_compile/csrc/{path.name}" for path in build.sources()}
    for wheel, _ in (carrying, plain):
        assert wanted <= set(zipfile.ZipFile(wheel).namelist())


def test_library_of_the_wheel_is_used_before_anything_is_built(carrying: tuple[Path, Path]) -> None:
    _, site = carrying
    assert ask(site, "build.library()", "build.unavailable()") == [str(site / IN_WHEEL), "None"]  # although there is no compiler
    assert not (site.parent / "cache").exists()


def test_a_library_named_in_the_environment_comes_before_that_of_the_wheel(carrying: tuple[Path, Path], tmp_path: Path) -> None:
    named = tmp_path / "named.so"
    named.write_bytes(b"named")
    assert ask(carrying[1], "build.library()", SKIP_ATTN_COMPILE_LIBRARY=str(named)) == [str(named)]


def test_without_library_and_compiler_the_reason_names_the_compiler(plain: tuple[Path, Path]) -> None:
    _, site = plain
    reason, sources = ask(site, "build.unavailable()", "build.sources()[0].parent")
    assert reason == "there is no nvcc to build the CUDA library with; install the CUDA toolkit or set CUDA_HOME"
    assert sources == str(site / "skip_attn_compile" / "csrc")


def test_on_a_gpu_without_a_library_the_reason_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name it is an error; under "auto" the reference runs in its place, and the log says both."""
    monkeypatch.setattr(build, "unavailable", lambda: "there is no nvcc")
    monkeypatch.setattr("skip_attn_compile.kernels.triton.find_spec", lambda _: None)  # which else would serve
    problem = kernels.Problem("cuda", (9, 0), torch.bfloat16, 128, 128, "none", False, False, "ascending", True)
    reason = "sm90 is unavailable: there is no nvcc"
    assert kernels.choose(problem, "sm90") == [reason]
    chosen = kernels.choose(problem, "auto", explicit_call=True)
    assert isinstance(chosen, kernels.Implementation)
    assert chosen.name == "reference"
    ops._warn_slow.cache_clear()
    for _ in range(2):
        ops._warn_slow(problem)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"skip-softmax attention runs on the slow reference implementation: {reason}; triton is unavailable: ")
    assert said.endswith("; reference serves cuda only when asked for by name")
