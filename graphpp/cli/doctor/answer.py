"""The answer of `graphpp doctor`, as text and as data.

Contract: under torchrun every rank measures the links; the first one has the answer, the others None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from graphpp.cli.command import Answer
from graphpp.cli.doctor import machine
from graphpp.cli.doctor.links import Link, measure_links
from graphpp.cli.doctor.torch_defects import DEFECTS
from graphpp.cli.tables import columns
from graphpp.parallel.place import place_of
from graphpp.units import spell_bytes, spell_time


def answer(size: int, repeats: int) -> Answer | None:
    """The facts of this machine and its links. `size`: bytes of the large message; `repeats`: messages over each link."""
    links = _links(size, repeats)
    return None if links is None else _answer(links)


def _links(size: int, repeats: int) -> list[Link] | None:
    """The links between the ranks that torchrun started; empty for one process; None on all ranks but the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return []
    place = place_of(None, None, None)
    first = place.rank == 0
    try:
        found = measure_links(place, size, repeats)
        dist.barrier(place.group)
    finally:
        dist.destroy_process_group()  # gloo's threads may abort a process that ends with a living group
    return found if first else None


def _answer(links: Sequence[Link]) -> Answer:
    versions, release = machine.versions(), machine.torch_release()
    missing, supported = machine.missing(versions), machine.is_supported(release)
    document: dict[str, Any] = {
        "ok": supported and not missing,
        "versions": versions,
        "torch_supported": supported,
        "missing": missing,
        "devices": machine.devices(),
        "backends": machine.backends(),
        "matrix_libraries": machine.matrix_libraries(),
        "compiler": machine.compiler(),
        "torch_defects": [{**asdict(each), "state": each.state(release)} for each in DEFECTS],
        "links": [asdict(link) for link in links],
    }
    return Answer(_text(document, release), document, document["ok"])


# --------------------------------------------------------------------------------------------------------- text


def _text(found: dict[str, Any], release: str) -> str:
    parts = [
        _versions(found, release),
        "\n".join(map(_device, found["devices"])),
        f"torch.distributed: {', '.join(found['backends']) or 'not available'}",
        _libraries(found["matrix_libraries"]),
        _compiler(found["compiler"]),
        _defects(found["torch_defects"], release),
        _table_of(found["links"]) or "links between ranks: run this command under torchrun to measure them",
    ]
    return "\n\n".join(parts)


def _versions(found: dict[str, Any], release: str) -> str:
    least, beyond = (".".join(map(str, each)) for each in machine.SUPPORTED)
    rows = [(name, version or ("MISSING" if name in found["missing"] else "-")) for name, version in found["versions"].items()]
    said = "is supported" if found["torch_supported"] else "IS NOT SUPPORTED"
    table = columns(("", "version"), rows, left=("", "version"))
    return f"{table}\n\ntorch {release} {said} (>={least}, <{beyond})"


def _device(facts: dict[str, Any]) -> str:
    more = f", {facts['cores']} cores, {facts['threads']} threads, {facts['vectors']}" if "cores" in facts else ""
    return f"{facts['device']}: {facts['name']}{more}, {spell_bytes(facts['bytes'])}"


def _libraries(found: dict[str, str | None]) -> str:
    names = {"blas": "BLAS", "lapack": "LAPACK", "mkl": "MKL", "onednn": "oneDNN"}
    return f"matrix products: {', '.join(f'{title} {found[name] or chr(45)}' for name, title in names.items())}"


def _compiler(found: dict[str, Any]) -> str:
    if found["fault"] is None:
        return f"compiler of Inductor: {found['command']} works ({found['version']})"
    return f'compiler of Inductor: {found["command"] or "none"}, backend="inductor" will not work: {found["fault"]}'


def _defects(found: Sequence[dict[str, Any]], release: str) -> str:
    lines = [f"defects of torch {release} that graphpp avoids:"]
    for each in found:
        seen = "" if each["state"] == "present" else f" (seen in {', '.join(each['seen'])}, not tried in {release})"
        if each["state"] != "gone":
            lines.append(f"  {each['where']}: {each['what']}{seen}; here {each['instead']}")
    return "\n".join(lines)


def _table_of(links: Sequence[dict[str, Any]]) -> str:
    rows = [
        (
            f"{link['ranks'][0]} - {link['ranks'][1]}",
            link["hosts"][0] if link["hosts"][0] == link["hosts"][1] else " - ".join(link["hosts"]),
            spell_time(link["latency"], "s"),
            f"{spell_bytes(int(link['bandwidth']))}/s",
        )
        for link in links
    ]
    return columns(("ranks", "host", "latency", "bandwidth"), rows, left=("ranks", "host")) if rows else ""
