"""A K-FAC optimizer for float64 models in one process: the oracle of every topology.

It sees the whole global batch at once, keeps dense factors and solves dense systems. Nothing here
is shared with the package; agreement of the two is the evidence that either is right.
Sources: Martens & Grosse 2015 (factors, natural direction), Grosse & Martens 2016 (convolutions),
George et al. 2018 (ekfac), Eschenhagen et al. 2023 (weight sharing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tests.reference import formulas, rows
from tests.reference.state import AuxOptions, Calls, LayerState


class DenseKFAC:
    """K-FAC on a whole global batch.

    Every option is a plain attribute and may be changed between steps (schedules).

    Args:
        model: Converted to float64 in place.
        layer_names: Names of the modules to precondition: Linear, Conv2d, transformers' Conv1D.
        direction: natural, ekfac, eigen_adam or orthogonal.
        solver: eigen or cholesky; only the natural direction depends on it.
        damping: Relative to the mean eigenvalues, or absolute, by `damping_mode`.
        damping_mode: relative or absolute.
        factor_decay: Decay of the factors per applied step.
        factor_update_steps: Interval of captures.
        inv_update_steps: Interval of refreshes.
        kl_clip: Bound of the KL clip, None for no clip.
        grafting: none, rms or adam.
        momentum: Average of the raw gradient; 0 for none.
        betas: The second one is the decay of ekfac's and eigen_adam's moments.
        max_factor_dim: Larger sides are cut into blocks.
        weight_sharing: expand or reduce.
        parts: Number of fused matrices by layer name.
        gradient_clipping: Bound of the raw gradient's norm, 0 for none.
        optimizer: A torch optimizer that consumes the directions as gradients. Without one the
            oracle updates the weights itself, as optimizer type KFAC does.
        lr: Learning rate of that update (and of the KL clip).
        weight_decay: Decoupled decay of that update.
        aux: AdamW of the other parameters.
        zero_missing: Treat a parameter without gradient as one with gradient zero, as ZeRO does.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_names: Sequence[str],
        *,
        direction: str = "natural",
        solver: str = "eigen",
        damping: float = 1e-2,
        damping_mode: str = "relative",
        factor_decay: float = 0.95,
        factor_update_steps: int = 1,
        inv_update_steps: int = 1,
        kl_clip: float | None = None,
        grafting: str = "none",
        momentum: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        max_factor_dim: int | None = None,
        weight_sharing: str = "expand",
        parts: Mapping[str, int] | None = None,
        gradient_clipping: float = 0.0,
        optimizer: torch.optim.Optimizer | None = None,
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        aux: AuxOptions | None = None,
        zero_missing: bool = True,
    ) -> None:
        self.model = model.double()
        self.layers = {name: LayerState(model.get_submodule(name)) for name in layer_names}
        self.direction, self.solver = direction, solver
        self.damping, self.damping_mode = damping, damping_mode
        self.factor_decay = factor_decay
        self.factor_update_steps, self.inv_update_steps = factor_update_steps, inv_update_steps
        self.kl_clip, self.grafting = kl_clip, grafting
        self.momentum, self.betas = momentum, betas
        self.max_factor_dim, self.weight_sharing = max_factor_dim, weight_sharing
        self.parts = dict(parts or {})
        self.gradient_clipping = gradient_clipping
        self.optimizer, self.lr, self.weight_decay = optimizer, lr, weight_decay
        self.aux, self.zero_missing = aux or AuxOptions(), zero_missing
        self.steps = 0
        self.raw_norm = math.nan  # of the last step, before clipping
        self.kl_scale = 1.0
        self._aux_moments: dict[Tensor, formulas.AdamMoments] = {}

    def step(self, objective: Callable[[], Tensor]) -> dict[str, Tensor]:
        """One step on the global batch.

        Args:
            objective: Runs the model (as often as it likes) and returns the scalar J whose
                gradient the optimizer is to see.

        Returns:
            Direction ``[d_out, d_in (+1)]`` of each layer, after the KL clip.
        """
        gradients, calls = self._backward(objective)
        if self.steps % self.factor_update_steps == 0:
            for name, state in self.layers.items():
                state.fold(calls[name], self.steps, self.factor_decay, self.weight_sharing)
        if self.steps % self.inv_update_steps == 0:
            for state in self.layers.values():
                self._refresh(state)
        directions, momenta = {}, {}
        for name, state in self.layers.items():
            g = state.matrix(gradients)
            directions[name], momenta[name] = self._direction(name, state, g)
        self._clip_kl(directions, momenta)
        self._apply(directions, gradients)
        self.steps += 1
        return directions

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Current averages ``(A, G)`` of a layer, without anything outside the blocks."""
        state = self.layers[name]
        return self._blocks_only(state.average("A")), self._blocks_only(state.average("G"))

    def spectral_gap(self, name: str) -> float:
        """Smallest gap between neighbouring eigenvalues of A or G, relative to the largest.

        ekfac and eigen_adam depend on the eigenvectors: with a gap near the rounding error of the
        dtype under test, two right implementations differ.
        """
        state, gaps = self.layers[name], []
        for factor in (state.A, state.G):
            for start, stop in self._bounds(factor.shape[0]):
                values = formulas.eigenbasis(factor[start:stop, start:stop])[0]
                if len(values) > 1:
                    gaps.append(float(values.diff().min() / values[-1]))
        return min(gaps, default=math.inf)

    def _backward(
        self, objective: Callable[[], Tensor]
    ) -> tuple[dict[Tensor, Tensor | None], dict[str, Calls]]:
        """Clipped gradient of every parameter, and (input, output gradient) of every call."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with rows.Recorder({n: s.module for n, s in self.layers.items()}) as recorder:
            value = objective()
        flat = [(name, x, s) for name, calls in recorder.calls.items() for x, s in calls]
        wanted = [*parameters, *(s for _, _, s in flat)]
        found = torch.autograd.grad(value, wanted, allow_unused=True)
        calls: dict[str, Calls] = {name: [] for name in self.layers}
        for (name, x, _), gamma in zip(flat, found[len(parameters) :], strict=True):
            if gamma is not None:  # else the call never reached the objective
                calls[name].append((x, gamma))
        gradients: dict[Tensor, Tensor | None] = {
            p: found[index] for index, p in enumerate(parameters)
        }
        squares = (float(g.square().sum()) for g in gradients.values() if g is not None)
        self.raw_norm = math.sqrt(sum(squares))
        if self.gradient_clipping > 0:
            factor = min(1.0, self.gradient_clipping / (self.raw_norm + 1e-6))
            gradients = {p: None if g is None else g * factor for p, g in gradients.items()}
        return gradients, calls

    def _refresh(self, state: LayerState) -> None:
        state.A, state.G = (self._blocks_only(state.average(side)) for side in ("A", "G"))
        old_a, old_g = state.q_a, state.q_g
        state.q_a, state.q_g = self._basis(state.A), self._basis(state.G)
        if state.second is not None and old_a is not None and old_g is not None:
            turn_a, turn_g = state.q_a.t() @ old_a, state.q_g.t() @ old_g
            state.second = turn_g.square() @ state.second @ turn_a.square().t()

    def _direction(self, name: str, state: LayerState, g: Tensor) -> tuple[Tensor, Tensor]:
        """Direction of one layer and the momentum it was made from."""
        if not bool(g.any()):  # unused in this step: nothing of it may decay
            return torch.zeros_like(g), torch.zeros_like(g)
        state.updates += 1
        m = self._momentum(state, g)
        if self.direction == "natural":
            d = self._tile_by_tile(state, m, self._natural_tile)
        elif self.direction == "orthogonal":
            u = self._tile_by_tile(state, m, self._whitened_tile)
            d = formulas.orthogonalised(u, self.parts.get(name, 1))
        else:
            d = self._in_eigenbasis(state, g, m)
        return self._grafted(state, d, g), m

    def _momentum(self, state: LayerState, g: Tensor) -> Tensor:
        beta = self.momentum
        if state.buffer is None:
            state.buffer = torch.zeros_like(g)
        state.buffer = beta * state.buffer + (1 - beta) * g
        if self.direction == "eigen_adam":
            return state.buffer / (1 - beta**state.updates)
        return beta * state.buffer + (1 - beta) * g if beta > 0 else g

    def _in_eigenbasis(self, state: LayerState, g: Tensor, m: Tensor) -> Tensor:
        assert state.q_a is not None and state.q_g is not None
        q_a, q_g, b2 = state.q_a, state.q_g, self.betas[1]
        if state.second is None:
            state.second = torch.zeros_like(g)
        state.second = b2 * state.second + (1 - b2) * (q_g.t() @ g @ q_a).square()
        second = state.second / (1 - b2**state.updates)
        rotated = q_g.t() @ m @ q_a
        if self.direction == "eigen_adam":
            return q_g @ (rotated / (second.sqrt() + 1e-8)) @ q_a.t()
        for i, j in self._tiles(g):
            tile = second[i, j]
            scale = float(tile.mean()) if self.damping_mode == "relative" else 1.0
            rotated[i, j] = rotated[i, j] / (tile + self.damping * scale)
        return q_g @ rotated @ q_a.t()

    def _grafted(self, state: LayerState, d: Tensor, g: Tensor) -> Tensor:
        if self.grafting == "rms":
            return formulas.scaled_to(d, 0.2 * math.sqrt(d.numel()))
        if self.grafting == "adam":
            state.adam = state.adam or formulas.AdamMoments(g, self.betas)
            return formulas.scaled_to(d, float(state.adam.update(g).norm()))
        return d

    def _clip_kl(self, directions: dict[str, Tensor], momenta: Mapping[str, Tensor]) -> None:
        self.kl_scale = 1.0
        bounded = self.direction in ("natural", "ekfac") and self.grafting == "none"
        if self.kl_clip is None or not bounded:
            return
        total = sum(
            self._lr(self.layers[name].module) ** 2 * float((d * momenta[name]).sum())
            for name, d in directions.items()
        )
        if total > 0:
            self.kl_scale = min(1.0, math.sqrt(self.kl_clip / total))
        for name in directions:
            directions[name] = directions[name] * self.kl_scale

    def _apply(
        self, directions: Mapping[str, Tensor], gradients: Mapping[Tensor, Tensor | None]
    ) -> None:
        updates = dict(gradients)
        for name, d in directions.items():
            module = self.layers[name].module
            weight, bias = rows.from_matrix(module, d)
            updates[module.get_parameter("weight")] = weight
            if bias is not None:
                updates[module.get_parameter("bias")] = bias
        replaced = {p for p in updates if updates[p] is not gradients[p]}
        for parameter, update in updates.items():
            missing = gradients[parameter] is None
            if missing and self.zero_missing:
                update = torch.zeros_like(parameter)
            parameter.grad = None if missing and not self.zero_missing else update
        if self.optimizer is not None:
            self.optimizer.step()
            return
        for parameter in updates:
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, parameter in replaced)

    @torch.no_grad()
    def _update(self, parameter: Tensor, update: Tensor, preconditioned: bool) -> None:
        """Rule of optimizer type KFAC."""
        if preconditioned:
            parameter.mul_(1 - self.lr * self.weight_decay).sub_(self.lr * update)
            return
        aux = self.aux
        if parameter not in self._aux_moments:
            self._aux_moments[parameter] = formulas.AdamMoments(parameter, aux.betas, aux.eps)
        change = self._aux_moments[parameter].update(update)
        parameter.mul_(1 - aux.lr * aux.weight_decay).sub_(aux.lr * change)

    def _lr(self, module: nn.Module) -> float:
        weight = module.get_parameter("weight")
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if any(p is weight for p in group["params"]):
                return float(group["lr"])
        return self.lr

    def _natural_tile(self, m: Tensor, G: Tensor, A: Tensor) -> Tensor:
        solve = (
            formulas.natural_inverse if self.solver == "cholesky" else formulas.natural_kronecker
        )
        return solve(m, G, A, self._damping())

    def _whitened_tile(self, m: Tensor, G: Tensor, A: Tensor) -> Tensor:
        return formulas.whitened(m, G, A, self._damping())

    def _tile_by_tile(
        self, state: LayerState, m: Tensor, solve: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        result = torch.empty_like(m)
        for i, j in self._tiles(m):
            result[i, j] = solve(m[i, j], state.G[i, i], state.A[j, j])
        return result

    def _damping(self) -> formulas.Damping:
        return formulas.Damping(self.damping, self.damping_mode == "relative")

    def _bounds(self, size: int) -> list[tuple[int, int]]:
        return formulas.block_bounds(size, self.max_factor_dim)

    def _tiles(self, matrix: Tensor) -> list[tuple[slice, slice]]:
        outputs, inputs = (self._bounds(size) for size in matrix.shape)
        return [(slice(*i), slice(*j)) for i in outputs for j in inputs]

    def _blocks_only(self, factor: Tensor) -> Tensor:
        return self._block_diagonal(factor, lambda block: block)

    def _basis(self, factor: Tensor) -> Tensor:
        return self._block_diagonal(factor, lambda block: formulas.eigenbasis(block)[1])

    def _block_diagonal(self, factor: Tensor, map_block: Callable[[Tensor], Tensor]) -> Tensor:
        result = torch.zeros_like(factor)
        for start, stop in self._bounds(factor.shape[0]):
            result[start:stop, start:stop] = map_block(factor[start:stop, start:stop])
        return result
