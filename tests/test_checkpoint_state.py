"""The user's objects become plain state and come back; what does not fit changes nothing."""

import collections
import dataclasses
import enum
import pathlib
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fabric.checkpoint import FullCheckpoint
from fabric.checkpoint.restore import check_fits, restore
from fabric.checkpoint.state import (
    FORMAT_VERSION,
    METADATA_KEY,
    StateDicts,
    check_plain,
    pop_metadata,
    select_content,
)
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Counter:
    """An object of the user that has a state dict."""

    def __init__(self, value=0, broken=False):
        self.value = value
        self.broken = broken

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.broken:
            raise RuntimeError("broken")
        self.value = state["value"]


class TorchStrategy:
    """Reads and restores state dicts as torch does, without shards."""

    def get_module_state_dict(self, module, *, sharded=False):
        return module.state_dict()

    def load_module_state_dict(self, module, state_dict, strict=True):
        module.load_state_dict(state_dict, strict=strict)

    def load_optimizer_state_dict(self, optimizer, state_dict):
        optimizer.load_state_dict(state_dict)

    def full_state(self, state):
        return state


def prepared_module(module):
    return module


STATE_DICTS = StateDicts(TorchStrategy(), prepared_module)


def save(state, filter=None, trainable_only=False):
    content = STATE_DICTS.read(state, check_plain)
    content = select_content(state, content, filter, trainable_only)
    for name, value in content.items():
        check_plain(name, value)
    return content


def load(loaded, state, strict=True):
    if state is None:
        return restore(loaded, {}, STATE_DICTS, strict)
    pop_metadata(loaded)
    check_fits(loaded, state, STATE_DICTS.read_module, strict, check_plain)
    return restore(loaded, state, STATE_DICTS, strict)


def through_a_file(content, tmp_path):
    FullCheckpoint().save(content, tmp_path / "file.pt")
    return FullCheckpoint().load(tmp_path / "file.pt")


def model(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(steps=3):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "counter": Counter(steps),
        "step": steps,
    }


def fresh():
    return trained(steps=0)


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    elif isinstance(actual, dict):
        assert list(actual) == list(expected)
        for key in actual:
            assert_same(actual[key], expected[key])
    else:
        assert actual == expected


def test_everything_comes_back_bit_for_bit(tmp_path):
    original = trained()
    restored = fresh()
    unused = load(through_a_file(save(original), tmp_path), restored)
    assert unused == {}
    assert_same(save(restored), save(original))


def test_a_restored_run_goes_on_like_the_original(tmp_path):
    original = trained()
    restored = fresh()
    load(through_a_file(save(original), tmp_path), restored)
    batch = torch.randn(8, 3)
    for state in (original, restored):
        state["optimizer"].zero_grad()
        state["model"](batch).square().sum().backward()
        state["optimizer"].step()
    assert_same(save(restored)["model"], save(original)["model"])


def test_tensors_are_not_copied_on_the_way_out():
    state = trained()
    saved = save({**state, "ema": torch.ones(3)})
    assert saved["model"]["0.weight"].data_ptr() == state["model"][0].weight.data_ptr()


def test_what_was_restored_shares_no_memory_with_the_file():
    loaded = save({**trained(), "ema": [torch.ones(3)]})
    state = {**fresh(), "ema": None}
    load(loaded, state)
    slots = next(iter(state["optimizer"].state.values()))
    slots["exp_avg"].fill_(7)
    slots["step"].fill_(7)
    state["ema"][0].fill_(7)
    first = loaded["optimizer"]["state"][0]
    assert not first["exp_avg"].eq(7).any()
    assert first["step"] == 3
    assert loaded["ema"][0].eq(1).all()


def test_plain_values_are_replaced_and_the_rest_is_returned():
    loaded = {
        "step": 5,
        "best": 0.5,
        "history": [1.0, {"a": (1, 2)}],
        METADATA_KEY: {"format_version": 1},
    }
    state = {"step": 0}
    assert load(loaded, state) == {"best": 0.5, "history": [1.0, {"a": (1, 2)}]}
    assert state == {"step": 5}
    assert set(load(loaded, None)) == {"step", "best", "history"}


PLAIN = [
    None,
    True,
    3,
    -(10**30),
    0.1,
    1j,
    "text",
    b"bytes",
    bytearray(b"x"),
    (),
    (1, [2, {3}]),
    {"a": {1: None, (1, 2): 3}},
    OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    torch.float32,
    torch.device("cpu"),
    torch.Size([2, 3]),
    torch.strided,
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_is_kept_with_its_type(tmp_path, value):
    loaded = through_a_file(save({"value": value}), tmp_path)["value"]
    assert type(loaded) is type(value)
    assert loaded == value


def test_data_that_holds_itself_is_refused():
    ring = [1]
    ring.append(ring)
    with pytest.raises(ArgumentTypeError, match="contains itself"):
        save({"ring": ring})


NOT_PLAIN = {
    "lambda": lambda x: x,
    "enum": Colour.RED,
    "numpy scalar": np.float64(1),
    "numpy array": np.ones(2),
    "path": pathlib.Path("x"),
    "dataclass": Config(),
    "frozenset": frozenset({1}),
    "defaultdict": collections.defaultdict(list),
    "named tuple": collections.namedtuple("Point", "x")(1),
    "generator": torch.Generator(),
    "module in a list": nn.Linear(1, 1),
    "meta tensor": torch.ones(1, device="meta"),
    "class": Config,
    "object": object(),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_could_not_be_loaded_is_refused_when_saved_and_its_place_named(kind):
    with pytest.raises(ArgumentTypeError, match=r"value\.item\(\)") as raised:
        save({"config": {"deep": [0, NOT_PLAIN[kind]]}})
    assert "state['config']['deep'][1]" in raised.value.request


@pytest.mark.parametrize("allowed", [Colour, (Colour, f"{Colour.__module__}.Colour")])
def test_a_class_that_the_user_allows_is_kept(tmp_path, allowed):
    with torch.serialization.safe_globals([allowed]):
        assert through_a_file(save({"colour": Colour.RED}), tmp_path)["colour"] is Colour.RED


class Names(list):
    """A list of a class of the user's own."""


SUBCLASSED_COLLECTIONS = [
    Names(["a"]),
    collections.defaultdict(list, a=[1]),
    collections.deque([1]),
]


@pytest.mark.parametrize("value", SUBCLASSED_COLLECTIONS, ids=lambda value: type(value).__name__)
def test_a_subclassed_collection_is_refused_also_if_its_class_is_allowed(value):
    with (
        torch.serialization.safe_globals([type(value)]),
        pytest.raises(ArgumentTypeError, match="only into a plain list or dict"),
    ):
        save({"value": value})


class RebuiltNames(list):
    """A list whose constructor is passed the items again."""

    def __reduce__(self):
        return RebuiltNames, (list(self),)


def test_a_subclassed_collection_that_passes_its_items_to_its_constructor_is_kept(tmp_path):
    with torch.serialization.safe_globals([RebuiltNames]):
        saved = save({"names": RebuiltNames(["a"])})
        assert type(through_a_file(saved, tmp_path)["names"]) is RebuiltNames


def test_an_object_whose_state_is_not_plain_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"state\['counter'\]\['value'\]"):
        save({"counter": Counter(value=np.int64(3))})


def test_no_module_is_asked_before_the_other_entries_are_checked():
    modules = []
    state_dicts = replace(STATE_DICTS, prepared_module=modules.append)
    with pytest.raises(ArgumentTypeError):
        state_dicts.read({"model": nn.Linear(1, 1), "f": print}, check_plain)
    assert modules == []


@pytest.mark.parametrize(
    "use", [save, lambda state: load({"loader": {}}, state)], ids=["save", "load"]
)
def test_a_plain_loader_is_refused_with_the_way_out(use):
    with pytest.raises(ArgumentTypeError, match=r"setup_dataloaders\(loader\)"):
        use({"loader": DataLoader([1, 2])})


def test_filter_chooses_items_of_its_entry_and_keeps_layer_versions():
    net = model()
    saved = save(
        {"model": net, "other": {"a": 1, "b": 2}},
        filter={"model": lambda name, _: name.startswith("0.")},
    )
    assert list(saved["model"]) == ["0.weight", "0.bias"]
    assert saved["model"]._metadata == net.state_dict()._metadata
    assert saved["other"] == {"a": 1, "b": 2}


def test_filter_leaves_the_users_dict_alone():
    config = {"a": 1, "b": 2}
    assert save({"config": config}, filter={"config": lambda name, _: name == "a"}) == {
        "config": {"a": 1}
    }
    assert config == {"a": 1, "b": 2}


def test_a_filter_that_raises_is_heard():
    with pytest.raises(ZeroDivisionError):
        save({"model": model()}, filter={"model": lambda name, value: 1 // 0})


REFUSED_SAVES = {
    "reserved name": ({METADATA_KEY: 1}, None, ConfigurationError),
    "filter for an unknown entry": ({"a": {}}, {"b": bool}, ConfigurationError),
    "filter for a number": ({"a": 1}, {"a": bool}, ConfigurationError),
}


@pytest.mark.parametrize("case", REFUSED_SAVES)
def test_refused_saves_say_what_to_write(case):
    state, chosen, error = REFUSED_SAVES[case]
    with pytest.raises(error) as raised:
        save(state, filter=chosen)
    assert raised.value.request
    assert raised.value.problem
    assert raised.value.expected


def wider():
    net = model(width=5)
    groups = [{"params": [parameter]} for parameter in net.parameters()]
    return {"model": net, "optimizer": torch.optim.AdamW(groups)}


def test_all_reasons_are_in_one_error_and_nothing_is_changed():
    loaded = save(trained())
    del loaded["model"]["2.bias"]
    loaded["model"]["head.weight"] = torch.ones(1)
    state = {**wider(), "step": 0, "counter": Counter()}
    before = save({"model": state["model"]})["model"]["2.bias"].clone()
    with pytest.raises(CheckpointError) as raised:
        load(loaded, state)
    text = str(raised.value)
    for reason in (
        "2.bias",
        "head.weight",
        "0.weight is (4, 3) in the file and (5, 3)",
        "AdamW hold 1, 1, 1, 1, 1, 1",
    ):
        assert reason in text
    assert torch.equal(state["model"][2].bias, before)
    assert state["step"] == 0
    assert state["counter"].value == 0


def test_a_missing_entry_lists_what_the_file_has():
    state = {"model": model(), "ema": model()}
    with pytest.raises(CheckpointError, match="no 'ema'") as raised:
        load(save(trained()), state)
    assert "'model', 'optimizer', 'scheduler', 'counter', 'step'" in raised.value.problem


def test_a_frozen_parameter_is_left_out_under_all_of_its_names():
    tied = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    tied["second"].weight = tied["first"].weight
    tied["first"].weight.requires_grad_(False)
    content = save({"model": tied}, trainable_only=True)
    assert list(content["model"]) == ["first.bias", "second.bias"]


def test_not_strict_loads_what_fits_by_name():
    loaded = save(trained())
    bias = loaded["model"].pop("2.bias").clone() + 1
    loaded["model"]["head.weight"] = torch.ones(1)
    state = {"model": model(), "ema": model(), "step": 0}
    state["model"][2].bias.data.copy_(bias)
    load(loaded, state, strict=False)
    assert torch.equal(state["model"][0].weight, loaded["model"]["0.weight"])
    assert torch.equal(state["model"][2].bias, bias)
    assert state["step"] == 3


def test_not_strict_still_refuses_other_shapes():
    with pytest.raises(CheckpointError, match="other shapes"):
        load(save(trained()), {"model": model(width=5)}, strict=False)


def test_an_object_that_fails_leaves_the_module_untouched():
    state = {**fresh(), "counter": Counter(broken=True)}
    before = state["model"][0].weight.clone()
    with pytest.raises(RuntimeError, match="broken"):
        load(save(trained()), state)
    assert torch.equal(state["model"][0].weight, before)


def test_an_entry_of_another_kind_is_refused():
    with pytest.raises(CheckpointError, match="a value of type int"):
        load({"model": 3}, {"model": model()})
    with pytest.raises(CheckpointError, match="'param_groups'"):
        load({"optimizer": {"a": 1}}, {"optimizer": torch.optim.SGD(model().parameters())})


def test_names_with_a_wrappers_prefix_are_pointed_out():
    loaded = {"model": {f"module.{name}": value for name, value in model().state_dict().items()}}
    with pytest.raises(CheckpointError, match=r"begin with 'module\.'"):
        load(loaded, {"model": model()})


def test_metadata_travels_beside_the_entries(tmp_path):
    metadata = {"format_version": FORMAT_VERSION, "world_size": 2, "rng": [torch.get_rng_state()]}
    loaded = through_a_file({"step": 1, METADATA_KEY: metadata}, tmp_path)
    metadata = pop_metadata(loaded)
    assert metadata["format_version"] == FORMAT_VERSION
    assert metadata["world_size"] == 2
    assert torch.equal(metadata["rng"][0], torch.get_rng_state())
    assert load(loaded, None) == {"step": 1}
    assert pop_metadata({"step": 1}) == {}


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, "2"])
def test_a_file_of_a_newer_fabric_is_refused(version):
    state = {"step": 0}
    with pytest.raises(CheckpointError, match="newer release"):
        load({"step": 1, METADATA_KEY: {"format_version": version}}, state)
    assert state == {"step": 0}
