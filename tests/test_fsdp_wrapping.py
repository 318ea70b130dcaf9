"""The choice of the modules of a model that become FSDP modules."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.strategies.fsdp.wrapping import find_fsdp_modules, parse_wrap_policy
from tests.loops import Block, Transformer


def names_of_fsdp_modules(root: nn.Module, policy: object = None) -> set[str]:
    parsed_policy = parse_wrap_policy(policy)
    modules = find_fsdp_modules(root, parsed_policy)
    return {name for name, module in root.named_modules() if module in modules}


class Layers(nn.Module):
    """Blocks as lists of layers that are called one by one, as in some models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            block = nn.ModuleList([nn.Linear(2, 2), nn.GELU()])
            self.layers.append(block)


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(8, 1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head.weight = self.embedding.weight
        self.blocks[2].mlp[0].weight = self.blocks[1].mlp[0].weight


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def shared_block() -> nn.Module:
    block = Block()
    return nn.ModuleList([block, block, block])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Transformer(), {"blocks.0", "blocks.1"}),
        (Layers(), {"layers.0.0", "layers.1.0"}),
        (Attributes(), {"first", "second"}),
        (
            nn.Transformer(8, 2, 2, 2, 8, batch_first=True),
            {
                "encoder.layers.0",
                "encoder.layers.1",
                "decoder.layers.0",
                "decoder.layers.1",
            },
        ),
        (small_mlp(), set()),
        (nn.Sequential(Block(), Block()), {"0", "1"}),
        (nn.Linear(2, 2), set()),
        (Tied(), {"blocks.0"}),
        (shared_block(), set()),
    ],
)
def test_repeated_blocks_are_found(model: nn.Module, expected: set[str]) -> None:
    assert names_of_fsdp_modules(model) == expected


def test_classes_choose_inner_before_outer() -> None:
    model = Transformer()
    assert names_of_fsdp_modules(model, Block) == {"blocks.0", "blocks.1"}
    policy = parse_wrap_policy({Block, nn.LayerNorm})
    modules = find_fsdp_modules(model, policy)
    assert len(modules) == 4
    block = model.blocks[0]
    assert modules.index(block.norm) < modules.index(block)


def test_a_size_counts_the_parameters_outside_inner_fsdp_modules() -> None:
    model = Transformer()
    assert names_of_fsdp_modules(model, 500) == {"blocks.0", "blocks.1"}
    assert names_of_fsdp_modules(model, 200) == {
        "blocks.0.attention",
        "blocks.0.mlp",
        "blocks.1.attention",
        "blocks.1.mlp",
    }
    assert names_of_fsdp_modules(model, 10**6) == set()


@pytest.mark.parametrize(
    "policy",
    [
        lambda module: isinstance(module, Block),
        ModuleWrapPolicy({Block}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=500),
    ],
)
def test_a_function_chooses_modules(policy: object) -> None:
    assert names_of_fsdp_modules(Transformer(), policy) == {"blocks.0", "blocks.1"}


def test_a_policy_that_separates_a_shared_parameter_is_refused_by_name() -> None:
    shared = r"blocks\.1\.mlp\.0\.weight and blocks\.2\.mlp\.0\.weight"
    with pytest.raises(ConfigurationError, match=shared):
        names_of_fsdp_modules(Tied(), {Block})
    with pytest.raises(ConfigurationError, match=r"embedding\.weight and head\.weight"):
        names_of_fsdp_modules(Tied(), {nn.Embedding})


def test_classes_that_do_not_occur_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Conv2d") as caught:
        names_of_fsdp_modules(Transformer(), {nn.Conv2d})
    assert "Block" in caught.value.expected


@pytest.mark.parametrize(
    "policy", ["Block", 0, True, 1.5, [3], [nn.Linear, 3], int, torch.Tensor, []]
)
def test_a_value_that_is_no_policy_is_refused(policy: object) -> None:
    with pytest.raises(ArgumentTypeError, match="auto_wrap_policy="):
        parse_wrap_policy(policy)
