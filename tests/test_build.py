"""Building the CUDA library: keys, cache, publishing, reasons. No compiler is needed: the compile step is replaced."""

import hashlib
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from skip_attn_compile import build
from skip_attn_compile.machine_code import check_log


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler that writes b"library" and counts its runs; returns the cache directory."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("SKIP_ATTN_COMPILE_CACHE", str(cache))
    monkeypatch.delenv("SKIP_ATTN_COMPILE_LIBRARY", raising=False)
    tools = build.Toolchain(Path("/nvcc"), "release 13.0", tmp_path, tmp_path)
    monkeypatch.setattr(build, "toolchain", lambda: tools)
    monkeypatch.setattr(build, "_ffi_version", lambda: "1")

    def compile_library(arch: str, tools: build.Toolchain, files: object, target: Path) -> None:
        with (tmp_path / "runs").open("a") as runs:
            runs.write("x")
        target.with_name("scratch.o").write_bytes(b"object")
        target.write_bytes(b"library")

    monkeypatch.setattr(build, "_compile", compile_library)
    return cache


def runs(cache: Path) -> int:
    return len((cache.parent / "runs").read_text())


def test_second_call_finds_what_the_first_built(machine: Path) -> None:
    first = build.build()
    assert build.build() == first
    assert first.read_bytes() == b"library"
    assert runs(machine) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == [build.LIBRARY, build.LIBRARY + ".sha256"]


def test_cache_is_for_its_user_alone(machine: Path) -> None:
    machine.mkdir(mode=0o755)
    entry = build.build().parent
    assert machine.stat().st_mode & 0o777 == 0o700
    assert entry.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"lib", b""])
def test_corrupt_library_is_built_again(machine: Path, damage: bytes) -> None:
    target = build.build()
    target.write_bytes(damage)
    assert build.build().read_bytes() == b"library"
    assert runs(machine) == 2
    assert [path.name for path in machine.iterdir()] == [target.parent.name]


def test_entry_without_digest_is_built_again(machine: Path) -> None:
    target = build.build()
    target.with_name(target.name + ".sha256").unlink()
    assert build.is_intact(build.build())
    assert runs(machine) == 2


def test_killed_build_blocks_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.mkdir()
    (machine / ".build-killed").mkdir()
    (machine / ".build-killed" / build.LIBRARY).write_bytes(b"half")
    assert build.build().read_bytes() == b"library"


def test_failed_build_leaves_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise build.BuildError("nvcc failed")

    monkeypatch.setattr(build, "_compile", fail)
    with pytest.raises(build.BuildError, match="nvcc failed"):
        build.build()
    assert list(machine.iterdir()) == []


def test_many_processes_publish_one_intact_library(machine: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=build.build) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    entries = list(machine.iterdir())
    assert len(entries) == 1
    assert build.is_intact(entries[0] / build.LIBRARY)


def test_key_follows_content_compiler_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ffi_version", lambda: "1")
    source = tmp_path / "kernel.cu"
    source.write_text("a")
    tools = build.Toolchain(Path("/nvcc"), "release 13.0", tmp_path, tmp_path)
    keys = {build.key("90a", tools, [source])}
    source.write_text("b")
    keys.add(build.key("90a", tools, [source]))
    keys.add(build.key("90a", build.Toolchain(Path("/nvcc"), "release 13.1", tmp_path, tmp_path), [source]))
    monkeypatch.setattr(build, "_ffi_version", lambda: "2")
    keys.add(build.key("90a", tools, [source]))
    assert len(keys) == 4
    assert build.key("90a", build.Toolchain(Path("/elsewhere/nvcc"), "release 13.0", Path("/x"), Path("/y")), [source]) in keys


@pytest.mark.parametrize(
    ("line", "slow"),
    [
        ("ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...", True),
        ("ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...", True),
        ("ptxas warning : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements", True),
        ("    48 bytes stack frame, 96 bytes spill stores, 96 bytes spill loads", True),
        ("    0 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads", True),
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", False),
        ("ptxas info    : Used 168 registers, used 16 barriers", False),
    ],
)
def test_slow_code_fails_the_build(line: str, slow: bool) -> None:
    log = f"ptxas info    : Function properties for some_kernel\n{line}\n"
    assert check_log(log) == ([f"{line.strip()} [some_kernel]"] if slow else [])


def test_library_named_in_the_environment_comes_first(machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    carried = tmp_path / "carried.so"
    monkeypatch.setenv("SKIP_ATTN_COMPILE_LIBRARY", str(carried))
    with pytest.raises(build.BuildError, match="not a file"):
        build.library()
    carried.write_bytes(b"carried")
    assert build.library() == carried
    assert not (machine.parent / "runs").exists()


@pytest.mark.parametrize("broken", ["nvcc", "tvm_ffi"])
def test_a_broken_tool_is_a_reason(broken: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An nvcc that may not be run, and a tvm_ffi whose library is missing."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o644 if broken == "nvcc" else 0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_carried", lambda: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    build.toolchain.cache_clear()
    build.unavailable.cache_clear()
    try:
        assert ("Permission denied" if broken == "nvcc" else "tvm_ffi") in build.unavailable()
    finally:
        build.unavailable.cache_clear()


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "SKIP_ATTN_COMPILE_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    monkeypatch.setattr(build.Path, "is_file", lambda _: False)
    build.toolchain.cache_clear()
    with pytest.raises(build.BuildError, match="no nvcc .* CUDA_HOME"):
        build.toolchain()


def test_old_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    build.toolchain.cache_clear()
    with pytest.raises(build.BuildError, match=r"must be 12\.4 or newer, .* is 11\.8"):
        build.toolchain()
    build.toolchain.cache_clear()


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(build.BuildError, match="arch must be one of 90a, got '80'"):
        build.build("80")


def test_sources_are_found_and_complete() -> None:
    names = {path.name for path in build.sources()}
    assert {"attention.cu", "instance.cu", "kernel.cuh", "consumer.cuh", "plan.cuh", "ptx.cuh", "launch.h"} <= names
    assert "NOTES.md" not in names


def test_command_line_reports_errors_without_traceback(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--arch", "90a"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == b"library"

    def fail(*_: object) -> None:
        raise build.BuildError("no luck")

    monkeypatch.setattr(build, "_compile", fail)
    assert build.main(["--arch", "90a", "--out", str(machine.parent / "out")]) == 1
    assert capsys.readouterr().err == "error: no luck\n"


def test_out_directory_gets_the_library_alone(machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "lib"
    assert build.main(["--out", str(out)]) == 0
    assert os.listdir(out) == [build.LIBRARY]
    assert hashlib.sha256((out / build.LIBRARY).read_bytes()).hexdigest() == hashlib.sha256(b"library").hexdigest()
