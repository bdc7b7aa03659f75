"""The ``kfac`` section of a DeepSpeed JSON: fields, ranges, contradictions, messages.

All problems of a configuration are reported at once, each with the value, what is
allowed and the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from ds_kfac.errors import ConfigError, UnsupportedError, nearest
from ds_kfac.schedules import Number, Scheduled, extremes

Direction = Literal["natural", "ekfac", "eigen_adam", "orthogonal"]
Solver = Literal["eigen", "cholesky"]
Grafting = Literal["none", "rms", "adam"]
Decay = Annotated[Number, Field(ge=0, lt=1)]

OUTPUT_HEADS = ("*lm_head*", "*embed_out*", "*output_layer*")
"""Default of ``skip_layers``: language-model heads, whose G factor has the vocabulary's size."""

# Ranges of the numbers that may be schedules: (test of the extremes, what is allowed).
_RANGES: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "damping": (lambda low, high: low > 0 and high < float("inf"), "a number > 0"),
    "factor_decay": (lambda low, high: low >= 0 and high < 1, "a number in [0, 1)"),
    "factor_update_steps": (lambda low, high: low >= 1, "a whole number >= 1"),
    "inv_update_steps": (lambda low, high: low >= 1, "a whole number >= 1"),
    "kl_clip": (lambda low, high: low > 0, "a number > 0, or null"),
    "factor_token_fraction": (lambda low, high: low > 0 and high <= 1, "a number in (0, 1]"),
}


class KFACConfig(BaseModel):
    """Settings of the preconditioner; names follow kfac-pytorch where it has one.

    Attributes:
        enabled: ``false`` leaves the host exactly as it is.
        direction: What replaces the gradient, see ``ds_kfac/math/directions.py``.
        solver: How factors are decomposed; default eigen, for ``orthogonal`` cholesky.
        damping: Added to the curvature, in units of each factor's mean eigenvalue.
        damping_mode: ``"absolute"`` takes ``damping`` as it is (kfac-pytorch's meaning).
        factor_decay: Decay of the factor average per *applied step*.
        factor_update_steps: Applied steps between two captures of statistics.
        inv_update_steps: Applied steps between two decompositions.
        kl_clip: Trust region of natural and ekfac: bound on the modelled change; null is off.
        grafting: Per-layer length rule: as is, RMS 0.2, or the norm of Adam's update.
        momentum: Average of the raw gradient that is preconditioned in its place.
        betas: Adam's decay rates, of the second moments of ekfac and eigen_adam, and grafting.
        strategy: Where factors live: with the gradient's holder, or balanced by cost alone.
        grad_worker_fraction: KAISA's fraction, for strategy ``hybrid``.
        tensor_parallel: ``exact`` (independent of the degree) or ``block``.
        max_factor_dim: Larger factor sides are cut into balanced diagonal blocks.
        weight_sharing: One loss term per position (``expand``) or per sequence (``reduce``).
        factor_token_fraction: Share of the rows that statistics are computed from.
        factor_micro_batches: Which micro-batches of a step contribute statistics.
        skip_layers: Patterns (names, globs, class names) left to the base optimizer.
        fused_parts: Patterns of layers whose rows hold several matrices, and how many.
        strict_layers: Refuse models with matrix layers that are not supported.
        background_inverse: Decompose beside training and swap in at a fixed step.
        inverse_device: ``cpu`` decomposes on the host processor.
        max_failures: Consecutive failed decompositions of a block before all ranks stop.
        on_nonfinite: ``skip`` drops a step with NaN or Inf everywhere; ``raise`` stops.
        resume: What to do when a checkpoint has no K-FAC state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = True
    direction: Direction = "natural"
    solver: Solver | None = None
    damping: Scheduled | None = None
    damping_mode: Literal["relative", "absolute"] = "relative"
    factor_decay: Scheduled = 0.95
    factor_update_steps: Scheduled = 10
    inv_update_steps: Scheduled = 10
    kl_clip: Scheduled | None = 0.001
    grafting: Grafting = "none"
    momentum: Decay | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    strategy: Literal["zero_aligned", "memory", "communication", "hybrid"] = "zero_aligned"
    grad_worker_fraction: Annotated[Number, Field(gt=0, le=1)] | None = None
    tensor_parallel: Literal["exact", "block"] = "exact"
    max_factor_dim: Annotated[StrictInt, Field(ge=1)] = 2048
    weight_sharing: Literal["expand", "reduce"] = "expand"
    factor_token_fraction: Scheduled = 1.0
    factor_micro_batches: Literal["all", "last"] = "all"
    skip_layers: tuple[StrictStr, ...] = OUTPUT_HEADS
    fused_parts: dict[StrictStr, Annotated[StrictInt, Field(ge=1)]] = Field(
        default_factory=lambda: {
            "*qkv*": 3,
            "*c_attn": 3,
            "*query_key_value*": 3,
            "*gate_up_proj*": 2,
        }
    )
    strict_layers: StrictBool = False
    background_inverse: StrictBool = False
    inverse_device: Literal["auto", "cpu"] = "auto"
    max_failures: Annotated[StrictInt, Field(ge=0)] = 3
    on_nonfinite: Literal["skip", "raise"] = "skip"
    resume: Literal["auto", "require", "fresh"] = "auto"

    def __init__(self, **data: Any) -> None:
        """Validate.

        Raises:
            ConfigError: One error that lists every unknown key, wrong value and contradiction.
            UnsupportedError: The value is known but not available in this version.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError("E201", describe(error, "kfac", type(self))) from None
        self._refuse_unavailable()

    @model_validator(mode="after")
    def _check(self) -> KFACConfig:
        problems = [*self._range_problems(), *self._contradictions()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _range_problems(self) -> list[str]:
        problems = []
        for name, (allowed, text) in _RANGES.items():
            spec = getattr(self, name)
            if spec is not None and not allowed(*extremes(spec)):
                problems.append(f"{name}: expected {text}, got {_show(spec)}")
        for name in ("factor_update_steps", "inv_update_steps"):
            spec = getattr(self, name)
            if isinstance(spec, float) and not spec.is_integer():
                problems.append(f"{name}: expected a whole number >= 1, got {spec!r}")
        return problems

    def _contradictions(self) -> list[str]:
        problems = []
        factor, inverse = self.factor_update_steps, self.inv_update_steps
        if (
            isinstance(factor, int)
            and isinstance(inverse, int)
            and factor >= 1
            and inverse % factor
        ):
            problems.append(
                f"inv_update_steps ({inverse}) must be a multiple of factor_update_steps "
                f"({factor}): a decomposition uses the statistics of its own step"
            )
        if self.solver == "cholesky" and self.direction in ("ekfac", "eigen_adam"):
            problems.append(
                f"direction {self.direction!r} works in an eigenbasis; solver 'cholesky' has none: "
                "set solver to 'eigen' or leave it out"
            )
        if self.direction == "orthogonal" and self.grafting != "none":
            problems.append(
                f"grafting {self.grafting!r} contradicts direction 'orthogonal', which has its own "
                "length rule (RMS 0.2): leave grafting out"
            )
        if self.grad_worker_fraction is not None and self.strategy != "hybrid":
            problems.append(
                f"grad_worker_fraction ({self.grad_worker_fraction}) has no effect with strategy "
                f"{self.strategy!r}; it belongs to 'hybrid'"
            )
        if (
            "kl_clip" in self.model_fields_set
            and self.kl_clip is not None
            and not self.uses_kl_clip
        ):
            problems.append(
                f"kl_clip has no effect with direction {self.direction!r} and grafting "
                f"{self.grafting!r}; remove it or set it to null"
            )
        return problems

    def _refuse_unavailable(self) -> None:
        unavailable = {
            "strategy": (self.strategy in ("communication", "hybrid"), "'zero_aligned', 'memory'"),
            "background_inverse": (self.background_inverse, "false"),
            "factor_micro_batches": (self.factor_micro_batches == "last", "'all'"),
            "resume": (self.resume == "require", "'auto', 'fresh'"),
        }
        bad = [
            f"{name}={getattr(self, name)!r} is not available in this version (use {instead})"
            for name, (is_bad, instead) in unavailable.items()
            if is_bad
        ]
        if bad:
            raise UnsupportedError("E150", "kfac: " + "; ".join(bad))

    @property
    def uses_kl_clip(self) -> bool:
        """Whether the KL clip applies: only directions without a length rule of their own."""
        return self.direction in ("natural", "ekfac") and self.grafting == "none"

    @property
    def resolved_solver(self) -> Solver:
        """The solver in force: Cholesky for ``orthogonal``, an eigenbasis otherwise."""
        return self.solver or ("cholesky" if self.direction == "orthogonal" else "eigen")

    @property
    def resolved_damping(self) -> Any:
        """The damping in force (number or schedule)."""
        if self.damping is not None:
            return self.damping
        return 1.0 if self.direction == "natural" else 0.1

    @classmethod
    def parse(cls, data: KFACConfig | Mapping[str, Any]) -> KFACConfig:
        """Accept a mapping (a JSON section) or an instance.

        Raises:
            ConfigError: The mapping is not a valid configuration.
            UnsupportedError: A value is not available in this version.
        """
        if isinstance(data, KFACConfig):
            return data
        if not isinstance(data, Mapping):
            raise ConfigError(
                "E202",
                f"kfac: expected an object with settings, got {data!r} ({type(data).__name__})",
            )
        return cls(**{str(key): value for key, value in data.items()})


class AuxiliaryConfig(BaseModel):
    """AdamW for everything that is not preconditioned (embeddings, heads, norms, biases)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Annotated[Number, Field(ge=0)] | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0)] | None = None


class OptimizerConfig(BaseModel):
    """``params`` of optimizer type ``KFAC`` that are not settings of the preconditioner.

    Attributes:
        lr: Learning rate of the preconditioned layers.
        weight_decay: Decoupled weight decay, as in AdamW.
        aux: AdamW for the remaining parameters; its rate keeps its ratio to ``lr`` under
            every scheduler.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Annotated[Number, Field(ge=0)]
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    aux: AuxiliaryConfig = Field(default_factory=AuxiliaryConfig)

    @property
    def aux_lr(self) -> float:
        """Learning rate of the auxiliary AdamW; by default that of the preconditioned layers."""
        return float(self.lr if self.aux.lr is None else self.aux.lr)

    @property
    def aux_weight_decay(self) -> float:
        """Weight decay of the auxiliary AdamW; by default that of the preconditioned layers."""
        return float(self.weight_decay if self.aux.weight_decay is None else self.aux.weight_decay)


OPTIMIZER_DEFAULTS: dict[str, Any] = {"direction": "orthogonal"}
"""Defaults of optimizer type KFAC that differ from those of the ``kfac`` section."""


def split_optimizer_params(params: Mapping[str, Any]) -> tuple[OptimizerConfig, dict[str, Any]]:
    """Split ``params`` of optimizer type KFAC into its own settings and those of ``kfac``.

    Args:
        params: The JSON's ``optimizer.params``.

    Returns:
        The optimizer's settings and a mapping for :meth:`KFACConfig.parse`, defaults included.

    Raises:
        ConfigError: Any key or value is wrong; keys of both kinds are suggested.
    """
    own = set(OptimizerConfig.model_fields)
    unknown = sorted(set(params) - own - set(KFACConfig.model_fields))
    if unknown:
        known = own | set(KFACConfig.model_fields)
        texts = [f"unknown key {key!r};{nearest(key, known)}" for key in unknown]
        raise ConfigError(
            "E201", f"optimizer.params: {'; '.join(texts)} Known keys: {', '.join(sorted(known))}"
        )
    try:
        optimizer = OptimizerConfig(**{key: params[key] for key in own & set(params)})
    except ValidationError as error:
        raise ConfigError("E201", describe(error, "optimizer.params", OptimizerConfig)) from None
    preconditioner = {key: value for key, value in params.items() if key not in own}
    return optimizer, {**OPTIMIZER_DEFAULTS, **preconditioner}


def describe(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """Turn pydantic's report into one line per problem: place, value, what is allowed."""
    problems = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"] if not _is_union_tag(part))
        value = item["input"]
        field = str(item["loc"][0]) if item["loc"] else ""
        if _is_untried_union_member(field, item["loc"], error):
            continue
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"])
            problems.append(
                f"unknown key {path!r};{nearest(str(item['loc'][-1]), known)} "
                f"Known keys: {', '.join(sorted(known))}"
            )
        elif item["type"] == "missing":
            problems.append(f"{path}: required, but missing")
        elif item["type"] == "value_error" and not path:
            problems.append(str(item["ctx"]["error"]))
        elif field in _RANGES and not isinstance(_input_of(field, error), dict):
            problems.append(
                f"{path}: expected {_RANGES[field][1]}, or a schedule, got {value!r} "
                f"({type(value).__name__})"
            )
        else:
            problems.append(f"{path}: {item['msg']}, got {value!r} ({type(value).__name__})")
    return f"{where}: " + "; ".join(dict.fromkeys(problems))


def _input_of(field: str, error: ValidationError) -> Any:
    """The value the user gave for a field: every member of a union reports it whole."""
    return next(
        (i["input"] for i in error.errors() if i["loc"][:1] == (field,) and len(i["loc"]) <= 2),
        {},  # only problems inside an object: the field itself is one
    )


def _is_untried_union_member(
    field: str, loc: tuple[int | str, ...], error: ValidationError
) -> bool:
    """Whether a report comes from the number side of a union although a schedule was meant."""
    if field not in _RANGES or not isinstance(_input_of(field, error), dict):
        return False
    return len(loc) > 1 and not (
        str(loc[1]) in _SCHEDULES or "Schedule" in str(loc[1]) or "tag" in str(loc[1])
    )


def schema() -> dict[str, Any]:
    """JSON schema of the ``kfac`` section, for editors and for ``ds-kfac schema``."""
    return KFACConfig.model_json_schema()


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    node: Any = model
    for part in loc[:-1]:
        field = getattr(node, "model_fields", {}).get(part)
        node = next((m for m in _models(field.annotation) if m), node) if field else node
        node = _SCHEDULES.get(str(part), node)
    return list(node.model_fields)


def _models(annotation: Any) -> list[Any]:
    return (
        [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    )


def _is_union_tag(part: int | str) -> bool:
    # pydantic puts the tried member of a union into the path; users never wrote it.
    text = str(part)
    return text in _SCHEDULES or "[" in text or text in ("int", "float", "constrained-float")


def _show(spec: Any) -> str:
    return repr(spec) if isinstance(spec, int | float) else repr(spec.model_dump())


def _schedules() -> dict[str, type[BaseModel]]:
    from ds_kfac import schedules

    return {
        "linear": schedules.LinearSchedule,
        "cosine": schedules.CosineSchedule,
        "exponential": schedules.ExponentialSchedule,
        "steps": schedules.StepsSchedule,
    }


_SCHEDULES = _schedules()
