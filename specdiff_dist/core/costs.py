"""What calls cost right now: lines fitted online to the times that replicas report."""

from __future__ import annotations

from dataclasses import dataclass, field

PRIOR_SLOPE = 0.02  # of the mean cost per token, until several sizes have been seen
PRIOR_WEIGHT = 1e-3  # of the spread of sizes: vanishes as soon as sizes vary
MIN_ASKED = 8.0  # rounds that asked the drafter, before they say more than calibration does
MIN_GAIN = (
    1.02  # of rounds that ask over plain ones: they have costs that nobody measures, such as features that travel
)
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


@dataclass(slots=True)
class OnlineMean:
    """Exponentially weighted mean."""

    mean: float
    weight: float = 0.0

    def observe(self, value: float) -> None:
        self.weight = DECAY * self.weight + 1.0
        self.mean += (value - self.mean) / self.weight


@dataclass(slots=True)
class AskedRounds:
    """What rounds came to that asked the drafter, whatever it answered: it may have nothing, and what it has is verified only
    where its confidences are high, so that the mean acceptance of verified tokens says too much about the next ask."""

    tokens: OnlineMean = field(default_factory=lambda: OnlineMean(0.0))
    seconds: OnlineMean = field(default_factory=lambda: OnlineMean(0.0))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One round: the tokens it committed, and what it took from everybody."""
        self.tokens.observe(num_tokens)
        self.seconds.observe(seconds)

    def pays(self, plain_s: float) -> bool | None:
        """Against rounds of one token that take `plain_s` seconds; None: not enough was seen to tell."""
        if self.seconds.weight < MIN_ASKED:
            return None
        return self.tokens.mean * plain_s > MIN_GAIN * self.seconds.mean


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

    forward: OnlineLine = field(default_factory=OnlineLine)  # seconds, by tokens of all calls
    rest: OnlineMean = field(default_factory=lambda: OnlineMean(0.0))  # seconds of a call beside its forward
    sharers: OnlineMean = field(default_factory=lambda: OnlineMean(1.0))  # calls per forward

    def observe(self, num_tokens: int, wall_s: float, shared: SharedForward | None) -> None:
        """One call of `num_tokens` tokens; without `shared` all its time goes by its own tokens."""
        if shared is None:
            self.forward.observe(num_tokens, wall_s)
            return
        self.forward.observe(shared.num_tokens, shared.seconds)
        self.rest.observe(max(wall_s - shared.seconds - shared.queue_s, 0.0))
        self.sharers.observe(shared.num_calls)

    @property
    def is_known(self) -> bool:
        return self.forward.is_known

    @property
    def num_sharers(self) -> float:
        """Calls per forward, at least 1."""
        return max(self.sharers.mean, 1.0)

    def __call__(self, num_tokens: float) -> float:
        return (self.rest.mean + self.forward(self.num_sharers * num_tokens)) / self.num_sharers


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
