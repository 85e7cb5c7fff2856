"""Proved upper bounds on ε of runs, each with the theorem that it rests on."""

from __future__ import annotations

from cpsgd.neighbours import Adjacency as Adjacency
from cpsgd.neighbours import Participation as Participation
from cpsgd.privacy.accountant import NoiseBudget as NoiseBudget
from cpsgd.privacy.accountant import solve as solve
from cpsgd.privacy.gaussian import analytic_epsilon as analytic_epsilon
from cpsgd.privacy.gaussian import analytic_sigma as analytic_sigma
from cpsgd.privacy.gaussian import classical_epsilon as classical_epsilon
from cpsgd.privacy.gaussian import classical_sigma as classical_sigma
from cpsgd.privacy.gaussian import gdp_delta as gdp_delta
from cpsgd.privacy.gaussian import gdp_epsilon as gdp_epsilon
from cpsgd.privacy.gaussian import gdp_mu as gdp_mu
from cpsgd.privacy.guarantees import CITATIONS as CITATIONS
from cpsgd.privacy.guarantees import Guarantee as Guarantee
from cpsgd.privacy.guarantees import guarantee as guarantee
from cpsgd.privacy.guarantees import guarantee_over_rounds as guarantee_over_rounds
from cpsgd.privacy.outsiders import outsiders_epsilon as outsiders_epsilon
from cpsgd.privacy.proofs.certified_gaussian import GaussianCertificate as GaussianCertificate
from cpsgd.privacy.proofs.certified_gaussian import certified_epsilon as certified_epsilon
from cpsgd.privacy.proofs.certified_gaussian import gaussian_certificate as gaussian_certificate
from cpsgd.privacy.proofs.certified_renyi import RenyiCertificate as RenyiCertificate
from cpsgd.privacy.proofs.certified_renyi import renyi_certificate as renyi_certificate
from cpsgd.privacy.proofs.per_round import optimal_composition as optimal_composition

RoundsGuarantee = Guarantee
"""The name in 0.2.0 of a guarantee over rounds."""
