"""How a base would read a file: asked of the engine, which tokenises in a short-lived process of its own.

A chat template is somebody's program and a tokenizer is a large library, so neither is let into this process: the
child gets the file on its standard input, a few seconds, and an environment that opens no door.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, Timer
from typing import IO, Any, Literal

from core import catalog, files
from core.errors import InvalidModel, InvalidRequest, NotFound, NotReady, Unavailable
from core.keys import Account
from core.models import File, Model
from core.resolve import usual_seq_len
from core.services import Services
from core.settings import trainer_environment

SURVEY_SECONDS = 20.0
"""How long a file is read for a report; a report says whether that was enough."""
GRACE_SECONDS = 20.0
"""Beyond it, to start and to answer. Whoever takes longer, as a template can, is ended."""
AT_ONCE = 2
"""Examinations of one API process; more queue up behind them."""
EXAMINE = (sys.executable, "-m", "engine", "examine")
_TOKENIZERS = frozenset({".json", ".jinja", ".txt", ".model"})
"""Endings of a model's files that are not weights."""


@dataclass(frozen=True)
class Question:
    """A file of the caller's, and the base that is to read it."""

    file_id: str
    base: str
    seq_len: int | None = None
    """Default: as a job's."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    packing: bool = True
    template: Literal["base", "chatml", "plain"] = "base"


def survey(
    services: Services, owner: Account, question: Question, *, seconds: float = SURVEY_SECONDS
) -> dict[str, Any]:
    """The file's report, with what becomes of its examples under the base."""
    file, found = _examined(services, owner, question, ["--seconds", f"{seconds:g}"], limit=seconds + GRACE_SECONDS)
    return file.report | found


def preview(services: Services, owner: Account, question: Question, *, first_line: int, limit: int) -> dict[str, Any]:
    """Some examples in ids and text, with what of them is learned."""
    asked = ["--preview", str(limit), "--first-line", str(first_line)]
    _, found = _examined(services, owner, question, asked, limit=GRACE_SECONDS)
    return found


def _examined(
    services: Services, owner: Account, question: Question, asked: Sequence[str], *, limit: float
) -> tuple[File, dict[str, Any]]:
    models = services.settings.models
    with services.db.reading() as session:
        file = files.get(session, owner, question.file_id)
        try:
            model = catalog.usable(session, catalog.get(session, owner, question.base, models=models))
        except (NotFound, NotReady) as error:
            raise type(error)(error.message, param="base") from error
    if (form := file.report.get("format")) is None:
        raise InvalidRequest(f"{file.id} is no training file: upload it with the purpose fine-tune.", param="file_id")
    if form == "tokens":
        raise InvalidRequest(
            f"{file.id} holds ids, which are trained on as they are: its report without a base says all.", param="base"
        )
    most = int(model.shape["max_seq_len"])
    seq_len = question.seq_len or usual_seq_len(most, form)
    if seq_len > most:
        raise InvalidRequest(
            f"seq_len={seq_len} is longer than the model's {most} tokens; use at most that.", param="seq_len"
        )
    lengths = ["--seq-len", str(seq_len), "--max-seq-len", str(most)]
    command = [*EXAMINE, "--format", form, *lengths, "--overlong", question.overlong, *asked]
    command += [] if question.packing else ["--no-packing"]
    command += [] if question.template == "base" else ["--template", question.template]
    with _tokenizer(services, model) as folder:
        answer = _answer(
            [*command, str(folder)],
            services.storage.stream(file.storage_key),
            seconds=limit,
        )
    told = {
        "base": model.id,
        "seq_len": seq_len,
        "overlong": question.overlong,
        "packing": question.packing,
        "template": question.template,
    }
    return file, told | (answer if isinstance(answer, dict) else {"object": "list", "data": answer})


@contextmanager
def _tokenizer(services: Services, model: Model) -> Iterator[Path]:
    """The folder of a base, or a copy of what a result's tokenizer is made of."""
    if (folder := catalog.source_folder(model, services.settings.models)) is not None:
        yield folder
        return
    kind, _, prefix = model.source.partition(":")
    if f"{kind}:" == catalog.CHECKPOINT:
        raise InvalidModel(f"{model.id} is a checkpoint; name what its job starts from: it reads text alike.")
    if f"{kind}:" == catalog.ADAPTER:
        prefix = prefix.partition(":")[2]
    with tempfile.TemporaryDirectory(prefix="trainshed-tokenizer-") as made:
        for stored in services.storage.list(prefix):
            name = Path(stored.key.removeprefix(f"{prefix}/"))
            if name.suffix in _TOKENIZERS:
                services.storage.get_to(stored.key, Path(made) / name)
        yield Path(made)


def _answer(command: Sequence[str], chunks: Iterator[bytes], *, seconds: float) -> Any:
    """What the child says once it has read `chunks`, or as many of them as it wants."""
    with (
        tempfile.TemporaryFile() as complaint,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaint,
            env=trainer_environment(()) | {"OMP_NUM_THREADS": "1"},
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        feeding = _Feeding(child.stdin, chunks)
        in_time = True

        def end() -> None:
            nonlocal in_time
            in_time = False
            child.kill()

        ending = Timer(seconds, end)
        ending.start()
        feeding.start()
        try:
            said = child.stdout.read()
            code = child.wait()
        finally:
            ending.cancel()
            child.kill()
            feeding.join()
        if feeding.trouble is not None:
            raise feeding.trouble
        if code and not in_time:
            raise Unavailable(
                f"The file could not be examined within {seconds:g} s; the base's chat template may not come to an end."
            )
        if code < 0:
            raise Unavailable(
                f"Examining the file ended by signal {-code}, for lack of memory perhaps; try again, or a smaller file."
            )
        if code:
            complaint.seek(0)
            raise InvalidModel(_last_line(complaint), param="base")
    return json.loads(said)


class _Feeding(Thread):
    """Hands the child its input. It may stop reading at any time; what goes wrong on our side is kept in `trouble`."""

    def __init__(self, into: IO[bytes], chunks: Iterator[bytes]) -> None:
        super().__init__(name="examining", daemon=True)
        self.trouble: Exception | None = None
        self._into, self._chunks = into, chunks

    def run(self) -> None:
        try:
            for chunk in self._chunks:
                try:
                    self._into.write(chunk)
                except (BrokenPipeError, ValueError):
                    break
        except Exception as error:  # whatever storage says is for the caller
            self.trouble = error
        finally:
            with suppress(OSError, ValueError):
                self._into.close()


def _last_line(complaint: IO[bytes]) -> str:
    lines = complaint.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "The base's tokenizer can't be used."
