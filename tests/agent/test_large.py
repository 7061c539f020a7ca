"""Above 64 ranks, the ranks of a node share one log file: quotas count files."""


def test_a_handful_of_files_a_node(drumbeat):
    command = "echo hello $RANK; [ $RANK = 65 ] && { echo broken >&2; exit 3; }; sleep 20"
    done = drumbeat("run", "--nodes", 2, "--ranks-per-node", 33, "--oversubscribe", 40, "--", "sh", "-c", command)
    assert done.returncode == 3
    assert "hello 0\n" in done.stdout and "[65] hello 65\n" in done.stdout
    assert "[65] broken\n" in done.stderr and "/nodes/1/attempt-0/ranks.log\n" in done.stderr
    assert "/nodes/1/attempt-0/ranks.log:\n           broken\n" in drumbeat.here("status").stdout
    for node in (0, 1):
        files = [path for path in (drumbeat.run_folder() / f"nodes/{node}").rglob("*") if path.is_file()]
        assert len(files) <= 8, files
    assert drumbeat.here("logs", "--rank", 40).stdout == "hello 40\n"
