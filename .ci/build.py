"""Build the sdist and the wheel of a source tree, so that equal files give equal bytes. Arguments: the tree, the output folder.

    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) python .ci/build.py . dist --twice

`--twice` builds a copy as well, in another folder, with other times, modes, umask and time zone, and compares the bytes.

Neither the time and folder of the build, nor the owners, times and modes of the tree's files, nor files that git ignores change
the output. The wheel is built from the sdist. All entries have the time SOURCE_DATE_EPOCH, by default that of the tree's last
commit. The bytes depend on the versions of setuptools and zlib: `make release` pins setuptools and prints both. Nothing is
downloaded: `build` and setuptools are those of this Python.
"""

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


def epoch(tree: Path) -> int:
    """SOURCE_DATE_EPOCH, or the time of the last commit. Raises SystemExit without either."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    asked = subprocess.run(["git", "-C", tree, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise SystemExit(f"{tree} is no git repository: set SOURCE_DATE_EPOCH to the seconds of the release since 1970")
    return int(asked.stdout)


def run_build(kind: str, tree: Path, into: Path, seconds: int) -> Path:
    """Build one distribution with the tools of this Python. Raises SystemExit with the build's own output."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(into), str(tree)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nthe {kind} of {tree} could not be built")
    return next(into.glob("*.tar.gz" if kind == "sdist" else "*.whl"))


def normalize(sdist: Path, into: Path, seconds: int) -> Path:
    """Write the sdist anew: entries by name, one time, no owner, mode 755 for folders and executable files, 644 for others."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        entry.mtime = seconds
        entry.pax_headers = {}
        return entry

    path = into / sdist.name
    with (
        tarfile.open(sdist) as source,
        path.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for entry in sorted(source.getmembers(), key=lambda entry: entry.name):
            if not (entry.isfile() or entry.isdir()):
                raise SystemExit(f"{sdist.name} holds {entry.name}, which is neither a file nor a folder")
            target.addfile(plain(entry), source.extractfile(entry) if entry.isfile() else None)
    return path


def copy(tree: Path, into: Path) -> Path:
    """Copy the files of a tree that git does not ignore; of a tree without git, all but what an earlier build left."""
    asked = subprocess.run(["git", "-C", tree, "ls-files", "-coz", "--exclude-standard"], capture_output=True, check=False)
    if asked.returncode:
        made_here = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
        return Path(shutil.copytree(tree, into, symlinks=True, ignore=made_here))
    for name in filter(None, asked.stdout.decode().split("\0")):
        if os.path.lexists(tree / name):  # not removed since the last commit
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, into / name, follow_symlinks=False)
    return into


def build(tree: Path, into: Path) -> tuple[Path, Path]:
    """The sdist and the wheel of a tree, in the folder `into`."""
    os.umask(0o022)  # modes of the files that setuptools writes
    seconds = epoch(tree)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        raw, unpacked = Path(name, "raw"), Path(name, "unpacked")
        sdist = normalize(run_build("sdist", copy(tree, Path(name, "tree")), raw, seconds), into, seconds)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        wheel = run_build("wheel", next(unpacked.iterdir()), into, seconds)
    return sdist, wheel


def build_elsewhere(tree: Path, into: Path) -> None:
    """Build a copy of the tree under other conditions. Raises SystemExit where the bytes of the output differ."""
    with tempfile.TemporaryDirectory() as name:
        other, out = copy(tree, Path(name, "a", "copy")), Path(name, "out")
        for path in other.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o700)
                os.utime(path, (1e9, 1e9))
        conditions = {"SOURCE_DATE_EPOCH": str(epoch(tree)), "TZ": "Asia/Tokyo"}
        subprocess.run([sys.executable, __file__, other, out], env={**os.environ, **conditions}, umask=0o077, check=True)
        for made in sorted(out.iterdir()):
            if made.read_bytes() != (into / made.name).read_bytes():
                raise SystemExit(f"two builds of one tree gave two {made.name}: compare them with diffoscope")
    print("a second build, elsewhere, gave the same bytes")


def main() -> None:
    tree, into = (Path(each).resolve() for each in sys.argv[1:3])
    for made in build(tree, into):
        print(made, flush=True)
    if "--twice" in sys.argv[3:]:
        build_elsewhere(tree, into)


if __name__ == "__main__":
    main()
