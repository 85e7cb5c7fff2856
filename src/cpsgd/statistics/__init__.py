"""Private statistics: means, sums, counts, histograms and quantiles of tables; k-means and principal components.

In two forms with one meaning: `mean(table, ...)` over a table on this machine, and `Mean(...).plan(...)`, whose
`encode` runs on each client and whose `aggregate` runs on the server. docs/statistics.md has the whole story.
"""

from cpsgd.statistics.clusters import Clusters as Clusters
from cpsgd.statistics.clusters import NoiseWarning as NoiseWarning
from cpsgd.statistics.clusters import kmeans as kmeans
from cpsgd.statistics.components import Components as Components
from cpsgd.statistics.components import pca as pca
from cpsgd.statistics.histograms import Histogram as Histogram
from cpsgd.statistics.home import count as count
from cpsgd.statistics.home import histogram as histogram
from cpsgd.statistics.home import mean as mean
from cpsgd.statistics.home import quantiles as quantiles
from cpsgd.statistics.home import sum as sum
from cpsgd.statistics.questions import Planned as Planned
from cpsgd.statistics.ranks import Quantiles as Quantiles
from cpsgd.statistics.releases import ClippingWarning as ClippingWarning
from cpsgd.statistics.results import Statistic as Statistic
from cpsgd.statistics.totals import Count as Count
from cpsgd.statistics.totals import Mean as Mean
from cpsgd.statistics.totals import Sum as Sum
