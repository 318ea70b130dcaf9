"""Modules that were built without memory, and their way to shards with values.

[Note: Blank modules] A *blank* tensor is a meta tensor from a :class:`Nursery`'s context, which recorded what fills it.
A blank module goes through ``setup`` as others do: it is converted and sharded while nothing of it has memory. What
converts a module may put new meta tensors in place of the recorded ones, so the nursery remembers where those were. In
the end each rank computes one whole tensor after another, and keeps its shard.

Under ``source="rank0"`` only the modules of the other ranks are blank, and nothing says what fills them: rank 0, where
the same tensors are real, sends one whole tensor after another.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fabric._torch import local_tensor
from fabric.collectives import broadcast
from fabric.communicators import Communicator
from fabric.deferred import Recording, deferred, outlined
from fabric.errors import FabricError, UsageError
from fabric.initialization import created_on

__all__ = ["Blank", "Nursery", "has_meta", "placed"]

_Place = tuple[nn.Module, str, str]  # where a tensor is registered: the module, its name there, and in the whole
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class _Build:
    """What one context recorded.

    Attributes:
        recording: computes the values; None where rank 0 sends them.
        empty: whether they are left to a checkpoint.
        generator: digest of the states of torch's generator before and after; empty when nothing was drawn from it.
        recorded: for each tensor, by its identity, itself and an alias that stays in the memory that was recorded.
    """

    recording: Recording | None
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
        self._note(seen, _Build(recording, empty, drawn))

    @contextmanager
    def receiving(self, dtype: torch.dtype | None, empty: bool, rank: int) -> Iterator[None]:
        """Within this context, modules are built whole on rank 0, and blank on the others, for rank 0's values."""
        seen: WeakSet[nn.Module] = WeakSet()
        with created_on(torch.device("cpu"), dtype, empty), outlined() if rank else nullcontext(), _noting(seen):
            yield
        self._note(seen, _Build(None, empty))

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._origins

    def _note(self, seen: "WeakSet[nn.Module]", build: _Build) -> None:
        for module in {part: None for top in seen for part in top.modules()}:
            self._origins[module] = build, build.note(module)

    def blank(self, root: nn.Module) -> "Blank":
        """What is still to be filled in a module."""
        gaps, unknown = [], []
        for tensor, places in _registered(root).values():
            if tensor.is_meta:
                path = places[0][2]
                build, alias = next(filter(None, (self._origin(*place[:2], tensor) for place in places)), (None, None))
                if build is None or alias is None:
                    unknown.append(path)
                else:
                    gaps.append(_Gap(path, build, alias, [place[:2] for place in places]))
        return Blank(root, gaps, unknown)

    def forget(self, root: nn.Module) -> None:
        """Let go of what was recorded for a module and its parts."""
        for module in root.modules():
            self._origins.pop(module, None)

    def _origin(self, module: nn.Module, name: str, tensor: Tensor) -> tuple[_Build, Tensor] | None:
        if module not in self._origins:
            return None
        build, aliases = self._origins[module]
        known, alias = build.recorded.get(id(tensor), (None, None))
        # A parameter that was converted is the same object; a buffer is another one in the same place.
        if known is None and not isinstance(tensor, nn.Parameter):
            alias = aliases.get(name)
        return None if alias is None or alias.shape != tensor.shape else (build, alias)


@dataclass(eq=False)
class _Gap:
    """One blank tensor of a module: its first name, what gives its value, and all places where it is registered."""

    name: str
    build: _Build
    alias: Tensor
    places: Sequence[tuple[nn.Module, str]]

    def fill(self, value: Tensor, on_device: Callable[[Tensor], torch.device]) -> None:
        """Put a value in all places, or of what is sharded this rank's part.

        It gets the dtype, the ``requires_grad`` and the attributes of what stands there.
        """
        old = _own_tensors(self.places[0][0])[self.places[0][1]]
        fresh = placed(value.to(old.dtype), old, on_device(old))
        if isinstance(old, nn.Parameter):
            fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
        vars(fresh).update(vars(old))
        for module, name in self.places:
            setattr(module, name, fresh)


class Blank:
    """The blank tensors of one module, each once, and those of its real ones that other ranks await.

    Args:
        root: the module.
        gaps: its blank tensors, in the order of the module.
        unknown: the names of its other meta tensors.

    Attributes:
        to_send: what goes from rank 0 to the others: the values on rank 0, meta tensors elsewhere. Empty before
            :meth:`check`.
    """

    def __init__(self, root: nn.Module, gaps: list[_Gap], unknown: list[str]) -> None:
        self._title, self._gaps, self._unknown = type(root).__name__, gaps, unknown
        self._tensors = _registered(root)
        self.to_send: Mapping[str, Tensor] = {}

    def check(self, communicator: Communicator, refusal: FabricError | None) -> None:
        """Agree with the other ranks that a module can be set up, and who has its values. Collective.

        Args:
            communicator: all ranks.
            refusal: why it cannot be set up on this rank, if there is a reason.

        Raises:
            FabricError: the refusal, of this rank or another; or the module, or the seed, is not the same on all ranks;
                or nothing fills some of it. It is raised on every rank, and nothing has been changed.
        """
        refusal = refusal or self._refusal()
        layout = "" if refusal else _digest([_traits(tensor, places) for tensor, places in self._tensors.values()])
        computed, awaited = (
            [g.name for g in self._gaps if (g.build.recording is None) == sent] for sent in (False, True)
        )
        seeds = sorted({build.generator for build in self._computed() if not build.empty})
        report = (None if refusal is None else str(refusal), layout, computed, awaited, seeds)
        reports = communicator.gather_objects(report)
        if refusal is not None:
            raise refusal
        self._refuse_others(communicator.rank, *zip(*reports, strict=True))
        sent = {name for _, _, _, awaited, _ in reports for name in awaited}
        by_name = {places[0][2]: tensor for tensor, places in self._tensors.values()}
        self.to_send = {name: tensor.detach() for name, tensor in by_name.items() if name in sent}

    def fill(self, communicator: Communicator, on_device: Callable[[Tensor], torch.device]) -> None:
        """Collective if anything is blank. Give every tensor memory and values; of what is sharded, those of the shard.

        Whole, on the CPU or on its way from rank 0, is one tensor at a time. What an empty build leaves to a checkpoint
        has the constants of the build, such as the ones of a norm, or whatever was in memory.

        Args:
            communicator: all ranks.
            on_device: where a parameter or buffer is to be.

        Raises:
            UsageError: they cannot be computed, or they differ between ranks.
        """
        self._receive(communicator, on_device)
        checksums = []
        for build, gaps in self._computed().items():
            assert build.recording is not None
            for name, value in build.recording.values({name: gap.alias for name, gap in gaps.items()}):
                if not build.empty:
                    checksums.append(_checksum(value))
                gaps[name].fill(value, on_device)
                # Else this name would hold on to the value while the next one is computed.
                del value
        if self._computed():
            marks = communicator.gather_objects(_digest(checksums))
            self._compare(communicator.rank, "the values that they computed differ, or it is", marks)

    def _receive(self, communicator: Communicator, on_device: Callable[[Tensor], torch.device]) -> None:
        gaps = {gap.name: gap for gap in self._gaps}
        for name, tensor in self.to_send.items():
            value = broadcast(communicator, tensor if communicator.rank == 0 else None, 0, communicator.device)
            if name in gaps:
                gaps[name].fill(value, on_device)
            del value, tensor
        self.to_send = {}

    def _refusal(self) -> UsageError | None:
        """Why values cannot be computed, if so; a rank that raised at once would leave the others waiting."""
        if self._unknown:
            return UsageError(
                f"setup({self._title}) with meta tensors",
                f"these have no values, and nothing recorded which they were to have: {', '.join(self._unknown)}",
                "modules that were built in fabric.init_module(), as a whole, and such as are not on the meta device",
                "with fabric.init_module(): model = Model()  # in place of torch.device('meta')",
            )
        for build, gaps in self._computed().items():
            assert build.recording is not None
            smallest_first = sorted(gaps.values(), key=lambda gap: gap.alias.numel())
            try:
                # All are checked before the first is computed.
                next(build.recording.values({gap.name: gap.alias for gap in smallest_first}))
            except UsageError as error:
                return error
        return None

    def _computed(self) -> dict[_Build, dict[str, _Gap]]:
        builds: dict[_Build, dict[str, _Gap]] = {}
        for gap in self._gaps:
            if gap.build.recording is not None:
                builds.setdefault(gap.build, {})[gap.name] = gap
        return builds

    def _refuse_others(self, rank: int, refusals: Any, layouts: Any, computed: Any, awaited: Any, seeds: Any) -> None:
        refusing = {rank: refusal for rank, refusal in enumerate(refusals) if refusal is not None}
        if refusing:
            first = min(refusing)
            raise UsageError(
                f"setup({self._title}) on rank {rank}",
                f"rank(s) {', '.join(map(str, refusing))} cannot set it up; rank {first}: {refusing[first]}",
                "a model that every rank can set up",
                f"what the error of rank {first} says",
            )
        self._compare(rank, "it is", layouts)
        # Rank 0 awaits nothing: it has the values that the others await.
        if any(names != computed[0] for names in computed) or any(names != awaited[1] for names in awaited[2:]):
            raise UsageError(
                f"setup({self._title}) on rank {rank}",
                "some ranks have values, or can compute them, where others cannot",
                "a model that is built in the same way on every rank",
                'with fabric.init_module(): model = Model()  # or init_module(source="rank0"), on every rank',
            )
        self._compare(rank, "torch's generator was in different states, or it is", seeds)

    def _compare(self, rank: int, wrong: str, marks: Sequence[object]) -> None:
        different = [rank for rank, other in enumerate(marks) if other != marks[0]]
        if different:
            raise UsageError(
                f"setup({self._title}) on rank {rank}",
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


def placed(value: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """A whole value on a device; for a DTensor this rank's shard of it, in memory of its own."""
    if local_tensor(like) is like:
        return value.to(device)
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import; here it has been

    assert isinstance(like, DTensor)
    shard = distribute_tensor(
        value.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    fresh = torch.empty_like(like, dtype=value.dtype, device=device)
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


def _registered(root: nn.Module) -> dict[int, tuple[Tensor, list[_Place]]]:
    """The tensors of a module by their identity, each with all places where it is registered."""
    found: dict[int, tuple[Tensor, list[_Place]]] = {}
    for path, module in root.named_modules():
        for name, tensor in _own_tensors(module).items():
            found.setdefault(id(tensor), (tensor, []))[1].append((module, name, f"{path}.{name}" if path else name))
    return found


def _traits(tensor: Tensor, places: Sequence[_Place]) -> list[object]:
    return [[path for _, _, path in places], tuple(tensor.shape), tensor.dtype, tensor.requires_grad]
