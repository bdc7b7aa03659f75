"""The ``kfac`` section of a DeepSpeed JSON: fields, ranges, contradictions, messages.

All problems of a configuration are reported at once, each with the value, what is
allowed and the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from ds_kfac.config_checks import expected, in_range, pieces, value_of, whole
from ds_kfac.config_report import explain, known_keys, unknown_key
from ds_kfac.errors import ConfigError
from ds_kfac.schedules import Number, Scheduled

Direction = Literal["natural", "ekfac", "eigen_adam", "orthogonal"]
Solver = Literal["eigen", "cholesky"]
Grafting = Literal["none", "rms", "adam"]
MIN_DAMPING = 1e-30  # smaller ones are zero in fp32 beside any factor
MAX_DAMPING = 1e30  # larger ones leave the range of fp32 when factors are added
OUTPUT_HEADS = ("*lm_head*", "*embed_out*", "*output_layer*")
"""Default of ``skip_layers``: language-model heads, whose G factor has the vocabulary's size."""


Decay = Annotated[Number, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Decay, Decay], expected("a list of two numbers in [0, 1)")]
Switch = Annotated[StrictBool, expected("true or false")]
Positive = in_range(lambda low, high: low > 0 and high < float("inf"))
Interval = Annotated[
    Scheduled,
    AfterValidator(whole),
    in_range(lambda low, high: low >= 1 and high < float("inf")),
    expected("a whole number >= 1, or a schedule of such numbers"),
]


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
        max_overhead: Largest share of a step without K-FAC that it may add: thins out
            statistics and bases as far as measured times ask for.
        kl_clip: Trust region of natural and ekfac: bound on the modelled change; null is off.
        grafting: Per-layer length rule: as is, RMS 0.2, or the norm of Adam's update.
        momentum: Average of the raw gradient that is preconditioned in its place.
        betas: Adam's decay rates, of the second moments of ekfac and eigen_adam, and grafting.
        strategy: Who computes a layer's direction: one rank, its gradient's holder
            (``zero_aligned``) or chosen by cost (``memory``); all ranks (``communication``) or a
            share of them (``hybrid``), for gradients that every rank holds.
        grad_worker_fraction: That share, for ``hybrid``; default 0.5.
        distribute: ``factor`` decomposes A and G of a layer on different ranks, ``layer`` both at
            its owner.
        tensor_parallel: ``exact`` (independent of the degree) or ``block``.
        max_factor_dim: Larger factor sides are cut into balanced diagonal blocks.
        weight_sharing: One loss term per position (``expand``) or per sequence (``reduce``).
        factor_token_fraction: Share of the rows that statistics are computed from.
        factor_micro_batches: Which micro-batches of a step contribute statistics.
        skip_layers: Patterns (names, globs, class names) left to the base optimizer.
        plain_layers: Patterns of subclasses of nn.Linear and nn.Conv2d whose own forward does
            nothing but what that of their base does.
        fused_parts: Patterns of layers whose rows hold several matrices, and how many.
        strict_layers: Refuse models with matrix layers that are not supported.
        background_inverse: Decompose on a thread beside training; the new bases are used half
            an interval later.
        inverse_device: ``cpu`` decomposes on the host processor.
        max_failures: Consecutive failed decompositions of a block before all ranks stop.
        on_nonfinite: ``skip`` drops a step with NaN or Inf everywhere; ``raise`` stops.
        watchdog_timeout: Seconds that a rank waits for others before the job ends with their
            names; 0 is off, null is 80 % of the process group's own timeout.
        resume: Load K-FAC state from checkpoints that have it (``auto``), insist on it
            (``require``), or start anew (``fresh``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: Switch = True
    direction: Direction = "natural"
    solver: Solver | None = None
    damping: Annotated[
        Scheduled | None,
        in_range(lambda low, high: low >= MIN_DAMPING and high <= MAX_DAMPING),
        expected("a number in [1e-30, 1e30], a schedule of such numbers, or null"),
    ] = None
    damping_mode: Literal["relative", "absolute"] = "relative"
    factor_decay: Annotated[
        Scheduled,
        in_range(lambda low, high: low >= 0 and high < 1),
        expected("a number in [0, 1), or a schedule of such numbers"),
    ] = 0.95
    factor_update_steps: Interval = 10
    inv_update_steps: Interval = 10
    max_overhead: Annotated[Number | None, expected("a number > 0, or null", gt=0)] = None
    kl_clip: Annotated[
        Scheduled | None, Positive, expected("a number > 0, a schedule of such numbers, or null")
    ] = 0.001
    grafting: Grafting = "none"
    momentum: Annotated[Decay | None, expected("a number in [0, 1), or null")] = None
    betas: Betas = (0.9, 0.95)
    strategy: Literal["zero_aligned", "memory", "communication", "hybrid"] = "zero_aligned"
    grad_worker_fraction: Annotated[
        Number | None, expected("a number in (0, 1], or null", gt=0, le=1)
    ] = None
    distribute: Literal["layer", "factor"] = "layer"
    tensor_parallel: Literal["exact", "block"] = "exact"
    max_factor_dim: Annotated[StrictInt, expected("a whole number >= 1", ge=1)] = 2048
    weight_sharing: Literal["expand", "reduce"] = "expand"
    factor_token_fraction: Annotated[
        Scheduled,
        in_range(lambda low, high: low > 0 and high <= 1),
        expected("a number in (0, 1], or a schedule of such numbers"),
    ] = 1.0
    factor_micro_batches: Literal["all", "last"] = "all"
    skip_layers: Annotated[tuple[StrictStr, ...], expected("a list of patterns (strings)")] = (
        OUTPUT_HEADS
    )
    plain_layers: Annotated[tuple[StrictStr, ...], expected("a list of patterns (strings)")] = ()
    fused_parts: Annotated[
        dict[StrictStr, Annotated[StrictInt, Field(ge=1)]],
        expected("an object of patterns and whole numbers >= 1"),
    ] = Field(
        default_factory=lambda: {
            "*qkv*": 3,
            "*c_attn": 3,
            "*query_key_value*": 3,
            "*gate_up_proj*": 2,
        }
    )
    strict_layers: Switch = False
    background_inverse: Switch = False
    inverse_device: Literal["auto", "cpu"] = "auto"
    max_failures: Annotated[StrictInt, expected("a whole number >= 0", ge=0)] = 3
    on_nonfinite: Literal["skip", "raise"] = "skip"
    watchdog_timeout: Annotated[
        Number | None, expected("a number of seconds in [0, 1e9], or null", ge=0, le=1e9)
    ] = None
    resume: Literal["auto", "require", "fresh"] = "auto"

    def __init__(self, **data: Any) -> None:
        """Validate.

        Raises:
            ConfigError: One error that lists every unknown key, wrong value and contradiction.
        """
        problems: list[str] = []
        wrong: set[str] = set()
        try:
            super().__init__(**data)
        except ValidationError as error:
            problems, wrong = explain(error, data, type(self))
            # The rest is validated without them, so that its contradictions are listed too.
            super().__init__(**{key: value for key, value in data.items() if key not in wrong})
        problems += [text for keys, text in self._contradictions() if wrong.isdisjoint(keys)]
        if problems:
            if not wrong <= set(type(self).model_fields):
                problems.append(known_keys(type(self).model_fields))
            raise ConfigError("E201", "kfac: " + "; ".join(problems))

    def _contradictions(self) -> list[tuple[tuple[str, ...], str]]:
        """Settings that exclude each other: their keys, and what to do about it."""
        problems: list[tuple[tuple[str, ...], str]] = []
        factor, inverse = self.factor_update_steps, self.inv_update_steps
        for step in pieces(factor, inverse):
            captures, refreshes = value_of(factor, step), value_of(inverse, step)
            if refreshes % captures:
                since = f" from step {step} on" if step else ""
                text = (
                    f"inv_update_steps ({refreshes}{since}) must be a multiple of "
                    f"factor_update_steps ({captures}): a decomposition uses the statistics of "
                    "its own step"
                )
                problems.append((("factor_update_steps", "inv_update_steps"), text))
                break
        problems += self._governor_contradictions()
        if self.solver == "cholesky" and self.direction in ("ekfac", "eigen_adam"):
            text = (
                f"direction {self.direction!r} works in an eigenbasis; solver 'cholesky' has none: "
                "set solver to 'eigen' or leave it out"
            )
            problems.append((("direction", "solver"), text))
        if self.direction == "orthogonal" and self.grafting != "none":
            text = (
                f"grafting {self.grafting!r} contradicts direction 'orthogonal', which has its own "
                "length rule (RMS 0.2): leave grafting out"
            )
            problems.append((("direction", "grafting"), text))
        if self.grad_worker_fraction is not None and self.strategy != "hybrid":
            text = (
                f"grad_worker_fraction ({self.grad_worker_fraction}) has no effect with strategy "
                f"{self.strategy!r}; it belongs to 'hybrid'"
            )
            problems.append((("grad_worker_fraction", "strategy"), text))
        if self.distribute == "factor" and self.background_inverse:
            text = (
                "distribute 'factor' contradicts background_inverse: it shortens a refresh that "
                "training waits for by moving factors to idle ranks; leave one of them out"
            )
            problems.append((("distribute", "background_inverse"), text))
        asked = "kl_clip" in self.model_fields_set and self.kl_clip is not None
        if asked and not self.uses_kl_clip:
            text = (
                f"kl_clip ({self.kl_clip!r}) has no effect with direction {self.direction!r} and "
                f"grafting {self.grafting!r}; remove it or set it to null"
            )
            problems.append((("direction", "grafting", "kl_clip"), text))
        if not self.uses_kl_clip:
            # The default is for directions that have a use for it; dumped, it would be refused.
            self.__dict__["kl_clip"] = None
        return problems

    def _governor_contradictions(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if self.max_overhead is None:
            return
        for key in ("factor_update_steps", "inv_update_steps", "factor_token_fraction"):
            if not isinstance(getattr(self, key), int | float):
                text = (
                    f"{key} is a schedule, and max_overhead ({self.max_overhead}) chooses it too: "
                    "remove one of them (a number is where max_overhead starts)"
                )
                yield (key, "max_overhead"), text
        if self.factor_update_steps == 1:
            text = (
                f"max_overhead ({self.max_overhead}) compares steps with and without statistics: "
                "set factor_update_steps to 2 or more"
            )
            yield ("factor_update_steps", "max_overhead"), text

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

    lr: Annotated[Number | None, expected("a number >= 0, or null", ge=0)] = None
    betas: Betas = (0.9, 0.95)
    eps: Annotated[Number, expected("a number > 0", gt=0)] = 1e-8
    weight_decay: Annotated[Number | None, expected("a number >= 0, or null", ge=0)] = None


class OptimizerConfig(BaseModel):
    """``params`` of optimizer type ``KFAC`` that are not settings of the preconditioner.

    Attributes:
        lr: Learning rate of the preconditioned layers.
        weight_decay: Decoupled weight decay, as in AdamW.
        aux: AdamW for the remaining parameters; its rate keeps its ratio to ``lr`` under
            every scheduler.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Annotated[Number, expected("a number >= 0", ge=0)]
    weight_decay: Annotated[Number, expected("a number >= 0", ge=0)] = 0.0
    aux: Annotated[AuxiliaryConfig, expected("an object with lr, betas, eps, weight_decay")] = (
        Field(default_factory=AuxiliaryConfig)
    )

    @property
    def aux_lr(self) -> float:
        """Learning rate of the auxiliary AdamW; by default that of the preconditioned layers."""
        return float(self.lr if self.aux.lr is None else self.aux.lr)

    @property
    def aux_ratio(self) -> float:
        """``aux_lr / lr``, which schedulers keep; 1 where a scheduler brings both rates."""
        return self.aux_lr / float(self.lr) if self.lr else 1.0

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
        ConfigError: Keys or values are wrong, of either kind; all are listed.
    """
    params = {str(key): value for key, value in params.items()}
    own = set(OptimizerConfig.model_fields)
    known = own | set(KFACConfig.model_fields)
    unknown = [key for key in params if key not in known]
    problems = [unknown_key(key, known) for key in unknown]
    mine = {key: value for key, value in params.items() if key in own}
    rest = {key: value for key, value in params.items() if key in known - own}
    preconditioner = {**OPTIMIZER_DEFAULTS, **rest}
    optimizer: OptimizerConfig | None = None
    try:
        optimizer = OptimizerConfig(**mine)
    except ValidationError as error:
        problems += explain(error, mine, OptimizerConfig)[0]
    if optimizer is not None and optimizer.lr == 0 and optimizer.aux_lr > 0:
        problems.append(
            f"aux.lr ({optimizer.aux.lr}) is applied as a multiple of lr, which is 0: set lr to "
            "its peak value, or leave aux.lr out"
        )
    try:
        KFACConfig.parse(preconditioner)
    except ConfigError as error:
        problems.append(error.message.removeprefix("kfac: "))
    if optimizer is None or problems:
        if unknown:
            problems.append(known_keys(known))
        raise ConfigError("E201", "optimizer.params: " + "; ".join(problems))
    return optimizer, preconditioner


def schema() -> dict[str, Any]:
    """JSON schema of the ``kfac`` section, for editors and for ``ds-kfac schema``."""
    return KFACConfig.model_json_schema()
