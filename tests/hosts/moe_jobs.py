"""Jobs with DeepSpeed's mixture of experts, and the same model in one piece for the oracle."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import ds_kfac
from tests._harness import deepspeed_cpu
from tests._harness.collectives import recording
from tests.hosts import topology_jobs
from tests.hosts.engine_checkpoint_jobs import differences

WIDTH, HIDDEN, CLASSES = 6, 7, 3
PARTS, ROWS, STEPS = 4, 12, 4
STOP, END = 3, 7
LR, DECAY, AUX_LR, EPS = 0.05, 0.01, 0.02, 1e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DENSE = ("enter", "leave")
PREFIX = "moe.deepspeed_moe"


@dataclass(frozen=True)
class Cell:
    """One way to train. The batch of a step is cut into ``PARTS`` micro-batches everywhere.

    Attributes:
        experts: Number of experts.
        expert_parallel: Ranks that experts are shared out over.
        zero: ZeRO stage.
        kfac: Settings of the preconditioner.
        top: Experts per token.
        capacity: Capacity factor; 0 drops no token.
        own: Optimizer type KFAC; otherwise AdamW beside a kfac section.
        sgd: SGD with momentum in place of AdamW.
        clipping: The engine's gradient clipping.
        starved: In some steps no token goes to the last expert, in others one part sends some.
        poisoned: In step 1 an expert of one rank sees NaN.
        split: The caller splits parameters as DeepSpeed's documentation says.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        odd: Rank that has the bias of an expert frozen; none by default.
        extra: More DeepSpeed JSON.
    """

    experts: int
    expert_parallel: int
    zero: int
    kfac: dict[str, Any] = field(hash=False)
    top: int = 1
    capacity: float = 0.0
    own: bool = True
    sgd: bool = False
    clipping: float = 0.0
    starved: bool = False
    poisoned: bool = False
    split: bool = False
    dtype: str = "fp32"
    odd: int = -1
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


class Expert(nn.Module):
    """Two linear layers; the second one sees something even in slots without a token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.up(x)))


class Whole(nn.Module):
    """All experts in one process; routing is done part by part, as on the ranks.

    Args:
        cell: Experts, gating and capacity.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.cell = cell
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, cell.experts, bias=False)
        self.gate.weight.data[-1, 0] = -4.0
        self.experts = nn.ModuleList(Expert() for _ in range(cell.experts))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[rows, CLASSES]`` and the gate's loss, mean over parts."""
        h = x + torch.tanh(self.enter(x))
        parts = [route(self.cell, self.gate(h[rows])) for rows in torch.arange(len(x)).chunk(PARTS)]
        combine = torch.cat([weights for weights, _ in parts])
        results = torch.zeros_like(h)
        for index, expert in enumerate(self.experts):
            tokens = combine[:, index].nonzero().flatten()
            if len(tokens):
                out = combine[tokens, index, None] * expert(h[tokens])
                results = results.index_add(0, tokens, out)
        return self.leave(h + results), torch.stack([loss for _, loss in parts]).mean()


def route(cell: Cell, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[rows, experts]`` of one part's tokens, zero where dropped, and the gate's loss."""
    gates = logits.softmax(dim=1)
    order = gates.topk(cell.top, dim=1).indices
    chosen = [nn.functional.one_hot(order[:, k], cell.experts) for k in range(cell.top)]
    loss = cell.experts * (gates.mean(0) * chosen[0].to(gates).mean(0)).sum()
    if cell.capacity:
        limit = math.ceil(len(logits) / cell.experts * cell.capacity * cell.top)
        if cell.top == 1:  # DeepSpeed takes what topk returns of equal values
            kept = torch.topk(chosen[0], k=limit, dim=0).indices
            chosen = [chosen[0] * torch.zeros_like(chosen[0]).scatter_(0, kept, 1)]
        else:
            places = [chosen[0].cumsum(0) - 1, chosen[1].cumsum(0) - 1 + chosen[0].sum(0)]
            chosen = [c * (place < limit) for c, place in zip(chosen, places, strict=True)]
    weights = torch.stack([gates * c for c in chosen]).sum(0)
    if cell.top == 2:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    return weights, loss


class Net(nn.Module):
    """The same model with DeepSpeed's layer: this rank's experts only."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.enter = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(
            hidden_size=WIDTH,
            expert=Expert(),
            num_experts=cell.experts,
            ep_size=cell.expert_parallel,
            k=cell.top,
            capacity_factor=cell.capacity or 1.0,
            min_capacity=0,
            drop_tokens=bool(cell.capacity),
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + torch.tanh(self.enter(x))
        out, loss, _ = self.moe(h)
        return self.leave(h + out), loss


def make_net(cell: Cell, rank: int) -> Net:
    """DeepSpeed's model with the weights of :class:`Whole`."""
    whole, net = Whole(cell), Net(cell)
    local = cell.experts // cell.expert_parallel
    first = rank % cell.expert_parallel * local
    net.enter.load_state_dict(whole.enter.state_dict())
    net.leave.load_state_dict(whole.leave.state_dict())
    net.moe.deepspeed_moe.gate.wg.load_state_dict(whole.gate.state_dict())
    for index in range(local):
        expert = net.get_submodule(f"{PREFIX}.experts.deepspeed_experts.{index}")
        expert.load_state_dict(whole.experts[first + index].state_dict())
        expert.get_parameter("up.bias").requires_grad_(rank != cell.odd)
    return net


def batch(cell: Cell, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole step."""
    generator = torch.Generator().manual_seed(700 + step)
    x = torch.randn(PARTS * ROWS, WIDTH, generator=generator)
    if cell.starved:  # the first feature keeps tokens away from the last expert
        x[:, 0] = 3.0
        if step % 2:
            x[: ROWS // 2, 0] = -3.0
    return x, torch.randn(PARTS * ROWS, CLASSES, generator=generator)


def objective(output: Tensor, gate_loss: Tensor, target: Tensor) -> Tensor:
    """Mean over rows and the gate's balance loss."""
    return 0.5 * (output - target).square().sum(-1).mean() + 0.1 * gate_loss


def config_of(cell: Cell, ranks: int) -> dict[str, Any]:
    """The DeepSpeed JSON of a cell."""
    config: dict[str, Any] = {
        "train_batch_size": PARTS,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": PARTS // ranks,
        "gradient_clipping": cell.clipping,
        "zero_optimization": {"stage": cell.zero, "reduce_bucket_size": 200},
        "steps_per_print": 10**9,
    }
    if cell.own:
        aux = {"lr": AUX_LR, "betas": [0.9, 0.95]}
        params = {"lr": LR, "weight_decay": DECAY, "aux": aux, **cell.kfac}
        config["optimizer"] = {"type": "KFAC", "params": params}
    else:
        params = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": params}
        if cell.sgd:
            config["optimizer"] = {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}
            config["zero_allow_untested_optimizer"] = True
        config["kfac"] = dict(cell.kfac)
    if cell.dtype != "fp32":
        config[cell.dtype] = {"enabled": True}
    if cell.dtype == "fp16":
        config["fp16"]["loss_scale"] = 256
    return topology_jobs.merged(config, cell.extra)


def make_engine(cell: Cell, rank: int, ranks: int, **extra: Any) -> Any:
    """A real engine with K-FAC attached."""
    deepspeed_cpu.prepare(fake_fp16=cell.dtype == "fp16")
    net = make_net(cell, rank)
    parameters: Any = net.parameters()
    if cell.split:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = {"params": list(parameters), "name": "parameters"}
        parameters = split_params_into_different_moe_groups_for_optimizer(groups)
    config = {**config_of(cell, ranks), **extra}
    engine, *_ = ds_kfac.initialize(model=net, model_parameters=parameters, config=config)
    return engine


def train(rank: int, ranks: int, cells: list[Cell]) -> list[dict[str, Any]]:
    """Train every cell; each rank reports on its experts under their global names."""
    return [train_cell(rank, ranks, cell) for cell in cells]


def train_cell(rank: int, ranks: int, cell: Cell) -> dict[str, Any]:
    """Weights and factors after every step, norms, and K-FAC's collectives by group."""
    engine = make_engine(cell, rank, ranks)
    kfac = engine.kfac
    report: dict[str, Any] = {"weights": [], "factors": [], "norms": [], "calls": []}
    _count_collectives(kfac, report["calls"])
    first = rank % cell.expert_parallel * (cell.experts // cell.expert_parallel)
    for step in range(STEPS):
        take_step(engine, cell, step, rank, ranks)
        for _ in range(0 if cell.poisoned else topology_jobs.MAX_OVERFLOWS):
            if engine.was_step_applied():
                break
            take_step(engine, cell, step, rank, ranks)  # a loss scale is being looked for
        named = {global_name(n, first): p for n, p in engine.module.named_parameters()}
        report["weights"].append({n: p.detach().float().clone() for n, p in named.items()})
        report["factors"].append({global_name(n, first): kfac.factors(n) for n in kfac.owners})
        report["norms"].append(float(kfac.grad_norm or 0.0))
    report |= {
        "owners": kfac.owners,
        "counters": dict(vars(kfac.counters)),
        "left out": {item.name: item.reason for item in kfac.layers.left_out},
        "ledger": kfac.ledger(),
    }
    engine.destroy()
    return report


def take_step(engine: Any, cell: Cell, step: int, rank: int, ranks: int) -> None:
    """One optimizer step on this rank's parts of the batch."""
    x, y = batch(cell, step)
    parts = torch.arange(len(x)).chunk(PARTS)
    for rows in parts[rank * (PARTS // ranks) :][: PARTS // ranks]:
        mine = x[rows].to(DTYPES[cell.dtype])
        if cell.poisoned and step == 1 and rank == ranks - 1:
            mine = mine * float("nan")
        output, gate_loss = engine(mine)
        engine.backward(objective(output.float(), gate_loss.float(), y[rows]))
        engine.step()


def resume(rank: int, ranks: int, cells: list[Cell], folder: str) -> list[list[str]]:
    """Differences between the straight and the resumed run of each cell, on this rank."""
    results = []
    for index, cell in enumerate(cells):
        engine = make_engine(cell, rank, ranks)
        for step in range(END):
            if step == STOP:
                engine.save_checkpoint(f"{folder}/{index}")
            take_step(engine, cell, step, rank, ranks)
        straight = fingerprint(engine)
        engine.destroy()
        engine = make_engine(cell, rank, ranks)
        engine.load_checkpoint(f"{folder}/{index}")
        for step in range(engine.kfac.counters.steps, END):
            take_step(engine, cell, step, rank, ranks)
        results.append(differences(straight, fingerprint(engine)))
        engine.destroy()
    return results


def warnings_of_changed_solver(rank: int, ranks: int, cell: Cell, folder: str) -> list[str]:
    """What is said where bases of dense layers and experts are of another kind, and idle ones.

    From the second step on the experts of a rank are in eval mode: trained, never seen.
    """
    engine = make_engine(cell, rank, ranks)
    take_step(engine, cell, 0, rank, ranks)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make_engine(replace(cell, kfac={**cell.kfac, "solver": "cholesky"}), rank, ranks)
    handler = logging.Handler()
    texts: list[str] = []
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_kfac").addHandler(handler)
    engine.load_checkpoint(folder)
    engine.kfac.reset()
    for module in engine.module.modules():
        if isinstance(module, nn.Linear):
            module.eval()
    for step in range(3):
        take_step(engine, cell, step, rank, ranks)
    logging.getLogger("ds_kfac").removeHandler(handler)
    engine.destroy()
    return texts


def load_and_save(rank: int, ranks: int, cell: Cell, source: str, target: str) -> None:
    """Hand K-FAC's state of one cut into ranks to another one, which saves it again."""
    engine = make_engine(cell, rank, ranks)
    assert engine.kfac.load(source)
    engine.kfac.save(target)
    take_step(engine, cell, STOP, rank, ranks)
    engine.destroy()


def fingerprint(engine: Any) -> dict[str, Any]:
    """Weights, and every bit of K-FAC's state."""
    state = engine.kfac.state_dict()
    result: dict[str, Any] = {**dict(engine.module.named_parameters()), **state["counters"]}
    for name, layer in state["layers"].items():
        result.update({f"{name}/{key}": value for key, value in layer.items()})
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in result.items()}


def _count_collectives(kfac: Any, calls: list[dict[tuple[int, ...], int]]) -> None:
    """Append a count by group at every step."""
    before_step = kfac.before_step

    def counted() -> bool:
        with recording() as log:
            healthy: bool = before_step()
        calls.append(dict(Counter(record.group for record in log)))
        return healthy

    kfac.before_step = counted


def refuse(rank: int, ranks: int, cells: list[tuple[Cell, dict[str, Any]]]) -> list[str]:
    """The message each cell is refused with."""
    messages = []
    for cell, extra in cells:
        try:
            make_engine(cell, rank, ranks, **extra)
        except ds_kfac.KFACError as error:
            messages.append(str(error))
        else:
            messages.append("accepted")
    return messages


def global_name(name: str, first: int) -> str:
    """Name in :class:`Whole` of a module or parameter of a rank whose first expert is given."""
    name = name.replace(f"{PREFIX}.gate.wg", "gate")
    prefix = f"{PREFIX}.experts.deepspeed_experts."
    if not name.startswith(prefix):
        return name
    index, rest = name.removeprefix(prefix).split(".", 1)
    return f"experts.{first + int(index)}.{rest}"
