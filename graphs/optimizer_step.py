"""One optimizer step over the micro-batches of a loader: what a training loop copies.

The gradient of a step is that of the mean loss of *all its labelled tokens*, over all rounds and ranks. How many
these are is known when the last round is there, so gradients are accumulated of the loss's sum and divided once,
before clipping. (The mean of the ranks' means is another number as soon as ranks have unequal label counts, and they
have.)

:class:`WaitingClock` measures what balancing is about: how long this rank stood still because another one had more
work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hp_nodes import DistributedDataLoader
from hp_nodes.types import BalanceReport, MicroBatch

__all__ = ["OptimizerStep", "StepResult", "WaitingClock", "evaluate"]


@dataclass(frozen=True)
class StepResult:
    """What one step did. Equal on all ranks, except the two times and what the report counts of a rank."""

    loss: float
    """Mean cross entropy, nats a labelled token, over the whole step."""
    tokens: int
    """Without padding, over all ranks."""
    label_tokens: int
    gradient_norm: float
    """Before clipping."""
    seconds: float
    data_seconds: float
    """Time this rank waited for its loader."""
    waited: tuple[float, ...]
    """Seconds that each rank waited for the others."""
    stop_requested: bool
    """Some rank was told to stop."""
    report: BalanceReport | None

    @property
    def waiting_share(self) -> float:
        """Share of the step that a rank waited for others, mean over the ranks."""
        return sum(self.waited) / len(self.waited) / self.seconds


class WaitingClock:
    """Times how long this rank waits for the slowest one, in front of each gradient reduction.

    Attached to the model's first layer: when the gradient gets there, this rank's own work of the round is all but
    done and the reduction has not begun. A barrier stands there, and the time in it is the waiting. Without it the
    same time would pass inside the reduction; the barrier itself takes about 0.2 ms.
    """

    def __init__(self, first_layer: nn.Module) -> None:
        self.armed = False
        self.seconds = 0.0
        first_layer.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._wait)  # type: ignore[no-untyped-call]

    def _wait(self, gradient: Tensor) -> None:
        if self.armed:
            started = time.perf_counter()
            dist.barrier()
            self.seconds += time.perf_counter() - started


class OptimizerStep:
    """Runs steps. ``model(**batch)`` returns the sum of the losses of the batch's labelled tokens.

    Args:
        model: wrapped by DistributedDataParallel or ``fully_shard``, both of which average gradients over the
            data-parallel ranks.
        clip: largest gradient norm; gradients above are scaled down.
        reduce_every_round: False reduces gradients in a step's last round only; where parameters are not sharded over
            the data-parallel ranks.
        peers: ranks that get each micro-batch, among which the model is split.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clock: WaitingClock,
        *,
        clip: float,
        reduce_every_round: bool = True,
        peers: int = 1,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._clock = clock
        self._clip = clip
        self._reduce_every_round = reduce_every_round
        self._peers = peers

    def __call__(
        self,
        batches: Iterator[Any],
        loader: DistributedDataLoader,
        learning_rate: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> StepResult | None:
        """The next step of ``batches``, an iterator of ``loader``; None when its epoch is over.

        ``stop`` is asked behind the last round; what one rank answers, all learn from ``stop_requested``.
        """
        started, data_seconds = time.perf_counter(), 0.0
        loss_sum, labels, tokens = 0.0, 0.0, 0.0
        self._clock.seconds = 0.0
        delivered: MicroBatch | None = None
        while delivered is None or not delivered.ends_step:
            asked = time.perf_counter()
            batch = next(batches, None)
            data_seconds += time.perf_counter() - asked
            if batch is None:
                return None
            delivered = loader.last
            assert delivered is not None
            loss_sum += self._accumulate(batch, reduce=delivered.ends_step or self._reduce_every_round)
            labels += batch["num_label_tokens"]
            tokens += delivered.num_tokens or 0
        loss_sum, labels, tokens, stops, *waited = self._over_ranks([loss_sum, labels, tokens, float(stop())])
        norm = self._update(learning_rate, int(labels) // self._peers)
        return StepResult(
            loss=loss_sum / labels,
            tokens=int(tokens) // self._peers,  # each peer has counted them
            label_tokens=int(labels) // self._peers,
            gradient_norm=norm,
            seconds=time.perf_counter() - started,
            data_seconds=data_seconds,
            waited=tuple(waited),
            stop_requested=stops > 0,
            report=delivered.report,
        )

    def _accumulate(self, batch: dict[str, Any], *, reduce: bool) -> float:
        self._clock.armed = reduce
        with reducing(self.model, reduce):
            loss: Tensor = self.model(**model_inputs(batch))
            loss.backward()  # type: ignore[no-untyped-call]
        self._clock.armed = False
        return loss.item()

    def _over_ranks(self, numbers: list[float]) -> list[float]:
        """Sums over the ranks, and behind them what each rank waited: one small reduction a step."""
        rank, size = dist.get_rank(), dist.get_world_size()
        waited = [self._clock.seconds if rank == other else 0.0 for other in range(size)]
        together = torch.tensor(numbers + waited, dtype=torch.float64)
        dist.all_reduce(together)
        values: list[float] = together.tolist()
        return values

    def _update(self, learning_rate: float, labels: int) -> float:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(dist.get_world_size() // self._peers / labels)  # the reduction divided by the ranks
        norm = clip_gradients(parameters, self._clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def clip_gradients(parameters: list[nn.Parameter], clip: float) -> float:
    """Scale gradients down to a norm of ``clip`` over all of them; returns the norm before.

    Parameters may be plain, sharded over the data-parallel ranks, split over model peers, or both: torch computes
    with tensors of one mesh at a time.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [norm_of_gradients(some) for some in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, clip, norm)
    return norm.item()


def norm_of_gradients(parameters: list[nn.Parameter]) -> Tensor:
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def model_inputs(batch: dict[str, Any]) -> dict[str, Tensor]:
    """The part of a batch that the model takes."""
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids", "cu_seq_lens")}


def reducing(model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
    """Where a forward and backward pass reduces gradients over the ranks, or leaves them on this one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)
    elif isinstance(model, DistributedDataParallel) and not reduce:
        return model.no_sync()
    return nullcontext()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DistributedDataLoader) -> float:
    """Mean loss, nats a labelled token, over one epoch of ``loader`` and all ranks."""
    totals = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        totals[0] += model(**model_inputs(batch)).item()
        totals[1] += batch["num_label_tokens"]
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])
