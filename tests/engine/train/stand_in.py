"""A rank that does as `script.json` tells it, without torch: `{"0": "train", "1": "raise"}` is a script by rank.

It says that it is up by a line in the fifo beside it, which ends with the last rank, and waits for SIGUSR1. Most
scripts need nothing of the engine, and it is imported where one does, so that ranks are up at once.
"""

import json
import os
import signal
import sys
from pathlib import Path

run_file = Path(sys.argv[1])
rank = int(os.environ["RANK"])
script = json.loads((run_file.parent / "script.json").read_text())[str(rank)]


def end(event) -> None:
    from engine.emit import Emitter

    if rank == 0:
        with Emitter(run_file.parent / "events.jsonl") as emitter:
            emitter.emit(event)
    os.write(fifo, b"ended\n")


def stop(*_: object) -> None:
    from engine.events import Stopped

    end(Stopped(step=7))
    os._exit(0)


def stand(*, waiting: bool) -> None:
    """Say where this rank is, then go nowhere; asked for its stacks it answers."""
    from engine import stacks
    from engine.whereabouts import Whereabouts, path_of

    stacks.answer()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    whereabouts = Whereabouts(path_of(run_file.parent, rank))
    whereabouts.go_on("step", step=3)
    if waiting:
        whereabouts.wait()
    if script == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
fifo = os.open(run_file.parent / "up", os.O_WRONLY)
facts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "ENGINE_NICE")}
os.write(fifo, (json.dumps(facts | {"pid": os.getpid(), "cwd": os.getcwd()}) + "\n").encode())
signal.sigwait({signal.SIGUSR1})
match script:
    case "finish":
        from engine.events import Finished

        end(Finished(step=1, tokens=1))
    case "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    case "raise":
        from engine.events import Failed
        from engine.failure import hand_over

        hand_over(run_file.parent, Failed(code="invalid_data", message="line 3 is not JSON", rank=rank))
        sys.exit(1)
    case "leave":
        sys.exit(3)
    case "full":
        from engine.events import NO_ROOM

        sys.exit(NO_ROOM)
    case "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(fifo, b"deaf\n")
        while True:
            signal.pause()
    case "wait" | "freeze":
        stand(waiting=True)
    case "stand":
        stand(waiting=False)
    case "train":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while True:
            signal.pause()
