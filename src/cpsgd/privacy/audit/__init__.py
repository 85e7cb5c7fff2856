"""An empirical check of what is claimed: attack real rounds, and see whether more is learned than the proof allows.

`audit` plays many rounds through the code under audit, with neighbours as far apart as they can be, lets the best
attacker there is guess which was played, and turns its success into a lower bound on ε. Beside that it checks that the
sums follow the protocol's exact law. What is proved and what each check is for: docs/auditing.md.
"""

from __future__ import annotations

from cpsgd.privacy.audit._audit import audit as audit
from cpsgd.privacy.audit._bound import epsilon_lower_bound as epsilon_lower_bound
from cpsgd.privacy.audit._checks import Check as Check
from cpsgd.privacy.audit._report import AuditReport as AuditReport
from cpsgd.privacy.audit._report import Claim as Claim
from cpsgd.privacy.audit._stage import Carrier as Carrier
from cpsgd.privacy.audit._stage import Encode as Encode
from cpsgd.privacy.audit._stage import Start as Start
