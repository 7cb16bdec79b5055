"""Counter-based uniforms: pure functions of their key, uniform, and never shared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from scipy import stats

from specdiff_dist.core.randomness import Purpose, fresh_seed, uniforms


def test_a_position_has_one_number_however_it_is_asked_for() -> None:
    whole = uniforms(7, Purpose.ACCEPT, 100, 32)
    for start, count in ((100, 1), (110, 5), (131, 1)):
        np.testing.assert_array_equal(uniforms(7, Purpose.ACCEPT, start, count), whole[start - 100 :][:count])


def test_keys_do_not_share_numbers() -> None:
    parts = [uniforms(seed, purpose, 0, 50, stream=stream, step=step) for seed in (0, 1, 2**63, -1)
             for purpose in Purpose for stream in (0, 1, 50) for step in (0, 1)]  # fmt: skip
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)


def test_the_numbers_are_those_of_a_fresh_philox() -> None:
    """Whatever was asked for before, in whatever thread."""
    key = np.array([5, 2**64 - 1], np.uint64)  # of -2**64 + 5
    counter = np.array([100, 9, 2, int(Purpose.DRAFT)], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(4 * 7)[::4]
    expected = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def asked() -> list[np.ndarray]:
        found = []
        for other in range(200):
            uniforms(other, Purpose.ACCEPT, other, other % 3)
            found.append(uniforms(5 - 2**64, Purpose.DRAFT, 100, 7, stream=9, step=2))
        return found

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(asked) for _ in range(4)]:
            assert all(np.array_equal(one, expected) for one in future.result())


def test_uniform() -> None:
    sample = uniforms(3, Purpose.TARGET, 0, 200_000)
    assert sample.min() >= 0.0 and sample.max() < 1.0
    assert stats.kstest(sample, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.01


def test_fresh_seeds_differ() -> None:
    assert len({fresh_seed() for _ in range(1000)}) == 1000
