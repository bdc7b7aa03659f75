"""Bases of equal-size factors: eigendecompositions and damped inverses that survive bad data.

Bad data never raises. Each element of a batch climbs the same ladder on its own: finite check of
the input, division by the mean of the diagonal (so that 1e-36 and 1e+36 work), an attempt in the
factor's dtype, a check of the *output* (LAPACK returns NaN eigenvalues without an error), a retry
in fp64 (on the CPU too, where the device's solver failed), and only then ``ok = False`` with the
reason. A healthy batch costs one host synchronisation of ours; ``torch.linalg.eigh`` adds its own.

On the CPU the elements are solved one by one (a batch is not faster there), so a result has the
same bits alone and in any batch. On CUDA one kernel solves the batch; what it does depends on
the shape alone, and unusable elements are replaced by the identity before it starts.

Sources: the failure contract (check, retry, keep, count) follows Distributed Shampoo (Shi et al.
2023, arXiv 2309.06497); inverses by Cholesky, not ``eigh``, follow Osawa et al. 2019 (arXiv
1811.12019).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Largest deviation from orthonormality, and of a probe and the trace relative to the spectrum. The
# fp32 value leaves room for a product in TF32; a failed solver is off by 1e-1 or more.
_EIGEN_TOLERANCE = {torch.float32: 5e-3, torch.float64: 1e-6}
# Largest ||(F + shift I) X w - w|| / ||w||.
_INVERSE_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-4}
# Rounding makes eigenvalues of a rank-deficient factor about -1e-7 of the largest; a factor below
# this is not a sum of outer products any more.
_INDEFINITE = -1e-3
_BOOSTS = (1.0, 10.0, 100.0)

_OK, _NONFINITE, _TRACE, _SHIFT, _FAILED, _INDEFINITE_CODE = range(6)
_REASONS = {
    _NONFINITE: "the factor is not finite",
    _TRACE: "the factor is not zero but its trace is not positive",
    _SHIFT: "the shift is negative or not finite",
    _FAILED: "the solver's result is not finite or misses its residual check",
    _INDEFINITE_CODE: "the factor is indefinite",
}


@dataclass
class EigenBasis:
    """Eigendecompositions of ``b`` factors, ``F = vectors diag(values) vectors^T``.

    Attributes:
        vectors: ``[b, n, n]``, orthonormal eigenvectors in columns.
        values: ``[b, n]``, ascending, clamped to at least 0 and at most the largest finite number.
        mean: ``[b]``, mean eigenvalue of the factor (trace / n); 1 where the basis is the identity.
    """

    vectors: Tensor
    values: Tensor
    mean: Tensor


@dataclass
class InverseBasis:
    """Damped inverses of ``b`` factors.

    Attributes:
        inverse: ``[b, n, n]``, exactly symmetric.
    """

    inverse: Tensor


class _Normalised(NamedTuple):
    matrices: Tensor  # [b, n, n], diagonal mean 1; the identity where there is nothing to solve
    scale: Tensor  # [b] fp64, what the factor was divided by
    zero: Tensor  # [b] bool
    code: Tensor  # [b] int64


def eigen_bases(factors: Tensor) -> tuple[EigenBasis, Tensor, list[str]]:
    """Decomposes a batch of factors.

    A zero factor (dead layer) is fine: vectors ``I``, values and mean 1.

    Args:
        factors: ``[b, n, n]``, fp32 or fp64, symmetric with both triangles valid.

    Returns:
        The bases in the dtype of the factors (the identity where not ok), ``ok`` ``[b]`` bool on
        their device, and one text per factor: empty if the first attempt succeeded, the fallback
        that was used if ok, the reason if not.

    Raises:
        ValueError: if the shape or dtype is wrong; never because of the values.
    """
    _check(factors)
    attempts = [_eigen_attempt(piece) for piece in _pieces(factors)]
    basis = EigenBasis(*(torch.cat(parts) for parts in zip(*(a[0] for a in attempts), strict=True)))
    codes: list[int] = torch.cat([a[1] for a in attempts]).tolist()
    reasons = [_REASONS.get(code, "") for code in codes]
    for index, code in enumerate(codes):
        if code < _FAILED:
            continue
        found, reasons[index] = _eigen_retry(factors[index : index + 1])
        if found is not None:
            codes[index] = _OK
            basis.vectors[index], basis.values[index], basis.mean[index] = (x[0] for x in found)
    return basis, _flags(codes, factors), reasons


def damped_inverses(factors: Tensor, shift: Tensor) -> tuple[InverseBasis, Tensor, list[str]]:
    """Inverts ``F + shift I`` for a batch of factors.

    A zero factor (dead layer) is fine and acts as the identity, whatever the shift. The ladder
    after the first attempt: fp64 with the shift times 1, 10, 100, then fp64 eigenvalues clamped at
    0.

    Args:
        factors: ``[b, n, n]``, fp32 or fp64, symmetric with both triangles valid.
        shift: ``[b]``, not negative, any float dtype.

    Returns:
        The inverses in the dtype of the factors (the identity where not ok), ``ok`` ``[b]`` bool on
        their device, and one text per factor: empty if the first attempt succeeded, the fallback
        that was used if ok, the reason if not.

    Raises:
        ValueError: if a shape or dtype is wrong; never because of the values.
    """
    _check(factors)
    if shift.shape != factors.shape[:1]:
        raise ValueError(
            f"expected one shift for each of {factors.shape[0]} factors, got {tuple(shift.shape)}"
        )
    shift = shift.to(factors.device)
    attempts = [
        _inverse_attempt(piece, part, factors.dtype)
        for piece, part in zip(_pieces(factors), _pieces(shift), strict=True)
    ]
    inverse = torch.cat([a[0] for a in attempts])
    codes: list[int] = torch.cat([a[1] for a in attempts]).tolist()
    reasons = [_REASONS.get(code, "") for code in codes]
    for index, code in enumerate(codes):
        if code < _FAILED:
            continue
        one = slice(index, index + 1)
        found, reasons[index] = _inverse_retry(factors[one], shift[one])
        if found is not None:
            codes[index] = _OK
            inverse[index] = found[0]
    return InverseBasis(inverse), _flags(codes, factors), reasons


def _eigen_attempt(factors: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """One attempt in the dtype of ``factors``: (vectors, values, mean), code ``[b]``."""
    ready = _normalise(factors)
    values, vectors = _eigh(ready.matrices)
    code = _first(ready.code, _eigen_code(ready.matrices, vectors, values))
    trivial = ready.zero | (code != _OK)
    scale = ready.scale.to(factors.dtype)
    values = (values.clamp(min=0) * scale[:, None]).clamp(max=torch.finfo(factors.dtype).max)
    values.masked_fill_(trivial[:, None], 1.0)
    return (_identity_(vectors, trivial), values, scale.masked_fill_(trivial, 1.0)), code


def _eigen_retry(factor: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor] | None, str]:
    """Retries one ``[1, n, n]`` factor in fp64: the basis or None, and what happened."""
    note = ""
    for device in _retry_devices(factor):
        (vectors, values, mean), code = _eigen_attempt(factor.to(device, torch.float64))
        note = _REASONS.get(int(code), "")
        if int(code) == _OK:
            largest = torch.finfo(factor.dtype).max
            found = (vectors.to(factor), values.clamp(max=largest).to(factor), mean.to(factor))
            return found, f"solved in float64 on {device}"
        if int(code) == _INDEFINITE_CODE:  # the data's fault: another solver finds the same
            break
    return None, note + _describe(factor)


def _inverse_attempt(
    factors: Tensor, shift: Tensor, dtype: torch.dtype, boost: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One attempt by Cholesky in the dtype of ``factors``: inverse in ``dtype``, code ``[b]``."""
    ready = _normalise(factors)
    relative, shift_code = _relative_shift(ready, shift * boost)
    shifted = ready.matrices
    shifted.diagonal(dim1=-2, dim2=-1).add_(relative.to(factors.dtype)[:, None])
    triangle, info = torch.linalg.cholesky_ex(shifted)
    # cholesky_inverse raises on a zero diagonal, which is what a failed element may hold.
    inverse = torch.cholesky_inverse(_identity_(triangle, info != 0))
    if inverse.device.type != "cpu":
        # There it is a solve with the identity; LAPACK's is mirrored from one triangle.
        inverse = _symmetric(inverse)
    probe = _probe(inverse)
    residual = _apply(shifted, _apply(inverse, probe)) - probe
    good = (info == 0) & (residual.norm(dim=-1) <= _INVERSE_TOLERANCE[factors.dtype])
    return _finish_inverse(ready, inverse, good, shift_code, dtype)


def _clamped_attempt(factors: Tensor, shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The last rung: inverse in ``dtype`` from eigenvalues clamped at 0, and code ``[b]``."""
    ready = _normalise(factors)
    relative, shift_code = _relative_shift(ready, shift)
    values, vectors = _eigh(ready.matrices)
    code = _first(shift_code, _eigen_code(ready.matrices, vectors, values))
    damped = values.clamp(min=0) + relative[:, None]
    inverse = _symmetric((vectors / damped[:, None, :]) @ vectors.mT)
    good = torch.ones_like(code, dtype=torch.bool)
    return _finish_inverse(ready, inverse, good, code, dtype)


def _finish_inverse(
    ready: _Normalised, inverse: Tensor, good: Tensor, code: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scales back, checks what is left in ``dtype``, and puts the identity where it belongs."""
    inverse = inverse.div_(ready.scale.to(inverse.dtype)[:, None, None]).to(dtype)
    good = good & _largest(inverse).isfinite()
    code = _first(ready.code, code, torch.where(good | ready.zero, _OK, _FAILED))
    return _identity_(inverse, ready.zero | (code != _OK)), code


def _inverse_retry(factor: Tensor, shift: Tensor) -> tuple[Tensor | None, str]:
    """Climbs the fp64 rungs for one ``[1, n, n]`` factor: inverse or None, and what happened."""
    note = ""
    for device in _retry_devices(factor):
        wide, moved = factor.to(device, torch.float64), shift.to(device, torch.float64)
        for boost in _BOOSTS:
            inverse, code = _inverse_attempt(wide, moved, factor.dtype, boost)
            if int(code) == _OK:
                text = f"solved in float64 on {device}"
                text += f" with {boost:g} times the shift" if boost > 1 else ""
                return inverse.to(factor), text
        inverse, code = _clamped_attempt(wide, moved, factor.dtype)
        note = _REASONS.get(int(code), "")
        if int(code) == _OK:
            return inverse.to(factor), f"solved in float64 on {device} with clamped eigenvalues"
        if int(code) == _INDEFINITE_CODE:  # the data's fault: another solver finds the same
            break
    return None, note + _describe(factor)


def _normalise(factors: Tensor) -> _Normalised:
    """Divides each factor by the mean of its diagonal; the identity replaces unusable ones."""
    largest = _largest(factors)
    finite, zero = largest.isfinite(), largest == 0
    # fp64: the trace of 1e+36 entries overflows fp32 from n = 341 on.
    mean = factors.diagonal(dim1=-2, dim2=-1).double().mean(-1)
    code = torch.where(finite, torch.where(zero | (mean > 0), _OK, _TRACE), _NONFINITE)
    usable = (code == _OK) & ~zero
    limits = torch.finfo(factors.dtype)
    scale = torch.where(usable, mean, torch.ones_like(mean)).clamp(limits.tiny, limits.max)
    matrices = factors / scale.to(factors.dtype)[:, None, None]
    return _Normalised(_identity_(matrices, ~usable), scale, zero, code)


def _relative_shift(ready: _Normalised, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Shift in units of the scale, 1 where it is unusable, and the code ``[b]`` that says so."""
    valid = shift.isfinite() & (shift >= 0)
    code = torch.where(valid | ready.zero, _OK, _SHIFT)
    relative = shift.double() / ready.scale
    return torch.where(valid, relative, torch.ones_like(relative)), code


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh`` giving NaN, not an exception, for elements that do not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if matrices.shape[0] == 1:
            return torch.full_like(matrices[..., 0], torch.nan), torch.full_like(
                matrices, torch.nan
            )
    # One bad element discards the batched result of all the others.
    singles = [_eigh(matrices[i : i + 1]) for i in range(matrices.shape[0])]
    return torch.cat([s[0] for s in singles]), torch.cat([s[1] for s in singles])


def _eigen_code(matrices: Tensor, vectors: Tensor, values: Tensor) -> Tensor:
    """Checks decompositions of normalised matrices; NaN fails every comparison. Code ``[b]``."""
    tolerance = _EIGEN_TOLERANCE[matrices.dtype]
    size = matrices.shape[-1]
    product = vectors.mT @ vectors
    product.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    probe = _probe(matrices)
    rebuilt = _apply(vectors, values * _apply(vectors.mT, probe))
    residual = (_apply(matrices, probe) - rebuilt).norm(dim=-1)
    trace = values.double().sum(-1)
    largest = values.abs().amax(-1)
    solved = (
        (product.abs().flatten(1).amax(1) <= tolerance)
        & (residual <= tolerance * largest)
        & ((trace - size).abs() <= tolerance * size)
    )
    definite = values.amin(-1) >= _INDEFINITE * values.amax(-1)
    code: Tensor = torch.where(solved, torch.where(definite, _OK, _INDEFINITE_CODE), _FAILED)
    return code


def _probe(like: Tensor) -> Tensor:
    """A fixed unit vector ``[n]`` with a flat spectrum (a chirp), so that no direction hides."""
    index = torch.arange(like.shape[-1], dtype=torch.float64, device=like.device)
    wave = torch.cos(0.7 * index.square())
    return wave.div(torch.linalg.vector_norm(wave)).to(like.dtype)


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Batched matrix times vector without a GEMM, which TF32 would make too coarse for a check."""
    result: Tensor = (matrices * vectors.unsqueeze(-2)).sum(-1)
    return result


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mT) * 0.5


def _largest(matrices: Tensor) -> Tensor:
    """Largest magnitude of each matrix; NaN or Inf if any element is."""
    # The maximum norm says the same, but on the CPU it takes twenty times as long.
    return torch.maximum(matrices.amax(dim=(-2, -1)), -matrices.amin(dim=(-2, -1)))


def _identity_(matrices: Tensor, where: Tensor) -> Tensor:
    """Overwrites the chosen matrices of a batch with the identity, in place and without a sync."""
    matrices.masked_fill_(where[:, None, None], 0.0)
    matrices.diagonal(dim1=-2, dim2=-1).masked_fill_(where[:, None], 1.0)
    return matrices


def _first(*codes: Tensor) -> Tensor:
    """The first code of each element that is not ok."""
    result = codes[0]
    for code in codes[1:]:
        result = torch.where(result == _OK, code, result)
    return result


def _pieces(batch: Tensor) -> tuple[Tensor, ...]:
    if batch.device.type != "cpu" or batch.shape[0] < 2:
        return (batch,)
    return tuple(batch[i : i + 1] for i in range(batch.shape[0]))


def _retry_devices(factor: Tensor) -> Iterator[torch.device]:
    yield factor.device
    if factor.device.type != "cpu":
        yield torch.device("cpu")


def _flags(codes: list[int], factors: Tensor) -> Tensor:
    return torch.tensor([code == _OK for code in codes], dtype=torch.bool, device=factors.device)


def _describe(factor: Tensor) -> str:
    diagonal = factor[0].diagonal().double()
    return (
        f" (also in float64; n={factor.shape[-1]}, diagonal mean {float(diagonal.mean()):.3g}, "
        f"min {float(diagonal.min()):.3g}, max {float(diagonal.max()):.3g})"
    )


def _check(factors: Tensor) -> None:
    if factors.dim() != 3 or factors.shape[1] != factors.shape[2] or factors.shape[1] == 0:
        raise ValueError(f"expected factors of shape [b, n, n], got {tuple(factors.shape)}")
    if factors.dtype not in _EIGEN_TOLERANCE:
        raise ValueError(f"factors must be float32 or float64, got {factors.dtype}")
