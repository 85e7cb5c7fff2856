"""How a round's mean is formed: by a protocol, planned or explicit, or by one of the baselines it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.learning.options import AccountOptions
from cpsgd.mechanisms import Gaussian
from cpsgd.paper import bounds
from cpsgd.planner.planning import Plan
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import FloatMean, RoundSimulator
from cpsgd.simulation.device import DeviceFloatMean, DeviceRound

NO_PRIVACY, GAUSSIAN, QUANTIZED = "no privacy", "gaussian", "quantized"
"""Names of the baselines."""


@dataclass(frozen=True)
class NoPrivacy:
    """The baseline without privacy: the mean of clipped updates in floats."""

    clip_norm: float

    def __post_init__(self) -> None:
        _validate.positive("clip_norm", self.clip_norm)


Mechanism = Plan | Protocol | NoPrivacy
Simulator = RoundSimulator | FloatMean | DeviceRound | DeviceFloatMean
"""What takes a round's updates and yields their mean."""


def baselines(plan: Plan) -> dict[str, Protocol | NoPrivacy]:
    """What a plan is compared with, all with its clip norm.

    Returns:
        "no privacy": clipped updates in floats. "gaussian": the Gaussian protocol with the noise that the same (ε, δ),
        rounds, participation, dropouts and collusion need. "quantized": the plan's levels and range without noise.

    Example:
        >>> from cpsgd.planner import plan
        >>> found = baselines(plan(clients=1000, dim=100, epsilon=2.0, delta=1e-6, bits=6))
        >>> sorted(found), found["quantized"].mechanism.is_noisy
        (['gaussian', 'no privacy', 'quantized'], False)
    """
    # The planner's error of the Gaussian mechanism is d σ² / (messages that arrive).
    sigma = math.sqrt(plan.gaussian_squared_error * plan.surviving / plan.protocol.dim) * (1.0 + 1e-9)
    return baselines_of(plan.protocol, sigma)


def baselines_of(protocol: Protocol, sigma: float) -> dict[str, Protocol | NoPrivacy]:
    """As `baselines`, for any protocol and the Gaussian noise σ per client that is as private."""
    found: dict[str, Protocol | NoPrivacy] = {
        NO_PRIVACY: NoPrivacy(protocol.clip_norm),
        GAUSSIAN: gaussian_like(protocol, sigma),
    }
    if protocol.mechanism.grid is not None:  # floats are not rounded
        found[QUANTIZED] = replace(protocol, mechanism=protocol.mechanism.without_noise(), modulus=None)
    return found


def gaussian_like(protocol: Protocol, sigma: float) -> Protocol:
    """The Gaussian protocol for the same clients and vectors."""
    return replace(protocol, mechanism=Gaussian(sigma=sigma), rotate=False, modulus=None, rotation_seed=0)


def at_paper_range(protocol: Protocol, delta: float) -> tuple[Protocol, float]:
    """The same levels and noise over the paper's range of coordinates, where that is wider; and that range X."""
    mechanism = protocol.mechanism
    reach = mechanism.grid.limit / mechanism.grid.unit if mechanism.grid is not None else math.inf
    paper = bounds.coordinate_range(
        clients=protocol.clients, dim=protocol.dim, clip_norm=protocol.clip_norm, delta=delta
    )
    if paper <= reach:
        return replace(protocol, modulus=None), reach
    wide = mechanism.with_scale(mechanism.scale * paper / reach * (1.0 + 1e-12))
    return replace(protocol, mechanism=wide, modulus=None), paper


def completed(account: AccountOptions, mechanism: Mechanism) -> AccountOptions:
    """The account with a plan's own figures where it leaves them open."""
    if not isinstance(mechanism, Plan):
        return account
    own: dict[str, Any] = {
        "epsilon": mechanism.wished_epsilon,
        "delta": mechanism.guarantee.delta,
        "adjacency": mechanism.guarantee.adjacency,
        "colluding": mechanism.colluding,
    }
    return replace(account, **{name: value for name, value in own.items() if getattr(account, name) is None})


def protocol_of(mechanism: Mechanism) -> Protocol | None:
    """The protocol that runs, or None for floats."""
    if isinstance(mechanism, Plan):
        return mechanism.protocol
    return mechanism if isinstance(mechanism, Protocol) else None


def clip_norm(mechanism: Mechanism) -> float:
    """D, the bound on the norm of what a client sends."""
    return (mechanism.protocol if isinstance(mechanism, Plan) else mechanism).clip_norm


def is_private(mechanism: Mechanism) -> bool:
    """Whether there is noise to account for."""
    protocol = protocol_of(mechanism)
    return protocol is not None and protocol.mechanism.is_noisy


def message_bytes(mechanism: Mechanism, dim: int) -> int:
    """Bytes a client sends; float32 numbers without a header where there is no protocol."""
    protocol = protocol_of(mechanism)
    return 4 * dim if protocol is None else protocol.message_bytes


def start_round(mechanism: Mechanism, dim: int, round: int, seed: int | None, device: torch.device | None) -> Simulator:
    """What takes a round's updates and yields their mean: on a device, or without one by the CPU's own kernels."""
    protocol, norm = protocol_of(mechanism), clip_norm(mechanism)
    if device is None:
        return FloatMean(dim, norm) if protocol is None else RoundSimulator(protocol, round, seed=seed)
    if protocol is None:
        return DeviceFloatMean(dim, norm, device)
    return DeviceRound(protocol, round, seed=seed, device=device)


def as_data(mechanism: Mechanism) -> dict[str, Any]:
    """Plain values that tell one mechanism from another."""
    protocol = protocol_of(mechanism)
    return {NO_PRIVACY: {"clip_norm": clip_norm(mechanism)}} if protocol is None else {"protocol": protocol.to_dict()}
