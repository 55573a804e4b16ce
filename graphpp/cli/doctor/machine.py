"""The facts of one machine: versions, devices, matrix libraries, the compiler of Inductor.

Contract: nothing is changed, and no other rank is needed. Every function returns plain data. A missing part is a fact, not an
error.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from graphpp.backends.processor import processor_name

SUPPORTED = (2, 11), (2, 16)  # of torch, the second one excluded; `pyproject.toml` says the same
REQUIRED = ("filelock", "jinja2", "networkx", "numpy", "rich", "safetensors", "typer")
OPTIONAL = ("triton", "transformers", "torchdata")
_PROBE = "#include <Python.h>\n#include <omp.h>\n#include <vector>\nint probe() { return omp_get_max_threads(); }\n"
_SECONDS = 60.0  # for the compiler


def versions() -> dict[str, str | None]:
    """The versions of Python, torch, graphpp and the libraries; None: not installed."""
    own = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "graphpp": str(sys.modules["graphpp"].__version__),
    }
    return {**own, **{name: _version(name) for name in (*REQUIRED, *OPTIONAL)}}


def torch_release() -> str:
    """The first two numbers of torch's version, such as `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def is_supported(release: str) -> bool:
    """Whether graphpp supports a release of torch such as `2.13`."""
    least, beyond = SUPPORTED
    return least <= tuple(int(part) for part in release.split(".")) < beyond


def devices() -> list[dict[str, object]]:
    """The CPU with its cores, torch's threads and vector instructions, and every accelerator with its memory in bytes."""
    cpu: dict[str, object] = {
        "device": "cpu",
        "name": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    found = [cpu]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append({"device": f"cuda:{index}", "name": facts.name, "bytes": facts.total_memory})
    return found


def backends() -> list[str]:
    """The backends of `torch.distributed` that this build of torch has."""
    if not dist.is_available():
        return []
    asked = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available", "ucc": "is_ucc_available"}
    return [name for name, function in asked.items() if getattr(dist, function, lambda: False)()]


def matrix_libraries(config: str | None = None) -> dict[str, str | None]:
    """The libraries of matrix products by `torch.__config__.show()`: the BLAS, LAPACK, and the versions of MKL and oneDNN."""
    text = torch.__config__.show() if config is None else config
    patterns = {
        "blas": r"\bBLAS_INFO=(\w+)",
        "lapack": r"\bLAPACK_INFO=(\w+)",
        "mkl": r"Math Kernel Library Version (\S+)",
        "onednn": r"MKL-DNN v?(\S+)",
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: match[1] if match else None for name, match in found.items()}


def compiler() -> dict[str, object]:
    """The C++ compiler of Inductor: its command, its version, and its `compile_fault`; None: there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports what it deprecates
        from graphpp._torch.inductor import cpp_compiler  # takes seconds to load

    command = cpp_compiler()
    if command is None:
        return {"command": None, "version": None, "fault": "no C++ compiler was found: install g++ or clang++, or set CXX"}
    return {"command": command, "version": _first_line([command, "--version"]), "fault": compile_fault(command)}


def compile_fault(command: str) -> str | None:
    """The fault of compiling a library that includes the headers of Python and OpenMP, as Inductor's kernels do; None: none."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROBE)
        include = sysconfig.get_path("include")
        options = ["-shared", "-fPIC", "-fopenmp", f"-I{include}", str(source), "-o", str(Path(folder) / "probe.so")]
        try:
            done = subprocess.run([command, *options], capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as fault:
            return str(fault)
    return None if done.returncode == 0 else next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def missing(found: Mapping[str, str | None]) -> list[str]:
    """The required libraries that are not installed."""
    return [name for name in REQUIRED if found[name] is None]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None)
