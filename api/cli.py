"""The `trainshed` command: start the service, and use one over its public routes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from api import watching
from api.client import ApiError, Client, Damaged, Json, Unreachable


class Exit(IntEnum):
    """What a script can tell the outcome by."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    JOB_CANCELLED = 5
    DAMAGED = 6
    INTERRUPTED = 130
    """Ctrl-C, as shells number it."""


EPILOG = (
    "Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 the server refused, 4 no server answers, "
    "5 the job was cancelled, 6 a download is damaged, 130 Ctrl-C."
)
PATIENCE_SECONDS = 30.0
"""How long reads are tried again while the server is away."""
DEFAULT_URL = "http://127.0.0.1:8642"
FILE_ID = re.compile(r"file-[A-Za-z0-9]+")

app = typer.Typer(no_args_is_help=True, epilog=EPILOG, help="Training as a service.", pretty_exceptions_enable=False)
files_app = typer.Typer(help="Training files.", no_args_is_help=True)
keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
models_app = typer.Typer(help="Models.", no_args_is_help=True)
for _name, _app in {"files": files_app, "keys": keys_app, "models": models_app}.items():
    app.add_typer(_app, name=_name)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print what the server answered, as JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]


@dataclass(frozen=True)
class Connection:
    url: str
    key: str | None


@app.callback()
def connection(
    context: typer.Context,
    url: Annotated[str, typer.Option(envvar="TRAINSHED_URL", help="Where the server is.")] = DEFAULT_URL,
    key: Annotated[
        str | None, typer.Option(envvar="TRAINSHED_API_KEY", help="The API key.", show_default=False)
    ] = None,
) -> None:
    context.obj = Connection(url, key)


@contextmanager
def client(context: typer.Context) -> Iterator[Client]:
    """A client for one command; what goes wrong becomes words and an exit code."""
    at: Connection = context.obj
    if not at.url.startswith(("http://", "https://")):
        fail(f"{at.url!r} is no URL of a server: it must begin with http:// or https://.", Exit.USAGE)
    if not at.key:
        fail("No key: set TRAINSHED_API_KEY, or give --key. `trainshed serve` shows the first one.", Exit.USAGE)
    try:
        with Client(at.url, at.key, patience=PATIENCE_SECONDS) as made:
            yield made
    except ApiError as error:
        where = f" [{error.param}]" if error.param and error.param not in str(error) else ""
        fail(f"{error}{where}" + (f" ({error.request_id})" if error.status >= 500 else ""), Exit.REFUSED)
    except Unreachable as error:
        fail(f"{error}. Is it running? `trainshed serve` starts one; --url says where it is.", Exit.UNREACHABLE)
    except Damaged as error:
        fail(str(error), Exit.DAMAGED)


def fail(message: str, code: Exit) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def show_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(rows: list[Json], columns: dict[str, str], *, none: str) -> None:
    """Chosen fields of each row, a dot goes deeper; or why there are no rows.

    A row is one line however narrow the terminal is: ids are there to be copied, and pipes read lines.
    """
    if not rows:
        typer.echo(none, err=True)
        return
    lines = [list(columns), *([cell(row, path) for path in columns.values()] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (text + " " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def cell(row: Json, path: str) -> str:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(map(str, value))
        case int() | float() if path.endswith("_at"):
            return f"{datetime.fromtimestamp(value):%Y-%m-%d %H:%M}"
        case float():
            return f"{value:.4f}"
    return str(value)


# The service


@app.command()
def serve(
    data_dir: Annotated[Path | None, typer.Option(help="Where everything is kept. TRAINSHED_DATA_DIR too.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. TRAINSHED_HOST too.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for a free one. TRAINSHED_PORT too.")] = None,
) -> None:
    """Run all of it on this machine, in the foreground: broker, database, API, worker, upkeep."""
    given: dict[str, Any] = {"data_dir": data_dir, "host": host, "port": port}
    with starting():
        from api.serve import serve as run
        from core.settings import Settings

        run(Settings(**{name: value for name, value in given.items() if value is not None}), typer.echo)


@contextmanager
def starting() -> Iterator[None]:
    """For what is started on this machine: why it can't be becomes words and an exit code."""
    # Here and not above: what only talks to a server need not load what a server is made of.
    from pydantic import ValidationError

    from api.serve import Refused
    from core.errors import Unavailable
    from core.settings import complaints

    try:
        yield
    except ValidationError as error:
        fail(f"A setting can't be used: {complaints(error)}", Exit.USAGE)
    except (Refused, Unavailable) as error:
        fail(str(error), Exit.USAGE)


@app.command()
def worker() -> None:
    """Offer this machine's slots to a service elsewhere; DATABASE_URL, REDIS_URL and STORAGE_URL say where."""
    become("workers.node")


@app.command()
def api() -> None:
    """Run the API alone, where the parts around it are run by something else."""
    become("api.server")


def become(module: str) -> None:
    """Run a part of the service as this process, if its settings can be used."""
    with starting():
        from core.settings import Settings

        Settings()
    os.execv(sys.executable, [sys.executable, "-m", module])


@app.command()
def migrate() -> None:
    """Bring the database to the schema of this version, and make the first key; for parts that run on their own."""
    with starting():
        from api.serve import prepare
        from core.settings import Settings

        if secret := prepare(Settings()):
            typer.echo(f"The first admin key, shown this once and kept nowhere: {secret}")


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of this version."""
    from api.openapi import main as write

    write()


# Jobs


@app.command()
def submit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JobSpec in JSON or YAML.")],
    watch: Annotated[bool, typer.Option("--watch", help="Stay and watch it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job. Data may be named by a path beside the spec instead of a file id; it is uploaded first."""
    spec = read_spec(file)
    with client(context) as trainshed:
        job = trainshed.submit(upload_data(trainshed, spec, file.parent))
        if as_json and not watch:
            show_json(job)
        elif not as_json:
            typer.echo(job["id"])
        if watch:
            stay(trainshed, job, as_json=as_json)


class SpecLoader(yaml.SafeLoader):
    """YAML as its version 1.2 reads numbers: `3e-4` is one. PyYAML follows 1.1, which wants `3.0e-4`."""


SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+"),
    list("-+.0123456789"),
)


def read_spec(file: Path) -> Json:
    try:
        spec = (
            yaml.load(file.read_text(), SpecLoader)
            if file.suffix in {".yaml", ".yml"}
            else json.loads(file.read_text())
        )
    except (yaml.YAMLError, ValueError) as error:
        fail(f"{file} can't be read: {error}", Exit.USAGE)
    if not isinstance(spec, dict):
        fail(f"{file} must hold one mapping: a JobSpec.", Exit.USAGE)
    found: Json = spec
    return found


def upload_data(trainshed: Client, spec: Json, folder: Path) -> Json:
    """The spec with ids where it named files of this machine."""
    data = spec.get("data")
    if not isinstance(data, dict):
        return spec

    def id_of(name: object) -> object:
        if not isinstance(name, str) or FILE_ID.fullmatch(name):
            return name
        path = folder / name
        if not path.is_file():
            fail(f"{name!r} is neither a file id nor a file in {folder.absolute()}.", Exit.USAGE)
        typer.echo(f"uploading {path} … ", nl=False, err=True)
        uploaded = trainshed.upload(path)["id"]
        typer.echo(uploaded, err=True)
        return uploaded

    train = data.get("train")
    changed: Json = {"train": [id_of(name) for name in train]} if isinstance(train, list) else {}
    if isinstance(data.get("validation"), str):
        changed["validation"] = id_of(data["validation"])
    return spec | {"data": data | changed}


@app.command("list")
def list_jobs(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="Only jobs in this state, such as running.")] = None,
    kind: Annotated[str | None, typer.Option(help="pretrain or finetune.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label, name=value; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many, newest first.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    labels = dict(one.partition("=")[::2] for one in label or [])
    with client(context) as trainshed:
        pages = trainshed.jobs(state=state, kind=kind, label=labels, limit=min(limit, 100))
        rows = [job for job, _ in zip(pages, range(limit), strict=False)]
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "name": "name", "kind": "kind", "state": "state", "step": "progress.step",
                   "of": "progress.total_steps", "loss": "progress.loss", "model": "model"}  # fmt: skip
        filtered = state or kind or label
        show_table(rows, columns, none="No such jobs." if filtered else "No jobs yet; `trainshed submit` makes one.")


@app.command()
def show(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Show one job."""
    with client(context) as trainshed:
        found = trainshed.job(job)
    if as_json:
        show_json(found)
    else:
        describe(found)


def describe(job: Json) -> None:
    progress, queue, error = job["progress"], job["queue"], job["error"] or {}
    lines = {
        "job": f"{job['id']} ({job['kind']}) {job['name'] or ''}".rstrip(),
        "state": job["state"],
        "waits": queue["reason"],
        "progress": watching.Picture(job).line if progress["step"] else None,
        "model": job["model"],
        "error": error.get("message"),
        "hint": error.get("hint"),
    }
    for name, value in lines.items():
        if value:
            typer.echo(f"{name:9} {value}")


@app.command()
def watch(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Watch a job until it ends: a live bar with the loss; with --json, each event in a line."""
    with client(context) as trainshed:
        stay(trainshed, trainshed.job(job), as_json=as_json)


def stay(trainshed: Client, job: Json, *, as_json: bool) -> None:
    """Watch until the end; the exit code is the job's outcome."""
    events = trainshed.follow(job["id"])
    try:
        if as_json:
            for event in events:
                typer.echo(json.dumps({"event": event.name, **event.data}, ensure_ascii=False))
            ended = event.data["job"]
        else:
            ended = watching.watch(job, events, Console())
            describe(ended)
    except KeyboardInterrupt:
        # The code of an aborted command would be that of a failed job.
        fail(f"The job goes on. `trainshed cancel {job['id']}` ends it; `watch` shows it again.", Exit.INTERRUPTED)
    outcomes = {"failed": Exit.JOB_FAILED, "cancelled": Exit.JOB_CANCELLED}
    raise typer.Exit(outcomes.get(ended["state"], Exit.OK))


@app.command()
def logs(
    context: typer.Context,
    job: JobId,
    rank: Annotated[int, typer.Option(help="Whose log.")] = 0,
    tail: Annotated[int, typer.Option(help="Last so many lines.")] = 200,
) -> None:
    """Print what a rank wrote."""
    with client(context) as trainshed:
        typer.echo(trainshed.logs(job, rank=rank, tail=tail), nl=False)


@app.command()
def cancel(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """End a job."""
    with client(context) as trainshed:
        tell_state(trainshed.cancel(job), as_json=as_json)


@app.command()
def pause(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Save a job's progress and give its slots back."""
    with client(context) as trainshed:
        tell_state(trainshed.pause(job), as_json=as_json)


@app.command()
def resume(context: typer.Context, job: JobId, as_json: JsonFlag = False) -> None:
    """Queue a paused job again."""
    with client(context) as trainshed:
        tell_state(trainshed.resume(job), as_json=as_json)


def tell_state(job: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(job)
    else:
        typer.echo(f"{job['id']} {job['state']}")


@app.command()
def download(
    context: typer.Context,
    job: JobId,
    into: Annotated[Path | None, typer.Option(help="Folder; default: the job's id.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Download a job's artifacts, each verified. What is here already is kept, what broke off goes on."""
    folder = into or Path(job)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                   console=Console(stderr=True), disable=as_json)  # fmt: skip
    tasks: dict[str, Any] = {}

    def report(path: str, here: int, total: int) -> None:
        task = tasks.setdefault(path, None) or bar.add_task(path, total=total)
        tasks[path] = task
        bar.update(task, completed=here)

    with client(context) as trainshed, bar:
        paths = trainshed.download(job, folder, report=report)
    if as_json:
        show_json([str(path) for path in paths])
    else:
        typer.echo(f"{len(paths)} files in {folder}, each verified" if paths else "The job has no artifacts yet.")


@app.command()
def chat(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of the model; `trainshed models list` has them all.")],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask this and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.7,
    as_json: JsonFlag = False,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it."""
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    with client(context) as trainshed:
        if message is None and sys.stdin.isatty():
            typer.echo("An empty line or Ctrl-D ends the conversation.", err=True)
        while said := message or ask():
            messages.append({"role": "user", "content": said})
            options: Json = {"max_tokens": max_tokens, "temperature": temperature}
            if as_json:
                answer = trainshed.chat(model, messages, **options)
                reply = answer["choices"][0]["message"]["content"]
                show_json(answer)
            else:
                reply = ""
                for piece in trainshed.chat_stream(model, messages, **options):
                    typer.echo(piece, nl=False)
                    reply += piece
                typer.echo()
            messages.append({"role": "assistant", "content": reply})
            if message:
                return


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@app.command()
def nodes(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List hosts and their slots."""
    with client(context) as trainshed:
        rows = trainshed.nodes()
    if as_json:
        show_json(rows)
        return
    free = [row | {"free": f"{sum(not slot['held'] for slot in row['slots'])} of {len(row['slots'])}"} for row in rows]
    columns = {"node": "id", "device": "device", "alive": "alive", "draining": "draining", "free": "free"}
    show_table(free, columns, none="No hosts yet; `trainshed serve` brings one, `trainshed worker` adds another.")


# Files, keys, models


@files_app.command("upload")
def upload_file(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Text, or JSON Lines of text, messages or prompts.")
    ],
    purpose: Annotated[str, typer.Option(help="fine-tune or pretrain for data, tokenizer for a tokenizer.json.")] = (
        "fine-tune"
    ),
    as_json: JsonFlag = False,
) -> None:
    """Upload a file; prints its id."""
    with client(context) as trainshed:
        uploaded = trainshed.upload(file, purpose=purpose)
    if as_json:
        show_json(uploaded)
    else:
        typer.echo(uploaded["id"])


@files_app.command("list")
def list_files(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List files, newest first."""
    with client(context) as trainshed:
        rows = list(trainshed.files())
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "file": "filename", "bytes": "bytes", "purpose": "purpose", "uploaded": "created_at"}
        show_table(rows, columns, none="No files yet; `trainshed files upload` sends one.")


@files_app.command("report")
def report_file(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Id of the file.")],
    base: Annotated[str | None, typer.Option(help="Also say what becomes of each example under this model.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    overlong: Annotated[str, typer.Option(help="error, drop or truncate.")] = "error",
    packing: Annotated[bool, typer.Option(help="Whether rows hold several examples.")] = True,
    template: Annotated[str, typer.Option(help="base, chatml or plain.")] = "base",
) -> None:
    """Print what validation found in a file."""
    how = {"base": base, "seq_len": seq_len, "overlong": overlong, "packing": packing, "template": template}
    under = how if base else {}
    with client(context) as trainshed:
        show_json(trainshed.file_report(file, **{name: value for name, value in under.items() if value is not None}))


@files_app.command("preview")
def preview_file(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Id of the file.")],
    base: Annotated[str, typer.Option(help="The model whose tokenizer and template render it.")],
    line: Annotated[int, typer.Option(help="Show examples from this line on.")] = 1,
    limit: Annotated[int, typer.Option(help="Examples to show.")] = 3,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a row.")] = None,
    overlong: Annotated[str, typer.Option(help="error, drop or truncate.")] = "error",
    template: Annotated[str, typer.Option(help="base, chatml or plain.")] = "base",
    as_json: JsonFlag = False,
) -> None:
    """Show examples as a model sees them, what is learned in colour and between brackets."""
    with client(context) as trainshed:
        seen = trainshed.preview(
            file, base, first_line=line, limit=limit, seq_len=seq_len, overlong=overlong, template=template
        )
    if as_json:
        show_json(seen)
        return
    for example in seen["data"]:
        for shown in filter(None, (example, example["rejected"])):
            said = f": {shown['message']}" if shown["message"] else f", {shown['tokens']} tokens"
            typer.secho(f"line {shown['line']}, {shown['fate']}{said}", bold=True)
            for span in shown["spans"]:
                typer.secho(
                    f"[{span['text']}]" if span["trained"] else span["text"],
                    nl=False,
                    fg="green" if span["trained"] else None,
                )
            typer.echo()


@files_app.command("delete")
def delete_file(
    context: typer.Context, file: Annotated[str, typer.Argument(metavar="FILE", help="Id of the file.")]
) -> None:
    """Delete a file."""
    with client(context) as trainshed:
        typer.echo(f"{trainshed.delete_file(file)['id']} deleted")


@keys_app.command("create")
def create_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="read, submit or admin; may be repeated.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a key; its secret is shown this once."""
    with client(context) as trainshed:
        made = trainshed.create_key(name, scope or ["read", "submit"])
    if as_json:
        show_json(made)
    else:
        typer.echo(made["secret"])


@keys_app.command("list")
def list_keys(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List keys, newest first."""
    with client(context) as trainshed:
        rows = trainshed.keys()
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "name": "name", "scopes": "scopes", "made": "created_at", "expires": "expires_at",
                   "revoked": "revoked_at"}  # fmt: skip
        show_table(rows, columns, none="No keys yet.")


@keys_app.command("revoke")
def revoke_key(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY_ID", help="key-…, as `keys list` shows it.")],
) -> None:
    """End a key at once."""
    with client(context) as trainshed:
        typer.echo(f"{trainshed.revoke_key(key)['id']} revoked")


@models_app.command("list")
def list_models(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List models."""
    with client(context) as trainshed:
        rows = trainshed.models()
    if as_json:
        show_json(rows)
    else:
        columns = {"model": "id", "owner": "owned_by", "job": "job_id"}
        show_table(rows, columns, none="No models yet: put one into the server's models directory, or pretrain one.")


@models_app.command("register")
def register_model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What it is called.")],
    source: Annotated[str, typer.Argument(help="A folder in the server's models directory, or a job's id.")],
    as_json: JsonFlag = False,
) -> None:
    """Name a model that jobs can start from."""
    with client(context) as trainshed:
        of_job, said = source.startswith("job-"), source.startswith("dir:")
        made = trainshed.register_model(name, {"job": source} if of_job else source if said else f"dir:{source}")
    if as_json:
        show_json(made)
    else:
        typer.echo(made["id"])


def main() -> None:
    app()


if __name__ == "__main__":
    main()
