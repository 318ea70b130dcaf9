"""The names beside Lightning's Trainer that scripts with Fabric import, without the Trainer."""

from importlib import import_module
from typing import Any

from lightning_utilities.core import overrides
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from fabric_compat.missing import missing_class
from fabric_compat.utilities import seed_everything

STEP_OUTPUT = Any
OptimizerLRScheduler = Any
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any

Trainer: Any = missing_class(
    "Trainer",
    "a loop that calls the methods of Fabric. Lightning itself has the Trainer: start the script "
    "without fabric_compat",
)
LightningCLI: Any = missing_class(
    "LightningCLI", "jsonargparse's CLI, which calls a function that uses Fabric"
)
EarlyStopping: Any = missing_class("EarlyStopping", "break, in your loop")
ModelCheckpoint: Any = missing_class("ModelCheckpoint", "fabric.save(path, state), in your loop")


class Callback:
    """The base class of users' callbacks, whose methods ``fabric.call`` calls by name."""


class _Hooks:
    """Hooks that a script may call, whether or not the user's class overrides them."""

    def prepare_data(self) -> None:
        """Do nothing. Subclasses may override this method."""

    def setup(self, stage: str | None = None) -> None:
        """Do nothing. Subclasses may override this method."""

    def teardown(self, stage: str | None = None) -> None:
        """Do nothing. Subclasses may override this method."""


class LightningDataModule(_Hooks):
    """The base class of users' data modules."""

    prepare_data_per_node = True
    trainer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing. Subclasses may override this method."""


class LightningModule(nn.Module, _Hooks):
    """A module whose ``log`` writes to the loggers of the Fabric that sets up the module."""

    prepare_data_per_node = True
    automatic_optimization = True
    trainer: Any = None
    current_epoch = 0
    global_step = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._fabric: Any = None
        self._fabric_optimizers: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle. The Fabric belongs to this process, and is left out."""
        return {**vars(self), "_fabric": None, "_fabric_optimizers": []}

    @property
    def fabric(self) -> Any:
        """The Fabric that set up this module, or None."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        self._fabric = fabric

    @property
    def device(self) -> Any:
        """The device of the parameters. Without parameters, the device of the Fabric."""
        for parameter in self.parameters():
            return parameter.device
        return self._attached("device").device

    @property
    def global_rank(self) -> int:
        return self._fabric.global_rank if self._fabric else 0

    @property
    def local_rank(self) -> int:
        return self._fabric.local_rank if self._fabric else 0

    @property
    def loggers(self) -> list[Any]:
        return self._fabric.loggers if self._fabric else []

    @property
    def logger(self) -> Any:
        return next(iter(self.loggers), None)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizers that were set up with this module: one, or a list of several."""
        optimizers = list(self._fabric_optimizers)
        if len(optimizers) == 1:
            return optimizers[0]
        return optimizers

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value. See :meth:`log_dict`."""
        self.log_dict({name: value}, *args, **kwargs)

    def log_dict(
        self, dictionary: Any, prog_bar: bool = False, logger: bool | None = None, **_: Any
    ) -> None:
        """Write values to the loggers of the Fabric, unless ``logger=False``.

        The other arguments have no effect: Lightning needs them for the Trainer.
        """
        if self._fabric is None:
            rank_zero_warn(
                f"{type(self).__name__}.log() writes nothing before fabric.setup(module)"
            )
        elif logger is not False:
            self._fabric.log_dict(dictionary)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        printer = self._fabric.print if self._fabric else print
        printer(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather values of all ranks. See :meth:`Fabric.all_gather`."""
        return self._attached("all_gather").all_gather(data, group, sync_grads)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients. See :meth:`Fabric.backward`."""
        self._attached("manual_backward").backward(loss, *args, **kwargs)

    def _attached(self, name: str) -> Any:
        """Return the Fabric that has set up this module.

        ``name`` is the attribute that the user has called, for the error.

        Raises:
            RuntimeError: No Fabric has set up this module.
        """
        if self._fabric is None:
            class_name = type(self).__name__
            raise RuntimeError(f"{class_name}.{name} needs fabric.setup(module) first")
        return self._fabric


def is_overridden(method_name: str, instance: Any = None, parent: Any = None) -> bool:
    """Return whether an object's class overrides a method of its parent.

    Args:
        method_name: The name of the method.
        instance: The object. For None the result is False.
        parent: The class to compare with. The default is the base class of the object:
            ``LightningModule``, ``LightningDataModule`` or ``Callback``.

    Raises:
        ValueError: There is no ``parent``, and the object has none of these base classes.
    """
    if instance is None:
        return False
    if parent is None:
        for base in (LightningModule, LightningDataModule, Callback):
            if isinstance(instance, base):
                parent = base
    if parent is None:
        raise ValueError(f"is_overridden({method_name!r}): {instance!r} has no class of Lightning")
    if hasattr(parent, method_name):
        return overrides.is_overridden(method_name, instance, parent)
    # The classes of this file lack most hooks of Lightning's classes. So the method, if there is
    # one, is the user's.
    return callable(getattr(instance, method_name, None))


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Return an object of the class ``init["class_path"]``.

    Args:
        args: The positional argument of the class, or a tuple of its positional arguments.
        init: The name of the class and its keyword arguments, such as
            ``{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}``.
    """
    if not isinstance(args, tuple):
        args = (args,)
    module_name, _, class_name = init["class_path"].rpartition(".")
    constructor = getattr(import_module(module_name), class_name)
    return constructor(*args, **init.get("init_args", {}))
