"""Train a small language model on real text, with every rank doing the same amount of work. Copy this program.

    torchrun --standalone --nproc-per-node 2 -m graphs.pretrain --steps 200
    torchrun --standalone --nproc-per-node 2 -m graphs.pretrain --steps 200 --checkpoint runs/a --resume
    torchrun --standalone --nproc-per-node 2 -m graphs.pretrain --compare 3
    torchrun --standalone --nproc-per-node 4 -m graphs.pretrain --mode metadata --tp 2

From top to bottom it is what any training program of this kind needs: options, data, model, the loop. The step itself
is in optimizer_step.py, checkpoints in checkpoint.py, the text in text_records.py, its ways of loading in
data_modes.py; each can be taken alone.

Promises: the run that was killed and resumed has the losses of the one that was not, bit by bit, on the same number of
ranks. SIGINT and SIGTERM end a run after the update of the step in progress, on every rank, with a checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from graphs.checkpoint import CheckpointDirectory
from graphs.comparison import BALANCED, SAMPLED, compare, measure_costs
from graphs.data_modes import MODES, make_loader, refusals, split_records
from graphs.optimizer_step import OptimizerStep, StepResult, WaitingClock, evaluate
from graphs.step_report import RunReport
from graphs.text_records import RecordFile, open_or_pack
from graphs.tokenizer import load_tokenizer
from graphs.transformer import Transformer, TransformerConfig, split_over_peers
from hp_nodes import DistributedDataLoader


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m graphs.pretrain", description=__doc__.split("\n", 1)[0])
    data = parser.add_argument_group("data")
    data.add_argument("--text", type=Path, help="directory of .py, .txt and .rst files (default: the standard library)")
    data.add_argument("--tokenizer", type=Path, help="tokenizer.json, needs the extra 'demo' (default: UTF-8 bytes)")
    data.add_argument("--records", type=Path, default=Path("runs/text.records"), help="where the packed text is kept")
    data.add_argument("--mode", choices=MODES, default="repack", help="how it is loaded, see data_modes.py")
    data.add_argument("--seq-len", type=int, default=8192)
    data.add_argument("--fill", type=float, default=0.8, help="how full the rows of the record file are made")
    data.add_argument("--workers", type=int, default=0, help="reader processes of each rank")
    data.add_argument("--eval-records", type=int, default=32, help="records held out for evaluation, about")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--steps", type=int, default=100, help="optimizer steps of the whole run")
    steps.add_argument("--global-batch-size", type=int, default=8, help="rows of a step, over all ranks and rounds")
    steps.add_argument("--local-batch-size", type=int, default=1, help="rows of a micro-batch")
    steps.add_argument("--window", type=int, help="rounds planned together (default: the whole step)")
    steps.add_argument("--no-balance", action="store_true", help="leave every row where the sampler put it")
    steps.add_argument("--no-sync", action="store_true", help="reduce gradients once a step; plans for the makespan")
    steps.add_argument("--fsdp", action="store_true", help="shard the model with fully_shard instead of DDP")
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--heads", type=int, default=2)
    model.add_argument("--tp", type=int, default=1, help="tensor-parallel peers, which get the same micro-batch")
    model.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    model.add_argument("--learning-rate", type=float, default=3e-3)
    model.add_argument("--warm-up", type=int, default=10, help="steps of linear warm-up; cosine to a tenth follows")
    model.add_argument("--weight-decay", type=float, default=0.1)
    model.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    model.add_argument("--seed", type=int, default=1234)
    run = parser.add_argument_group("run")
    run.add_argument("--checkpoint", type=Path, help="directory of checkpoints")
    run.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    run.add_argument("--keep", type=int, default=3, help="checkpoints that stay")
    run.add_argument(
        "--resume", action="store_true", help="continue from the newest complete checkpoint, if there is one"
    )
    run.add_argument("--eval-every", type=int, default=0, metavar="STEPS", help="0: never")
    # torchrun takes --log for the beginning of an option of its own on some versions of Python.
    run.add_argument("--log-file", "--log", type=Path, help="JSON lines; a resumed run appends")
    run.add_argument(
        "--compare", type=int, default=0, metavar="BLOCKS", help="measure with and without balancing, and end"
    )
    run.add_argument("--block-steps", type=int, default=4, help="steps of a block of --compare")
    options = parser.parse_args(arguments)
    problems = refusals(options.mode, tp=options.tp, window=options.window, workers=options.workers)
    problems += tensor_parallel_problems(options)
    if options.resume and options.checkpoint is None:
        problems.append("--resume needs --checkpoint DIR, the directory to resume from")
    if options.fsdp and options.no_sync:
        problems.append(
            "--no-sync with --fsdp: sharded parameters are gathered in every round, so ranks meet there anyway"
        )
    if problems:
        parser.error("; ".join(problems))
    return options


def tensor_parallel_problems(options: argparse.Namespace) -> list[str]:
    """Why ``--tp`` does not go with the model, or with the processes that torchrun has started."""
    tp, ranks = options.tp, int(os.environ.get("WORLD_SIZE", "1"))
    if tp < 1:
        return [f"--tp {tp}; accepted: a number of ranks, at least 1"]
    problems = []
    if ranks % tp:
        problems.append(f"--tp {tp} with {ranks} process{'es' if ranks > 1 else ''}; accepted: a multiple of {tp}")
    try:
        undivided = TransformerConfig(1, options.hidden, options.layers, options.heads).undivided(tp)
    except ValueError as error:
        return [*problems, str(error)]
    if undivided:
        problems.append(f"--tp {tp} with {' and '.join(undivided)}; accepted: a number that divides both")
    return problems


def start_ranks(options: argparse.Namespace) -> DeviceMesh:
    """One process a rank, as torchrun starts them; a single rank without it. One thread each makes sums repeatable."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    ranks = dist.get_world_size() // options.tp
    if options.tp == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    if options.fsdp:
        return init_device_mesh("cpu", (ranks, options.tp), mesh_dim_names=("dp", "tp"))
    # DistributedDataParallel takes no split parameters; fully_shard over shards of one rank only reduces gradients.
    return init_device_mesh("cpu", (ranks, 1, options.tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def open_records(options: argparse.Namespace, report: RunReport) -> RecordFile:
    """The packed text; the first rank packs it where that is needed, the others wait and map the same file."""
    tokenizer = load_tokenizer(options.tokenizer)
    tenths = 0

    def progress(done: int, total: int) -> None:
        nonlocal tenths
        if done * 10 // total > tenths:
            tenths = done * 10 // total
            report.say(f"packing text: {tenths * 10} % of {total / 1e6:.1f} MB")

    def packed() -> RecordFile:
        return open_or_pack(
            options.records,
            root=options.text,
            tokenizer=tokenizer,
            seq_len=options.seq_len,
            fill=options.fill,
            progress=progress,
        )

    if dist.get_rank() == 0:
        packed()
    dist.barrier()
    return packed()


def make_model(vocabulary: int, mesh: DeviceMesh, options: argparse.Namespace) -> Transformer:
    """The same weights on every number of ranks, split over model peers where there are any."""
    torch.manual_seed(options.seed)
    config = TransformerConfig(vocabulary, options.hidden, options.layers, options.heads)
    model = Transformer(config).to(getattr(torch, options.dtype))
    if options.tp > 1:
        split_over_peers(model, mesh["tp"])
    return model


def make_step(model: Transformer, mesh: DeviceMesh, options: argparse.Namespace) -> OptimizerStep:
    """The model on all ranks, its optimizer, and the step over both."""
    clock = WaitingClock(model.embedding)
    wrapped: nn.Module = model
    # One unit, as the model is small. Give each block a fully_shard of its own when the model is not.
    if options.fsdp:
        fully_shard(model, mesh=mesh["dp"])
    elif options.tp > 1:
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    else:
        wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        wrapped.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
    )
    every_round = not options.no_sync
    return OptimizerStep(wrapped, optimizer, clock, clip=options.clip, reduce_every_round=every_round, peers=options.tp)


def learning_rate_at(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth at the last step (Loshchilov & Hutter 2017, equation 5)."""
    if step < options.warm_up:
        return float(options.learning_rate * (step + 1) / options.warm_up)
    progress = (step - options.warm_up) / max(1, options.steps - options.warm_up)
    return float(options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))))


class StopSignal:
    """Set by SIGINT and SIGTERM. The ranks agree within the next step, so all stop behind the same one."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True


def train(
    step: OptimizerStep,
    loader: DistributedDataLoader,
    evaluation: DistributedDataLoader | None,
    options: argparse.Namespace,
    report: RunReport,
) -> None:
    """The loop: one step after the other, across epochs, until all are done or a signal asks to stop."""
    stop = StopSignal()
    checkpoints, done = None, 0
    if options.checkpoint is not None:
        checkpoints = CheckpointDirectory(options.checkpoint, keep=options.keep, say=report.say)
    if options.resume and checkpoints is not None:
        done = resume(checkpoints, step, loader, report)
    saved = done
    for done, result in steps_of(step, loader, stop, options, saved):
        report.step(done, result, learning_rate=learning_rate_at(done - 1, options))
        if evaluation is not None and done % options.eval_every == 0:
            loss = evaluate(step.model, evaluation)
            report.say(f"step {done}: evaluation loss {loss:.4f}")
            report.event("evaluation", step=done, loss=loss)
        due = done % options.checkpoint_every == 0 or done == options.steps or result.stop_requested
        if checkpoints is not None and due and done > saved:
            checkpoints.save(done, step.model, step.optimizer, {"loader": loader.state_dict()})
            report.event("checkpoint", step=done)
            saved = done
        if result.stop_requested:
            report.say(f"stopped by a signal after step {done}")
            break


def steps_of(
    step: OptimizerStep, loader: DistributedDataLoader, stop: StopSignal, options: argparse.Namespace, done: int
) -> Iterator[tuple[int, StepResult]]:
    """The steps that are left, epoch after epoch, each with the number of steps done then."""
    while done < options.steps:
        batches = iter(loader)
        while done < options.steps:
            result = step(batches, loader, learning_rate_at(done, options), lambda: stop.received)
            if result is None:
                break
            done += 1
            yield done, result


def resume(
    checkpoints: CheckpointDirectory, step: OptimizerStep, loader: DistributedDataLoader, report: RunReport
) -> int:
    """Load the newest complete checkpoint; how many steps it had done, 0 when there is none."""
    found = checkpoints.load_latest(step.model, step.optimizer)
    if found is None:
        report.say(f"no complete checkpoint in {checkpoints.path}: starting from the beginning")
        return 0
    done, values = found
    loader.load_state_dict(values["loader"])
    report.say(f"resumed behind step {done}")
    report.event("resumed", step=done)
    return done


def run_comparison(
    step: OptimizerStep,
    costs: Any,
    loaders: dict[str, DistributedDataLoader],
    options: argparse.Namespace,
    report: RunReport,
) -> None:
    def record(number: int, way: str, result: StepResult) -> None:
        report.step(number, result, way=way)

    comparison = compare(
        step,
        loaders,
        costs,
        blocks=options.compare,
        block_steps=options.block_steps,
        learning_rate=options.learning_rate / 10,
        record=record,
    )
    if comparison is not None:
        report.say(comparison.table())
        report.event("comparison", **asdict(comparison))


def run(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    leads = dist.get_rank() == 0
    total = options.compare * options.block_steps if options.compare else options.steps
    with ExitStack() as opened:
        report = opened.enter_context(RunReport(total, options.log_file, enabled=leads))
        records = open_records(options, report)
        training, evaluated = split_records(len(records), options.eval_records)
        model = make_model(records.vocabulary, mesh, options)
        costs = measure_costs(model, options.seq_len, records.vocabulary) if options.compare else None
        step = make_step(model, mesh, options)
        report.event("start", pids=pids_of_ranks(), options=vars(options), time=time.time())
        loader = opened.enter_context(make_loader(records, training, mesh, options, balance=not options.no_balance))
        if options.compare:
            sampled = opened.enter_context(make_loader(records, training, mesh, options, balance=False))
            run_comparison(step, costs, {BALANCED: loader, SAMPLED: sampled}, options, report)
            return
        evaluation = None
        if options.eval_every:
            evaluation = opened.enter_context(make_loader(records, evaluated, mesh, options, order="sequential"))
        train(step, loader, evaluation, options, report)
        report.event("end", time=time.time())


def pids_of_ranks() -> list[int]:
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[dist.get_rank()] = os.getpid()
    dist.all_reduce(pids)
    return [int(pid) for pid in pids]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    mesh = start_ranks(options)
    try:
        run(options, mesh)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
