"""The generator gives the published numbers, however many are computed ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from distcollect.policy.splitmix import GOLDEN, STRIDE, SplitMixStreams

# The first outputs of splitmix64.c (Sebastiano Vigna, 2015), which implements SplitMix64, for two
# seeds.
PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
}


def first_state(seed: int) -> int:
    """splitmix64.c adds the increment before it computes a number, and this package after that."""
    return (seed + GOLDEN) % 2**64


@pytest.mark.parametrize("num_frames", [0, 1, 7, 600])
def test_published_numbers(num_frames: int) -> None:
    """Also where they were computed ahead."""
    for seed, expected in PUBLISHED.items():
        start = (first_state(seed) - num_frames * STRIDE) % 2**64
        streams = SplitMixStreams([3, start])
        for _ in range(num_frames):
            streams.bits((2, len(expected)))
            streams.next_frame()
        assert streams.bits((2, len(expected)))[1].tolist() == expected


def drawn(seeds: Sequence[int], counts: Sequence[int]) -> list[np.ndarray]:
    """``[n, count]`` for each frame; the numbers of a frame are drawn in two parts."""
    streams = SplitMixStreams(seeds)
    frames = []
    for count in counts:
        streams.next_frame()
        half = count // 2
        parts = [streams.bits((len(seeds), half)), streams.bits((len(seeds), count - half))]
        frames.append(np.concatenate(parts, -1))
    return frames


def test_numbers_depend_on_seed_frame_and_place_only() -> None:
    """Not on how many envs there are, or on how many numbers were drawn in other frames."""
    counts = [1, 1, 3, 5, 2, 0, 40, 9, 1, 0, 4, 4] * 60
    seeds = [2, 2**64 - 1, 9]
    together = drawn(seeds, counts)
    for row, seed in enumerate(seeds):
        alone = drawn([seed], counts)
        most = drawn([seed], [max(counts)] * len(counts))
        for mine, its, longest in zip(together, alone, most, strict=True):
            assert np.array_equal(mine[row], its[0])
            assert np.array_equal(its[0], longest[0, : its.shape[1]])
    every = np.concatenate([frame.flatten() for frame in together])
    assert len(np.unique(every)) == len(every)


def test_one_more_frame_for_some_rows() -> None:
    """The others' numbers stay the same, also those that were computed ahead."""
    usual, other = SplitMixStreams([1, 2, 3]), SplitMixStreams([1, 2, 3])
    for frame in range(500):
        usual.next_frame()
        other.next_frame()
        if frame == 300:
            other.next_frame([1])
        one, two = usual.uniform((3, 2)), other.uniform((3, 2))
        assert np.array_equal(one[[0, 2]], two[[0, 2]])
        assert np.array_equal(one[1], two[1]) == (frame < 300)


def test_uniform_and_normal_numbers_are_the_same_ahead() -> None:
    ahead, direct = SplitMixStreams([4, 5]), SplitMixStreams([4, 5])
    for frame in range(50):
        ahead.next_frame()
        direct.next_frame()
        # The first draw of so many is never computed ahead.
        if frame % 2:
            direct.bits((2, 10**6))
            direct = SplitMixStreams([4, 5])
            for _ in range(frame + 1):
                direct.next_frame()
        uniform, normal = ahead.uniform((2, 3)), ahead.normal((2, 4))
        assert np.array_equal(uniform, direct.uniform((2, 3)))
        assert np.array_equal(normal, direct.normal((2, 4)))
        assert (uniform > 0).all()
        assert (uniform < 1).all()
