"""What the dense oracle remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.reference import formulas, rows

Calls = list[tuple[Tensor, Tensor]]  # (input, gradient of the objective wrt the output)


@dataclass
class AuxOptions:
    """AdamW of the parameters that are not preconditioned."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class LayerState:
    """Everything the oracle remembers about one layer.

    Attributes:
        module: The layer.
        sums: Decayed weighted sums of A and G.
        weights: Their decayed weights.
        last_fold: Step of the previous fold, None before the first.
        A: Factor as of the last refresh, blocks only.
        G: The same for the output side.
        q_a: Block-diagonal eigenvectors as of the last refresh; None before the first.
        q_g: The same for the output side.
        buffer: Momentum.
        second: Second moment in the eigenbasis.
        updates: Steps in which the layer was used.
        adam: Moments for grafting.
    """

    module: nn.Module
    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=lambda: {"A": 0.0, "G": 0.0})
    last_fold: int | None = None
    A: Tensor = field(default_factory=lambda: torch.empty(0))
    G: Tensor = field(default_factory=lambda: torch.empty(0))
    q_a: Tensor | None = None
    q_g: Tensor | None = None
    buffer: Tensor | None = None
    second: Tensor | None = None
    updates: int = 0
    adam: formulas.AdamMoments | None = None

    def __post_init__(self) -> None:
        d_out, columns = self.matrix({}).shape
        self.sums = {
            "A": torch.zeros(columns, columns, dtype=torch.float64),
            "G": torch.zeros(d_out, d_out, dtype=torch.float64),
        }

    def matrix(self, gradients: Mapping[Tensor, Tensor | None]) -> Tensor:
        """Matrix view of the layer's gradient; zeros where there is none."""

        def pick(parameter: Tensor) -> Tensor:
            found = gradients.get(parameter)
            return torch.zeros_like(parameter) if found is None else found

        weight = pick(self.module.get_parameter("weight"))
        biased = rows.has_bias(self.module)
        bias = pick(self.module.get_parameter("bias")) if biased else None
        return rows.to_matrix(self.module, weight, bias).detach()

    def average(self, side: str) -> Tensor:
        """Current A or G; zeros while nothing was folded in."""
        weight = self.weights[side]
        return self.sums[side] / weight if weight > 0 else self.sums[side].clone()

    def fold(
        self, calls: Sequence[tuple[Tensor, Tensor]], step: int, decay: float, sharing: str
    ) -> None:
        """Take in the rows of one step's calls; nothing happens without calls."""
        if not calls:
            return
        inputs, outputs, terms = [], [], 0
        for x, gamma in calls:
            a, g, call_terms = rows.call_rows(self.module, x, gamma, sharing)
            inputs.append(a)
            outputs.append(g)
            terms += call_terms
        a, g = torch.cat(inputs), torch.cat(outputs)
        A, G = a.t() @ a / len(a), terms * (g.t() @ g)
        rho = 1.0 if self.last_fold is None else decay ** (step - self.last_fold)
        for side, batch, weight in (("A", A, len(a)), ("G", G, terms)):
            self.sums[side] = rho * self.sums[side] + weight * batch
            self.weights[side] = rho * self.weights[side] + weight
        self.last_fold = step
