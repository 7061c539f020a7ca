"""Host files, names of hosts, the line that ssh runs, and what its complaints mean; without a network."""

import hashlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from drumbeat import backends
from drumbeat.backends.ssh import Ssh, connection
from drumbeat.backends.ssh.loader import MARK
from drumbeat.base.order import Option, Resources
from drumbeat.base.problem import Problem
from drumbeat.jobfile.flags import read_hostfile
from drumbeat.jobfile.job import job_from_text
from tests.conftest import wait_for
from tests.plan.making import order


@pytest.mark.parametrize(
    "text,hosts",
    [
        ("[a, b]", ("a", "b")),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("u@n[1-2],b", ("u@n1", "u@n2", "b")),
        ("[gpu1, 'me@gpu[2-3]']", ("gpu1", "me@gpu2", "me@gpu3")),
    ],
)
def test_hosts_of_a_job(text, hosts):
    assert job_from_text(f"hosts: {text}").hosts == hosts


@pytest.mark.parametrize("text", ["[]", "''", "{a: 1}", "a b", "'n[1-'", "a;reboot"])
def test_hosts_that_are_none(text):
    with pytest.raises(Problem):
        job_from_text(f"hosts: {text}")


@pytest.mark.parametrize("host", ["-oProxyCommand=reboot", "", "a b", "$(reboot)", "a\nb", "@a"])
def test_a_host_is_never_an_option_or_a_command(host):
    with pytest.raises(Problem):
        connection.check_host(host, "hosts")


def test_host_files_of_others():
    assert read_hostfile("a slots=8\nb slots=8 max_slots=8\n", "f") == {"a": 8, "b": 8}  # Open MPI, DeepSpeed
    assert read_hostfile("# mine\na:4\n\nb:4  # MPICH\n", "f") == {"a": 4, "b": 4}
    assert read_hostfile("n[1-2]\n", "f") == {"n1": 0, "n2": 0}
    assert read_hostfile("a\tslots=4\r\nb\tslots=4 # x\r\n", "f") == {"a": 4, "b": 4}
    assert read_hostfile("a max_slots=8\n", "f") == {"a": 0}
    assert read_hostfile("fe80::1%eth0\n[fd00::2] slots=2\n", "f") == {"fe80::1%eth0": 0, "fd00::2": 2}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "a\na\n",
        "a slots=abc\n",
        "a slots=0\n",
        "a slots=-3\n",
        "a slots=99999\n",
        "a:x\n",
        "a:0\n",
        "a b c\n",
        "gpu1 ansible_host=10.0.0.1\n",
        "[gpu]\na\n",
        "\0\1binary",
        "a\0b\n",
        "-oProxyCommand=x\n",
        "a;reboot\n",
        "$(x)\n",
        "x" * 5000,
        "n[1-\n",
        "n[1-99999999]\n",
        "user@\n",
        "\x1b[2J\n",
    ],
)
def test_junk_in_a_host_file_is_one_clear_error(text):
    """A word that is skipped would be a host or a number of ranks that nobody meant."""
    with pytest.raises(Problem) as caught:
        read_hostfile(text, "f")
    assert str(caught.value).startswith("f:") and len(str(caught.value)) < 400
    assert str(caught.value).replace("\n", "").isprintable()


def test_reasons():
    def why(code, complaint):
        return " ".join(connection.reason("h", code, complaint))

    assert "3.6" in why(1, "drumbeat-python 3.6\n")
    assert "its python3 is Python 2" in why(
        2, "Unknown option: -I\nusage: python2 [option] ...\nTry `python -h' for more"
    )
    # ssh has let us in: neither the key nor the network is at fault
    denied = why(126, "bash: line 1: /usr/bin/python3: Permission denied")
    assert "its python3 ended with exit code 126: bash: line 1" in denied and "ssh h python3 --version" in denied
    assert "password" not in denied and "ssh h true" not in denied
    broken = connection.reason("h", 1, "Traceback\nOSError: no room", answered=True)
    assert broken == ("drumbeat ended there with exit code 1: OSError: no room", "")
    assert "no python3" in why(127, "bash: line 1: python3: command not found")
    assert "host key has changed" in why(
        255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
    )
    assert "ssh ended with 255: kex" in why(255, "kex_exchange_identification: Connection closed")


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "fish"])
@pytest.mark.parametrize("python", ["", os.path.dirname(sys.executable) + "/pytho?"])
def test_the_line_works_in_any_login_shell(shell, python, tmp_path):
    """sshd gives the line to the login shell; what runs is the first text on standard input."""
    line = connection.remote_command(python)
    done = subprocess.run(
        [shell, "-c", line], input=b"print(6 * 7)\0rest", capture_output=True, timeout=60, check=False
    )
    assert done.stdout.strip() == b"42", done.stderr


@pytest.mark.parametrize("came", [b"", b"print(6 * 7)"])
def test_a_connection_that_is_lost_before_the_nul_leaves_nobody(came):
    line = connection.remote_command(sys.executable)
    done = subprocess.run(["sh", "-c", line], input=came, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_an_old_python_says_which_it_is():
    code = f"import sys\nsys.version_info = (3, 6, 8)\nexec({connection._START!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert "3.6" in connection.reason("h", done.returncode, done.stderr)[0]


LISTENS = """
import sys, time
from drumbeat.desk.start import hosted_node
def work():
    print("up", flush=True)
    time.sleep(60)
    return 0
sys.exit(hosted_node._attached(work, 0.2, float(sys.argv[1])))
"""


@pytest.mark.parametrize("how", ["silence", "end", "word"])
def test_a_host_ends_its_part_without_its_desk(how):
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, "1" if how == "silence" else "60"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "src"},
    )  # fmt: skip
    assert process.stdout.readline() == b"up\n"
    if how == "end":
        process.stdin.close()
    elif how == "word":
        process.stdin.write(b"beat\nTERM\n")
        process.stdin.flush()
    wait_for(lambda: process.poll() is not None, 120)
    assert process.returncode == 128 + signal.SIGTERM
    process.stdout.close()


def test_the_loader_refuses_a_folder_that_others_can_write_to(tmp_path):
    (tmp_path / "drumbeat").mkdir(mode=0o777)
    os.chmod(tmp_path / "drumbeat", 0o777)
    loader = os.path.dirname(connection.__file__) + "/loader.py"
    digest = hashlib.sha256(b"x").hexdigest()
    done = subprocess.run([sys.executable, loader], input=f"{digest}\n".encode(), capture_output=True, check=False,
                          env={"XDG_CACHE_HOME": str(tmp_path), "PATH": os.environ["PATH"]})  # fmt: skip
    assert MARK.encode() in done.stdout and b"others can write" in done.stdout and done.returncode == 1


def test_what_has_no_effect_on_ssh_hosts_is_named():
    asked = Resources(account="team", options=(Option("--pvc scratch:/scratch", "as the job asks"),))
    (note,) = backends.get("ssh").notes(order(backend="ssh", resources=asked))
    assert note == "no scheduler on ssh hosts, so these have no effect: account, --pvc scratch:/scratch"
    assert backends.get("ssh").notes(order(backend="ssh")) == []


@pytest.mark.parametrize(
    "words,said",
    [
        (("submit", "--site", "ssh", "--", "true"), "1 node, but none are named"),
        (("run", "--hosts", "a", "--nodes", "3", "--", "true"), "3 nodes, but 1 is named"),
        (("run", "--hosts", "a,a", "--", "true"), "a is named twice"),
        (("run", "--hosts", "a,b", "--site", "lumi", "--", "true"), "chosen by Slurm"),
        (("run", "--hostfile", "none", "--", "true"), "none: No such file"),
    ],
)
def test_mistakes_are_one_message(words, said, home, tmp_path, monkeypatch, capsys):
    from drumbeat.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    assert said in capsys.readouterr().err


class Answering:
    """A session with a host that has been told to start, and whose answer comes with the next turn."""

    def __init__(self, host, answer):
        self.host, self.over, self.replies, self.answer = host, False, {"prepared": {}}, answer

    def reply(self, name):
        return self.replies.get(name)


@pytest.mark.parametrize("prepared, stopped", [(True, ["oar1"]), (False, [])])
def test_a_host_whose_answer_is_still_on_its_way_is_stopped_too(tmp_path, monkeypatch, prepared, stopped):
    """The other one has failed at the last. Where not all were ready, none was told to start, and nothing is waited for."""
    asked = []
    monkeypatch.setattr("drumbeat.backends.ssh.connection.ask", lambda host, *_: asked.append(host))
    one, two = Answering("oar1", {"started": {"pid": 7}}), Answering("oar2", {"error": "No space left on device"})
    two.replies.update(two.answer)
    if not prepared:
        del two.replies["prepared"]
    turns = []

    def turn(seconds):
        turns.append(seconds)
        one.replies.update(one.answer)

    sessions = SimpleNamespace(all=[one, two], turn=turn)
    Ssh()._stop_started(sessions, order(folder=str(tmp_path), hosts=("oar1", "oar2")), {})
    assert asked == stopped and len(turns) == len(stopped)
