"""What the laws find in other libraries, without fabric.

``torchrun --nproc-per-node 2 examples/testing/raw.py accelerate_none`` runs one of the functions.
The values are small examples of what hypothesis has found.
"""

import sys

import torch
import torch.distributed as dist


def torch_view(rank):  # torch 2.13.0
    x = torch.tensor([1.0, 77.0, 1.0])[::2]
    dist.all_reduce(x)
    return x, "expected [2, 2]"


def torchmetrics_empty(rank):  # torchmetrics 1.9.0
    from torchmetrics.classification import BinaryAUROC

    metric = BinaryAUROC()
    if rank == 0:
        metric.update(torch.tensor([0.25, 0.75]), torch.tensor([0, 1]))
    return metric.compute(), "expected 1 on both ranks"


def lightning_view(rank):  # lightning-fabric 2.6.6
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    x = torch.tensor([1.0, 77.0, 1.0])[::2]
    return fabric.all_reduce(x, reduce_op="sum"), "expected [2, 2]"


def lightning_mean(rank):  # lightning-fabric 2.6.6
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    return fabric.all_reduce(torch.tensor([rank])), "expected [0.5]"


def accelerate_mask(rank):  # accelerate 1.15.0
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    mask = torch.ones(1 + rank, dtype=torch.bool)
    return accelerator.gather(accelerator.pad_across_processes(mask)), "expected four booleans"


def accelerate_matrix(rank):  # accelerate 1.15.0
    from accelerate import Accelerator

    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    if rank == 1:
        x = x.t().contiguous().t()  # the same values, in another order in memory
    return Accelerator(cpu=True).reduce(x), "expected [[0, 2], [4, 6]]"


def accelerate_none(rank):  # accelerate 1.15.0
    from accelerate import Accelerator

    return Accelerator(cpu=True).reduce(torch.tensor([1.0]), "none"), "expected [1]"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(*globals()[sys.argv[1]](dist.get_rank()), flush=True)
    dist.destroy_process_group()
