"""Whether one way of drafting pays: by what rounds that drafted so came to, with looks while it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log2, sqrt

from specdiff_dist.core.costs import OnlineMean

MIN_ASKED = 8.0  # rounds that drafted so, before they say more than calibration does
MIN_COPIED = 64.0  # rounds that copied: an answer's first rounds have little to copy
MIN_GAIN = 1.05  # over plain rounds: some costs nobody measures, as the router's time, and features that travel
MEMORY = 0.995  # of tokens per round, about the last 200: they scatter more than what is to be told apart
LOOK_MEMORY = 0.95  # while it does not pay: looks are few, and are there to tell of a change
PROBE_EVERY = 16  # forwards without it before a first look at whether it pays again; doubled after each look
PROBE_AT_LEAST_EVERY = 256
COPY_AT_LEAST_EVERY = 64
TELL_EVERY = 8  # sessions, while looks have long found that it does not pay: so many of them know of it


@dataclass(slots=True)
class AskedRounds:
    """What rounds came to that drafted in this way, whatever it brought: it may have nothing, and what it has is verified
    only where its confidences are high, so that the mean acceptance of verified tokens says too much about the next time.

    It is believed to pay until there are more than doubts, and then not until it does again: the gain looked for is smaller
    than the scatter of a hundred rounds, and giving up costs more than a few rounds too many.
    """

    min_rounds: float = MIN_ASKED
    weight: float = 0.0  # rounds
    mean_tokens: float = 0.0  # committed per round
    var_tokens: float = 0.0
    seconds: OnlineMean = field(default_factory=lambda: OnlineMean(0.0))
    is_paying: bool = True

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One round: the tokens it committed, and what it took from everybody."""
        self.weight = (MEMORY if self.is_paying else LOOK_MEMORY) * self.weight + 1.0
        share, off = 1.0 / self.weight, num_tokens - self.mean_tokens
        self.mean_tokens += share * off
        self.var_tokens = (1.0 - share) * (self.var_tokens + share * off * off)
        self.seconds.observe(seconds)

    def pays(self, plain_s: float) -> bool | None:
        """Against rounds of one token that take `plain_s` seconds; None: not enough was seen to tell."""
        if self.weight < self.min_rounds and self.is_paying:
            return None
        doubt = sqrt(self.var_tokens / self.weight) if self.is_paying else 0.0
        self.is_paying = (self.mean_tokens + doubt) * plain_s > MIN_GAIN * self.seconds.mean
        return self.is_paying


@dataclass(slots=True)
class Asking:
    """One way of drafting: the drafter's model, or copying. Shared by the sessions of a drafter-verifier pair.

    Rounds without it are counted over sessions: short answers alone would never look whether it pays again. Where many
    sessions share a forward a look lengthens everybody's round, so it comes after so many forwards, not rounds; and ever more
    rarely while it keeps finding the same.
    """

    rounds: AskedRounds = field(default_factory=AskedRounds)
    longest_period: int = PROBE_AT_LEAST_EVERY  # forwards between looks
    since_look: int = 0  # rounds
    period: int = PROBE_EVERY
    num_sessions: int = 0  # that began while it had long not paid

    def is_due(self, plain_s: float, num_sharers: float, *, expected: Callable[[], bool]) -> bool:
        """Whether this round drafts so. `expected`: what to believe before rounds tell, asked for only then."""
        pays = self.rounds.pays(plain_s)
        if expected() if pays is None else pays:
            self.period = PROBE_EVERY
            return True
        if self.since_look < self.period * num_sharers - 1:
            return False
        self.since_look, self.period = 0, min(2 * self.period, self.longest_period)
        return True

    def is_told(self) -> bool:
        """Whether a session that begins now is to know of it. Being ready for it costs something even where it is never used (a
        lease, the features of every token), so while it has long not paid only some sessions look again."""
        if self.period < self.longest_period:
            return True
        self.num_sessions += 1
        return self.num_sessions % TELL_EVERY == 0


class Askings:
    """One way of drafting, judged apart for every crowd: alone a further token is nearly free, among many it costs as much as a
    plain one, and who has learned the one has not forgotten the other when the number of sessions changes."""

    def __init__(self, *, copies: bool = False) -> None:
        """`copies`: they cost next to nothing to look for."""
        self._copies = copies
        self._crowds: dict[int, Asking] = {}

    def at(self, num_sharers: float) -> Asking:
        """Among so many calls per forward, by powers of two."""
        crowd = round(log2(max(num_sharers, 1.0)))
        asking = self._crowds.get(crowd)
        if asking is None:
            asking = self._crowds[crowd] = (
                Asking(AskedRounds(min_rounds=MIN_COPIED), longest_period=COPY_AT_LEAST_EVERY)
                if self._copies
                else Asking()
            )
        return asking
