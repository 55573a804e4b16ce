"""A `graphpp.devices.Device` from the seconds of kernels that `measure_device.py` measured, and its file. Imports no torch.

`calibrated(times, ..)` inverts `Device.seconds`: a share is work over (seconds - launch) over the peak. Rules:

- Peaks are those of the data sheet, by torch's name of the device (`DATA_SHEETS`). Of a device with another name, the largest
  measured rate counts as the peak: of each dtype, of memory, of each link.
- A kernel of less than 1.25 launches says nothing about its share: it is no point of a curve.
- The share of a narrow product is divided by that of `product` at its FLOPs. A share above 1 counts as 1.
- A link has the latency and rate with the least sum of squared relative errors; a latency below 0 counts as 0.
- Kernels that are `held_out` make no curve: they check the others.

Seconds that are not positive and rates above 1.05 of a peak raise `GraphPPError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, prod
from typing import Any

from graphpp.devices import A100, B200, H100_SXM, H200, MI300X, Curve, Device, Efficiency, Link, Machines
from graphpp.errors import GraphPPError
from graphpp.from_json import data_of
from graphpp.units import spell_bytes, spell_time

DATA_SHEETS: Mapping[str, Device] = {
    "NVIDIA H100 80GB HBM3": H100_SXM, "NVIDIA H200": H200, "NVIDIA A100-SXM4-80GB": A100, "NVIDIA B200": B200,
    "AMD Instinct MI300X": MI300X,
}  # fmt: skip
_LEAST = 1.25  # launches
_MOST = 1.05  # of a peak
_ROUNDING = 1e-6  # of a message's seconds: a smaller part for its bytes
_REMEDY = "end other programs on this device and run the command again"


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or all-gather that is measured.

    `kind` and `sizes`: "product", "narrow" or, in further dtypes of an unknown device, "peak": (m, n, k). "attention",
    "attention_backward": (batch, heads, length, width of a head), causal. "traffic": (elements,) that are read and written.
    "to_host", "from_host": (elements,). "all_gather": (elements of the result, ranks). "launch": ().
    """

    kind: str
    sizes: tuple[int, ...]
    dtype: str
    held_out: bool = False

    @property
    def work(self) -> float:
        """FLOPs, counted as `graphpp.plan` counts them; 0 for what only moves bytes."""
        if self.kind in ("product", "narrow", "peak"):
            return 2.0 * prod(self.sizes)
        each = {"attention": 2.0, "attention_backward": 5.0}.get(self.kind, 0.0)
        return each * prod(self.sizes) * self.sizes[2] if each else 0.0

    @property
    def nbytes(self) -> float:
        """Bytes that a kernel reads and writes, a copy carries, or an all-gather leaves on each rank."""
        if self.kind in ("product", "narrow", "peak"):
            rows, columns, inner = self.sizes
            elements = rows * inner + inner * columns + rows * columns
        elif self.kind == "all_gather":
            elements = self.sizes[0]
        else:
            elements = {"attention": 4, "attention_backward": 8, "traffic": 2}.get(self.kind, 1) * prod(self.sizes)
        return float(elements * (4 if self.dtype == "float32" else 2))

    def __str__(self) -> str:
        return f"{self.kind} {' x '.join(map(str, self.sizes))} in {self.dtype}"


def kernels(on_gpu: bool, known: bool, ranks: int) -> list[Kernel]:
    """The kernels to measure on a GPU, or small ones on a CPU; `ranks`: those of an all-gather, 1 for none."""
    dtype = "bfloat16" if on_gpu else "float32"
    found = [Kernel(*each) for each in (_on_gpu(dtype) if on_gpu else _on_cpu(dtype))]
    if not known:
        cube = max((each for each in found if each.kind == "product"), key=lambda each: each.work).sizes
        found += [Kernel("peak", cube, each) for each in ("float32", "bfloat16", "float16") if each != dtype]
    if ranks > 1:
        sizes = (2**19, 2**23, 2**27) if on_gpu else (2**10, 2**14, 2**18)
        found += [Kernel("all_gather", (size // ranks * ranks, ranks), dtype) for size in sizes]
    return found


def _on_gpu(dtype: str) -> Iterator[tuple[Any, ...]]:
    yield "launch", (), dtype
    for size in (512, 1024, 2048):
        yield "product", (size,) * 3, dtype
    yield from (("product", each, dtype) for each in ((4096, 2048, 2048), (4096,) * 3, (4096, 8192, 8192), (8192,) * 3))
    yield from (("narrow", (rows, 4096, 4096), dtype) for rows in (8, 32, 64, 128, 256))
    for kind in ("attention", "attention_backward"):
        yield from ((kind, (1, 32, length, 128), dtype) for length in (512, 1024, 2048, 8192))
        yield kind, (4, 32, 2048, 64), dtype, True
    yield from (("traffic", (elements,), dtype) for elements in (25_000, 250_000, 2_500_000, 25_000_000, 250_000_000))
    yield "traffic", (8_000_000,), dtype, True
    for sizes in ((4096, 512, 2048), (4096, 8192, 2048), (2048, 14_336, 4096), (8192, 8192, 128)):
        yield "product", sizes, dtype, True
    yield from ((kind, (elements,), dtype) for kind in ("to_host", "from_host") for elements in (2**17, 2**22, 2**27))


def _on_cpu(dtype: str) -> Iterator[tuple[Any, ...]]:
    yield "launch", (), dtype
    yield from (("product", (size,) * 3, dtype) for size in (128, 160, 192, 224, 256, 320, 384))
    yield from (("narrow", (rows, 256, 256), dtype) for rows in (4, 8, 16, 32, 64))
    for kind in ("attention", "attention_backward"):
        yield from ((kind, (1, 4, length, 32), dtype) for length in (64, 128, 256))
    yield from (("traffic", (elements,), dtype) for elements in (10_000, 30_000, 100_000, 300_000))
    yield "product", (128, 256, 512), dtype, True


def calibrated(times: Mapping[Kernel, float], name: str, known: Device | None, memory: int, torch_type: str) -> Device:
    """The device of which the kernels took these seconds. `known`: its data sheet; `memory` in bytes, of an unknown device."""
    for kernel, seconds in times.items():
        if not 0 < seconds < inf:
            raise GraphPPError(f"{kernel}: measured {seconds} s, which cannot be right: {_REMEDY}")
    launch = next(seconds for kernel, seconds in times.items() if kernel.kind == "launch")
    spent = {
        kernel: seconds - launch
        for kernel, seconds in times.items()
        if (kernel.work or kernel.kind == "traffic") and seconds >= _LEAST * launch
    }
    usual = known or _by_largest_rates(spent, name, memory, torch_type)
    used = {kernel: seconds for kernel, seconds in spent.items() if not kernel.held_out}
    product = _curve("product", used, usual)
    curves = [_curve(kind, used, usual) for kind in ("attention", "attention_backward", "traffic")]
    gathers = [(*_gather_steps(kernel), seconds) for kernel, seconds in times.items() if kernel.kind == "all_gather"]
    copies = [(1, kernel.nbytes, seconds) for kernel, seconds in times.items() if kernel.kind in ("to_host", "from_host")]
    return replace(
        usual, name=name, launch=launch,
        efficiency=Efficiency(product, _narrow(times, used, product, usual), *curves),
        inside=_link("inside", gathers, known.inside if known else None) if gathers else usual.inside,
        host=_link("host", copies, known.host if known else None) if copies else usual.host,
    )  # fmt: skip


def _by_largest_rates(spent: Mapping[Kernel, float], name: str, memory: int, torch_type: str) -> Device:
    flops = dict[str, float]()
    for kernel, seconds in spent.items():
        if kernel.work:
            flops[kernel.dtype] = max(flops.get(kernel.dtype, 0.0), kernel.work / seconds)
    rates = [kernel.nbytes / seconds for kernel, seconds in spent.items() if kernel.kind == "traffic"]
    if not flops or not rates:
        raise _too_short("product" if not flops else "traffic")
    return Device(name, flops, max(rates), memory, torch_type=torch_type)


def _too_short(kind: str) -> GraphPPError:
    return GraphPPError(f"{kind}: every kernel took less than {_LEAST} launches, so none has a rate: {_REMEDY}")


def _curve(kind: str, spent: Mapping[Kernel, float], device: Device) -> Curve:
    """Shares by FLOPs, of traffic by bytes; where two kernels have the same size, the last one's."""
    of_kind = {kernel: seconds for kernel, seconds in spent.items() if kernel.kind == kind}
    if not of_kind:
        raise _too_short(kind)
    points = {each.work or each.nbytes: _share_of_peak(each, seconds, device) for each, seconds in of_kind.items()}
    return Curve(tuple(sorted(points.items())))


def _narrow(times: Mapping[Kernel, float], spent: Mapping[Kernel, float], product: Curve, device: Device) -> Curve:
    """By smallest side, the share of a narrow product over that of `product`; 1 from the sides of wide products on."""
    wide = min(min(each.sizes) for each in times if each.kind == "product" and not each.held_out)
    of_kind = {each: seconds for each, seconds in spent.items() if each.kind == "narrow"}
    shares = {min(each.sizes): _share_of_peak(each, of_kind[each], device) / product.at(each.work) for each in of_kind}
    return Curve((*((float(side), min(1.0, shares[side])) for side in sorted(shares)), (float(wide), 1.0)))


def _share_of_peak(kernel: Kernel, seconds: float, device: Device) -> float:
    if kernel.work:
        return _share(str(kernel), kernel.work / seconds, device.peak(kernel.dtype))
    return _share(str(kernel), kernel.nbytes / seconds, device.memory_bandwidth)


def _share(what: str, rate: float, peak: float) -> float:
    if rate > _MOST * peak:
        faster = f"measured {rate:.3g} a second, above the peak of {peak:.3g}"
        raise GraphPPError(f"{what}: {faster}, which cannot be right: {_REMEDY}")
    return min(1.0, rate / peak)


def _gather_steps(kernel: Kernel) -> tuple[int, float]:
    """How many latencies an all-gather takes, and the bytes that each rank receives: those of `Machines.all_gather`."""
    ranks = kernel.sizes[1]
    return ranks - 1, kernel.nbytes * (ranks - 1) / ranks


def _link(name: str, rows: Sequence[tuple[int, float, float]], usual: Link | None) -> Link:
    """The link by (latencies, bytes, seconds) of messages. `usual`: the data sheet's, whose bandwidth stays."""
    scaled = [(steps / seconds, nbytes / seconds) for steps, nbytes, seconds in rows]
    aa, ab, bb = (sum(one[i] * one[j] for one in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(each) for each in zip(*scaled, strict=True))
    latency = max(0.0, (a * bb - b * ab) / (aa * bb - ab * ab))
    per_byte = (b - latency * ab) / bb
    if all(per_byte * nbytes <= _ROUNDING * seconds for _, nbytes, seconds in rows):
        raise GraphPPError(f"link {name}: messages of all sizes took the same time, which cannot be right: {_REMEDY}")
    bandwidth = usual.bandwidth if usual else 1 / per_byte
    contention = usual.contention if usual else Link.contention
    return Link(latency, bandwidth, _share(f"link {name}", 1 / per_byte, bandwidth), contention)


def predicted(device: Device, kernel: Kernel) -> float:
    """Seconds of the kernel on the device as `graphpp.plan` prices them."""
    if kernel.kind == "all_gather":
        return Machines(device, kernel.sizes[1], kernel.sizes[1]).all_gather(kernel.nbytes, kernel.sizes[1])
    if kernel.kind in ("to_host", "from_host") and device.host:
        return device.host.latency + device.host.seconds(kernel.nbytes)
    if kernel.kind == "launch":
        return device.launch
    fused = kernel.kind.startswith("attention")
    side = min(kernel.sizes) if kernel.work and not fused else None
    return device.seconds(kernel.work, kernel.nbytes, kernel.dtype, kernel.kind if fused else "product", side)


def document(device: Device, times: Mapping[Kernel, float], about: Mapping[str, object]) -> dict[str, Any]:
    """The file: `about`, the fields of the device, and every measurement with the seconds that the device predicts."""
    measured = [{**asdict(each), "seconds": seconds, "predicted": predicted(device, each)} for each, seconds in times.items()]
    return {**about, "device": data_of(device), "measured": measured}


def text(found: Mapping[str, Any]) -> str:
    """The document as JSON, a measurement a line."""
    lines = ",\n  ".join(json.dumps(each) for each in found["measured"])
    rest = json.dumps({name: each for name, each in found.items() if name != "measured"}, indent=1, allow_nan=False)
    return f'{rest[:-2]},\n "measured": [\n  {lines}\n ]\n}}\n'


def summary(found: Mapping[str, Any]) -> list[str]:
    """Lines for people: curves, links, and by how much predictions differ from the measured seconds."""
    device, held_out = found["device"], [each for each in found["measured"] if each["held_out"]]
    curves = [
        f"  {name:<20}" + ", ".join(f"{share:.0%} at {size:.2g}" for size, share in curve["points"])
        for name, curve in device["efficiency"].items()
    ]
    links = [
        f"  link {name:<15}{spell_time(each['latency'], 's')}, {each['share']:.0%} of {spell_bytes(int(each['bandwidth']))}/s"
        for name, each in ((name, device[name]) for name in ("inside", "host"))
        if each is not None
    ]
    made = [_difference(each) for each in found["measured"] if not each["held_out"]]
    return [
        f"calibrated {device['name']}, launch {spell_time(device['launch'], 's')}", *curves, *links,
        *(f"  {each}" for each in found["notes"]),
        f"predictions against the kernels that made the curves: {min(made):+.1%} to {max(made):+.1%}; against others:",
        *(f"  {_difference(each):+.1%} {Kernel(each['kind'], each['sizes'], each['dtype'])}" for each in held_out),
    ]  # fmt: skip


def _difference(each: Mapping[str, Any]) -> float:
    return float(each["predicted"] / each["seconds"] - 1)
