"""Check the licenses of the files that ship and of the dependencies. Run it with a Python that has graphpp installed.

Raises SystemExit for a file of another author outside of the one folder for such files, for an author there whose license does
not lie beside the file, and for a runtime dependency, of whatever depth, under a license that is not in `PERMITTED`: all of
those permit use in and beside BSD-3-Clause and Apache-2.0 software. Prints the dependencies. CUDA's libraries are not checked.
"""

import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOREIGN = "graphpp/report/assets/echarts/"
LICENSES = {  # each holder of a right in that folder, and the file that has the license
    "The Apache Software Foundation": "LICENSE",
    "Baidu Inc": "LICENSE-zrender",
    "Microsoft Corporation": "echarts.min.js",  # tslib, under the terms that stand in its own notice
    "Mike Bostock": "LICENSE-d3",
}
NOTICE = re.compile(r"Copyright (?:\(c\) (?:[\d-]+,? )?|\d[\d-]+,? )([A-Za-z][\w ]+)", re.IGNORECASE)
PERMITTED = {
    "0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "MIT", "PSF-2.0", "Unlicense",
    "Zlib", "LLVM-exception",
}  # fmt: skip
NVIDIA = ("nvidia-", "cuda-")  # what a CUDA build of torch brings along, under NVIDIA's own terms
CLASSIFIERS = {
    "BSD License": "BSD", "MIT License": "MIT", "Apache Software License": "Apache-2.0", "ISC License (ISCL)": "ISC",
}  # fmt: skip


def shipped() -> Iterator[Path]:
    """The files of the repository, with paths from its root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    yield from (Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file())


def check_files() -> None:
    """Raise SystemExit where a notice names a holder that LICENSE or `LICENSES` does not have, or stands in another folder."""
    for path in shipped():
        text = (ROOT / path).read_text(errors="ignore")
        for holder in map(str.strip, NOTICE.findall(text)):
            if str(path) == "LICENSE" and holder == "the graphpp developers":
                continue
            if not str(path).startswith(FOREIGN) or not (ROOT / FOREIGN / LICENSES.get(holder, "-")).exists():
                raise SystemExit(f"{path}: the copyright of {holder!r} has no license in {FOREIGN}")


def dependencies(name: str, found: dict[str, PackageMetadata]) -> dict[str, PackageMetadata]:
    """What an installation of a package brings along on this machine, the package itself included."""
    if name not in found:
        found[name] = metadata(name)
        for each in map(Requirement, requires(name) or ()):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                dependencies(canonicalize_name(each.name), found)
    return found


def license_of(known: PackageMetadata) -> str:
    """The SPDX expression of a package; of older packages the classifiers or the field in its place."""
    classifiers = [each.rpartition(" :: ")[2] for each in known.get_all("Classifier") or () if each.startswith("License ::")]
    named = " AND ".join(CLASSIFIERS.get(each, each) for each in classifiers)
    return known.get("License-Expression") or named or (known.get("License") or "none named").partition("\n")[0]


def main() -> None:
    check_files()
    print(f"files: other authors' code stands in {FOREIGN} alone, each with its license")
    try:
        found = dependencies("graphpp", {})
    except PackageNotFoundError as error:
        raise SystemExit(f"{error}: install graphpp in this environment first") from error
    for name, known in sorted(found.items()):
        expression = license_of(known)
        print(f"{name:20} {known['Version']:12} {expression}")
        if name.startswith(NVIDIA):
            continue
        if unknown := set(re.split(r"[\s()]+", expression)) - {"AND", "OR", "WITH", ""} - PERMITTED:
            raise SystemExit(f"{name}: {sorted(unknown)} is in no list of permitted licenses; see PERMITTED in {__file__}")


if __name__ == "__main__":
    main()
