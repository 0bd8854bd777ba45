"""Commands for files: upload, list, look into and delete them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from api.cli.answers import moment, show_deleted, show_facts, show_json, show_table, size
from api.cli.asking import JsonFlag, client
from api.cli.naming import Base, BaseNeeded, FileId
from api.cli.transfers import Transfers
from api.client import Json

app = typer.Typer(help="Training files.", no_args_is_help=True)

SeqLen = Annotated[int | None, typer.Option(min=2, help="Tokens in a row. Default: as a job's.")]
Overlong = Annotated[str, typer.Option(help="What a job would do with a longer example: error, drop or truncate.")]
Template = Annotated[str, typer.Option(help="The chat template: base, chatml or plain.")]
MOST_LINES = 20
"""Line numbers that a person reads of one kind of finding."""


@app.command("upload")
def upload_file(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Text, or JSON Lines of text, messages or prompts.")
    ],
    purpose: Annotated[str, typer.Option(help="fine-tune or pretrain for data, tokenizer for a tokenizer.json.")] = (
        "fine-tune"
    ),
    again: Annotated[bool, typer.Option("--again", help="Also if it is there already.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload a file, unless it is there already with that name, content and purpose; prints its id."""
    with client(context) as trainshed, Transfers(quiet=as_json) as transfers:
        uploaded = trainshed.upload(file, purpose=purpose, reuse=not again, report=transfers.report)
    if as_json:
        show_json(uploaded)
    else:
        typer.echo(uploaded["id"])


@app.command("list")
def list_files(context: typer.Context, as_json: JsonFlag = False) -> None:
    """List files, newest first."""
    with client(context) as trainshed:
        rows = list(trainshed.files())
    if as_json:
        show_json(rows)
    else:
        columns = {"id": "id", "file": "filename", "bytes": "bytes", "purpose": "purpose", "uploaded": "created_at"}
        show_table(rows, columns, none="No files yet; `trainshed files upload` sends one.")


@app.command("show")
def show_file(context: typer.Context, file: FileId, as_json: JsonFlag = False) -> None:
    """Show a file's description."""
    with client(context) as trainshed:
        found = trainshed.file(file)
    if as_json:
        show_json(found)
    else:
        show_facts(
            {
                "file": f"{found['id']} {found['filename']}",
                "purpose": found["purpose"],
                "size": f"{size(found['bytes'])} ({found['bytes']:,} bytes)",
                "sha256": found["sha256"],
                "uploaded": moment(found["created_at"]),
            }
        )


@app.command("report")
def report_file(
    context: typer.Context,
    file: FileId,
    base: Base = None,
    seq_len: SeqLen = None,
    overlong: Overlong = "error",
    packing: Annotated[bool, typer.Option(help="Whether rows hold several examples.")] = True,
    template: Template = "base",
    as_json: JsonFlag = False,
) -> None:
    """Say what validation found in a file, and with --base what a job that starts there would make of it."""
    how = {"base": base, "seq_len": seq_len, "overlong": overlong, "packing": packing, "template": template}
    under = how if base else {}
    with client(context) as trainshed:
        report = trainshed.file_report(file, **{name: value for name, value in under.items() if value is not None})
    if as_json:
        show_json(report)
    else:
        show_facts({name.replace("_", " "): told(value) for name, value in report.items()})


def told(value: object) -> str:
    """A finding as a person reads it: numbers with their thousands, long lists cut."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{name} {told(inner)}" for name, inner in value.items() if inner not in (None, [], {}))
        case list():
            more = f", … ({len(value):,} in all)" if len(value) > MOST_LINES else ""
            return ", ".join(map(told, value[:MOST_LINES])) + more
        case None:
            return ""
    return str(value)


@app.command("preview")
def preview_file(
    context: typer.Context,
    file: FileId,
    base: BaseNeeded,
    line: Annotated[int, typer.Option(min=1, help="Show examples from this line on.")] = 1,
    limit: Annotated[int, typer.Option(min=1, max=20, help="Examples to show.")] = 3,
    seq_len: SeqLen = None,
    overlong: Overlong = "error",
    template: Template = "base",
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
    console = Console()
    for example in seen["data"]:
        parts = example["choices"] or filter(None, (example, example["rejected"]))
        for number, shown in enumerate(parts):
            console.print(rendered(shown, is_right=number == example["answer"]), soft_wrap=True)


def rendered(example: Json, *, is_right: bool) -> Text:
    """One example of a preview, or one choice of a question."""
    said = f": {example['message']}" if example["message"] else f", {example['tokens']} tokens"
    said += ", the right choice" if is_right else ""
    text = Text.assemble((f"line {example['line']}, {example['fate']}{said}\n", "bold"))
    for span in example["spans"]:
        text.append(*((f"[{span['text']}]", "green") if span["trained"] else (span["text"], "")))
    return text


@app.command("delete")
def delete_file(context: typer.Context, file: FileId, as_json: JsonFlag = False) -> None:
    """Delete a file. One that a job still needs stays."""
    with client(context) as trainshed:
        deleted = trainshed.delete_file(file)
    show_deleted(deleted, as_json)
