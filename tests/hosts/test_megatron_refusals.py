"""What of Megatron is refused: by name, with the reason, and on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, KFACError, UnsupportedError
from ds_kfac.hosts import megatron_model, megatron_support
from ds_kfac.layers.kinds import kind_of
from tests._harness import World
from tests.hosts import megatron_jobs as jobs
from tests.hosts.megatron_cells import NATURAL, cell

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
WRAPPER = "megatron.core.distributed.distributed_data_parallel"


class Layer(nn.Module):
    """A layer of a stage, with its number in the whole model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.fc = nn.Linear(2, 2)


class Stage(nn.Module):
    """A model chunk with some layers."""

    def __init__(self, *numbers: int, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**settings)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer(number) for number in numbers)


class FP32Optimizer:
    """As much of Megatron's as is looked at."""

    def __init__(self, base: torch.optim.Optimizer, **settings: Any) -> None:
        self.optimizer = base
        self.config = SimpleNamespace(clip_grad=1.0, **settings)

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        return True


def wrapped(stage: Stage, **settings: Any) -> nn.Module:
    """The stage in what looks like Megatron's wrapper."""
    cls = type("DistributedDataParallel", (nn.Module,), {"__module__": WRAPPER})
    wrapper = cls()
    wrapper.module, wrapper.ddp_config = stage, SimpleNamespace(**settings)
    return wrapper


def check(
    stage: Stage | None = None,
    wrapper: dict[str, Any] | None = None,
    base: type[torch.optim.Optimizer] = torch.optim.SGD,
    optimizer: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    stage = stage or Stage(1)
    steps = FP32Optimizer(base(stage.parameters(), lr=0.1), **(optimizer or {}))
    settings = KFACConfig.parse({**NATURAL, **(config or {})})
    megatron_support.check([wrapped(stage, **(wrapper or {}))], steps, settings)


def test_a_plain_model_is_not_refused() -> None:
    check()


@pytest.mark.parametrize("field", megatron_support._MODEL_FIELDS)
def test_fields_of_the_model(field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"KFAC-E150 .*{field}=True"):
        check(Stage(1, **{field: True}))


@pytest.mark.parametrize("field", megatron_support._OPTIMIZER_FIELDS)
def test_fields_of_the_optimizer(field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"KFAC-E150 .*{field}=True"):
        check(optimizer={field: True})


@pytest.mark.parametrize("field", megatron_support._WRAPPER_FIELDS)
def test_fields_of_the_wrapper(field: str) -> None:
    with pytest.raises(UnsupportedError, match=f"KFAC-E150 .*{field}=True"):
        check(wrapper={field: True})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local'"),
        ({"gtp_remat": True}, "generalized tensor parallelism"),
        (
            {"num_moe_experts": 4, "expert_tensor_parallel_size": 2},
            "expert_tensor_parallel_size=2 with tensor_model_parallel_size=1 .*set it to 1",
        ),
        (
            {"num_moe_experts": 4, "tensor_model_parallel_size": 2},
            "expert_tensor_parallel_size=2 with tensor_model_parallel_size=2 .*set it to 1",
        ),
        ({"multi_latent_attention": True}, "linear_kv_down_proj .*use attention with query groups"),
        ({"num_moe_experts": 4, "add_bias_linear": True}, "experts with biases"),
        (
            {
                "num_moe_experts": 4,
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "expert_model_parallel_size": 1,
            },
            "expert_model_parallel_size=1",
        ),
    ],
)
def test_what_has_an_alternative_names_it(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=f"KFAC-E150 .*{text}"):
        check(Stage(1, **settings))


EXTENSIONS = "megatron.core.extensions.transformer_engine"
EXPERTS = "megatron.core.transformer.moe.experts"


def library(name: str) -> type[nn.Module]:
    """A class with the name of one of Transformer Engine."""
    return type(name, (nn.Module,), {"__module__": f"transformer_engine.pytorch.module.{name}"})


def stage_with(name: str, module: str, base: type[nn.Module] = nn.Module) -> Stage:
    """A stage with a layer of a class that has this name and these ancestors."""
    stage = Stage(1)
    layer = type(name, (base,), {"__module__": module})()
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    stage.decoder.extra = layer
    return stage


@pytest.mark.parametrize(
    ("name", "module", "base", "text"),
    [
        ("Linear", "transformer_engine.pytorch", "", "known are TEColumnParallelLinear, .*'local'"),
        ("LayerNormLinear", "transformer_engine.pytorch", "", "norm inside, .*'local'"),
        ("LayerNormMLP", "transformer_engine.pytorch", "", "norm inside, .*'local'"),
        ("Mine", "my.model", "LayerNormLinear", "norm inside, .*'local'"),
        ("TELayerNormColumnParallelLinear", EXTENSIONS, "LayerNormLinear", "norm inside, .*'loc"),
        ("TEColumnParallelGroupedLinear", EXTENSIONS, "GroupedLinear", "use SequentialMLP"),
        ("TEFusedMLP", EXTENSIONS, "", "use_transformer_engine_op_fuser=False"),
        ("TEGroupedMLP", EXPERTS, "", "use SequentialMLP"),
        ("GroupedMLP", EXPERTS, "", "use SequentialMLP"),
    ],
)
def test_layers_that_would_be_left_out_in_silence(
    name: str, module: str, base: str, text: str
) -> None:
    """Two matrices of every layer of a default Megatron model are in these classes."""
    stage = stage_with(name, module, library(base) if base else nn.Module)
    with pytest.raises(UnsupportedError, match=rf"KFAC-E150 .*{name}\W.*{text}.*skip_layers"):
        check(stage)
    check(stage, config={"skip_layers": ["decoder.extra"]})


@pytest.mark.parametrize("name", ["TEColumnParallelLinear", "TERowParallelLinear", "TELinear"])
def test_plain_layers_of_transformer_engine(name: str) -> None:
    """They are preconditioned, unless what they multiply is quantised."""
    stage = stage_with(name, EXTENSIONS, library("Linear"))
    check(stage)
    layer = stage.decoder.extra
    kind = kind_of(layer)
    assert kind is not None and kind.name == "te_linear" and kind.dims(layer) == (2, 2)
    layer.fp8 = False
    assert kind.input_rows(layer, torch.ones(3, 1, 2), "expand").shape == (3, 2)
    layer.fp8 = True
    with pytest.raises(UnsupportedError, match="KFAC-E150 .*under an fp8 autocast.*use bf16"):
        kind.input_rows(layer, torch.ones(3, 1, 2), "expand")
    tensor = type("Float8Tensor", (torch.Tensor,), {"__module__": "transformer_engine.pytorch"})
    layer.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(tensor))
    with pytest.raises(UnsupportedError, match=rf"E150 .*{name} of .* quantised; set fp8_param"):
        check(stage)


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(UnsupportedError, match="fp8='hybrid'.*weight_sharing='reduce'"):
        check(Stage(1, fp8="hybrid"), config={"weight_sharing": "reduce"})


def test_other_wrappers() -> None:
    stage = Stage(1)
    optimizer = FP32Optimizer(torch.optim.SGD(stage.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match=r"E150 .*Stage \(use megatron.core's Distributed"):
        megatron_support.check([stage], optimizer, KFACConfig.parse(NATURAL))


def test_other_optimizers() -> None:
    stage = Stage(1)
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"E150 .*SGD \(pass what get_megatron_optimizer"):
        megatron_support.check([wrapped(stage)], sgd, KFACConfig.parse(NATURAL))
    layer_wise = type("LayerWiseDistributedOptimizer", (FP32Optimizer,), {})(sgd)
    with pytest.raises(UnsupportedError, match="E150 .*LayerWiseDistributedOptimizer"):
        megatron_support.check([wrapped(stage)], layer_wise, KFACConfig.parse(NATURAL))


def test_directions_with_momentum_need_a_plain_base_optimizer() -> None:
    orthogonal = {"direction": "orthogonal", "kl_clip": None}
    check(config=orthogonal)
    with pytest.raises(ConfigError, match="KFAC-E205"):
        check(base=torch.optim.AdamW, config=orthogonal)


def test_names_of_the_whole_model() -> None:
    model = megatron_model.whole([Stage(3), wrapped(Stage(7))])
    assert [name for name, _ in model.named_parameters()] == [
        *("decoder.layers.2.fc.weight", "decoder.layers.2.fc.bias"),
        *("decoder.layers.6.fc.weight", "decoder.layers.6.fc.bias"),
    ]


def test_chunks_with_the_same_layer_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="E150 .*two model chunks with a module 2 "):
        megatron_model.whole([Stage(3), Stage(3)])


def test_gated_layers_have_two_parts_and_queries_none() -> None:
    config = KFACConfig.parse(NATURAL)
    gated = megatron_model.with_fused_parts(config, [Stage(1, gated_linear_unit=True)])
    assert gated.fused_parts == {"*linear_fc1": 2}
    plain = megatron_model.with_fused_parts(config, [Stage(1, gated_linear_unit=False)])
    assert plain.fused_parts == {}
    asked = KFACConfig.parse({**NATURAL, "fused_parts": {"fc": 3}})
    assert megatron_model.with_fused_parts(asked, [Stage(1)]) is asked


def fail(rank: int, world_size: int, of: jobs.Cell, what: str) -> str:
    """Attach with something wrong on the second rank alone; the text of the error."""
    import ds_kfac.megatron
    from tests.hosts import megatron_model as models

    training = models.build(replace(of, kfac=None))
    config = dict(of.kfac or {})
    if what == "twice":
        ds_kfac.megatron.attach(training.chunks, training.optimizer, config)
    elif rank == 1 and what == "graphs":
        training.config.enable_cuda_graph = True
    elif rank == 1 and what:
        config[what] = 7
    before = set(training.optimizer.__dict__)
    try:
        ds_kfac.megatron.attach(training.chunks, training.optimizer, config)
    except KFACError as error:
        assert set(training.optimizer.__dict__) == before
        return str(error)
    return "nothing"


@needs_megatron
@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "changes", "text"),
    [
        ("graphs", {}, "KFAC-E150 not available with kfac: enable_cuda_graph=True"),
        ("dampnig", {}, "KFAC-E201 .*dampnig"),
        ("damping", {}, "KFAC-E203 the kfac configuration differs between ranks"),
        ("twice", {}, "KFAC-E212 this optimizer has K-FAC already"),
        ("", {"factor_micro_batches": "last"}, "KFAC-E155 "),
        ("", {"skip_layers": ["decoder"]}, "KFAC-E132 no layer of this model"),
        ("", {"skip_layers": ["decoder.layers.9"]}, "KFAC-E134 .*decoder.layers.9"),
    ],
)
def test_all_ranks_raise_the_same(
    what: str, changes: dict[str, Any], text: str, megatron_world: Callable[[int], World]
) -> None:
    of = cell(pp=2, kfac={**NATURAL, **changes})
    found = megatron_world(2).run(fail, of, what, compare_collectives=False)
    assert len(set(found)) == 1, found
    assert re.match(text, found[0], re.DOTALL), found[0]
