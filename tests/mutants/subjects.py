"""The files in which a wrong line is a wrong number, a lost checkpoint or a hang; their tests."""

# The tests of a file, by the names of their files without `tests/test_` and `.py`. The most
# specific and quickest come first: a mutation is run against all of them, until a test fails.
_SUBJECTS = {
    "tree": "tree collectives_refusals collectives",
    "world": "world environments launchers",
    "seed": "seed rank_streams seeds accelerators data_position",
    "tools/digest": "digest fingerprint replica_digests",
    "tools/fingerprint": "fingerprint",
    "tools/records": "fingerprint",
    "tools/run_diff": "fingerprint",
    "diagnostics/replicas": "replicas replica_digests",
    "launchers/supervisor": (
        "launchers_parts launchers_failures launchers launchers_signals faults/parents preemption"
    ),
    "launchers/rank": (
        "launchers_parts launchers_signals launchers launchers_failures faults/parents cli"
    ),
    "launchers/agent": "restarts cli",
    "launchers/function": "launchers_parts launchers launchers_failures faults/notebook_cells",
    "data/metrics": "torchmetrics gather_for_metrics",
    "data/saved_position": "data_position data_sharding uneven_loaders",
    "data/position": "data_position data_sharding accumulate",
    "data/sharding": "data_sharding data_position data_loader uneven_loaders",
    "checkpoint/restore": (
        "checkpoint_state checkpoint_full pretrained fabric_checkpoint checkpoint_shards"
    ),
    "data/copies": "data_copies data_loader",
    "data/gather": "gather_for_metrics",
    "data/lockstep": "uneven_loaders uneven data_position",
    "data/loader": "data_loader data_position data_sharding rank_streams uneven_loaders",
    "data/accumulate": "accumulate data_position",
    "data/join": "uneven uneven_loaders",
    "checkpoint/state": "checkpoint_state checkpoint_full fabric_checkpoint",
    "checkpoint/encoding": "checkpoint_full checkpoint_state checkpoint_sharded security stored",
    "checkpoint/file": "checkpoint_full checkpoint_commit checkpoint_failures security stored",
    "checkpoint/atomic": "checkpoint_commit checkpoint_failures checkpoint_sharded",
    "checkpoint/storage": "checkpoint_commit checkpoint_full checkpoint_paths checkpoint_sharded",
    "checkpoint/sharded": "checkpoint_sharded checkpoint_shards consolidate resharding",
    "checkpoint/sharded_reader": "checkpoint_sharded checkpoint_shards consolidate resharding",
    "checkpoint/save_load": (
        "fabric_checkpoint checkpoint_full checkpoint_shards checkpoint_async pretrained"
    ),
    "checkpoint/async_save": "checkpoint_async checkpoint_rotation",
    "checkpoint/keeper": "checkpoint_rotation checkpoint_laws checkpoint_health",
    "collectives/batch_norm": "batch_norm",
    "collectives/buckets": "collectives collectives_exchange collectives_gradients laws/laws",
    "collectives/objects": "collectives collectives_exchange collectives_refusals",
    "collectives/ops": "collectives collectives_gradients collectives_exchange laws/laws",
    "communicators/base": "communicators collectives",
    "communicators/call_site": "watchdog collectives_signatures checked",
    "communicators/checked": "collectives_signatures communicators collectives",
    "communicators/process_group": "communicators collectives uneven",
    "communicators/recorded": "checked collectives_signatures watchdog timeline",
    "strategies/agreement": "split_comparison model_parallel",
    "strategies/base": "own_strategy seeds ddp",
    "strategies/ddp": "ddp cleared_gradients accumulate parity",
    "strategies/data_parallel": "data_parallel parity",
    "strategies/expert_styles": "transformers",
    "strategies/init_module": "init_module fsdp_init",
    "strategies/model_parallel": "model_parallel split_comparison",
    "strategies/parallel": "seeds fabric ddp data_parallel",
    "strategies/sequence_parallel": "sequence_parallel",
    "strategies/split_comparison": "split_comparison model_parallel",
    "strategies/standalone": "seeds own_strategy fabric_ranks",
    "strategies/tp_plan": "model_parallel",
    "strategies/fsdp/api": "fsdp fsdp_options fsdp_models",
    "strategies/fsdp/forward": "fsdp fsdp_models cleared_gradients",
    "strategies/fsdp/operators": "fsdp_sharded_tensors fsdp",
    "strategies/fsdp/parameters": "fsdp fsdp_models",
    "strategies/fsdp/sharding": ("fsdp fsdp_init fsdp_options fsdp_sharded_tensors fsdp_models"),
    "strategies/fsdp/state": "fsdp_checkpoint fsdp checkpoint_shards resharding fsdp_models",
    "strategies/fsdp/unreduced": "fsdp cleared_gradients loss_weights",
    "strategies/fsdp/wrapping": "fsdp_wrapping fsdp_options",
    "optim/clipping": "clipping loss_scaler",
    "optim/closures": "closures",
    "optim/ema": "ema",
    "optim/gradients": "clipping loss_scaler step_guard",
    "optim/loss_scaler": "loss_scaler",
    "optim/gradient_watch": "loss_weights",
    "optim/loss_weights": "loss_weights",
    "optim/parameter_lists": "parameter_lists",
    "optim/step_guard": "step_guard",
    "optim/weight_sums": "loss_weights",
    "strategies/fsdp/lent_gradients": "cleared_gradients fsdp fsdp_models",
}
# Every mutation that survives the tests of its subject runs against these as well.
_WIDER = (
    "fabric_checkpoint fabric_ranks fabric laws/exactness laws/positions parity ddp fsdp "
    "cleared_gradients uneven_loaders checkpoint_rotation restarts preemption"
)


def _test_files(names: str) -> list[str]:
    """Return the paths of test files from their short names."""
    paths = []
    for name in names.split():
        folder, _, base = name.rpartition("/")
        paths.append(f"tests/{folder}/test_{base}.py" if folder else f"tests/test_{base}.py")
    return paths


SUBJECTS = {f"fabric/{name}.py": _test_files(tests) for name, tests in _SUBJECTS.items()}
WIDER_TESTS = _test_files(_WIDER)
