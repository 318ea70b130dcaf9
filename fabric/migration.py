"""The names that other toolkits use, and what to write instead of them. Errors read these tables.

The page on migration has the same replacements, with explanations.
"""

from collections.abc import Mapping

__all__ = [
    "ACCELERATOR_NAMES",
    "KEYWORDS",
    "PRECISION_NAMES",
    "STRATEGY_NAMES",
    "find_foreign_name",
]

PRECISION_NAMES = {
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "torch.float16": "16-mixed",
    "torch.half": "16-mixed",
    "half": "16-mixed",
    "mixed": "16-mixed",
    "amp": "16-mixed",
    "native": "16-mixed",
    "fp16-mixed": "16-mixed",
    "fp16-true": "16-true",
    "bfloat16": "bf16-mixed",
    "torch.bfloat16": "bf16-mixed",
    "fp8": "bf16-mixed",
    "transformer-engine": "bf16-mixed",
    "transformer-engine-float16": "16-mixed",
    "no": "32-true",
    "full": "32-true",
    "fp32": "32-true",
    "float32": "32-true",
    "torch.float32": "32-true",
    "tf32": "32-true",
    "double": "64-true",
    "fp64": "64-true",
    "float64": "64-true",
    "torch.float64": "64-true",
}

STRATEGY_NAMES = {
    "deepspeed_stage_1_offload": "fsdp_cpu_offload",
    "deepspeed_stage_2_offload": "fsdp_cpu_offload",
    "deepspeed_stage_3_offload": "fsdp_cpu_offload",
    "deepspeed": "fsdp",
    "zero": "fsdp",
    "ddp_sharded": "fsdp",
    "fairscale": "fsdp",
    "fully_shard": "fsdp",
    "fsdp": "fsdp",
    "colossalai": "fsdp",
    "megatron": "model_parallel",
    "tensor_parallel": "model_parallel",
    "tp": "model_parallel",
    "horovod": "ddp",
    "bagua": "ddp",
    "hivemind": "ddp",
    "ddp2": "ddp",
    "distributed": "ddp",
    "multi_gpu": "ddp",
    "xla": "ddp",
    "none": "auto",
    "no": "auto",
}

ACCELERATOR_NAMES = {"tpu": "auto", "xla": "auto", "hpu": "auto", "xpu": "auto", "npu": "auto"}

_DEVICES = "Fabric(devices=2)"
_FSDP = 'Fabric(strategy="fsdp"), or strategy=FSDPStrategy(...) for its options'
_DDP = "Fabric(strategy=DDPStrategy(...)) for the options of DistributedDataParallel"
_ACCUMULATE = "for window in fabric.accumulate(loader, steps=4): for batch in window: ..."
_LOOP = "the loop itself: for epoch in range(10): for batch in loader: ..."
_LOGGERS = "Fabric(loggers=CSVLogger(folder)), and fabric.log(name, value)"

# The arguments of the constructors of other toolkits.
KEYWORDS = {
    "accumulate_grad_batches": _ACCUMULATE,
    "backend": 'Fabric(strategy=DDPStrategy(process_group_backend="gloo"))',
    "checkpoint_io": "Fabric(strategy=DDPStrategy(checkpoint_io=...))",
    "cpu": 'Fabric(accelerator="cpu")',
    "dataloader_config": "fabric.setup_dataloaders(loader, uneven=...)",
    "deepspeed_plugin": _FSDP,
    "deepspeed_plugins": _FSDP,
    "device": 'Fabric(accelerator="cpu"), or Fabric(accelerator="cuda", devices=[0])',
    "device_placement": "fabric.setup(model, move_to_device=False)",
    "dispatch_batches": "fabric.setup_dataloaders(loader): every process reads its own batches",
    "dynamo_backend": "model = torch.compile(model) before fabric.setup(model)",
    "dynamo_plugin": "model = torch.compile(model) before fabric.setup(model)",
    "even_batches": 'fabric.setup_dataloaders(loader, uneven="pad")',
    "find_unused_parameters": 'Fabric(strategy="ddp_find_unused_parameters_true")',
    "fp16": 'Fabric(precision="16-mixed")',
    "fsdp_plugin": _FSDP,
    "gpus": _DEVICES,
    "gradient_accumulation_plugin": _ACCUMULATE,
    "gradient_accumulation_steps": _ACCUMULATE,
    "gradient_clip_val": "fabric.clip_gradients(model, optimizer, max_norm=1.0) before the step",
    "kwargs_handlers": _DDP,
    "log_with": _LOGGERS,
    "logger": _LOGGERS,
    "max_epochs": _LOOP,
    "max_steps": _LOOP,
    "megatron_lm_plugin": 'Fabric(strategy="model_parallel")',
    "mixed_precision": 'Fabric(precision="16-mixed") or Fabric(precision="bf16-mixed")',
    "nodes": 'Fabric(num_nodes="auto")',
    "num_gpus": _DEVICES,
    "num_processes": _DEVICES,
    "plugins": "Fabric(precision=...), Fabric(environment=...), or "
    "Fabric(strategy=DDPStrategy(checkpoint_io=...))",
    "project_config": "fabric.save(path, state) with a path",
    "project_dir": "fabric.save(path, state) with a path",
    "rng_types": "fabric.seed_everything(seed) on every process",
    "seed": "fabric.seed_everything(seed)",
    "split_batches": "DataLoader(..., batch_size=batch_size // fabric.world_size)",
    "step_scheduler_with_optimizer": "scheduler.step() in the loop, once for each step",
    "sync_batchnorm": "model = fabric.sync_batchnorm(model) before fabric.setup(model)",
    "torch_tp_plugin": 'Fabric(strategy="model_parallel")',
}


def find_foreign_name(name: str, table: Mapping[str, str]) -> str | None:
    """Return what a table has for a name, or for the longest beginning of it. None without one."""
    name = name.lower()
    for length in range(len(name), 1, -1):
        if name[:length] in table:
            return table[name[:length]]
    return None
