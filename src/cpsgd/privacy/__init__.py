"""What a round protects: proved upper bounds on ε, each resting on a named theorem."""

from __future__ import annotations

from cpsgd.privacy.adjacency import Adjacency as Adjacency
from cpsgd.privacy.adjacency import lattice_sensitivity as lattice_sensitivity
from cpsgd.privacy.certificate import GaussianCertificate as GaussianCertificate
from cpsgd.privacy.certificate import gaussian_certificate as gaussian_certificate
