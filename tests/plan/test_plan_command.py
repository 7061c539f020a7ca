"""drumbeat plan and drumbeat doctor, as they are typed."""

import json

import pytest

from drumbeat.base.order import dump_order
from drumbeat.base.record import to_json
from drumbeat.cli import main
from drumbeat.machine.gather import gather
from drumbeat.machine.replay import FolderHost
from tests.plan.making import machine, order
from tests.trees.archetypes import build


@pytest.fixture(scope="module")
def lumi(tmp_path_factory):
    """Two nodes of LUMI, as folders."""
    folders = [tmp_path_factory.mktemp("lumi") for _ in range(2)]
    for node, folder in enumerate(folders):
        build("lumi-g", folder, node)
    return [str(folder) for folder in folders]


def test_a_table_with_reasons(lumi, capsys):
    assert main(["plan", "--root", lumi[0], "--root", lumi[1], "--", "python", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "train on lumi: 2 nodes x 8 ranks" in out
    lines = out.splitlines()
    why = lines[lines.index("NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3") + 1]
    assert why.startswith("    site: ") and "management network" in why
    assert "command   python train.py" in lines
    assert "--cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000," in out
    assert "node 1 (nid005027) differs in:" in out and "miopen-cache-1" in out
    assert "left alone" not in out
    assert main(["plan", "--explain", "--root", lumi[0], "--nodes", "2", "--", "x"]) == 0
    out = capsys.readouterr().out
    assert "left alone:" in out and "HF_HOME" in out and "1 more node: not looked at" in out


def test_one_node_here_is_no_emulated_one_and_empty_headings_are_left_out(capsys, monkeypatch):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    asked = ["plan", "--site", "localhost", "--ranks-per-node", "2"]
    assert main([*asked, "--explain", "--", "x"]) == 0
    out = capsys.readouterr().out
    assert (
        "localhost: 1 node x 2 ranks" in out
        and "emulated" not in out
        and "loopback, all ranks are on this machine" in out
    )
    assert not out.rstrip().endswith("left alone:") and "left alone:\n\n" not in out
    assert "TORCH_FR_BUFFER_SIZE=2000" in out and "  MASTER_PORT: free on node 0 when this attempt began" in out
    assert main([*asked, "--json", "--", "x"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["order"]["emulated"] is False and "JAX_PROCESS_ID" in plan["set at the start"]
    assert main([*asked, "--nodes", "2", "--json", "--", "x"]) == 0
    assert json.loads(capsys.readouterr().out)["order"]["emulated"] is True
    assert main([*asked, "--nodes", "2", "--", "x"]) == 0
    out = capsys.readouterr().out
    assert (
        "2 emulated nodes x 2 ranks" in out and "the nodes are processes of one machine" in out and "MASTER_PORT" in out
    )


def test_json_is_the_whole_plan(lumi, capsys):
    assert main(["plan", "--json", "--root", lumi[0], "--root", lumi[1], "--", "x"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["order"]["nodes"] == 2 and len(plan["nodes"]) == 2
    assert plan["nodes"][0]["binding"]["slots"][0]["cpus"] == list(range(49, 56))
    assert {change["name"] for change in plan["differences"][0]["changes"]} >= {"MIOPEN_USER_DB_PATH"}


def test_only_what_changes_from_one_node_to_two(lumi, capsys):
    assert main(["plan", "--root", lumi[0], "--nodes", "2", "--against", "1", "--", "x"]) == 0
    out = capsys.readouterr().out
    assert "from 1 to 2 nodes" in out and "+ NCCL_NET=AWS Libfabric" in out and "127.0.0.1 -> 10.253.0.26" in out
    assert "OMP_NUM_THREADS" not in out, "it does not change"
    assert main(["plan", "--root", lumi[0], "--nodes", "2", "--against", "2", "--", "x"]) == 0
    assert "nothing changes" in capsys.readouterr().out


def test_on_a_login_node_it_says_who_decides(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["plan", "--site", "lumi", "--nodes", "2", "--", "python", "x.py"]) == 0
    out = capsys.readouterr().out
    here, there = out.split("decided on each node")
    assert "NCCL_SOCKET_IFNAME=hsn0" in here and "NCCL_DEBUG=INFO" in here
    assert "OMP_NUM_THREADS" in there and "NCCL_SOCKET_IFNAME" not in there
    assert main(["plan", "--site", "lumi", "--nodes", "2", "--against", "1", "--", "x"]) == 2


def test_the_nodes_of_an_earlier_run(lumi, tmp_path, capsys):
    for node, folder in enumerate(lumi):
        (tmp_path / f"nodes/{node}").mkdir(parents=True)
        (tmp_path / f"nodes/{node}/facts.json").write_text(to_json(gather(FolderHost(folder))))
    assert main(["plan", "--from-run", str(tmp_path), "--", "x"]) == 0
    assert "2 nodes x 8 ranks" in capsys.readouterr().out
    (tmp_path / "nodes/1/facts.json").write_text('{"host": 3}')
    assert main(["plan", "--from-run", str(tmp_path), "--", "x"]) == 2
    assert "node 1 cannot be read" in capsys.readouterr().err
    assert main(["plan", "--from-run", str(tmp_path / "nothing"), "--", "x"]) == 2


def test_a_run_that_was_emulated_is_planned_so_again(tmp_path, capsys):
    for node in range(2):
        (tmp_path / f"nodes/{node}").mkdir(parents=True)
        (tmp_path / f"nodes/{node}/facts.json").write_text(to_json(machine(4)))
    (tmp_path / "order.json").write_text(dump_order(order()))
    assert main(["plan", "--from-run", str(tmp_path), "--", "x"]) == 0
    out = capsys.readouterr().out
    assert "2 emulated nodes" in out and "node 1 (here) differs in:" in out


def test_an_error_in_the_plan_is_the_exit_code(lumi, capsys):
    assert main(["plan", "--root", lumi[0], "--ranks-per-node", "9", "--", "x"]) == 1
    assert "error: 1 of 9 ranks get no GPU" in capsys.readouterr().out
    assert main(["plan", "--root", lumi[0], "--root", lumi[1], "--nodes", "1", "--", "x"]) == 2


def test_this_machine(capsys):
    assert main(["plan", "--nodes", "2", "--", "python", "x.py"]) == 0
    out = capsys.readouterr().out
    assert "2 emulated nodes" in out and "GLOO_SOCKET_IFNAME=lo" in out


def test_doctor(lumi, capsys, tmp_path):
    assert main(["doctor", "--root", lumi[0]]) == 0
    out = capsys.readouterr().out
    assert "not looked at the drivers' error events: the kernel's log may not be read" in out
    assert out.startswith("nid005026: 0 errors, 0 warnings") and "ok: librccl-net.so 1.4.0 is here" in out
    broken = tmp_path / "broken"
    build("empty-gid", broken, 0)
    assert main(["doctor", "--json", "--root", str(broken)]) == 1
    found = json.loads(capsys.readouterr().out)[0]["findings"]
    assert found[0]["code"] == "gid-missing" and found[0]["support"]
    assert main(["doctor"]) in (0, 1), "this machine, whatever it is"
    host = tmp_path / "host.json"
    host.write_text(to_json(gather(FolderHost(str(broken)))))
    assert main(["doctor", "--root", str(broken), "--host-facts", str(host)]) == 1
    assert "is the host's own" in capsys.readouterr().out
    host.write_text("no")
    assert main(["doctor", "--root", str(broken), "--host-facts", str(host)]) == 2


def test_doctor_compares_nodes(lumi, capsys):
    main(["doctor", "--root", lumi[0], "--root", lumi[1]])
    assert "all nodes:" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lumi-g", "dgx-h100", "mi300x-thor2", "rcp-pod"])
@pytest.mark.parametrize("explain", [False, True])
def test_a_plan_fits_80_columns(name, explain):
    """All but what must stay whole to be copied: a variable with its value, a mask."""
    from drumbeat.plan.show import plan_lines
    from tests.plan.archetype import plans_of

    for line in plan_lines(plans_of(name)[0], explain, 80):
        assert len(line) <= 80 or " " not in line.strip() or "--cpu-bind" in line, line


def test_the_command_is_shown_and_what_is_replaced_in_it(lumi, capsys):
    words = ["torchrun", "--nnodes=2", "--node_rank", "0", "--standalone", "x.py", "--note", "a b"]
    assert main(["plan", "--root", lumi[0], "--root", lumi[1], "--", *words]) == 0
    out = capsys.readouterr().out
    assert "\ncommand   torchrun --nnodes=2 --node_rank 0 --standalone x.py --note 'a b'\n" in out
    assert "\nreplaced  --nnodes=2 --node_rank=0 --standalone: " in out
