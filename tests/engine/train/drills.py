"""Ranks that save and are killed at a chosen moment, and what is then found on disk. A process of its own, which forks.

`python -m tests.engine.train.drills FOLDER every|random SEEDS` prints a line of JSON for each drill. A moment is the
nth time that a rank is about to touch the disk: before each is opened, synced, renamed or removed, and amid each file.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

from engine import checkpoint, tensorfile
from engine.checkpoint import Facts
from engine.config import Parallel
from engine.mesh import alone, build
from engine.saving import Saver, Stage
from tests.engine.train.toy import TRAINING, backward, gradients, ours

STEPS = 3
"""The first is published before anything is killed; the others are saved while the next is taken."""
DEADLINE = 60.0
CPU = torch.device("cpu")


def touches(folder, at):
    """Call `at` whenever this process is about to touch the disk in `folder`."""

    def heard(event, args):
        if event in {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"} and str(folder) in str(args[0]):
            at(f"{event} {Path(args[0]).name}")

    def before(function, name):
        def told(*args):
            at(name)
            return function(*args)

        return told

    os.fsync = before(os.fsync, "fsync")
    tensorfile._bytes_of = before(tensorfile._bytes_of, "write")
    sys.addaudithook(heard)


def live(folder, told, *, rank, ranks, meeting, keep, kill_at):
    """Train and save as one rank; die before touch number `kill_at` of the disk after the first checkpoint."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), ENGINE_RENDEZVOUS=meeting)
    mesh = alone(CPU) if ranks == 1 else build(Parallel(data=ranks))
    parameters, optimizer = ours(mesh)
    touched, armed = count(), [False]

    def at(what):
        if armed[0] and next(touched) == kill_at:
            os.write(told, f"killed {what}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def saved(checkpoint):
        if rank == 0:
            os.write(told, f"saved {checkpoint.facts.step}\n".encode())

    touches(folder, at)
    with Saver(folder, optimizer, keep=keep, saved=saved) as saver:
        for step in range(1, STEPS + 1):
            stages = torch.zeros(ranks, dtype=torch.int64)
            stages[rank] = saver.stage
            if ranks > 1:
                dist.all_reduce(stages)
            saver.advance([Stage(stage) for stage in stages.tolist()])
            for part in range(2) if ranks == 1 else [rank]:
                backward(parameters, gradients(step, part))
            optimizer.update(lr=TRAINING.lr, norm=optimizer.sum_gradients())
            saver.begin(Facts(step, 0, 0, 0))
            if step == 1:
                saver.wait()
                armed[0] = True
        saver.wait()
    os.write(told, f"touched-{rank} {next(touched)}\n".encode())


def look(folder, reference, told):
    """Every checkpoint that has its name is whole and has the state of its step; the next save leaves nothing else."""
    newest = max(folder.glob("step-*"))
    for path in folder.glob("step-*"):
        checkpoint.verify(path)
        assert states_of(path) == states_of(reference / path.name), path.name
    _, optimizer = ours(alone(CPU))
    facts = checkpoint.load(newest, optimizer, base=None)
    with Saver(folder, optimizer, keep=2) as saver:
        saver.begin(Facts(9, 0, 0, 0))
        saver.wait()
    names = sorted(path.name for path in folder.iterdir())
    assert names == [newest.name, "step-00000009"], names
    os.write(told, f"found {facts.step}\n".encode())


def states_of(path):
    """Everything that a fresh optimizer has after loading a checkpoint."""
    _, optimizer = ours(alone(CPU))
    facts = checkpoint.load(path, optimizer, base=None)
    states = [(p.parameter, key, x.tolist()) for p in optimizer.pieces() for key, x in p.tensors.items()]
    return facts, optimizer.steps, states


def forked(*lives):
    """Run each of `lives` in a child, given where to tell; what they told, and how each ended."""
    reader, writer = os.pipe()
    children = []
    for life in lives:
        if (child := os.fork()) == 0:
            code = 1
            try:
                life(writer)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(writer)
    deadline = time.monotonic() + DEADLINE
    codes = []
    for child in children:
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        codes.append(os.waitstatus_to_exitcode(ended[1]))
    with os.fdopen(reader) as said:
        return [line.split(" ", 1) for line in said.read().splitlines()], codes


def run(folder, *, ranks, keep=2, kills=None):
    """Let each rank live, until its touch of the disk in `kills`; what they told, and how each ended."""
    folder.mkdir()
    meeting = (folder.parent / f"{folder.name}.meeting").as_uri()
    shared = {"ranks": ranks, "meeting": meeting, "keep": keep}
    lives = [partial(live, folder, rank=rank, kill_at=(kills or {}).get(rank), **shared) for rank in range(ranks)]
    return forked(*lives)


def main():
    folder, how, seeds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    ranks = 1 if how == "every" else 2
    reference = folder / "reference"
    run(reference, ranks=ranks, keep=STEPS)
    told = dict(run(folder / "counted", ranks=ranks)[0])
    touches_of = [int(told[f"touched-{rank}"]) for rank in range(ranks)]
    random = Random(seeds)
    for number in range(touches_of[0] if how == "every" else seeds):
        victims = [0] if how == "every" else random.choice([[0], [1], [0, 1]])
        kills = {rank: number if how == "every" else random.randrange(touches_of[rank]) for rank in victims}
        told, codes = run(folder / str(number), ranks=ranks, kills=kills)
        found, (looked,) = forked(partial(look, folder / str(number), reference))
        sys.stdout.write(json.dumps({"kills": kills, "told": told, "codes": codes, "found": found, "looked": looked}))
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
