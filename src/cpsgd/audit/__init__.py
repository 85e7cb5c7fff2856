"""An empirical check of claims: attack real rounds, and see whether more is learned than the proof allows.

`audit` plays many rounds through the code under audit, with neighbours as far apart as they can be. It lets the best
attacker guess which was played, and turns its success into a lower bound on ε. It also checks that the sums follow the
protocol's exact law. docs/auditing.md says what is proved and what each check is for.
"""

from __future__ import annotations

from cpsgd.audit.auditing import AuditReport as AuditReport
from cpsgd.audit.auditing import Claim as Claim
from cpsgd.audit.auditing import audit as audit
from cpsgd.audit.bound import epsilon_lower_bound as epsilon_lower_bound
from cpsgd.audit.cases import Case as Case
from cpsgd.audit.cases import all_cases as all_cases
from cpsgd.audit.checks import Check as Check
from cpsgd.audit.playing import Encode as Encode
from cpsgd.audit.playing import ServerHalf as ServerHalf
from cpsgd.audit.playing import Start as Start
from cpsgd.audit.surveys import Coverage as Coverage
from cpsgd.audit.surveys import Survey as Survey
from cpsgd.audit.surveys import survey as survey
