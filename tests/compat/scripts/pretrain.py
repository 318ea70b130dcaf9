"""Pretraining in the manner of litgpt.

The script uses FSDP, a precision plugin, accumulation, throughput, a CSV log, and resumes.
"""

import json
import math
import sys
import time
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins import Precision
from lightning.fabric.strategies import FSDPStrategy
from lightning.fabric.utilities.throughput import ThroughputMonitor, measure_flops
from models import GPT, Block, next_token_loss, sentences
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader

out_dir = Path("out")
micro_batch_size = 4
accumulation_iters = 2
max_iters = 12
save_interval = 6
log_interval = 2
learning_rate = 0.02
warmup_iters = 4


def setup(resume: bool) -> None:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    strategy = FSDPStrategy(
        auto_wrap_policy=policy, activation_checkpointing_policy={Block}, state_dict_type="sharded"
    )
    logger = CSVLogger(out_dir.parent, "logs", flush_logs_every_n_steps=log_interval)
    fabric = L.Fabric(
        accelerator="cpu", devices=2, strategy=strategy, plugins=[Precision()], loggers=[logger]
    )
    fabric.launch(main, resume)


def main(fabric: L.Fabric, resume: bool) -> None:
    if fabric.global_rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
    fabric.seed_everything(1337)

    with torch.device("meta"):
        meta_model = GPT()
        x = torch.randint(0, 32, (micro_batch_size, 12))
        flops = measure_flops(
            meta_model, lambda: meta_model(torch.empty_like(x)), lambda y: y.sum()
        )

    with fabric.init_module(empty_init=False):
        model = GPT()
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=0.1, foreach=True
    )
    optimizer = fabric.setup_optimizers(optimizer)
    state = {"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0}
    if resume:
        fabric.load(out_dir / "checkpoint", state)

    loader = DataLoader(sentences(2 * micro_batch_size * max_iters), batch_size=micro_batch_size)
    train(fabric, state, fabric.setup_dataloaders(loader), flops)


def train(fabric: L.Fabric, state: dict, loader: DataLoader, flops: int) -> None:
    model = state["model"]
    optimizer = state["optimizer"]
    throughput = ThroughputMonitor(fabric, window_size=2)
    initial_iter = state["iter_num"]
    start = time.perf_counter()
    lengths = 0
    for index, batch in enumerate(loader):
        if index < initial_iter:
            continue
        for group in optimizer.param_groups:
            group["lr"] = get_lr(state["iter_num"])
        state["iter_num"] += 1
        is_accumulating = state["iter_num"] % accumulation_iters != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
            fabric.backward(loss / accumulation_iters)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1

        lengths += batch.size(1)
        if state["iter_num"] % log_interval == 0:
            iters = state["iter_num"] - initial_iter
            throughput.update(
                time=time.perf_counter() - start, flops=flops * log_interval, batches=iters,
                samples=iters * micro_batch_size, lengths=lengths * micro_batch_size,
            )  # fmt: skip
            throughput.compute_and_log(step=state["iter_num"])
            value = fabric.all_reduce(loss.detach().clone()).item()
            metrics = {"loss": value, "iter": state["iter_num"], "step": state["step_count"]}
            fabric.print(json.dumps(metrics))
            fabric.log_dict({"loss": value}, step=state["iter_num"])
        if state["iter_num"] == save_interval:
            fabric.save(out_dir / "checkpoint", state)


def get_lr(iteration: int) -> float:
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    return (
        learning_rate
        * 0.5
        * (1 + math.cos(math.pi * (iteration - warmup_iters) / (max_iters - warmup_iters)))
    )


if __name__ == "__main__":
    setup(resume="--resume" in sys.argv)
