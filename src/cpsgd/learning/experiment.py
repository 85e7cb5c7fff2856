"""`Experiment`: a private run and its baselines from the same settings and seeds, in one run directory."""

from __future__ import annotations

import copy
import math
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from scipy.stats import binom

from cpsgd._torch import torch
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.learning import mechanisms, models, optimizers
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import Dataset, load
from cpsgd.learning.examples import example_protocol, plan_examples, sum_norm
from cpsgd.learning.mechanisms import Mechanism, NoPrivacy
from cpsgd.learning.metrics import RoundMetrics
from cpsgd.learning.settings import Settings
from cpsgd.learning.sgd import UNLUCKY, Trainer
from cpsgd.learning.spending import OVERFLOW_SHARE, SAMPLED_SIZES
from cpsgd.ledger import Ledger
from cpsgd.paper.theorem import theorem_epsilon
from cpsgd.planner import Plan, plan
from cpsgd.planner.target import Target
from cpsgd.privacy.adjacency import Adjacency, check_adjacency, distance
from cpsgd.privacy.participation import Scheme
from cpsgd.privacy.rounds import RoundsGuarantee, guarantee_over_rounds, paper_epsilon
from cpsgd.protocol import Protocol, paper_coordinate_range

PRIVATE = "private"
"""Name of the run that the others are compared with."""

NO_PRIVACY = "no privacy"
"""Name of the baseline in floats."""


@dataclass(frozen=True)
class Result:
    """How one run ended.

    Attributes:
        name: "private" or a baseline's name.
        private: Whether it has a guarantee.
        history: Every round's figures.
        bits_per_coordinate: Bits a client sends for each parameter, without header; 32 in floats.
        bytes_per_client: Bytes of one message.
        guarantee: What is proved about it; None without privacy.
    """

    name: str
    private: bool
    history: tuple[RoundMetrics, ...]
    bits_per_coordinate: float
    bytes_per_client: int
    guarantee: RoundsGuarantee | None

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set after the last round."""
        return self.history[-1].accuracy or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the rounds left out."""
        last = self.history[-1]
        return {
            "name": self.name,
            "private": self.private,
            "rounds": len(self.history),
            "accuracy": last.accuracy,
            "loss": last.loss,
            "epsilon": None if self.guarantee is None else self.guarantee.epsilon,
            "delta": None if self.guarantee is None else self.guarantee.delta,
            "bits_per_coordinate": self.bits_per_coordinate,
            "bytes_per_client": self.bytes_per_client,
            "bytes_total": last.bytes_total,
            "seconds": sum(metrics.seconds for metrics in self.history),
        }


class Experiment:
    """Everything that follows from settings, checked before a round is charged.

    Attributes:
        settings: The settings.
        dim: d, the number of the model's parameters.
        mechanisms: The private mechanism and the baselines, by name.
    """

    def __init__(self, settings: Settings, dataset: Dataset | None = None) -> None:
        """Loads the data, builds the model once to count its parameters, and plans the protocol.

        Args:
            settings: The settings.
            dataset: The settings' data set where it was loaded before, to have it in memory once.
        """
        if settings.participation not in get_args(Scheme):
            known = ", ".join(get_args(Scheme))
            raise ParameterError(f"Unknown participation {settings.participation!r}. Known are {known}.")
        self.settings = settings
        self.dataset = load(settings.dataset, clients=settings.clients) if dataset is None else dataset
        # Without a seed the runs still begin with the same weights, if they begin in the same process.
        self._first_weights = secrets.randbits(63) if settings.seed is None else settings.seed
        self.dim = sum(p.numel() for p in self._model().parameters())
        self._scheme = cast(Scheme, settings.participation)
        self._adjacency: Adjacency = "zero-out" if self._scheme == "poisson" else "replace-one"
        if settings.adjacency is not None:
            self._adjacency = check_adjacency(settings.adjacency)
        self.mechanisms = self._mechanisms()

    @property
    def protocol(self) -> Protocol:
        """The private run's protocol."""
        found = mechanisms.protocol_of(self.mechanisms[PRIVATE])
        assert found is not None
        return found

    def with_seed(self, seed: int) -> Experiment:
        """The same with another seed: nothing is loaded or planned again."""
        other = copy.copy(self)
        other.settings = replace(self.settings, seed=seed)
        other._first_weights = seed
        return other

    def trainer(self, name: str, folder: Path | None, *, resume: bool) -> Trainer:
        """The trainer of one of the runs, which lives in a folder of its own."""
        settings = self.settings
        mechanism = self.mechanisms[name]
        private = mechanisms.is_private(mechanism)
        return Trainer(
            self._model(),
            torch.nn.functional.cross_entropy,
            self.dataset,
            mechanism,
            cohort=settings.cohort,
            rounds=settings.rounds,
            participation=self._scheme,
            epsilon=settings.epsilon if private else None,
            delta=settings.delta if private else None,
            adjacency=self._adjacency if private else None,
            colluding=settings.colluding if private else None,
            examples=settings.examples,
            optimizer=settings.optimizer,
            learning_rate=settings.lr,
            weight_decay=settings.weight_decay,
            schedule=optimizers.check_schedule(settings.schedule),
            seed=settings.seed,
            dropout=settings.dropout,
            local_steps=settings.local_steps,
            local_learning_rate=settings.local_lr,
            device=settings.device,
            memory_limit=None if settings.memory_limit is None else settings.memory_limit << 20,
            evaluate_every=settings.evaluate_every,
            checkpoint_every=settings.evaluate_every,
            run_dir=folder,
            resume=resume,
            ledger=None if settings.ledger is None else Ledger(settings.ledger),
            population=settings.population,
        )

    def result(self, name: str, trainer: Trainer) -> Result:
        """What came of a run."""
        mechanism = self.mechanisms[name]
        protocol = mechanisms.protocol_of(mechanism)
        return Result(
            name=name,
            private=mechanisms.is_private(mechanism),
            history=tuple(trainer.history),
            bits_per_coordinate=32.0 if protocol is None else protocol.bits_per_coordinate,
            bytes_per_client=mechanisms.message_bytes(mechanism, self.dim),
            guarantee=trainer.guarantee(),
        )

    def paper_bound(self, noise_clients: int) -> dict[str, Any]:
        """ε by the paper's own theorem: of the protocol itself, and with the paper's X at the same k and m.

        Args:
            noise_clients: Messages of the smallest round, whose noise counts.

        Returns:
            `epsilon` and `epsilon_at_paper_range`, each a number or None, with the `reason` where there is none.
        """
        if self._cohorts().participation.sampled:
            return {"epsilon": None, "reason": "The paper has no bound for sampled cohorts."}
        if self.settings.examples is not None:
            return {"epsilon": None, "reason": "The paper has no bound for single examples."}
        protocol = self.protocol
        found: dict[str, Any] = {"epsilon": None, "reason": None}
        try:
            found["epsilon"] = self._paper_epsilon(protocol, noise_clients)
        except ConditionError as error:
            found["reason"] = str(error)
        wide = paper_coordinate_range(
            clients=protocol.clients, dim=protocol.dim, clip_norm=protocol.clip_norm, delta=self.settings.delta
        )
        found["paper_range"] = max(wide, protocol.coordinate_range)
        try:
            widened = replace(protocol, coordinate_range=found["paper_range"], modulus=None)
            found["epsilon_at_paper_range"] = self._paper_epsilon(widened, noise_clients)
        except ConditionError:
            found["epsilon_at_paper_range"] = None
        return found

    def _paper_epsilon(self, protocol: Protocol, noise_clients: int) -> float:
        counted = self._cohorts().participation.counted_rounds(self.settings.rounds)
        rule: dict[str, Any] = {"adjacency": self._adjacency, "noise_clients": noise_clients}
        if counted == 1:
            return theorem_epsilon(protocol, self.settings.delta, **rule)
        return paper_epsilon(protocol, self.settings.delta, rounds=counted, **rule)

    def _model(self) -> torch.nn.Module:
        return models.by_name(
            self.settings.model, self.dataset.feature_dim, self.dataset.classes, seed=self._first_weights
        )

    def _cohorts(self) -> Cohorts:
        settings = self.settings
        return Cohorts.plan(
            population=self.dataset.size,
            cohort=settings.cohort,
            rounds=settings.rounds,
            scheme=self._scheme,
            key=settings.seed or 0,  # sizes do not depend on it
            overflow=OVERFLOW_SHARE * settings.delta / settings.rounds,
        )

    def _mechanisms(self) -> dict[str, Mechanism]:
        chosen = self._chosen()
        found: dict[str, Mechanism] = {PRIVATE: chosen}
        if not self.settings.baselines:
            return found
        if isinstance(chosen, Plan):
            found.update(mechanisms.baselines(chosen))
        else:
            found[NO_PRIVACY] = NoPrivacy(chosen.clip_norm)
            found["gaussian"] = self._gaussian(chosen)
            found["quantized"] = replace(chosen, trials=0, modulus=None)
        return found

    def _chosen(self) -> Plan | Protocol:
        """The private mechanism: what the settings spell out, or else the planner's."""
        settings = self.settings
        cohorts = self._cohorts()
        if settings.levels is not None and settings.trials is not None:
            return Protocol.rotated_binomial(
                clients=cohorts.messages,
                dim=self.dim,
                clip_norm=self._client_norm,
                levels=settings.levels,
                trials=settings.trials,
                coordinate_range=settings.range,
            )
        wishes: dict[str, Any] = {
            "clients": cohorts.messages,
            "dim": self.dim,
            "epsilon": settings.epsilon,
            "delta": self._accounted_delta,
            "clip_norm": settings.clip_norm,
            "bits": settings.bits,
            "rounds": settings.rounds,
            "adjacency": self._adjacency,
            "dropout": 1.0 - self._surviving / cohorts.messages,
            "colluding": settings.colluding,
        }
        if settings.examples is not None:
            return plan_examples(**wishes, participation=settings.participation, examples=settings.examples).protocol
        return plan(**wishes, participation=cohorts.participation)

    def _gaussian(self, protocol: Protocol) -> Protocol:
        """The Gaussian protocol with the noise that the private run's (ε, δ) needs.

        That ε is the wished one. Of a protocol that the settings spell out it is the one proved about it, and the
        wished one only a budget.
        """
        settings = self.settings
        participation = self._cohorts().participation
        accounted = protocol if settings.examples is None else example_protocol(protocol, settings.examples)
        epsilon = settings.epsilon
        if settings.explicit:
            epsilon = guarantee_over_rounds(
                accounted,
                self._accounted_delta,
                rounds=settings.rounds,
                participation=participation,
                adjacency=self._adjacency,
                surviving=self._surviving,
                colluding=settings.colluding,
            ).epsilon
        gaussian = Protocol.gaussian(clients=protocol.clients, dim=self.dim, clip_norm=protocol.clip_norm, sigma=1.0)
        if settings.examples is not None:
            accounted = example_protocol(gaussian, settings.examples)
        target = Target(
            epsilon=epsilon,
            delta=self._accounted_delta,
            rounds=settings.rounds,
            participation=participation,
            adjacency=self._adjacency,
            dim=self.dim,
            clip_norm=accounted.clip_norm,
            honest=self._surviving - settings.colluding,
        )
        needed = distance(self._adjacency, target.clip_norm) / target.gaussian_mu
        return replace(gaussian, sigma=needed / math.sqrt(target.honest) * (1.0 + 1e-9))

    @property
    def _client_norm(self) -> float:
        """The bound on what a client sends."""
        settings = self.settings
        return settings.clip_norm if settings.examples is None else sum_norm(settings.clip_norm, settings.examples)

    @property
    def _accounted_delta(self) -> float:
        """What is left of δ when too large draws are paid for."""
        return self.settings.delta - self.settings.rounds * self._cohorts().overflow

    @property
    def _surviving(self) -> int:
        """Messages of the smallest round, with room for what the trainer will hold against them."""
        cohorts = self._cohorts()
        messages = cohorts.messages
        if self.settings.dropout <= 0.0:
            return messages
        fewest = int(binom.ppf(UNLUCKY / self.settings.rounds, messages, 1.0 - self.settings.dropout))
        # With sampling, the accounting rounds the number of messages down by as much as this.
        slack = messages // SAMPLED_SIZES + 1 if cohorts.participation.sampled else 1
        return max(1, fewest - slack)


def folder_of(run: Path, name: str) -> Path:
    """Where in a run directory one of the runs keeps its files: the private one in the directory itself."""
    return run if name == PRIVATE else run / "baselines" / name.replace(" ", "-")
