"""What the compiler made of the CUDA sources: its log and the machine code, looked through for what makes a kernel slow."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

# Lines of ptxas that mean a slow kernel: wgmma serialised or setmaxnreg ignored (C75xx), registers spilled to local memory.
_SLOW = re.compile(r"\(C75\d\d\)|setmaxnreg ignored|\b[1-9]\d* bytes (?:stack frame|spill)")


def check_log(text: str) -> list[str]:
    """The lines of a compiler log that mean a slow kernel, with the function each belongs to; empty is good."""
    found, function = [], ""
    for line in text.splitlines():
        if match := re.search(r"Function properties for (\S+)|Compiling entry function '(\S+?)'", line):
            function = match[1] or match[2]
        if _SLOW.search(line):
            found.append(f"{line.strip()} [{function}]")
    return found


def check_sass(target: Path, expected: int) -> list[str] | None:
    """What is wrong with the machine code: kernels without HGMMA, or with local memory. None where there is no cuobjdump to read it."""
    tool = _cuobjdump()
    if tool is None:
        return None
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    dump = subprocess.run([tool, "-sass", target], capture_output=True, text=True, check=False, env=environment)
    kernels = re.split(r"^\s*Function : ", dump.stdout, flags=re.MULTILINE)[1:]
    if dump.returncode or not kernels:
        return [f"{tool} could not read {target}: {dump.stderr.strip() or 'no kernels in it'}"]
    found = [] if len(kernels) == expected else [f"expected {expected} kernels in {target}, found {len(kernels)}"]
    for text in kernels:
        name = text.split(None, 1)[0]
        if "HGMMA" not in text:
            found.append(f"{name} has no HGMMA instruction: it does not use the tensor cores as built for sm_90a")
        if re.search(r"\b(LDL|STL)\b", text):
            found.append(f"{name} uses local memory (LDL/STL)")
    return found


def _cuobjdump() -> Path | None:
    beside = [Path(prefix) / "bin" / "cuobjdump" for prefix in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if prefix]
    packages = Path(sysconfig.get_path("purelib"))
    beside += [*packages.glob("nvidia/*/bin/cuobjdump"), *packages.glob("triton/backends/nvidia/bin/cuobjdump")]
    on_path = shutil.which("cuobjdump")
    return next((path for path in [*([Path(on_path)] if on_path else []), *beside] if path.is_file()), None)
