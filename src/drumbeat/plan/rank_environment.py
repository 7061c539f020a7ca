"""Do the ranks have the environment that they were given? A command, its setup or a container may change it."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from drumbeat.base.order import EnvVar
from drumbeat.base.ranges import named_ranks
from drumbeat.findings.model import Evidence, Finding
from drumbeat.plan.binding import Binding

_SHOWN = 8
# Each process has its own value: what a launcher of MPI tells its tasks about themselves.
_OF_ONE_PROCESS = ("OMPI_MCA_ess_", "OMPI_MCA_orte_", "PMIX_", "PMI_")


def changed(
    environments: Mapping[int, Mapping[str, str]], expected: Sequence[EnvVar], binding: Binding, first_rank: int
) -> List[Finding]:
    """One finding per variable that ranks have with another value than planned."""
    own = {first_rank + slot.local_rank: {each.name: each.value for each in slot.env} for slot in binding.slots}
    wrong: Dict[str, List[Tuple[int, str, str]]] = {}
    for rank, environ in sorted(environments.items()):
        planned = {variable.name: variable.value for variable in expected}
        planned.update(own.get(rank, {}))
        for name, value in planned.items():
            if environ.get(name) != value and not name.startswith(_OF_ONE_PROCESS):
                wrong.setdefault(name, []).append((rank, environ.get(name, "unset"), value))
    return [_finding(name, ranks, sorted(environments)) for name, ranks in wrong.items()]


def _finding(name: str, ranks: Sequence[Tuple[int, str, str]], looked_at: Sequence[int]) -> Finding:
    rank, value, planned = ranks[0]
    who = f"rank {rank} has" if len(ranks) == 1 else f"{len(ranks)} of {len(looked_at)} ranks have"
    return Finding(
        "environment-mismatch",
        "warning",
        f"{who} {name}={value}, planned was {planned}",
        "the command, its setup or its container changed it",
        "set it in the job's env, which wins over a site and over what is detected",
        tuple(Evidence(f"rank {each}: {name}={now}") for each, now, _ in ranks[:_SHOWN]),
        rank=rank,
        seen=(f"the environment of {named_ranks(looked_at, _SHOWN)} in /proc",),
    )
