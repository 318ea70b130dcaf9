"""Modules that were built without memory, and their way to shards with values.

[Note: Blank modules] A *blank* tensor is a meta tensor from a :class:`Nursery`'s context, which recorded what fills it.
A blank module goes through ``setup`` as others do: it is converted and sharded while nothing of it has memory. What
converts a module may put new meta tensors in place of the recorded ones, so the nursery remembers where those were. In
the end each rank computes one whole tensor after another, and keeps its shard.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fabric._compat import local_tensor
from fabric.communicators import Communicator
from fabric.deferred import Recording, deferred
from fabric.errors import UsageError
from fabric.initialization import created_on

__all__ = ["Blank", "Nursery", "has_meta"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class _Build:
    """What one context recorded.

    Attributes:
        recording: computes the values.
        empty: whether they are left to a checkpoint.
        generator: digest of the states of torch's generator before and after; empty when nothing was drawn from it.
        recorded: for each tensor, by its identity, itself and an alias that stays in the memory that was recorded.
    """

    recording: Recording
    empty: bool
    generator: str = ""
    recorded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, module: nn.Module) -> dict[str, Tensor]:
        """Remember the meta tensors of one module, without those of its parts; returns the aliases by name."""
        aliases = {}
        for name, tensor in _own_tensors(module).items():
            if tensor.is_meta:
                _, aliases[name] = self.recorded.setdefault(id(tensor), (tensor, tensor.detach()))
        return aliases


class Nursery:
    """The contexts in which modules are built blank, and what was built there; see ``[Note: Blank modules]``.

    What was recorded is kept as long as the modules that were built.
    """

    def __init__(self) -> None:
        self._origins: WeakKeyDictionary[nn.Module, tuple[_Build, dict[str, Tensor]]] = WeakKeyDictionary()

    @contextmanager
    def building(self, dtype: torch.dtype | None, empty: bool) -> Iterator[None]:
        """Within this context, modules are built blank.

        Args:
            dtype: default floating dtype; None leaves torch's default.
            empty: what the common layers draw is skipped, as in :func:`fabric.initialization.created_on`, and values
                are not compared over ranks.
        """
        before = torch.get_rng_state()
        seen: WeakSet[nn.Module] = WeakSet()
        with created_on(torch.device("cpu"), dtype, empty), deferred() as recording, _noting(seen):
            yield
        after = torch.get_rng_state()
        drawn = "" if torch.equal(before, after) else _digest([before.tolist(), after.tolist()])
        build = _Build(recording, empty, drawn)
        for module in {part: None for top in seen for part in top.modules()}:
            self._origins[module] = build, build.note(module)

    def blank(self, root: nn.Module) -> "Blank":
        """What is still to be filled in a module.

        Raises:
            UsageError: it has meta tensors that were not built in the context, with all their names.
        """
        prefixes = {module: f"{path}." if path else "" for path, module in root.named_modules()}
        found: dict[int, _Gap] = {}
        unknown = []
        for module, prefix in prefixes.items():
            for name, tensor in _own_tensors(module).items():
                if not tensor.is_meta:
                    continue
                gap = found.get(id(tensor)) or self._gap(module, name, tensor, prefix + name)
                if gap is None:
                    unknown.append(prefix + name)
                else:
                    found[id(tensor)] = gap
                    gap.places.append((module, name))
        if unknown:
            _refuse_unknown(root, unknown)
        return Blank(type(root).__name__, list(found.values()))

    def forget(self, root: nn.Module) -> None:
        """Let go of what was recorded for a module and its parts."""
        for module in root.modules():
            self._origins.pop(module, None)

    def _gap(self, module: nn.Module, name: str, tensor: Tensor, path: str) -> "_Gap | None":
        if module not in self._origins:
            return None
        build, aliases = self._origins[module]
        known, alias = build.recorded.get(id(tensor), (None, None))
        # A parameter that was converted is the same object; a buffer is another one in the same place.
        if known is None and not isinstance(tensor, nn.Parameter):
            alias = aliases.get(name)
        if alias is None or alias.shape != tensor.shape:
            return None
        return _Gap(path, build, alias)


@dataclass(eq=False)
class _Gap:
    """One blank tensor of a module: its first name, what gives its value, and all places where it is registered."""

    name: str
    build: _Build
    alias: Tensor
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def take(self, fresh: Tensor) -> None:
        """Put a tensor with memory in all places; it keeps ``requires_grad`` and the attributes that were set."""
        [old, *_] = [_own_tensors(module)[name] for module, name in self.places]
        if isinstance(old, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
        vars(fresh).update(vars(old))
        for module, name in self.places:
            setattr(module, name, fresh)

    def current(self) -> Tensor:
        """What stands in its place now."""
        module, name = self.places[0]
        return _own_tensors(module)[name]


class Blank:
    """The blank tensors of one module, each once.

    Args:
        title: what the module is called in errors.
        gaps: the tensors, in the order of the module.
    """

    def __init__(self, title: str, gaps: list[_Gap]) -> None:
        self._title, self._gaps = title, gaps

    def check(self, communicator: Communicator) -> None:
        """Collective if anything is blank. Compare names, shapes and states of generators over the ranks.

        Raises:
            UsageError: they differ, or a tensor was written to where nothing recorded it; nothing has been changed.
        """
        seeds = sorted({gap.build.generator for gap in self._gaps if not gap.build.empty})
        names = [(gap.name, tuple(gap.alias.shape), str(gap.alias.dtype)) for gap in self._gaps]
        failure = self._failure()
        mark = _digest([seeds, names]) if failure is None else str(failure)
        self._compare(communicator, mark, "torch's generator was in different states, or it is", failure)

    def fill(self, communicator: Communicator, on_device: Callable[[Tensor], torch.device]) -> None:
        """Collective if anything is blank. Give every tensor memory and values; of what is sharded, those of the shard.

        Whole, on the CPU, is one tensor at a time. What an empty build leaves to a checkpoint
        has the constants of the build, such as the ones of a norm, or whatever was in memory.

        Args:
            communicator: all ranks.
            on_device: where a parameter or buffer is to be.

        Raises:
            UsageError: they cannot be computed, or they differ between ranks.
        """
        checksums = []
        for build, gaps in self._by_build().items():
            for name, value in build.recording.values({name: gap.alias for name, gap in gaps.items()}):
                if not build.empty:
                    checksums.append(_checksum(value))
                current = gaps[name].current()
                gaps[name].take(_placed(value.to(current.dtype), current, on_device(current)))
                # Else this name would hold on to the value while the next one is computed.
                del value
        self._compare(communicator, _digest(checksums), "the values that they computed differ, or it is")

    def _failure(self) -> UsageError | None:
        """Why values cannot be computed, if so; a rank that raised at once would leave the others waiting."""
        for build, gaps in self._by_build().items():
            smallest_first = sorted(gaps.values(), key=lambda gap: gap.alias.numel())
            try:
                # All are checked before the first is computed.
                next(build.recording.values({gap.name: gap.alias for gap in smallest_first}))
            except UsageError as error:
                return error
        return None

    def _by_build(self) -> dict[_Build, dict[str, _Gap]]:
        builds: dict[_Build, dict[str, _Gap]] = {}
        for gap in self._gaps:
            builds.setdefault(gap.build, {})[gap.name] = gap
        return builds

    def _compare(self, communicator: Communicator, mark: str, wrong: str, failure: UsageError | None = None) -> None:
        marks = communicator.gather_objects(mark) if self._gaps else [mark]
        if failure is not None:
            raise failure
        different = [rank for rank, other in enumerate(marks) if other != marks[0]]
        if different:
            raise UsageError(
                f"setup({self._title}), built in init_module(), on rank {communicator.rank}",
                f"{wrong} another model, on rank(s) {', '.join(map(str, different))} than on rank 0: every rank keeps "
                "shards of its own build, so these have to be equal",
                "one seed on all ranks, and a build that does not depend on the rank",
                "fabric.seed_everything(1) before init_module(); per_rank=True only after it",
            )


def has_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of a module is a meta tensor."""
    return any(tensor.is_meta for part in module.modules() for tensor in _own_tensors(part).values())


@contextmanager
def _noting(seen: "WeakSet[nn.Module]") -> Iterator[None]:
    """Add every module on which something is registered within this context, and every module that is registered."""

    def note(module: nn.Module, name: str, registered: object) -> None:
        seen.add(module)
        if isinstance(registered, nn.Module):
            seen.add(registered)

    handles = [
        register_module_module_registration_hook(note),
        register_module_parameter_registration_hook(note),
        register_module_buffer_registration_hook(note),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _own_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _placed(value: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """A whole value on a device; for a DTensor this rank's shard of it, in memory of its own."""
    if local_tensor(like) is like:
        return value.to(device)
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import; here it has been

    assert isinstance(like, DTensor)
    shard = distribute_tensor(
        value.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    fresh = torch.empty_like(like, device=device)
    local_tensor(fresh).copy_(local_tensor(shard))
    return fresh


def _checksum(value: Tensor) -> int:
    """A number that differs, most likely, where values do: the sum of their bits, read as integers."""
    real = torch.view_as_real(value) if value.is_complex() else value
    bits = real.contiguous().view(_INTEGERS[real.element_size()]).flatten()
    # In pieces, since a sum in another dtype makes a copy of what it adds up.
    return sum(int(piece.sum(dtype=torch.int64)) for piece in bits.split(2**18))


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _refuse_unknown(root: nn.Module, names: list[str]) -> None:
    raise UsageError(
        f"setup({type(root).__name__}) with meta tensors",
        f"these have no values, and nothing recorded which they were to have: {', '.join(names)}",
        "modules that were built in fabric.init_module(), as a whole, and modules that are not on the meta device",
        "with fabric.init_module(): model = Model()  # in place of torch.device('meta')",
    )
