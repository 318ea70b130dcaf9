"""A language model under FSDP, with a wrap policy and a checkpoint in one file."""

import json

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import FSDPStrategy
from models import GPT, Block, next_token_loss, sentences
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader


def main():
    strategy = FSDPStrategy(
        auto_wrap_policy={Block},
        activation_checkpointing_policy=ModuleWrapPolicy({Block}),
        state_dict_type="full",
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    seed_everything(5)

    with fabric.init_module():
        model = GPT()
    model = fabric.setup_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = fabric.setup_optimizers(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(sentences(48), batch_size=4, shuffle=True))

    for iteration, batch in enumerate(loader):
        logits = model(batch[:, :-1])
        loss = next_token_loss(logits, batch[:, 1:])
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        record = {"iteration": iteration, "loss": mean.item(), "norm": norm.item()}
        fabric.print(json.dumps(record))

    state = {"model": model, "optimizer": optimizer, "iteration": iteration}
    fabric.save("lm.ckpt", state)
    fabric.barrier()


if __name__ == "__main__":
    main()
