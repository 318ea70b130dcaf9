"""The names that other toolkits use, and what to write instead of them. Errors read these tables.

The page on migration has the same replacements, with explanations.
"""

from collections.abc import Mapping

__all__ = [
    "ACCELERATOR_NAMES",
    "KEYWORDS",
    "METHODS",
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
    # A slip of "ddp". Its most similar name is "dp", which few mean.
    "dpp": "ddp",
}

ACCELERATOR_NAMES = {"tpu": "auto", "xla": "auto", "hpu": "auto", "npu": "auto"}

_DEVICES = "Fabric(devices=2)"
_FSDP = 'Fabric(strategy="fsdp"), or strategy=FSDPStrategy(...) for its options'
_DDP = "Fabric(strategy=DDPStrategy(...)) for the options of DistributedDataParallel"
_ACCUMULATE = "for batch, last in fabric.accumulate(loader, steps=4): ..."
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

_SETUP = "model, optimizer = fabric.setup(model, optimizer)"
_SETUP_LOADERS = "loader = fabric.setup_dataloaders(loader)"
_IS_GLOBAL_ZERO = "if fabric.is_global_zero: ..."
_NO_SYNC = "with fabric.no_backward_sync(model, enabled=not last): ..."
_CLIP = "fabric.clip_gradients(model, optimizer, max_norm=1.0)"
_RANK_ZERO_FIRST = "with fabric.rank_zero_first(): ..."

# The methods and attributes of other toolkits that Fabric lacks.
METHODS = {
    "accumulate_grad_batches": _ACCUMULATE,
    "check_trigger": "fabric.reduce_boolean_decision(flag, all=False)",
    "clip_grad_norm_": _CLIP,
    "clip_grad_value_": "fabric.clip_gradients(model, optimizer, clip_val=1.0)",
    "end_training": "fabric.teardown()",
    "fit": _LOOP,
    "free_memory": "fabric.teardown(), or del model, optimizer",
    "get_tracker": "fabric.logger",
    "init_trackers": "fabric.log_hyperparams(config), after Fabric(loggers=...)",
    "is_last_process": "if fabric.global_rank == fabric.world_size - 1: ...",
    "is_local_main_process": "if fabric.local_rank == 0: ...",
    "is_main_process": _IS_GLOBAL_ZERO,
    "join_uneven_inputs": "with fabric.join(model): ...",
    "load_checkpoint": 'fabric.load(path, {"model": model, "optimizer": optimizer})',
    "load_state": 'fabric.load(path, {"model": model, "optimizer": optimizer, "loader": loader})',
    "local_main_process_first": "with fabric.rank_zero_first(local=True): ...",
    "local_process_index": "fabric.local_rank",
    "log_metrics": "fabric.log_dict(metrics, step)",
    "main_process_first": _RANK_ZERO_FIRST,
    "manual_backward": "fabric.backward(loss)",
    "mixed_precision": "fabric.precision",
    "no_sync": _NO_SYNC,
    "num_processes": "fabric.world_size",
    "on_main_process": _IS_GLOBAL_ZERO,
    "optimizer_step": "optimizer.step(), after fabric.backward(loss)",
    "optimizer_step_was_skipped": "fabric.step_was_skipped(optimizer)",
    "pad_across_processes": "fabric.all_gather(x, ragged=True), which needs no padding",
    "prepare": f"{_SETUP}; {_SETUP_LOADERS}",
    "prepare_data_loader": _SETUP_LOADERS,
    "prepare_model": "model = fabric.setup(model)",
    "prepare_optimizer": "optimizer = fabric.setup_optimizers(optimizer)",
    "prepare_scheduler": "scheduler.step() in the loop: a scheduler needs no setup",
    "print_rank_zero": "fabric.print(...)",
    "process_index": "fabric.global_rank",
    "rank": "fabric.global_rank",
    "reduce": 'fabric.all_reduce(x, reduce_op="sum")',
    "register_for_checkpointing": 'fabric.save(path, {"model": model, "other": other})',
    "save_checkpoint": 'fabric.save(path, {"model": model, "optimizer": optimizer})',
    "save_model": "fabric.save_pretrained(model, folder)",
    "save_state": 'fabric.save(path, {"model": model, "optimizer": optimizer, "loader": loader})',
    "set_seed": "fabric.seed_everything(seed)",
    "skip_first_batches": 'fabric.load(path, {"loader": loader}), which resumes in the epoch',
    "split_between_processes": "items[fabric.global_rank :: fabric.world_size]",
    "sync_gradients": _ACCUMULATE,
    "unwrap_model": "fabric.unwrap(model)",
    "wait_for_everyone": "fabric.barrier()",
}


def find_foreign_name(name: str, table: Mapping[str, str]) -> str | None:
    """Return the entry of a table for a name, or for the longest beginning of the name.

    Example: ``"deepspeed_stage_2"`` finds the entry ``"deepspeed"``. Return None if no beginning of
    at least two letters has an entry.
    """
    name = name.lower()
    for length in range(len(name), 1, -1):
        if name[:length] in table:
            return table[name[:length]]
    return None
