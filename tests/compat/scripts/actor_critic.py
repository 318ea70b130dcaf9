"""A decoupled actor-critic: the player sends rollouts by a group of TorchCollective, the trainer sends weights back."""

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
        print(json.dumps(losses[0] | {"reward": rollout["rewards"].mean().item()}), flush=True)


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
        group.broadcast(parameters_to_vector(agent.parameters()).detach(), src=1)
        group.broadcast_object_list([{"update": update, "loss": loss.item()}], src=1)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(7)
    world = TorchCollective()
    world.setup()
    world.create_group()
    player_trainer = TorchCollective().create_group(ranks=[0, 1])
    assert (world.rank, world.world_size) == (fabric.global_rank, 2)

    agent = fabric.to_device(Agent())
    (player if fabric.global_rank == 0 else trainer)(fabric, player_trainer, agent)
    total = world.all_reduce(torch.ones(1), op="sum")
    assert total.item() == 2
    world.barrier()
    player_trainer.teardown()


if __name__ == "__main__":
    main()
