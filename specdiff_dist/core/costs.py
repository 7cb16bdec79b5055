"""What calls cost right now: curves fitted online to the times that replicas report."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import log2

import numpy as np

PRIOR_SLOPE = 0.02  # of the mean cost per token, until several sizes have been seen
PRIOR_WEIGHT = 1e-3  # of the spread of sizes: vanishes as soon as sizes vary
DECAY = 0.98  # about the last 50 calls
EXACT_SIZES = 16  # each with a mean of its own; larger sizes share one by fours to an octave
SIZE_MEMORY = 200.0  # calls that a size's mean remembers
SIZE_DECAY = 0.999  # of what a size's mean is worth, per call of any size: one bad moment is not believed for ever
SPEED_MEMORY = 20.0  # calls
PLANE_DECAY = 0.995  # about the last 200 calls
PLANE_LEAN = 0.002
SOLVE_EVERY = 16  # calls: it changes slowly, and solving takes a tenth of a round's arithmetic
MIN_SHARED = 8.0  # calls that shared a forward, before they say more than what it takes alone
SHORT_CALL = 24.0  # tokens of a call on average: forwards with more carry pieces of prompts, and say little of rounds
LINE_STRENGTH = 1.0  # calls that the line is worth beside a size's own mean


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


@dataclass(slots=True)
class OnlinePlane:
    """Least squares seconds = base + a · tokens + b · calls over the last shared forwards.

    In plain decoding tokens and calls are the same number, so what a further token of a call costs cannot be seen there: the
    doubt goes to `a` (b leans on 0), and drafting in a crowd has to be seen to be cheap before it is believed to be.
    """

    weight: float = 0.0
    _normal: list[float] = field(default_factory=lambda: [0.0] * 9)
    """Σ over (1, tokens, calls) pairs: 11, 1t, 1c, tt, tc, cc, and with seconds: 1y, ty, cy."""
    _solution: tuple[float, float, float] | None = None
    _age: int = 0  # observations since it was made

    def observe(self, num_tokens: float, num_calls: float, seconds: float) -> None:
        """One call's shared forward."""
        if seconds <= 0.0:
            return
        t, c, y = num_tokens, num_calls, seconds
        self.weight = PLANE_DECAY * self.weight + 1.0
        self._normal = [
            PLANE_DECAY * old + new
            for old, new in zip(self._normal, (1.0, t, c, t * t, t * c, c * c, y, t * y, c * y), strict=True)
        ]
        self._age += 1

    def __call__(self, num_tokens: float, num_calls: float) -> float:
        solution = self._solution
        if solution is None or self._age >= min(SOLVE_EVERY, self.weight):
            solution = self._solve()
        base, a, b = solution
        return base + a * num_tokens + b * num_calls

    def _solve(self) -> tuple[float, float, float]:
        """None of the three is negative: where one would be, it is 0 and the others are fitted without it."""
        normal = np.array(self._normal)
        matrix, right = normal[[[0, 1, 2], [1, 3, 4], [2, 4, 5]]], normal[6:]
        lean = np.zeros((3, 3))
        lean[2, 2] = PLANE_LEAN * matrix[2, 2]  # of the price of a call: to 0
        lean[0, 0] = 1e-6 * matrix[0, 0]  # one size alone tells no base
        kept = [0, 1, 2]
        while True:
            part = np.linalg.solve((matrix + lean)[np.ix_(kept, kept)] + 1e-12 * np.eye(len(kept)), right[kept])
            if len(kept) == 1 or part.min() >= 0.0:
                break
            kept.pop(int(part.argmin()))
        solution = np.zeros(3)
        solution[kept] = part
        self._solution = float(solution[0]), float(solution[1]), float(solution[2])
        self._age = 0
        return self._solution


@dataclass(slots=True)
class OnlineMean:
    """Exponentially weighted mean."""

    mean: float
    weight: float = 0.0

    def observe(self, value: float) -> None:
        self.weight = DECAY * self.weight + 1.0
        self.mean += (value - self.mean) / self.weight


@dataclass(slots=True)
class _Size:
    """What forwards of about one size took, at speed 1."""

    weight: float
    mean_x: float
    mean_y: float


@dataclass(slots=True)
class OnlineCurve:
    """Seconds by size, with a mean for every size seen and straight lines between them.

    Not a line, because costs are staircases: a kernel works on some rows at a time, so that on our CPU kernels a second row is
    free and a fifth costs as much as two. Where the machine is faster or slower for a while it is so for all sizes: that is
    a factor of its own with a short memory, so that sizes can remember for long. Sizes seen rarely lean on the line.
    """

    line: OnlineLine = field(default_factory=OnlineLine)
    _sizes: dict[int, _Size] = field(default_factory=dict)
    _speed: float = 1.0
    _num_timed: float = 8.0  # calls that speed 1 is worth to begin with
    _points: tuple[list[float], list[float]] | None = None  # sizes ascending and their seconds; None: to be made anew

    def observe(self, x: float, y: float) -> None:
        """One call of size x ≥ 1 that took y seconds."""
        self.line.observe(x, y)
        self._points = None
        for size in self._sizes.values():
            size.weight *= SIZE_DECAY
        bucket = int(x) if x <= EXACT_SIZES else EXACT_SIZES + 1 + int(4.0 * log2(x / EXACT_SIZES))
        known = self._sizes.get(bucket)
        if known is None:
            self._sizes[bucket] = _Size(1.0, x, y / self._speed)
            return
        expected = known.mean_y * self.line(x) / max(self.line(known.mean_x), 1e-12)
        if expected > 0.0:
            self._num_timed = min(self._num_timed + 1.0, SPEED_MEMORY)
            self._speed += (y / expected - self._speed) / self._num_timed
        known.weight = min(known.weight + 1.0, SIZE_MEMORY)
        known.mean_x += (x - known.mean_x) / known.weight
        known.mean_y += (y / max(self._speed, 1e-3) - known.mean_y) / known.weight

    @property
    def is_known(self) -> bool:
        return self.line.is_known

    def __call__(self, x: float) -> float:
        """Seconds at size x."""
        xs, ys = self._points or self._make_points()
        at = bisect_left(xs, x)
        if at == len(xs):
            slope = self.line.slope if len(xs) < 2 else max(self.line.slope, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
            return ys[-1] + slope * (x - xs[-1])
        if at == 0:
            return ys[0] if x == xs[0] else min(self.line(x), ys[0])
        share = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
        return ys[at - 1] + share * (ys[at] - ys[at - 1])

    def _make_points(self) -> tuple[list[float], list[float]]:
        sizes = sorted(self._sizes.values(), key=lambda size: size.mean_x)
        xs, ys = [size.mean_x for size in sizes] or [1.0], []
        for size in sizes:
            own, lean = size.weight * self._speed * size.mean_y, LINE_STRENGTH * self.line(size.mean_x)
            ys.append((own + lean) / (size.weight + LINE_STRENGTH))
        self._points = xs, ys or [0.0]
        return self._points


@dataclass(frozen=True, slots=True)
class SharedForward:
    """What a replica says of the forward that a call took part in."""

    seconds: float
    num_tokens: int  # of all calls in it
    num_calls: int
    queue_s: float = 0.0  # that the call waited for earlier forwards to end


@dataclass(slots=True)
class SharedCost:
    """What a call takes from everybody: its share of the forward, were all that share it alike, and of what a call takes
    beside the model.

    Alone that is the call's wall-clock time. Among B it is (rest + forward(B · tokens)) / B: what is paid once is shared, what
    every token costs is not. What a call waits for the forwards of others is not its own cost: counted as what is paid once, it
    would make drafts look the cheaper the longer the queue is. A policy that looked at its own wall-clock time instead would find further tokens free, since
    they lengthen everybody's round, and speculation would cost a busy server more than it brings.
    """

    alone: OnlineCurve = field(default_factory=OnlineCurve)  # seconds of a forward that nobody shares
    shared: OnlinePlane = field(default_factory=OnlinePlane)  # of one that several do
    rest: OnlineMean = field(default_factory=lambda: OnlineMean(0.0))  # seconds of a call beside its forward
    sharers: OnlineMean = field(default_factory=lambda: OnlineMean(1.0))  # calls per forward

    def observe(self, num_tokens: int, wall_s: float, shared: SharedForward | None) -> None:
        """One call of `num_tokens` tokens; without `shared` all its time goes by its own tokens."""
        if shared is None:
            self.alone.observe(num_tokens, wall_s)
            return
        if shared.num_calls == 1:
            self.alone.observe(shared.num_tokens, shared.seconds)
        elif shared.num_tokens <= SHORT_CALL * shared.num_calls:
            self.shared.observe(shared.num_tokens, shared.num_calls, shared.seconds)
        self.rest.observe(max(wall_s - shared.seconds - shared.queue_s, 0.0))
        self.sharers.observe(shared.num_calls)

    @property
    def is_known(self) -> bool:
        return self.alone.is_known or self.shared.weight > 0.0

    @property
    def num_sharers(self) -> float:
        """Calls per forward, at least 1."""
        return max(self.sharers.mean, 1.0)

    def __call__(self, num_tokens: float) -> float:
        sharers = self.num_sharers
        if not self.alone.is_known:
            crowd = 1.0
        elif self.shared.weight < MIN_SHARED:
            crowd = 0.0
        else:
            crowd = min(sharers - 1.0, 1.0)
        forward_s = 0.0
        if crowd < 1.0:
            forward_s += (1.0 - crowd) * self.alone(sharers * num_tokens)
        if crowd > 0.0:
            forward_s += crowd * self.shared(sharers * num_tokens, sharers)
        return (self.rest.mean + forward_s) / sharers


@dataclass(slots=True)
class MeasuredCosts:
    """Seconds that a round takes from everybody; alone: wall clock at the caller, wire and queues included."""

    draft: SharedCost  # by tokens drafted in a call
    verification: SharedCost  # by tokens forwarded: the anchor and those submitted

    @staticmethod
    def unknown() -> MeasuredCosts:
        return MeasuredCosts(SharedCost(), SharedCost())

    @property
    def are_known(self) -> bool:
        return self.draft.is_known and self.verification.is_known

    def verify(self, length: float) -> float:
        """Of verifying `length` submitted tokens."""
        return self.verification(length + 1)

    def observe(
        self,
        num_drafted: int,
        draft_s: float,
        num_verified: int,
        verify_s: float,
        *,
        draft_shared: SharedForward | None = None,
        verify_shared: SharedForward | None = None,
    ) -> None:
        """Learns from one round without prefill: tokens and wall-clock seconds of both halves, and the forwards they
        shared."""
        if num_drafted:
            self.draft.observe(num_drafted, draft_s, draft_shared)
        self.verification.observe(num_verified + 1, verify_s, verify_shared)
