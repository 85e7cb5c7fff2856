"""The options of a training run, in groups.

A `Trainer` takes the groups; `Settings` inherits them, so that files and the command line offer the same fields under
the same names. The `Attributes:` are the help texts of the command line. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.ledger import Ledger
from cpsgd.neighbours import Adjacency, Scheme
from cpsgd.planner.workloads import Schedule as Schedule

OptimizerName = Literal[
    "sgd", "momentum", "adagrad", "adam", "adamw", "adamax", "adadelta", "nadam", "radam", "rmsprop"
]
OptimizerFactory = Callable[[Iterable[Any]], Any]
"""From parameters to an optimizer of `torch.optim`, such as `functools.partial(torch.optim.RMSprop, lr=0.01)`."""
ScheduleFactory = Callable[[Any], Any]
"""From an optimizer to a scheduler of `torch.optim.lr_scheduler`, such as `partial(CosineAnnealingLR, T_max=80)`."""

# 16 TiB. A larger number is most likely one of bytes.
_MOST_MEMORY = 1 << 24


class OptionGroup:
    """Base of the groups: a class that inherits several checks them one after the other."""

    def __post_init__(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class CohortOptions(OptionGroup):
    """The clients of the rounds.

    Attributes:
        cohort: Clients per round, n; with Poisson sampling, on average.
        rounds: Number of rounds in all; in Python, if None, that of the plan.
        participation: How clients are chosen: once (disjoint cohorts), every (all clients in every round), apart (all
            clients in turn, again and again), poisson or fixed-size (a new random cohort per round). In Python, if
            None, that of the plan, or once without a plan.
        dropout: Probability that a message does not arrive.
        canaries: Made-up updates by which the trained model is audited; each is trained on with probability ½. They are
            held by clients who join the population, one each or as many as `examples`, and cost a little accuracy.

    Example:
        >>> CohortOptions(cohort=2000, rounds=6)
        CohortOptions(cohort=2000, rounds=6, participation=None, dropout=0.0, canaries=None)
    """

    cohort: int
    rounds: int | None = None
    participation: Scheme | None = None
    dropout: float = 0.0
    canaries: int | None = None

    def with_canaries(self, clients: int, examples: int | None) -> int:
        """Returns the size of the population: `clients`, and those who hold canaries."""
        return clients + -(-(self.canaries or 0) // (examples or 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.canaries is not None:
            _validate.integer("canaries", self.canaries, low=1)
        _validate.integer("cohort", self.cohort, low=1)
        if self.rounds is not None:
            _validate.integer("rounds", self.rounds, low=1)
        if self.participation is not None:
            _validate.choice("participation", self.participation, get_args(Scheme))
        _validate.fraction("dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class ClientOptions(OptionGroup):
    """The clients' computation.

    Attributes:
        local_steps: Local SGD steps per client and round, each on all its examples; 1 sends one gradient. With plain
            SGD of rate 1 at the server, more steps are federated averaging.
        local_lr: Learning rate of the local steps.
        examples: Protect single examples instead of whole clients: a client sends the sum of at most this many
            gradients, each clipped by itself.
        clip_quantile: Clip updates to a norm that follows this quantile of their norms (Andrew et al., 2021), starting
            from the clip norm. The same guarantee covers the count this takes; a plan's dimension is one more than the
            model's.
        rescale_every: Rounds between changes of the coordinates' scales, which follow the size of earlier means: noise
            then falls where gradients are large. Correlated noise starts anew at each change. None scales nothing.

    Example:
        >>> ClientOptions(local_steps=4, local_lr=0.05)
        ClientOptions(local_steps=4, local_lr=0.05, examples=None, clip_quantile=None, rescale_every=None)
    """

    local_steps: int = 1
    local_lr: float | None = None
    examples: int | None = None
    clip_quantile: float | None = None
    rescale_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_quantile is not None:
            _validate.probability("clip_quantile", self.clip_quantile)
            if self.examples is not None:
                raise ParameterError("clip_quantile is about whole clients, and examples protects single examples.")
        if self.rescale_every is not None:
            _validate.integer("rescale_every", self.rescale_every, low=1)
            if self.examples is not None:
                raise ParameterError("rescale_every is about whole clients, and examples protects single examples.")
        if self.local_lr is not None:
            _validate.positive("local_lr", self.local_lr)
        if _validate.integer("local_steps", self.local_steps, low=1) > 1 and self.local_lr is None:
            raise ParameterError(f"With local_steps={self.local_steps} clients need a local_lr, a learning rate.")
        if self.examples is not None:
            _validate.integer("examples", self.examples, low=1)
            if self.local_steps > 1:
                raise ParameterError("Example-level privacy is for gradients: give examples or local_steps, not both.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(OptionGroup):
    """The server's step along a round's mean.

    In Python the optimizer may also be a function from parameters to any optimizer of torch.optim, with a learning rate
    and weight decay of its own. The schedule may be a function from the optimizer to any scheduler of
    torch.optim.lr_scheduler.

    Attributes:
        optimizer: The server's optimizer: sgd, momentum, adagrad, adam, adamw, adamax, adadelta, nadam, radam or
            rmsprop.
        lr: The server's learning rate.
        weight_decay: Multiple of each parameter that is added to its gradient; it removes noise that accumulates where
            the loss is flat.
        schedule: Schedule of the learning rate: constant, linear (towards 0 after the last round, which reduces the
            noise of the last steps) or late (the same in the last three tenths only).
        averaging: Decay of a moving average of the models after the rounds, such as 0.98; it is measured and exported
            in place of the last model.

    Example:
        >>> ServerOptions(optimizer="adam", lr=0.01)
        ServerOptions(optimizer='adam', lr=0.01, weight_decay=0.0, schedule='constant', averaging=None)
    """

    optimizer: str | OptimizerFactory = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    schedule: Schedule | ScheduleFactory = "constant"
    averaging: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.optimizer) and self.optimizer not in get_args(OptimizerName):
            raise ParameterError(
                f"Unknown optimizer {self.optimizer!r}. Known are {', '.join(get_args(OptimizerName))}; any other of "
                "torch.optim can be given as a function from parameters to the optimizer."
            )
        _validate.positive("lr", self.lr)
        _validate.non_negative("weight_decay", self.weight_decay)
        if self.averaging is not None:
            _validate.probability("averaging", self.averaging)
        if not callable(self.schedule):
            _validate.choice("schedule", self.schedule, get_args(Schedule))


@dataclass(frozen=True, kw_only=True)
class AccountOptions(OptionGroup):
    """The privacy budget. In Python, fields that are None take the values of the plan, if there is one.

    In Python the ledger may also be an open `Ledger`.

    Attributes:
        epsilon: Largest ε of all rounds together; 2 by default, in Python no limit.
        delta: δ of the guarantee, which should be far below 1 / clients.
        adjacency: Which data sets are neighbours: replace-one or zero-out. The default depends on the participation:
            zero-out with poisson, otherwise replace-one.
        colluding: Clients per round whose noise does not count because they may reveal it.
        ledger: File of the privacy ledger that every round is charged to before its mean is computed.
        population: With `ledger`: the population whose budget pays.
        witness: With `ledger`: a file elsewhere that keeps the ledger's heads, which the ledger must contain.

    Example:
        >>> options = AccountOptions(epsilon=2.0, delta=1e-6, ledger="budget.ledger", population="patients")
        >>> options.epsilon, options.population
        (2.0, 'patients')
    """

    epsilon: float | None = None
    delta: float | None = None
    adjacency: Adjacency | None = None
    colluding: int | None = None
    ledger: Ledger | Path | str | None = None
    population: str | None = None
    witness: Path | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None:
            _validate.positive("epsilon", self.epsilon)
        if self.delta is not None:
            _validate.fraction("delta", self.delta)
        if self.adjacency is not None:
            object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        if self.colluding is not None:
            _validate.integer("colluding", self.colluding, low=0)
        if (self.ledger is None) != (self.population is None):
            raise ParameterError("Give both ledger and population: a ledger may hold several budgets.")
        if self.witness is not None and not isinstance(self.ledger, Path | str):
            raise ParameterError("A witness keeps heads of a ledger: give the ledger's file, too.")


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    """Seed, device, memory and evaluation of a run.

    Attributes:
        seed: First weights, cohorts and noise follow from it: the run can be repeated, and is a simulation that
            protects nobody. With none, noise on a CPU comes from the operating system. None is the default with data of
            your own, with a ledger and in Python.
        device: Device that computes everything: cpu, cuda (an NVIDIA GPU; cuda:1 is the second) or auto.
        memory_limit: MiB that the clients computed together may take, by default 1024 and on a GPU 4096. A run may be
            resumed with another limit.
        evaluate_every: Rounds between evaluations on the test set; there is also one after the last round. Commands
            write a checkpoint as often.

    Example:
        >>> RunOptions(seed=1)
        RunOptions(seed=1, device='cpu', memory_limit=None, evaluate_every=1)
    """

    seed: int | None = None
    device: str = "cpu"
    memory_limit: int | None = None
    evaluate_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            _validate.integer("seed", self.seed, low=0, high=2**63 - 1)
        if self.memory_limit is not None:
            _validate.integer("memory_limit (in MiB)", self.memory_limit, low=1, high=_MOST_MEMORY)
        _validate.integer("evaluate_every", self.evaluate_every, low=1)


@dataclass(frozen=True, kw_only=True)
class FolderOptions(OptionGroup):
    """The folder of a run.

    Attributes:
        run_dir: Folder for checkpoint, charges and metrics; without one nothing is kept. It is locked while the trainer
            lives. It holds the key of the cohorts, which must stay private for sampling to count.
        resume: Continue the run in the folder from its last complete round, if there is one.
        checkpoint_every: Rounds between checkpoints; one is also written after the last.

    Example:
        >>> FolderOptions(run_dir="runs/first", resume=True)
        FolderOptions(run_dir='runs/first', resume=True, checkpoint_every=1)
    """

    run_dir: Path | str | None = None
    resume: bool = False
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("checkpoint_every", self.checkpoint_every, low=1)
        if self.resume and self.run_dir is None:
            raise ParameterError("There is nothing to resume from: give the run_dir of the run to continue.")
