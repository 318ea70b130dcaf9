"""PPO with Hydra, whose processes share their rollouts.

The configuration makes the Fabric and the optimizer.
"""

import json

import hydra
from lightning.fabric import Fabric, seed_everything
from models import PPOAgent, Walk, collect
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import BatchSampler, DistributedSampler


def train(fabric: Fabric, agent, optimizer, data, cfg: DictConfig):
    indices = list(range(len(data["actions"])))
    sampler = DistributedSampler(
        indices,
        num_replicas=fabric.world_size,
        rank=fabric.global_rank,
        shuffle=True,
        seed=cfg.seed,
    )
    batches = BatchSampler(sampler, batch_size=cfg.per_rank_batch_size, drop_last=False)
    for epoch in range(cfg.update_epochs):
        batches.sampler.set_epoch(epoch)
        for batch_indices in batches:
            batch = {name: values[batch_indices] for name, values in data.items()}
            loss = agent.training_step(batch)
            optimizer.zero_grad(set_to_none=True)
            fabric.backward(loss)
            fabric.clip_gradients(agent, optimizer, max_norm=cfg.max_grad_norm)
            optimizer.step()
    return loss.detach()


def main(fabric: Fabric, cfg: DictConfig):
    seed_everything(cfg.seed)
    agent = PPOAgent()
    optimizer = hydra.utils.instantiate(cfg.optimizer, params=agent.parameters())
    agent, optimizer = fabric.setup(agent, optimizer)
    if fabric.is_global_zero:
        fabric.logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))

    seed_everything(cfg.seed + fabric.global_rank)  # other actions in every process
    env = Walk()
    obs = env.position
    for update in range(cfg.num_updates):
        if cfg.anneal_lr:
            remaining = 1 - update / cfg.num_updates
            optimizer.param_groups[0]["lr"] = cfg.optimizer.lr * remaining
        rollout, obs = collect(agent, env, obs)
        rollout = agent.evaluate(rollout, obs.to(fabric.device))
        gathered = fabric.all_gather(rollout)
        data = {name: values.flatten(0, 1) for name, values in gathered.items()}
        loss = train(fabric, agent, optimizer, data, cfg)

        metrics = {"loss": fabric.all_reduce(loss), "reward": data["rewards"].mean()}
        fabric.log_dict(metrics, step=update)
        record = {name: value.item() for name, value in metrics.items()}
        fabric.print(json.dumps({"update": update, **record}))
    state = {
        "agent": agent,
        "optimizer": optimizer.optimizer.state_dict(),
        "update": update,
    }
    fabric.save(cfg.checkpoint, state)
    return loss


@hydra.main(version_base="1.3", config_path="conf", config_name="ppo")
def run(cfg: DictConfig):
    fabric = hydra.utils.instantiate(cfg.fabric, _convert_="all")
    fabric.launch(main, cfg)


if __name__ == "__main__":
    run()
