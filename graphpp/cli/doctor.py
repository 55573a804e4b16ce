"""`graphpp doctor`: versions, devices, backends, torch's defects, under torchrun the links between ranks; a device's curves.

Rank 0 prints. Exit code 1 if graphpp cannot run. Each pair (r, r + 1), and (last, 0) of more than two ranks, is measured over
the pipeline's group while the others wait.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphpp.cli.calibrate import summary, text
from graphpp.cli.command import Answer, add_command, write_text
from graphpp.cli.forms import read_bytes
from graphpp.cli.torch_defects import DEFECTS
from graphpp.units import spell_bytes, spell_time

if TYPE_CHECKING:
    import torch

    from graphpp.parallel.rank_place import RankPlace

SUPPORTED = (2, 11), (2, 16)  # torch >= 2.11, < 2.16, as in `pyproject.toml`
REQUIRED = ("filelock", "jinja2", "networkx", "numpy", "rich", "safetensors", "typer")
OPTIONAL = ("triton", "transformers", "torchdata")
_CALIBRATE_HELP = "Measure this device for some 20 seconds, and write a JSON file for graphpp plan --machines 64xFILE."


def add_to(root: typer.Typer) -> None:
    add_command(root, "doctor")(doctor)


def doctor(
    size: Annotated[str, typer.Option(help="Bytes of the large message between ranks.")] = "16MiB",
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="Messages over each link.")] = 20,
    calibrate: Annotated[Path | None, typer.Option(help=_CALIBRATE_HELP)] = None,
) -> Answer | None:
    """Print what this machine and its PyTorch can do. Under torchrun (-m graphpp doctor) measure the links between ranks."""
    import torch.distributed as dist  # loads torch, which help pages do not need

    from graphpp.parallel.place import place_of

    links, nbytes, device = list[dict[str, Any]](), read_bytes("--size", size), None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        place = place_of(None, None, None)
        first, links = place.rank == 0, measure_links(place, nbytes, repeats)
        device = _measured(calibrate, place)
        dist.barrier(place.group)
        dist.destroy_process_group()  # gloo's threads may abort a process that exits with a group
        if not first:
            return None
    else:
        device = _measured(calibrate, None)
    found, release = versions(), ".".join(metadata.version("torch").split(".")[:2])
    missing = [name for name in REQUIRED if found[name] is None]
    available = [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available", bool)()]
    defects = [{**each._asdict(), "state": each.state(release)} for each in DEFECTS]
    document = {
        "ok": is_supported(release) and not missing, "versions": found, "missing": missing, "devices": devices(),
        "torch_supported": is_supported(release), "backends": available, "torch_defects": defects, "links": links,
        "calibrated": device,
    }  # fmt: skip
    notes = [] if calibrate is None or device is None else [write_text(calibrate, text({**device, "links": links}))]
    lines = _text(document, release) + (["", *summary(device)] if device else [])
    return Answer("\n".join(lines), document, bool(document["ok"]), notes)


def _measured(file: Path | None, place: RankPlace | None) -> dict[str, Any] | None:
    """The document of this rank's device, by `measure_device.py`; None without a file for it."""
    if file is None:
        return None
    import torch

    from graphpp.cli.measure_device import measure

    if place is None:
        return measure(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), None)
    return measure(place.device, place.group)


def versions() -> dict[str, str | None]:
    """Versions of Python, graphpp, torch with its build, and the libraries; None: not installed."""
    import torch

    installed = {each.name.lower(): each.version for each in metadata.distributions()}
    own = {"python": platform.python_version(), "graphpp": str(sys.modules["graphpp"].__version__)}
    return {**own, "torch": str(torch.__version__), **{name: installed.get(name) for name in (*REQUIRED, *OPTIONAL)}}


def is_supported(release: str) -> bool:
    """Whether graphpp supports a release of torch such as `2.13`."""
    return SUPPORTED[0] <= tuple(map(int, release.split("."))) < SUPPORTED[1]


def devices() -> list[dict[str, Any]]:
    """The CPU and every accelerator, with `bytes` of memory."""
    import torch

    from graphpp.backends.kernels import processor_name

    name, nbytes = processor_name(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name += f", {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    found = {f"cuda:{at}": torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())}
    others = [{"device": place, "name": each.name, "bytes": each.total_memory} for place, each in found.items()]
    return [{"device": "cpu", "name": name, "bytes": nbytes}, *others]


def measure_links(place: RankPlace, size: int, repeats: int) -> list[dict[str, Any]]:
    """Median latency (seconds for 8 bytes) and bandwidth (bytes per second) of each pair of ranks; returned on every rank."""
    import torch
    import torch.distributed as dist

    small, large = (torch.zeros(nbytes, dtype=torch.uint8, device=place.device) for nbytes in (8, max(size, 8)))
    found = list[dict[str, Any]]()
    for low in range(place.ranks if place.ranks > 2 else 1):
        pair = low, (low + 1) % place.ranks
        dist.barrier(place.group)
        times = torch.zeros(2, dtype=torch.float64, device=place.device)
        if place.rank in pair:
            times[0] = _round_trip(place, pair, small, small, repeats) / 2
            times[1] = _round_trip(place, pair, large, small, repeats)
        every = [torch.empty_like(times) for _ in range(place.ranks)]
        dist.all_gather(every, times, place.group)
        latency, trip = every[low].tolist()
        found.append({"ranks": pair, "latency": latency, "bandwidth": large.nbytes / max(trip - latency, 1e-9)})
    return found


def _round_trip(place: RankPlace, pair: tuple[int, int], sent: torch.Tensor, back: torch.Tensor, repeats: int) -> float:
    """Median seconds of `sent` from the pair's first rank to its second, then `back`; the first trip is a warm-up."""
    import torch.distributed as dist

    from graphpp.streams import wait_for_device

    first, seconds = place.rank == pair[0], list[float]()
    other = pair[first] if place.group is None else dist.get_global_rank(place.group, pair[first])
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for tensor, sends in ((sent, first), (back, not first)):
            (dist.send if sends else dist.recv)(tensor, other, place.group)
        wait_for_device(place.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _text(found: dict[str, Any], release: str) -> list[str]:
    least, beyond = (".".join(map(str, each)) for each in SUPPORTED)
    said = "is supported" if found["torch_supported"] else "IS NOT SUPPORTED"
    defects = [each for each in found["torch_defects"] if each["state"] != "gone"]
    tried = {True: "", False: f" (not tried in {release})"}
    links = [
        "ranks {} - {}: ".format(*each["ranks"])
        + f"latency {spell_time(each['latency'], 's')}, {spell_bytes(int(each['bandwidth']))}/s"
        for each in found["links"]
    ] or ["links between ranks: run this command under torchrun to measure them"]
    return [
        *(f"{name:<14}{version or ('MISSING' if name in REQUIRED else '-')}" for name, version in found["versions"].items()),
        f"\ntorch {release} {said} (>={least}, <{beyond})\n",
        *(f"{each['device']}: {each['name']}, {spell_bytes(each['bytes'])}" for each in found["devices"]),
        f"\ntorch.distributed: {', '.join(found['backends'])}\n\ndefects of torch {release} that graphpp avoids:",
        *(f"  {each['where']}: {each['what']}{tried[each['state'] == 'present']}; here {each['instead']}" for each in defects),
        "",
        *links,
    ]
