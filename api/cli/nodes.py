"""`trainshed nodes`: hosts and their slots."""

from __future__ import annotations

import typer

from api.cli.answers import show_json, show_table
from api.cli.asking import JsonFlag, client

app = typer.Typer()


@app.command(rich_help_panel="The service")
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
