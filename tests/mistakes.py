"""The mistakes that new users make, and the lines that their errors say to write instead.

They come from questions that people ask in the issues of Lightning Fabric and Accelerate, and from
scripts that were ported to fabric. See :func:`names_of_code` for the names that their code uses.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.loggers import CSVLogger
from fabric.strategies import DDPStrategy

__all__ = ["MISTAKES", "MISTAKES_OF_RANKS", "Mistake", "names_of_code"]


class Mistake(NamedTuple):
    """A wrong line, and the line that its error or warning says to write.

    Attributes:
        wrong: code that raises an error, or warns.
        says: a part of the error or the warning: what to write instead.
        right: code that follows the advice. It raises nothing and warns of nothing.
        precision: the precision of the fabric that runs the code.
    """

    wrong: str
    says: str
    right: str
    precision: str = "32-true"


class Scorer(nn.Linear):
    """A model with a method that computes the loss."""

    def loss(self, inputs: Tensor) -> Tensor:
        return self(inputs).mean()


class Partial(nn.Module):
    """A model with a layer that its forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def sgd_of(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def names_of_code(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """Return the names that the code of a mistake sees.

    ``net``, ``sgd`` and ``plain`` are not set up; ``model`` and ``optimizer`` are. Each rank has
    a ``batch`` of its own. One process also has a set-up ``loader`` and a ``loss``. ``path`` is the
    path of a file that does not exist.
    """
    generator = torch.Generator().manual_seed(fabric.global_rank)
    batch = torch.randn(4, 4, generator=generator)
    targets = torch.randint(3, (8,), generator=generator)
    data = TensorDataset(torch.randn(8, 4, generator=generator), targets)
    net = nn.Linear(4, 3)
    plain = DataLoader(data, batch_size=2)
    user_model = nn.Linear(4, 3)
    model, optimizer = fabric.setup(user_model, sgd_of(user_model))
    names = {
        "CSVLogger": CSVLogger,
        "DDPStrategy": DDPStrategy,
        "DataLoader": DataLoader,
        "Fabric": Fabric,
        "argparse": argparse,
        "batch": batch,
        "fabric": fabric,
        "itertools": itertools,
        "model": model,
        "net": net,
        "nn": nn,
        "optimizer": optimizer,
        "partial": Partial(),
        "path": folder / "checkpoint",
        "plain": plain,
        "scorer": Scorer(4, 3),
        "sgd": sgd_of(net),
        "sgd_of": sgd_of,
        "target": targets[:4],
        "torch": torch,
    }
    if fabric.world_size == 1:
        names["loader"] = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
        names["loss"] = model(batch).mean()
    return names


# Mistakes that one process shows.
MISTAKES = [
    # -- the arguments of Fabric ------------------------------------------------------------------
    Mistake(
        'Fabric(precision="fp16")',
        'precision="16-mixed"',
        'Fabric(accelerator="cpu", precision="16-mixed")',
    ),
    Mistake(
        "Fabric(precision=torch.bfloat16)",
        'precision="bf16-mixed"',
        'Fabric(accelerator="cpu", precision="bf16-mixed")',
    ),
    Mistake(
        'Fabric(precision="no")',
        'precision="32-true"',
        'Fabric(accelerator="cpu", precision="32-true")',
    ),
    Mistake(
        'Fabric(mixed_precision="fp16")',
        'Fabric(precision="16-mixed")',
        'Fabric(accelerator="cpu", precision="16-mixed")',
    ),
    Mistake(
        'Fabric(accelerator="cpu", strategy="deepspeed_stage_2")',
        'Fabric(strategy="fsdp")',
        'Fabric(accelerator="cpu", strategy="fsdp")',
    ),
    Mistake(
        'Fabric(accelerator="cpu", strategy="deepspeed_stage_3_offload")',
        'Fabric(strategy="fsdp_cpu_offload")',
        'Fabric(accelerator="cpu", strategy="fsdp_cpu_offload")',
    ),
    Mistake(
        'Fabric(accelerator="cpu", strategy="horovod")',
        'Fabric(strategy="ddp")',
        'Fabric(accelerator="cpu", strategy="ddp")',
    ),
    Mistake(
        'Fabric(accelerator="cpu", strategy="fdsp")',
        'Fabric(strategy="fsdp")',
        'Fabric(accelerator="cpu", strategy="fsdp")',
    ),
    Mistake(
        'Fabric(accelerator="cpu", strategy=DDPStrategy)',
        "Fabric(strategy=DDPStrategy())",
        'Fabric(accelerator="cpu", strategy=DDPStrategy())',
    ),
    Mistake(
        'Fabric(accelerator="cpu", strategy=None)',
        'Fabric(strategy="auto")',
        'Fabric(accelerator="cpu", strategy="auto")',
    ),
    Mistake('Fabric(accelerator="tpu")', 'Fabric(accelerator="auto")', "Fabric()"),
    Mistake(
        'Fabric(accelerator="cuda:0")',
        'Fabric(accelerator="cuda")',
        'Fabric(accelerator="auto")',
    ),
    Mistake(
        'Fabric(accelerator=torch.device("cpu"))',
        'Fabric(accelerator="auto")',
        'Fabric(accelerator="auto")',
    ),
    Mistake('Fabric(acelerator="cpu")', "Fabric(accelerator=...)", 'Fabric(accelerator="cpu")'),
    Mistake(
        'Fabric(accelerator="cpu", devices=0)',
        'devices="auto"',
        'Fabric(accelerator="cpu", devices="auto")',
    ),
    Mistake(
        'Fabric(accelerator="cpu", devices="two")',
        'devices="auto"',
        'Fabric(accelerator="cpu", devices="auto")',
    ),
    Mistake("Fabric(gpus=2)", "Fabric(devices=2)", 'Fabric(accelerator="cpu", devices=2)'),
    Mistake(
        "Fabric(gradient_accumulation_steps=4)",
        "for batch, last in fabric.accumulate(loader, steps=4): ...",
        "for batch, last in fabric.accumulate(loader, steps=4): ...",
    ),
    Mistake(
        "Fabric(plugins=[])",
        "Fabric(precision=...)",
        'Fabric(accelerator="cpu", precision="32-true")',
    ),
    Mistake(
        "Fabric(sync_batchnorm=True)",
        "model = fabric.sync_batchnorm(model) before fabric.setup(model)",
        "model = fabric.setup(fabric.sync_batchnorm(nn.BatchNorm1d(4)))",
    ),
    Mistake("Fabric(loggers='csv')", "CSVLogger()", "Fabric(loggers=CSVLogger(path))"),
    Mistake("Fabric(loggers=CSVLogger)", "CSVLogger()", "Fabric(loggers=CSVLogger(path))"),
    Mistake("Fabric(timeout='30 minutes')", "seconds, a timedelta", "Fabric(timeout=1800)"),
    # -- methods of other toolkits ----------------------------------------------------------------
    Mistake(
        "fabric.prepare(net, sgd)",
        "model, optimizer = fabric.setup(model, optimizer)",
        "net, sgd = fabric.setup(net, sgd)",
    ),
    Mistake("fabric.is_main_process", "fabric.is_global_zero", "fabric.is_global_zero"),
    Mistake("fabric.wait_for_everyone()", "fabric.barrier()", "fabric.barrier()"),
    Mistake("fabric.unwrap_model(model)", "fabric.unwrap(model)", "fabric.unwrap(model)"),
    Mistake(
        "fabric.backward(loss); fabric.clip_grad_norm_(model.parameters(), 1.0)",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
        "fabric.backward(loss); fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ),
    Mistake(
        "with fabric.no_sync(model): ...",
        "with fabric.no_backward_sync(model, enabled=not last): ...",
        "with fabric.no_backward_sync(model, enabled=False): ...",
    ),
    # -- setup ------------------------------------------------------------------------------------
    Mistake(
        "fabric.setup(net, [sgd])", "fabric.setup(model, *optimizers)", "fabric.setup(net, sgd)"
    ),
    Mistake("fabric.setup([net])", "a call of its own for each model", "fabric.setup(net)"),
    Mistake(
        "fabric.setup(net, nn.Linear(4, 3))",
        "a call of fabric.setup(model, optimizer) for each model",
        "fabric.setup(net, sgd); fabric.setup(nn.Linear(4, 3))",
    ),
    Mistake("fabric.setup(sgd, net)", "fabric.setup(model, optimizer)", "fabric.setup(net, sgd)"),
    Mistake(
        "fabric.setup(net, net.parameters())",
        "fabric.setup(model, optimizer), with an optimizer of model.parameters()",
        "fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))",
    ),
    Mistake(
        "fabric.setup(net, torch.optim.SGD)",
        "an object of the class: SGD(...)",
        "fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))",
    ),
    Mistake("fabric.setup(nn.Linear)", "Linear(...)", "fabric.setup(nn.Linear(4, 3))"),
    Mistake("fabric.setup(net, None)", "fabric.setup(model) without", "fabric.setup(net)"),
    Mistake("fabric.setup(model)", "the model itself, which an earlier", "model(batch)"),
    Mistake(
        "fabric.setup_optimizers(sgd)",
        "SGD(model.parameters()) of the model that is set up",
        "fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))",
    ),
    Mistake(
        "fabric.setup(net, sgd, plain)",
        "loader = fabric.setup_dataloaders(loader)",
        "net, sgd = fabric.setup(net, sgd); plain = fabric.setup_dataloaders(plain)",
    ),
    Mistake(
        "fabric.setup_dataloaders([plain, plain])",
        "fabric.setup_dataloaders(*loaders)",
        "fabric.setup_dataloaders(*[plain, plain])",
    ),
    Mistake(
        "fabric.setup_dataloaders(plain.dataset)",
        "fabric.setup_dataloaders(DataLoader(dataset, batch_size=...))",
        "fabric.setup_dataloaders(DataLoader(plain.dataset, batch_size=2))",
    ),
    Mistake(
        "fabric.setup_dataloaders(itertools.cycle(plain))",
        "loader = fabric.setup_dataloaders(loader) first",
        "plain = fabric.setup_dataloaders(plain); next(itertools.cycle(plain))",
    ),
    Mistake(
        "fabric.setup_dataloaders(loader)",
        "use the loader as it is",
        "for inputs, targets in loader: model(inputs)",
    ),
    # -- the loop ---------------------------------------------------------------------------------
    Mistake(
        "fabric.backward(loss.item())",
        "fabric.backward(loss) with the tensor itself, before loss.item()",
        "fabric.backward(loss)",
    ),
    Mistake(
        "fabric.backward({'loss': loss})",
        "fabric.backward(output.loss), or output['loss']",
        "fabric.backward({'loss': loss}['loss'])",
    ),
    Mistake("fabric.backward(model(batch))", "loss.mean()", "fabric.backward(model(batch).mean())"),
    Mistake(
        "fabric.backward(loss.detach())",
        "without detach(), item() or argmax()",
        "fabric.backward(loss)",
    ),
    Mistake(
        "with torch.no_grad(): fabric.backward(model(batch).mean())",
        "computed outside of torch.no_grad()",
        "fabric.backward(model(batch).mean())",
    ),
    Mistake(
        "loss.backward(); optimizer.step()",
        "fabric.backward(loss), in place of loss.backward()",
        "fabric.backward(loss); optimizer.step()",
        precision="16-mixed",
    ),
    Mistake(
        "fabric.backward(loss); model(batch).mean().backward(); optimizer.step()",
        "fabric.backward(loss), in place of loss.backward(), for every loss",
        "fabric.backward(loss); fabric.backward(model(batch).mean()); optimizer.step()",
        precision="16-mixed",
    ),
    Mistake(
        "fabric.backward(loss)\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "optimizer.step()",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
        "fabric.backward(loss)\n"
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)\n"
        "optimizer.step()",
        precision="16-mixed",
    ),
    Mistake(
        "net = fabric.setup(net); fabric.backward(net(batch).mean()); sgd.step()",
        "fabric.setup_optimizers(optimizer)",
        "net, sgd = fabric.setup(net, sgd); fabric.backward(net(batch).mean()); sgd.step()",
        precision="16-mixed",
    ),
    Mistake(
        "for _ in range(2): model(batch).mean(); optimizer.step()",
        "fabric.backward(loss) before optimizer.step()",
        "for _ in range(2): fabric.backward(model(batch).mean()); optimizer.step()",
    ),
    Mistake(
        "for _ in range(2):\n"
        "    fabric.backward(model(batch).square().mean())\n"
        "    optimizer.zero_grad()\n"
        "    optimizer.step()",
        "optimizer.step(); optimizer.zero_grad()",
        "for _ in range(2):\n"
        "    fabric.backward(model(batch).square().mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()",
    ),
    Mistake(
        "net = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()\n"
        "net, sgd = fabric.setup(net, sgd_of(net))\n"
        "fabric.backward(net(batch).mean()); sgd.step()",
        "model.train() before the loop",
        "net = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()\n"
        "net, sgd = fabric.setup(net, sgd_of(net))\n"
        "net.train()\n"
        "fabric.backward(net(batch).mean()); sgd.step()",
    ),
    Mistake(
        "fabric.backward(loss); fabric.clip_gradients(model.parameters(), optimizer, max_norm=1.0)",
        "fabric.clip_gradients with this model",
        "fabric.backward(loss); fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ),
    Mistake(
        "fabric.backward(loss); fabric.clip_gradients(model, optimizer)",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
        "fabric.backward(loss); fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ),
    Mistake(
        "with fabric.no_backward_sync(net): ...",
        "fabric.no_backward_sync with this model",
        "with fabric.no_backward_sync(model): ...",
    ),
    Mistake(
        "fabric.accumulate(model, steps=4)",
        "for batch, last in fabric.accumulate(loader, steps=4)",
        "for batch, last in fabric.accumulate(loader, steps=4): ...",
    ),
    Mistake(
        "fabric.gather_for_metrics(target)",
        "for batch in fabric.setup_dataloaders(loader)",
        "for inputs, targets in loader: fabric.gather_for_metrics(targets)",
    ),
    Mistake(
        "for inputs, targets in loader: fabric.gather_for_metrics(model(inputs).mean())",
        "the values before any mean or sum",
        "for inputs, targets in loader: fabric.gather_for_metrics(model(inputs))",
    ),
    Mistake(
        "fabric.all_reduce(loss.detach().numpy())",
        "torch.as_tensor(x)",
        "fabric.all_reduce(torch.as_tensor(loss.detach().numpy()))",
    ),
    Mistake(
        "fabric.all_reduce(loss.detach(), reduce_op='average')",
        'reduce_op="mean"',
        'fabric.all_reduce(loss.detach(), reduce_op="mean")',
    ),
    Mistake(
        "fabric.log('loss', 1.0)",
        "fabric.add_logger(...)",
        "fabric.add_logger(CSVLogger(path)); fabric.log('loss', 1.0)",
    ),
    Mistake(
        "fabric.sync_batchnorm(model)",
        "model = fabric.setup(fabric.sync_batchnorm(model))",
        "fabric.setup(fabric.sync_batchnorm(nn.BatchNorm1d(4)))",
    ),
    # -- checkpoints ------------------------------------------------------------------------------
    Mistake(
        "fabric.save(path, model)",
        "(path, {'model': model})",
        "fabric.save(path, {'model': model})",
    ),
    Mistake(
        "fabric.save({'model': model}, path)",
        "(path, {'model': model})",
        "fabric.save(path, {'model': model})",
    ),
    Mistake(
        "fabric.save(path, {'args': argparse.Namespace(lr=0.1)})",
        "{'args': vars(args)}",
        "fabric.save(path, {'args': vars(argparse.Namespace(lr=0.1))})",
    ),
    Mistake(
        "fabric.load(path, {'model': model})",
        "the path of a file that exists",
        "fabric.save(path, {'model': model}); fabric.load(path, {'model': model})",
    ),
    Mistake(
        "fabric.save(path, {'model': model}); fabric.load(path, model)",
        "(path, {'model': model})",
        "fabric.save(path, {'model': model}); fabric.load(path, {'model': model})",
    ),
    Mistake(
        "torch.save(model.state_dict(), path); fabric.load(path, {'model': model})",
        "fabric.load_raw(path, model)",
        "torch.save(model.state_dict(), path); fabric.load_raw(path, model)",
    ),
    Mistake(
        "torch.save({f'module.{name}': value for name, value in net.state_dict().items()}, path)\n"
        "fabric.load_raw(path, model)",
        "rename=lambda name: name.removeprefix('module.')",
        "torch.save({f'module.{name}': value for name, value in net.state_dict().items()}, path)\n"
        "fabric.load_raw(path, model, rename=lambda name: name.removeprefix('module.'))",
    ),
    Mistake(
        "torch.save(nn.Linear(4, 9).state_dict(), path); fabric.load_raw(path, model)",
        "rename={'weight': None, 'bias': None}, strict=False",
        "torch.save({**nn.Linear(4, 9).state_dict(), 'bias': torch.ones(3)}, path)\n"
        "fabric.load_raw(path, model, rename={'weight': None}, strict=False)",
    ),
    Mistake(
        "fabric.save(path, {'model': nn.Linear(4, 9)}); fabric.load(path, {'model': model})",
        "state = {'model': None}; fabric.load(path, state, rng=False)",
        "fabric.save(path, {'model': nn.Linear(4, 9)})\n"
        "state = {'model': None}\n"
        "fabric.load(path, state, rng=False)\n"
        "del state['model']['weight'], state['model']['bias']\n"
        "model.load_state_dict(state['model'], strict=False)",
    ),
    Mistake(
        "fabric.save(path, {'model': model})\n"
        "fabric.load(path, {'model': model, 'optimizer': optimizer})",
        "strict=False to load what fits by name",
        "fabric.save(path, {'model': model})\n"
        "fabric.load(path, {'model': model, 'optimizer': optimizer}, strict=False)",
    ),
    Mistake(
        "fabric.checkpoints(path, best='val_loss')",
        "best=('val_loss', 'min')",
        "fabric.checkpoints(path, best=('val_loss', 'min'))",
    ),
    Mistake("path.touch(); fabric.checkpoints(path)", "another path", "fabric.checkpoints(path)"),
]

# Mistakes that only several processes show. Each runs on two.
MISTAKES_OF_RANKS = [
    Mistake(
        "fabric.backward(model.module(batch).mean())",
        "model(...), for model.module(...)",
        "fabric.backward(model(batch).mean())",
    ),
    Mistake(
        "fabric.setup(net, sgd); fabric.backward(net(batch).mean())",
        "model(...), for model.module(...)",
        "net, sgd = fabric.setup(net, sgd); fabric.backward(net(batch).mean())",
    ),
    Mistake(
        "scorer = fabric.setup(scorer); fabric.backward(scorer.loss(batch))",
        'model.mark_forward_method("name_of_method")',
        "scorer = fabric.setup(scorer)\n"
        'scorer.mark_forward_method("loss")\n'
        "fabric.backward(scorer.loss(batch))",
    ),
    Mistake(
        "partial = fabric.setup(partial)\n"
        "optimizer = fabric.setup_optimizers(sgd_of(partial))\n"
        "fabric.backward(partial(batch).mean()); optimizer.step()",
        "parameter.requires_grad_(False) before setup",
        "partial.unused.requires_grad_(False)\n"
        "partial = fabric.setup(partial)\n"
        "optimizer = fabric.setup_optimizers(sgd_of(partial))\n"
        "fabric.backward(partial(batch).mean()); optimizer.step()",
    ),
    Mistake(
        "for _ in range(2):\n"
        "    with fabric.no_backward_sync(model):\n"
        "        fabric.backward(model(batch).mean())\n"
        "    optimizer.step()",
        "from outside of no_backward_sync",
        "for last in (False, True):\n"
        "    with fabric.no_backward_sync(model, enabled=not last):\n"
        "        fabric.backward(model(batch).mean())\n"
        "optimizer.step()",
    ),
    Mistake(
        "with fabric.no_backward_sync(model): loss = model(batch).mean()\nfabric.backward(loss)",
        "forward and backward in the same no_backward_sync",
        "with fabric.no_backward_sync(model): fabric.backward(model(batch).mean())",
    ),
    Mistake(
        "first, second = model(batch).mean(), model(batch).mean()\n"
        "fabric.backward(first); fabric.backward(second)",
        "fabric.backward(loss_a + loss_b)",
        "first, second = model(batch).mean(), model(batch).mean()\nfabric.backward(first + second)",
    ),
    Mistake(
        "for inputs, targets in plain: fabric.backward(model(inputs).mean()); optimizer.step()",
        "loader = fabric.setup_dataloaders(loader)",
        "for inputs, targets in fabric.setup_dataloaders(plain): "
        "fabric.backward(model(inputs).mean()); optimizer.step()",
    ),
    Mistake(
        "for inputs, targets in fabric.setup_dataloaders(plain):\n"
        "    loss = nn.functional.cross_entropy(model(inputs), targets, reduction='sum')\n"
        "    fabric.backward(loss)\n"
        "    optimizer.step()",
        'fabric.backward(loss, reduce="sum")',
        "for inputs, targets in fabric.setup_dataloaders(plain):\n"
        "    loss = nn.functional.cross_entropy(model(inputs), targets, reduction='sum')\n"
        '    fabric.backward(loss, reduce="sum")\n'
        "    optimizer.step()",
    ),
    Mistake(
        "torch.manual_seed(1)\n"
        "net = fabric.setup(nn.Sequential(net, nn.Dropout()))\n"
        "for _ in range(2): fabric.backward(net(batch).mean())",
        'fabric.seed_everything(seed, per_rank="after_setup") before the model is built',
        'fabric.seed_everything(1, per_rank="after_setup")\n'
        "net = fabric.setup(nn.Sequential(net, nn.Dropout()))\n"
        "for _ in range(2): fabric.backward(net(batch).mean())",
    ),
    Mistake(
        "fabric.setup(nn.SyncBatchNorm(4))",
        "model = fabric.setup(fabric.sync_batchnorm(model))",
        "fabric.setup(fabric.sync_batchnorm(nn.BatchNorm1d(4)))",
    ),
    Mistake(
        "fabric.setup(nn.parallel.DistributedDataParallel(net), sgd)",
        "fabric.setup(model.module, optimizer)",
        "fabric.setup(nn.parallel.DistributedDataParallel(net).module, sgd)",
    ),
    Mistake(
        "fabric.setup(nn.DataParallel(net), sgd)",
        "fabric.setup(model.module, optimizer)",
        "fabric.setup(nn.DataParallel(net).module, sgd)",
    ),
    Mistake(
        "net.weight.requires_grad_(False)\n"
        "net = fabric.setup(net)\n"
        "net.weight.requires_grad_(True)\n"
        "fabric.backward(net(batch).mean())",
        "requires_grad_(False) only after setup()",
        "net = fabric.setup(net); fabric.backward(net(batch).mean())",
    ),
    Mistake(
        "fabric.all_gather(torch.ones(1 + fabric.global_rank))",
        "all_gather(x, ragged=True) or concat=True",
        "fabric.all_gather(torch.ones(1 + fabric.global_rank), ragged=True)",
    ),
]
