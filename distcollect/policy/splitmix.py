"""Random numbers for n envs, each from a stream of its own, as arrays.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014). The number at any place of its sequence can be computed directly. So a few array
operations compute the numbers of all envs, also those of many frames ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

# SplitMix64's increment: odd, and close to 2**64 divided by the golden ratio.
GOLDEN = 0x9E3779B97F4A7C15
# Distance in the sequence between the first numbers of two consecutive frames.
_PLACES_PER_FRAME = 1 << 24
STRIDE = GOLDEN * _PLACES_PER_FRAME % 2**64
# How many numbers are computed ahead at once, and for how many frames. An array operation on so
# many numbers takes several times as long as one on a single number, but serves all these frames.
_NUMBERS_AHEAD = 4096
_FRAMES_AHEAD = 256


class SplitMixStreams:
    """One stream of random numbers for each of n envs.

    A number depends only on the env's seed, the number of its frame, and how many numbers were
    drawn in that frame before. It does not depend on n, or on how many are computed ahead.

    Attributes:
        num_envs: n.
        num_drawn: how many numbers each env has drawn in this frame.
    """

    def __init__(self, seeds: Sequence[int] | np.ndarray) -> None:
        """Begin one stream for each of n envs.

        Args:
            seeds: n numbers below 2**64; equal seeds give equal streams. With :attr:`states` of
                other streams, these go on as those do.
        """
        self.num_envs = len(seeds)
        # uint64 [n, 1]: the states at the begin of the first frame of those computed ahead.
        self._states = np.array(seeds, np.uint64)[:, None]
        self._frame = 0  # the current one of these
        self.num_drawn = 0
        self._most_drawn = 0  # and in any frame so far
        self._compute_ahead()

    def next_frame(self, rows: Sequence[int] | None = None) -> None:
        """Draw for the next frame of these rows from now on; None: of all rows.

        The numbers of other rows repeat, and must not be used, until their next frame.
        """
        self._most_drawn = max(self._most_drawn, self.num_drawn)
        self.num_drawn = 0
        if rows is None and self._frame + 1 < self._num_ahead:
            self._frame += 1
            return
        self._states = self.states
        self._states[slice(None) if rows is None else rows] += np.uint64(STRIDE)
        self._frame = 0
        self._compute_ahead()

    def bits(self, shape: Sequence[int]) -> np.ndarray:
        """Random uint64 ``[*shape]``; the first dimension is n or a multiple of it."""
        return self._draw(shape, 1, _unchanged)

    def uniform(self, shape: Sequence[int]) -> np.ndarray:
        """Random float64 ``[*shape]`` in (0, 1), both ends excluded; see :meth:`bits`."""
        return self._draw(shape, 1, _uniform)

    def normal(self, shape: Sequence[int]) -> np.ndarray:
        """Standard normal float64 ``[*shape]``; each is made of two numbers; see :meth:`bits`."""
        return self._draw(shape, 2, _normal)

    def _draw(
        self, shape: Sequence[int], num_each: int, function: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return what ``function`` makes of the next numbers, ``num_each`` of them for each result.

        It is computed for all frames ahead when the first of them needs it.
        """
        first = self.num_drawn
        count = num_each * (math.prod(shape) // self.num_envs)
        self.num_drawn = last = first + count
        if last > self._per_frame or not self._num_ahead:
            places = np.arange(first, last, dtype=np.uint64) * np.uint64(GOLDEN)
            return function(_mix(self.states + places)).reshape(shape)
        ahead = self._made_ahead.get((function, first, last))
        if ahead is None:
            ahead = function(self._bits_ahead[..., first:last])
            self._made_ahead[function, first, last] = ahead
        of_frame: np.ndarray = ahead[self._frame]
        return of_frame.reshape(shape)

    @property
    def states(self) -> np.ndarray:
        """uint64 ``[n, 1]``: the states at the begin of this frame."""
        states: np.ndarray = self._states + np.uint64(self._frame * STRIDE % 2**64)
        return states

    def _compute_ahead(self) -> None:
        """Compute as many numbers as the envs drew at most in a frame, for the next frames."""
        per_frame = self._most_drawn
        num_frames = min(_NUMBERS_AHEAD // max(1, self.num_envs * per_frame), _FRAMES_AHEAD)
        if num_frames < 2 or not per_frame:  # then this would be more work than to draw them
            num_frames = per_frame = 0
        frames = np.arange(num_frames, dtype=np.uint64) * np.uint64(STRIDE)
        places = np.arange(per_frame, dtype=np.uint64) * np.uint64(GOLDEN)
        # uint64 [frames, n, numbers per frame]
        self._bits_ahead = _mix(self._states + frames[:, None, None] + places)
        # What was made of them: of the numbers from one place to another of each frame.
        self._made_ahead: dict[tuple[object, int, int], np.ndarray] = {}
        self._num_ahead, self._per_frame = num_frames, per_frame


def _mix(states: np.ndarray) -> np.ndarray:
    """Return the numbers that SplitMix64 returns in these states."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = states ^ (states >> np.uint64(31))
    return mixed


# Each of the following functions makes something of random numbers, uint64 ``[..., k]``.


def _unchanged(numbers: np.ndarray) -> np.ndarray:
    return numbers


def _uniform(numbers: np.ndarray) -> np.ndarray:
    mapped: np.ndarray = ((numbers >> np.uint64(12)) + 0.5) * 2.0**-52
    return mapped


def _normal(numbers: np.ndarray) -> np.ndarray:
    """Return the Box-Muller transform: float64 ``[..., k / 2]``."""
    half = numbers.shape[-1] // 2
    radius = np.sqrt(-2 * np.log(_uniform(numbers[..., :half])))
    mapped: np.ndarray = radius * np.cos(2 * np.pi * _uniform(numbers[..., half:]))
    return mapped
