"""`graphpp doctor --calibrate`: a device from seconds that are known, its file, and refused measurements and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphpp.cli import calibrate, measure_device
from graphpp.cli.calibrate import Kernel, calibrated, kernels, predicted
from graphpp.cli.measure_device import Stopwatch
from graphpp.cli.plan import read_machines
from graphpp.devices import H100_SXM, Curve, Device, Efficiency, Link, Machines
from graphpp.errors import GraphPPError
from tests.cli.running import document, refusal, run

LINKS = {"inside": Link(5e-6, 450e9, 0.7), "host": Link(7e-6, 64e9, 0.8)}
MEASURED = replace(H100_SXM, name="mine", launch=1e-6, efficiency=Efficiency(), **LINKS)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def seconds_on(device: Device, *, known: bool = True) -> dict[Kernel, float]:
    return {each: predicted(device, each) for each in kernels(on_gpu=True, known=known, ranks=8)}


def test_known_rates_are_found() -> None:
    times = seconds_on(MEASURED)
    found = calibrated(times, "mine", H100_SXM, 0, "cuda")
    assert [predicted(found, each) for each in times if not each.held_out] == pytest.approx(
        [seconds for each, seconds in times.items() if not each.held_out], rel=1e-9
    )
    shares, wanted = found.efficiency, MEASURED.efficiency
    for kind in ("product", "attention", "attention_backward", "traffic"):
        curve: Curve = getattr(shares, kind)
        assert dict(curve.points) == pytest.approx({size: getattr(wanted, kind).at(size) for size, _ in curve.points})
    assert (found.flops, found.memory, found.between) == (H100_SXM.flops, H100_SXM.memory, H100_SXM.between)
    for name, link in LINKS.items():
        measured = getattr(found, name)
        assert (measured.latency, measured.share) == pytest.approx((link.latency, link.share))
        assert measured.bandwidth == link.bandwidth


def test_the_kernels_are_twelve_products_attention_traffic_copies_and_gathers() -> None:
    found = [each for each in kernels(on_gpu=True, known=True, ranks=8) if not each.held_out]
    counts = {kind: sum(each.kind == kind for each in found) for kind in dict.fromkeys(each.kind for each in found)}
    assert counts == {
        "launch": 1, "product": 7, "narrow": 5, "attention": 4, "attention_backward": 4, "traffic": 5, "to_host": 3,
        "from_host": 3, "all_gather": 3,
    }  # fmt: skip


def test_work_is_counted_as_torch_counts_it() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    sizes = 2, 4, 64, 16
    query = torch.randn(sizes, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert Kernel("attention", sizes, "float32").work == counter.get_total_flops() / 2  # causal
    assert Kernel("attention_backward", sizes, "float32").work == 2.5 * counter.get_total_flops() / 2
    assert Kernel("product", (3, 5, 7), "float32").work == 2 * 3 * 5 * 7


def test_the_largest_rates_of_an_unknown_device_are_its_peaks() -> None:
    times = seconds_on(MEASURED, known=False)
    found = calibrated(times, "mine", None, 2**30, "cuda")
    peak = MEASURED.peak("bfloat16") * MEASURED.efficiency.product.at(1e12)
    assert found.flops["bfloat16"] == pytest.approx(peak)
    assert set(found.flops) == {"bfloat16", "float16", "float32"}
    assert max(share for _, share in found.efficiency.product.points) == 1.0
    assert (found.memory, found.host and found.host.share) == (2**30, 1.0)
    assert found.host and found.host.bandwidth == pytest.approx(64e9 * 0.8)


def test_a_kernel_that_hardly_takes_longer_than_a_launch_makes_no_point() -> None:
    times = {each: seconds if each.nbytes > 2e5 else 1.1e-6 for each, seconds in seconds_on(MEASURED).items()}
    times |= {each: 1e-6 for each in times if each.kind == "launch"}
    assert min(size for size, _ in calibrated(times, "mine", H100_SXM, 0, "cuda").efficiency.traffic.points) == 1e6


@pytest.mark.parametrize(
    ("kind", "seconds", "message"),
    [
        ("product", 0.0, "product 512 x 512 x 512 in bfloat16: measured 0.0 s, which cannot be right: end other programs"),
        ("launch", -1e-9, "launch  in bfloat16: measured -1e-09 s"),
        ("product", 1e-6 + 2.5e-7, "a second, above the peak of 9.89e"),
        ("traffic", 1e-6, "traffic: every kernel took less than 1.25 launches"),
        ("to_host", 1e-6, "link host: measured .* a second, above the peak of 6.4e"),
        ("all_gather", 1e-6, "link inside: messages of all sizes took the same time"),
    ],
)
def test_measurements_that_cannot_be_right_are_refused(kind: str, seconds: float, message: str) -> None:
    also = "from_host" if kind == "to_host" else kind
    times = {each: seconds if each.kind in (kind, also) else right for each, right in seconds_on(MEASURED).items()}
    if kind == "to_host":
        times = {each: s / 1e3 if each.kind in (kind, also) else s for each, s in seconds_on(MEASURED).items()}
    with pytest.raises(GraphPPError, match=message):
        calibrated(times, "mine", H100_SXM, 0, "cuda")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    times = seconds_on(MEASURED)
    found = calibrated(times, "mine", H100_SXM, 0, "cuda")
    (tmp_path / "Mine.json").write_text(calibrate.text(calibrate.document(found, times, {"date": "today", "notes": ["one"]})))
    return tmp_path / "Mine.json"


def test_a_file_gives_an_equal_device(file: Path) -> None:
    found = Device.load(file)
    assert found == calibrated(seconds_on(MEASURED), "mine", H100_SXM, 0, "cuda")
    assert Machines.read(f"64x{file}") == read_machines(f"64x{file}") == Machines(found, 64)
    own = file.with_name("own.json")
    own.write_text(json.dumps({"device": file.name, "gpus": 72, "per_machine": 72}))
    assert read_machines(str(own)) == Machines(found, 72, 72)
    *_, one, last = calibrate.summary(json.loads(file.read_text()))
    assert (one, last) == ("  +0.0% product 2048 x 14336 x 4096 in bfloat16", "  +0.0% product 8192 x 8192 x 128 in bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": None}, "device: take an object with name, flops, "),
        ({"device": {"launch": -1.0}}, "device.launch: take a number from 0, got -1.0"),
        ({"device": {"flops": {"bf16": 1e12}}}, "device.flops: take a mapping of dtype names to FLOP/s"),
        ({"device": {"efficiency": {"product": {"points": [[2.0, 0.5], [1.0, 0.5]]}}}}, "points: take a sequence of "),
        ({"device": {"efficiency": {"product": {"points": [[2.0, "all"]]}}}}, "product.points[0][1]: take float, got 'all'"),
        ({"device": {"lunch": 1.0}}, "got ['lunch'], did you mean launch?"),
    ],
)
def test_wrong_entries_of_a_file_are_named(file: Path, change: dict[str, Any], message: str) -> None:
    given = json.loads(file.read_text())
    own = change["device"]
    file.write_text(json.dumps(given | {"device": own if own is None else given["device"] | own}))
    refused = refusal("plan", "no_model.py:build", "--machines", f"8x{file}", "--batch", "8")
    assert str(file) in refused and message in refused


def test_other_files_are_refused_with_the_remedy(file: Path) -> None:
    asked = "plan", "no_model.py:build", "--batch", "8", "--machines"
    assert f"say how many there are, e.g. 8x{file}" in refusal(*asked, str(file))
    assert "No such file" in refusal(*asked, "8xnone.json")
    file.write_text("{}")
    assert "missing device: take a file that graphpp doctor --calibrate wrote" in refusal(*asked, f"8x{file}")


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure_device, "REPEATS", 1)
    file = tmp_path / "cpu.json"
    found = document("doctor", "--calibrate", str(file))["calibrated"]
    written = json.loads(file.read_text())
    assert written == {**found, "links": []}
    device = read_machines(f"2x{file}").device
    assert (device.torch_type, device.host, set(device.flops)) == ("cpu", None, {"float32", "bfloat16", "float16"})
    assert all(each["seconds"] > 0 and each["predicted"] > 0 for each in written["measured"])
    assert written["torch"] == torch.__version__
    assert f"wrote {file}" in run("doctor", "--calibrate", str(file)).stderr


@pytest.mark.parametrize("kernel", [*kernels(on_gpu=True, known=False, ranks=1)], ids=str)
def test_operands_on_a_gpu_come_from_the_pool(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "_window_of", lambda self, call, count, enqueued=0.0: 1.0)
    pinned = torch.empty(kernel.sizes, device="meta", dtype=torch.bfloat16)
    monkeypatch.setattr(Stopwatch, "_pinned", lambda self, kernel: pinned)
    properties = SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Stopwatch(torch.device("meta")).seconds(kernel) == 1.0


def test_a_stream_has_work_while_the_host_enqueues_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()

    class Event:
        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 40.0  # milliseconds

    def event(device: torch.device) -> Event:
        done.append("event")
        return Event()

    def fill(self: Stopwatch) -> None:
        done.append("fill")

    monkeypatch.setattr(measure_device, "timing_event", event)
    monkeypatch.setattr(Stopwatch, "_fill", fill)
    watch = Stopwatch(torch.device("meta"))
    assert done == [*("event", *["fill"] * 5, "event", "wait"), *("event", *["fill"] * 20, "event", "wait")]
    done.clear()
    assert watch._window_of(lambda: done.append("call"), 4, enqueuing=0.004) == 0.01
    assert done == ["fill"] * 3 + ["event", *["call"] * 4, "event", "wait"]


def test_gathers_are_measured() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        watch = Stopwatch(torch.device("cpu"), dist.group.WORLD)
        assert watch.seconds(Kernel("all_gather", (2**10, 1), "float32")) > 0
    finally:
        dist.destroy_process_group()


def test_ranks_on_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 16)
    with pytest.raises(GraphPPError, match="the ranks are on several machines"):
        measure_device.measure(torch.device("cpu"), object())  # type: ignore[arg-type]
