"""A node whose tasks have a part of its cores each, and a program that needs mpirun."""

from drumbeat.agent.agent import check_node
from drumbeat.agent.ranks.tasks import Tasks
from drumbeat.agent.wire.messages import TaskHello
from drumbeat.commands.program import ABOUT_MPI
from drumbeat.plan.environment import environment
from drumbeat.plan.show import plan_node
from tests.plan.making import machine, named, order, peers


def codes(findings):
    return [each.code for each in findings]


def test_the_cores_of_all_tasks_are_those_of_the_node():
    """mpirun binds each task to one core: the task that speaks for the node sees only its own."""
    job, here, tasks = order(nodes=1, emulated=False, launcher="tasks"), machine(1), Tasks()
    assert "ranks-share-cores" in codes(check_node(job, here, 0, tasks, ()))
    tasks.views = {0: TaskHello(0, (0,)), 1: TaskHello(1, (1,))}
    both = tasks.facts(machine(2))
    assert "ranks-share-cores" not in codes(check_node(job, machine(2), 0, tasks, ()))
    assert "share" not in named(environment(job, both, peers(both), 0))["OMP_NUM_THREADS"].why.replace(
        "equal share", ""
    )


def test_a_program_of_mpi_without_mpirun_is_warned_of():
    here = machine(4)
    found = plan_node(order(launcher_why="default" + ABOUT_MPI), here, peers(here), 0).findings
    (mpi,) = [each for each in found if each.code == "mpi-without-mpirun"]
    assert mpi.severity == "warning" and "mpirun -n 4 drumbeat run" in mpi.fix
    alone = order(launcher_why="default" + ABOUT_MPI, nodes=1, ranks_per_node=1)
    assert "mpi-without-mpirun" not in codes(plan_node(alone, here, peers(here), 0).findings)
