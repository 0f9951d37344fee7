"""Linear least squares one sample at a time, with non-negative coefficients: what step times and batcher calls are learned by."""

from __future__ import annotations

from collections.abc import Sequence

_NOISE = 0.05  # deviation of a step from what can be predicted at all, relative: the unit of covariances
_PRIOR = 100.0  # variance of each coefficient before anything is known
_CLIP = 4.0
_FEW = 16  # samples, while there are no more of which a unit of results may still change
_TYPICAL = 4.0  # times what the first result explains, up to which it was a usual one


class RecursiveLeastSquares:
    """Non-negative coefficients of ``n`` inputs, all of them expected to be of order one.

    Each sample is divided by its own result, so that relative errors are what is made small; a stall ten times too long
    then speaks with a tenth of the weight. ``forgetting`` is the weight that old knowledge keeps in the direction of each new
    input. A relative residual counts for at most four times the usual one (a running mean, at least 1%), and a result for no less
    than half of what is predicted: a sample of next to nothing would weigh more than all others.
    """

    __slots__ = ("_beyond", "_cov", "_forgetting", "_free", "_info", "_spread", "coefficients", "samples")

    def __init__(self, n: int, *, forgetting: float = 0.98) -> None:
        self.coefficients = [0.0] * n
        self._free = [0.0] * n  # the same without the bound at zero: the recursion needs it undisturbed
        self.samples = 0
        self._beyond = 0  # results far beyond what the unit explains
        self._spread = 0.0  # running mean of relative residuals, as the free coefficients have them
        self._forgetting = forgetting
        self._cov = [[_PRIOR if i == j else 0.0 for j in range(n)] for i in range(n)]
        self._info = [[1 / _PRIOR if i == j else 0.0 for j in range(n)] for i in range(n)]

    def predict(self, x: Sequence[float]) -> float:
        if len(x) == 3:  # written out: what is asked most, several times for each step
            (a, b, c), (u, v, w) = self.coefficients, x
            return a * u + b * v + c * w
        if len(x) == 5:
            (a, b, c, d, e), (u, v, w, y, z) = self.coefficients, x
            return a * u + b * v + c * w + d * y + e * z
        return sum(map(float.__mul__, self.coefficients, x))

    def set_prior(
        self, coefficients: Sequence[float], covariance: Sequence[Sequence[float]], prior_error: float
    ) -> None:
        """Begin at ``coefficients``, which may be off by about ``prior_error`` all together, and by a fifth of that each.

        ``covariance`` is that of relative residuals of variance 1; what it says of how they go together is kept.
        """
        scale = (prior_error / _NOISE) ** 2
        own = [0.04 * scale * max(c * c, 1e-4) for c in coefficients]
        self._cov = [
            [covariance[i][j] + scale * a * b + (own[i] if i == j else 0.0) for j, b in enumerate(coefficients)]
            for i, a in enumerate(coefficients)
        ]
        self._info = _inverse(self._cov)
        self.coefficients, self._free = list(coefficients), list(coefficients)
        self.samples = 4 * len(coefficients)
        self._spread = prior_error

    def rescale(self, factor: float) -> None:
        """What was learned is of results 1/``factor`` times, above 0, what they are now, as if their unit had been another."""
        square = factor * factor
        self.coefficients = [factor * c for c in self.coefficients]
        self._free = [factor * c for c in self._free]
        self._cov = [[square * v for v in row] for row in self._cov]
        self._info = [[v / square for v in row] for row in self._info]

    def wants_unit(self, unit: float, y: float, scale: float) -> bool:
        """Whether ``y`` should be the unit of results in place of ``unit``, the first one of all (0: there was none), with
        nothing learned before. ``scale``: the most that any input of ``y`` is of that of the first.

        With coefficients of at least 0, ``y`` is no more than ``unit`` times that. Where it is far more, as more than half of the
        results since are, the first was no usual result: coefficients in units of it are of order one hundred, and no later
        sample weighs enough beside it to find them. After a few samples it stays.
        """
        if not unit or self.samples >= _FEW:
            return not unit
        beyond = y > _TYPICAL * unit * max(1.0, scale)
        self._beyond += beyond
        return beyond and 2 * self._beyond > self.samples

    def covariance(self) -> list[list[float]]:
        return [row[:] for row in self._cov]

    def update(self, x: Sequence[float], y: float) -> float:
        """Learn that inputs ``x`` gave ``y`` > 0; returns the relative residual before, (y − predicted) / y."""
        x = [v / y for v in x]
        residual = 1.0 - sum(map(float.__mul__, self._free, x))
        settled = self.samples > 2 * len(x)
        if settled and residual < -1.0 and (half := self.predict(x) / 2) > 1.0:
            x = [v / half for v in x]
            residual = 1.0 - sum(map(float.__mul__, self._free, x))
        px, gain_of = self._absorb_three(*x) if len(x) == 3 else self._absorb(x)
        step = residual
        if settled:
            most = _CLIP * max(self._spread, 0.01)
            step = min(max(residual, -most), most)
        self.samples += 1
        weight = max(0.05, 1 / self.samples)
        self._spread += weight * (min(abs(residual), 1.0) - self._spread)
        scale = step / gain_of
        self._free = [c + scale * p for c, p in zip(self._free, px)]  # noqa: B905  # as long as each other, by the above
        self.coefficients = self._free[:] if min(self._free) >= 0 else self._non_negative()
        return residual

    def _absorb(self, x: list[float]) -> tuple[list[float], float]:
        """Take the input ``x`` into covariance and information; returns covariance·x and 1 + x·covariance·x, both after
        forgetting and before learning.

        Forgets in the direction of x only: covariance grows by a multiple of x·xᵀ, information shrinks by the matching term.
        Where hardly anything is known there is nothing to forget.
        """
        mul = float.__mul__
        cov, info, keep = self._cov, self._info, self._forgetting
        rx = [sum(map(mul, row, x)) for row in info]
        known = sum(map(mul, rx, x))
        px = [sum(map(mul, row, x)) for row in cov]
        forget = known > 1.0
        if forget:
            grow = (1 - keep) / (keep * known)
            shrink = (1 - keep) / known
            widen = grow * sum(map(mul, x, x))
            px = [p + widen * v for p, v in zip(px, x, strict=True)]
        gain_of = 1.0 + sum(map(mul, px, x))
        for i, (xi, pi) in enumerate(zip(x, px, strict=True)):  # inside, strict would be a quarter of the time
            share = pi / gain_of
            if forget:
                g, s = grow * xi, shrink * rx[i]
                cov[i] = [c + g * xj - share * pj for c, xj, pj in zip(cov[i], x, px)]  # noqa: B905
                info[i] = [c - s * rj + xi * xj for c, rj, xj in zip(info[i], rx, x)]  # noqa: B905
            else:
                cov[i] = [c - share * pj for c, pj in zip(cov[i], px)]  # noqa: B905
                info[i] = [c + xi * xj for c, xj in zip(info[i], x)]  # noqa: B905
        return px, gain_of

    def _absorb_three(self, x: float, y: float, z: float) -> tuple[list[float], float]:
        """:meth:`_absorb` of three inputs, written out: most steps hold decodes alone, and every one of them comes by here."""
        (ixx, ixy, ixz), (_, iyy, iyz), (_, _, izz) = self._info
        (cxx, cxy, cxz), (_, cyy, cyz), (_, _, czz) = self._cov
        rx, ry, rz = ixx * x + ixy * y + ixz * z, ixy * x + iyy * y + iyz * z, ixz * x + iyz * y + izz * z
        px, py, pz = cxx * x + cxy * y + cxz * z, cxy * x + cyy * y + cyz * z, cxz * x + cyz * y + czz * z
        known = rx * x + ry * y + rz * z
        shrink = grow = 0.0
        if known > 1.0:
            keep = self._forgetting
            shrink = (1 - keep) / known
            grow = shrink / keep
            widen = grow * (x * x + y * y + z * z)
            px, py, pz = px + widen * x, py + widen * y, pz + widen * z
        gain_of = 1.0 + (px * x + py * y + pz * z)
        gx, gy, gz = grow * x, grow * y, grow * z
        sx, sy, sz = px / gain_of, py / gain_of, pz / gain_of
        cxy, cxz, cyz = cxy + gx * y - sx * py, cxz + gx * z - sx * pz, cyz + gy * z - sy * pz
        self._cov = [
            [cxx + gx * x - sx * px, cxy, cxz], [cxy, cyy + gy * y - sy * py, cyz], [cxz, cyz, czz + gz * z - sz * pz]
        ]  # fmt: skip
        sx, sy, sz = shrink * rx, shrink * ry, shrink * rz
        ixy, ixz, iyz = ixy - sx * ry + x * y, ixz - sx * rz + x * z, iyz - sy * rz + y * z
        self._info = [
            [ixx - sx * rx + x * x, ixy, ixz], [ixy, iyy - sy * ry + y * y, iyz], [ixz, iyz, izz - sz * rz + z * z]
        ]  # fmt: skip
        return [px, py, pz], gain_of

    def _non_negative(self) -> list[float]:
        """The non-negative coefficients nearest to the free ones in the metric of what is known.

        Coordinate descent on the non-negative least-squares problem, a few sweeps from where the last one ended.
        """
        mul = float.__mul__
        info, found = self._info, self.coefficients[:]
        wanted = [sum(map(mul, row, self._free)) for row in info]
        for _ in range(4):
            moved = 0.0
            for i, row in enumerate(info):
                before = found[i]
                found[i] = after = max(0.0, before + (wanted[i] - sum(map(mul, row, found))) / row[i])
                moved = max(moved, abs(after - before))
            if moved < 1e-5 * max(found):  # far below what a step can teach
                break
        return found


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of a symmetric positive definite matrix: Gauss–Jordan, which needs no pivoting there."""
    n = len(matrix)
    rows = [[*map(float, row), *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i, row in enumerate(rows):
        rows[i] = row = [v / row[i] for v in row]
        for j, other in enumerate(rows):
            if j != i:
                rows[j] = [v - other[i] * w for v, w in zip(other, row, strict=True)]
    return [row[n:] for row in rows]
