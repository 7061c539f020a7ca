"""`drumbeat verify` for real: one gloo world of two nodes with two ranks, shared by all tests here."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.conftest import SOURCE, need_torch

need_torch("needs torch")

OPS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"}


@pytest.fixture(scope="module")
def done(tmp_path_factory, cache):
    work = tmp_path_factory.mktemp("verify")
    (work / "tower.yaml").write_text(
        "summary: this machine\nemulated: true\nfloors: {broadcast: {busbw: 900000, source: a wish}}\n"
        "env: {GLOO_SOCKET_IFNAME: {value: lo, why: one machine}}\n"
    )
    env = {
        **os.environ,
        "HOME": str(work),
        "PYTHONPATH": SOURCE,
        "PYTHONWARNINGS": "error",
        "XDG_CACHE_HOME": str(cache),
    }
    words = ["verify", "--quick", "--json", "--nodes", "2", "--ranks-per-node", "2", "--site", "./tower.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "drumbeat", *words], cwd=work, env=env, capture_output=True, text=True, timeout=360
    )
    assert done.stdout, done.stderr
    return done


@pytest.fixture(scope="module")
def answer(done):
    return json.loads(done.stdout)


def said(answer, check):
    return next(verdict for verdict in answer["verdicts"] if verdict["check"] == check)


def test_it_ends_well_and_standard_output_is_json_alone(done, answer):
    assert done.returncode == 0, done.stderr
    assert answer["exit_code"] == 0 and answer["failure"] is None and answer["results"]["complete"]


def test_every_element_of_every_result_was_checked(answer):
    results = answer["results"]
    assert said(answer, "values")["answer"] == "right" and results["mistake_count"] == 0
    sizes = {(one["op"], one["dtype"]): one["bytes"] for one in results["collectives"]}
    assert {op for op, _ in sizes} == OPS and {dtype for _, dtype in sizes} == {"float32", "bfloat16"}
    outputs = 0
    for one in results["collectives"]:
        item = 4 if one["dtype"] == "float32" else 2
        here = one["bytes"] // item // (4 if one["op"] == "reduce_scatter" else 1)
        outputs += 4 * 2 * here  # on each of four ranks, once cold and once warm
    assert results["checked_elements"] == outputs


def test_bandwidths_follow_nccl_tests(answer):
    factors = {"all_reduce": 2 * 3 / 4, "broadcast": 1, "send_recv": 1}
    for one in answer["results"]["collectives"]:
        assert one["algbw"] == pytest.approx(one["bytes"] / one["seconds"] / 1e9, abs=1e-6)
        assert one["busbw"] == pytest.approx(one["algbw"] * factors.get(one["op"], 3 / 4), abs=2e-6)


def test_every_rank_met_its_partners(answer):
    met = {(pair["a"], pair["b"]): pair["kind"] for pair in answer["results"]["pairs"]}
    assert met == {(0, 1): "inside", (2, 3): "inside", (0, 2): "between", (1, 3): "between"}
    assert all(pair["a_to_b"] > 0 and pair["b_to_a"] > 0 and pair["wrong"] == 0 for pair in answer["results"]["pairs"])


def test_all_ranks_multiplied_alike(answer):
    ranks = answer["results"]["gemm"]["ranks"]
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3] and len({each["check"] for each in ranks}) == 1


def test_what_one_machine_cannot_tell_is_unknown(answer):
    for check in ("transport", "pairs", "bandwidth", "stragglers"):
        assert said(answer, check)["answer"] == "unknown", check
    assert all(row["ceiling"]["bound"] is None for row in answer["rows"])


def test_the_sites_floor_is_asked(answer):
    floor = said(answer, "floor")
    assert floor["answer"] == "missed" and floor["findings"][0]["severity"] == "warning", "quick is not the last word"


def test_the_run_folder_holds_script_results_verdicts_and_a_plot(answer):
    here = os.listdir(answer["folder"])
    assert {"verify.json", "verify.svg", "summary.json"} <= set(here)
    with open(os.path.join(answer["folder"], "verify.json"), encoding="utf-8") as file:
        assert json.load(file)["verdicts"] == answer["verdicts"]
    for node in (0, 1):
        assert "collective_test" in os.listdir(os.path.join(answer["folder"], "nodes", str(node), "attempt-0"))
    svg = ElementTree.parse(os.path.join(answer["folder"], "verify.svg")).getroot()
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(OPS) and all(len(line.get("points").split()) == 4 for line in lines)


def test_the_table_names_all_of_it(answer):
    from drumbeat.desk.start.verify import peers_of
    from drumbeat.runfolder.run import Run
    from drumbeat.verify.judge import judge, table

    peers = peers_of(Run.open(answer["folder"]))
    text = table(answer["results"], judge(answer["results"], peers, {}, True))
    assert all(op in text for op in OPS) and "4 ranks on 2 nodes" in text and "values: right" in text
