"""JAX learns from drumbeat who a rank is. A small stand-in has JAX's contract for clusters; `make versions` asks JAX itself."""

import json
import os
import sys

import pytest

# jax._src.clusters, as far as jax.distributed.initialize() uses it: subclasses register themselves, the first that is present
# answers what the program leaves open, and a local process id restricts the process to that one device.
CLUSTERS = """
import os

class ClusterEnv:
    _cluster_types = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls._cluster_types.append(cls)

    @classmethod
    def detect(cls):
        env = next((each for each in cls._cluster_types if each.is_env_present()), None)
        if env is None:
            return None
        address = env.get_coordinator_address(timeout_secs=300, override_coordinator_port=None)
        return [env.name, address, env.get_process_count(), env.get_process_id(), env.get_local_process_id()]

class SlurmCluster(ClusterEnv):
    name = "slurm"

    @classmethod
    def is_env_present(cls): return "SLURM_PROCID" in os.environ
    @classmethod
    def get_coordinator_address(cls, timeout_secs, override_coordinator_port): return "wrong:1"
    @classmethod
    def get_process_count(cls): return 1
    @classmethod
    def get_process_id(cls): return 0
    @classmethod
    def get_local_process_id(cls): return int(os.environ["SLURM_LOCALID"])
"""
PROGRAM = """
import json, os, sys
from jax._src.clusters import ClusterEnv
seen = {"answer": ClusterEnv.detect(), "path": sys.path, "master": os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
        "devices": os.environ.get("JAX_LOCAL_DEVICE_IDS"), "greeting": getattr(sys, "greeting", None)}
json.dump(seen, open("seen-" + os.environ["NODE_RANK"] + "-" + os.environ.get("LOCAL_RANK", "x"), "w"))
"""
SLURM = ("env", "SLURM_PROCID=0", "SLURM_LOCALID=0")


@pytest.fixture
def asked(drumbeat, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("JAX_", "DRUMBEAT_ADAPTERS", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)
    package = drumbeat.folder / "jax" / "_src" / "clusters"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CLUSTERS)
    (drumbeat.folder / "ask.py").write_text(PROGRAM)

    def ask(*words, before=()):
        done = drumbeat("run", "--site", "localhost", *words, "--", *before, sys.executable, "ask.py")
        assert done.returncode == 0, done.stdout + done.stderr
        return {path.name[5:]: json.loads(path.read_text()) for path in drumbeat.folder.glob("seen-*")}

    return ask


def answers(seen):
    assert all(each["answer"][:2] == ["drumbeat", each["master"]] for each in seen.values()), seen
    return {who: each["answer"][2:] for who, each in sorted(seen.items())}


@pytest.mark.parametrize("before", [(), SLURM], ids=["plain", "in a Slurm step"])
def test_one_process_per_rank(asked, before):
    seen = asked("--nodes", 2, "--ranks-per-node", 2, before=before)
    assert answers(seen) == {"0-0": [4, 0, 0], "0-1": [4, 1, 1], "1-0": [4, 2, 0], "1-1": [4, 3, 1]}
    assert not any("adapters" in place for each in seen.values() for place in each["path"]), "no trace in sys.path"


def test_one_process_per_node_takes_all_devices(asked):
    """JAX's Slurm cluster would restrict it to device 0."""
    seen = asked("--nodes", 2, "--ranks-per-node", 1, before=SLURM)
    assert answers(seen) == {"0-0": [2, 0, None], "1-0": [2, 1, None]}


def test_a_command_started_once_is_one_process_per_node(asked):
    seen = asked("--nodes", 2, "--launcher", "once", "--ranks-per-node", 2, before=SLURM)
    assert answers(seen) == {"0-x": [2, 0, None], "1-x": [2, 1, None]}


def test_a_rank_that_sees_only_its_own_device_takes_that(asked):
    seen = asked("--ranks-per-node", 2, before=("env", "CUDA_VISIBLE_DEVICES=3"))
    assert answers(seen) == {"0-0": [2, 0, None], "0-1": [2, 1, None]}


def test_the_users_own_sitecustomize_and_path_stay(asked, drumbeat, monkeypatch):
    own = drumbeat.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.greeting = __file__\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(own), os.environ["PYTHONPATH"])))
    (seen,) = asked("--ranks-per-node", 1).values()
    assert seen["greeting"] == str(own / "sitecustomize.py") and str(own) in seen["path"]
    assert seen["answer"][0] == "drumbeat"


def test_a_setup_that_sets_the_path_anew_keeps_the_adapter(asked, drumbeat):
    (drumbeat.folder / "job.yaml").write_text(
        f"command: {sys.executable} ask.py\nranks-per-node: 2\nsetup: export PYTHONPATH=/elsewhere\n"
    )
    done = drumbeat("run", "--site", "localhost", "job.yaml")
    assert done.returncode == 0, done.stderr
    seen = json.loads((drumbeat.folder / "seen-0-1").read_text())
    assert seen["answer"][0] == "drumbeat" and "/elsewhere" in seen["path"]


def test_a_missing_module_names_the_python_that_lacks_it_and_the_environment_that_has_it(drumbeat, monkeypatch):
    (drumbeat.folder / "train.py").write_text("import json, not_there.part")
    shown = drumbeat("run", "--ranks-per-node", "1", "--", sys.executable, "train.py").stderr
    assert f"cause      {sys.executable}, which ran this rank, does not have it: it is not installed there" in shown
    assert f"{drumbeat.folder}/train.py:1" in shown and f"fix        {sys.executable} -m pip install NAME" in shown
    (drumbeat.folder / "venv" / "lib" / "python3.9" / "site-packages" / "not_there").mkdir(parents=True)
    shown = drumbeat("run", "--ranks-per-node", "1", "--", sys.executable, "train.py").stderr
    assert f"does not have it; {drumbeat.folder}/venv does; raised at {drumbeat.folder}/train.py:1" in shown
    assert f"begin the command with {drumbeat.folder}/venv/bin/python" in shown
    (own := drumbeat.folder / "own").mkdir()
    (own / "gone.py").write_text("")
    (drumbeat.folder / "train.py").write_text(f"import sys; sys.path.remove({str(own)!r}); import gone")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(own), os.environ["PYTHONPATH"])))
    shown = drumbeat("run", "--ranks-per-node", "1", "--", sys.executable, "train.py").stderr
    assert f"had it in {own}, which the program has taken off sys.path" in shown
    (drumbeat.folder / "train.py").write_text("import colections")
    shown = drumbeat("run", "--ranks-per-node", "1", "--", sys.executable, "train.py").stderr
    assert "does not have it; it has collections" in shown and "if collections was meant, correct the import" in shown
    (drumbeat.folder / "train.py").write_text("import json.not_there")
    shown = drumbeat("run", "--ranks-per-node", "1", "--", sys.executable, "train.py").stderr
    assert "cause      by likelihood: it is not installed in this Python" in shown  # its package is
    (drumbeat.folder / "train.py").write_text(
        "try:\n    import not_there\nexcept ImportError as error:\n    raise RuntimeError('no data') from error\n"
    )
    shown = drumbeat("run", "--ranks-per-node", "1", "--", sys.executable, "train.py").stderr
    assert f"does not have it; {drumbeat.folder}/venv does" in shown


def test_it_can_be_switched_off(asked, monkeypatch):
    monkeypatch.setenv("DRUMBEAT_ADAPTERS", "off")
    (seen,) = asked("--ranks-per-node", 1).values()
    assert seen["answer"] is None


def test_an_adapter_that_does_not_fit_says_so_and_stops_nothing(asked, drumbeat):
    (drumbeat.folder / "jax" / "_src" / "clusters" / "__init__.py").write_text(
        "class ClusterEnv:\n    detect = staticmethod(lambda: 'another contract')\n"
    )
    (seen,) = asked("--ranks-per-node", 1).values()
    assert seen["answer"] == "another contract"
    (log,) = drumbeat.run_folder().glob("nodes/0/attempt-0/rank-0.err")
    assert "drumbeat: jax_cluster.py failed" in log.read_text()


# TensorFlow and Paddle, as far as the adapters touch them; `make versions` asks the real ones.
STAND_INS = {
    "tensorflow/python/distribute/cluster_resolver/tfconfig_cluster_resolver.py": """
import json, os
def _load_tf_config(): return json.loads(os.environ.get("TF_CONFIG", "{}"))
""",
    "paddle/distributed/parallel.py": """
import os
def init_parallel_env(): return {name: value for name, value in os.environ.items() if name.startswith("PADDLE_")}
""",
}
ASKS = {
    "tensorflow": (
        "from tensorflow.python.distribute.cluster_resolver import tfconfig_cluster_resolver as c\nanswer = c._load_tf_config()"
    ),
    "paddle": "from paddle.distributed.parallel import init_parallel_env\nanswer = init_parallel_env()",
}


@pytest.fixture
def told(drumbeat):
    for name, text in STAND_INS.items():
        path = drumbeat.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def tell(framework, *words):
        (drumbeat.folder / "ask.py").write_text(
            f"import json, os\n{ASKS[framework]}\n"
            "where = [os.environ['MASTER_ADDR'] + ':' + os.environ['MASTER_PORT'], answer]\n"
            "json.dump(where, open('seen-' + os.environ.get('RANK', 'n' + os.environ['NODE_RANK']), 'w'))\n"
        )
        done = drumbeat("run", "--site", "localhost", *words, "--", sys.executable, "ask.py")
        assert done.returncode == 0, done.stdout + done.stderr
        return {path.name[5:]: json.loads(path.read_text()) for path in drumbeat.folder.glob("seen-*")}

    return tell


@pytest.mark.parametrize(
    ("words", "count"), [(("--nodes", 2, "--ranks-per-node", 2), 4), (("--nodes", 2, "--launcher", "once"), 2)]
)
def test_tensorflow_is_told_all_workers(told, words, count):
    answers = [answer for _, (_, answer) in sorted(told("tensorflow", *words).items())]
    assert [each["task"] for each in answers] == [{"type": "worker", "index": index} for index in range(count)]
    (workers,) = {tuple(each["cluster"]["worker"]) for each in answers}
    assert len(set(workers)) == count


def test_paddle_is_told_all_workers(told):
    answers = [answer for _, (_, answer) in sorted(told("paddle", "--nodes", 2, "--ranks-per-node", 1).items())]
    workers = answers[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert [each["PADDLE_CURRENT_ENDPOINT"] for each in answers] == workers and len(set(workers)) == 2
    assert [each["PADDLE_TRAINER_ID"] for each in answers] == ["0", "1"]
    assert answers[1]["PADDLE_TRAINERS_NUM"] == "2"


def test_one_rank_is_told_nothing(told):
    assert told("tensorflow", "--ranks-per-node", 1)["0"][1] == {}
