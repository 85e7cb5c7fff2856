"""Private statistics: means, sums, counts, histograms and quantiles of tables; k-means and principal components.

There are two forms with one meaning: `mean(table, ...)` of a table on this machine, and `Mean(...).plan(...)`, whose
`encode` runs on each client and whose `aggregate` runs on the server. See docs/statistics.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand

if TYPE_CHECKING:
    from cpsgd.statistics.aggregates import Count as Count
    from cpsgd.statistics.aggregates import Mean as Mean
    from cpsgd.statistics.aggregates import Sum as Sum
    from cpsgd.statistics.clusters import Clusters as Clusters
    from cpsgd.statistics.clusters import NoiseWarning as NoiseWarning
    from cpsgd.statistics.clusters import kmeans as kmeans
    from cpsgd.statistics.components import Components as Components
    from cpsgd.statistics.components import pca as pca
    from cpsgd.statistics.histograms import Histogram as Histogram
    from cpsgd.statistics.one_machine import count as count
    from cpsgd.statistics.one_machine import histogram as histogram
    from cpsgd.statistics.one_machine import mean as mean
    from cpsgd.statistics.one_machine import quantiles as quantiles
    from cpsgd.statistics.one_machine import sum as sum
    from cpsgd.statistics.partial import Job as Job
    from cpsgd.statistics.partial import Partial as Partial
    from cpsgd.statistics.planned import Planned as Planned
    from cpsgd.statistics.questionnaire import TableReport as TableReport
    from cpsgd.statistics.questionnaire import report as report
    from cpsgd.statistics.ranks import Quantiles as Quantiles
    from cpsgd.statistics.results import CutOff as CutOff
    from cpsgd.statistics.results import Statistic as Statistic
    from cpsgd.statistics.table_release import ClippingWarning as ClippingWarning
    from cpsgd.statistics.table_release import TableQuestion as TableQuestion
    from cpsgd.statistics.table_release import prepare as prepare

_NAMES = {
    "aggregates": ("Count", "Mean", "Sum"),
    "histograms": ("Histogram",),
    "clusters": ("Clusters", "NoiseWarning", "kmeans"),
    "components": ("Components", "pca"),
    "one_machine": ("count", "histogram", "mean", "quantiles", "sum"),
    "planned": ("Planned",),
    "questionnaire": ("TableReport", "report"),
    "ranks": ("Quantiles",),
    "partial": ("Job", "Partial"),
    "table_release": ("ClippingWarning", "TableQuestion", "prepare"),
    "results": ("CutOff", "Statistic"),
}
__getattr__ = on_demand(__name__, {name: module for module, names in _NAMES.items() for name in names})
