"""Stands in for `python -m engine serve DIR`: echoes each request, or misbehaves as its prompt says."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    folder = sys.argv[-1]
    if os.path.exists(os.path.join(folder, "broken")):
        say({"error": {"code": "invalid_model", "message": "weights are missing"}})
        sys.exit(1)
    if os.path.exists(os.path.join(folder, "dies")):
        sys.exit(1)
    say({"ready": True})
    waiting: list[str] = []
    cancelled: list[str] = []
    for line in sys.stdin:
        request = json.loads(line)
        if "cancel" in request:
            cancelled.append(request["cancel"])
            say({"id": request["cancel"], "cancelled": True})
            continue
        match request["prompt"]:
            case "die":
                os._exit(1)
            case "sleep":
                time.sleep(600)
            case "wait":
                # Answered when somebody says "go": requests are under way together.
                waiting.append(request["id"])
            case "endless":
                say({"id": request["id"], "choices": [text("and so on")]})
            case "refuse":
                say(
                    {"id": request["id"], "error": {"code": "context_length_exceeded", "message": "long", "param": "p"}}
                )
            case "who was cancelled?":
                answer(request["id"], " ".join(cancelled))
            case prompt:
                for other in waiting if prompt == "go" else ():
                    answer(other, "at last")
                say({"id": request["id"], "choices": [text(f"{prompt} from")]})
                answer(request["id"], f" {os.getpid()} with {sorted(request)}")


def text(said: str) -> dict[str, object]:
    return {"index": 0, "text": said, "finish_reason": None}


def answer(name: str, said: str) -> None:
    choice = {"index": 0, "text": said, "finish_reason": "stop"}
    say({"id": name, "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})


def say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
