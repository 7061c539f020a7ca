"""drumbeat plan and drumbeat doctor, as they are typed."""

import json
from dataclasses import replace

import pytest

from drumbeat.base.order import dump_order
from drumbeat.base.record import from_json, to_json
from drumbeat.cli import main
from drumbeat.doctor.examine import compare, examine
from drumbeat.machine.gather import gather
from drumbeat.machine.model import Facts, Library, Peer, Peers
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
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["plan", "--site", "lumi", "--nodes", "2", "--", "python", "x.py"]) == 0
    out = capsys.readouterr().out
    here, there = out.split("decided on each node")
    assert "NCCL_SOCKET_IFNAME=hsn0" in here and "NCCL_DEBUG=INFO" in here
    assert "OMP_NUM_THREADS" in there and "NCCL_SOCKET_IFNAME" not in there
    assert main(["plan", "--site", "lumi", "--nodes", "2", "--against", "1", "--", "x"]) == 2


def later(out):
    """The settings that nodes decide: name -> the lines about it."""
    found, name = {}, ""
    for line in out.split("decided on each node")[1].split("\n\n")[0].splitlines()[1:]:
        if not line.startswith(" "):
            name = line.split(":")[0]
        found[name] = [*found.get(name, []), line.strip()]
    return found


def test_away_from_the_nodes_a_condition_begins_with_if_and_what_the_site_decides_has_none(capsys, tmp_path):
    job = tmp_path / "job.yaml"
    job.write_text("nodes: 2\naccount: p\ntime: 90m\ncontainer: /p/i.sif\ncaches: /p/cache\ncommand: python x.py\n")
    assert main(["plan", "--site", "lumi", str(job)]) == 0
    out = capsys.readouterr().out
    assert "HF_HOME=/p/cache/huggingface" in out.split("decided on each node")[0]
    job.write_text(job.read_text() + "env: {HF_HOME: /own}\n")
    assert main(["plan", "--site", "lumi", str(job)]) == 0
    own = capsys.readouterr().out
    assert "HF_HOME=/own" in own and "HF_HOME=/p" not in own
    for words in (
        "account   p",
        "time      1:30:00; comes back after it only if its ranks end with 75",
        "image     /p/i.sif, started with singularity",
        "binds     /pfs, ",
    ):
        assert words in out
    found = later(out)
    assert found["FI_CXI_DEFAULT_CQ_SIZE"][0].endswith(": 131072"), "the profile says which network this is"
    assert not any(line.startswith("if ") for line in found["FI_CXI_DEFAULT_CQ_SIZE"])
    assert found["NCCL_NET"][:2] == ["NCCL_NET: AWS Libfabric", "if NCCL's network plug-in is found"]
    assert "if ROCm is older than 6.2 or unknown" in found["NCCL_NET_GDR_LEVEL"]
    assert not {"FI_LOG_LEVEL", "MIOPEN_ENABLE_LOGGING"} & set(found), "the job asks for no trace"
    assert not {"NCCL_SOCKET_NTHREADS", "NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES", "FI_PROVIDER"} & set(found)
    assert not any("Pensando" in line for lines in found.values() for line in lines)
    assert main(["plan", "--site", "lumi", "--trace", str(job)]) == 0
    assert "FI_LOG_LEVEL: info" in later(capsys.readouterr().out)["FI_LOG_LEVEL"]
    assert main(["plan", "--site", "lumi", "--nodes", "1", "--caches", "/c", str(job)]) == 0
    assert not any(name.startswith(("FI_", "CXI_")) for name in later(capsys.readouterr().out)), "one node"


@pytest.mark.parametrize("site", ["lumi", "olivia"])
def test_explain_gives_the_sites_reasons_also_without_a_command(site, capsys):
    assert main(["plan", "--site", site, "--explain"]) == 0
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert text.startswith(f"every job on {site}, shown for 2 nodes") and not err
    assert "libfabric's CXI provider needs it" in text and "FI_MR_CACHE_MONITOR" in text
    if site == "lumi":
        assert "the first core of each CCD is kept for the system" in text and "nodes have no disk" in text
    else:
        assert "FI_CXI_RDZV_PROTO=alt_read takes effect only with it" in text
    assert main(["plan", "--site", site, "--", "x"]) == 0
    assert "from the site's profile" not in capsys.readouterr().out
    assert main(["plan", "--site", site]) == 2 and "the job has no command" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "code"), [("4", 1), ("8", 0), ("0", 0)])
def test_more_ranks_than_the_requested_gpus_are_told_before_any_node_is_known(gpus, code, capsys):
    words = ["plan", "--site", "lumi", "--nodes", "2", "--ranks-per-node", "8", "--gpus", gpus]
    assert main([*words, "--", "python", "x.py"]) == code
    assert capsys.readouterr().err.count("4 of 8 ranks have no GPU of their own") == code, "said once"
    assert main([*words, "--account", "a", "--time", "1h", "--render", "--", "python", "x.py"]) == 0
    assert ("4 of 8 ranks have no GPU of their own" in capsys.readouterr().err) is bool(code)


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
    assert "error: 1 of 9 ranks have no GPU of their own" in capsys.readouterr().out
    assert main(["plan", "--root", lumi[0], "--root", lumi[1], "--nodes", "1", "--", "x"]) == 2


def spoilt(name, folder, change):
    """Two nodes of a machine, captured, of which the second is changed."""
    for node in range(2):
        build(name, folder / f"tree{node}", node)
        (folder / f"nodes/{node}").mkdir(parents=True)
        facts = gather(FolderHost(str(folder / f"tree{node}")))
        (folder / f"nodes/{node}/facts.json").write_text(to_json(change(facts) if node else facts))
    return str(folder)


def no_gid(facts):
    return replace(facts, rdma=tuple(
        replace(one, ports=tuple(replace(port, gids=()) for port in one.ports)) for one in facts.rdma
    ))  # fmt: skip


def no_device(facts):
    return replace(facts, rdma=tuple(replace(one, openable=False) for one in facts.rdma))


def no_library(facts):
    kept = tuple(one for one in facts.libraries if not one.name.startswith("libibverbs"))
    return replace(facts, libraries=(*kept, Library("libibverbs.so.1", why_not="not on the library path")))


def ports_down(facts):
    return replace(facts, rdma=tuple(
        replace(one, ports=tuple(replace(port, state="DOWN") for port in one.ports)) for one in facts.rdma
    ))  # fmt: skip


def other_rccl(facts):
    return replace(facts, versions={**facts.versions, "rccl": "2.18.6"})


@pytest.mark.parametrize(
    "change, code",
    [
        (no_gid, "gid-missing"),
        (no_device, "rdma-device-hidden"),
        (no_library, "library-missing"),
        (ports_down, "rdma-all-down"),
        (other_rccl, "version-differs"),
    ],
)
def test_the_plan_says_what_the_doctor_and_preflight_say(tmp_path, capsys, change, code):
    run = spoilt("mi300x-thor2", tmp_path, change)
    assert main(["plan", "--json", "--from-run", run, "--", "x"]) == 1
    plan = json.loads(capsys.readouterr().out)
    between = [finding for finding in plan["findings"] if finding["severity"] == "error"]
    assert code in [finding["code"] for finding in [*plan["nodes"][1]["findings"], *between]]
    assert main(["plan", "--from-run", run, "--", "x"]) == 1
    assert "error: " in capsys.readouterr().out
    facts = [from_json(Facts, (tmp_path / f"nodes/{node}/facts.json").read_text()) for node in range(2)]
    peers = Peers(tuple(Peer(node, each.host, "", each) for node, each in enumerate(facts)), "", 0)
    assert code in [
        each.code for each in [*examine(facts[1], None, peers), *compare(peers)] if each.severity == "error"
    ]


def test_no_error_comes_with_the_advice_to_do_nothing(tmp_path, capsys):
    build("empty-gid", tmp_path, 0)
    assert main(["doctor", "--root", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "error: " in out and "do: nothing" not in out


def test_doctor_judges_pasted_dumps_of_one_node(tmp_path, capsys):
    (tmp_path / "topo.txt").write_text("\tGPU0\tmlx5_0\tmlx5_1\tCPU Affinity\nGPU0\t X \tPIX\tSYS\t0-7\n")
    (tmp_path / "ib.txt").write_text(
        "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Down\nCA 'mlx5_1'\n\tPort 1:\n\t\tState: Active\n"
    )
    assert main(["doctor", "--from", str(tmp_path / "topo.txt"), str(tmp_path / "ib.txt")]) == 0
    out = capsys.readouterr().out
    assert "mlx5_0 port 1, beside a GPU, is down" in out and "ib.txt:3: State: Down" in out
    assert main(["doctor", "--from", str(tmp_path / "none.txt")]) == 2
    (tmp_path / "ib.txt").write_text("hello\n")
    assert main(["doctor", "--from", str(tmp_path / "ib.txt")]) == 2


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


def test_variables_that_are_passed_on_are_shown_and_reasons_are_whole_in_a_pipe(lumi, tmp_path, capsys, monkeypatch):
    (tmp_path / "job.yaml").write_text("command: python train.py\nnodes: 2\nenv: {HF_TOKEN: pass}\n")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for place in (["--root", lumi[0]], ["--site", "dgx-h100"]):
        main(["plan", *place, str(tmp_path / "job.yaml")])
        out = capsys.readouterr().out
        assert "HF_TOKEN: handed on" in out and "hf_secret" not in out and "…\n" not in out
    assert "NCCL_IB_HCA: " in out and "anp" not in out, "AMD's plug-in on a site with NVIDIA GPUs"
    main(["plan", "--render", "--site", "slurm", str(tmp_path / "job.yaml")])
    assert "# Handed on from the shell that submits it: HF_TOKEN" in capsys.readouterr().out


def test_a_token_that_is_not_exported_here_is_a_warning_of_plan_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    job = tmp_path / "job.yaml"
    job.write_text("command: python train.py\naccount: a\ntime: 1h\nnodes: 2\nenv: {HF_TOKEN: pass}\n")
    for words in ([], ["--render"]):
        assert main(["plan", "--site", "lumi", *words, str(job)]) == 0
        assert capsys.readouterr().err.count("HF_TOKEN is to be passed on, but is not exported here") == 1
    for words in (["plan", "--save", str(tmp_path / "order.json")], ["submit"]):
        assert main([*words, "--site", "lumi", str(job)]) == 2
        assert "HF_TOKEN is to be passed on, but it is not exported here" in capsys.readouterr().err
