"""Collections are taken apart and put together without a change of type, order or identity."""

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
    """Like the model outputs of a well-known library: an ordered dict that is registered and reads as attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__.update(entries)


class Wrapped(dict):
    """A mapping that announces one child only."""


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


pytree.register_pytree_node(
    Output,
    lambda out: (list(out.values()), list(out)),
    lambda v, k: Output(**dict(zip(k, v, strict=True))),
)
pytree.register_pytree_node(
    Wrapped, lambda w: ([w["only"]], None), lambda v, _: Wrapped(only=v[0], built=True)
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
        {2: x, "one": y, (1, "a"): 3},
        torch.max(torch.eye(2), 0),
        torch.Size([1, 2]),
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("index", range(len(collections())))
def test_a_collection_comes_back_as_it_was(index):
    tree = collections()[index]
    leaves, structure = flatten(tree)
    back = unflatten(structure, leaves)
    assert type(back) is type(tree)
    assert same(tree, back)
    assert len(leaf_paths(structure)) == len(leaves)


@pytest.mark.parametrize("index", range(len(collections())))
def test_tensors_of_a_collection_are_mapped_and_nothing_else(index):
    tree = collections()[index]
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert type(mapped) is type(tree)
    before = flatten(tree)[0]
    after = flatten(mapped)[0]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old + 1) if isinstance(old, torch.Tensor) else new is old


def test_what_does_not_change_comes_back_itself():
    cache = [torch.ones(1), {"filled later": []}, Batch(torch.ones(2)), Output(a=torch.ones(1))]
    assert map_tensors(lambda tensor: tensor, cache) is cache
    batch = Batch(torch.ones(2))
    assert map_tensors(lambda tensor: tensor.double(), [batch])[0] is not batch
    assert batch.image.dtype is torch.float32


def test_extras_of_a_container_survive():
    assert flatten(defaultdict(int, a=1))[0] == [1]
    mapped = map_tensors(lambda tensor: tensor + 1, defaultdict(list, a=torch.ones(1)))
    assert mapped.default_factory is list
    assert map_tensors(lambda tensor: tensor + 1, deque([torch.ones(1)], maxlen=4)).maxlen == 4
    output = map_tensors(lambda tensor: tensor + 1, Output(loss=torch.ones(())))
    assert output.loss == 2 == output["loss"]
    assert map_tensors(lambda tensor: tensor + 1, Frozen(torch.ones(1))).length == 3


def test_a_registered_mapping_decides_what_its_children_are():
    wrapped = Wrapped(only=1, other=2)
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
    assert flatten(forward)[0] == flatten(backward)[0]
    assert leaf_paths(flatten(forward)[1]) == leaf_paths(flatten(backward)[1])
    leaves, structure = flatten(backward)
    assert list(unflatten(structure, leaves)) == list(reversed(keys))


def test_keys_are_ordered_by_type_name_then_value():
    assert flatten({"b": 1, 2: 2, 1: 3, 0.5: 4, "a": 5})[0] == [4, 3, 2, 5, 1]


def test_keys_that_only_identity_tells_apart_keep_the_order_of_insertion():
    weights = [torch.nn.Parameter(torch.tensor([value, 1.0])) for value in (3.0, 1.0, 2.0)]
    assert flatten({weight: place for place, weight in enumerate(weights)})[0] == [0, 1, 2]
    assert flatten({IDENTITY_B: 0, IDENTITY_A: 1})[0] == [0, 1]
    assert flatten({print: 0, len: 1, flatten: 2})[0] == [1, 0, 2]


def test_paths_are_written_as_code():
    tree = {"losses": [1, Point(2, 3)], "b": Batch(4, (5,)), 7: Output(loss=6)}
    paths = leaf_paths(flatten(tree)[1], "x")
    assert [eval(path, {"x": tree}) for path in paths] == flatten(tree)[0]  # noqa: S307 - our own text
    assert "x['losses'][1].y" in paths
    assert leaf_paths(flatten(3)[1], "x") == ["x"]


def test_sets_classes_and_modules_are_leaves():
    for leaf in ({1, 2}, Batch, torch.nn.Linear(1, 1), b"x", range(3)):
        leaves, _ = flatten(leaf)
        assert len(leaves) == 1
        assert leaves[0] is leaf


class Movable:
    def __init__(self, result: Any) -> None:
        self.result = result
        self.asked = None

    def to(self, device: torch.device) -> Any:
        self.asked = device
        return self.result


def test_objects_that_can_move_are_asked_to():
    moved = Movable("moved")
    in_place = Movable(None)
    result = to_device({"a": moved, "b": [in_place]}, CPU)
    assert result["a"] == "moved"
    assert result["b"][0] is in_place
    assert moved.asked == in_place.asked == CPU


@pytest.mark.parametrize("index", range(len(collections())))
def test_moving_keeps_the_type_and_what_is_there_already(index):
    tree = collections()[index]
    moved = to_device(tree, CPU)
    assert type(moved) is type(tree)
    assert all(new is old for old, new in zip(flatten(tree)[0], flatten(moved)[0], strict=True))


def test_every_tensor_of_a_batch_moves():
    batch = {"x": [torch.ones(1)], "y": Batch(torch.ones(2), "label"), "p": Point(torch.ones(1), 1)}
    moved = to_device(batch, torch.device("meta"))
    kinds = [leaf.device.type for leaf in flatten(moved)[0] if isinstance(leaf, torch.Tensor)]
    assert kinds == ["meta"] * 3
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
