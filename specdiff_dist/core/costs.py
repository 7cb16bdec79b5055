"""What calls cost right now: lines fitted online to the times that replicas report."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_SLOPE = 0.02  # of the mean cost per token, until several sizes have been seen
PRIOR_WEIGHT = 1e-3  # of the spread of sizes: vanishes as soon as sizes vary
DECAY = 0.98  # about the last 50 calls


@dataclass(slots=True)
class OnlineLine:
    """Exponentially weighted least squares y = intercept + slope·x, slope never negative."""

    weight: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    var_x: float = 0.0
    cov: float = 0.0

    def observe(self, x: float, y: float) -> None:
        """Adds one measurement (West's weighted update)."""
        self.weight = DECAY * self.weight + 1.0
        share = 1.0 / self.weight
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += share * dx
        self.mean_y += share * dy
        self.var_x = (1.0 - share) * (self.var_x + share * dx * dx)
        self.cov = (1.0 - share) * (self.cov + share * dx * dy)

    @property
    def is_known(self) -> bool:
        return self.mean_y > 0.0  # roles that tell no times leave the cost unknown

    @property
    def slope(self) -> float:
        prior = PRIOR_SLOPE * self.mean_y
        return max((self.cov + PRIOR_WEIGHT * prior) / (self.var_x + PRIOR_WEIGHT), 0.0)

    def __call__(self, x: float) -> float:
        """Cost at size x; never below a tenth of the mean, whatever an extrapolation says."""
        return max(self.mean_y + self.slope * (x - self.mean_x), 0.1 * self.mean_y)

    def up_to(self, size: int) -> list[float]:
        """Costs at the sizes 0 … `size`."""
        slope, lowest = self.slope, 0.1 * self.mean_y
        return [max(self.mean_y + slope * (x - self.mean_x), lowest) for x in range(size + 1)]


@dataclass(slots=True)
class MeasuredCosts:
    """Seconds, wall clock at the caller: wire and queues included."""

    draft: OnlineLine  # by tokens drafted in a call
    verify: OnlineLine  # by tokens submitted

    @staticmethod
    def unknown() -> MeasuredCosts:
        return MeasuredCosts(OnlineLine(), OnlineLine())

    @property
    def are_known(self) -> bool:
        return self.draft.is_known and self.verify.is_known

    def observe(self, num_drafted: int, draft_s: float, num_verified: int, verify_s: float) -> None:
        """Learns from one round without prefill: tokens and seconds of both halves."""
        if num_drafted:
            self.draft.observe(num_drafted, draft_s)
        self.verify.observe(num_verified, verify_s)
