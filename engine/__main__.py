"""The engine's command line, `python -m engine COMMAND`: each command is a module of its own."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from engine.data.format import Format

CHILD_BYTES = 8 * 2**30
"""Of address space, most of which is never touched."""


def train(arguments: argparse.Namespace) -> int:
    from engine import rank

    return rank.main(arguments.run_file)


def launch(arguments: argparse.Namespace) -> int:
    from engine import launch

    return launch.main(
        arguments.run_file,
        ranks=arguments.ranks,
        threads=arguments.threads,
        heartbeat_timeout=arguments.heartbeat_timeout,
        nice=arguments.nice,
    )


def measure(arguments: argparse.Namespace) -> int:
    from engine import measure

    try:
        return measure.main(arguments.run_file, as_json=arguments.json)
    except ValueError as error:
        return refused(error)


def evaluate(arguments: argparse.Namespace) -> int:
    from engine import evaluate

    asked = {name: getattr(arguments, name) for name in ("checkpoint", "model", "ranks", "documents")}
    try:
        return evaluate.main(arguments.run_file, as_json=arguments.json, **asked)
    except (ValueError, OSError) as error:
        # A disk that is full or takes no writes is no fault of ours either.
        return refused(error)


def plan(arguments: argparse.Namespace) -> int:
    from engine.plan import told

    asked = {name: getattr(arguments, name) for name in ("device", "rates", "memory_gib")}
    try:
        return told.main(arguments.run_file, as_json=arguments.json, **asked)
    except ValueError as error:
        return refused(error)


def calibrate(arguments: argparse.Namespace) -> int:
    from engine.launch import ENVIRONMENT, environment

    if not os.environ.keys() >= ENVIRONMENT.keys():
        # As ranks run: what they ask of the allocator, it reads when a process starts.
        threads = {} if arguments.threads is None else {"OMP_NUM_THREADS": str(arguments.threads)}
        os.execve(sys.executable, sys.orig_argv, environment(os.environ) | threads)
    from engine import calibrate

    try:
        return calibrate.main(arguments.device, threads=arguments.threads)
    except ValueError as error:
        return refused(error)


def serve(arguments: argparse.Namespace) -> int:
    from engine.mesh import device_named
    from engine.serve import serve

    try:
        serve(arguments.model, sys.stdin, sys.stdout, device=device_named(arguments.device))
    except ValueError as error:
        return refused(error)
    return 0


def examine(arguments: argparse.Namespace) -> int:
    import json
    import resource

    from engine.data.examine import Reading, preview, survey
    from engine.data.format import READ_BYTES
    from engine.tokenizer import Tokenizer

    # A template is somebody's program: whatever it does, it does not take the host with it.
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    reading = Reading(arguments.format, arguments.seq_len, arguments.overlong, arguments.packing, arguments.max_seq_len)
    chunks = iter(partial(os.read, sys.stdin.fileno(), READ_BYTES), b"")
    try:
        tokenizer = Tokenizer.load(arguments.model, template=arguments.template)
        if arguments.preview is None:
            told: object = survey(tokenizer, chunks, reading, seconds=arguments.seconds)
        else:
            told = preview(tokenizer, chunks, reading, first_line=arguments.first_line, limit=arguments.preview)
    except ValueError as error:
        return refused(error)
    except MemoryError:
        return refused(ValueError("the base's chat template takes more memory than there is; choose another base"))
    sys.stdout.write(f"{json.dumps(told, ensure_ascii=False)}\n")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    import json
    import resource

    from engine.data.footer import check_size
    from engine.data.format import InvalidData
    from engine.data.tokens import Facts, inspect

    # The file is mapped, and what is mapped counts; the rest is what a damaged file may make a library ask for.
    most = CHILD_BYTES + os.fstat(sys.stdin.fileno()).st_size
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        check_size(sys.stdin.buffer, most_ids=arguments.most_ids)
        facts = inspect(sys.stdin.buffer)
    except InvalidData as problem:
        facts = Facts("parquet", errors=list(problem.findings))
    sys.stdout.write(f"{json.dumps(facts.to_dict())}\n")
    return 0


def tokenize(arguments: argparse.Namespace) -> int:
    from engine.data.tokenized import tokenized
    from engine.data.tokens import write
    from engine.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(arguments.model)
        documents = tokenized(tokenizer, arguments.data, arguments.format)
        count = write(arguments.into, documents, vocab_size=tokenizer.vocab_size, source=arguments.data)
    except ValueError as error:
        return refused(error)
    sys.stdout.write(f"{count} documents in {arguments.into}\n")
    return 0


def generate(arguments: argparse.Namespace) -> int:
    from engine.generate import Sampler
    from engine.mesh import device_named
    from engine.sampling import Sampling

    try:
        sampler = Sampler.load(arguments.model, device_named(arguments.device))
        asked = {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
        completion = sampler.complete(sampler.tokenizer.prompt(arguments.prompt), Sampling(**asked))
    except ValueError as error:
        return refused(error)
    sys.stdout.write(f"{completion.text}\n")
    return 0


def gguf(arguments: argparse.Namespace) -> int:
    from engine import gguf_file

    try:
        gguf_file.write(arguments.model, arguments.out)
        count, wrong = gguf_file.differences(arguments.out, arguments.model)
    except ValueError as error:
        return refused(error)
    if wrong:
        return refused(ValueError(f"read back, {arguments.out} differs from the model in {', '.join(wrong)}"))
    sys.stdout.write(f"{count} tensors in {arguments.out}, read back and compared\n")
    return 0


def export(arguments: argparse.Namespace) -> int:
    from engine import assemble

    kind: assemble.Kind = "checkpoint" if arguments.adapter is None else "adapter"
    try:
        assemble.main(arguments.run_file, kind, arguments.checkpoint or arguments.adapter, arguments.into)
    except ValueError as error:
        return refused(error)
    return 0


def refused(error: ValueError | OSError) -> int:
    """Say in words why nothing came of it; the exit code."""
    sys.stderr.write(f"{error}\n")
    return 1


def parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    root = argparse.ArgumentParser(prog="python -m engine", description="Train a model from a run.json.")
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(run=run)
        return sub

    def run_file(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("run_file", type=existing, metavar="RUN_JSON", help="the run; its folder is worked in")

    run_file(command("train", train, "Train as one rank: alone, or under torchrun or `launch`."))
    sub = command("launch", launch, "Start the ranks of a run on this host, and answer for them.")
    run_file(sub)
    sub.add_argument("--ranks", type=positive, required=True, help="processes to start")
    sub.add_argument("--threads", type=positive, help="threads of each rank; default: its share of the cores")
    sub.add_argument(
        "--heartbeat-timeout",
        type=float,
        metavar="SECONDS",
        help="expect a byte on stdin at least this often, and kill everything when it stays away",
    )
    sub.add_argument(
        "--nice", type=niceness, default=0, metavar="0..19", help="how much ranks give way to others; default: 0"
    )

    sub = command(
        "measure", measure, "Say what each layer keeps for its backward pass, beside what the plan says it does."
    )
    run_file(sub)
    sub.add_argument("--json", action="store_true", help="one JSON array of ranks instead of a table")

    sub = command(
        "eval",
        evaluate,
        "Say what a run's base, checkpoint or another model makes of what it holds out: loss, perplexity.",
    )
    run_file(sub)
    what = sub.add_mutually_exclusive_group()
    what.add_argument("--checkpoint", type=folder, metavar="DIR", help="a checkpoint of the run, of any layout")
    what.add_argument("--model", type=folder, metavar="DIR", help="a folder in Hugging Face layout, with its tokenizer")
    sub.add_argument(
        "--ranks", type=positive, metavar="N", help="share the rows over N ranks, instead of the run's layout"
    )
    sub.add_argument("--documents", action="store_true", help="also of each document, by file and line")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of lines")

    sub = command("plan", plan, "Say what a run needs and takes, which layouts would do, and why others would not.")
    run_file(sub)
    rates = sub.add_mutually_exclusive_group()
    rates.add_argument("--device", metavar="NAME", help="what it would run on, such as A100 or H200, eight to a node")
    rates.add_argument("--rates", type=existing, metavar="FILE", help="what `calibrate` wrote, instead of a data sheet")
    sub.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a rank; default: the device's")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of lines")

    sub = command(
        "calibrate", calibrate, "Measure what a device here does, as JSON: matrix products, copies, launches."
    )
    sub.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: cpu")
    sub.add_argument("--threads", type=positive, help="threads of a slot; default: all cores")

    sub = command("export", export, "Make a model folder of one of a run's checkpoints, or of its adapter.")
    run_file(sub)
    part = sub.add_mutually_exclusive_group(required=True)
    part.add_argument("--checkpoint", type=folder, metavar="DIR", help="a checkpoint of the run, of any layout")
    part.add_argument("--adapter", type=folder, metavar="DIR", help="the run's adapter, as it exported it")
    sub.add_argument("--into", type=Path, required=True, metavar="DIR", help="where the model is written")

    def model(sub: argparse.ArgumentParser, *, device: bool = True) -> None:
        sub.add_argument("model", type=folder, metavar="MODEL_DIR", help="a folder in Hugging Face layout")
        if not device:
            return
        sub.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: cpu")

    model(
        command(
            "serve", serve, "Load a model, then answer requests, a JSON object a line, on stdin with such on stdout."
        )
    )
    sub = command(
        "examine",
        examine,
        "Say how a model would read the training file on stdin: what is kept, cut, left out, or how it looks.",
    )
    model(sub, device=False)
    # Ids stand as they are, whatever reads them: `inspect` says all of them.
    sub.add_argument("--format", choices=[each for each in get_args(Format) if each != "tokens"], required=True)
    sub.add_argument("--seq-len", type=positive, default=1024, help="tokens in a row")
    sub.add_argument("--max-seq-len", type=positive, help="tokens that the model takes")
    sub.add_argument("--overlong", choices=("error", "drop", "truncate"), default="error")
    sub.add_argument("--template", choices=("chatml", "plain"), help="instead of the model's own")
    sub.add_argument("--no-packing", dest="packing", action="store_false", help="each example has a row of its own")
    sub.add_argument("--seconds", type=float, default=3600.0, help="how long it may read")
    sub.add_argument("--preview", type=positive, metavar="N", help="show so many examples with ids, text and mask")
    sub.add_argument("--first-line", type=positive, default=1, help="show examples from this line on")
    sub = command(
        "inspect", inspect, "Say what a file of ids on stdin holds: Parquet, or a tar of Megatron's two files."
    )
    sub.add_argument("--most-ids", type=int, metavar="N", help="refuse a file of more, without unpacking it")
    sub = command("tokenize", tokenize, "Write a training file as ids: Parquet, or Megatron's .idx and .bin.")
    model(sub, device=False)
    sub.add_argument("data", type=existing, metavar="DATA", help="the training file")
    sub.add_argument("--format", choices=get_args(Format), required=True)
    sub.add_argument("--into", type=Path, required=True, metavar="FILE", help="ends in .parquet, or in .idx")
    sub = command("gguf", gguf, "Write a model folder as one GGUF file, unquantised, and compare what was written.")
    model(sub, device=False)
    sub.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    sub = command("generate", generate, "Continue a prompt once.")
    model(sub)
    sub.add_argument("--prompt", required=True)
    sub.add_argument("--max-tokens", type=positive, default=128)
    sub.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token each time")
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--seed", type=int, default=0)
    return root


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def existing(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def niceness(text: str) -> int:
    if not text.isdecimal() or int(text) > 19:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 (gives way to nobody) to 19 (to all)")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    ended = main()
    logging.shutdown()
    sys.stdout.flush()
    # Taking process groups apart waits for ranks that may be gone.
    os._exit(ended)
