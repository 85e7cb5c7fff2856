"""Which two data sets are neighbours, and how far apart that lets one client's vectors be."""

from __future__ import annotations

from enum import StrEnum

from cpsgd.errors import ParameterError


class Adjacency(StrEnum):
    """Neighbouring data sets.

    A client that vanished altogether would take its noise along, so plain add/remove is not what a sum of noisy
    messages offers.
    """

    REPLACE_ONE = "replace-one"
    """One client's vector is replaced by any other (the paper's notion)."""

    ZERO_OUT = "zero-out"
    """One client's vector is replaced by the zero vector; the client still answers and still adds its noise."""

    @classmethod
    def parse(cls, name: str) -> Adjacency:
        """The adjacency of this name.

        Raises:
            ParameterError: There is none; the message lists the known names.
        """
        try:
            return cls(name)
        except ValueError:
            raise ParameterError(
                f"Expected adjacency to be one of {[str(known) for known in cls]}, got {name!r}."
            ) from None

    @property
    def reach(self) -> float:
        """How far neighbours' vectors can be apart, in radii of the set that vectors are clipped to.

        Two points of a symmetric convex set are at most its diameter apart, a point and zero its radius.
        """
        return {Adjacency.REPLACE_ONE: 2.0, Adjacency.ZERO_OUT: 1.0}[self]

    def distance(self, clip_norm: float, replace_one_distance: float | None = None) -> float:
        """Largest Euclidean distance of two neighbours' vectors: 2D for replace-one, D for zero-out.

        Args:
            clip_norm: D.
            replace_one_distance: A smaller distance that no two clients' vectors exceed, or None. It says nothing of a
                vector and zero.

        Example:
            >>> Adjacency.REPLACE_ONE.distance(1.5), Adjacency.parse("zero-out").distance(1.5)
            (3.0, 1.5)
            >>> Adjacency.REPLACE_ONE.distance(1.5, 2.0), Adjacency.ZERO_OUT.distance(1.5, 2.0)
            (2.0, 1.5)
        """
        largest = self.reach * clip_norm
        if replace_one_distance is None or self is not Adjacency.REPLACE_ONE:
            return largest
        return min(largest, replace_one_distance)
