"""Federated learning with NVFlare: a controller, an executor, and a recipe that puts them into a job.

On a client, `CpsgdExecutor` around the executor that trains; on the server, `CpsgdController`. See docs/nvflare.md.
"""

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand
from cpsgd.engines.nvflare.executor import CpsgdExecutor as CpsgdExecutor
from cpsgd.engines.nvflare.executor import accepted_round as accepted_round
from cpsgd.engines.nvflare.executor import silo_sum as silo_sum
from cpsgd.federation.limits import Limits as Limits

if TYPE_CHECKING:
    from cpsgd.engines.nvflare.controller import CpsgdController as CpsgdController
    from cpsgd.engines.nvflare.nvflare_questions import answer_question as answer_question
    from cpsgd.engines.nvflare.nvflare_questions import question_controller as question_controller
    from cpsgd.engines.nvflare.nvflare_questions import read_answers as read_answers
    from cpsgd.engines.nvflare.nvflare_questions import zero_model as zero_model
    from cpsgd.engines.nvflare.recipe import CpsgdRecipe as CpsgdRecipe

_HOMES = {
    "CpsgdController": "controller",
    "CpsgdRecipe": "recipe",
    **dict.fromkeys(("answer_question", "question_controller", "read_answers", "zero_model"), "nvflare_questions"),
}
# A client needs none of the names of the server and of the job's author.
__getattr__ = on_demand(__name__, _HOMES)
