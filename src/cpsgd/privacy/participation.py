"""`cpsgd.participation` under the name it had in 0.2.0."""

from cpsgd.participation import Participation as Participation
from cpsgd.participation import Scheme as Scheme
