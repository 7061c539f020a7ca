"""How often the kernel killed for lack of memory, by either version of cgroups, or by the whole node's count."""

import pytest

from drumbeat.inspector.kernel_log import node_oom_kills, oom_kills

V1 = "9:name=systemd:/x\n4:memory:/slurm/job_7\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"


class Files:
    def __init__(self, files):
        self.files = files

    def read(self, path):
        return self.files.get(path)

    def list(self, path):
        return sorted({name[len(path) + 1 :].split("/")[0] for name in self.files if name.startswith(path + "/")})


@pytest.mark.parametrize(
    "files, count",
    [
        (
            {
                "/proc/self/cgroup": V1,
                "/sys/fs/cgroup/memory/slurm/job_7/memory.oom_control": "under_oom 0\noom_kill 3\n",
                "/sys/fs/cgroup/memory/slurm/job_7/step_0/memory.oom_control": "oom_kill 0\n",
                "/sys/fs/cgroup/memory/slurm/job_7/step_0/task_1/memory.oom_control": "oom_kill 2\n",
            },
            5,
        ),
        (
            {
                "/proc/self/cgroup": V2,
                # the nearest that counts
                "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/memory.events": "oom 9\noom_kill 2\noom_group_kill 0\n",
                "/sys/fs/cgroup/memory.events": "oom_kill 70\n",
                "/proc/vmstat": "oom_kill 80\n",
            },
            2,
        ),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.events": "low 0\noom_kill 5\n"}, 5),
        ({"/proc/self/cgroup": V2, "/proc/vmstat": "nr_free_pages 7\noom_kill 1\n"}, 1),
        ({"/proc/self/cgroup": "0::/../../../etc\n", "/proc/vmstat": "pgfault 7\n"}, None),
        ({}, None),
    ],
)
def test_counts(files, count):
    assert oom_kills(Files(files)) == count


def test_the_nodes_count():
    assert node_oom_kills(Files({"/proc/vmstat": "nr_free_pages 7\noom_kill 4\n"})) == 4
    assert node_oom_kills(Files({})) is None
