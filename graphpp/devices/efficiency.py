"""Which share of a device's peak its kernels reach, by their sizes; and what values such figures may have."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log

from graphpp.arguments import NUMBER, Accepted, one_of, require
from graphpp.errors import ScheduleError

PEAK = Accepted("a positive number", lambda value: NUMBER.accepts(value) and 0 < value < inf)  # type: ignore[operator]
FROM_ZERO = Accepted("a number from 0", lambda value: NUMBER.accepts(value) and 0 <= value < inf)  # type: ignore[operator]
SHARE = Accepted("a number above 0 and up to 1", lambda value: NUMBER.accepts(value) and 0 < value <= 1)  # type: ignore[operator]
_POINTS = Accepted(
    "a sequence of (size, share) with ascending sizes above 0 and shares above 0 and up to 1",
    lambda value: isinstance(value, list | tuple) and _is_curve(value),
)


def _is_curve(points: object) -> bool:
    try:
        sizes = [size for size, _ in points]  # type: ignore[attr-defined]
        shares = [share for _, share in points]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    fine = bool(sizes) and all(map(PEAK.accepts, sizes)) and all(map(SHARE.accepts, shares))
    return fine and all(one < other for one, other in pairwise(sizes))


@dataclass(frozen=True)
class Curve:
    """A fraction as a function of a size: linear between its points over the logarithm of the size, constant outside.

    Raises `ScheduleError` for points that are no curve.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        require(ScheduleError, "points", _POINTS, self.points)

    def at(self, size: float) -> float:
        after = bisect_right(self.points, (size, inf))
        if after in (0, len(self.points)):
            return self.points[min(after, len(self.points) - 1)][1]
        (low, share), (high, other) = self.points[after - 1 : after + 1]
        return share + (other - share) * log(size / low) / log(high / low)

    def times(self, factor: float) -> Curve:
        """The curve with all fractions multiplied, at most 1."""
        return Curve(tuple((size, min(1.0, share * factor)) for size, share in self.points))


@dataclass(frozen=True)
class Efficiency:
    """The fractions of peak that kernels reach, launch time not counted.

    Of peak FLOP/s: `product` by the FLOPs of a matrix product, multiplied by `narrow` of the smallest of its sizes m, n, k;
    `attention` and `attention_backward` by the FLOPs of a fused attention (causal: half); `grouped`, one kernel for products of
    several experts, by the FLOPs of one of them. Of memory bandwidth: `traffic` by bytes.
    """

    # cuBLAS in bfloat16 on an H100 SXM (published, not measured here): 4096 x 8192 x 8192 (5.5e11 FLOPs) at about 650
    # of 989 TFLOP/s, 4096 ** 3 at 620, 2048 ** 3 at 530, 1024 ** 3 at 300.
    product: Curve = Curve(((1e8, 0.05), (2e9, 0.30), (1.7e10, 0.54), (1.4e11, 0.63), (5.5e11, 0.66)))
    # a tile has 64 to 128 rows and columns: smaller sizes leave a part of it empty
    narrow: Curve = Curve(((8, 0.12), (32, 0.40), (64, 0.65), (128, 0.85), (256, 0.95), (512, 1.0)))
    # FlashAttention 2 and 3, cuDNN, H100, causal, 2k to 8k tokens: 350 to 450 TFLOP/s forward, 300 to 400 backward.
    attention: Curve = Curve(((1e8, 0.05), (1e9, 0.15), (1e10, 0.30), (1e11, 0.40)))
    attention_backward: Curve = Curve(((1e8, 0.05), (1e9, 0.13), (1e10, 0.27), (1e11, 0.36)))
    # pointwise kernels and copies: 80 to 90 % of the bandwidth from 100 MB on; small ones do not fill the device
    traffic: Curve = Curve(((1e5, 0.10), (1e6, 0.35), (1e7, 0.70), (1e8, 0.85), (1e9, 0.90)))
    # Published kernels in bfloat16 on H100 and H200: CUTLASS, 128 experts of 512 rows x 2048 x 1536, at 160 of 989 TFLOP/s
    # (tgale96/grouped_gemm pull request 37). torch._grouped_mm: 2048 rows x 2048 x 1536 and back, with their permutations at
    # 242, without them at about 290 (ByteDance-Seed/VeOmni 460); 512 uneven rows x 5120 x 8192 at 535 (pytorch/ao 2490);
    # 128,000 rows x 7168 x 7168 at 705 (pytorch/pytorch 156203).
    grouped: Curve = Curve(((3.2e9, 0.16), (1e10, 0.29), (4.3e10, 0.54), (1.3e13, 0.71)))

    def __post_init__(self) -> None:
        for name in ("product", "narrow", "attention", "attention_backward", "traffic", "grouped"):
            require(ScheduleError, f"efficiency.{name}", one_of(Curve, takes="a Curve"), getattr(self, name))
