"""Processes that compute on one text together, and the bytes that they send each other."""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd


class Ranks:
    """A process group. All of its processes must make the same calls, in the same order.

    sent: bytes that this process has sent, if n processes gather in a ring, (n−1) times what each has, and reduce in
    one, 2·(n−1)/n times the result.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """group: the processes; None: all that were initialised."""
        self.group = cast(ProcessGroup, group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent = 0.0

    def gathered(self, x: Tensor) -> list[Tensor]:
        """The tensors of all processes, which have the same shape."""
        self.sent += (self.size - 1) * x.nbytes
        every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(every, x.contiguous(), group=self.group)
        return every

    def total(self, x: Tensor) -> Tensor:
        """The sum over the processes."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over the processes."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def exchanged(self, x: Tensor) -> Tensor:
        """x: (n, …), one part for each process. Returns the parts for this one, in the order of the processes.

        The gradient is exchanged in the same way.
        """
        self.sent += (self.size - 1) / self.size * x.nbytes
        received = all_to_all_single_autograd(x.contiguous(), None, None, self.group)
        return received.wait() if isinstance(received, AsyncCollectiveTensor) else received

    def passed_on(self, x: Tensor) -> Tensor:
        """The tensor of the process before; this one's goes to the next (a step of ring attention)."""
        self.sent += x.nbytes
        received = torch.empty_like(x)
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        operations = [
            dist.P2POp(dist.isend, x.contiguous(), dist.get_global_rank(self.group, after), self.group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(self.group, before), self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def _reduced(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        self.sent += 2 * (self.size - 1) / self.size * x.nbytes
        reduced = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, how, group=self.group)
        return reduced
