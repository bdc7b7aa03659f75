"""The directions as dense float64 formulas: Kronecker products and inverses written out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Above this many unknowns the dense system is replaced by its eigen form (proven equal in tests).
_DENSE_LIMIT = 900
_ADAM_EPS = 1e-8


@dataclass
class Damping:
    """How much of the identity is added; `relative` is to the mean eigenvalue of a factor."""

    value: float
    relative: bool


def block_bounds(size: int, limit: int | None) -> list[tuple[int, int]]:
    """Balanced consecutive ranges of at most `limit`, the larger ones first."""
    count = 1 if limit is None else math.ceil(size / limit)
    bounds, start = [], 0
    for index in range(count):
        stop = start + size // count + (1 if index < size % count else 0)
        bounds.append((start, stop))
        start = stop
    return bounds


def mean_eigenvalue(factor: Tensor) -> float:
    """trace / n."""
    return float(factor.trace()) / factor.shape[0]


def alive(factor: Tensor) -> Tensor:
    """The factor; the identity in place of one that is zero (a dead layer)."""
    dead = mean_eigenvalue(factor) == 0
    return torch.eye(factor.shape[0], dtype=factor.dtype) if dead else factor


def eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues clamped at 0 and eigenvectors in columns."""
    values, vectors = torch.linalg.eigh(alive(factor))
    return values.clamp(min=0), vectors


def natural_kronecker(m: Tensor, G: Tensor, A: Tensor, damping: Damping) -> Tensor:
    """Solves ``(A (x) G + lambda I) vec(d) = vec(m)`` densely; vec stacks columns."""
    A, G = alive(A), alive(G)
    scale = mean_eigenvalue(A) * mean_eigenvalue(G) if damping.relative else 1.0
    lam = damping.value * scale
    if m.numel() > _DENSE_LIMIT:
        return natural_eigen(m, G, A, lam)
    system = torch.kron(A, G) + lam * torch.eye(m.numel(), dtype=m.dtype)
    solution: Tensor = torch.linalg.solve(system, m.t().reshape(-1))
    return solution.reshape(m.shape[1], m.shape[0]).t().contiguous()


def natural_eigen(m: Tensor, G: Tensor, A: Tensor, lam: float) -> Tensor:
    """The same by eigendecompositions."""
    (values_g, q_g), (values_a, q_a) = eigenbasis(G), eigenbasis(A)
    rotated = q_g.t() @ m @ q_a
    return q_g @ (rotated / (values_g[:, None] * values_a[None, :] + lam)) @ q_a.t()


def natural_inverse(m: Tensor, G: Tensor, A: Tensor, damping: Damping) -> Tensor:
    """Factored damping: each factor damped and inverted on its own."""
    mu_a, mu_g = mean_eigenvalue(A), mean_eigenvalue(G)
    root = math.sqrt(damping.value)
    if damping.relative:
        shift_a, shift_g = root * mu_a, root * mu_g
    else:
        pi = math.sqrt(mu_a / mu_g) if mu_a > 0 and mu_g > 0 else 1.0
        shift_a, shift_g = pi * root, root / pi
    return _shifted_inverse(G, shift_g) @ m @ _shifted_inverse(A, shift_a)


def whitened(m: Tensor, G: Tensor, A: Tensor, damping: Damping) -> Tensor:
    """``G~^-1 m A~^-1`` with the factors brought to mean eigenvalue 1 in relative mode."""
    inverses = []
    for factor in (G, A):
        mu = mean_eigenvalue(factor)
        scaled = factor / mu if damping.relative and mu != 0 else factor
        inverses.append(_shifted_inverse(scaled, damping.value))
    return inverses[0] @ m @ inverses[1]


def newton_schulz(u: Tensor) -> Tensor:
    """Five quintic steps towards the orthogonal polar factor."""
    x = u / (u.square().sum().sqrt() + 1e-7)
    if u.shape[0] > u.shape[1]:
        x = x.t()
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if u.shape[0] > u.shape[1] else x


def orthogonalised(u: Tensor, parts: int) -> Tensor:
    """Newton-Schulz of each of `parts` equal row ranges, with the RMS of an Adam update."""
    pieces = []
    for piece in u.chunk(parts, dim=0):
        pieces.append(newton_schulz(piece) * 0.2 * math.sqrt(max(piece.shape)))
    return torch.cat(pieces)


def scaled_to(d: Tensor, norm: float) -> Tensor:
    """`d` with the Frobenius norm `norm`; zero stays zero."""
    own = float(d.norm())
    return d * (norm / own) if own > 0 else d


class AdamMoments:
    """Adam's moments of one tensor, written out.

    Args:
        like: Tensor whose shape and dtype the moments get.
        betas: Decay rates.
        eps: Added to the root.
    """

    def __init__(self, like: Tensor, betas: tuple[float, float], eps: float = _ADAM_EPS) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.betas, self.eps, self.steps = betas, eps, 0

    def update(self, g: Tensor) -> Tensor:
        """Take in a gradient; returns the bias-corrected update."""
        b1, b2 = self.betas
        self.steps += 1
        self.first = b1 * self.first + (1 - b1) * g
        self.second = b2 * self.second + (1 - b2) * g * g
        first = self.first / (1 - b1**self.steps)
        second = self.second / (1 - b2**self.steps)
        return first / (second.sqrt() + self.eps)


def _shifted_inverse(factor: Tensor, shift: float) -> Tensor:
    if mean_eigenvalue(factor) == 0:
        return torch.eye(factor.shape[0], dtype=factor.dtype)
    shifted = factor + shift * torch.eye(factor.shape[0], dtype=factor.dtype)
    inverse: Tensor = torch.linalg.inv(shifted)
    return inverse
