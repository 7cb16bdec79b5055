"""Measurements: what a round's time and bytes go to."""

from specdiff_dist.bench.prompts import PROMPTS
from specdiff_dist.bench.round_split import RoundSplit, split_rounds
from specdiff_dist.bench.workload import PairSettings, Workload, rounds_in_process

__all__ = ["PROMPTS", "PairSettings", "RoundSplit", "Workload", "rounds_in_process", "split_rounds"]
