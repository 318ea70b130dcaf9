"""Collections are taken apart and put together without a change of type, order or identity."""

import ast
import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fabric.tree import flatten, leaf_paths, map_tensors, to_device, unflatten

Point = namedtuple("Point", "x y")
CPU = torch.device("cpu")


@dataclasses.dataclass
class Batch:
    image: Any
    label: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    image: Any
    length: int = dataclasses.field(default=3, init=False)


class Output(OrderedDict):
    """A registered ordered dict with attributes, as model outputs of other libraries are."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__.update(entries)


class Wrapped(dict):
    """A mapping that registers only one of its entries as a child."""


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
)
pytree.register_pytree_node(
    Wrapped,
    lambda wrapped: ([wrapped["only"]], None),
    lambda values, _: Wrapped(only=values[0], built=True),
)


def collections() -> list[Any]:
    x = torch.ones(2)
    y = torch.zeros(())
    return [
        x, 1.5, None, "text", (), [], {},
        [x, (y, {"k": x})],
        Point(x, [y]),
        Batch(x, {"a": y}),
        Frozen(x),
        OrderedDict(b=x, a=y),
        defaultdict(list, b=[x], a=[y]),
        deque([x, y], maxlen=4),
        Output(loss=y, logits=x),
        {2: x, "key": y, (1, "a"): 3},
        torch.max(torch.eye(2), 0),
        torch.Size([1, 2]),
    ]  # fmt: skip


def is_equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(actual, expected)
    if dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            if not is_equal(getattr(actual, field.name), getattr(expected, field.name)):
                return False
        return True
    if isinstance(expected, dict):
        has_same_keys = list(actual) == list(expected)
        return has_same_keys and all(is_equal(actual[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple | deque):
        return len(actual) == len(expected) and all(map(is_equal, actual, expected))
    return actual == expected


@pytest.mark.parametrize("index", range(len(collections())))
def test_a_collection_comes_back_as_it_was(index):
    tree = collections()[index]
    leaves, structure = flatten(tree)
    rebuilt = unflatten(structure, leaves)
    assert type(rebuilt) is type(tree)
    assert is_equal(rebuilt, tree)
    assert len(leaf_paths(structure)) == len(leaves)


@pytest.mark.parametrize("index", range(len(collections())))
def test_tensors_of_a_collection_are_mapped_and_nothing_else(index):
    tree = collections()[index]
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped) is type(tree)
    leaves, _ = flatten(tree)
    mapped_leaves, _ = flatten(mapped)
    for leaf, mapped_leaf in zip(leaves, mapped_leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(mapped_leaf, leaf + 1)
        else:
            assert mapped_leaf is leaf


def test_a_collection_that_does_not_change_comes_back_itself():
    cache = [torch.ones(1), {"filled later": []}, Batch(torch.ones(2)), Output(a=torch.ones(1))]
    assert map_tensors(lambda tensor: tensor, cache) is cache
    batch = Batch(torch.ones(2))
    assert map_tensors(lambda tensor: tensor.double(), [batch])[0] is not batch
    assert batch.image.dtype is torch.float32


def test_attributes_of_a_container_survive():
    assert flatten(defaultdict(int, a=1))[0] == [1]
    mapped = map_tensors(lambda tensor: tensor + 1, defaultdict(list, a=torch.ones(1)))
    assert mapped.default_factory is list
    assert map_tensors(lambda tensor: tensor + 1, deque([torch.ones(1)], maxlen=4)).maxlen == 4
    output = map_tensors(lambda tensor: tensor + 1, Output(loss=torch.ones(())))
    assert output.loss == 2
    assert output["loss"] == 2
    assert map_tensors(lambda tensor: tensor + 1, Frozen(torch.ones(1))).length == 3


def test_a_registered_mapping_decides_what_its_children_are():
    wrapped = Wrapped(only=1, hidden=2)
    leaves, structure = flatten(wrapped)
    assert leaves == [1]
    assert unflatten(structure, [5]) == {"only": 5, "built": True}


IDENTITY_A = object()
IDENTITY_B = object()


@pytest.mark.parametrize(
    "keys",
    [
        ("b", "a", "c"),
        (10, 9, 2),
        (2, "a", 1.5, True, None, (1, "x")),
        (frozenset("ab"), frozenset("c"), frozenset("bc")),
        (Colour.RED, Colour.BLUE),
        ((2, "b"), (2, 3), (1,)),
        (torch.float32, torch.float64, torch.device("cpu")),
    ],
)
def test_order_of_insertion_does_not_matter(keys):
    forward = {key: str(key) for key in keys}
    backward = {key: str(key) for key in reversed(keys)}
    leaves, structure = flatten(forward)
    backward_leaves, backward_structure = flatten(backward)
    assert leaves == backward_leaves
    assert leaf_paths(structure) == leaf_paths(backward_structure)
    assert list(unflatten(backward_structure, backward_leaves)) == list(reversed(keys))


def test_keys_are_ordered_by_type_name_then_value():
    assert flatten({"b": 1, 2: 2, 1: 3, 0.5: 4, "a": 5})[0] == [4, 3, 2, 5, 1]


def test_keys_that_only_identity_tells_apart_keep_the_order_of_insertion():
    weights = [torch.nn.Parameter(torch.tensor([value, 1.0])) for value in (3.0, 1.0, 2.0)]
    leaves, _ = flatten(dict(zip(weights, (0, 1, 2), strict=True)))
    assert leaves == [0, 1, 2]
    leaves, _ = flatten({IDENTITY_B: 0, IDENTITY_A: 1})
    assert leaves == [0, 1]


def test_the_order_of_a_frozenset_that_is_a_key_does_not_matter():
    # The two sets are equal, but each is visited in the order in which it was filled.
    for key in (frozenset([0, 8]), frozenset([8, 0])):
        leaves, _ = flatten({frozenset([4]): "second", key: "first"})
        assert leaves == ["first", "second"]


def test_functions_as_keys_are_ordered_by_type_and_name():
    leaves, _ = flatten({print: 0, len: 1, flatten: 2})
    assert leaves == [1, 0, 2]


def test_paths_are_written_as_code():
    tree = {"losses": [1, Point(2, 3)], "b": Batch(4, (5,)), 7: Output(loss=6)}
    leaves, structure = flatten(tree)
    paths = leaf_paths(structure, "x")
    assert [eval(path, {"x": tree}) for path in paths] == leaves  # noqa: S307 - our own text
    assert "x['losses'][1].y" in paths
    assert leaf_paths(flatten(3)[1], "x") == ["x"]


def test_fields_that_are_not_set_are_left_out():
    batch = Batch(image=torch.ones(1))
    del batch.image
    leaves, structure = flatten(batch)
    assert leaves == [0]
    rebuilt = unflatten(structure, [5])
    assert rebuilt.label == 5
    assert not hasattr(rebuilt, "image")


def test_sets_classes_and_modules_are_leaves():
    # A node of Python's syntax tree has an attribute _fields, as a named tuple has.
    for leaf in ({1, 2}, Batch, torch.nn.Linear(1, 1), b"x", range(3), ast.Pass()):
        leaves, _ = flatten(leaf)
        assert len(leaves) == 1
        assert leaves[0] is leaf


class Movable:
    def __init__(self, result: Any) -> None:
        self.result = result
        self.device = None

    def to(self, device: torch.device) -> Any:
        self.device = device
        return self.result


def test_objects_that_can_move_are_asked_to():
    moved = Movable("moved")
    in_place = Movable(None)
    result = to_device({"a": moved, "b": [in_place]}, CPU)
    assert result["a"] == "moved"
    assert result["b"][0] is in_place
    assert moved.device == CPU
    assert in_place.device == CPU


@pytest.mark.parametrize("index", range(len(collections())))
def test_moving_keeps_the_type_and_the_leaves_that_are_on_the_device(index):
    tree = collections()[index]
    moved = to_device(tree, CPU)
    assert type(moved) is type(tree)
    leaves, _ = flatten(tree)
    moved_leaves, _ = flatten(moved)
    for leaf, moved_leaf in zip(leaves, moved_leaves, strict=True):
        assert moved_leaf is leaf


def test_every_tensor_of_a_batch_moves():
    batch = {"x": [torch.ones(1)], "y": Batch(torch.ones(2), "label"), "p": Point(torch.ones(1), 1)}
    moved = to_device(batch, torch.device("meta"))
    leaves, _ = flatten(moved)
    device_types = [leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert device_types == ["meta"] * 3
    assert moved["y"].label == "label"
    assert batch["x"][0].device == CPU


def test_packed_sequences_move():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    moved = to_device([packed], CPU)[0]
    assert type(moved) is type(packed)
    assert torch.equal(moved.data, packed.data)


def test_a_state_dict_keeps_its_metadata():
    state = torch.nn.BatchNorm1d(2).state_dict()
    mapped = map_tensors(torch.clone, state)
    assert mapped is not state
    assert list(mapped) == list(state)
    assert mapped._metadata == state._metadata
