"""Measurements: what a round's time and bytes go to."""

from specdiff_dist.bench.round_split import RoundSplit, split_rounds

__all__ = ["RoundSplit", "split_rounds"]
