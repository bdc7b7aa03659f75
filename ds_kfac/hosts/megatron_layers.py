"""Layers of Megatron models that cannot be preconditioned and must not be left out in silence.

Transformer Engine is recognised by the names of classes and their modules: nothing is imported.
Facts about it and megatron-core's wrappers that this file relies on:

* ``TEColumnParallelLinear``, ``TERowParallelLinear`` and ``TELinear`` multiply their input by
  ``weight`` and return ``(output, bias)``, as megatron-core's own layers do; ``fp8`` says whether
  the last call was quantised;
* ``LayerNormLinear`` and ``LayerNormMLP`` apply a norm between their input and their weight;
* quantised parameters are of a tensor class of the library.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_kfac.layers.describe import matches
from ds_kfac.layers.kinds import kind_of

_LIBRARY = "transformer_engine"
_WRAPPERS = "megatron.core.extensions.transformer_engine"
_LOCAL = "use transformer_impl='local'"
_SEQUENTIAL = "experts in one matrix; use SequentialMLP: moe_grouped_gemm=False"


def problems(model: nn.Module, skipped: Sequence[str]) -> list[str]:
    """What of a model is not available, with reasons and alternatives.

    Args:
        model: The model under the names of the whole one.
        skipped: ``skip_layers``: what the user leaves to the base optimizer.
    """
    found = []
    for name, module in model.named_modules():
        problem = _problem(module)
        if problem is None or any(matches(name, module, pattern) for pattern in skipped):
            continue
        found.append(f"{type(module).__name__}{problem}, or list it in kfac.skip_layers)")
    return found


def _problem(module: nn.Module) -> str | None:
    kind = type(module).__name__
    if kind in ("GroupedMLP", "TEGroupedMLP"):
        return f" ({_SEQUENTIAL}"
    if not _is_transformer_engine(module):
        return None
    if kind == "TEFusedMLP":
        return " (fused layers have no hooks; set use_transformer_engine_op_fuser=False"
    trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
    return _library_problem(module, trained) if any(p.ndim > 1 for p in trained) else None


def _library_problem(module: nn.Module, trained: Sequence[nn.Parameter]) -> str | None:
    """Of a layer of the library with matrices that are trained."""
    classes = [base.__name__ for base in type(module).__mro__]
    if any("Grouped" in name for name in classes):
        return f" ({_SEQUENTIAL}"
    if any("LayerNorm" in name for name in classes):
        return (
            " of Transformer Engine (it applies its norm inside, so that the input of its weight "
            f"is not seen; {_LOCAL}"
        )
    if any(_is_quantised(param) for param in trained):
        return " of Transformer Engine (parameters are quantised; set fp8_param=False and use bf16"
    if kind_of(module) is None:
        return (
            " of Transformer Engine (known are TEColumnParallelLinear, TERowParallelLinear and "
            f"TELinear of megatron-core; {_LOCAL}"
        )
    return None


def _is_transformer_engine(module: nn.Module) -> bool:
    return any(
        base.__module__ == _WRAPPERS or base.__module__.partition(".")[0] == _LIBRARY
        for base in type(module).__mro__
    )


def _is_quantised(param: nn.Parameter) -> bool:
    return any(base.__module__.partition(".")[0] == _LIBRARY for base in type(param).__mro__)
