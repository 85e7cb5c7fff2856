"""The exact expected error of a round for given vectors, which only a simulation can know."""

from __future__ import annotations

from threading import Lock

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.codec import pipeline, rotate, wire
from cpsgd.errors import EmptyError
from cpsgd.mechanisms import ExpectedError


class Expectation:
    """The sums behind the expected squared error, one vector at a time; `add` may be called from several threads.

    Noise: d s² v/n, v the variance of a client's noise. Rounding: s² Σ v_ij/n², v_ij the variance of rounding at the
    clients' grid points, by default f(1-f) with f the fractional part of a lattice point. Clipping: the squared
    distance of the mean of the clients' grid points, rotated back, from the mean of their vectors. Memory is 16 bytes
    per coordinate, whatever the number of vectors.
    """

    def __init__(self, protocol: pipeline.Parameters, round: int) -> None:
        """Starts with no vector."""
        self.protocol = protocol
        self.round = _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        self.count = 0
        self._true_sum = np.zeros(protocol.dim)
        # In grid units and still rotated, where there are a grid and a rotation.
        self._sent_sum = np.zeros(protocol.dim)
        self._rounding = 0.0
        self._lock = Lock()

    def add(self, vector: ArrayLike) -> None:
        """Takes one client's vector into account.

        Raises:
            VectorError: It could not be encoded either.
        """
        checked = pipeline.as_vector(vector, self.protocol.dim)
        sent = pipeline.to_grid(self.protocol, checked, self.round)
        mechanism, rounding = self.protocol.mechanism, 0.0
        grid = mechanism.grid
        if grid is not None:
            np.rint(np.clip(sent, -grid.limit, grid.limit, out=sent), out=sent)
            rounding = mechanism.rounding_variance(sent)
        with self._lock:
            self.count += 1
            self._true_sum += checked
            self._sent_sum += sent
            self._rounding += rounding

    def mean(self) -> NDArray[np.float64]:
        """Returns the mean of the vectors.

        Raises:
            EmptyError: No vector was added.
        """
        if self.count == 0:
            raise EmptyError("There is no error to expect: no vector was given.")
        return self._true_sum / self.count

    def error(self) -> ExpectedError:
        """Returns the expected squared error of the mean of the vectors so far.

        Raises:
            EmptyError: No vector was added.
        """
        protocol, mechanism, count, mean = self.protocol, self.protocol.mechanism, self.count, self.mean()
        sent = self._sent_sum / count
        if mechanism.grid is not None:
            sent /= mechanism.grid.unit
        if protocol.rotate:
            signs = protocol.rotation_signs(self.round)
            sent = rotate.backward(sent.astype(np.float32), signs).astype(np.float64)
        bias = mean - sent
        with np.errstate(over="ignore"):
            # Vectors of 1e300 are clipped to D, and what is lost is too long to be squared.
            clipping = float(bias @ bias)
        return ExpectedError(
            noise=protocol.dim * mechanism.scale**2 * mechanism.noise.variance / count,
            rounding=mechanism.scale**2 * self._rounding / count**2,
            clipping=clipping,
        )
