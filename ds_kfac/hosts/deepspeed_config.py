"""Read ``kfac`` out of a DeepSpeed configuration, before DeepSpeed sees it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_kfac.config import KFACConfig, OptimizerConfig, split_optimizer_params
from ds_kfac.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """What a DeepSpeed configuration asks of ds_kfac.

    Attributes:
        config: Settings of the preconditioner.
        optimizer: Settings of optimizer type KFAC, None beside a user's own optimizer.
    """

    config: KFACConfig
    optimizer: OptimizerConfig | None


def bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Bind a call to the signature of ``deepspeed.initialize``."""
    return inspect.signature(function).bind(*args, **kwargs)


def load(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a call of ``deepspeed.initialize`` as a dictionary, if it has one.

    Raises:
        ConfigError: The JSON file has duplicate or malformed content (E206).
    """
    config = arguments.get("config")
    config = arguments.get("config_params") if config is None else config
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, dict):
        return config
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        return dict(load_ds_config(config))
    except (ValueError, OSError) as error:
        raise ConfigError(
            "E206", f"cannot read DeepSpeed configuration {config!r}: {error}"
        ) from error


def parse(config: Mapping[str, Any]) -> Request | None:
    """Find out what is asked; None when the configuration has nothing for ds_kfac.

    Raises:
        ConfigError: A setting is wrong, or both ways are used at once (E207).
    """
    _refuse_misspelt(config)
    optimizer = mapping(config, "optimizer")
    is_own = str(optimizer.get("type", "")).lower() == "kfac"
    section = config.get("kfac")
    if not is_own:
        return Request(KFACConfig.parse(config["kfac"]), None) if "kfac" in config else None
    params = dict(mapping(optimizer, "params", "optimizer.params"))
    if isinstance(section, Mapping):
        twice = sorted(set(section) & set(params))
        if twice:
            names = ", ".join(twice)
            raise ConfigError(
                "E207", f"{names}: set both in the kfac section and in optimizer.params; keep one"
            )
        params.update(section)
    elif section is not None:
        KFACConfig.parse(section)
    settings, preconditioner = split_optimizer_params(params)
    parsed = KFACConfig.parse(preconditioner)
    if not parsed.enabled:
        raise ConfigError(
            "E208",
            "optimizer type KFAC with enabled=false leaves no optimizer: name another type, or use "
            "a kfac section beside it",
        )
    return Request(parsed, settings)


def mapping(config: Mapping[str, Any], key: str, path: str | None = None) -> Mapping[str, Any]:
    """A section of a configuration, empty where there is none.

    Raises:
        ConfigError: It is something else than an object (E201).
    """
    section = config.get(key)
    if section is None or isinstance(section, Mapping):
        return section or {}
    raise ConfigError(
        "E201", f"{path or key}: expected an object, got {section!r} ({type(section).__name__})"
    )


def _refuse_misspelt(config: Mapping[str, Any]) -> None:
    """DeepSpeed ignores sections that it does not know, and would train without K-FAC."""
    for key in config:
        plain = str(key).lower().replace("_", "").replace("-", "")
        if key != "kfac" and plain in ("kfac", "kfacs", "dskfac", "kfacconfig"):
            raise ConfigError("E201", f"{key}: unknown key; did you mean 'kfac'?")


def names_fused_adam(config: Mapping[str, Any]) -> bool:
    """Whether the configuration asks for NVIDIA Apex's optimizer by name."""
    optimizer = mapping(config, "optimizer")
    return str(optimizer.get("type", "")).lower() == "fusedadam"


def without_kfac(config: Mapping[str, Any], *, drop_optimizer: bool) -> dict[str, Any]:
    """The configuration that DeepSpeed sees when ds_kfac brings the optimizer.

    The ``kfac`` section stays: DeepSpeed ignores it and stores it with its checkpoints.
    """
    result = dict(config)
    if drop_optimizer:
        result.pop("optimizer", None)
        # Element-wise, so any flattening is fine; DeepSpeed asks for the flag by class name.
        result["zero_allow_untested_optimizer"] = True
        # An offloaded partition is an ordinary CPU tensor; DeepSpeedCPUAdam is not needed.
        result["zero_force_ds_cpu_optimizer"] = False
    return result


def replace_config(arguments: dict[str, Any], config: dict[str, Any]) -> None:
    """Pass a dictionary in place of the call's own configuration, whatever its form."""
    arguments.pop("config_params", None)
    arguments["config"] = config
    args = arguments.get("args")
    if getattr(args, "deepspeed_config", None) is not None:
        # DeepSpeed refuses two sources; the caller's object is not ours to change.
        arguments["args"] = copy.copy(args)
        arguments["args"].deepspeed_config = None
