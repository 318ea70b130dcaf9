"""Models, tasks and data of the scripts in this folder, and of the plain loops they equal."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call
from torch.utils.data import TensorDataset


def images(count: int, seed: int = 0) -> TensorDataset:
    """Return images of 8 x 8 noise with a bright quarter, whose number is the class."""
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
        x = F.relu(self.conv(x))
        x = F.max_pool2d(x, 2)
        x = self.head(x.flatten(1))
        return F.log_softmax(x, dim=1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1)
        past_mean = x.cumsum(1) / counts[:, None]
        mixed = self.mix(self.norm(past_mean))
        return x + F.gelu(mixed)


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
    """Return arithmetic sequences modulo 32."""
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
        coordinate, speed = self.position
        acceleration = 0.2 if action else -0.2
        speed = 0.5 * speed + acceleration
        self.position = torch.stack([coordinate + speed, speed]).clamp(-2, 2)
        reward = -self.position[0].abs()
        return self.position, reward.item()


def collect(agent, env, obs):
    """Return a rollout of 16 steps, and the observation after the last step."""
    rollout = {"obs": [], "actions": [], "rewards": []}
    for _ in range(16):
        with torch.no_grad():
            logits, _ = agent(obs)
        action = Categorical(logits=logits).sample()
        rollout["obs"].append(obs)
        rollout["actions"].append(action)
        obs, reward = env.step(action.item())
        rollout["rewards"].append(torch.tensor(reward))
    stacked = {name: torch.stack(values) for name, values in rollout.items()}
    return stacked, obs


def loss_of(agent, rollout):
    returns = discounted_returns(rollout["rewards"])
    logits, values = agent(rollout["obs"])
    advantages = returns - values.detach()
    log_probs = Categorical(logits=logits).log_prob(rollout["actions"])
    policy_loss = -(log_probs * advantages).mean()
    value_loss = F.mse_loss(values, returns)
    return policy_loss + 0.5 * value_loss


def discounted_returns(rewards):
    returns = []
    future = 0.0
    for reward in reversed(rewards.tolist()):
        future = reward + 0.9 * future
        returns.append(future)
    returns.reverse()
    return torch.tensor(returns)


class PPOAgent(Agent):
    """An agent whose loss is a method, as in a LightningModule."""

    def training_step(self, batch):
        logits, values = self(batch["obs"])
        policy = Categorical(logits=logits)
        advantages = batch["advantages"]
        ratio = (policy.log_prob(batch["actions"]) - batch["logprobs"]).exp()
        clipped_ratio = ratio.clamp(0.8, 1.2)
        gain = torch.min(ratio * advantages, clipped_ratio * advantages).mean()
        value_loss = F.mse_loss(values, batch["returns"])
        entropy = policy.entropy().mean()
        return 0.5 * value_loss - gain - 0.01 * entropy

    @torch.no_grad()
    def evaluate(self, rollout, next_obs):
        """Return a rollout with log-probabilities, returns and generalized advantages."""
        obs = torch.cat([rollout["obs"], next_obs[None]])
        logits, values = self(obs)
        logprobs = Categorical(logits=logits[:-1]).log_prob(rollout["actions"])
        errors = rollout["rewards"] + 0.9 * values[1:] - values[:-1]
        advantages = torch.zeros_like(errors)
        latest = 0.0
        for step in reversed(range(len(errors))):
            latest = errors[step] + 0.9 * 0.95 * latest
            advantages[step] = latest
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
    """Return the loss after two steps on a task, through which gradients flow."""
    (x, y), (x_query, y_query) = task
    weights = dict(model.named_parameters())
    for _ in range(2):
        output = functional_call(model, weights, (x,))
        loss = F.mse_loss(output, y)
        gradients = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
        updated = {}
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            updated[name] = weight - 0.1 * gradient
        weights = updated
    output = functional_call(model, weights, (x_query,))
    return F.mse_loss(output, y_query)
