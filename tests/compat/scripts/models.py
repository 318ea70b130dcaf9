"""Models, tasks and data of the scripts beside this file, and of the plain loops that they are compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call
from torch.utils.data import TensorDataset


def images(count: int, seed: int = 0) -> TensorDataset:
    """Noise of 8 x 8 with a bright quarter, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(4, (count,), generator=generator)
    pixels = 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, target in zip(pixels, targets.tolist(), strict=True):
        row = 4 * (target // 2)
        column = 4 * (target % 2)
        image[:, row : row + 4, column : column + 4] += 1
    return TensorDataset(pixels, targets)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.head(x.flatten(1)), dim=1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + F.gelu(self.mix(self.norm(past)))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sentences(count: int, length: int = 13) -> Tensor:
    """Arithmetic sequences modulo 32."""
    generator = torch.Generator().manual_seed(0)
    start, stride = torch.randint(32, (2, count, 1), generator=generator)
    return (start + stride * torch.arange(length)) % 32


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 16)
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def forward(self, obs):
        hidden = torch.tanh(self.body(obs))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class Walk:
    """A point on a line that is rewarded near zero."""

    def __init__(self):
        self.position = torch.tensor([1.0, 0.0])

    def step(self, action):
        speed = 0.5 * self.position[1] + (0.2 if action else -0.2)
        self.position = torch.stack([self.position[0] + speed, speed]).clamp(-2, 2)
        return self.position, -self.position[0].abs().item()


def collect(agent, env, obs):
    rollout = {"obs": [], "actions": [], "rewards": []}
    for _ in range(16):
        with torch.no_grad():
            logits, _ = agent(obs)
        action = Categorical(logits=logits).sample()
        rollout["obs"].append(obs)
        rollout["actions"].append(action)
        obs, reward = env.step(action.item())
        rollout["rewards"].append(torch.tensor(reward))
    return {name: torch.stack(values) for name, values in rollout.items()}, obs


def loss_of(agent, rollout):
    returns = []
    future = 0.0
    for reward in reversed(rollout["rewards"].tolist()):
        future = reward + 0.9 * future
        returns.append(future)
    returns = torch.tensor(returns[::-1])
    logits, values = agent(rollout["obs"])
    advantages = returns - values.detach()
    policy_loss = -(Categorical(logits=logits).log_prob(rollout["actions"]) * advantages).mean()
    return policy_loss + 0.5 * F.mse_loss(values, returns)


class PPOAgent(Agent):
    """An agent whose loss is a method, as that of a LightningModule."""

    def training_step(self, batch):
        logits, values = self(batch["obs"])
        policy = Categorical(logits=logits)
        ratio = (policy.log_prob(batch["actions"]) - batch["logprobs"]).exp()
        gain = torch.min(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"])
        return (
            0.5 * F.mse_loss(values, batch["returns"])
            - gain.mean()
            - 0.01 * policy.entropy().mean()
        )

    @torch.no_grad()
    def evaluate(self, rollout, next_obs):
        """A rollout with log-probabilities, returns and generalized advantages."""
        logits, values = self(torch.cat([rollout["obs"], next_obs[None]]))
        logprobs = Categorical(logits=logits[:-1]).log_prob(rollout["actions"])
        errors = rollout["rewards"] + 0.9 * values[1:] - values[:-1]
        advantages = torch.zeros_like(errors)
        latest = 0.0
        for step in reversed(range(len(errors))):
            advantages[step] = latest = errors[step] + 0.9 * 0.95 * latest
        return {
            **rollout,
            "logprobs": logprobs,
            "advantages": advantages,
            "returns": advantages + values[:-1],
        }


def make_task(number, device):
    x = torch.linspace(-2, 2, 20, device=device)[:, None]
    y = torch.sin(x + 0.3 * number) * (1 + 0.1 * number)
    return (x[::2], y[::2]), (x[1::2], y[1::2])


def adapt_and_evaluate(model, task):
    (x, y), (x_query, y_query) = task
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = F.mse_loss(functional_call(model, weights, (x,)), y)
        gradients = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
        weights = {
            name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)
        }
    return F.mse_loss(functional_call(model, weights, (x_query,)), y_query)
