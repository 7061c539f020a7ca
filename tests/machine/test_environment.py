import pytest

from drumbeat.machine import gather


@pytest.mark.parametrize(
    "name,value",
    [
        ("HF_TOKEN", "x"), ("AWS_SECRET_ACCESS_KEY", "x"), ("WANDB_API_KEY", "x"), ("PGPASSWORD", "x"),
        ("NCCL_X", "ghp_abcdef"), ("TORCH_Y", "AKIA1234"), ("UCX_Z", "eyJhbGciOiJIUzI1NiJ9.e30"), ("NCCL_URL", "http://u:p@h/"),
        ("PMIX_SERVER_KEY", "3f9a77c1"), ("SLURM_JWT", "x"), ("TORCH_CERT", "-----BEGIN PRIVATE KEY-----"),
        ("DB_PASSWORD", "x"), ("NCCL_LONG", "x" * 9000),
    ],
)  # fmt: skip
def test_what_looks_secret(name, value):
    assert gather.secret(name, value)
    assert gather.read({name: value}) == gather.for_capture({name: value}) == {}


@pytest.mark.parametrize(
    "name,value",
    [
        ("NCCL_IB_PKEY", "0"), ("TOKENIZERS_PARALLELISM", "false"), ("MASTER_ADDR", "n1"),
        ("ROCR_VISIBLE_DEVICES", "0,1"),
        ("MIOOPEN_USER_DB_PATH", "/tmp/x"), ("FI_CXI_RDZV_THRESHOLD", "0"), ("LD_LIBRARY_PATH", "/a:/b"),
        ("OMP_NUM_THREADS", "7"), ("CUDA_VISIBLE_DEVICES", ""), ("SLURM_NETWORK", "disable_rdzv_get"),
        ("PYTORCH_ROCM_DEVICE", "0"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
    ],
)  # fmt: skip
def test_what_matters_to_a_job(name, value):
    assert gather.read({name: value}) == {name: value}


def test_what_only_identity_needs_is_in_a_capture_and_not_in_facts():
    variables = {"SLURM_JOB_NODELIST": "n[1-2]", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": "/home/u"}
    assert gather.read(variables) == {}
    assert sorted(gather.for_capture(variables)) == ["KUBERNETES_SERVICE_HOST", "SLURM_JOB_NODELIST"]
