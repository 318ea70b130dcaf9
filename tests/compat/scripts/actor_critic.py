"""A decoupled actor-critic, whose ranks talk through a group of TorchCollective.

The player sends rollouts, and the trainer sends weights back.
"""

import json

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.plugins.collectives import TorchCollective
from models import Agent, Walk, collect, loss_of
from torch.nn.utils import parameters_to_vector, vector_to_parameters

updates = 5


def player(fabric, group, agent):
    env = Walk()
    obs = env.position
    for _ in range(updates):
        rollout, obs = collect(agent, env, obs)
        group.broadcast_object_list([rollout], src=0)
        weights = parameters_to_vector(agent.parameters()).detach()
        group.broadcast(weights, src=1)
        vector_to_parameters(weights, agent.parameters())
        losses = [None]
        group.broadcast_object_list(losses, src=1)
        reward = rollout["rewards"].mean()
        record = {**losses[0], "reward": reward.item()}
        print(json.dumps(record), flush=True)


def trainer(fabric, group, agent):
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    optimizer = fabric.setup_optimizers(optimizer)
    for update in range(updates):
        received = [None]
        group.broadcast_object_list(received, src=0)
        loss = loss_of(agent, received[0])
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        weights = parameters_to_vector(agent.parameters()).detach()
        group.broadcast(weights, src=1)
        group.broadcast_object_list([{"update": update, "loss": loss.item()}], src=1)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(7)
    world = TorchCollective()
    world.setup()
    world.create_group()
    player_trainer = TorchCollective().create_group(ranks=[0, 1])
    assert world.rank == fabric.global_rank
    assert world.world_size == 2

    agent = fabric.to_device(Agent())
    if fabric.global_rank == 0:
        player(fabric, player_trainer, agent)
    else:
        trainer(fabric, player_trainer, agent)
    total = world.all_reduce(torch.ones(1), op="sum")
    assert total.item() == 2
    world.barrier()
    player_trainer.teardown()


if __name__ == "__main__":
    main()
