"""Secure aggregation: the server learns the sum of the clients' integers modulo 2^b, and nothing else.

The protocol of Bonawitz et al. (2017) on the sparse graph of Bell et al. (2020): `SecureParameters` fixes a round,
`SecureClient` and `SecureServer` turn messages (bytes) into messages. Carrying them is the engine's part. The protocol
is described in docs/secure-aggregation.md, what it protects in docs/threat-model.md.
"""

from cpsgd.secagg.coordinator import SecureServer as SecureServer
from cpsgd.secagg.coordinator import SecureSum as SecureSum
from cpsgd.secagg.identity_files import create_identity as create_identity
from cpsgd.secagg.identity_files import public_line as public_line
from cpsgd.secagg.identity_files import read_identity as read_identity
from cpsgd.secagg.identity_files import read_roster as read_roster
from cpsgd.secagg.packets import Invitation as Invitation
from cpsgd.secagg.packets import Stage as Stage
from cpsgd.secagg.parameters import Risk as Risk
from cpsgd.secagg.parameters import SecureParameters as SecureParameters
from cpsgd.secagg.parameters import risk as risk
from cpsgd.secagg.participant import SecureClient as SecureClient
from cpsgd.secagg.shamir import offenders as offenders
