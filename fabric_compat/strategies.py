"""Fabric's strategies with Lightning's names and arguments."""

from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fabric import strategies
from fabric._plan import STRATEGIES
from fabric.strategies import *  # noqa: F403 # pyright: ignore[reportAssignmentType]
from fabric_compat.missing import missing

TBroadcast = TypeVar("TBroadcast")


__getattr__ = partial(missing, __name__)


def _has_fsdp_modules(module: nn.Module) -> bool:
    return any(isinstance(child, FSDPModule) for child in module.modules())


class DDPStrategy(strategies.DDPStrategy):
    """DDP over all processes, or over the processes of ``process_group``."""

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if process_group is not None:
            self.ddp_kwargs["process_group"] = process_group


class FSDPStrategy(strategies.FSDPStrategy):
    """FSDP2 with the options of FSDP1.

    ``activation_checkpointing_policy`` takes the three arguments of a policy for wrapping.
    """

    def __init__(
        self, *args: Any, activation_checkpointing_policy: Any = None, **kwargs: Any
    ) -> None:
        policy = activation_checkpointing_policy
        if callable(policy):
            policy = partial(policy, recurse=False, nonwrapped_numel=0)
        super().__init__(*args, activation_checkpointing_policy=policy, **kwargs)
        self._first_fsdp_options.clear()


class _Registry(dict[str, dict[str, Any]]):
    """The strategies that the user registered in this process, by name.

    An entry point registers a strategy in every process.
    """

    def register(
        self,
        name: str,
        strategy: Any,
        description: str = "",
        override: bool = False,
        **options: Any,
    ) -> Any:
        if name in self and not override:
            raise ValueError(f"{name!r} is registered already: register(..., override=True)")
        self[name] = {"strategy": strategy, "description": description, "init_params": options}
        return strategy

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        entry = self[name]
        return entry["strategy"](**entry["init_params"])

    def available_strategies(self) -> list[str]:
        return [*STRATEGIES, *self]

    remove = dict.pop


STRATEGY_REGISTRY = _Registry()
