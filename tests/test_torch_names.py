"""Names of torch that are private or were renamed do what fabric needs of them."""

import copy
import gc
import multiprocessing
import os
import pickle
import sys
import threading
import weakref
from collections import Counter, OrderedDict, namedtuple
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data
from torch.utils.checkpoint import checkpoint

from fabric import _torch
from fabric._torch import saved_constant, saved_option
from fabric.tools import _torch as tool_names
from tests.ranks import in_another_process

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def group():
    """A process group of one, and the store behind it."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_backward_pass_is_noticed_from_inside():
    answers = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: answers.append(_torch.is_in_backward()))
    answers.append(_torch.is_in_backward())
    x.sum().backward()
    answers.append(_torch.is_in_backward())
    assert answers == [False, True, False]


def test_the_functions_by_which_a_compiler_is_known_are_there():
    # As text, since to import them takes seconds; a test of the watchdog compiles.
    sources = {
        "_dynamo/convert_frame.py": "\ndef _compile(",
        "_inductor/compile_fx.py": "\ndef compile_fx_inner(",
    }
    for file, text in sources.items():
        assert text in (Path(torch.__file__).parent / file).read_text()


class WaitingDataset(data.Dataset):
    """A dataset whose sample comes when an event is set, with the id of the worker's process."""

    def __init__(self, event):
        self.event = event

    def __len__(self):
        return 1

    def __getitem__(self, index):
        assert self.event.wait(150)
        return os.getpid()


def worker_waited_for_and_worker():
    event = multiprocessing.get_context("fork").Event()
    loader = data.DataLoader(
        WaitingDataset(event), num_workers=1, multiprocessing_context="fork", collate_fn=list
    )
    batches = iter(loader)
    main_thread = threading.get_ident()
    awaited = []

    def find_the_worker():
        while not awaited:
            pid = _torch.awaited_worker(sys._current_frames()[main_thread])
            if pid is not None:
                awaited.append(pid)
        event.set()

    thread = threading.Thread(target=find_the_worker)
    thread.start()
    [worker] = next(batches)
    thread.join(150)
    return awaited, worker


def test_the_worker_that_a_thread_waits_for_is_found():
    awaited, worker = in_another_process(worker_waited_for_and_worker)
    assert awaited == [worker]
    assert _torch.awaited_worker(sys._getframe()) is None


def test_loaders_that_are_iterated_over_are_found_while_they_are():
    dataset = data.TensorDataset(torch.ones(4))
    counts = []
    for options in (
        {},
        {"shuffle": True},
        {"batch_size": None},
        {"sampler": data.WeightedRandomSampler([1.0], 1)},
    ):
        for _ in data.DataLoader(dataset, **options):
            counts.append(_torch.datasets_iterated_in_full().count("TensorDataset"))
            break
    assert counts == [1, 1, 1, 0]


def test_changes_in_place_are_counted():
    x = torch.ones(2)
    versions = []
    for change in (x.clone, x.zero_, lambda: x[0].add_(1)):
        change()
        versions.append(_torch.in_place_version(x))
    assert versions == [0, 1, 2]


def test_a_function_is_called_at_the_end_of_a_backward_pass():
    gradients = []
    x = torch.ones(1, requires_grad=True)
    y = torch.ones(1, requires_grad=True)
    doubled = y * 2
    doubled.register_hook(
        lambda grad: _torch.at_end_of_backward(lambda: gradients.append((x.grad, y.grad)))
    )
    (x + doubled).sum().backward()
    assert gradients == [(x.grad, y.grad)]


def test_hooks_of_a_parameter_are_shared_with_another():
    source = nn.Parameter(torch.ones(1))
    target = nn.Parameter(torch.ones(1))
    accumulated = []
    source.register_hook(lambda grad: grad * 2)
    source.register_post_accumulate_grad_hook(accumulated.append)
    _torch.share_gradient_hooks(source, target)
    _torch.share_accumulation_hooks(source, target)
    handle = source.register_hook(lambda grad: grad * 0)
    target.register_hook(lambda grad: grad + 1)
    handle.remove()
    target.sum().backward()
    assert target.grad.tolist() == [3.0]
    assert accumulated[0] is target


def test_one_level_of_a_registered_type_is_opened_and_no_more():
    inner = [1, [2]]
    values, rebuild = _torch.flatten_one_level(OrderedDict(b=inner, a=None))
    assert values[0] is inner
    assert values[1] is None
    assert rebuild([3, 4]) == OrderedDict(b=3, a=4)
    assert _torch.flatten_one_level(Pair([1], 2))[0] == [[1], 2]


@pytest.mark.parametrize("leaf", [object(), torch.ones(1), 3, {1}, nn.Linear(1, 1), "text"])
def test_other_objects_are_not_opened(leaf):
    assert _torch.flatten_one_level(leaf) is None


def test_torchs_own_return_types_are_registered():
    values, rebuild = _torch.flatten_one_level(torch.max(torch.eye(2), 0))
    assert len(values) == 2
    assert type(rebuild(values)) is torch.return_types.max


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("value", "expected_found_inf"), [(4.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)]
)
def test_unscaling_multiplies_in_place_and_notes_a_value_that_is_not_finite(
    dtype, value, expected_found_inf
):
    gradients = [torch.full((3,), 8.0, dtype=dtype), torch.full((2, 2), 4.0, dtype=dtype)]
    gradients[1][0, 0] = value
    found_inf = torch.zeros(1)
    _torch.unscale_and_check(gradients, found_inf, torch.tensor([0.25]))
    assert gradients[0].tolist() == [2.0] * 3
    assert gradients[1][1, 1] == 1.0
    assert found_inf.item() == expected_found_inf


def test_unscaling_does_not_clear_an_earlier_finding():
    found_inf = torch.ones(1)
    _torch.unscale_and_check([torch.ones(1)], found_inf, torch.ones(1))
    assert found_inf.item() == 1.0


def test_the_scale_grows_after_the_interval_and_backs_off_at_once():
    scale = torch.tensor([8.0])
    tracker = torch.zeros(1, dtype=torch.int32)
    finite = torch.zeros(1)
    infinite = torch.ones(1)
    scales_and_trackers = []
    for found_inf in (finite, finite, finite, infinite, finite):
        _torch.backoff_or_grow(scale, tracker, found_inf, 2.0, 0.5, 2)
        scales_and_trackers.append((scale.item(), tracker.item()))
    assert scales_and_trackers == [(8.0, 1), (16.0, 0), (16.0, 1), (8.0, 0), (8.0, 1)]


def test_the_scale_does_not_grow_to_infinity():
    scale = torch.tensor([2.0**127])
    tracker = torch.zeros(1, dtype=torch.int32)
    _torch.backoff_or_grow(scale, tracker, torch.zeros(1), 2.0, 0.5, 1)
    assert scale.item() == 2.0**127


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_many_tensors_are_multiplied_in_place(dtype):
    tensors = [torch.ones(2, dtype=dtype), torch.full((2, 2), 3.0, dtype=dtype)]
    pointers = [tensor.data_ptr() for tensor in tensors]
    _torch.foreach_multiply(tensors, torch.tensor(4.0))
    assert [tensor.flatten()[0].item() for tensor in tensors] == [4.0, 12.0]
    assert [tensor.data_ptr() for tensor in tensors] == pointers
    assert all(tensor.dtype is dtype for tensor in tensors)


def test_a_sharded_tensor_gives_its_shard_and_the_full_tensor(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(4.0)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (1,)), [Shard(0)])
    local = _torch.local_tensor(sharded)
    assert type(local) is torch.Tensor
    local.mul_(2)
    assert _torch.full_tensor(sharded).tolist() == [0.0, 2.0, 4.0, 6.0]
    similar = _torch.dtensor_like(sharded, torch.ones(4))
    assert similar.placements == sharded.placements
    assert similar.device_mesh == sharded.device_mesh
    assert _torch.full_tensor(similar).tolist() == [1.0] * 4


def test_a_plain_tensor_is_its_own_shard_and_full_tensor():
    tensor = nn.Parameter(torch.ones(1))
    assert _torch.local_tensor(tensor) is tensor
    assert _torch.full_tensor(tensor) is tensor


def test_aborting_closes_the_group_without_a_collective(group):
    _torch.abort_process_group()
    assert not dist.is_initialized()


def test_the_store_of_the_group_is_the_one_it_was_made_with(group):
    group.set("fabric-test", "here")
    keys = _torch.default_store()
    keys.set("other", "there")
    assert isinstance(keys, dist.Store)
    assert keys.get("other") == b"there"


def test_a_group_that_exists_gets_another_timeout(group):
    _torch.set_group_timeout(dist.group.WORLD, timedelta(seconds=7))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=7)


def test_a_compiled_module_gives_back_the_original():
    module = nn.Linear(1, 1)
    assert _torch.uncompiled(torch.compile(module)) is module
    assert _torch.uncompiled(module) is module


def test_a_function_is_compiled_only_as_a_part_of_graphs():
    sizes_of_graphs = []

    def note_size(graph, inputs):
        operations = [node for node in graph.graph.nodes if node.op == "call_function"]
        sizes_of_graphs.append(len(operations))
        return graph.forward

    def double(x):
        return x * 2

    def quadruple(x):
        return double(x) * 2

    _torch.trace_only_inside_of_graphs(double)
    x = torch.ones(1)
    assert torch.compile(double, backend=note_size)(x) == 2
    assert sizes_of_graphs == []
    assert torch.compile(quadruple, backend=note_size)(x) == 4
    assert sizes_of_graphs == [2]


def test_registered_parameters_buffers_and_children_are_those_of_the_module_alone():
    module = nn.Sequential(nn.BatchNorm1d(2, affine=False))
    norm = module[0]
    assert _torch.registered_modules(module) == {"0": norm}
    assert _torch.registered_parameters(norm) == {"weight": None, "bias": None}
    _torch.registered_buffers(norm)["running_mean"] = torch.ones(2)
    assert norm.running_mean.tolist() == [1.0, 1.0]


def test_a_module_shares_what_another_one_registers():
    source = nn.BatchNorm1d(2)
    target = nn.Identity()
    _torch.set_registered_members(
        target,
        _torch.registered_parameters(source),
        _torch.registered_buffers(source),
        _torch.registered_modules(source),
    )
    source.register_buffer("added", torch.ones(1))
    assert list(target.state_dict()) == list(source.state_dict())
    assert target.weight is source.weight


def test_a_ddp_module_says_whether_its_next_backward_pass_synchronizes(group):
    wrapper = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    synchronization_check = _torch.synchronization_check(wrapper)
    assert synchronization_check()
    with wrapper.no_sync():
        assert not synchronization_check()


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_names_that_ddp_ignores_are_those_of_the_users_module(group, prefix):
    module = nn.Linear(1, 1)
    if prefix:
        module = torch.compile(module)
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, [f"{prefix}bias"])
    assert _torch.names_to_ignore_in_ddp(module) == {"bias"}
    assert _torch.ignored_by_ddp(ddp(module)) == {"bias"}


def test_a_module_that_was_compiled_in_place_is_known():
    module = nn.Linear(1, 1)
    assert not _torch.is_compiled_in_place(module)
    module.compile()
    assert _torch.is_compiled_in_place(module)


def test_a_graph_knows_the_operations_behind_it():
    x = torch.ones(1, requires_grad=True)
    first_number = _torch.next_sequence_number()
    exponential = x.exp()
    assert _torch.next_sequence_number() == first_number + 1
    assert first_number in _torch.sequence_numbers_behind((exponential + x.sin()).sum())
    assert first_number not in _torch.sequence_numbers_behind(x.exp().sum())


def test_a_hook_is_taken_off_and_put_back_where_it_hangs():
    module = nn.Identity()
    called = []
    module.register_forward_pre_hook(lambda *_: called.append("user's"))
    handle = module.register_forward_pre_hook(lambda *_: called.append("first"), prepend=True)
    hooks, key, hook = _torch.hook_entry(handle)
    del hooks[key]
    module(1)
    hooks[key] = hook
    hooks.move_to_end(key, last=False)
    module(1)
    assert called == ["user's", "first", "user's"]


def test_hooks_before_steps_run_in_the_order_of_the_dict() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("first"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("second"))
    first_key, _ = _torch.step_pre_hooks(optimizer)
    _torch.step_pre_hooks(optimizer).move_to_end(first_key)
    optimizer.step()
    assert calls == ["second", "first"]


def test_hooks_around_the_passes_of_a_module_are_listed():
    module = nn.Sequential(nn.Identity())
    assert _torch.user_hooks(module) == []

    def before(*_):
        pass

    def after(*_):
        pass

    module.register_forward_hook(after)
    module.register_forward_pre_hook(before)
    assert _torch.user_hooks(module) == [before, after]
    assert _torch.user_hooks(module[0]) == []
    module[0].register_full_backward_hook(after)
    module[0].register_full_backward_pre_hook(before)
    assert _torch.user_hooks(module[0]) == [before, after]


def test_a_parameter_and_a_buffer_are_replaced_without_an_assignment():
    class Guarded(nn.Module):
        def __setattr__(self, name, value):
            if name == "training":
                super().__setattr__(name, value)
                return
            raise TypeError(name)

    module = Guarded()
    weight = nn.Parameter(torch.ones(1))
    _torch.registered_parameters(module)["weight"] = weight
    _torch.registered_buffers(module)["mean"] = torch.zeros(1)
    assert module.weight is weight
    assert module.state_dict().keys() == {"weight", "mean"}


def test_a_pickled_tensor_takes_another_storage_without_a_warning():
    tensor = torch.arange(3)
    rebuild, (storage, *arguments) = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    assert type(storage) is torch.TypedStorage
    memory = _torch.untyped_storage(storage).clone()
    copied = rebuild(_torch.typed_storage(memory, storage.dtype), *arguments)
    assert torch.equal(copied, tensor)
    assert copied.data_ptr() == memory.data_ptr()


def test_an_unserializable_hook_is_left_out_of_a_pickle_without_a_warning():
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(_torch.unserializable_hook(lambda grad: grad * 2))
    copied = pickle.loads(pickle.dumps(weight))
    copied.sum().backward()
    weight.sum().backward()
    assert weight.grad.item() == 2.0
    assert copied.grad.item() == 1.0


def test_a_transform_is_known_inside_and_not_afterwards():
    def transformed(x):
        assert _torch.current_transform() is not None
        return x.sum()

    assert _torch.current_transform() is None
    torch.func.grad(transformed)(torch.ones(2))
    torch.vmap(transformed)(torch.ones(2, 2))
    assert _torch.current_transform() is None


def test_rows_with_versions_of_their_own_share_memory_and_nothing_else():
    base = torch.arange(3.0)
    with _torch.untracked_views():
        first, second, third = base.unbind()
    loss = torch.ones((), requires_grad=True) * first
    second.add_(5)
    loss.backward()
    assert base.tolist() == [0.0, 6.0, 2.0]
    assert second._version == 1
    assert third._version == 0
    assert not third._is_view()


def test_a_full_gradient_that_was_not_reduced_is_known_and_can_be_dropped(group):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    for module in (model[0], model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    records = _torch.fsdp_parameter_records(model)
    assert {record.sharded_param for record in records} == set(model.parameters())

    def unreduced():
        return [record for record in records if _torch.has_unreduced_gradient(record)]

    model(torch.ones(1, 4)).sum().backward()
    assert unreduced() == []
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    assert unreduced() == records
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    assert unreduced() == []
    expected = model[0].bias.grad.full_tensor() / 3
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    for record in records:
        _torch.drop_unreduced_gradient(record)
    assert unreduced() == []
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(model[0].bias.grad.full_tensor(), expected)


def test_each_backward_pass_has_a_number_of_its_own():
    numbers = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: numbers.append(_torch.backward_number()))
    assert _torch.backward_number() == -1
    x.sum().backward()
    x.sum().backward()
    assert len(set(numbers)) == 2
    assert -1 not in numbers


def test_a_backward_pass_of_a_sharded_module_that_did_not_finish_is_known(group):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for module in (model[1], model):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    unfinished = _torch.unfinished_backward_check(model)
    assert not unfinished()
    output = model(torch.ones(1, 4))
    # Behind FSDP2's own hook, which runs first.
    output.register_hook(lambda grad: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        output.sum().backward()
    assert unfinished()
    model.reset_iter_state()
    model(torch.ones(1, 4)).sum().backward()
    assert not unfinished()


def test_a_module_that_was_joined_trains_as_one_that_never_was(group):
    wrapper = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    with wrapper.join():
        wrapper(torch.ones(1, 2)).sum().backward()
    assert wrapper._join_config.enable
    _torch.disable_join(wrapper)
    assert not wrapper._join_config.enable
    wrapper(torch.ones(1, 2)).sum().backward()
    assert wrapper.module.weight.grad.tolist() == [[2.0, 2.0]]


def iterate_over_a_copy_of_a_loader() -> None:
    loader = data.DataLoader(
        range(4), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    workers = loader._iterator
    assert workers is not None
    prepared = copy.copy(loader)
    _torch.reset_iterator(prepared)
    iterator = iter(prepared)
    assert iterator is not workers
    assert [int(batch) for batch in iterator] == [0, 1, 2, 3]
    assert loader._iterator is workers


def test_a_copy_of_a_loader_does_not_share_the_workers_of_the_original() -> None:
    # The process of the tests has threads, and should not fork the workers.
    in_another_process(iterate_over_a_copy_of_a_loader)


def test_a_buffer_is_put_back_without_a_change_of_the_state_dict():
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1), persistent=False)
    buffer = module.count
    module.count = torch.ones(1)
    _torch.registered_buffers(module)["count"] = buffer
    assert module.count is buffer
    assert not module.state_dict()


def test_a_mesh_is_made_of_parts_of_another(group):
    mesh = dist.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    joined = _torch.concatenate_meshes([mesh["a"], mesh["b", "c"]], timedelta(seconds=5))
    assert joined.mesh_dim_names == ("a", "b_c")
    assert joined.mesh.tolist() == [[0]]


def test_caches_of_operations_keep_no_mesh(group):
    from torch.distributed.tensor import Replicate, Shard, _redistribute, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    sharded.redistribute(placements=[Replicate()]).add(1)
    # An operation whose input torch redistributes by itself, at the lowest cost on this mesh.
    torch.mm(sharded.unsqueeze(1), distribute_tensor(torch.ones(1, 2), mesh, [Shard(1)]))
    assert _redistribute._gen_transform_infos.cache_info().currsize
    reference = weakref.ref(mesh)
    del mesh, sharded
    gc.collect()
    assert reference() is not None
    _torch.clear_mesh_caches()
    gc.collect()
    assert reference() is None


def test_a_function_is_called_in_place_of_an_operator_on_dtensors_until_the_end(group):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.tensor([2.0]), mesh, [Shard(0)])
    operator = torch.ops.aten._local_scalar_dense.default
    end = _torch.handle_dtensor_operators({operator: lambda operator, args, kwargs: 3.0})
    # The first function stays, and the end of the second one does not take it off.
    end_of_second = _torch.handle_dtensor_operators({operator: lambda *_: 4.0})
    end_of_second()
    assert sharded.sum().item() == 3.0
    assert torch.tensor([2.0]).item() == 2.0
    # At the end of the first function, one that was given later takes its place.
    end_of_third = _torch.handle_dtensor_operators({operator: lambda *_: 5.0})
    end()
    assert sharded.sum().item() == 5.0
    end_of_third()
    assert sharded.sum().item() == 2.0


def test_a_function_is_called_before_assignments_to_data_of_dtensors_until_the_end(group):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.tensor([2.0]), mesh, [Shard(0)])
    plain = torch.tensor([3.0])
    calls = []
    end = _torch.handle_data_assignments(lambda *args: calls.append(args))
    end_of_second = _torch.handle_data_assignments(lambda *args: calls.append("second"))
    value = sharded.data.clone()
    sharded.data = value
    plain.data = torch.tensor([4.0])
    assert len(calls) == 1
    assert calls[0][0] is sharded
    assert calls[0][1] is value
    end()
    sharded.data = value
    assert calls[1:] == ["second"]
    end_of_second()
    assert "data" not in vars(DTensor)
    # The reason for the function: torch keeps the shard.
    sharded.data = distribute_tensor(torch.tensor([5.0]), mesh, [Shard(0)])
    assert sharded.to_local().item() == 2.0


class AllocationMode(_torch.DispatchMode):
    """Notes for each operator whether it allocates its outputs."""

    def __init__(self):
        super().__init__()
        self.allocates = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.allocates[str(func)] = _torch.allocates_outputs(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operators_and_which_of_them_allocate():
    with AllocationMode() as mode:
        (torch.ones(2).add_(1)[:1] * 2).split(1)
    assert mode.allocates == {
        "aten.ones.default": True,
        "aten.add_.Tensor": False,
        "aten.slice.Tensor": False,
        "aten.mul.Tensor": True,
        "aten.split.Tensor": False,
    }


def test_fake_ranks_and_tensors_go_through_what_real_ones_do():
    collectives = []

    class FakeMode(_torch.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            collective = tool_names.collective_of(func, args)
            if collective is not None:
                collectives.append((collective[0].strip("_"), collective[1].size()))
            return tool_names.run_fake(mode, func, args, kwargs or {})

    with tool_names.fake_ranks(3) as mode, mode, FakeMode():
        layer = nn.Linear(4, 4)
        assert layer.to("cpu") is layer, "nothing refers to its parameters weakly"
        assert layer.weight.sum().item() == 1.0
        assert bool(layer.weight.any())
        dist.all_reduce(layer.weight.detach())
        with _torch.real_tensors():
            assert torch.arange(2).tolist() == [0, 1]
        numbers = torch.empty(2, dtype=torch.int32)
    assert isinstance(layer.weight, _torch.FakeTensor)
    assert not isinstance(numbers, _torch.FakeTensor)
    assert collectives == [("allreduce", 3)]
    assert not dist.is_initialized()


class OperatorCounts(_torch.DispatchMode):
    """Counts the calls of each operator."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_operators_without_dispatch_modes_are_not_seen():
    weight = torch.ones(2, requires_grad=True)
    with OperatorCounts() as operators:
        with _torch.without_dispatch_modes():
            loss = weight.mul(2).sum()
            torch.autograd.grad(loss, weight)
        weight.add(1)
    assert dict(operators.calls) == {"aten.add.Tensor": 1}


@pytest.mark.parametrize(("ranks", "rows"), [(3, 2), (1000, 1)])
def test_of_the_chunks_of_a_sharded_parameter_only_that_of_rank_0_is_made(ranks, rows):
    from torch.distributed.fsdp import fully_shard

    with tool_names.fake_ranks(ranks), OperatorCounts() as operators, tool_names.Rank0Chunks():
        layer = fully_shard(nn.Linear(2, 5))
        for parameter in layer.parameters():
            assert parameter.to_local().shape[0] == rows
        assert len(torch.ones(3).chunk(5)) == 3
        assert len(torch.chunk(torch.ones(3), 5)) == 3
    assert operators.calls["aten.new_empty.default"] <= 4


def test_collectives_are_profiled_and_operators_are_not(group):
    spans = []
    with tool_names.profiled(torch.device("cpu"), spans):
        dist.all_reduce(torch.ones(2) + 1)
    [(name, begin, end)] = spans
    assert name == "gloo:all_reduce"
    assert 0 < end - begin < 60e9


def test_a_recomputation_within_a_forward_pass_of_a_sharded_model_leaves_nothing_behind(group):
    from torch.distributed.fsdp import fully_shard

    def recompute(module, args):
        with _torch.gathered_for_recomputation([layer]):
            output = layer(args[0])
            assert not _torch.is_dtensor(layer.weight)
            torch.autograd.grad(output.sum(), layer.weight)
        assert _torch.is_dtensor(layer.weight)

    mesh = dist.init_device_mesh("cpu", (1,))
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Linear(2, 2))
    plain = copy.deepcopy(model)
    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.register_forward_pre_hook(recompute)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        plain(torch.ones(1, 2)).sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_the_collectives_of_a_sharded_module_are_made_within_a_context():
    from torch.distributed.fsdp import fully_shard

    names = []

    @contextmanager
    def note_name(name):
        names.append(name)
        yield

    with tool_names.fake_ranks(2):
        model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
        for _ in range(2):
            with ExitStack() as undo:
                tool_names.wrap_collectives(model, note_name, undo)
                model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2)).sum().backward()
    assert names == 2 * ["all_gather", "reduce_scatter"]


def test_a_node_gives_an_option_and_a_constant_and_computes_nothing_again():
    weight = torch.ones(3, requires_grad=True)
    loss = torch.nn.functional.mse_loss(weight, torch.zeros(3), reduction="sum")
    assert saved_option(loss.grad_fn, "reduction") == 2
    assert saved_option(loss.grad_fn, "keepdim") is None
    product = weight.sum() * torch.tensor(5.0)
    # The operand can be read twice, and the backward pass still works.
    for _ in range(2):
        assert saved_constant(product.grad_fn, "other") == 5
    product.backward()
    assert torch.equal(weight.grad, torch.full((3,), 5.0))
    assert saved_constant((weight.sum() / torch.tensor(2)).grad_fn, "self") is None

    def multiply(values):
        return values.sum() * torch.tensor(5.0)

    checkpointed = checkpoint(multiply, weight, use_reentrant=False)
    assert saved_constant(checkpointed.grad_fn, "other") is None
    checkpointed.backward()
