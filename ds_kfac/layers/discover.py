"""Walk a model and decide, module by module, what is preconditioned and what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from ds_kfac.config import OUTPUT_HEADS, KFACConfig
from ds_kfac.errors import CoverageError, nearest
from ds_kfac.layers.describe import (
    describe,
    extra_parameters,
    matches,
    numel_of,
    shape_of,
    whole_sizes,
)
from ds_kfac.layers.kinds import KINDS, LayerKind, kind_of, overridden
from ds_kfac.layers.names import enclosing
from ds_kfac.layers.shards import TensorCut
from ds_kfac.layers.spec import FROZEN, LayerSpec, LayerTable, LeftOut


def discover(
    model: nn.Module,
    config: KFACConfig,
    *,
    optimized: Collection[str] | None = None,
    excluded: Mapping[str, str] | None = None,
    whole: bool = True,
    tensor: TensorCut | None = None,
    sizes: Mapping[str, int] | None = None,
) -> LayerTable:
    """Build the table of layers.

    Args:
        model: The bare model; names in the table are its module names.
        config: ``skip_layers``, ``plain_layers``, ``fused_parts``, ``max_factor_dim`` and
            ``strict_layers`` count.
        optimized: Names of the parameters that the base optimizer updates; None for all.
        excluded: Modules that the host keeps out with all their children, by name, and why.
        whole: False for one stage of a pipeline: what it lacks another stage may have, and the
            caller asks :func:`require_coverage` about all of them.
        tensor: Modules that are cut over a tensor group.
        sizes: Elements of parameters in the whole model that only the host knows, by name.

    Returns:
        The table, layers in the order of ``model.named_modules()``.

    Raises:
        CoverageError: The whole model has nothing to precondition (E132) or no module for a
            pattern (E134), ``strict_layers`` finds unsupported modules (E131), or a lazy
            module has not seen an input yet (E136).
    """
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    inside_attention = _attention_projections(model)
    sizes = {**whole_sizes(tensor, model), **(sizes or {})}
    kept_out = {**(excluded or {}), **(tensor.left_out if tensor else {})}
    layers: list[LayerSpec] = []
    left_out, unsupported = list[LeftOut](), list[tuple[str, str]]()
    counted: set[int] = set()  # tied parameters are one parameter
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        _require_shapes(name, module)
        kind = _kind(name, module, tensor)
        reason = _kept_out(name, kept_out) or _reason_left_out(
            name, module, kind, config, uses, inside_attention, tensor
        )
        if reason is None and kind is not None:
            spec = describe(name, module, kind, config, tensor)
            if optimized is None or all(slot.name in optimized for slot in spec.slots):
                layers.append(spec)
                left_out += extra_parameters(name, module, spec, sizes)
                continue
            reason = "not among the optimizer's parameters"
        numel = _counted_once(name, module, sizes, counted)
        left_out.append(LeftOut(name, type(module).__name__, reason or "", numel))
        if _is_missed(name, module, kind, config):
            unsupported.append((name, type(module).__name__))
    table = LayerTable(tuple(layers), tuple(left_out), _unmatched(model, config))
    _check(table, unsupported if config.strict_layers else [], whole=whole)
    return table


def _counted_once(name: str, module: nn.Module, sizes: Mapping[str, int], counted: set[int]) -> int:
    """Elements of a module's trained parameters that were not counted before; marks them."""
    new = {key: param for key, param in _trained(module).items() if id(param) not in counted}
    counted.update(id(param) for param in new.values())
    return sum(sizes.get(f"{name}.{key}", numel_of(param)) for key, param in new.items())


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    own = module.named_parameters(recurse=False)
    return {key: param for key, param in own if param.requires_grad}


def _kind(name: str, module: nn.Module, tensor: TensorCut | None) -> LayerKind | None:
    # What is left of a cut layer is a matrix product, whatever its class.
    return kind_of(module) or (KINDS["linear"] if tensor and name in tensor.modules else None)


def _is_missed(
    name: str,
    module: nn.Module,
    kind: LayerKind | None,
    config: KFACConfig,
) -> bool:
    """Whether a module has matrices that nobody asked to leave out."""
    skipped = any(matches(name, module, pattern) for pattern in config.skip_layers)
    refused = kind is None or bool(kind.refusal(module) or _own_forward(name, module, config))
    return (
        refused
        and not skipped
        and any(len(shape_of(param)) >= 2 for param in _trained(module).values())
    )


def _check(table: LayerTable, unsupported: list[tuple[str, str]], *, whole: bool) -> None:
    if whole:
        _require_matches([table])
    if unsupported:
        _refuse_unsupported(unsupported)
    if whole:
        require_coverage([table])


def require_coverage(tables: Sequence[LayerTable]) -> None:
    """Check that the stages of a model have something to precondition between them.

    Args:
        tables: One or more per stage, the same list on every rank.

    Raises:
        CoverageError: They have not (E132), or a pattern matches no module (E134).
    """
    _require_matches(tables)
    if any(table.layers for table in tables):
        return
    left_out = list(dict.fromkeys(item for table in tables for item in table.left_out))
    reasons = "; ".join(f"{item.name or '(root)'}: {item.reason}" for item in left_out[:20])
    raise CoverageError(
        "E132",
        "no layer of this model can be preconditioned (supported: nn.Linear, nn.Conv2d without "
        f"groups, Hugging Face Conv1D). Left out: {reasons or 'the model has no parameters'}",
    )


def _reason_left_out(
    name: str,
    module: nn.Module,
    kind: LayerKind | None,
    config: KFACConfig,
    uses: Counter[int],
    inside_attention: set[int],
    tensor: TensorCut | None,
) -> str | None:
    weight = module._parameters.get("weight")
    pattern = next((p for p in config.skip_layers if matches(name, module, p)), None)
    if kind is None:
        return f"{type(module).__name__} is not supported"
    if pattern is not None:
        return f"matches skip_layers pattern {pattern!r}"
    if id(module) in inside_attention:
        return "nn.MultiheadAttention uses this weight without calling the layer"
    if weight is None:
        return "has no parameter named weight (parametrized or replaced)"
    if not weight.requires_grad:
        return FROZEN
    has_elements = numel_of(weight) > 0 or (tensor is not None and tensor.is_elsewhere(name))
    if weight.is_complex() or not has_elements:
        return f"weight is complex or empty ({weight.dtype}, shape {list(shape_of(weight))})"
    bias = module._parameters.get("bias")
    for label, param in (("weight", weight), ("bias", bias)):
        if param is not None and uses[id(param)] > 1:
            return f"{label} is shared with another module"
    is_cut = tensor is not None and name in tensor.modules
    return kind.refusal(module) or (None if is_cut else _own_forward(name, module, config))


def _own_forward(name: str, module: nn.Module, config: KFACConfig) -> str | None:
    base = overridden(module)
    if base is None or any(matches(name, module, pattern) for pattern in config.plain_layers):
        return None
    return (
        f"{type(module).__name__} has a forward of its own; if that only passes input and weight "
        f"on to nn.{base}, list it in kfac.plain_layers"
    )


def _attention_projections(model: nn.Module) -> set[int]:
    """Linear layers inside nn.MultiheadAttention: its fused path never calls them."""
    return {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.children()
    }


def _unmatched(model: nn.Module, config: KFACConfig) -> tuple[tuple[str, str], ...]:
    """Patterns that match no module, as messages name them, each with the closest name."""
    named = list(model.named_modules())
    names = [name for name, _ in named]
    settings = {"skip_layers": config.skip_layers, "plain_layers": config.plain_layers}
    return tuple(
        (f"{setting} pattern {pattern!r}", nearest(pattern, names))
        for setting, patterns in settings.items()
        for pattern in patterns
        if pattern not in OUTPUT_HEADS and not any(matches(n, m, pattern) for n, m in named)
    )


def _require_matches(tables: Sequence[LayerTable]) -> None:
    for pattern, hint in tables[0].unmatched:
        hints = [dict(table.unmatched).get(pattern) for table in tables]
        if None in hints:
            continue  # some stage has such a module
        raise CoverageError(
            "E134",
            f"{pattern} matches no module of the model;{hint or next(filter(None, hints), '')} "
            "Patterns are names, globs, path components or class names",
        )


def _require_shapes(name: str, module: nn.Module) -> None:
    if any(is_lazy(param) for param in module.parameters(recurse=False)):
        raise CoverageError(
            "E136",
            f"layer {name} ({type(module).__name__}) has no shape yet: run one forward pass before "
            "the optimizer and K-FAC are set up",
        )


def _kept_out(name: str, excluded: Mapping[str, str]) -> str | None:
    top = enclosing(name, excluded)
    return None if top is None else excluded[top]


def _refuse_unsupported(unsupported: list[tuple[str, str]]) -> None:
    names = ", ".join(f"{name or '(root)'} ({kind})" for name, kind in sorted(unsupported))
    raise CoverageError(
        "E131",
        f"strict_layers: {len(unsupported)} modules are not supported: {names}; list them in "
        "kfac.skip_layers or set strict_layers to false",
    )
