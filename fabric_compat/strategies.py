"""Strategies: ours, which have Lightning's names and arguments."""

from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fabric import strategies
from fabric._plan import STRATEGIES
from fabric.strategies import *  # noqa: F403 - ours, but two # pyright: ignore[reportAssignmentType]
from fabric_compat.missing import missing

TBroadcast = TypeVar("TBroadcast")


__getattr__ = partial(missing, __name__)


def _has_fsdp_modules(module: nn.Module) -> bool:
    return any(isinstance(each, FSDPModule) for each in module.modules())


class DDPStrategy(strategies.DDPStrategy):
    """DDP over all processes, or with ``process_group`` over those of one group."""

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if process_group is not None:
            self.ddp_kwargs["process_group"] = process_group


class FSDPStrategy(strategies.FSDPStrategy):
    """FSDP, by the options of torch's first one; the policy of recomputation takes three arguments, as for wrapping."""

    def __init__(
        self, *args: Any, activation_checkpointing_policy: Any = None, **kwargs: Any
    ) -> None:
        if callable(policy := activation_checkpointing_policy):
            policy = partial(policy, recurse=False, nonwrapped_numel=0)
        super().__init__(*args, activation_checkpointing_policy=policy, **kwargs)
        self._first_fsdp_options.clear()


class _Registry(dict[str, dict[str, Any]]):
    """Names of strategies of the user's own, in this process; an entry point is for every process."""

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
        return self[name]["strategy"](**self[name]["init_params"]) if name in self else default

    def available_strategies(self) -> list[str]:
        return [*STRATEGIES, *self]

    remove = dict.pop


STRATEGY_REGISTRY = _Registry()
