"""Building a module without memory, and computing its values afterwards, a few at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric.deferred.base import BUILT_WHOLE, Evaluation
from fabric.deferred.recorder import Recorder
from fabric.errors import UsageError

__all__ = ["Recording", "deferred", "outlined"]


@contextmanager
def deferred() -> "Iterator[Recording]":
    """Within this context, modules and tensors are built without memory, and what fills them is recorded.

    New tensors are meta tensors; code inside the context that asks is told that they are on the CPU. Generators advance
    as they would in the whole build on the CPU, so everything that is drawn later is the same as well. A number that
    is read (``.item()``, ``.tolist()``, a condition) is computed there and then, from no more than it depends on. Real
    tensors that take part are kept by reference; those from Python numbers (``torch.tensor``) are recorded.

    Yields:
        The recording, from which values are computed after the context is left.

    Raises:
        UsageError: something in the context needs memory that is not there: ``.numpy()``, ``.data_ptr()``, pickling, a
            sparse tensor. It names the parameter or the operation.
    """
    _refuse_nesting("deferred()")
    recorder = Recorder()
    with recorder.recording():
        yield Recording(recorder)


@contextmanager
def outlined() -> Iterator[None]:
    """Within this context, modules are built without memory, for values that come from another process.

    As under :func:`deferred` generators advance and numbers can be read. What needs memory gets a copy of what was
    computed, which may be a numpy array; writing into that changes nothing. Real tensors that are registered in a
    module, such as those from numpy arrays, are replaced by meta tensors and not kept.

    Raises:
        UsageError: ``.data_ptr()``, ``.untyped_storage()``, a sparse tensor; or values are read that depend on a real
            tensor which is gone. It names the parameter or the operation.
    """
    _refuse_nesting("outlined()")
    with Recorder(outline=True).recording():
        yield


class Recording:
    """What was done in a :func:`deferred` context, from which the values of its tensors are computed.

    Values may be asked for in any order and any number of times: they are bit for bit those of the whole build on the
    CPU, and no generator is touched. It keeps about 5 KB for each random operation, and real tensors that took part.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def materialise(self, tensor: Tensor) -> Tensor:
        """The values of one recorded tensor.

        Args:
            tensor: a meta tensor from the context, of any shape and dtype.

        Returns:
            A new CPU tensor of the same shape, strides and dtype, without gradient.

        Raises:
            UsageError: the context is still entered, the tensor is not from it, was changed after it, or was filled
                from a real tensor that has changed since.
        """
        return next(value for _, value in self.values({"the tensor": tensor}))

    def values(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The values of several tensors, one after another, in the order of the mapping.

        At any time it holds the memory of one tensor (of one storage, where several share it) and what that is computed
        from; it lets go of it when asked for the next.

        Args:
            tensors: names, for error texts, and tensors. A real tensor comes back as it is.

        Yields:
            ``(name, value)``; tensors that shared memory in the build follow the first of them and share it here too.

        Raises:
            UsageError: as for :meth:`materialise`, with the names of all that are wrong, before the first value.
        """
        self._check(tensors)
        groups: dict[object, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            slot = self._recorder.tape.slot(tensor)
            groups.setdefault(name if slot is None else slot.storage, {})[name] = tensor
        evaluation = Evaluation(self._recorder.tape)
        for group in groups.values():
            yield from self._shared(group, evaluation)

    def _shared(self, group: dict[str, Tensor], evaluation: Evaluation) -> Iterator[tuple[str, Tensor]]:
        known = [slot for slot in map(self._recorder.tape.slot, group.values()) if slot is not None]
        if not known:
            yield from group.items()
            return
        values = dict(zip(group, evaluation.run(known), strict=True))
        evaluation.clear()
        for name in group:
            yield name, values.pop(name)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        if self._recorder.active:
            raise UsageError(
                "values of deferred tensors, asked for inside the deferred() context",
                "the module is still being built",
                "asking after the context is left",
                "with deferred() as recording: ...  # and below it: recording.materialise(tensor)",
            )
        unknown = [name for name, tensor in tensors.items() if tensor.is_meta and not self._recorder.tape.slot(tensor)]
        if unknown:
            raise UsageError(
                f"values of {', '.join(unknown)}",
                "these meta tensors were not made in the deferred() context of this recording, so nothing fills them",
                "tensors made inside the context, and real ones",
                f"build the whole module inside the context, or {BUILT_WHOLE}",
            )
        changed = [name for name, tensor in tensors.items() if self._recorder.changed_since(tensor)]
        if changed:
            raise UsageError(
                f"values of {', '.join(changed)}",
                "these were written to after the deferred() context was left, where nothing is recorded",
                "initialising inside the context, or after the values are there",
                "move the initialisation into the context, such as model.apply(init)",
            )


def _refuse_nesting(asked: str) -> None:
    # Inside, a meta tensor says that it is on the CPU.
    if not torch.empty(0, device="meta").is_meta:
        raise UsageError(
            f"{asked}, or init_module(), inside of another such context",
            "the outer one records already, and would not see what the inner one does",
            "one context around the whole build",
            "with fabric.init_module(): model = Model()  # and no such context in Model",
        )
