"""The devices whose figures graphpp knows: those of public data sheets, dense (without sparsity), and of measured kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from graphpp.devices.device import NVLINK, Device, Link
from graphpp.devices.efficiency import Curve, Efficiency

# PCI Express x16, one direction: generation 5 has 64 GB/s before its encoding and packets, generation 4 half of that. Copies
# from and to pinned memory reach some 55 and 25 GB/s in published benchmarks; 55 GB/s were measured on an H200.
_PCIE_5, _PCIE_4 = Link(1e-5, 64e9, 0.85), Link(1e-5, 32e9, 0.8)


def _flops(half: float, eighth: float | None, tf32: float, single: float) -> dict[str, float]:
    narrow = {} if eighth is None else {"float8_e4m3fn": eighth, "float8_e5m2": eighth}
    return {"bfloat16": half, "float16": half, **narrow, "tf32": tf32, "float32": single}


_FAST = Efficiency()
GB = 10**9  # of a data sheet; 2 ** 30 - 10 ** 9 allows for contexts, communicators and allocator fragments

# NVIDIA H100 SXM5: half of the figures with sparsity; NVLink 4, 900 GB/s both directions together; one 400 Gb/s NIC per GPU.
# Shares, launch and the host's link: kernels of `graphpp doctor --calibrate` on an H100 80 GB HBM3, torch 2.11.0, 2026-11-28.
_HOPPER = Efficiency(
    Curve((
        (2.7e8, 0.095), (2.1e9, 0.378), (1.7e10, 0.691), (3.4e10, 0.652), (1.4e11, 0.729), (5.5e11, 0.750), (1.1e12, 0.643)
    )),
    Curve(((8, 0.191), (32, 0.276), (64, 0.404), (128, 0.609), (256, 0.810), (512, 1.0))),
    Curve(((2.1e9, 0.160), (8.6e9, 0.254), (3.4e10, 0.380), (5.5e11, 0.540))),
    Curve(((5.4e9, 0.119), (2.1e10, 0.202), (8.6e10, 0.307), (1.4e12, 0.486))),
    Curve(((1e6, 0.314), (1e7, 0.678), (1e8, 0.869), (1e9, 0.903))),
)  # fmt: skip
H100_SXM = Device(
    "H100_SXM", _flops(989e12, 1979e12, 494e12, 67e12), 3.35e12, 80 * GB, _HOPPER, 2.1e-6, power=700.0,
    host=Link(2.2e-6, 64e9, 0.86),
)  # fmt: skip
# The H100 with HBM3e. Products as cuBLAS ran them in steps of a Llama in bfloat16 on one H200 (gpu_step of RESULTS.md):
# 4096 x 2048 times 2048 x 512, x 2048, x 8192 and x 32768 at 547, 690, 781 and 740 TFLOP/s; all else as for an H100.
H200 = replace(
    H100_SXM, name="H200", memory_bandwidth=4.8e12, memory=141 * GB,
    efficiency=replace(
        _HOPPER, product=Curve(((2.7e8, 0.095), (2.1e9, 0.378), (8.6e9, 0.55), (3.4e10, 0.70), (1.4e11, 0.79), (5.5e11, 0.75)))
    ),
)  # fmt: skip
# NVIDIA A100 80 GB SXM4: NVLink 3, 600 GB/s together; 200 Gb/s for each GPU. Products reach more of the lower peak: 240 to 260
# of 312 TFLOP/s; FlashAttention 2 about 180 forward and 170 backward, causal.
A100 = Device(
    "A100", _flops(312e12, None, 156e12, 19.5e12), 2.039e12, 80 * GB,
    Efficiency(
        _FAST.product.times(1.22), attention=_FAST.attention.times(1.45), attention_backward=_FAST.attention_backward.times(1.5)
    ),
    power=400.0, inside=replace(NVLINK, bandwidth=300e9), between=Link(8e-6, 25e9, 0.9), host=_PCIE_4,
)  # fmt: skip
# NVIDIA HGX B200: 180 GB for each GPU; NVLink 5, 1.8 TB/s together.
B200 = Device(
    "B200", _flops(2250e12, 4500e12, 1125e12, 75e12), 7.7e12, 180 * GB,
    power=1000.0, inside=replace(NVLINK, bandwidth=900e9), between=Link(8e-6, 50e9, 0.9), host=_PCIE_5,
)  # fmt: skip
# AMD MI300X: 7 Infinity Fabric links of 64 GB/s each direction. In published benchmarks products reach 600 to 700 of 1307
# TFLOP/s, attention about half the fraction of an H100.
MI300X = Device(
    "MI300X", _flops(1307e12, 2615e12, 654e12, 163e12), 5.3e12, 192 * GB,
    Efficiency(
        _FAST.product.times(0.75), attention=_FAST.attention.times(0.75), attention_backward=_FAST.attention_backward.times(0.6)
    ),
    power=750.0, inside=Link(4e-6, 448e9, 0.7, NVLINK.contention), between=Link(8e-6, 50e9, 0.9), host=_PCIE_5,
)  # fmt: skip
# one core of a server with AVX-512; loopback between processes
_LOOPBACK = Link(1e-4, 1e9, 1.0, contention=0.0)
CPU_CORE = Device(
    "CPU_CORE", {"float32": 5e10, "bfloat16": 5e10, "float16": 5e10, "float64": 2.5e10}, 1e10, 8 * GB,
    Efficiency(*[Curve(((1.0, 1.0),))] * 6), inside=_LOOPBACK, between=_LOOPBACK, torch_type="cpu", spread=0.0,
)  # fmt: skip

_KNOWN: Mapping[str, Device] = {
    "h100": H100_SXM, "h100_sxm": H100_SXM, "h200": H200, "a100": A100, "b200": B200, "mi300x": MI300X,
    "cpu": CPU_CORE, "cpu_core": CPU_CORE,
}  # fmt: skip
KNOWN_NAMES = f"{', '.join(sorted({each.name for each in _KNOWN.values()}))}, H100 and CPU"


def known_device(name: str) -> Device | None:
    """The device of a name in any case, under a power limit or with another memory after "@", e.g. "H100@500W", "A100@40GB";
    None for other names. Raises `ScheduleError` for a limit that the device cannot have."""
    found = re.fullmatch(r"([^@]+?)(?:\s*@\s*([0-9]{1,5}(?:\.[0-9]+)?)\s*(w|gb))?", name.strip().lower())
    device = _KNOWN.get(found[1].replace("-", "_").replace(" ", "_")) if found else None
    if device is None or found is None or found[2] is None:
        return device
    if found[3] == "w":
        return device.limited(float(found[2]))
    return replace(device, name=f"{device.name}@{float(found[2]):g}GB", memory=round(float(found[2]) * GB))
