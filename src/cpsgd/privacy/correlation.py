"""`cpsgd.correlation` among what a run protects: mechanisms, which rest on it, are below this room."""

from cpsgd.correlation import WEIGHT_BITS as WEIGHT_BITS
from cpsgd.correlation import Correlation as Correlation
