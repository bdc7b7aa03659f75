"""Where ``ds-kfac plan`` gets its model and settings from: dims, a function, or a file."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError
from ds_kfac.hosts import deepspeed_config
from ds_kfac.hosts.deepspeed_support import check_config
from ds_kfac.owner import resolve_momentum

_DIMS = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(\+bias)?")
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Settings:
    """What a DeepSpeed JSON says about a run.

    Attributes:
        kfac: Settings of the preconditioner.
        momentum: Decay in force of the gradient average.
        own_optimizer: The optimizer is type KFAC, which has a group of its own for layers.
        stage: ZeRO stage that decides where gradients are.
        gradients: Dtype of stored gradients; None is that of the model.
        round_robin: ``zero_optimization.round_robin_gradients``.
        aligned: ``zero_optimization.parameter_alignment``.
    """

    kfac: KFACConfig
    momentum: float
    own_optimizer: bool = False
    stage: int = 0
    gradients: torch.dtype | None = None
    round_robin: bool = False
    aligned: bool = False


def read_settings(path: Path | None, stage: int | None) -> Settings:
    """Read a DeepSpeed JSON.

    Args:
        path: The file; None for the defaults of the ``kfac`` section.
        stage: ZeRO stage in place of the file's.

    Raises:
        ConfigError: The file cannot be read, does not ask for K-FAC, or is wrong.
        UnsupportedError: It asks for what is not available.
    """
    config = {"kfac": {}} if path is None else _json(path)
    request = deepspeed_config.parse(config)
    if request is None:
        raise ConfigError("E220", f"{path} has neither a kfac section nor optimizer type KFAC")
    zero = dict(config.get("zero_optimization") or {})
    if stage is not None:
        zero["stage"] = stage
    check_config({**config, "zero_optimization": zero})
    _refuse_model_parallel(config)
    model_dtype, gradients = _dtypes(config, zero)
    stage = int(zero.get("stage", 0))
    if stage == 1 and (model_dtype, gradients) == (torch.bfloat16, torch.float32):
        if not _offloads(zero):
            stage = 0  # DeepSpeed's BF16_Optimizer keeps whole gradients on every rank
    return Settings(
        kfac=request.config,
        momentum=resolve_momentum(request.config, own_optimizer=request.optimizer is not None),
        own_optimizer=request.optimizer is not None,
        stage=stage,
        gradients=gradients,
        round_robin=bool(zero.get("round_robin_gradients")),
        aligned=bool(zero.get("parameter_alignment")),
    )


def model_of_dims(texts: Sequence[str]) -> nn.Module:
    """Linear layers of given dims, on the meta device.

    Args:
        texts: Each ``d_in x d_out [x count] [+bias]`` without blanks.

    Raises:
        ConfigError: A text is not of that form (E220).
    """
    model = nn.Sequential()
    for text in texts:
        match = _DIMS.fullmatch(text)
        d_in, d_out, count = (
            (int(number or 1) for number in match.groups()[:3]) if match else (0,) * 3
        )
        if match is None or not d_in * d_out * count:
            raise ConfigError(
                "E220",
                f"--dims {text}: expected d_in x d_out x count, such as 4096x11008x32 or "
                "768x768x12+bias, all numbers >= 1",
            )
        for _ in range(count):
            layer = nn.Linear(d_in, d_out, bias=match[4] is not None, device="meta")
            model.add_module(f"{d_in}x{d_out}_{len(model)}", layer)
    return model


def model_of_function(text: str) -> nn.Module:
    """The model that a user's function builds, on the meta device.

    Args:
        text: ``package.module:function``; the current folder is importable.

    Raises:
        ConfigError: There is no such function, it fails, or returns something else (E221).
    """
    module_name, colon, attribute = text.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError("E221", f"--model {text}: expected package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)

    def build() -> Any:
        function = getattr(importlib.import_module(module_name), attribute)
        with torch.device("meta"):
            return function()

    return _built(f"--model {text}", build)


def model_of_hugging_face(path: Path) -> nn.Module:
    """The model that a Hugging Face ``config.json`` describes, on the meta device.

    Raises:
        ConfigError: The file or transformers is missing, or the model cannot be built (E221).
    """
    if not path.exists():
        raise ConfigError("E221", f"--hf-config {path}: no such file")

    def build() -> Any:
        import transformers

        config = transformers.AutoConfig.from_pretrained(path)
        names = getattr(config, "architectures", None) or ()
        classes = [getattr(transformers, name, None) for name in names]
        found = next((item for item in classes if item is not None), None)
        with torch.device("meta"):
            if found is not None:
                return found(config)
            return transformers.AutoModelForCausalLM.from_config(config)

    return _built(f"--hf-config {path}", build)


def product_parameters(model: nn.Module) -> int:
    """Elements of all matrices that rows are multiplied with: all but embeddings.

    A matrix counts wherever it is used, tied ones too.
    """
    return sum(
        param.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
        if param.dim() >= 2
    )


def _built(source: str, build: Callable[[], Any]) -> nn.Module:
    try:
        model = build()
    except Exception as error:  # a user's code may fail in any way
        raise ConfigError("E221", f"{source}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError("E221", f"{source}: returned {type(model).__name__}, not a nn.Module")
    return model


def _json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("E206", f"cannot read DeepSpeed configuration {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("E206", f"DeepSpeed configuration {path} is not an object")
    return config


def _refuse_model_parallel(config: Mapping[str, Any]) -> None:
    if int((config.get("tensor_parallel") or {}).get("autotp_size", 0)) > 1:
        raise ConfigError(
            "E220", "ds-kfac plan knows data parallelism only: remove tensor_parallel.autotp_size"
        )


def _dtypes(
    config: Mapping[str, Any], zero: Mapping[str, Any]
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Dtype of the model, if the file casts it, and of stored gradients."""
    enabled = [name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled") is True]
    model = _DTYPES[enabled[0]] if enabled else None
    name = (config.get("data_types") or {}).get("grad_accum_dtype")
    if name is not None and name not in _DTYPES:
        raise ConfigError("E220", f"data_types.grad_accum_dtype={name!r}: use fp32, fp16 or bf16")
    if _offloads(zero):
        return model, torch.float32  # that of the master weights
    return model, model if name is None else _DTYPES[name]


def _offloads(zero: Mapping[str, Any]) -> bool:
    return str((zero.get("offload_optimizer") or {}).get("device", "none")) != "none"
