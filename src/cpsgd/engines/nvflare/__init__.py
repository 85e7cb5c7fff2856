"""Federated learning with NVFlare: a controller, an executor, and a recipe that puts them into a job.

On a client, `CpsgdExecutor` around the executor that trains; on the server, `CpsgdController`. See docs/nvflare.md.
"""

from typing import TYPE_CHECKING, Any

from cpsgd.engines.nvflare.executor import CpsgdExecutor as CpsgdExecutor
from cpsgd.engines.nvflare.executor import silo_sum as silo_sum
from cpsgd.federation.limits import Limits as Limits

if TYPE_CHECKING:
    from cpsgd.engines.nvflare.controller import CpsgdController as CpsgdController
    from cpsgd.engines.nvflare.questions import answer_question as answer_question
    from cpsgd.engines.nvflare.questions import question_controller as question_controller
    from cpsgd.engines.nvflare.questions import read_answers as read_answers
    from cpsgd.engines.nvflare.questions import zero_model as zero_model
    from cpsgd.engines.nvflare.recipe import CpsgdRecipe as CpsgdRecipe

_MODULES = {
    "CpsgdController": "controller",
    "CpsgdRecipe": "recipe",
    **dict.fromkeys(("answer_question", "question_controller", "read_answers", "zero_model"), "questions"),
}


def __getattr__(name: str) -> Any:
    """The names of the server and of the job's author, on demand: a client needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
