"""The numbers for Prometheus are kept only where somebody reads them."""

from drumbeat.cli.node_entry import _open_textfile


def test_numbers_are_published_into_a_folder_or_for_a_trainjob(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    assert _open_textfile("", str(tmp_path)) is None
    assert _open_textfile(str(tmp_path), str(tmp_path)) is not None
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:1")
    assert _open_textfile("", str(tmp_path)) is not None
