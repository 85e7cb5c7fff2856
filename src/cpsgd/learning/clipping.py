"""What clients' updates are clipped to: the protocol's norm D, or a norm C that follows a quantile of their norms.

The norm follows Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping"
(2021); `cpsgd.federation.extras` has the formulas. A client's vector has one coordinate more, which says whether its
update was within C, and a norm of at most D with it. So the count is covered by the protocol's guarantee as it is: what
it costs is accuracy, not ε.
"""

from __future__ import annotations

from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.federation.extras import AdaptiveClip, Extras
from cpsgd.learning.options import ClientOptions
from cpsgd.protocol import Protocol


class Clipping:
    """The norm of the next round, where it adapts.

    Attributes:
        norm: C; None where updates are clipped to the protocol's norm and nothing is counted.
    """

    def __init__(self, options: ClientOptions, clip_norm: float) -> None:
        """Begins with C = D, the protocol's `clip_norm`."""
        self._most = clip_norm
        self._adaptive: AdaptiveClip | None = None
        self.norm: float | None = None
        if options.clip_quantile is not None:
            self._adaptive = AdaptiveClip(initial=clip_norm, quantile=options.clip_quantile)
            self.norm = self._adaptive.initial

    @property
    def size(self) -> int:
        """Coordinates that ride on an update."""
        return 0 if self.norm is None else 1

    @property
    def scale(self) -> float:
        """What a decoded mean, and its noise, are multiplied by."""
        return 1.0 if self.norm is None else self.norm / (self._extras.share * self._most)

    def check(self, protocol: Protocol | None) -> None:
        """Raises `ParameterError` where the protocol's guarantee would not cover the count."""
        if self.norm is not None and protocol is not None and protocol.replace_one_distance is not None:
            raise ParameterError(
                "The plan has a replace_one_distance, and with clip_quantile vectors are further apart than updates "
                "are: plan without one."
            )

    def rows(self, updates: Any) -> Any:
        """Clients' vectors from their updates, row by row, an array for an array. NaN stays in a row that has it."""
        if self.norm is None:
            return updates
        given = torch.as_tensor(updates)
        norms = torch.linalg.vector_norm(given, dim=1, dtype=torch.float64)
        extras = self._extras
        vectors = torch.empty((len(given), given.shape[1] + 1), device=given.device)
        vectors[:, :-1] = given * (extras.share * self._most / norms.clamp(min=self.norm))[:, None].float()
        vectors[:, -1] = torch.where(norms <= self.norm, 1.0, -1.0) * (extras.weight * self._most)
        return vectors if isinstance(updates, torch.Tensor) else vectors.numpy()

    def read(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean update. The next round's norm follows from the estimated share of updates within this one's."""
        if self._adaptive is None or self.norm is None:
            return mean
        unclipped = 0.5 * (float(mean[-1]) / (self._extras.weight * self._most) + 1.0)
        update = mean[:-1] * self.scale
        self.norm = self._adaptive.following(self.norm, unclipped)
        return update

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"norm": self.norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.norm = float(state["norm"])

    @property
    def _extras(self) -> Extras:
        return Extras(clip=self.norm)
