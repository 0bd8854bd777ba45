"""One way between neighbouring ranks of a pipeline: hidden states go on, gradients back, and the sender does not wait.

Messages have no names: both sides know the order (`engine.plan.turns`). What goes on, what comes back, and what goes
around from the last rank to the first each has a process group of its own, so that no message waits behind another's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.mesh import Mesh
from engine.stopwatch import Stopwatch


@dataclass(frozen=True)
class Message:
    """What is under way, or was lately."""

    work: dist.Work
    content: Tensor
    """Lives until it has been sent; received, it is whole only after `wait`."""
    stopwatch: Stopwatch

    def wait(self) -> Tensor:
        """The content, once it is through. Waiting for a neighbour is the pipeline's bubble."""
        with self.stopwatch.span("bubble"):
            self.work.wait()
        return self.content


class Channel:
    """From this rank to the next, and to this rank from the one before; `forward` False: the other way round."""

    def __init__(self, mesh: Mesh, *, forward: bool) -> None:
        """Every rank of the pipeline calls this together."""
        size, rank = mesh.size("pipeline"), mesh.rank("pipeline")
        name, step = ("forward", 1) if forward else ("backward", -1)
        begin, end = (0, size - 1) if forward else (size - 1, 0)
        self.device, self.stopwatch = mesh.device, mesh.stopwatch
        self.target, self.source = (rank + step) % size, (rank - step) % size
        self._sends = mesh.group(f"{name} around" if rank == end else name)
        self._receives = mesh.group(f"{name} around" if rank == begin else name)
        self._sent: deque[Message] = deque()
        self._meet(begins=rank == begin)

    def send(self, x: Tensor, *, room: int) -> None:
        """Begin to send `x`, which must not change any more. Waits where `room` messages before are not through yet."""
        self._wait_for_all_but(room - 1)
        x = x.contiguous()
        work = dist.isend(x, group=self._sends, group_dst=self.target)
        assert work is not None
        self._sent.append(Message(work, x, self.stopwatch))

    def receive(self, size: tuple[int, ...], dtype: torch.dtype) -> Message:
        """Begin to receive the next message, whose size the receiver knows."""
        x = torch.empty(size, dtype=dtype, device=self.device)
        work = dist.irecv(x, group=self._receives, group_src=self.source)
        assert work is not None
        return Message(work, x, self.stopwatch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, last: int) -> None:
        while len(self._sent) > last:
            self._sent.popleft().wait()

    def _meet(self, *, begins: bool) -> None:
        """Pass a first message once around. NCCL connects two ranks when both first talk, and holds up each until then:
        that is done here, one pair after another, for in a step each would wait for a message that depends on its own.
        """
        if begins:
            self._greet()
        if self._receives is not None:
            self.receive((1,), torch.float32).wait()
        if not begins:
            self._greet()

    def _greet(self) -> None:
        if self._sends is not None:
            self.send(torch.zeros(1, device=self.device), room=1)
            self.finish()
