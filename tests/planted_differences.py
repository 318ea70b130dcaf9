"""Training jobs that differ from :class:`Job` in one place, which ``fabric diff`` has to name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric

STEPS = 5
BATCH = 6
WIDTH = 4
Batch = list[Tensor]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples in the order of ``indices``. A worker adds noise if ``noise`` is not 0."""

    def __init__(self, indices: Sequence[int], noise: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True)
        self.indices = list(indices)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        index = self.indices[position]
        sample = self.inputs[index]
        if self.noise:
            sample = sample + self.noise * torch.rand(())
        return sample, self.targets[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(0.1)
        self.residual = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.residual * x + self.dropout(self.activation(self.linear(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.skipped_block = -1
        self.repeated_block = -1
        self.dropout_before_head = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for number, block in enumerate(self.blocks):
            if number != self.skipped_block:
                x = block(x)
            if number == self.repeated_block:
                x = block(x)
        x = self.norm(x)
        return self.head(dropout(x, self.dropout_before_head))


class Job:
    """A training job. Subclasses change one thing.

    Attributes:
        difference: The beginning of the line that has to name the difference.
        note: A line of the report besides.
        base: The job that this job is compared with. None: ``Job`` itself.
    """

    difference = ""
    note = ""
    base: type["Job"] | None = None
    model: Any
    optimizer: Any
    seed = 0
    noise = 0.0
    num_workers = 0
    max_norm = 0.5

    def indices(self) -> list[int]:
        return list(range(STEPS * BATCH))

    def samples(self) -> Samples:
        return Samples(self.indices(), self.noise)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.samples(), batch_size=BATCH, num_workers=self.num_workers)

    def change(self, model: Any) -> None:
        """Change the model before it is set up."""

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        return [{"params": model.blocks.parameters()}, {"params": [*model.head.parameters()]}]

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameter_groups(model), lr=0.1)

    def schedule(self, step: int) -> float:
        """Return the learning rate after a step."""
        return 0.1 / (step + 2)

    def on_batch(self, step: int, batch: Batch) -> None:
        """Do something before the forward pass."""

    def loss(self, step: int, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)

    def backward(self, fabric: Fabric, step: int, batch: Batch) -> None:
        inputs, targets = batch
        fabric.backward(self.loss(step, self.model(inputs), targets))

    def clip(self, fabric: Fabric) -> None:
        fabric.clip_gradients(self.model, self.optimizer, max_norm=self.max_norm)

    def on_step(self, step: int) -> None:
        """Do something after the step."""

    def clear(self, step: int) -> None:
        self.optimizer.zero_grad()

    def steps(self, step: int) -> bool:
        return True

    def run(self, fabric: Fabric, folder: str) -> None:
        """Train, and write a fingerprint."""
        fabric.seed_everything(self.seed)
        module: Any = Net()
        self.change(module)
        self.model, self.optimizer = fabric.setup(module, self.build_optimizer(module))
        loader = fabric.setup_dataloaders(self.loader())
        with fabric.fingerprint(folder):
            for step, batch in enumerate(loader):
                self.on_batch(step, batch)
                self.backward(fabric, step, batch)
                self.clip(fabric)
                if self.steps(step):
                    self.optimizer.step()
                self.on_step(step)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.schedule(step)
                self.clear(step)


JOBS: dict[str, type[Job]] = {}


def planted(difference: str, note: str = "") -> Callable[[type[Job]], type[Job]]:
    """Register a job, with the line that names the place of its difference."""

    def register(job: type[Job]) -> type[Job]:
        job.difference = difference
        job.note = note
        JOBS[job.__name__] = job
        return job

    return register


# -- The start and the data ------------------------------------------------------------------------


@planted("step 0, rank 0: random state of python at the start")
class OtherSeed(Job):
    seed = 1


@planted("step 0, rank 0: parameter blocks.1.linear.weight at the start")
class OtherWeight(Job):
    def change(self, model):
        with torch.no_grad():
            model.blocks[1].linear.weight[2, 1] += 1e-6


@planted("step 0, rank 0: buffer norm.running_var at the start")
class OtherBuffer(Job):
    def change(self, model):
        model.norm.running_var[0] = 2


@planted("step 2, rank 0: batch[0]", "same samples, other order from step 2")
class TwoSamplesSwapped(Job):
    def indices(self):
        indices = super().indices()
        indices[12], indices[15] = indices[15], indices[12]
        return indices


@planted("step 3, rank 0: batch[0]", "same samples, other order from step 3")
class BatchPermuted(Job):
    def indices(self):
        indices = super().indices()
        return indices[:18] + indices[23:17:-1] + indices[24:]


@planted("step 1, rank 0: batch[0]", "same samples, other order from step 1, in other batches")
class SamplesOfTwoBatchesSwapped(Job):
    def indices(self):
        indices = super().indices()
        indices[7], indices[20] = indices[20], indices[7]
        return indices


@planted("step 0, rank 0: batch[0]", "same samples, other order from step 0, in other batches")
class Shuffled(Job):
    def indices(self):
        return list(reversed(super().indices()))


@planted("step 4, rank 0: batch[0]", "other samples from step 4")
class SampleRepeated(Job):
    def indices(self):
        return [*super().indices()[:-1], 0]


@planted("step 2, rank 0: batch[0]", "other samples from step 2")
class LastBitOfASample(Job):
    def samples(self):
        samples = super().samples()
        samples.inputs.view(torch.int32)[14, 3] ^= 1
        return samples


@planted("step 1, rank 0: batch[1]", "other samples from step 1")
class OtherTarget(Job):
    def samples(self):
        samples = super().samples()
        samples.targets[8] *= -1
        return samples


@planted("step 3, rank 0: batch[0]", "other samples from step 3")
class FeaturesPermutedWithTheSameXor(Job):
    def samples(self):
        samples = super().samples()
        before = torch.hash_tensor(samples.inputs)
        samples.inputs[19] = samples.inputs[19].flip(0)
        assert torch.hash_tensor(samples.inputs) == before
        return samples


@planted("step 0, rank 0: batch[0]", "other samples from step 0")
class NoiseOfAWorker(Job):
    noise = 0.1
    num_workers = 1


class Noisy(Job):
    noise = 0.1
    num_workers = 1


@planted("step 0, rank 0: batch[0]", "other samples from step 0")
class OtherSeedOfAWorker(Noisy):
    base = Noisy

    def loader(self):
        return DataLoader(
            self.samples(),
            batch_size=BATCH,
            num_workers=self.num_workers,
            worker_init_fn=torch.manual_seed,
        )


@planted("step 2, rank 0: batch[0]", "same samples, other order from step 2, in other batches")
class BatchLeftOut(Job):
    def indices(self):
        indices = super().indices()
        return indices[:12] + indices[18:] + indices[12:18]


@planted("step 3, rank 0: input Net[0]")
class BatchChangedInPlace(Job):
    def on_batch(self, step, batch):
        if step == 3:
            batch[0].mul_(1.001)


@planted("step 2, rank 0: random state of torch when the loader handed the batch out")
class RandomNumberDrawn(Job):
    def on_step(self, step):
        if step == 1:
            torch.rand(())


# -- The forward pass ------------------------------------------------------------------------------


@planted("step 0, rank 0: output of blocks.1.dropout")
class DropoutOff(Job):
    def change(self, model):
        model.blocks[1].dropout.p = 0.0


@planted("step 0, rank 0: output of blocks.2.linear")
class LayerInOtherPrecision(Job):
    def change(self, model):
        model.blocks[2].linear.register_forward_hook(self.round)

    def round(self, module, args, output):
        return output.bfloat16().float()


class WithLargeSum(Job):
    """A job that adds the sum of many numbers, whose rounding depends on the order."""

    def change(self, model):
        self.numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
        model.blocks[2].linear.register_forward_hook(self.add_sum)

    def add_sum(self, module, args, output):
        return output + self.numbers.sum()


@planted("step 0, rank 0: output of blocks.2.linear", "other setting: threads of torch: 1, then 2")
class OtherNumberOfThreads(WithLargeSum):
    base = WithLargeSum

    def run(self, fabric, folder):
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        super().run(fabric, folder)
        torch.set_num_threads(threads)


@planted("step 0, rank 0: output of blocks.0")
class ResidualScaled(Job):
    def change(self, model):
        model.blocks[0].residual = 1.0001


@planted("step 0, rank 0: output of blocks.1.activation")
class OtherActivation(Job):
    def change(self, model):
        model.blocks[1].activation = nn.GELU(approximate="tanh")


@planted("step 0, rank 0: output of blocks.2.norm")
class OtherEpsilonOfANorm(Job):
    def change(self, model):
        model.blocks[2].norm.eps = 1e-4


@planted("step 2, rank 0: output of norm")
class NormInEvaluationMode(Job):
    def on_batch(self, step, batch):
        self.model.norm.train(step != 2)


@planted("step 0, rank 0: buffer norm.running_mean after the step")
class OtherMomentumOfStatistics(Job):
    def change(self, model):
        model.norm.momentum = 0.2


@planted("step 3, rank 0: input blocks.1[0]")
class BlockLeftOut(Job):
    def on_batch(self, step, batch):
        self.model.skipped_block = 1 if step == 3 else -1


@planted("step 2, rank 0: input blocks.1[0] (number 2 in the step)")
class BlockRunTwice(Job):
    def on_batch(self, step, batch):
        self.model.repeated_block = 1 if step == 2 else -1


@planted("step 0, rank 0: input head[0]")
class DropoutAsAFunction(Job):
    def change(self, model):
        model.dropout_before_head = 0.1


@planted("step 0, rank 0: input blocks.0[0]")
class BlocksSwapped(Job):
    def change(self, model):
        first, second, third = model.blocks
        model.forward = nn.Sequential(
            model.embedding, second, first, third, model.norm, model.head
        ).forward


@planted("step 0, rank 0: parameter blocks.1.linear.weight at the start")
class WeightsTied(Job):
    def change(self, model):
        model.blocks[1].linear.weight = model.blocks[0].linear.weight


@planted("step 2, rank 0: output of embedding")
class StepInLowPrecision(Job):
    def backward(self, fabric, step, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == 2):
            super().backward(fabric, step, batch)


@planted("step 3, rank 0: input Net[0]")
class EvaluationBetweenSteps(Job):
    def on_step(self, step):
        if step == 2:
            self.model.eval()
            self.model(torch.zeros(BATCH, WIDTH))
            self.model.train()


@planted("step 2, rank 0: output of head")
class WeightChangedByHand(Job):
    def on_step(self, step):
        if step == 1:
            with torch.no_grad():
                self.model.head.weight[0, 0] += 1e-5


# -- The loss and the backward pass ----------------------------------------------------------------


@planted("step 0, rank 0: loss")
class OtherLoss(Job):
    def loss(self, step, output, target):
        return (output - target).abs().mean()


@planted("step 2, rank 0: loss")
class LossScaled(Job):
    def loss(self, step, output, target):
        loss = super().loss(step, output, target)
        return 2 * loss if step == 2 else loss


@planted("step 1, rank 0: gradient of head.bias after the backward pass")
class TargetOfItself(Job):
    def loss(self, step, output, target):
        if step == 1:
            return mse_loss(output.detach(), target) + 0 * output.sum()
        return super().loss(step, output, target)


@planted("step 0, rank 0: gradient of blocks.0.linear.bias after the backward pass")
class GradientScaledInside(Job):
    def change(self, model):
        model.blocks[0].linear.register_full_backward_hook(self.scale)
        model.blocks[0].activation.register_full_backward_hook(self.scale)

    def scale(self, module, grad_input, grad_output):
        return (2 * grad_input[0],)


@planted("step 0, rank 0: gradient of blocks.1.linear.weight after the backward pass")
class GradientScaledByAHook(Job):
    def change(self, model):
        model.blocks[1].linear.weight.register_hook(self.scale)

    def scale(self, grad):
        return 1.01 * grad


@planted("step 2, rank 0: gradient of blocks.1.linear.bias at the step")
class GradientLost(Job):
    def backward(self, fabric, step, batch):
        super().backward(fabric, step, batch)
        if step == 2:
            self.model.blocks[1].linear.bias.grad = None


@planted("step 3, rank 0: gradient of embedding.bias after the backward pass")
class LayerFrozen(Job):
    def on_batch(self, step, batch):
        self.model.embedding.requires_grad_(step != 3)


@planted("step 2, rank 0: gradient of head.bias after the backward pass")
class GradientsNotCleared(Job):
    def clear(self, step):
        if step != 1:
            self.optimizer.zero_grad()


@planted("step 0, rank 0: gradient of blocks.1.linear.weight at the step")
class GradientChangedByHand(Job):
    def clip(self, fabric):
        super().clip(fabric)
        self.model.blocks[1].linear.weight.grad[0, 0] += 1e-4


@planted("step 0, rank 0: gradient of blocks.0.norm.weight at the step")
class OtherClipping(Job):
    max_norm = 0.4


# -- The step --------------------------------------------------------------------------------------


@planted("step 0, rank 0: option weight_decay of group 1 of AdamW")
class WeightDecayOfOneGroup(Job):
    def parameter_groups(self, model):
        first, second = super().parameter_groups(model)
        return [first, {**second, "weight_decay": 0.0}]


@planted("step 0, rank 0: option betas of group 0 of AdamW[1]")
class OtherBetas(Job):
    def build_optimizer(self, model):
        return torch.optim.AdamW(self.parameter_groups(model), lr=0.1, betas=(0.9, 0.99))


@planted("step 0, rank 0: option eps of group 0 of AdamW")
class OtherEpsilonOfTheOptimizer(Job):
    def build_optimizer(self, model):
        return torch.optim.AdamW(self.parameter_groups(model), lr=0.1, eps=1e-6)


@planted("step 0, rank 0: option lr of group 0 of Adam")
class OtherOptimizer(Job):
    def build_optimizer(self, model):
        return torch.optim.Adam(self.parameter_groups(model), lr=0.1, weight_decay=0.01)


@planted("step 3, rank 0: option lr of group 0 of AdamW")
class SchedulerOneStepLate(Job):
    def schedule(self, step):
        return super().schedule(step if step < 2 else step - 1)


@planted("step 3, rank 0: optimizer state blocks.0.norm.weight step after the step")
class OptimizerStateLost(Job):
    def on_step(self, step):
        if step == 2:
            self.optimizer.state.clear()


@planted("step 3, rank 0: optimizer state blocks.1.linear.weight exp_avg after the step")
class MomentumChangedByHand(Job):
    def on_step(self, step):
        if step == 2:
            weight = self.model.blocks[1].linear.weight
            self.optimizer.state[weight]["exp_avg"][0, 0] += 1e-4


@planted("step 3, rank 0: buffer norm.running_var after the step")
class BufferChangedByHand(Job):
    def on_step(self, step):
        if step == 2:
            self.model.norm.running_var[1] *= 1.001


@planted("step 2, rank 0: option lr of group 2 of AdamW")
class GroupAddedLate(Job):
    def on_batch(self, step, batch):
        if step == 2:
            self.optimizer.add_param_group({"params": self.model.embedding.parameters()})


@planted("step 2, rank 0: batch[0] as the loader handed it out (number 2 in the step)")
class StepLeftOut(Job):
    def steps(self, step):
        return step != 2


@planted("step 0, rank 0: option maximize of group 1 of AdamW")
class GradientAscentInOneGroup(Job):
    def parameter_groups(self, model):
        first, second = super().parameter_groups(model)
        return [first, {**second, "maximize": True}]
