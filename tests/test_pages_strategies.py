"""The scripts of how-to pages train the same model on one process, under DDP and under FSDP."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor
from tests.ranks import run_in_ranks

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
CODE_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LAUNCH = re.compile(r"^fabric = Fabric\(.*\)\nfabric\.launch\(\)\n", re.MULTILINE)
RANKS_OF_PAGES = 2
# The samples of a batch of one process, as the pages show them.
SAMPLES_OF_GAN = 8
SAMPLES_OF_ACCUMULATION = 4


class GlobalNoise:
    """Random numbers for the batch of all processes, of which a process gets its own samples.

    On any number of processes, the numbers are the same.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._rank = fabric.global_rank
        self._generator = torch.Generator().manual_seed(2)

    def randn(self, samples: int, width: int) -> Tensor:
        """Return random numbers for the samples of this process."""
        batch_size = RANKS_OF_PAGES * SAMPLES_OF_GAN
        numbers = torch.randn(batch_size, width, generator=self._generator)
        start = self._rank * samples
        return numbers[start : start + samples]


def script_of_page(name: str) -> str:
    """Return the script of a page, without the lines that make and launch its Fabric."""
    code = "\n".join(CODE_BLOCK.findall((PAGES / name).read_text()))
    script, count = LAUNCH.subn("", code)
    assert count == 1
    return script


def replace(script: str, old: str, new: str) -> str:
    assert old in script
    return script.replace(old, new)


def parameters_and_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters, and the averages of their gradients.

    The steps of Adam hardly depend on the scale of the gradients, but the averages do.
    """
    tensors: list[Tensor] = []
    for parameter in model.parameters():
        average = optimizer.state[parameter]["exp_avg"]
        tensors.append(full_tensor(parameter.detach()))
        tensors.append(full_tensor(average))
    return tensors


def train_gan(fabric: Fabric) -> list[Tensor]:
    samples = RANKS_OF_PAGES * SAMPLES_OF_GAN // fabric.world_size
    script = script_of_page("several-models.md")
    script = replace(script, f"({SAMPLES_OF_GAN}, ", f"({samples}, ")
    script = replace(script, "torch.randn(", "noise.randn(")
    page: dict[str, Any] = {"fabric": fabric, "noise": GlobalNoise(fabric)}
    exec(script, page)
    generator = parameters_and_gradients(page["generator"], page["for_generator"])
    critic = parameters_and_gradients(page["critic"], page["for_critic"])
    return generator + critic


def train_with_accumulation(fabric: Fabric) -> list[Tensor]:
    samples = RANKS_OF_PAGES * SAMPLES_OF_ACCUMULATION // fabric.world_size
    script = script_of_page("accumulation.md")
    script = replace(script, f"batch_size={SAMPLES_OF_ACCUMULATION}", f"batch_size={samples}")
    page: dict[str, Any] = {"fabric": fabric}
    exec(script, page)
    return parameters_and_gradients(page["model"], page["optimizer"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("train", [train_gan, train_with_accumulation])
def test_the_script_of_a_page_trains_the_model_of_one_process(
    train: Callable[[Fabric], list[Tensor]], strategy: str
) -> None:
    (expected,) = run_in_ranks(train, ranks=1, strategy="auto", precision="64-true")
    results = run_in_ranks(train, ranks=RANKS_OF_PAGES, strategy=strategy, precision="64-true")
    for actual in results:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
