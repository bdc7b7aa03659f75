"""Which modules become layers, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ds_kfac.config import KFACConfig
from ds_kfac.errors import CoverageError
from ds_kfac.layers.discover import discover, matches
from ds_kfac.layers.spec import LayerSpec, LayerTable
from tests.unit.layers.models import Block, Conv1D, Transformer


def table(model: nn.Module, optimized: Any = None, **settings: Any) -> LayerTable:
    return discover(model, KFACConfig.parse(settings), optimized=optimized)


def only(model: nn.Module, **settings: Any) -> LayerSpec:
    (spec,) = table(model, **settings).layers
    return spec


def reasons(found: LayerTable) -> dict[str, str]:
    return {item.name: item.reason for item in found.left_out}


def refusal(code: str, model: nn.Module, **settings: Any) -> str:
    with pytest.raises(CoverageError) as caught:
        table(model, **settings)
    assert caught.value.code == code
    return caught.value.message


def test_linear_with_bias() -> None:
    spec = only(nn.Linear(3, 5))
    assert (spec.name, spec.kind, spec.d_in, spec.d_out, spec.columns) == ("", "linear", 3, 5, 4)
    assert [(s.name, s.shape, s.offset) for s in spec.slots] == [
        ("weight", (5, 3), 0),
        ("bias", (5,), 15),
    ]
    assert (spec.numel, spec.parts, spec.block_sizes) == (20, 1, (4, 5))


def test_linear_without_bias() -> None:
    spec = only(nn.Linear(3, 5, bias=False))
    assert (spec.columns, spec.bias, spec.numel, len(spec.slots)) == (3, None, 15, 1)


def test_frozen_bias_is_no_column() -> None:
    layer = nn.Linear(3, 5)
    layer.bias.requires_grad_(False)
    spec = only(layer)
    assert (spec.columns, spec.bias) == (3, None)


def test_frozen_weight_leaves_the_layer_out_and_counts_its_bias() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].weight.requires_grad_(False)
    found = table(model)
    assert [spec.name for spec in found.layers] == ["1"]
    assert [(i.name, i.reason, i.numel) for i in found.left_out] == [
        ("0", "requires_grad=False", 5)
    ]


def test_tied_weights_have_no_owner() -> None:
    found = table(Transformer(tied=True), skip_layers=[])
    assert "lm_head" not in [spec.name for spec in found.layers]
    assert reasons(found)["lm_head"] == "weight is shared with another module"


def test_untied_head_is_skipped_by_default_and_taken_on_request() -> None:
    assert "matches skip_layers pattern '*lm_head*'" in reasons(table(Transformer()))["lm_head"]
    assert "lm_head" in [spec.name for spec in table(Transformer(), skip_layers=[]).layers]


def test_shared_bias_leaves_both_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].bias = model[0].bias
    found = table(model)
    assert [spec.name for spec in found.layers] == ["2"]
    assert reasons(found) == dict.fromkeys("01", "bias is shared with another module")


def test_one_module_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    found = table(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(4, 2))}))
    assert [spec.name for spec in found.layers] == ["a", "b.1"]


def test_multihead_attention_never_calls_its_projection() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 4)})
    found = table(model)
    assert [spec.name for spec in found.layers] == ["out"]
    assert reasons(found) == {
        "attention": "MultiheadAttention is not supported",
        "attention.out_proj": "nn.MultiheadAttention uses this weight without calling the layer",
    }


@pytest.mark.parametrize("bias", [True, False])
def test_parametrized_weights_are_not_the_gradients_home(bias: bool) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4, bias=bias)), nn.Linear(4, 2))
    found = table(model)
    assert [spec.name for spec in found.layers] == ["1"]
    numels = {item.name: item.numel for item in found.left_out}
    assert numels["0.parametrizations.weight"] == 4 + 12
    if bias:
        assert "parametrized" in reasons(found)["0"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_old_style_weight_norm() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    found = table(model)
    assert [spec.name for spec in found.layers] == ["1"]
    assert "no parameter named weight" in reasons(found)["0"]


def test_conv2d() -> None:
    spec = only(nn.Conv2d(3, 8, (2, 5), stride=2, padding=1, dilation=2))
    assert (spec.kind, spec.d_in, spec.d_out, spec.columns) == ("conv2d", 30, 8, 31)
    assert spec.weight.shape == (8, 3, 2, 5)


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_convolutions_are_left_out(groups: int) -> None:
    found = table(nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.Conv2d(8, 2, 1)))
    assert [spec.name for spec in found.layers] == ["1"]
    assert reasons(found)["0"] == f"Conv2d with groups={groups} is not supported (only groups=1)"


def test_hugging_face_conv1d_is_known_by_its_class_name() -> None:
    spec = only(nn.ModuleDict({"attn": nn.ModuleDict({"c_attn": Conv1D(9, 4)})}))
    assert (spec.name, spec.kind, spec.d_in, spec.d_out, spec.parts) == (
        "attn.c_attn",
        "conv1d",
        4,
        9,
        3,
    )
    assert spec.weight.shape == (4, 9)
    assert only(nn.ModuleDict({"proj": Conv1D(9, 4)})).parts == 1


def test_torch_conv1d_is_something_else() -> None:
    found = table(nn.Sequential(nn.Conv1d(3, 4, 2), nn.Linear(4, 2)))
    assert reasons(found) == {"0": "Conv1d is not supported"}


def test_other_layers_are_named_with_their_class() -> None:
    found = table(
        nn.Sequential(
            nn.Embedding(5, 3),
            nn.LayerNorm(3),
            nn.Bilinear(3, 3, 2),
            nn.ConvTranspose2d(2, 2, 3),
            nn.LSTM(3, 4),
            nn.ReLU(),
            nn.Linear(4, 2),
        )
    )
    assert [item.type_name for item in found.left_out] == [
        "Embedding",
        "LayerNorm",
        "Bilinear",
        "ConvTranspose2d",
        "LSTM",
    ]
    assert all(
        r == f"{i.type_name} is not supported"
        for i, r in zip(found.left_out, reasons(found).values(), strict=True)
    )


def test_layers_keep_the_models_order_and_full_names() -> None:
    names = [spec.name for spec in table(Transformer()).layers]
    assert names == [f"h.{i}.{n}" for i in (0, 1) for n in ("c_attn", "mlp.0", "mlp.2")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_table_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    assert table(Transformer().to(dtype)).fingerprint() == table(Transformer()).fingerprint()


def test_meta_models_can_be_planned() -> None:
    with torch.device("meta"):
        model = Transformer()
    assert table(model).fingerprint() == table(Transformer()).fingerprint()


def test_partitioned_parameters_have_their_shape_beside_them() -> None:
    """Under ZeRO-3 the parameter is empty and carries ``ds_shape``."""
    whole = Transformer()
    expected = table(whole)
    for param in whole.parameters():
        param.ds_shape = param.shape
        param.data = torch.empty(0)
    assert table(whole) == expected


def test_large_sides_are_cut() -> None:
    spec = only(nn.Linear(10, 7), max_factor_dim=4)
    assert [b.size for b in spec.a_blocks] == [4, 4, 3]
    assert [b.size for b in spec.g_blocks] == [4, 3]


# ---------------------------------------------------------------- what the optimizer has


def test_layers_outside_the_optimizer_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    found = table(model, optimized={"0.weight", "0.bias", "1.weight"})
    assert [spec.name for spec in found.layers] == ["0"]
    assert reasons(found) == dict.fromkeys("12", "not among the optimizer's parameters")


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "skipped"),
    [
        ("h.0.mlp.0", {"h.0.mlp.0"}),
        ("h.0.*", {"h.0.c_attn", "h.0.mlp.0", "h.0.mlp.2"}),
        ("h.1", {"h.1.c_attn", "h.1.mlp.0", "h.1.mlp.2"}),
        ("mlp", {f"h.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}),
        ("c_attn", {"h.0.c_attn", "h.1.c_attn"}),
        ("*.mlp.[0-1]", {"h.0.mlp.0", "h.1.mlp.0"}),
        ("Conv1D", {"h.0.c_attn", "h.1.c_attn"}),
        ("*ml?.2", {"h.0.mlp.2", "h.1.mlp.2"}),
    ],
)
def test_skip_patterns(pattern: str, skipped: set[str]) -> None:
    everything = {spec.name for spec in table(Transformer()).layers}
    found = table(Transformer(), skip_layers=[pattern, "lm_head"])
    assert {spec.name for spec in found.layers} == everything - skipped
    for name in skipped:
        assert reasons(found)[name] == f"matches skip_layers pattern {pattern!r}"


def test_patterns_are_case_sensitive_and_whole() -> None:
    layer = nn.Linear(2, 2)
    assert matches("a.fc", layer, "fc") and matches("a.fc", layer, "Linear")
    for pattern in ("FC", "linear", "f", "c", "a.f", "*.f"):
        assert not matches("a.fc", layer, pattern)


def test_a_pattern_that_matches_nothing_is_a_mistake() -> None:
    text = refusal("E134", Transformer(), skip_layers=["h.0.mpl.0"])
    assert "skip_layers pattern 'h.0.mpl.0' matches no module of the model" in text
    assert "did you mean 'h.0.mlp.0'?" in text


def test_default_patterns_may_match_nothing() -> None:
    assert only(nn.Linear(3, 2))


# ---------------------------------------------------------------- fused parts


def test_fused_layers_by_default_and_by_name() -> None:
    model = nn.ModuleDict(
        {
            "qkv_proj": nn.Linear(4, 12),
            "gate_up_proj": nn.Linear(4, 10),
            "query_key_value": nn.Linear(4, 6),
            "other": nn.Linear(4, 12),
        }
    )
    assert [spec.parts for spec in table(model).layers] == [3, 2, 3, 1]
    chosen = table(model, fused_parts={"other": 4, "qkv*": 2})
    assert [spec.parts for spec in chosen.layers] == [2, 1, 1, 4]


def test_rows_that_do_not_split() -> None:
    """Asked for, it is a mistake; guessed from the name, the guess was wrong (LoRA, GQA)."""
    model = nn.ModuleDict({"qkv": nn.Linear(4, 8)})
    text = refusal("E135", model, fused_parts={"qkv": 3})
    assert "layer qkv: 8 rows cannot be split into 3 equal parts" in text
    assert only(model).parts == 1


def test_lazy_layers_have_to_see_an_input_first() -> None:
    """They gave a bare torch error about uninitialised parameters, without a name."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(4))
    assert "layer 1 (LazyLinear) has no shape yet" in refusal("E136", model)
    model(torch.ones(1, 3))
    assert len(discover(model, KFACConfig()).layers) == 2


# ---------------------------------------------------------------- nothing, and strict


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (nn.Sequential(), "the model has no parameters"),
        (nn.ReLU(), "the model has no parameters"),
        (nn.LayerNorm(3), "(root): LayerNorm is not supported"),
        (nn.Sequential(nn.Embedding(3, 2)), "0: Embedding is not supported"),
        (nn.Linear(3, 2).requires_grad_(False), "(root): requires_grad=False"),
    ],
)
def test_nothing_to_precondition_is_an_error(model: nn.Module, part: str) -> None:
    text = refusal("E132", model)
    assert "no layer of this model can be preconditioned" in text
    assert part in text


def test_skipping_everything_is_an_error() -> None:
    assert "matches skip_layers pattern '*'" in refusal("E132", Block(), skip_layers=["*"])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("d_in", "d_out", "bias"), [(0, 3, True), (3, 0, True), (0, 3, False)])
def test_layers_without_elements_are_left_out(d_in: int, d_out: int, bias: bool) -> None:
    found = table(nn.Sequential(nn.Linear(d_in, d_out, bias=bias), nn.Linear(3, 2)))
    assert "complex or empty" in reasons(found)["0"]


def test_strict_lists_all_unsupported_matrix_layers_sorted() -> None:
    model = nn.ModuleDict(
        {
            "z": nn.Embedding(3, 2),
            "norm": nn.LayerNorm(2),
            "b": nn.Conv1d(2, 2, 1),
            "grouped": nn.Conv2d(4, 4, 1, groups=2),
            "frozen": nn.Embedding(3, 2).requires_grad_(False),
            "fc": nn.Linear(2, 2),
        }
    )
    text = refusal("E131", model, strict_layers=True)
    assert "3 modules are not supported: b (Conv1d), grouped (Conv2d), z (Embedding)" in text
    assert only(model).name == "fc"


@pytest.mark.parametrize("patterns", [["tower"], ["tower.*"], ["Embedding", "Bilinear"]])
def test_strict_accepts_what_any_skip_pattern_names(patterns: list[str]) -> None:
    tower = nn.ModuleDict({"emb": nn.Embedding(3, 2), "mix": nn.Bilinear(2, 2, 2)})
    model = nn.ModuleDict({"tower": tower, "fc": nn.Linear(2, 2)})
    assert only(model, strict_layers=True, skip_layers=patterns).name == "fc"


# ---------------------------------------------------------------- the table itself


def test_fingerprint_tells_tables_apart() -> None:
    base = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    others = [
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)),
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    ]
    prints = [table(model).fingerprint() for model in [base, *others]]
    prints.append(table(base, max_factor_dim=2).fingerprint())
    assert len(set(prints)) == len(prints)


def test_coverage_counts_every_trainable_parameter_once() -> None:
    model = Transformer()
    text = table(model).coverage()
    total = sum(p.numel() for p in model.parameters())
    inside = sum(p.numel() for n, p in model.named_parameters() if "c_attn" in n or "mlp" in n)
    assert f"6 layers with {inside:,} of {total:,} trainable parameters" in text
    assert f"{100 * inside / total:.1f} %" in text


class _Gated(nn.Linear):
    """A subclass with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


def test_parameters_that_a_subclass_adds_are_listed() -> None:
    """They were in no list, and the coverage line said 100 %."""
    found = table(nn.Sequential(_Gated()))
    assert [spec.name for spec in found.layers] == ["0"]
    assert reasons(found) == {"0.gain": "is neither weight nor bias of its layer"}
    assert "20 of 24" in found.coverage()


def test_complex_layers_are_left_out() -> None:
    """They were accepted and stopped the run at the first refresh."""
    found = table(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 2)))
    assert [spec.name for spec in found.layers] == ["1"]
    assert "complex64" in reasons(found)["0"]


class Padded(nn.Conv2d):
    """Convolves something else than it is called with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))


class Standardised(nn.Conv2d):
    """Convolves with something else than its weight."""

    def _conv_forward(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Logged(nn.Linear):
    """Passes everything on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Renamed(nn.Linear):
    """Has no forward of its own."""


def test_layers_with_a_forward_of_their_own_are_left_out() -> None:
    """A convolution that pads inside of its forward got the factors of the unpadded input."""
    model = nn.Sequential(
        Padded(1, 2, 3), Standardised(2, 2, 3), nn.Flatten(), Logged(8, 2), Renamed(2, 2)
    )
    found = table(model)
    assert [spec.name for spec in found.layers] == ["4"]
    for name, base in {"0": "Conv2d", "1": "Conv2d", "3": "Linear"}.items():
        assert f"nn.{base}, list it in kfac.plain_layers" in reasons(found)[name]
    assert [s.name for s in table(model, plain_layers=["Logged"]).layers] == ["3", "4"]
    assert "Padded" in refusal("E131", model, strict_layers=True)
    assert "plain_layers pattern 'Loged'" in refusal("E134", model, plain_layers=["Loged"])
