"""Write `constraints.txt` anew, the newest set that fits together, and `hashes.txt`, the files that it may come from.

Torch is held where it is. With `--hashes` only the files are looked up, of the versions that are pinned now.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from audit import CONSTRAINTS, FOLLOWS_TORCH, HASHES, ROOT, canonical

HEADER = "# The set that is tested together, every package of it. `make lock` resolves it anew.\n"
HASHES_HEADER = "# SHA-256 of each file on PyPI that a pinned version may come from. `make lock` looks them up anew.\n"
INDEX = "https://pypi.org/simple/{name}/"
JSON = "application/vnd.pypi.simple.v1+json"
OLDEST = 11
"""Of Python 3, the oldest that is supported."""
WHEEL = re.compile(r"[^-]+-[^-]+(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")
PLATFORM = re.compile(r"any|.*(?:linux|macosx).*_(?:x86_64|aarch64|arm64|universal2)")
"""Where it can be installed."""


def resolve(torch: str) -> dict[str, str]:
    """Versions by package for everything that `.[dev]` brings, as a fresh environment would get them."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        # The pip that comes with Python may be years old; the newest one resolves.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        report = Path(folder) / "report.json"
        dry = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report]
        subprocess.run([*dry, f"{ROOT}[dev]", f"torch=={torch}"], check=True)
        found = json.loads(report.read_text())["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def files_of(name: str, version: str) -> Iterator[tuple[str, str]]:
    """Names and SHA-256 of the files of one version that a supported Python can install."""
    asked = urllib.request.Request(INDEX.format(name=name), headers={"accept": JSON})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        files = json.load(answer)["files"]
    for file in files:
        stem = file["filename"].removesuffix(".tar.gz").removesuffix(".zip")
        if stem != file["filename"]:
            fits = stem.rpartition("-")[2] == version
        else:
            fits = file["filename"].split("-")[1] == version and is_wanted(file["filename"])
        if fits:
            yield file["filename"], file["hashes"]["sha256"]


def is_wanted(wheel: str) -> bool:
    """Whether a supported Python on a supported platform can take this wheel."""
    if (tags := WHEEL.fullmatch(wheel)) is None or not PLATFORM.fullmatch(tags["platform"]):
        return False
    pythons = tags["python"].split(".")
    newest = max((int(tag[3:] or 0) for tag in pythons if re.fullmatch(r"cp3\d*", tag)), default=0)
    return "py3" in pythons or newest >= OLDEST or (newest > 0 and tags["abi"] == "abi3")


def write_hashes() -> None:
    pins = [line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line]
    with ThreadPoolExecutor(8) as several:
        found = list(several.map(lambda pin: sorted(files_of(*pin)), pins))
    if missing := [name for (name, _), files in zip(pins, found, strict=True) if not files]:
        sys.exit(f"PyPI has no file of the pinned version of {', '.join(missing)}.")
    HASHES.write_text(HASHES_HEADER + "".join(f"{digest}  {name}\n" for files in found for name, digest in files))


def main() -> None:
    if sys.argv[1:] == ["--hashes"]:
        return write_hashes()
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if pinned is None:
        sys.exit("constraints.txt has no line torch==VERSION; write the one you want there first.")
    versions = resolve(pinned[1])
    # A local label such as +cpu names one build; without it the pin fits each of them.
    versions["torch"] = pinned[1]
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())
             if name != "trainshed" and not FOLLOWS_TORCH.fullmatch(name)]  # fmt: skip
    CONSTRAINTS.write_text(HEADER + "".join(lines))
    write_hashes()


if __name__ == "__main__":
    main()
