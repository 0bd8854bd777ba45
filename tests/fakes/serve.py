"""Stands in for `python -m engine serve DIR`: echoes each request, or misbehaves as its prompt says."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    folder = sys.argv[-1]
    if os.path.exists(os.path.join(folder, "broken")):
        sys.exit("weights are missing")
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        match request["prompt"]:
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(600)
        say({"id": request["id"], "text": f"{request['prompt']} from {os.getpid()} with {sorted(request)}"})


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
