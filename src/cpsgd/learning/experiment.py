"""`Experiment`: a private run and its baselines from the same settings and seeds, in one run directory.

`load_task` loads a user's own data, model and loss, which a function named `module:function` returns.
"""

from __future__ import annotations

import copy
import importlib
import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError, UserFunctionError
from cpsgd.learning import estimators, models
from cpsgd.learning.checkpoints import begun_protocol
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import Dataset, load
from cpsgd.learning.devices import own_code
from cpsgd.learning.estimators import NO_PRIVACY as NO_PRIVACY
from cpsgd.learning.estimators import Estimator, NoPrivacy
from cpsgd.learning.metrics import Callback, RoundMetrics
from cpsgd.learning.models import Loss, trainable
from cpsgd.learning.optimization import loss_for
from cpsgd.learning.option_groups import AccountOptions, FolderOptions
from cpsgd.learning.run_account import SAMPLED_SIZES
from cpsgd.learning.settings import AUTO, Settings, TaskOptions, without_privacy
from cpsgd.learning.trainer import Trainer
from cpsgd.planner import Plan, plan
from cpsgd.planner.examples import check_participation, plan_examples, sum_norm
from cpsgd.planner.passes import PassesPlan, plan_passes, schedule
from cpsgd.planner.requirements import BEST
from cpsgd.planner.target import Target
from cpsgd.privacy.guarantees import Guarantee, guarantee
from cpsgd.privacy.one_example import example_protocol
from cpsgd.privacy.proofs.published_accounting import accounting_of, published_epsilon
from cpsgd.promise import Claim, Conditions
from cpsgd.protocol import Protocol
from cpsgd.registry import parameters_of, spelled_out
from cpsgd.run import Run

PRIVATE = "private"
"""Name of the run that the others are compared with."""

_MORE_BITS = 4.0
# More gain nothing: the noise is then within 0.1 % of the Gaussian mechanism's.
_ACCURATE_BITS = 16.0
MORE_BITS = f"{_MORE_BITS:g} bits"
"""Name of the baseline that is as private and sends more bits."""

# Larger than the norm of any gradient of a preset's model.
_UNCLIPPED = 1e6
_DATASET_ATTRIBUTES = ("name", "source", "size", "classes", "feature_dim", "batch", "test_set")


@dataclass(frozen=True)
class Task:
    """The data set and the loss of a run, and the model unless it is given by name."""

    dataset: Dataset
    model: torch.nn.Module | None
    loss: Loss


@dataclass(frozen=True)
class Result:
    """Result of one run: the private one, which has a guarantee, or a baseline.

    `bits_per_coordinate` are those of a client's message, 32 for floats; `bytes_per_client` includes its header.
    """

    name: str
    private: bool
    history: tuple[RoundMetrics, ...]
    bits_per_coordinate: float
    bytes_per_client: int
    guarantee: Guarantee | None

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set after the last round; 0 for labels that are no classes."""
        return self.history[-1].accuracy or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values, without the rounds."""
        last = self.history[-1]
        return {
            "name": self.name,
            "private": self.private,
            "rounds": len(self.history),
            "accuracy": last.accuracy,
            **({} if last.r_squared is None else {"r_squared": last.r_squared}),
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
        settings: The settings; where passes are planned, with the cohort, bands and bits that were chosen.
        dim: Number of the model's parameters, d.
        passes: All options for passes over the clients, where one of them was chosen.
        mechanisms: The private protocol and the baselines, by name.
    """

    def __init__(self, settings: Settings, dataset: Dataset | None = None, *, begun: Path | None = None) -> None:
        """Loads the data, unless `dataset` holds it, counts the model's parameters, and plans the protocol.

        Runs that have `begun` in that run directory keep their protocols, whatever would be planned today.
        """
        self.settings = settings
        # Without a seed, runs in the same process still start from the same weights.
        self._first_weights = secrets.randbits(63) if settings.seed is None else settings.seed
        self._task = self._load_task(dataset)
        if self._task.model is not None:
            self.settings = settings = _naming(settings, self._task.model)
        self.dataset = self._task.dataset
        self.dim = sum(p.numel() for p in trainable(self._model(settings)).values())
        self.passes: PassesPlan | None = None
        if settings.passes is not None:
            self.settings = settings = self._with_passes(settings)
        # The cohorts' sizes do not depend on the key.
        self._cohorts = Cohorts.plan(settings, population=self._population, key=0, delta=settings.delta)
        if settings.examples is not None:
            check_participation(self._cohorts.scheme)
        self._terms = Conditions.of(
            self._surviving,
            rounds=settings.rounds,
            participation=self._cohorts.participation,
            adjacency=settings.adjacency or self._cohorts.adjacency,
            colluding=settings.colluding,
            examples=settings.examples,
        )
        chosen = None if begun is None else begun_protocol(folder_of(begun, PRIVATE))
        self.mechanisms: dict[str, Estimator] = {PRIVATE: chosen or self._protocol_or_plan(settings.bits)}
        if settings.baselines:
            self.mechanisms |= self._baselines()
        if begun is not None:
            kept = {name: begun_protocol(folder_of(begun, name)) for name in self.mechanisms}
            self.mechanisms |= {name: protocol for name, protocol in kept.items() if protocol is not None}

    def _with_passes(self, settings: Settings) -> Settings:
        """Returns the settings with the cohort that `passes` needs; "auto" chooses the best number of passes."""
        size, changes = self._population, dict[str, Any](passes=None, uplink=None, downlink=None)
        wanted = None if settings.passes == AUTO else int(settings.passes or 1)
        if wanted is None or settings.uplink is not None or settings.downlink is not None:
            if settings.examples is not None or settings.explicit:
                raise ParameterError("passes are planned for whole clients: leave out examples and parameters.")
            self.passes = plan_passes(
                size,
                self._coordinates,
                settings.epsilon,
                settings.delta,
                clip_norm=settings.clip_norm,
                rounds=settings.rounds,
                passes=wanted,
                uplink=settings.uplink,
                downlink=settings.downlink,
                bits=settings.bits,
                correlated=settings.correlated,
                colluding=settings.colluding,
                workload=_workload(settings),
            )
            chosen = self.passes.chosen
            wanted = chosen.passes
            changes |= {"bits": chosen.bits, "correlated": str(chosen.bands) if chosen.bands > 1 else None}
        who, cohort = schedule(size, settings.rounds, wanted)
        return replace(settings, cohort=cohort, participation=who.scheme, **changes)

    @property
    def protocol(self) -> Protocol:
        """The private run's protocol."""
        found = estimators.protocol_of(self.mechanisms[PRIVATE])
        assert found is not None
        return found

    def with_seed(self, seed: int) -> Experiment:
        """Returns a copy of the experiment with another seed; nothing is loaded or planned again."""
        other = copy.copy(self)
        other.settings = replace(self.settings, seed=seed)
        other._first_weights = seed
        return other

    def trainer(self, name: str, folder: Path | None, *, resume: bool, callbacks: Sequence[Callback] = ()) -> Trainer:
        """Makes the trainer of one of the runs; `folder` is that run's own."""
        settings, mechanism = self._settings_of(name), self.mechanisms[name]
        account: AccountOptions = settings
        if not estimators.is_private(mechanism):
            # Nothing is spent; but a ledger is refused.
            account = AccountOptions(ledger=settings.ledger, population=settings.population)
        return Trainer(
            self._model(settings),
            self._task.loss,
            self.dataset,
            mechanism,
            cohorts=settings,
            clients=settings,
            server=settings,
            account=account,
            run=settings,
            folder=FolderOptions(run_dir=folder, resume=resume, checkpoint_every=settings.evaluate_every),
            callbacks=callbacks,
        )

    def result(self, name: str, trainer: Trainer) -> Result:
        """Returns the result of a run."""
        mechanism = self.mechanisms[name]
        protocol = estimators.protocol_of(mechanism)
        return Result(
            name=name,
            private=estimators.is_private(mechanism),
            history=tuple(trainer.history),
            bits_per_coordinate=32.0 if protocol is None else protocol.bits_per_coordinate,
            bytes_per_client=estimators.message_bytes(mechanism, self._coordinates),
            guarantee=trainer.guarantee(),
        )

    def paper_bound(self, noise_clients: int) -> dict[str, Any]:
        """Returns ε by the published accounting of the mechanism, and the `method`; or a `reason` if there is none.

        For the paper's mechanism that is the paper's theorem, and there is a second ε with the paper's X at the same k
        and m. `noise_clients` is the number of messages in the smallest round.
        """
        published = accounting_of(self.protocol)
        method = None if published is None else published.name
        found: dict[str, Any] = {"method": method, "epsilon": None, "reason": None}
        if self._terms.participation.sampled:
            return found | {"reason": "The paper has no bound for sampled cohorts."}
        if self._terms.examples is not None:
            return found | {"reason": "The paper has no bound for single examples."}
        try:
            found["epsilon"] = self._paper_epsilon(self.protocol, noise_clients)
        except ConditionError as error:
            found["reason"] = str(error)
        if method != "paper-theorem":
            return found
        widened, found["paper_range"] = estimators.at_paper_range(self.protocol, self.settings.delta)
        try:
            found["epsilon_at_paper_range"] = self._paper_epsilon(widened, noise_clients)
        except ConditionError:
            found["epsilon_at_paper_range"] = None
        return found

    def _paper_epsilon(self, protocol: Protocol, noise_clients: int) -> float:
        counted = self._terms.participation.counted_rounds(self._terms.rounds)
        run = Run.of(protocol, rounds=counted, adjacency=self._terms.adjacency, surviving=noise_clients)
        return published_epsilon(run, self.settings.delta)

    def _baselines(self) -> dict[str, Estimator]:
        """Returns the baselines: no noise, Gaussian noise, and more bits."""
        private, bits = self.mechanisms[PRIVATE], self.settings.bits
        found: dict[str, Estimator] = {}
        if bits is not None and bits < _MORE_BITS:
            found[MORE_BITS] = self._protocol_or_plan(_MORE_BITS)
        if isinstance(private, Plan):
            found |= estimators.baselines(private)
        else:
            found |= estimators.baselines_of(self.protocol, self._gaussian_sigma())
        if without_privacy(self.settings) is not None:
            found[NO_PRIVACY] = NoPrivacy(_UNCLIPPED)
        return found

    def _load_task(self, dataset: Dataset | None) -> Task:
        if dataset is None and self.settings.data is not None:
            return load_task(self.settings.data, seed=self._first_weights)
        found = load(self.settings.dataset, clients=self.settings.clients) if dataset is None else dataset
        return Task(found, None, loss_for(found))

    def _settings_of(self, name: str) -> Settings:
        """Returns a run's settings: the experiment's, or the preset's own for its run without privacy."""
        own = without_privacy(self.settings) if name == NO_PRIVACY else None
        return own or self.settings

    def _model(self, settings: Settings) -> torch.nn.Module:
        """Returns a new model with the first weights."""
        data = self.dataset
        if self._task.model is not None:
            return copy.deepcopy(self._task.model)
        named = models.by_name(settings.model, data.feature_dim, data.classes or 1, seed=self._first_weights)
        # Named models take rows of numbers.
        flat = data.test_set().features.ndim == 2
        return named if flat else torch.nn.Sequential(torch.nn.Flatten(), *named.children())

    def _protocol_or_plan(self, bits: float | None) -> Plan | Protocol:
        """Returns the protocol that the settings spell out, whatever `bits`; else the planner's for these bits.

        That is a plan for `bits` per coordinate, or with `examples` its protocol alone.
        """
        settings, cohorts = self.settings, self._cohorts
        if settings.explicit:
            norm, examples = settings.clip_norm, settings.examples
            size: dict[str, Any] = {
                "clients": cohorts.messages,
                "dim": self._coordinates,
                "clip_norm": norm if examples is None else sum_norm(norm, examples),
            }
            mechanism = spelled_out(settings.mechanism, parameters_of(settings), **size)
            return Protocol(**size, mechanism=mechanism, rotate=mechanism.grid is not None)
        requirements: dict[str, Any] = {
            "clients": cohorts.messages,
            "dim": self._coordinates,
            "epsilon": settings.epsilon,
            "delta": self._accounted_delta,
            "clip_norm": settings.clip_norm,
            "bits": _ACCURATE_BITS if settings.for_accuracy else bits,
            "rounds": settings.rounds,
            "adjacency": self._terms.adjacency,
            "dropout": 1.0 - self._terms.surviving / cohorts.messages,
            "colluding": settings.colluding,
            "mechanism": settings.mechanism or BEST,
        }
        if settings.correlated is not None:
            if settings.examples is not None:
                raise ParameterError("Noise that is correlated over rounds protects whole clients: leave out examples.")
            requirements |= {"correlated": settings.correlated, "workload": _workload(settings)}
        if settings.examples is not None:
            scheme = settings.participation
            return plan_examples(**requirements, participation=scheme, examples=settings.examples).protocol
        independent = plan(**requirements, participation=cohorts.participation)
        return self._cancelling(requirements) or independent if settings.for_accuracy else independent

    def _cancelling(self, requirements: dict[str, Any]) -> Plan | None:
        """Returns a plan whose later rounds cancel noise of earlier ones, if it is possible and pays off.

        Its error in the model must be known to be smaller: the optimizer adds means up, and the clip norm is fixed.
        """
        settings = self.settings
        steady = settings.participation == "once" and settings.dropout == 0.0 and settings.clip_quantile is None
        if not steady or settings.rounds < 2 or settings.mechanism or settings.optimizer not in ("sgd", "momentum"):
            return None
        workload = f"{settings.optimizer}-{settings.schedule}"
        try:
            found = plan(**requirements, participation="once", correlated="auto", workload=workload)
        except InfeasibleError:
            return None
        return found if found.prefix is not None and found.prefix.gain > 1.0 else None

    def _gaussian_sigma(self) -> float:
        """Returns the Gaussian noise per client for the private run's (ε, δ).

        For an explicit protocol ε is the proved one; the settings' ε is then only a budget.
        """
        protocol, terms, delta = self.protocol, self._terms, self._accounted_delta
        epsilon = guarantee(Run(protocol, terms), delta).epsilon if self.settings.explicit else self.settings.epsilon
        if terms.examples is not None:
            protocol = example_protocol(estimators.gaussian_like(protocol, 1.0), terms.examples)
        conditions = replace(terms, examples=None)
        target = Target(Claim(epsilon, delta), conditions, self._coordinates, protocol.clip_norm)
        needed = terms.adjacency.distance(target.clip_norm) / target.gaussian_mu
        return needed / math.sqrt(target.honest) * (1.0 + 1e-9)

    @property
    def _population(self) -> int:
        """Number of clients, with those who hold canaries."""
        return self.settings.with_canaries(self.dataset.size, self.settings.examples)

    @property
    def _coordinates(self) -> int:
        """Coordinates of a client's vector: the model's, and one more for adaptive clipping."""
        return self.dim + (self.settings.clip_quantile is not None)

    @property
    def _accounted_delta(self) -> float:
        """δ less the probability that a Poisson round draws too many clients."""
        return self.settings.delta - self.settings.rounds * self._cohorts.overflow

    @property
    def _surviving(self) -> int:
        """Messages of the smallest round that the protocol is planned for."""
        cohorts, settings = self._cohorts, self.settings
        if settings.dropout <= 0.0:
            return cohorts.messages
        # With sampling, `Spending` rounds the number of messages down by up to this much.
        slack = cohorts.messages // SAMPLED_SIZES + 1 if cohorts.participation.sampled else 1
        return max(1, cohorts.fewest_survivors(settings.dropout, settings.rounds) - slack)


def _workload(settings: Settings) -> str:
    """Returns the workload that correlated noise is judged by: the optimizer's and its schedule's."""
    return f"{'momentum' if settings.optimizer == 'momentum' else 'sgd'}-{settings.schedule}"


def _naming(settings: Settings, model: torch.nn.Module) -> Settings:
    """Returns the settings with the name of a user's own model: its class, and the layers of a `Sequential`.

    Raises `ParameterError` if the settings ask for another model.
    """
    kind, layers = type(model).__name__, [type(layer).__name__ for layer in model.children()]
    name = f"{kind}({', '.join(layers)})" if type(model) is torch.nn.Sequential else kind
    if settings.model not in (TaskOptions.model, name):
        raise ParameterError(
            f"The function {settings.data} returns a model of its own, {name}, and the settings ask for "
            f"model={settings.model!r}: leave the model out of one of them."
        )
    return replace(settings, model=name)


def folder_of(run: Path, name: str) -> Path:
    """Returns the folder of one of the runs: the private one's is the run directory itself."""
    return run if name == PRIVATE else run / "baselines" / name.replace(" ", "-")


def load_task(reference: str, *, seed: int) -> Task:
    """Calls the function that "module:function" names; the module may be in the current folder.

    It returns a data set, or one with a model, or with a model and a loss. The model's weights follow from the seed.
    """
    function = _function(reference)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with own_code(f"{reference}()"):
            returned = function()
    dataset, model, loss = (*(returned if isinstance(returned, tuple) else (returned,)), None, None)[:3]
    missing = [part for part in _DATASET_ATTRIBUTES if not hasattr(dataset, part)]
    if missing or (isinstance(returned, tuple) and len(returned) > 3):
        raise ParameterError(
            f"Expected {reference} to return a data set of cpsgd.learning.datasets, or one with a model, or with a "
            f"model and a loss; got {_type_names(returned)}."
        )
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ParameterError(f"Expected {reference} to return a model of torch.nn, got {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise ParameterError(f"Expected {reference} to return a function as a loss, got {type(loss).__name__}.")
    return Task(dataset, model, loss or loss_for(dataset))


def _function(reference: str) -> Any:
    """Returns the function that module:function names."""
    name, _, attribute = reference.partition(":")
    if not name or not attribute.isidentifier():
        raise ParameterError(f"Expected data to be module:function, as mypackage.module:function, got {reference!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserFunctionError(f"The module {name}", error) from error
        raise ParameterError(
            f"There is no module {error.name!r}, neither installed nor in the folder where this was called."
        ) from None
    except Exception as error:
        raise UserFunctionError(f"The module {name}", error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ParameterError(f"There is no function {attribute!r} in the module {name}.")
    return function


def _type_names(returned: object) -> str:
    parts = returned if isinstance(returned, tuple) else (returned,)
    return ", ".join(type(part).__name__ for part in parts) or "an empty tuple"
