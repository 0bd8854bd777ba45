"""Commands for files: upload, list, look into and delete them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.cli.answers import show_json, show_table
from api.cli.asking import JsonFlag, client

app = typer.Typer(help="Training files.", no_args_is_help=True)


@app.command("upload")
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


@app.command("report")
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


@app.command("preview")
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
        for shown in example["choices"] or filter(None, (example, example["rejected"])):
            said = f": {shown['message']}" if shown["message"] else f", {shown['tokens']} tokens"
            typer.secho(f"line {shown['line']}, {shown['fate']}{said}", bold=True)
            for span in shown["spans"]:
                typer.secho(
                    f"[{span['text']}]" if span["trained"] else span["text"],
                    nl=False,
                    fg="green" if span["trained"] else None,
                )
            typer.echo()


@app.command("delete")
def delete_file(
    context: typer.Context, file: Annotated[str, typer.Argument(metavar="FILE", help="Id of the file.")]
) -> None:
    """Delete a file."""
    with client(context) as trainshed:
        typer.echo(f"{trainshed.delete_file(file)['id']} deleted")
