# SPDX-License-Identifier: Apache-2.0
"""Train a small language model on real text, fully sharded.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py

By default a GPT of 10.7 million parameters learns the Python standard library's own source, byte by
byte. Two lines make it sharded: `fully_shard` and `ShardedAdamW`, in `build`; the rest would be the
same without them. It runs on CPUs (over shared memory; `--comm process_group` takes gloo) and on
GPUs (one process for each). `--baseline ddp` or `none` trains the same without sharding, with the
same losses.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from lm import baselines, report
from lm.model import GPT, Block, GPTConfig
from lm.options import Options, parse
from lm.sample import generate
from lm.training import Training
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from fsdp_kernels import ShardedAdamW, checkpoint, fully_shard, record_schedule


def main() -> None:
    """Do what the command line says, together with the other processes."""
    options = parse()
    device = join_processes()
    try:
        run(options, device)
    finally:
        dist.destroy_process_group()


def run(options: Options, device: torch.device) -> None:
    """Train, and end with one line of JSON."""
    training = prepare(options, device)
    plan = introduce(training)
    result = train(training)
    conclude(training, plan, result)


def prepare(options: Options, device: torch.device) -> Training:
    """Get everything ready; the user's mistakes show here and end the program with a sentence."""
    try:
        check(options)
        options.out.mkdir(parents=True, exist_ok=True)
        model, optimizer, checkpoints = build(options, device)
        training = Training(options, device, model, optimizer, checkpoints)
        if options.resume:
            training.resume()
    except (ValueError, OSError) as error:
        sys.exit(f"train_lm.py: {error}")
    return training


def build(
    options: Options, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, ModuleType]:
    """Make the model, its optimizer, and choose what saves them."""
    torch.manual_seed(options.seed)
    config = GPTConfig(
        layers=options.layers,
        heads=options.heads,
        width=options.width,
        context=options.context,
        dropout=options.dropout,
        activation_checkpointing=options.checkpoint_activations,
    )
    model: nn.Module = GPT(config).to(device)
    torch.manual_seed(options.seed + 1 + dist.get_rank())  # each rank drops other activations
    settings: dict[str, Any] = {
        "lr": options.lr,
        "betas": (0.9, 0.95),
        "max_grad_norm": options.max_grad_norm,
    }
    if options.baseline:
        model = baselines.replicated(model, options.torch_dtype, ddp=options.baseline == "ddp")
        optimizer = baselines.ClippedAdamW(groups(model, options.weight_decay), **settings)
        return model, optimizer, baselines

    policy = MixedPrecisionPolicy(param_dtype=options.torch_dtype, reduce_dtype=torch.float32)
    fully_shard(model, units=Block, mp_policy=policy, comm=options.comm, strategy=options.strategy)
    settings["overlap_backward"] = options.overlap_backward
    return model, ShardedAdamW(groups(model, options.weight_decay), **settings), checkpoint


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Part the parameters: matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def train(training: Training) -> dict[str, Any]:
    """Train to the last step, with tests and checkpoints on the way."""
    options = training.options
    stop = min(options.steps, options.stop_after or options.steps)
    first = training.done
    batches = training.batches()
    bar = tqdm(
        total=options.steps,
        initial=first,
        unit="step",
        disable=training.rank != 0,
        mininterval=0.1 if sys.stderr.isatty() else 15,
    )
    result: dict[str, Any] = {"tokens_per_s": 0.0, "rank_bytes": measure(training)}
    seconds, started = 0.0, time.perf_counter()  # of steps; tests and checkpoints do not count
    while training.done < stop:
        if options.trace and training.done == min(first + 3, stop - 1):  # the order is known by now
            traced_step(training, batches, options.trace)
        else:
            training.step(batches)
        bar.update()
        done, last = training.done, training.done == stop
        if done % 10 and done % options.eval_every and done % options.checkpoint_every and not last:
            continue
        training.collect()
        seconds += time.perf_counter() - started
        speed = (done - first) * options.batch * options.context / seconds
        bar.set_postfix_str(f"loss {training.history.losses[-1]:.3f}, {speed:,.0f} tokens/s")
        if last:
            result = {"tokens_per_s": round(speed, 1), "rank_bytes": measure(training)}
        if last or done % options.eval_every == 0:
            text = f"step {done}: {training.test()}"
            if training.rank == 0:
                bar.write(text)
        if last or done % options.checkpoint_every == 0:
            training.save()
        started = time.perf_counter()
    bar.close()
    return result


def traced_step(training: Training, batches: Iterator[Tensor], path: Path) -> None:
    """Take a step, and write what this process did, when, if it is rank 0."""
    with record_schedule() as schedule:
        training.step(batches)
    if training.rank == 0:
        schedule.save_trace(path)


def measure(training: Training) -> dict[str, int]:
    """Measure the bytes that this rank holds, by kind."""
    look = baselines if training.options.baseline else report
    sizes: dict[str, int] = look.measured_bytes(training.model, training.optimizer)
    return sizes


def introduce(training: Training) -> dict[str, dict[str, int]]:
    """Say what will be trained, how, and how much memory a rank needs for it."""
    options, model = training.options, training.model
    ddp = report.ddp_bytes(model, options.torch_dtype)
    own = ddp
    if not options.baseline:
        own = report.planned_bytes(model, options.accumulate, options.overlap_backward)
    plan = {"this run": own, "DDP": ddp}
    if training.rank == 0:
        numel = sum(p.numel() for p in model.parameters())
        how = options.baseline or f"{options.strategy} over {report.comm_name(model)}"
        print(f"model: {numel:,} parameters in {options.dtype}; world of {training.world}, {how}")
        shared = 0 if options.baseline else report.shared_bytes(model)
        if shared:
            print(f"shared memory: {shared:,} bytes of full parameters, once for all ranks")
        print(f"text: {training.origin}; {len(training.train_set):,} windows to train on")
        print(report.table(plan), flush=True)
    return plan


def conclude(training: Training, plan: dict[str, dict[str, int]], result: dict[str, Any]) -> None:
    """Show a sample and what was measured; write the curve, the history and the last line."""
    options, history = training.options, training.history
    text = ""
    if options.sample_bytes:  # every rank takes part
        text = generate(
            training.model, b"def ", options.sample_bytes, options.context, options.seed
        )
    if training.rank != 0:
        return
    if text:
        print(f"sample:\n{text}\n")
    print(report.table({"planned": plan["this run"], "measured": result["rank_bytes"]}))
    curve = report.draw_curve(options.out / "loss.png", history.losses, history.held_out)
    print(f"loss curve: {curve}")
    summary = {
        "loss_first": history.losses[0],
        "loss_last": history.losses[-1],
        "val_bits_per_byte": history.held_out[-1][1],
        **result,
        "rank_bytes_planned": plan["this run"],
        "world_size": training.world,
        "comm": options.baseline or report.comm_name(training.model),
        "checkpoint": str(training.checkpoint_path),
        "steps": training.done,
        "dtype": options.dtype,
        "history": str(options.out / "history.json"),
    }
    record = {"losses": history.losses, "held_out": history.held_out}
    (options.out / "history.json").write_text(json.dumps(record))
    print(json.dumps(summary), flush=True)


def join_processes() -> torch.device:
    """Join the other processes; without torchrun this process is the only one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not export it by name
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def check(options: Options) -> None:
    """Refuse what cannot work, before anything is built."""
    world = dist.get_world_size()
    if options.baseline == "none" and world > 1:
        raise ValueError(
            f"--baseline none: expected one process, got {world}. "
            "Start it with --nproc-per-node 1, or take --baseline ddp."
        )
    if options.trace and options.baseline:
        raise ValueError(
            "--trace: expected a sharded model, got --baseline. Use torch.profiler for baselines."
        )
    if options.overlap_backward and (options.baseline or options.accumulate > 1):
        raise ValueError(
            "--overlap-backward: expected a sharded model and one micro-batch a step, got "
            f"--baseline {options.baseline}, --accumulate {options.accumulate}. Leave these out."
        )
    if options.batch % (world * options.accumulate):
        raise ValueError(
            f"--batch: expected a multiple of {world} processes x {options.accumulate} "
            f"micro-batches, got {options.batch}. Change --batch or --accumulate."
        )


if __name__ == "__main__":
    main()
