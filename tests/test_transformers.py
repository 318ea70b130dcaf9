"""Models of transformers, and adapters of PEFT, go through files in both directions."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from fabric import Fabric
from fabric.errors import CheckpointError, ConfigurationError
from fabric.strategies import ModelParallelStrategy
from tests.ranks import outcome, run_in_ranks

pytestmark = [
    # PEFT reads it of every model of transformers.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # PEFT 0.18 says this of a base model that comes from no folder.
    pytest.mark.filterwarnings("ignore:Could not find a config file in  - will assume:UserWarning"),
]

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
    tie_word_embeddings=True,
)
TOKENS = torch.tensor([[1, 5, 9, 2]])
# A pattern has one star for each component before the layers.
LAYERS_OF_ADAPTER = "*.*.*.layers.*.mlp"


def tensor_parallel(layers: str) -> ModelParallelStrategy:
    plan = {
        f"{layers}.gate_proj": "colwise",
        f"{layers}.up_proj": "colwise",
        f"{layers}.down_proj": "rowwise",
    }
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, tp_plan=plan)


def single() -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none")


def assert_equal_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(actual), dict(expected), rtol=0, atol=0)


def build_llama() -> nn.Module:
    torch.manual_seed(3)
    return LlamaForCausalLM(CONFIG)


def save_llama(fabric: Fabric, folder: Path) -> None:
    model = fabric.setup(build_llama())
    fabric.save_pretrained(model, folder, max_shard_gb=5e-6)


def load_llama(fabric: Fabric, folder: Path) -> Tensor:
    with fabric.init_module(empty_init=True):
        module = LlamaForCausalLM(CONFIG)
    model = fabric.setup(module)
    fabric.load_raw(folder, model)
    return model(TOKENS).logits.detach()


def test_a_llama_is_saved_sharded_and_read_by_transformers_and_a_mesh(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    expected = build_llama()
    logits = expected(TOKENS).logits.detach()
    run_in_ranks(save_llama, folder, strategy="fsdp", ranks=3)
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is LlamaForCausalLM
    assert_equal_states(loaded.state_dict(), expected.state_dict())
    mesh = tensor_parallel("model.layers.*.mlp")
    for logits_of_rank in run_in_ranks(load_llama, folder, strategy=mesh):
        torch.testing.assert_close(logits_of_rank, logits, rtol=0, atol=1e-6)


def test_what_transformers_saves_is_loaded_in_shards(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    module = build_llama()
    module.save_pretrained(folder, max_shard_size="5KB")
    logits = module(TOKENS).logits.detach()
    for logits_of_rank in run_in_ranks(load_llama, folder, strategy="fsdp"):
        torch.testing.assert_close(logits_of_rank, logits, rtol=0, atol=1e-6)


# -- adapters -------------------------------------------------------------------------------------


def build_base() -> nn.Module:
    torch.manual_seed(3)
    return LlamaForSequenceClassification(CONFIG)


def build_adapted(seed: int) -> nn.Module:
    """Return a model with an adapter, whose new layers have values of the seed."""
    base = build_base()
    # SEQ_CLS also trains and saves the head, score.
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"])
    module = get_peft_model(base, config)
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return module


def save_adapter(fabric: Fabric, folder: Path) -> None:
    model = fabric.setup(build_adapted(seed=1))
    fabric.save_pretrained(model, folder)
    reloaded = fabric.setup(build_adapted(seed=2))
    fabric.load_raw(folder, reloaded)
    state = fabric.get_state_dict(reloaded)
    if fabric.is_global_zero:
        assert_equal_states(state, build_adapted(seed=1).state_dict())


ADAPTER_STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "mesh": tensor_parallel(LAYERS_OF_ADAPTER),
}


@pytest.mark.parametrize("strategy", ADAPTER_STRATEGIES)
def test_an_adapter_is_saved_and_read_by_peft(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    run_in_ranks(save_adapter, folder, strategy=ADAPTER_STRATEGIES[strategy])
    assert sorted(os.listdir(folder)) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(build_base(), folder)
    assert_equal_states(loaded.state_dict(), build_adapted(seed=1).state_dict())


def test_an_adapter_needs_a_model_with_the_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    expected = build_adapted(seed=1)
    expected.save_pretrained(folder)
    with single() as fabric:
        with pytest.raises(CheckpointError, match="the model has no adapter") as caught:
            fabric.load_raw(folder, build_base())
        assert "peft.get_peft_model(model, peft.PeftConfig" in str(caught.value.suggestion)
        # The remedy of the error.
        model = get_peft_model(build_base(), PeftConfig.from_pretrained(folder))
        fabric.load_raw(folder, model)
    assert_equal_states(model.state_dict(), expected.state_dict())


def test_an_incomplete_folder_of_an_adapter_names_the_missing_file(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    model = build_adapted(seed=1)
    model.save_pretrained(folder)
    (folder / "adapter_model.safetensors").unlink()
    with single() as fabric:
        with pytest.raises(CheckpointError, match="of an adapter, and not its weights") as caught:
            fabric.load_raw(folder, model)
        assert "adapter_model.safetensors or adapter_model.bin" in str(caught.value)


def test_an_adapter_of_other_layers_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["k_proj"])
    get_peft_model(build_base(), config).save_pretrained(folder)
    module = build_adapted(seed=1)
    with single() as fabric, pytest.raises(CheckpointError) as caught:
        fabric.load_raw(folder, module)
    text = str(caught.value)
    assert "not in the file: base_model.model.model.layers.0.self_attn.q_proj.lora_A" in text
    assert "only in the file: base_model.model.model.layers.0.self_attn.k_proj.lora_A" in text
    assert_equal_states(module.state_dict(), build_adapted(seed=1).state_dict())


def follow_recipe(fabric: Fabric, folder: Path) -> None:
    """Save an adapter as the docstring of ``get_state_dict`` shows it."""
    model = fabric.setup(build_adapted(seed=1))
    weights = fabric.get_state_dict(model)
    if fabric.is_global_zero:
        fabric.unwrap(model).save_pretrained(folder, state_dict=weights)
    fabric.barrier()


def test_the_recipe_with_the_state_dict_saves_the_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    run_in_ranks(follow_recipe, folder, strategy="fsdp")
    loaded = PeftModel.from_pretrained(build_base(), folder)
    assert_equal_states(loaded.state_dict(), build_adapted(seed=1).state_dict())


# -- tensor parallelism ---------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    # Phi 3 has no such tokens in this vocabulary by default.
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen": Qwen3Config(**SIZES, head_dim=8),
    # Its embedding and its head share their weight.
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "phi": Phi3Config(**SIZES),
    # One layer computes the queries, keys and values of each head.
    "neox": GPTNeoXConfig(**SIZES),
    # One layer computes the query and the gate of each head.
    "qwen next": Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        # No layer has experts.
        mlp_only_layers=[0, 1],
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek": DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4},
        kv_lora_rank=6,
        q_lora_rank=None,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        # The first layer has no experts.
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        n_group=1,
        topk_group=1,
    ),
    # The experts of these two are modules in transformers 4, with the styles "local_colwise" and
    # "local_rowwise". The first layer has no experts.
    "dots": Dots1Config(
        **SIZES,
        head_dim=4,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        n_group=1,
        topk_group=1,
    ),
    "ernie": Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=4,
        moe_num_shared_experts=1,
        moe_k=2,
        moe_intermediate_size=8,
    ),
}

EXPERTS = ["mixtral", "deepseek", "dots", "ernie"]
# Models that compute some numbers in float32, in place of float64.
TOLERANCES = {**dict.fromkeys(EXPERTS, 1e-5), "qwen next": 1e-6}

# Before release 5, the experts of transformers were modules of their own, under other names.
has_old_experts = transformers.__version__.startswith("4.")
needs_experts = pytest.mark.skipif(has_old_experts, reason="experts of transformers 5")


def build_causal(name: str, **options: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    module = AutoModelForCausalLM.from_config(CONFIGS[name], **options)
    # The experts of transformers multiply matrices with a kernel that has no float64.
    if name not in EXPERTS:
        module.double()
    return module, torch.optim.SGD(module.parameters(), lr=0.5)


def train(model: Any, optimizer: torch.optim.Optimizer, backward: Any) -> list[float]:
    losses: list[float] = []
    for _ in range(3):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_parts(fabric: Fabric, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        model, optimizer = fabric.setup(*build_causal(name))
        losses = train(model, optimizer, fabric.backward)
        results[name] = (losses, fabric.get_state_dict(model))
    return results


def train_in_one_process(name: str) -> tuple[list[float], dict[str, Tensor]]:
    module, optimizer = build_causal(name)
    losses = train(module, optimizer, torch.Tensor.backward)
    return losses, dict(module.state_dict())


def test_the_plans_of_transformers_train_as_the_plain_loop() -> None:
    names = list(CONFIGS)
    if has_old_experts:
        names.remove("deepseek")
    mesh = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, tp_plan="auto")
    first, _ = run_in_ranks(train_in_parts, names, strategy=mesh)
    for name in names:
        losses, state = train_in_one_process(name)
        losses_in_parts, state_in_parts = first[name]
        tolerance = TOLERANCES.get(name, 1e-12)
        torch.testing.assert_close(losses_in_parts, losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state_in_parts, state, rtol=tolerance, atol=tolerance)


# Without this line, which the plan of transformers 4 lacks, the gradient is that of some heads.
LATENT_LINE = "model.layers.*.self_attn.kv_a_proj_with_mqa"


def train_latents(fabric: Fabric) -> dict[str, Any]:
    """Train a model with latent keys, whose plan has the line of the latents or not."""
    module, optimizer = build_causal("deepseek")
    module._tp_plan.pop(LATENT_LINE, None)
    model, optimizer = fabric.setup(module, optimizer)
    results: dict[str, Any] = {"error": outcome(lambda: train(model, optimizer, fabric.backward))}

    module, optimizer = build_causal("deepseek")
    module._tp_plan[LATENT_LINE] = "mla_kv_a_proj"
    model, optimizer = fabric.setup(module, optimizer)
    results["losses"] = train(model, optimizer, fabric.backward)
    results["state"] = fabric.get_state_dict(model)
    return results


def test_latent_keys_train_as_the_plain_loop_or_are_errors_that_name_the_line() -> None:
    mesh = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, tp_plan="auto")
    first, _ = run_in_ranks(train_latents, strategy=mesh)
    assert "the gradient of model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in first["error"]
    assert '"mla_kv_a_proj" for a projection to latent keys' in first["error"]
    losses, state = train_in_one_process("deepseek")
    torch.testing.assert_close(first["losses"], losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first["state"], state, rtol=1e-5, atol=1e-5)


def train_split_experts(fabric: Fabric, names: list[str]) -> dict[str, Any]:
    results = train_in_parts(fabric, names)
    model = fabric.setup(build_causal("mixtral")[0])
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    # Of four experts, each rank holds one: two parts of the plan, and two shards.
    results["shape"] = tuple(experts.gate_up_proj.to_local().shape)
    return results


@needs_experts
@pytest.mark.slow
def test_split_experts_are_sharded_and_train_as_the_plain_loop() -> None:
    mesh = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, tp_plan="auto")
    first, *_ = run_in_ranks(train_split_experts, EXPERTS, strategy=mesh, ranks=4)
    for name in EXPERTS:
        losses, state = train_in_one_process(name)
        losses_in_parts, state_in_parts = first[name]
        torch.testing.assert_close(losses_in_parts, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state_in_parts, state, rtol=1e-5, atol=1e-6)
    assert first["shape"] == (1, 64, 16)


def build_with_unused_experts() -> tuple[Any, torch.optim.Optimizer]:
    """Return a model whose tokens all go to the same two experts, which are on one rank."""
    # These experts compute nothing without a token. A fast kernel computes an empty product.
    module, _ = build_causal("mixtral", experts_implementation="eager")
    for layer in module.model.layers:
        # All experts have the same weight, and so every token gets the same two neighbors.
        nn.init.zeros_(layer.mlp.gate.weight)
        layer.mlp.gate.weight.requires_grad_(False)
    # Weight decay changes weights whose gradient is zero, and no weights without a gradient.
    return module, torch.optim.SGD(module.parameters(), lr=0.5, weight_decay=0.1)


def train_with_unused_experts(fabric: Fabric) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = fabric.setup(*build_with_unused_experts())
    losses = train(model, optimizer, fabric.backward)
    return losses, fabric.get_state_dict(model)


@needs_experts
def test_a_rank_whose_experts_get_no_tokens_trains_as_the_plain_loop() -> None:
    module, optimizer = build_with_unused_experts()
    losses = train(module, optimizer, torch.Tensor.backward)
    gradient = module.model.layers[0].mlp.experts.down_proj.grad
    sums_of_ranks = gradient.unflatten(0, (2, 2)).abs().sum(dim=(1, 2, 3))
    assert sums_of_ranks.count_nonzero() == 1
    mesh = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, tp_plan="auto")
    for losses_in_parts, state in run_in_ranks(train_with_unused_experts, strategy=mesh):
        torch.testing.assert_close(losses_in_parts, losses, rtol=1e-5, atol=1e-5)
        if state:
            torch.testing.assert_close(state, dict(module.state_dict()), rtol=1e-5, atol=1e-5)


def pass_through_experts(fabric: Fabric) -> list[str]:
    # Transformers 4 has no class for this config.
    config = AutoConfig.for_model(
        "nemotron_h",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        layers_block_type=["attention", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
        n_group=1,
        topk_group=1,
    )
    outcomes: list[str] = []
    # The second one is the remedy of the error.
    for implementation in ("eager", "grouped_mm"):
        module = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
        model = fabric.setup(module)
        outcomes.append(outcome(lambda model=model: model(TOKENS)))
    return outcomes


@needs_experts
def test_experts_that_do_not_skip_those_of_other_ranks_are_errors_with_a_remedy() -> None:
    mesh = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, tp_plan="auto")
    for text, outcome_of_remedy in run_in_ranks(pass_through_experts, strategy=mesh):
        assert "NemotronHExperts may not skip number 2" in text
        assert 'Write: experts_implementation="grouped_mm"' in text
        assert outcome_of_remedy == "fine"


PLANS = {
    "'packed_rowwise', which is for 'model.layers.*.mlp.experts.gate_up_proj'": {
        "model.layers.*.mlp.experts.gate_up_proj": "packed_rowwise"
    },
    "model.layers.0.self_attn.q_proj: 'packed_colwise' is for the parameters of experts": {
        "model.layers.*.self_attn.q_proj": "packed_colwise"
    },
    "model.layers.0.mlp: 'moe_tp_experts' splits parameters with num_experts rows": {
        "model.layers.*.mlp": "moe_tp_experts"
    },
    "model.layers.0.self_attn.q_proj: 'mla_kv_a_proj' needs the attribute qk_rope_head_dim": {
        "model.layers.*.self_attn.q_proj": "mla_kv_a_proj"
    },
}


@needs_experts
@pytest.mark.parametrize("problem", PLANS)
def test_a_style_that_does_not_fit_names_the_layer(problem: str) -> None:
    def set_up() -> None:
        mesh = ModelParallelStrategy(tensor_parallel_size=1, tp_plan=PLANS[problem])
        with Fabric(accelerator="cpu", devices=1, environment="none", strategy=mesh) as fabric:
            fabric.setup(build_causal("mixtral")[0])

    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        set_up()


@needs_experts
def test_experts_with_parameters_in_inner_modules_are_refused() -> None:
    module: Any = build_causal("mixtral")[0]
    experts = module.model.layers[0].mlp.experts
    # As many rows as there are experts.
    experts.act_fn = nn.PReLU(experts.num_experts)
    mesh = ModelParallelStrategy(tensor_parallel_size=1, tp_plan="auto")
    with (
        Fabric(accelerator="cpu", devices=1, environment="none", strategy=mesh) as fabric,
        pytest.raises(ConfigurationError, match="'moe_tp_experts' splits parameters with"),
    ):
        fabric.setup(module)


def set_up_three_experts(fabric: Fabric) -> str:
    module = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=3))
    return outcome(lambda: fabric.setup(module))


@needs_experts
def test_experts_that_cannot_be_divided_are_named() -> None:
    mesh = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, tp_plan="auto")
    for text in run_in_ranks(set_up_three_experts, strategy=mesh):
        assert "model.layers.0.mlp.experts: num_experts 3 / 2 parts leaves 1" in text
