"""Runs that drumbeat did not start: what they printed is enough for the table."""

import pytest

from drumbeat.cli import main

SUMMARY = """\
Training Summary:
Total training time: {seconds} seconds
Throughput: {rate} images/second
Number of nodes: {nodes}
Number of GPUs per node: {each}
Total GPUs used: {gpus}
Training completed successfully.
"""


def printed(path, nodes, each, rate, seconds, wiggle=0.01, epochs=24):
    lines = []
    for epoch in range(1, epochs + 1):
        lines.append(f"Epoch {epoch}/{epochs} completed in {49152 / rate:.3f} seconds")
        lines.append(f"Validation Loss: 1.{200 - epoch}, Validation Accuracy: 0.7082")
        lines.append(f"Epoch Throughput: {rate * (1 + wiggle * (-1) ** epoch):.3f} images/second")
    text = SUMMARY.format(seconds=seconds, rate=rate, nodes=nodes, each=each, gpus=nodes * each)
    path.write_text("\n".join(lines) + "\n\n" + text + "Stopping GPU utilization monitoring...\n")
    return str(path)


@pytest.fixture
def family(tmp_path):
    return [
        printed(tmp_path / "one.out", 1, 1, 7367.0, 667.0),
        printed(tmp_path / "four.out", 1, 4, 37244.0, 132.4),
        printed(tmp_path / "eight.out", 2, 4, 63190.172, 77.784),
    ]


def test_the_table_of_a_family_of_runs(family, capsys):
    assert main(["report", *family[1:], "--table", "markdown"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| four.out | 1 | 4 | 37,244 | 1.00 | 100.0 % | 2 m 12 s | 0.7082 |",
        "| eight.out | 2 | 8 | 63,190 | 1.70 | 84.8 ± 0.5 % | 78 s | 0.7082 |",
    ]
    assert main(["compare", *reversed(family)]) == 0
    said = capsys.readouterr().out
    assert "baseline: one.out" in said and "scaling: not known" in said and "NOT A FAIR" not in said
    assert "four.out: 126% of ideal is more than the hardware grew" in " ".join(said.split())


def test_one_log(family, capsys):
    assert main(["report", family[2]]) == 0
    said = capsys.readouterr().out
    assert (
        "2 nodes, 8 ranks, 8 GPUs" in said and "63,190 samples/s" in said and "none set (last accuracy 0.7082)" in said
    )
    assert "MFU        not measured" in said and "GPU use    not measured" in said
    assert max(map(len, said.splitlines())) <= 80


def test_bad_input(tmp_path, capsys):
    (tmp_path / "noise.out").write_bytes(bytes(range(256)) * 40)
    assert main(["report", str(tmp_path / "noise.out")]) == 2
    assert "has no line with a metric that drumbeat knows" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing.out")]) == 2
    assert capsys.readouterr().err.count("\n") <= 2
    good = printed(tmp_path / "a.out", 1, 4, 100.0, 9.0)
    assert main(["report", good, str(tmp_path / "noise.out")]) == 2
    assert main(["report", good, "--table", "csv"]) == 2
    assert main(["compare", good]) == 2
    assert main(["report", good, good]) == 2, "a run is not compared with itself"
    assert "fewer than two" in capsys.readouterr().err
    assert main(["report", good, "--html", str(tmp_path / "no" / "such" / "x.html")]) == 2
