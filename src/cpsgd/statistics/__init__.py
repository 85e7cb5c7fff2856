"""Private statistics over points: k-means and principal components."""

from cpsgd.statistics.clusters import kmeans as kmeans
from cpsgd.statistics.components import pca as pca
