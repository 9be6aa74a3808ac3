"""Builds the CUDA library from `csrc/` once per content key, and finds it again.

    python -m skip_attn_compile.build --arch 90a [--out DIR] [--check]

The key is the content of csrc, the flags, the compiler's version and the headers' version. A build runs in a private directory and is
published by one atomic rename, so any number of processes may build at once and a killed one leaves nothing that blocks the next: there
is no lock; the worst case is the same library built twice. Each library lies beside a digest of itself; a corrupt one is built again.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from skip_attn_compile.machine_code import check_log, check_sass

log = logging.getLogger(__name__)

ARCHITECTURES = ("90a",)
OLDEST_NVCC = (12, 4)
LIBRARY = "skip_attn_compile_sm90.so"
INSTANCES = tuple((element, head_dim) for element in ("kBFloat16", "kFloat16") for head_dim in (128, 64))
KERNELS = 2 * len(INSTANCES)  # attention, and measuring
FLAGS = ("-O3", "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden")


class BuildError(RuntimeError):
    """The library cannot be built or found; the message says why."""


@dataclass(frozen=True)
class Toolchain:
    """What a build needs from this machine."""

    nvcc: Path
    version: str  # the compiler's own words, part of the key
    include: Path  # apache-tvm-ffi's headers
    library: Path  # directory of libtvm_ffi.so


def library(arch: str = "90a") -> Path:
    """The library for this machine: the one that SKIP_ATTN_COMPILE_LIBRARY names, the one in the wheel, a cached one, or a new build."""
    carried = _carried()
    return carried if carried is not None else build(arch)


@cache
def unavailable() -> str | None:
    """Why no library can be had on this machine, or None. Builds nothing."""
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed; pip install 'skip_attn_compile[cuda]'"
    try:
        if _carried() is None:
            toolchain()
            sources()
    except (BuildError, OSError, ImportError) as error:  # an nvcc that cannot be run, a library of tvm_ffi that cannot be loaded
        return str(error)
    return None


def build(arch: str = "90a", out: Path | None = None) -> Path:
    """Build for `arch` unless the cache (or `out`, a directory) has it already; returns the library's path."""
    if arch not in ARCHITECTURES:
        raise BuildError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    tools, files = toolchain(), sources()
    home = cache_dir() if out is None else out
    home.mkdir(parents=True, exist_ok=True)
    entry = home / f"{key(arch, tools, files)}-{arch}" if out is None else home
    target = entry / LIBRARY
    if out is None and is_intact(target):
        return target
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=home))  # mode 0700, on the file system of the target: rename is atomic
    try:
        log.info("building %s for sm_%s, once", LIBRARY, arch)
        _compile(arch, tools, files, work / LIBRARY)
        if out is not None:
            os.replace(work / LIBRARY, target)
            return target
        for scratch in work.glob("*.o"):
            scratch.unlink()
        (work / (LIBRARY + ".sha256")).write_text(_digest(work / LIBRARY))
        _publish(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def key(arch: str, tools: Toolchain, files: Sequence[Path]) -> str:
    """Content key of a build: the same inputs give the same key, anything that can change the library changes it."""
    digest = hashlib.sha256(repr((arch, FLAGS, INSTANCES, tools.version, _ffi_version(), sysconfig.get_platform())).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def cache_dir() -> Path:
    """$SKIP_ATTN_COMPILE_CACHE, or skip_attn_compile in $XDG_CACHE_HOME or ~/.cache: mode 0700, since code is loaded from it."""
    named = os.environ.get("SKIP_ATTN_COMPILE_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skip_attn_compile"
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = base.stat()
    if status.st_uid != os.getuid():
        raise BuildError(f"{base} belongs to another user; name a directory of your own in SKIP_ATTN_COMPILE_CACHE")
    if status.st_mode & 0o077:
        base.chmod(0o700)
    return base


def is_intact(target: Path) -> bool:
    """Whether `target` is there and is what its build published."""
    digest = target.with_name(target.name + ".sha256")
    try:
        return digest.read_text() == _digest(target)
    except OSError:
        return False


@cache
def toolchain() -> Toolchain:
    """nvcc and apache-tvm-ffi of this machine; BuildError with the reason where one is missing or too old."""
    named = [Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    candidates = [*named, *([Path(on_path)] if on_path else []), Path("/usr/local/cuda/bin/nvcc")]
    nvcc = next((path for path in candidates if path.is_file()), None)
    if nvcc is None:
        raise BuildError("there is no nvcc to build the CUDA library with; install the CUDA toolkit or set CUDA_HOME")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None:
        raise BuildError(f"{nvcc} --version says nothing that can be understood: {version!r}")
    if (int(release[1]), int(release[2])) < OLDEST_NVCC:
        raise BuildError(f"nvcc must be {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} or newer, {nvcc} is {release[1]}.{release[2]}")
    if importlib.util.find_spec("tvm_ffi") is None:
        raise BuildError("apache-tvm-ffi is not installed; pip install 'skip_attn_compile[cuda]'")
    from tvm_ffi import libinfo

    return Toolchain(nvcc, version, Path(libinfo.find_include_path()), Path(libinfo.find_libtvm_ffi()).parent)


def sources() -> tuple[Path, ...]:
    """The files of csrc, beside the package in a checkout and inside it in a wheel."""
    for place in (Path(__file__).parent / "csrc", Path(__file__).parent.parent / "csrc"):
        files = tuple(sorted(path for path in place.glob("*") if path.suffix in (".cu", ".cuh", ".h")))
        if files:
            return files
    raise BuildError("the kernel's sources are not installed, and no built library is; reinstall skip_attn_compile")


def _compile(arch: str, tools: Toolchain, files: Sequence[Path], target: Path) -> None:
    place = {file.name: file for file in files}
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    common = [str(tools.nvcc), *FLAGS, gencode, f"-I{tools.include}"]
    units: list[tuple[str, str, tuple[str, ...]]] = [("attention.cu", "attention.o", ())]
    units += [("instance.cu", f"{element}_{d}.o", (f"-DINSTANCE_TYPE={element}", f"-DINSTANCE_HEAD_DIM={d}")) for element, d in INSTANCES]
    commands = [[*common, *defines, "-c", str(place[source]), "-o", str(target.with_name(name))] for source, name, defines in units]
    with ThreadPoolExecutor(max_workers=min(len(commands), max(1, os.cpu_count() or 1))) as pool:
        logs = list(pool.map(_run, commands))
    if slow := [line for text in logs for line in check_log(text)]:
        raise BuildError("the compiler made slow kernels of the sources; see csrc/NOTES.md:\n" + "\n".join(slow))
    objects = [str(target.with_name(name)) for _, name, _ in units]
    _run([str(tools.nvcc), "-shared", gencode, *objects, "-o", str(target), f"-L{tools.library}", "-ltvm_ffi"])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _publish(work: Path, entry: Path) -> None:
    """Rename `work` to `entry`. Where an intact entry appeared meanwhile it stays; a corrupt one is moved aside first."""
    for _ in range(10):
        try:
            os.rename(work, entry)
            return
        except OSError:  # `entry` exists and is not empty
            if is_intact(entry / LIBRARY):
                return
            aside = Path(tempfile.mkdtemp(prefix=".corrupt-", dir=entry.parent))
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(entry, aside / "entry")
            shutil.rmtree(aside, ignore_errors=True)
    raise BuildError(f"{entry} could not be replaced; remove it by hand")


def _carried() -> Path | None:
    if named := os.environ.get("SKIP_ATTN_COMPILE_LIBRARY"):
        if not Path(named).is_file():
            raise BuildError(f"SKIP_ATTN_COMPILE_LIBRARY names {named}, which is not a file")
        return Path(named)
    in_wheel = Path(__file__).parent / "_lib" / LIBRARY
    return in_wheel if in_wheel.is_file() else None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _ffi_version() -> str:
    from importlib.metadata import version

    return version("apache-tvm-ffi")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m skip_attn_compile.build", description="Build the CUDA library ahead of time.")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="90a", help="GPU architecture")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"build afresh and write {LIBRARY} to DIR instead of the cache")
    parser.add_argument("--check", action="store_true", help="build afresh and fail on machine code without HGMMA or with local memory")
    options = parser.parse_args(arguments)
    try:
        if options.check and options.out is None:
            with tempfile.TemporaryDirectory() as scratch:
                target = build(options.arch, Path(scratch))
                wrong = check_sass(target, KERNELS)
        else:
            target = build(options.arch, options.out)
            wrong = check_sass(target, KERNELS) if options.check else []
            print(target)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if wrong is None:
        missing = "cuobjdump was not found, the machine code was NOT checked; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        print(f"warning: {missing}", file=sys.stderr)
    elif options.check and not wrong:
        print(f"{KERNELS} kernels for sm_{options.arch}: no serialised wgmma, no spills, HGMMA in each")
    for line in wrong or ():
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
