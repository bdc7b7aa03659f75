"""DeepSpeed: ``ds_kfac.initialize`` and the engine's step.

The preconditioner works at the entry of ``engine._take_model_step``, the one place that all
engines pass once per optimizer step with reduced, unclipped gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_kfac.comm.communicator import Communicator
from ds_kfac.comm.ledger import Ledger
from ds_kfac.comm.vote import agree, raise_everywhere, together
from ds_kfac.config import KFACConfig
from ds_kfac.errors import ConfigError, UnsupportedError
from ds_kfac.hosts import (
    deepspeed_checkpoint,
    deepspeed_config,
    deepspeed_moe,
    deepspeed_pipe,
    deepspeed_sequence,
    deepspeed_step,
    deepspeed_support,
    deepspeed_tensor,
)
from ds_kfac.hosts.base import Expert, Gradients, Groups
from ds_kfac.hosts.compatibility import check_base_optimizer, is_own_optimizer
from ds_kfac.hosts.deepspeed_optimizer import bring_fused_adam, bring_own
from ds_kfac.hosts.deepspeed_patch import original_initialize
from ds_kfac.hosts.deepspeed_zero import storage_of
from ds_kfac.layers.shards import TensorCut
from ds_kfac.plan.topology import Layout
from ds_kfac.preconditioner import KFAC


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with K-FAC when the configuration asks for it.

    The configuration asks with a ``kfac`` section beside any optimizer, or with
    ``"optimizer": {"type": "KFAC", ...}``. Without either this is exactly
    ``deepspeed.initialize``.

    Args:
        *args: As ``deepspeed.initialize``.
        **kwargs: As ``deepspeed.initialize``.

    Returns:
        ``(engine, optimizer, dataloader, lr_scheduler)``; the engine carries ``engine.kfac``
        (None when nothing was asked for, ``enabled`` is false, or there is no optimizer).

    Raises:
        KFACError: Settings, model, optimizer or engine do not fit; on every rank alike.
    """
    import deepspeed

    original = original_initialize()
    bound = deepspeed_config.bind(original, args, kwargs)
    arguments = bound.arguments
    request, error = _prepare(arguments)
    # DeepSpeed would start the process group in a moment; a rank that cannot go on has to tell
    # the others before they wait for it there, and one that is not asked as well.
    deepspeed.init_distributed(
        dist_backend=deepspeed.get_accelerator().communication_backend_name(),
        distributed_port=arguments.get("distributed_port", 29500),
        dist_init_required=arguments.get("dist_init_required"),
    )
    world = Communicator(torch.distributed.group.WORLD, Ledger())
    raise_everywhere(world, error)
    agree(world, "whether K-FAC is asked for", "no" if request is None else "yes")
    if request is None:
        result = original(*args, **kwargs)
        result[0].kfac = None
        return tuple(result)
    deepspeed_step.drop_gradients(arguments["model"])
    result = original(*bound.args, **bound.kwargs)
    if result[0].basic_optimizer is None:  # evaluation: nothing is stepped
        result[0].kfac = None
    else:
        attach_engine(result[0], request.config)
    return tuple(result)


def _prepare(
    arguments: dict[str, Any],
) -> tuple[deepspeed_config.Request | None, Exception | None]:
    """Read the request and bring the optimizer it asks for; changes ``arguments``.

    Returns:
        The request, None when nothing is asked for, and what went wrong on this rank.
    """
    try:
        config = deepspeed_config.load(arguments)
        request = None if config is None else deepspeed_config.parse(config)
        if config is None or request is None or not request.config.enabled:
            return None, None
        deepspeed_support.check_config(config)
        deepspeed_moe.check_request(arguments["model"], config)
        if request.optimizer is not None:
            bring_own(arguments, config, request.config, request.optimizer)
        elif deepspeed_config.names_fused_adam(config) and arguments.get("optimizer") is None:
            bring_fused_adam(arguments, config)
    except Exception as error:
        return None, error
    return request, None


def attach_engine(engine: Any, config: KFACConfig) -> KFAC:
    """Attach to an initialised engine and set ``engine.kfac``.

    Raises:
        KFACError: The engine, its optimizer or the model are not supported.
    """
    world = Communicator(torch.distributed.group.WORLD, Ledger())
    together(world, lambda: _check(engine, config))
    deepspeed_step.replace_earlier(engine.module)
    host = _host_of(engine)
    own = is_own_optimizer(engine.basic_optimizer)
    if own and engine.global_steps == 0:
        host.forget_rehearsal()
    kfac = KFAC(host, config, own_optimizer=own)
    deepspeed_step.wrap_step(engine, kfac, host)
    deepspeed_step.wrap_backward(engine, kfac, host)
    deepspeed_step.wrap_destroy(engine, kfac)
    deepspeed_checkpoint.install(engine, kfac)
    kfac.on_detach(host.detach)
    engine.kfac = kfac
    kfac.on_detach(lambda: setattr(engine, "kfac", None))
    return kfac


def _check(engine: Any, config: KFACConfig) -> None:
    if engine.__dict__.get("kfac") is not None:
        raise ConfigError("E212", "this engine has K-FAC already; call engine.kfac.detach() first")
    deepspeed_support.check_engine(engine)
    deepspeed_sequence.check_sequence(engine, config)
    deepspeed_moe.check_experts(engine)
    check_base_optimizer(engine.basic_optimizer, config)


def _host_of(engine: Any) -> DeepSpeedHost:
    if deepspeed_pipe.is_pipeline(engine.module):
        return PipelineHost(engine)
    if engine.has_moe_layers:
        return ExpertHost(engine)
    return TensorHost(engine) if deepspeed_tensor.is_cut(engine) else DeepSpeedHost(engine)


class DeepSpeedHost:
    """A DeepSpeed engine with ZeRO stage 0 to 3.

    Args:
        engine: The initialised engine.
    """

    def __init__(self, engine: Any) -> None:
        self.model: nn.Module = engine.module
        self.groups = Groups(data=engine.seq_data_parallel_group)
        self._engine = engine
        self._ranks = torch.distributed.get_world_size(self.groups.data)
        self._averaging_ranks = deepspeed_sequence.averaging_ranks(engine)
        self._storage = storage_of(engine, self.groups)
        self._group_index = deepspeed_step.group_index(engine)

    def layouts(self, names: Sequence[str]) -> dict[str, Layout]:
        """From the engine's optimizer."""
        return self._storage.layouts(names)

    def gradients(self) -> Gradients:
        """As the engine stores them."""
        return self._storage.gradients()

    def writable(self) -> Mapping[str, Tensor]:
        """What the engine's optimizer will consume."""
        return self._storage.writable()

    def gradient_dtype(self) -> torch.dtype | None:
        """As accumulated by the engine."""
        return self._storage.dtype()

    def after_write(self) -> None:
        """Norms and scales that the engine's optimizer remembers."""
        self._storage.after_write()

    def output_scale(self) -> float:
        """Undo the loss scale, apply the average over ranks; accumulation is in the loss."""
        return 1.0 / (self._storage.stored_scale() * self._averaging_ranks)

    def stored_scale(self) -> float:
        """The loss scale."""
        return self._storage.stored_scale()

    def scale_adapts(self) -> bool:
        """With a dynamic loss scale."""
        return self._storage.scale_adapts()

    def gradients_stay_in_parameters(self) -> bool:
        """Without ZeRO."""
        return self._storage.in_parameters

    def micro_batch_is_last(self) -> bool:
        """At the engine's accumulation boundary."""
        return bool(self._engine.is_gradient_accumulation_boundary())

    @property
    def replaces_gradients(self) -> bool:
        """Whether there are backward passes that take the place of earlier ones (ZeRO)."""
        return self._storage.partial

    def starts_anew(self) -> bool:
        """Whether a backward pass now would be such a one."""
        return self._storage.starts_anew()

    def clip_threshold(self) -> float:
        """The JSON's ``gradient_clipping``."""
        return float(self._engine.gradient_clipping() or 0.0)

    def learning_rates(self) -> Mapping[str, float]:
        """From the base optimizer's groups, which keep their order under every wrapper."""
        groups = self._engine.basic_optimizer.param_groups
        return {name: float(groups[index]["lr"]) for name, index in self._group_index.items()}

    def announce(self, text: str) -> None:
        """Through DeepSpeed's logger."""
        from deepspeed.utils import logger

        logger.info("ds_kfac\n%s", text)

    @contextmanager
    def clipping_done(self) -> Iterator[None]:
        """Keep the engine from clipping again.

        The raw gradient was clipped, and a direction is not a gradient (DeepSpeed#8439:
        clipping it shrinks steps 4 to 85 times).
        """
        config, optimizer = self._engine._config, self._engine.optimizer
        clipping = config.gradient_clipping
        inner = getattr(optimizer, "clip_grad", None)
        config.gradient_clipping = 0.0
        if inner is not None:
            optimizer.clip_grad = 0.0
        try:
            with self._storage.applying():
                yield
        finally:
            config.gradient_clipping = clipping
            if inner is not None:
                optimizer.clip_grad = inner

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Make the engine skip a step, also where it would not look or cannot see."""
        with self._storage.skipping():
            yield

    def end_step(self) -> None:
        """After the engine's step."""
        self._storage.end_step()

    def forget_rehearsal(self) -> None:
        """Undo a step that the engine took with zero gradients to create optimizer states."""
        self._storage.forget_rehearsal()

    def detach(self) -> None:
        """Leave the engine as it was."""
        self._storage.detach()


class PipelineHost(DeepSpeedHost):
    """A DeepSpeed pipeline engine with ZeRO stage 0 or 1; this rank has one stage.

    Layers are shared out among the copies of their stage. Votes, the gradient's norm and the
    KL clip cover the whole model: a stage without layers takes part in them.

    Args:
        engine: The initialised engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.groups = deepspeed_pipe.stage_groups(engine)

    def excluded(self) -> Mapping[str, str]:
        """Tied modules."""
        return deepspeed_pipe.tied_modules(self.model) or {}

    def micro_batch_is_last(self) -> bool:
        """Several micro-batches are under way at once."""
        raise UnsupportedError(
            "E155",
            "factor_micro_batches='last' is not available in pipelines, where micro-batches "
            "overlap: use 'all' with a smaller factor_token_fraction",
        )

    def gradients(self) -> Gradients:
        """As the engine stores them, and what of them counts in the model's norm."""
        return deepspeed_pipe.stage_gradients(
            super().gradients(), model=self.model, ranks=self._ranks
        )

    @contextmanager
    def clipping_done(self) -> Iterator[None]:
        """Keep the engine from clipping and measuring again."""
        with deepspeed_pipe.unmeasured(self._engine.optimizer), super().clipping_done():
            yield


class TensorHost(DeepSpeedHost):
    """A DeepSpeed engine with AutoTP and ZeRO stage 0 to 2.

    Args:
        engine: The initialised engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.groups = deepspeed_tensor.tensor_groups(engine)
        tensor = Communicator(self.groups.tensor, Ledger())
        self._tensor_rank = tensor.rank
        # The engine drops parameters of which this rank has an empty shard from its groups.
        for index in tensor.gather_objects(self._group_index):
            self._group_index = {**index, **self._group_index}

    def tensor_cut(self, *, blocks: bool) -> TensorCut | None:
        """Modules that AutoTP has cut."""
        return deepspeed_tensor.tensor_cut(self.model, blocks=blocks)

    def gradients(self) -> Gradients:
        """As the engine stores them, and what of them counts in the model's norm."""
        return deepspeed_tensor.shared_gradients(
            super().gradients(),
            model=self.model,
            ranks=self._ranks,
            tensor_rank=self._tensor_rank,
        )


class ExpertHost(DeepSpeedHost):
    """A DeepSpeed engine with ``deepspeed.moe`` layers and ZeRO stage 0 to 2.

    Args:
        engine: The initialised engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.groups = deepspeed_moe.expert_groups(engine)

    def experts(self) -> Mapping[str, Expert]:
        """This rank's experts."""
        return deepspeed_moe.experts(self.model)

    def uncalled(self) -> Mapping[str, str]:
        """Gates."""
        return deepspeed_moe.gates(self.model)

    def gradients(self) -> Gradients:
        """As the engine stores them, and what of them counts in the model's norm."""
        return deepspeed_moe.expert_gradients(
            super().gradients(), model=self.model, groups=self.groups
        )
