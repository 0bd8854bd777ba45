"""Write `constraints.txt` anew: the newest set that pip finds to fit together, torch held where it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HEADER = "# The set that is tested together, every package of it. `make lock` resolves it anew.\n"
# Torch pins these exactly, and differently for each kind of device: they follow from torch's own version.
FOLLOWS_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton")


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
    return {_canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if pinned is None:
        sys.exit("constraints.txt has no line torch==VERSION; write the one you want there first.")
    versions = resolve(pinned[1])
    # A local label such as +cpu names one build; without it the pin fits each of them.
    versions["torch"] = pinned[1]
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())
             if name not in {"trainshed", "setuptools"} and not FOLLOWS_TORCH.fullmatch(name)]  # fmt: skip
    CONSTRAINTS.write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main()
