"""`python -m api.cli`: the `trainshed` command, wherever it is installed."""

from api.cli.command import main

main()
