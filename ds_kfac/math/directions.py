"""What replaces the gradient of one layer, given its bases: the formulas of every direction.

All matrices are in the matrix view ``[d_out, d_in (+ 1)]``. Every function works in the dtype of
its matrices (fp32 or fp64), takes scalars as numbers or 0-d tensors, and never reads a value back
to the host. Zero norms and zero denominators give zeros; NaN and Inf are passed on, never hidden.

Sources: Martens & Grosse 2015 (arXiv 1503.05671) for the Kronecker-factored direction; George et
al. 2018 (arXiv 1806.03884) for EKFAC; Vyas et al. 2024 (arXiv 2409.11321) for Adam in an
eigenbasis; Jordan et al. 2024 (Muon) for the Newton-Schulz coefficients; Ba, Grosse & Martens 2017
for the KL clip; Agarwal et al. 2020 (arXiv 2002.11803) for grafting.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Scalar = float | Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_EPS = 1e-7
# Columns per row from which two steps at once take fewer operations, with room for overhead.
_PAIRED_ASPECT = 2
_RMS = 0.2


def nesterov_blend(buffer: Tensor, g: Tensor, beta: Scalar) -> Tensor:
    """Returns ``beta * buffer + (1 - beta) * g`` for the already updated momentum ``buffer``."""
    return _blend(buffer, g, beta)


def debias(average: Tensor, beta: Scalar, t: int | Tensor) -> Tensor:
    """Returns ``average / (1 - beta**t)``, the bias-corrected average after ``t >= 1`` updates."""
    return average / _bias_correction(beta, t)


def natural_eigen(m: Tensor, qg: Tensor, dg: Tensor, qa: Tensor, da: Tensor, lam: Scalar) -> Tensor:
    """Natural direction in the eigenbasis, ``Qg [(Qg^T m Qa) / (dg da^T + lam)] Qa^T``.

    Args:
        m: ``[o, i]``, gradient or momentum.
        qg: ``[o, o]``, eigenvectors of G in columns.
        dg: ``[o]``, eigenvalues of G, not negative.
        qa: ``[i, i]``, eigenvectors of A in columns.
        da: ``[i]``, eigenvalues of A, not negative.
        lam: damping added to every eigenvalue product.

    Returns:
        ``[o, i]``.
    """
    divisors = torch.outer(dg, da).add_(lam)
    return from_basis(_divide(to_basis(m, qg, qa), divisors), qg, qa)


def natural_inverse(m: Tensor, ig: Tensor, ia: Tensor) -> Tensor:
    """Natural direction from damped inverses, ``Ig m Ia``: ``[o, o] [o, i] [i, i] -> [o, i]``."""
    return ig @ m @ ia


def to_basis(x: Tensor, qg: Tensor, qa: Tensor) -> Tensor:
    """Coordinates in the eigenbasis, ``Qg^T x Qa``: ``[o, i]``."""
    return qg.mT @ x @ qa


def from_basis(x: Tensor, qg: Tensor, qa: Tensor) -> Tensor:
    """The inverse of :func:`to_basis`, ``Qg x Qa^T``: ``[o, i]``."""
    return qg @ x @ qa.mT


def second_moment_update_(s: Tensor, rotated: Tensor, beta2: Scalar) -> Tensor:
    """Updates ``s`` to ``beta2 * s + (1 - beta2) * rotated^2`` in place and returns it.

    Args:
        s: ``[o, i]``, running second moment.
        rotated: ``[o, i]``, gradient in the eigenbasis (:func:`to_basis`).
        beta2: decay; 1 leaves ``s`` as it is.
    """
    return s.lerp_(rotated.square(), _like(1.0 - beta2, s))


def ekfac(
    m: Tensor,
    s: Tensor,
    t: int | Tensor,
    *,
    beta2: Scalar,
    damping: Scalar,
    absolute: bool = False,
) -> Tensor:
    """EKFAC direction in the eigenbasis, ``m / (s_hat + lam)``.

    Args:
        m: ``[o, i]``, gradient or momentum, in the eigenbasis.
        s: ``[o, i]``, running second moment of the rotated gradient, this step included.
        t: number of updates ``s`` has seen, at least 1.
        beta2: decay of ``s``.
        damping: ``lam = damping * mean(s_hat)``, or ``lam = damping`` when ``absolute``.
        absolute: see ``damping``.

    Returns:
        ``[o, i]``, a new tensor in the eigenbasis.
    """
    s_hat = debias(s, beta2, t)
    lam = damping if absolute else damping * s_hat.mean()
    return _divide(m, s_hat.add_(_like(lam, s)))


def eigen_adam(
    m: Tensor, v: Tensor, t: int | Tensor, *, beta2: Scalar, eps: Scalar = 1e-8
) -> Tensor:
    """Adam in the eigenbasis, ``m / (sqrt(v_hat) + eps)``.

    Args:
        m: ``[o, i]``, momentum in the eigenbasis, already bias-corrected (see :func:`debias`).
        v: ``[o, i]``, running second moment of the rotated gradient, this step included.
        t: number of updates ``v`` has seen, at least 1.
        beta2: decay of ``v``.
        eps: added to the root.

    Returns:
        ``[o, i]``, a new tensor in the eigenbasis.
    """
    return _divide(m, debias(v, beta2, t).sqrt_().add_(_like(eps, v)))


def move_second_moment(s: Tensor, rg: Tensor, ra: Tensor) -> Tensor:
    """Carries a diagonal second moment to a new basis, ``(Rg o Rg) s (Ra o Ra)^T``.

    Args:
        s: ``[o, i]``, in the old basis.
        rg: ``[o, o]``, ``Qg_new^T Qg_old``.
        ra: ``[i, i]``, ``Qa_new^T Qa_old``.

    Returns:
        ``[o, i]``: the diagonal, in the new basis, of the covariance that is diagonal with entries
        ``s`` in the old one. Its sum is that of ``s``.
    """
    moved: Tensor = rg.square() @ s @ ra.square().mT
    return moved


def newton_schulz(u: Tensor, steps: int = 5) -> Tensor:
    """Pushes the singular values of a matrix towards 1 (roughly 0.7 to 1.2 after 5 steps).

    Args:
        u: ``[..., r, c]``; every matrix of a batch is treated on its own.
        steps: number of quintic iterations.

    Returns:
        ``[..., r, c]``, close to the orthogonal polar factor; zeros for a zero matrix.
    """
    a, b, c = _NEWTON_SCHULZ
    tall = u.shape[-2] > u.shape[-1]
    norm = torch.linalg.vector_norm(u, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    x = u / (norm + _NEWTON_SCHULZ_EPS).to(u.dtype)
    x = x.mT if tall else x
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    while steps > 0:
        # Two steps with one Gram matrix: the second one's is a polynomial of the first one's,
        # which commutes with it. More than two would let its rounding errors grow.
        if steps % 2 == 0 and x.shape[-1] > _PAIRED_ASPECT * x.shape[-2]:
            x, steps = _two_quintic_steps(x), steps - 2
            continue
        # Fused multiply-adds: the elementwise passes would cost a third of the products.
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x, steps = torch.baddbmm(x, polynomial, x, beta=a), steps - 1
    x = x.reshape(shape)
    result: Tensor = x.mT if tall else x
    return result


def _two_quintic_steps(x: Tensor) -> Tensor:
    """``p(B2) p(B1) x`` with ``p(B) = a I + b B + c B^2``, ``B1 = x x^T``, ``B2 = p(B1)^2 B1``."""
    first = x @ x.mT
    p = _quintic_factor(first)
    second = p @ first @ p
    return (_quintic_factor(second) @ p) @ x


def _quintic_factor(gram: Tensor) -> Tensor:
    a, b, c = _NEWTON_SCHULZ
    polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
    return polynomial


def orthogonalise(u: Tensor, parts: int = 1) -> Tensor:
    """Orthogonalises each fused part on its own and gives it the RMS of an Adam update.

    Args:
        u: ``[o, i]``.
        parts: number of equal row ranges that are separate matrices (3 for fused q, k, v).

    Returns:
        ``[o, i]``; each ``[r, i]`` part becomes ``newton_schulz(part) * 0.2 * sqrt(max(r, i))``.

    Raises:
        ValueError: if the rows do not split into ``parts`` equal ranges.
    """
    rows, cols = u.shape
    if parts < 1 or rows % parts:
        raise ValueError(f"{rows} rows do not split into {parts} equal parts")
    stacked = newton_schulz(u.reshape(parts, rows // parts, cols))
    return stacked.mul_(_RMS * math.sqrt(max(rows // parts, cols))).reshape(rows, cols)


def graft_rms(d: Tensor) -> Tensor:
    """Returns ``d`` scaled to a root mean square of 0.2, zeros for a zero ``d``."""
    return graft_norm(d, _RMS * math.sqrt(d.numel()))


def graft_norm(d: Tensor, norm: Scalar) -> Tensor:
    """Returns ``d`` scaled to the Frobenius norm ``norm``, zeros for a zero ``d``."""
    own = frobenius_norm(d)
    return d.div(torch.where(own == 0, torch.ones_like(own), own)).mul(norm)


def adam_update_(
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: int | Tensor,
    betas: tuple[Scalar, Scalar],
    eps: Scalar = 1e-8,
    used: Tensor | None = None,
) -> Tensor:
    """Updates Adam's moments in place and returns its bias-corrected update.

    Args:
        g: gradient, any shape.
        m: first moment, updated in place.
        v: second moment, updated in place.
        t: number of this update, from 1.
        betas: decay of ``m`` and of ``v``.
        eps: added to the root.
        used: 0-d bool; where it is false the moments stay as they are.

    Returns:
        ``m_hat / (sqrt(v_hat) + eps)``, without learning rate or sign.
    """
    beta1, beta2 = betas
    # A moment that decays by 1 stays as it is.
    decay1, decay2 = (
        beta if used is None else torch.where(used, beta, 1.0).to(g.dtype) for beta in betas
    )
    m.mul_(decay1).add_(g * (1.0 - decay1))
    v.mul_(decay2).add_(g.square() * (1.0 - decay2))
    return _divide(debias(m, beta1, t), debias(v, beta2, t).sqrt() + eps)


def kl_scale(total: Tensor, kl_clip: Scalar) -> Tensor:
    """Returns the factor ``min(1, sqrt(kl_clip / total))`` of the KL clip.

    Args:
        total: 0-d, sum over all layers of ``lr^2 <d, m>``.
        kl_clip: bound on the modelled change.

    Returns:
        0-d, 1 where ``total`` is not positive, NaN where it is NaN.
    """
    free = total <= 0
    ratio = kl_clip / torch.where(free, torch.ones_like(total), total)
    return torch.where(free, torch.ones_like(total), ratio.sqrt().clamp(max=1.0))


def frobenius_norm(x: Tensor) -> Tensor:
    """Returns the norm of all elements, 0-d fp64.

    In fp32 the squares of elements below 1e-23 or above 1e19 leave the range, and a direction of
    honest size would be reported as zero or infinite.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def largest(x: Tensor) -> Tensor:
    """Returns the largest magnitude of any element, 0-d; NaN if any element is.

    It costs a third of a norm in fp64 and tells the same: it is positive unless all elements are
    zero, however small (unlike squares), and below infinity only if all are finite.
    """
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


def _blend(old: Tensor, new: Tensor, decay: Scalar) -> Tensor:
    """``decay * old + (1 - decay) * new`` in one pass."""
    return torch.lerp(old, new, _like(1.0 - decay, old))


def _like(scalar: Scalar, like: Tensor) -> Scalar:
    """A scalar that in-place operations on ``like`` accept."""
    return scalar.to(like.dtype) if isinstance(scalar, Tensor) else scalar


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient that is 0 where the denominator is 0; NaN denominators stay visible.

    Works by the reciprocal, in place of the denominator, because masks take several times as
    long as the quotient; a denominator whose reciprocal is infinite (below 3e-39 in fp32) counts
    as 0.
    """
    factor = denominator.reciprocal_().nan_to_num_(nan=math.nan, posinf=0.0, neginf=0.0)
    return factor.mul_(numerator)


def _bias_correction(beta: Scalar, t: int | Tensor) -> Scalar:
    # 1 - 0.999 has only four good digits in fp32, so device-side scalars are widened first.
    if isinstance(beta, Tensor):
        beta = beta.double()
    if isinstance(t, Tensor):
        t = t.double()
    correction: Scalar = 1.0 - beta**t
    return correction
