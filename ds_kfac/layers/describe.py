"""A supported module as plain data."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from ds_kfac.config import KFACConfig
from ds_kfac.errors import CoverageError
from ds_kfac.layers.blocks import cut
from ds_kfac.layers.kinds import LayerKind
from ds_kfac.layers.shards import Shards, TensorCut
from ds_kfac.layers.spec import LayerSpec, LeftOut, ParamSlot


def describe(
    name: str,
    module: nn.Module,
    kind: LayerKind,
    config: KFACConfig,
    tensor: TensorCut | None = None,
) -> LayerSpec:
    """The specification of a module that is preconditioned.

    Args:
        name: Qualified module name.
        module: The module.
        kind: Its kind.
        config: ``fused_parts`` and ``max_factor_dim`` count.
        tensor: Modules that are cut over a tensor group.

    Raises:
        CoverageError: The rows cannot be split into the parts asked for (E135).
    """
    shards = None if tensor is None else tensor.modules.get(name)
    if shards is None or tensor is None:
        d_out, d_in = kind.dims(module)
        shape = shape_of(module._parameters["weight"])
        parts = _parts(name, module, d_out, config)
    else:
        parts = _parts(name, module, shards.d_out, config)
        d_out, d_in = shards.d_out, shards.d_in
        if tensor.blocks:
            parts = _local_parts(shards, tensor.rank, parts)
            d_out, d_in = _local_dims(shards, tensor.rank)
        shape = (d_out, d_in)
    prefix = f"{name}." if name else ""
    weight = ParamSlot(prefix + "weight", shape, 0)
    bias = None
    if _has_bias(module, shards, tensor):
        bias = ParamSlot(prefix + "bias", (d_out,), weight.numel)
    return LayerSpec(
        name=name,
        kind=kind.name,
        d_in=d_in,
        d_out=d_out,
        weight=weight,
        bias=bias,
        parts=parts,
        a_blocks=cut(d_in + (bias is not None), config.max_factor_dim),
        g_blocks=cut(d_out, config.max_factor_dim),
        shards=shards if tensor is not None and not tensor.blocks else None,
    )


def extra_parameters(
    name: str, module: nn.Module, spec: LayerSpec, sizes: Mapping[str, int]
) -> list[LeftOut]:
    """What a layer has besides the parameters that are preconditioned.

    Args:
        name: Qualified module name.
        module: The module.
        spec: Its specification.
        sizes: Elements of parameters in the whole model, where they are not those of this rank.
    """
    prefix = f"{name}." if name else ""
    inside = {slot.name for slot in spec.slots}
    reasons = {"bias": "is whole on every tensor rank, of which each has a shard of the weight"}
    return [
        LeftOut(
            prefix + key,
            "Parameter",
            reasons.get(key, "is neither weight nor bias of its layer"),
            sizes.get(prefix + key, numel_of(param)),
        )
        for key, param in module.named_parameters(recurse=False)
        if param.requires_grad and prefix + key not in inside
    ]


def matches(name: str, module: nn.Module, pattern: str) -> bool:
    """Whether a pattern names this module: full name, glob, one path component or class name."""
    if fnmatch.fnmatchcase(name, pattern) or type(module).__name__ == pattern:
        return True
    return pattern in name.split(".") or name.startswith(pattern + ".")


def shape_of(param: nn.Parameter | None) -> tuple[int, ...]:
    """Shape of a parameter; under ZeRO 3 it is empty and its full shape travels beside it."""
    assert param is not None
    return tuple(getattr(param, "ds_shape", param.shape))


def numel_of(param: nn.Parameter) -> int:
    """Elements of a parameter, also where ZeRO 3 has released it."""
    count = 1
    for dim in shape_of(param):
        count *= dim
    return count


def whole_sizes(tensor: TensorCut | None, model: nn.Module) -> dict[str, int]:
    """Elements that the parameters of cut modules have over all tensor ranks, by name."""
    sizes = {}
    for name, shards in ({} if tensor is None else tensor.modules).items():
        module = model.get_submodule(name)
        if module._parameters.get("weight") is not None:
            sizes[f"{name}.weight"] = shards.d_out * shards.d_in
        if module._parameters.get("bias") is not None:
            sizes[f"{name}.bias"] = shards.d_out
    return sizes


def _has_bias(module: nn.Module, shards: Shards | None, tensor: TensorCut | None) -> bool:
    bias = module._parameters.get("bias")
    if bias is None or not bias.requires_grad:
        return False
    # Every rank has the whole bias but its own direction: the copies would drift apart.
    return not (tensor is not None and tensor.blocks and shards is not None and not shards.rows)


def _parts(name: str, module: nn.Module, d_out: int, config: KFACConfig) -> int:
    """Matrices stacked along the rows; a default pattern that does not fit was a wrong guess."""
    parts = next((n for p, n in config.fused_parts.items() if matches(name, module, p)), 1)
    if d_out % parts == 0:
        return parts
    if "fused_parts" not in config.model_fields_set:
        return 1  # an adapter or a grouped-query projection under a telling name
    raise CoverageError(
        "E135",
        f"layer {name}: {d_out} rows cannot be split into {parts} equal parts; correct "
        "kfac.fused_parts",
    )


def _local_dims(shards: Shards, rank: int) -> tuple[int, int]:
    width = shards.width(rank)
    return (width, shards.d_in) if shards.rows else (shards.d_out, width)


def _local_parts(shards: Shards, rank: int, parts: int) -> int:
    """Fused matrices in a shard: all of them if the rank has an equal slice of each."""
    if not shards.rows:
        return parts
    sizes = {end - start for start, end in shards.ranges[rank]}
    return parts if len(shards.ranges[rank]) == parts and len(sizes) == 1 else 1
