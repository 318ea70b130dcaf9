"""The modules of Lightning 2, and the modules of this package that have their names.

One module of this package has the names of several modules of Lightning.
"""

# Lightning Fabric's modules, by the module of this package that has their names.
_MODULES_OF_FABRIC = {
    "accelerators": """
        accelerators accelerators.accelerator accelerators.cpu accelerators.cuda accelerators.mps
        accelerators.registry accelerators.xla
    """,
    "fabric": "fabric",
    "loggers": "loggers loggers.csv_logs loggers.logger loggers.tensorboard",
    "plugins": """
        connector plugins plugins.collectives plugins.collectives.collective
        plugins.collectives.single_device plugins.collectives.torch_collective plugins.environments
        plugins.environments.cluster_environment plugins.environments.kubeflow
        plugins.environments.lightning plugins.environments.lsf plugins.environments.mpi
        plugins.environments.slurm plugins.environments.torchelastic plugins.environments.xla
        plugins.io plugins.io.checkpoint_io plugins.io.torch_io plugins.io.xla plugins.precision
        plugins.precision.amp plugins.precision.bitsandbytes plugins.precision.deepspeed
        plugins.precision.double plugins.precision.fsdp plugins.precision.half
        plugins.precision.precision plugins.precision.transformer_engine plugins.precision.utils
        plugins.precision.xla
    """,
    "strategies": """
        strategies strategies.ddp strategies.deepspeed strategies.dp strategies.fsdp
        strategies.model_parallel strategies.parallel strategies.registry strategies.single_device
        strategies.single_xla strategies.strategy strategies.xla strategies.xla_fsdp
    """,
    "utilities": """
        utilities utilities.apply_func utilities.cloud_io utilities.consts utilities.data
        utilities.device_dtype_mixin utilities.device_parser utilities.distributed utilities.enums
        utilities.exceptions utilities.imports utilities.init utilities.load utilities.logger
        utilities.optimizer utilities.rank_zero utilities.registry utilities.seed
        utilities.throughput utilities.types utilities.warnings
    """,
    "spike": "utilities.spike",
    "testing": "utilities.testing",
    "wrappers": "wrappers",
}
# The modules of lightning.pytorch that scripts with Fabric import, without the Trainer.
_MODULES_BESIDE_TRAINER = {
    "demos": "demos demos.transformer",
    "pytorch": """
        callbacks callbacks.callback callbacks.early_stopping callbacks.model_checkpoint cli core
        core.datamodule core.module trainer trainer.trainer utilities.model_helpers utilities.types
    """,
    "trackers": """
        loggers loggers.comet loggers.csv_logs loggers.litlogger loggers.logger loggers.mlflow
        loggers.tensorboard loggers.wandb
    """,
    "utilities": """
        utilities utilities.exceptions utilities.imports utilities.rank_zero utilities.seed
    """,
    "testing": "utilities.testing",
}
_ROOTS = (
    ("lightning.fabric", _MODULES_OF_FABRIC),
    ("lightning_fabric", _MODULES_OF_FABRIC),
    ("lightning.pytorch", _MODULES_BESIDE_TRAINER),
    ("pytorch_lightning", _MODULES_BESIDE_TRAINER),
)


def _counterparts() -> dict[str, str]:
    """Return the module of this package for each module of Lightning, by the full names."""
    counterparts = {
        "lightning": "fabric_compat.lightning",
        "lightning.fabric": "fabric_compat.lightning_fabric",
        "lightning_fabric": "fabric_compat.lightning_fabric",
        "lightning.pytorch": "fabric_compat.pytorch",
        "pytorch_lightning": "fabric_compat.pytorch",
    }
    for root, modules in _ROOTS:
        for counterpart, names in modules.items():
            for name in names.split():
                counterparts[f"{root}.{name}"] = f"fabric_compat.{counterpart}"
    return counterparts


COUNTERPARTS = _counterparts()


def modules_below(root: str) -> list[str]:
    """Return the names of the modules below a module of Lightning, parents first."""
    return [name for name in COUNTERPARTS if name.startswith(f"{root}.")]
